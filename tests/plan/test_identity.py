"""Which program a plan is for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alpa_lite.core.program import Program, Value
from alpa_lite.errors import PlanFileError
from alpa_lite.plan.identity import close_matches, fingerprint, op_text, verify_identity


def test_fingerprint_does_not_depend_on_the_source_place(program, moved_program):
    assert fingerprint(program) == fingerprint(moved_program)
    assert fingerprint(program).startswith("sha256:")


@pytest.mark.parametrize(
    "change",
    [
        lambda p: replace(p, donated=(False,) * 5),
        lambda p: replace(p, aliases=()),
        lambda p: replace(p, ops=(replace(p.ops[0], key="other"), *p.ops[1:])),
        lambda p: replace(p, ops=(*p.ops[:-1], replace(p.ops[-1], trip_count=4))),
        lambda p: replace(p, ops=(replace(p.ops[0], pinned="P('x')"), *p.ops[1:])),
        lambda p: replace(p, ops=(replace(p.ops[0], inputs=(0, 1)), *p.ops[1:])),
    ],
)
def test_fingerprint_sees_what_changes_the_computation(program, change):
    assert fingerprint(change(program)) != fingerprint(program)


def test_op_text(program):
    assert op_text(program, program.ops[0]) == "add(float32[4,4], float32[4,4]) -> float32[4,4]"
    assert op_text(program, program.ops[4]) == "scan x3(float32[8,4], float32[4,4]) -> float32[8,4]"
    literal = replace(program.ops[0], inputs=(0, -1))
    assert op_text(program, literal) == "add(float32[4,4], _) -> float32[4,4]"


def test_same_program_is_accepted_another_jax_warns(plan, moved_program):
    assert verify_identity(plan, moved_program, jax_version="0.10.2") == ()
    (warning,) = verify_identity(plan, moved_program, jax_version="0.12.0")
    assert "made with JAX 0.10.2, this is JAX 0.12.0; the traced program is the same" in warning


def refused(plan, program: Program, version: str = "0.10.2") -> str:
    with pytest.raises(PlanFileError) as caught:
        verify_identity(plan, program, jax_version=version)
    return str(caught.value)


def test_other_shape(plan, program):
    wide = Value(shape=(8, 8), dtype="float32", itemsize=4)
    message = refused(plan, replace(program, values=(wide, wide, *program.values[2:])))
    assert "argument '0/params/layers_0/kernel' was float32[4,4] and is float32[8,8] (and 1 more)" in message
    assert "first op that differs is op 0: add(float32[8,8], float32[8,8])" in message
    assert "(planned: op 0: add(float32[4,4]" in message
    assert "Make a new plan with `al.plan`" in message


def test_other_tree(plan, program):
    paths = ("0/params/dense/kernel", *program.input_paths[1:])
    message = refused(plan, replace(program, input_paths=paths))
    assert "arguments gone: '0/params/layers_0/kernel'" in message
    assert "arguments new: '0/params/dense/kernel'" in message


def test_other_results_and_order(plan, program):
    message = refused(plan, replace(program, output_paths=program.output_paths[::-1]))
    assert "results stand in another order" in message
    message = refused(plan, replace(program, outputs=program.outputs[:-1], output_paths=program.output_paths[:-1]))
    assert "results gone: 'out/1'" in message


def test_other_op_count_and_version(plan, program):
    message = refused(plan, replace(program, ops=program.ops[:-1]), "0.12.0")
    assert "6 ops were planned, the program has 4" in message
    assert "the plan was made with JAX 0.10.2, this is JAX 0.12.0" in message


def test_only_wiring_differs(plan, program):
    ops = (replace(program.ops[0], inputs=(0, 1)), *program.ops[1:])
    assert "shapes and ops agree, but how they are connected" in refused(plan, replace(program, ops=ops))


def test_close_matches():
    assert close_matches("0/params/kernal", ["0/params/kernel", "1/x"]) == " Close: '0/params/kernel'."
    assert close_matches("zzz", ["0/params/kernel"]) == ""
