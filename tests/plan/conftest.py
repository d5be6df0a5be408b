"""A small program with a scan, and a plan for it, both made by hand."""

from __future__ import annotations

import math

import pytest

from alpa_lite.core.collective import Collective, CollectiveKind
from alpa_lite.core.conversion import Conversion, Step
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Op, Program, Value, check_program
from alpa_lite.core.rule import Factor, FactorKind, OpShardingRule
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.plan.check import check_plan
from alpa_lite.plan.identity import fingerprint, op_text
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import (
    Leaf,
    LeafRole,
    MemoryProfile,
    MeshCandidate,
    OpDecision,
    Padding,
    PlanIdentity,
    Rematerialisation,
    SearchStep,
    StageCount,
    StagePlan,
)

GATHER = Step(
    kind=CollectiveKind.ALL_GATHER,
    axes=("data",),
    source_dim=0,
    before=ShardingSpec.parse("[data,_]"),
    after=ShardingSpec.parse("[_,_]"),
)

MATMUL = OpShardingRule(
    operands=(((0,), (2,)), ((2,), (1,))),
    results=(((0,), (1,)),),
    factors=(Factor(size=8), Factor(size=4), Factor(size=4, kind=FactorKind.REDUCTION)),
    reduce_op="add",
)
ADD = OpShardingRule(
    operands=(((0,), (1,)), ((0,), (1,))), results=(((0,), (1,)),), factors=(Factor(size=4), Factor(size=4))
)
SCAN = OpShardingRule(
    operands=(((0,), (1,)), ((0,), (1,))), results=(((0,), (1,)),), factors=(Factor(size=8), Factor(size=4))
)


def value(*shape: int) -> Value:
    return Value(shape=shape, dtype="float32", itemsize=4)


def make_program(source: str = "train.py:3 (step)") -> Program:
    """Four layers' kernels, x, then new_kernel = kernel + kernel and a scan of 3 matmuls."""
    body = Program(
        values=(value(8, 4), value(4, 4), value(8, 4)),
        ops=(Op(primitive="dot_general", inputs=(0, 1), outputs=(2,), rule=MATMUL, key="dot", source=source),),
        inputs=(0, 1),
        outputs=(2,),
    )
    kernels = range(4)
    adds = [
        Op(primitive="add", inputs=(k, k), outputs=(5 + k,), rule=ADD, key="add", source=source, elementwise=True)
        for k in kernels
    ]
    scan = Op(
        primitive="scan",
        inputs=(4, 0),
        outputs=(9,),
        rule=SCAN,
        key="scan",
        bodies=(body,),
        num_consts=1,
        num_carry=1,
        trip_count=3,
        source=source,
    )
    return Program(
        values=(*(value(4, 4) for _ in kernels), value(8, 4), *(value(4, 4) for _ in kernels), value(8, 4)),
        ops=(*adds, scan),
        inputs=(0, 1, 2, 3, 4),
        outputs=(5, 6, 7, 8, 9),
        input_paths=(*(f"0/params/layers_{k}/kernel" for k in kernels), "1/x"),
        output_paths=(*(f"out/0/params/layers_{k}/kernel" for k in kernels), "out/1"),
        donated=(True, True, True, True, False),
        aliases=tuple((k, k) for k in kernels),
    )


def _leaves(program: Program) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    kernel, x = ShardingSpec.parse("[_,model]"), ShardingSpec.parse("[data,_]")
    inputs = tuple(
        Leaf(
            path=path,
            value=program.values[i],
            spec=kernel if "kernel" in path else x,
            role=LeafRole.PARAMETER if "kernel" in path else LeafRole.INPUT,
            pin="0/params/*/kernel" if "kernel" in path else "",
        )
        for i, path in zip(program.inputs, program.input_paths, strict=True)
    )
    outputs = tuple(
        Leaf(
            path=path,
            value=program.values[i],
            spec=kernel if "kernel" in path else x,
            role=LeafRole.PARAMETER if "kernel" in path else LeafRole.OUTPUT,
        )
        for i, path in zip(program.outputs, program.output_paths, strict=True)
    )
    return inputs, outputs


