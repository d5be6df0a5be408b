"""The audit on programs with explicit collectives, compiled here, and on what XLA:GPU printed for such programs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from alpa_lite.core.collective import Collective, CollectiveKind
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.lowering.audit import AuditReport, audit
from alpa_lite.lowering.audit_forms import form_of
from alpa_lite.lowering.hlo import HloCollective

from .gpu_programs import JOINED_PLAN, PEELED_PLAN, PROGRAMS

AR, AG, RS, AA, CP = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_TO_ALL,
    CollectiveKind.COLLECTIVE_PERMUTE,
)
LINE = DeviceMesh(shape=(8,), axis_names=("x",))
GRID = DeviceMesh(shape=(2, 4), axis_names=("x", "y"))
CUBE = DeviceMesh(shape=(2, 2, 2), axis_names=("x", "y", "z"))
X = jax.ShapeDtypeStruct((16, 32), jnp.float32)
SIZE = 16 * 32 * 4

Step = Callable[..., object]


def plan(kind: CollectiveKind, axes: tuple[str, ...], size_bytes: int, count: int = 1) -> Collective:
    return Collective(kind=kind, axes=axes, size_bytes=size_bytes, count=count)


def scope(index: int) -> jax.named_scope:
    return jax.named_scope(f"al_c{index}")


def compiled(f: Step, mesh: DeviceMesh, *args: jax.ShapeDtypeStruct) -> str:
    mapped = jax.shard_map(
        f, mesh=jax.make_mesh(mesh.shape, mesh.axis_names), in_specs=P(), out_specs=P(), check_vma=False
    )
    return jax.jit(mapped).lower(*(args or (X,))).compile().as_text()


def forms(report: AuditReport) -> set[str]:
    return {match.form for match in report.matched if match.form}


def every_kind(axes: tuple[str, ...], n: int, *, named: bool) -> Step:
    """One collective of every kind along ``axes`` of ``n`` devices, sizes as in ``every_kind_plan``."""

    def at(index: int) -> jax.named_scope:
        return scope(index) if named else jax.named_scope("step")

    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        with at(0):
            a = jax.lax.psum(jnp.sin(x), axes)
        with at(1):
            b = jax.lax.all_gather(jnp.cos(x), axes, axis=1, tiled=True)
        with at(2):
            c = jax.lax.psum_scatter(jnp.tan(x), axes, scatter_dimension=1, tiled=True)
        with at(3):
            d = jax.lax.all_to_all(jnp.exp(x), axes, split_axis=0, concat_axis=1, tiled=True)
        with at(4):
            e = jax.lax.ppermute(jnp.tanh(x), axes, [(i, (i + 1) % n) for i in range(n)])
        return a, b, c, d, e

    return f


def every_kind_plan(axes: tuple[str, ...], n: int) -> tuple[Collective, ...]:
    sizes = {AR: SIZE, AG: SIZE * n, RS: SIZE, AA: SIZE, CP: SIZE}
    return tuple(plan(kind, axes, size) for kind, size in sizes.items())


@pytest.mark.medium
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("mesh", "axes"),
    [(LINE, ("x",)), (GRID, ("x",)), (GRID, ("y",)), (GRID, ("x", "y")), (CUBE, ("x", "z")), (CUBE, ("y",))],
)
def test_every_kind_over_every_mesh(mesh: DeviceMesh, axes: tuple[str, ...], named: bool) -> None:
    n = mesh.axes_size(axes)
    report = audit(every_kind_plan(axes, n), compiled(every_kind(axes, n, named=named), mesh), mesh)
    assert report.ok, str(report)
    assert not report.merged and not forms(report)
    assert [(m.planned, m.count) for m in sorted(report.matched, key=lambda m: m.planned)] == [(i, 1) for i in range(5)]
    assert {(t.kind, t.planned_count, t.planned_bytes) for t in report.totals} == {
        (t.kind, t.compiled_count, t.compiled_bytes) for t in report.totals
    }


@cache
def every_kind_over_y() -> str:
    return compiled(every_kind(("y",), 4, named=True), GRID)


WRONG = [
    (0, {"size_bytes": SIZE * 2}),  # bytes
    (0, {"axes": ("x",)}),  # axes
    (2, {"kind": AG}),  # kind
    (1, {"count": 2, "size_bytes": SIZE}),
    (4, {"axes": ("x", "y")}),
]


@pytest.mark.parametrize(("index", "change"), WRONG)
def test_a_wrong_plan_fails_both_ways_although_the_names_agree(index: int, change: dict[str, object]) -> None:
    planned = list(every_kind_plan(("y",), 4))
    planned[index] = replace(planned[index], **change)
    report = audit(planned, every_kind_over_y(), GRID)
    assert not report.ok
    assert [i for i, _ in report.missing] == [index]
    (unplanned,) = report.unplanned
    assert unplanned.collective.keys == (index,)
    assert "test_audit.py:" in unplanned.collective.source
    text = str(report)
    assert unplanned.source == unplanned.collective.source
    assert "NOT AS PLANNED" in text
    assert str(unplanned) in text and f"#{index} {planned[index].kind}" in text


def test_unplanned_is_listed_with_line_and_groups() -> None:
    hlo = compiled(lambda x: jax.lax.psum(x, "y"), GRID)
    halves = re.sub(r"replica_groups=.*?, use_", "replica_groups={{0,1},{2,3},{4,5},{6,7}}, use_", hlo)
    assert halves != hlo
    report = audit((plan(AR, ("y",), SIZE),), halves, GRID)
    assert [u.axes for u in report.unplanned] == [None]
    assert "device groups ((0, 1)" in str(report)
    assert report.missing == ((0, 1),)


def test_nothing_planned_and_nothing_compiled() -> None:
    report = audit((), compiled(jnp.sin, GRID), GRID)
    assert report.ok and "no collectives" in str(report)


def test_axes_of_size_one_and_empty_tensors_need_nothing() -> None:
    mesh = DeviceMesh(shape=(1, 8), axis_names=("x", "y"))

    def f(x: jax.Array) -> jax.Array:
        with scope(0):
            x = jax.lax.psum(x, "x")
        with scope(1):
            return jax.lax.psum(jnp.sin(x), ("x", "y"))

    planned = (plan(AR, ("x",), SIZE), plan(AR, ("x", "y"), SIZE), plan(AG, ("y",), 0))
    report = audit(planned, compiled(f, mesh), mesh)
    assert report.ok and report.free == (0, 2)
    assert [m.planned for m in report.matched] == [1]


def test_loops_count_their_iterations() -> None:
    def f(x: jax.Array) -> jax.Array:
        def body(c: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            with scope(0):
                c = jax.lax.psum(jnp.sin(c), "y")
            with scope(1):
                g = jax.lax.all_gather(c, "x", axis=0, tiled=True)
            return c, g.sum()

        return jax.lax.scan(body, x, None, length=5)

    text = compiled(f, GRID)
    planned = (plan(AR, ("y",), SIZE, 5), plan(AG, ("x",), 2 * SIZE, 5))
    assert audit(planned, text, GRID).ok
    fewer = audit((replace(planned[0], count=3), planned[1]), text, GRID)
    assert [(u.collective.kind, u.count) for u in fewer.unplanned] == [(AR, 2)]
    more = audit((replace(planned[0], count=6), planned[1]), text, GRID)
    assert [(m.planned, m.partner, m.count) for m in more.merged] == [(0, 0, 1)]
    assert "fewer executions of itself" in str(more)


def test_a_loop_of_unknown_length_takes_the_planned_count() -> None:
    def f(x: jax.Array) -> jax.Array:
        def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            with scope(0):
                return state[0] + 1, jax.lax.psum(jnp.sin(state[1]), "y")

        return jax.lax.while_loop(lambda s: s[0] < x[0, 0].astype(int), body, (0, x))[1]

    report = audit((plan(AR, ("y",), SIZE, 9),), compiled(f, GRID), GRID)
    assert report.ok and report.matched[0].count == 9
    assert not audit((), compiled(f, GRID), GRID).ok


def test_branches() -> None:
    def f(x: jax.Array) -> jax.Array:
        def left(x: jax.Array) -> jax.Array:
            with scope(0):
                return jax.lax.psum(jnp.sin(x), "x")

        return jax.lax.cond(x[0, 0] > 0, left, jnp.cos, x)

    assert audit((plan(AR, ("x",), SIZE),), compiled(f, GRID), GRID).ok


def test_equal_collectives_are_merged_with_their_partner() -> None:
    def f(x: jax.Array) -> jax.Array:
        with scope(0):
            a = jax.lax.psum(x, "y")
        with scope(1):
            b = jax.lax.psum(x, "y")
        with scope(2):
            c = jax.lax.all_gather(x, "x", axis=0, tiled=True)
        return a + jnp.sin(b), c

    planned = (plan(AR, ("y",), SIZE), plan(AR, ("y",), SIZE), plan(AG, ("x",), 2 * SIZE))
    report = audit(planned, compiled(f, GRID), GRID)
    assert report.ok, str(report)
    (merged,) = report.merged
    assert {merged.planned, merged.partner} == {0, 1}
    assert "Merged with an equal one" in str(report)
    dead = audit((*planned, plan(AR, ("y",), 8)), compiled(f, GRID), GRID)
    assert dead.missing == ((3, 1),)


def test_other_element_types_on_cpu() -> None:
    """XLA:CPU moves bf16 as f32, and f8 as f16."""

    def f(a: jax.Array, b: jax.Array, c: jax.Array) -> object:
        with scope(0):
            r = jax.lax.psum(a, "y")
        with scope(1):
            s = jax.lax.psum_scatter(a, "y", tiled=True)
        with scope(2):
            t = jax.lax.all_gather(b, "x", tiled=True)
        with scope(3):
            u = jax.lax.pmax(a, "x")
        with scope(4):
            v = jax.lax.psum(c, "x")
        return r, s, t, u, v

    args = [jax.ShapeDtypeStruct((16, 32), d) for d in (jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8)]
    half, byte = SIZE // 2, SIZE // 4
    planned = (
        plan(AR, ("y",), half),
        plan(RS, ("y",), half),
        plan(AG, ("x",), 2 * byte),
        plan(AR, ("x",), half),
        plan(AR, ("x",), byte),
    )
    text = compiled(f, GRID, *args)
    report = audit(planned, text, GRID)
    assert report.ok, str(report)
    assert "moved as f32, planned as bf16" in forms(report)
    unnamed = audit(planned, text.replace("al_c", "xx_c"), GRID)
    assert unnamed.ok, str(unnamed)
    wrong = audit((plan(AR, ("y",), half + 64), *planned[1:]), text, GRID)
    assert [i for i, _ in wrong.missing] == [0]


def test_combined_all_reduces_match_per_tensor() -> None:
    """XLA:CPU combines them into one variadic all-reduce."""

    def f(x: jax.Array) -> object:
        parts = []
        for i in range(6):
            with scope(i):
                parts.append(jax.lax.psum(jnp.sin(x[: i + 1]), "y"))
        return parts

    planned = tuple(plan(AR, ("y",), SIZE // 16 * (i + 1)) for i in range(6))
    report = audit(planned, compiled(f, GRID), GRID)
    assert report.ok and len({c.instruction for c in report.compiled}) == 1
    assert sorted(m.planned for m in report.matched) == list(range(6))


def collective(kind: str, size_bytes: int, *, dtype: str = "f32", near: tuple[str, ...] = ()) -> HloCollective:
    elements = size_bytes // {"f32": 4, "bf16": 2, "s4": 1}[dtype] * (2 if dtype == "s4" else 1)
    return HloCollective(
        kind=kind, groups=(), size_bytes=size_bytes, dtype=dtype, elements=elements, near=frozenset(near)
    )


@pytest.mark.parametrize(
    ("planned", "found", "named", "form"),
    [
        (plan(RS, ("x",), 64), collective("all-reduce", 64, near=("dynamic-slice",)), False, "all-reduce and slice"),
        (plan(RS, ("x",), 64), collective("all-reduce", 64), False, None),
        (plan(RS, ("x",), 64), collective("all-reduce", 64), True, "all-reduce and slice"),
        (plan(AR, ("x",), 64), collective("reduce-scatter", 64), False, "reduce-scatter: only a slice is used"),
        (plan(AG, ("x",), 64), collective("all-reduce", 64, near=("pad",)), False, "all-reduce of padded tiles"),
        (plan(AG, ("x",), 64), collective("all-to-all", 64), True, None),
        (plan(AR, ("x",), 32), collective("all-reduce", 64), False, None),
        (plan(AR, ("x",), 32), collective("all-reduce", 64), True, "moved as f32, planned as bf16"),
        (plan(AR, ("x",), 128), collective("all-reduce", 64), True, None),
        (plan(AG, ("x",), 128), collective("all-gather", 64, dtype="bf16"), True, None),
        (
            plan(AG, ("x",), 128),
            collective("all-gather", 64, dtype="bf16", near=("convert:f32",)),
            False,
            "moved as bf16, planned as f32",
        ),
        (plan(AR, ("x",), 48), collective("all-reduce", 64), True, None),
        (
            plan(RS, ("x",), 32),
            collective("all-reduce", 64, near=("slice", "convert:bf16")),
            False,
            "all-reduce and slice, moved as f32, planned as bf16",
        ),
        (plan(AG, ("x",), 64), collective("all-gather", 32, dtype="s4"), False, "moved as packed s4"),
    ],
)
def test_legal_forms_need_evidence(planned: Collective, found: HloCollective, named: bool, form: str | None) -> None:
    result = form_of(planned, found, named=named, dtypes=frozenset({"bf16", "f32"}))
    assert (result is None) if form is None else (result is not None and result.startswith(form))


def test_all_reduce_and_slice_counts_as_the_planned_reduce_scatter_and_says_so() -> None:
    """What sharding constraints (not explicit collectives) compile to on XLA:CPU."""

    def f(x: jax.Array) -> jax.Array:
        total = jax.lax.psum(jnp.sin(x), "y")
        return jax.lax.dynamic_slice_in_dim(total, jax.lax.axis_index("y") * 4, 4, 0)

    report = audit((plan(RS, ("y",), SIZE),), compiled(f, GRID), GRID)
    assert report.ok and forms(report) == {"all-reduce and slice"}
    assert "1 x all-reduce and slice" in str(report)
    assert [(t.kind, t.planned_count, t.compiled_count) for t in report.totals] == [(AR, 0, 1), (RS, 1, 0)]


PRINTED = Path(__file__).parent / "hlo"


@pytest.mark.parametrize("name", ["gpu_joined", "gpu_peeled"])
def test_programs_that_xla_gpu_rewrote(name: str) -> None:
    planned = PROGRAMS[name][2]
    text = (PRINTED / f"{name}.txt").read_text()
    report = audit(planned, text, GRID)
    assert report.ok, str(report)
    for index in range(len(planned)):
        others = [p for i, p in enumerate(planned) if i != index]
        if planned[index] not in others:  # else it is the partner that goes unfound, as an equal one
            assert not audit(others, text, GRID).ok, f"#{index} {planned[index]} is not needed"


def test_what_xla_gpu_did() -> None:
    joined = audit(JOINED_PLAN, (PRINTED / "gpu_joined.txt").read_text(), GRID)
    assert any(form.startswith("one all-reduce over x+y for #") for form in forms(joined))
    assert "moved as bf16, planned as f32" in forms(joined)  # the conversion went behind the all-gather
    pairs = {frozenset((m.planned, m.partner)) for m in joined.merged}
    assert pairs == {frozenset((8, 9)), frozenset((10, 11))}
    assert any(c.joined > 1 and c.kind == AR for c in joined.compiled)  # laid end to end in one buffer
    peeled = audit(PEELED_PLAN, (PRINTED / "gpu_peeled.txt").read_text(), GRID)
    assert {c.count for c in peeled.compiled} >= {1, 6}  # 7 iterations, one of them peeled


def test_a_joined_buffer_is_taken_apart_although_its_size_is_planned_within_the_tolerance() -> None:
    """XLA:GPU lays the gradients and the loss end to end; the loss is far below 1 % of the buffer."""
    body = """HloModule jit_f, num_partitions=8

