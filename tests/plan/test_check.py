"""The verifier finds every kind of fault."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alpa_lite.core.conversion import Conversion, Step
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.plan.check import check_plan
from alpa_lite.plan.records import MemoryProfile

S = ShardingSpec.parse


def with_stage(plan, **changes):
    return replace(plan, stages=(replace(plan.stages[0], **changes),))


def with_input(plan, **changes):
    return replace(plan, inputs=(replace(plan.inputs[0], **changes), *plan.inputs[1:]))


def with_decision(plan, index, **changes):
    decisions = list(plan.stages[0].decisions)
    decisions[index] = replace(decisions[index], **changes)
    return with_stage(plan, decisions=tuple(decisions))


def with_collective(plan, **changes):
    return with_stage(plan, collectives=(replace(plan.collectives[0], **changes),))


def conversion(after: ShardingSpec, collective: int) -> Conversion:
    step = Step(kind=None, axes=("data",), target_dim=0, before=S("[_]"), after=after)
    return Conversion(op="0", value=3, steps=(step,), collectives=(collective,))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda p: replace(p, stages=()), "it has no stage"),
        (lambda p: replace(p, lower_bound=1.0), "lower bound 1.0 is above"),
        (lambda p: replace(p, objective=float("nan")), "must be finite"),
        (lambda p: replace(p, inputs=(*p.inputs, p.inputs[0])), "occurs 2 times"),
        (lambda p: with_input(p, stage=1), "stage 1 is not one of 1"),
        (lambda p: with_input(p, spec=S("[_,rows]")), r"uses \('rows',\)"),
        (lambda p: with_input(p, spec=S("[_]")), "has rank 1"),
        (lambda p: with_input(p, spec=S("[_,_]+{data}")), "is unreduced"),
        (lambda p: with_input(p, spec=S("[data.model,_]")), "does not divide"),
        (lambda p: with_stage(p, memory=MemoryProfile(parameters=-1)), "parameters is -1"),
        (lambda p: with_stage(p, memory=MemoryProfile(parameters=2, peak=1)), "above the peak"),
        (lambda p: with_stage(p, conversions=(conversion(S("[q]"), 0),)), "conversion of %3"),
        (lambda p: with_stage(p, conversions=(conversion(S("[_]"), 9),)), "does not have"),
        (lambda p: with_collective(p, axes=("q",)), "are not axes of"),
        (lambda p: with_collective(p, axes=()), "are not axes of"),
        (lambda p: with_collective(p, count=0), "count 0"),
        (lambda p: with_decision(p, 0, time_s=-1.0), "is no duration"),
        (lambda p: with_decision(p, 0, path="1"), "op 1 is decided 2 times"),
        (lambda p: with_decision(p, 0, path="77"), r"op 0 \(add\) is not decided"),
        (lambda p: with_decision(p, 5, operands=()), "op 4.0.0 .*: 0 operand specs for 2 operands"),
        (lambda p: with_decision(p, 5, results=(S("[_]"),)), "op 4.0.0 .*: result 0 is float32"),
        (lambda p: replace(p, outputs=p.outputs[1:]), "paths are not the program's"),
    ],
)
def test_faults(plan, program, change, fault):
    with pytest.raises(AssertionError, match=fault):
        check_plan(change(plan), program)


def test_an_op_outside_the_program(plan, program):
    with pytest.raises(AssertionError, match=r"op 4 is decided but not in the program"):
        check_plan(plan, replace(program, ops=program.ops[:-1]))


def test_the_bound_may_pass_the_objective_by_the_tolerance_of_the_solver(plan):
    check_plan(replace(plan, objective=1.0, lower_bound=1.0 + 1e-9))


def test_stages_lie_beside_each_other(plan):
    first = replace(plan.stages[0], submesh=(1, 8))
    check_plan(replace(plan, stages=(first, replace(first, first_device=8))))
    with pytest.raises(AssertionError, match="stage 1: device 4 belongs to stage 0 too"):
        check_plan(replace(plan, stages=(first, replace(first, first_device=4))))
    with pytest.raises(AssertionError, match=r"stage 1: its mesh .* is larger than its submesh \(1, 4\)"):
        check_plan(replace(plan, stages=(first, replace(first, first_device=8, submesh=(1, 4)))))
