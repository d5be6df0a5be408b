"""What print(plan) shows, what diff says, and how repeated layers are joined."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.plan.diff import diff
from alpa_lite.plan.grouping import group_paths
from alpa_lite.plan.records import MemoryProfile
from alpa_lite.plan.summary import summary


def test_print_plan(plan, golden):
    golden("plan_text", str(plan))


def test_print_stages(plan, golden):
    stage = plan.stages[0]
    second = replace(
        stage, layers=(2, 3), mesh=DeviceMesh(shape=(4,), axis_names=("data",)), decisions=(), conversions=()
    )
    second = replace(second, collectives=(replace(plan.collectives[1], tensor="1/x"),), submesh=(1, 4), first_device=8)
    x = replace(plan.inputs[-1], stage=1)
    two = replace(plan, stages=(replace(stage, layers=(0, 1)), second), inputs=(*plan.inputs[:-1], x), unit="alpa cost")
    golden("plan_text_stages", str(two))


def test_long_tables_are_summed_up(plan):
    stage = plan.stages[0]
    decisions = tuple(
        replace(d, path=str(i), op=f"op{i}() -> ", time_s=1.0) for i, d in enumerate(stage.decisions * 10)
    )
    collectives = tuple(replace(stage.collectives[0], source=f"train.py:{i}", count=1) for i in range(30))
    long = replace(plan, stages=(replace(stage, decisions=decisions, collectives=collectives),), notes=("n",) * 50)
    sections = {section.title: section for section in summary(long)}
    assert sections["Ops"].footer == "and 44 further groups: 44 ops, 44.0 s"
    assert sections["Collectives per step"].footer == (
        "and 6 further groups: 6 collectives, 384 B, 12.0 us; total: 30 collectives, 1.88 KiB, 60.0 us"
    )
    assert sections["Notes"].footer == "and 10 more, all in plan.notes"


def test_groups_join_only_what_is_equal():
    paths = [f"0/layers_{i}/{name}" for i in range(4) for name in ("kernel", "bias")] + ["1/layers_0/kernel"]
    keys = ["a", "c", "a", "c", "b", "c", "a", "c", "a"]
    labels = [(group.label, group.members) for group in group_paths(paths, keys)]
    assert labels == [
        ("0/layers_{0-1,3}/kernel", (0, 2, 6)),
        ("0/layers_*/bias", (1, 3, 5, 7)),
        ("0/layers_2/kernel", (4,)),
        ("1/layers_0/kernel", (8,)),
    ]


def test_groups_of_two_numbers():
    paths = [f"0/block{b}/head{h}/w" for b in range(2) for h in range(3)]
    assert [g.label for g in group_paths(paths, [0] * 6)] == ["0/block*/head*/w"]
    diagonal = [0, 1, 1, 1, 0, 1]
    assert [g.label for g in group_paths(paths, diagonal)] == ["0/block*/head*/w (2 of 6)", "0/block*/head*/w (4 of 6)"]
    columns = [0, 1, 1, 0, 1, 1]
    assert [g.label for g in group_paths(paths, columns)] == ["0/block{0-1}/head0/w", "0/block{0-1}/head{1-2}/w"]


@given(st.lists(st.tuples(st.sampled_from(["0/a{}/k", "0/a{}/b{}", "1", "out"]), st.integers(0, 9)), max_size=20))
def test_groups_are_a_partition(items):
    paths = list(dict.fromkeys(form.format(n, n) for form, n in items))
    groups = group_paths(paths, [len(path) % 2 for path in paths])
    assert sorted(m for g in groups for m in g.members) == list(range(len(paths)))
    assert all(len({len(paths[m]) % 2 for m in g.members}) == 1 for g in groups)


def test_diff_of_equal_plans(plan):
    assert diff(plan, plan) == "the plans are equal\n"
    assert (
        diff(plan, replace(plan, notes=())) == "the plans decide the same; they differ in notes, options or identity\n"
    )


def test_diff(plan, golden):
    stage = plan.stages[0]
    spec = ShardingSpec.parse("[data,model]")
    kernels = tuple(replace(leaf, spec=spec) for leaf in plan.inputs[:-1])
    decisions = (replace(stage.decisions[0], results=(spec,)), *stage.decisions[1:])
    collectives = (stage.collectives[0], replace(stage.collectives[1], kind=CollectiveKind.REDUCE_SCATTER))
    memory = MemoryProfile(parameters=32, inputs=64, activations=128, temporaries=64, peak=288)
    moved = replace(stage, decisions=decisions, collectives=collectives, memory=memory)
    after = replace(
        plan,
        stages=(moved,),
        inputs=(*kernels, replace(plan.inputs[-1], path="1/y")),
        objective=4e-5,
        lower_bound=4e-5,
        status="optimal",
    )
    golden("plan_diff", diff(plan, after))