ENTRY %main (p: f32[5000], q: f32[1]) -> f32[5001] {
  %p = f32[5000]{0} parameter(0)
  %q = f32[1]{0} parameter(1)
  %joined = f32[5001]{0} concatenate(%p, %q), dimensions={0}NAME
  ROOT %ar = f32[5001]{0} all-reduce(%joined), channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true
}
"""
    parts = (plan(AR, ("x",), 20000), plan(AR, ("x",), 4))
    assert audit(parts, body.replace("NAME", ""), LINE).ok
    whole = (plan(AR, ("x",), 20004),)
    own = body.replace("NAME", ', metadata={op_name="jit(f)/concatenate"}')  # the user's own concatenate
    assert audit(whole, own, LINE).ok
    assert not audit(parts[1:], body.replace("NAME", ""), LINE).ok


def test_source_of_a_collective_that_lowering_wrote_is_the_planned_ones() -> None:
    """The traceback of a lowered collective may hold nothing but this package's lines."""
    hlo = re.sub(r" stack_frame_id=\d+", "", compiled(every_kind(("y",), 4, named=True), GRID))
    planned = [
        replace(p, source=f"train.py:{i}", size_bytes=p.size_bytes * 3)
        for i, p in enumerate(every_kind_plan(("y",), 4))
    ]
    report = audit(planned, hlo, GRID)
    assert sorted(u.source for u in report.unplanned) == [f"train.py:{i}" for i in range(5)]
    assert "at train.py:3 (" in str(report)