def _decisions(program: Program) -> tuple[OpDecision, ...]:
    rows = {"add": ("[_,model]", "[_,model]", "[_,model]", 1e-6), "scan": ("[data,_]", "[_,model]", "[data,_]", 0.0)}
    rows["dot_general"] = ("[data,_]", "[_,model]", "[data,model]", 3e-5)
    decisions = []
    for path, owner, op in program.walk():
        first, second, result, time_s = rows[op.primitive]
        specs = (ShardingSpec.parse(first), ShardingSpec.parse(second))
        decisions.append(
            OpDecision(
                path=path,
                op=op_text(owner, op),
                operands=specs,
                results=(ShardingSpec.parse(result),),
                time_s=time_s,
            )
        )
    return tuple(decisions)


def make_plan(program: Program) -> Plan:
    mesh = DeviceMesh(shape=(2, 4), axis_names=("data", "model"))
    inputs, outputs = _leaves(program)
    gather = Collective(
        kind=CollectiveKind.ALL_GATHER,
        axes=("model",),
        size_bytes=64,
        count=3,
        time_s=2e-6,
        op="4.0.0",
        source="/home/user/train.py:3 (step)",
        tensor="%2",
    )
    reduce = Collective(
        kind=CollectiveKind.ALL_REDUCE,
        axes=("data",),
        size_bytes=16,
        time_s=4e-6,
        op="0",
        source="/home/user/train.py:9 (step)",
        tensor="0/params/layers_0/kernel",
    )
    stage = StagePlan(
        mesh=mesh,
        submesh=(1, 8),
        memory=MemoryProfile(parameters=64, inputs=64, activations=128, temporaries=64, peak=320),
        collectives=(gather, reduce),
        decisions=_decisions(program),
        conversions=(Conversion(op="0", value=0, steps=(GATHER,), collectives=(0,), made_by="in", cost=4e-5),),
        compute_s=3.4e-5,
    )
    other = DeviceMesh(shape=(8, 1), axis_names=("data", "model"))
    return Plan(
        stages=(stage,),
        objective=4.4e-5,
        lower_bound=4.3e-5,
        status="time limit",
        stage_counts=(
            StageCount(num_stages=1, status="no plan fits the memory"),
            StageCount(num_stages=2, objective=4.4e-05, bubble_share=0.25, status="planned"),
            StageCount(num_stages=4, objective=5e-05, bubble_share=0.5, status="estimated"),
        ),
        mesh_table=(
            MeshCandidate(mesh=mesh, objective=4.4e-5, lower_bound=4.3e-5, peak_bytes=320, status="time limit"),
            MeshCandidate(mesh=other, status="ruled out", reason="1/x: dim 0 of 8 does not divide"),
        ),
        inputs=inputs,
        outputs=outputs,
        identity=PlanIdentity(
            fingerprint=fingerprint(program), cluster="1x8:cpu", jax_version="0.10.2", alpa_lite_version="0.1.0"
        ),
        options=(("memory_budget_bytes", 4096), ("forbid", ("all-to-all",)), ("remat", "auto")),
        pins=(("0/params/*/kernel", "P(None, 'model')"),),
        search=(
            SearchStep(objective=5e-5, lower_bound=-math.inf, found_by="greedy"),
            SearchStep(objective=4.4e-5, lower_bound=4.3e-5, found_by="search"),
        ),
        paddings=(
            Padding(
                dim="1/x dim 1",
                size=3,
                padded=4,
                shards=4,
                waste_bytes=8,
                waste_s=1e-7,
                pins=((4, "[_,model]"),),
                without=5e-5,
            ),
        ),
        remat=Rematerialisation(num_layers=6, layers=(0, 1, 2, 4), saved=("hidden",)),
        notes=("0/params/layers_0/kernel: dim 0 of size 4 ruled out for axis 'data'", "top_k is replicated"),
    )


@pytest.fixture
def program() -> Program:
    result = make_program()
    check_program(result)
    return result


@pytest.fixture
def moved_program() -> Program:
    """The same function, written elsewhere."""
    return make_program(source="/somewhere/else/train.py:300 (step)")


@pytest.fixture
def plan(program: Program) -> Plan:
    result = make_plan(program)
    check_plan(result, program)
    return result
