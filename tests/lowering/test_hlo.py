"""Collectives read from HLO text: printed forms that no machine here produces, and programs compiled here."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from alpa_lite.lowering import hlo_text
from alpa_lite.lowering.hlo import HloCollective, collectives_in
from alpa_lite.lowering.hlo_text import bits_of, parse_hlo, tensors_in

_SHORT = {
    "$META": 'op_name="jit(f)/(al_c3/psum:al_c12/psum)" source_file="/u/a.py" source_line=7',
    "$GLOBAL": "use_global_device_ids=true, to_apply=%add",
    "$PAIRS": "channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, use_global_device_ids=true",
    "$FOURS": "channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true",
    "$ALL": "channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true",
}


def module(body: str, *, before: str = "", partitions: int = 8) -> str:
    head = f"HloModule jit_f, is_scheduled=true, num_partitions={partitions}\n"
    add = "%add (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
    add += "  ROOT %s = f32[] add(%a, %b)\n}\n"
    entry = textwrap.indent(textwrap.dedent(body).strip(), "  ")
    text = f"{head}\n{add}\n{textwrap.dedent(before)}\nENTRY %main (p: f32[16,32]) -> f32[16,32] {{\n{entry}\n}}\n"
    for short, long in _SHORT.items():
        text = text.replace(short, long)
    return text


def summary(records: tuple[HloCollective, ...]) -> list[tuple[str, int, int]]:
    return [(r.kind, r.size_bytes, r.count) for r in records]


P0 = "%p = f32[16,32]{1,0} parameter(0)\n"


@pytest.mark.parametrize(
    ("dtype", "bits"), [("f32", 32), ("bf16", 16), ("pred", 8), ("f8e4m3fn", 8), ("s4", 4), ("c64", 64), ("token", 0)]
)
def test_bits(dtype: str, bits: int) -> None:
    assert bits_of(dtype) == bits


def test_types_with_layouts_tilings_and_nesting() -> None:
    text = "((f32[16,32]{1,0:T(8,128)(2,1)}, s4[3]{0:E(4)}), /*index=2*/pred[], f8e5m2[2,<=5]{1,0})"
    assert [(t.dtype, t.dims, t.size_bytes) for t in tensors_in(text)] == [
        ("f32", (16, 32), 2048),
        ("s4", (3,), 2),
        ("pred", (), 1),
        ("f8e5m2", (2, 5), 10),
    ]


def test_async_pairs_count_once_with_the_larger_side() -> None:
    text = module(
        P0
        + """\
        %ag = (f32[16,32]{1,0}, f32[32,32]{1,0}) all-gather-start(%p), $PAIRS, dimensions={0}
        %agd = f32[32,32]{1,0} all-gather-done(%ag)
        %cp = (f32[16,32]{1,0}, f32[16,32]{1,0}, u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}
        %cpd = f32[16,32]{1,0} collective-permute-done(%cp)
        %rs = ((f32[16,32]{1,0}), f32[8,32]{1,0}) reduce-scatter-start(%p), $PAIRS, dimensions={0}, to_apply=%add
        %rsd = f32[8,32]{1,0} reduce-scatter-done(%rs)
        %ar = f32[16,32]{1,0} all-reduce-start(%p), $ALL, to_apply=%add
        ROOT %ard = f32[16,32]{1,0} all-reduce-done(%ar)
        """.replace("        ", "")
    )
    assert summary(collectives_in(text)) == [
        ("all-gather", 4096, 1),
        ("collective-permute", 2048, 1),
        ("reduce-scatter", 2048, 1),
        ("all-reduce", 2048, 1),
    ]


def test_wrapped_async_computation_counts_once() -> None:
    text = module(
        P0
        + """\
%s = ((f32[16,32]{1,0}), f32[8,32]{1,0}, u32[]) async-start(%p), calls=%wrapped
%u = ((f32[16,32]{1,0}), f32[8,32]{1,0}, u32[]) async-update(%s), calls=%wrapped
ROOT %d = f32[8,32]{1,0} async-done(%u), calls=%wrapped
""",
        before="""\
%wrapped (q: f32[16,32]) -> f32[8,32] {
  %q = f32[16,32]{1,0} parameter(0)
  ROOT %rs = f32[8,32]{1,0} reduce-scatter(%q), $PAIRS, dimensions={0}, to_apply=%add
}
""",
    )
    assert summary(collectives_in(text)) == [("reduce-scatter", 2048, 1)]


def test_combined_collective_gives_one_record_per_tensor_with_all_names() -> None:
    text = module(
        P0
        + """\
%q = bf16[4]{0} parameter(1)
%ar = (f32[16,32]{1,0}, bf16[4]{0}) all-reduce(%p, %q), $FOURS, to_apply=%add, metadata={$META}
ROOT %g = f32[16,32]{1,0} get-tuple-element(%ar), index=0
"""
    )
    records = collectives_in(text)
    assert summary(records) == [("all-reduce", 2048, 1), ("all-reduce", 8, 1)]
    assert {r.keys for r in records} == {(3, 12)}
    assert {r.source for r in records} == {"/u/a.py:7"}
    assert records[0].joined == 2


def test_tuple_all_to_all_is_one_tensor_and_array_all_to_all_is_one_each() -> None:
    text = module(
        P0
        + """\
%h = f32[8,32]{1,0} slice(%p), slice={[0:8], [0:32]}
%t = (f32[8,32]{1,0}, f32[8,32]{1,0}) all-to-all(%h, %h), channel_id=1, replica_groups=[4,2]<=[8]
%v = (f32[16,32]{1,0}, f32[16,32]{1,0}) all-to-all(%p, %p), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}
ROOT %r = f32[16,32]{1,0} get-tuple-element(%v), index=0
"""
    )
    assert summary(collectives_in(text)) == [("all-to-all", 2048, 1)] + [("all-to-all", 2048, 1)] * 2


def test_degenerate_and_replica_groups() -> None:
    one_each = ",".join(f"{{{i}}}" for i in range(8))
    text = module(
        P0
        + f"""\
%a = f32[16,32]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={{{one_each}}}, $GLOBAL
%b = f32[16,32]{{1,0}} collective-permute(%a), channel_id=1, source_target_pairs={{{{0,0}},{{1,1}}}}
%c = f32[16,32]{{1,0}} all-reduce(%b), replica_groups={{{{0}}}}, to_apply=%add
ROOT %d = f32[16,32]{{1,0}} all-reduce(%c), channel_id=1, replica_groups={{{{0}}}}, to_apply=%add
"""
    )
    (record,) = collectives_in(text)  # only %d runs over more than one device: replica 0 of every partition
    assert record.instruction == "d"
    assert record.groups == (tuple(range(8)),)


def test_kinds_that_plans_do_not_use_are_recorded_too() -> None:
    text = module(
        P0
        + """\
%b = f32[16,32]{1,0} collective-broadcast(%p), channel_id=1, replica_groups={{0,1}}
%t = token[] after-all()
%s = (f32[16,32]{1,0}, u32[], token[]) send(%p, %t), channel_id=2, is_host_transfer=true
%r = f32[16,32]{1,0} ragged-all-to-all(%p, %p), channel_id=1, replica_groups={{0,1}}
"""
    )
    assert [r.kind for r in collectives_in(text)] == ["collective-broadcast", "ragged-all-to-all"]


LOOP = """\
%body (c: (s32[], f32[16,32])) -> (s32[], f32[16,32]) {
  %c = (s32[], f32[16,32]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %one = s32[] constant(2)
  %next = s32[] add(%i, %one)
  %x = f32[16,32]{1,0} get-tuple-element(%c), index=1
  %r = f32[16,32]{1,0} all-reduce(%x), $FOURS, to_apply=%add
  ROOT %t = (s32[], f32[16,32]{1,0}) tuple(%next, %r)
}

%wrapped_compare (l: s32[], m: s32[]) -> pred[] {
  %l = s32[] parameter(0)
  %m = s32[] parameter(1)
  ROOT %lt = pred[] compare(%l, %m), direction=LIMIT
}

%cond (d: (s32[], f32[16,32])) -> pred[] {
  %d = (s32[], f32[16,32]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%d), index=0
  %end = s32[] constant(10)
  ROOT %f = pred[] fusion(%j, %end), kind=kLoop, calls=%wrapped_compare
}
"""
LOOP_ENTRY = (
    P0
    + """\
%zero = s32[] constant(1)
%start = s32[] copy(%zero)
%init = (s32[], f32[16,32]{1,0}) tuple(%start, %p)
%w = (s32[], f32[16,32]{1,0}) while(%init), condition=%cond, body=%bodyCONFIG
ROOT %o = f32[16,32]{1,0} get-tuple-element(%w), index=1
"""
)


@pytest.mark.parametrize(
    ("limit", "config", "count", "known"),
    [
        ("LT", "", 5, True),  # 1, 3, 5, 7, 9
        ("LE", "", 5, True),
        ("NE", "", 1, False),
        ("LT", ', backend_config={"known_trip_count":{"n":"12"},"known_init_step":{"init":"0"}}', 12, True),
    ],
)
def test_trip_counts(limit: str, config: str, count: int, known: bool) -> None:
    text = module(LOOP_ENTRY.replace("CONFIG", config), before=LOOP.replace("LIMIT", limit))
    (record,) = collectives_in(text)
    assert (record.count, record.count_is_known) == (count, known)


def test_branches_count_once_each() -> None:
    branch = """\
%NAME (q: f32[16,32]) -> f32[16,32] {
  %q = f32[16,32]{1,0} parameter(0)
  ROOT %r = f32[16,32]{1,0} all-reduce(%q), $FOURS, to_apply=%add
}

"""
    text = module(
        P0
        + """\
%i = s32[] constant(0)
ROOT %c = f32[16,32]{1,0} conditional(%i, %p, %p), branch_computations={%left, %right}
""",
        before=branch.replace("NAME", "left") + branch.replace("NAME", "right"),
    )
    assert summary(collectives_in(text)) == [("all-reduce", 2048, 1)] * 2


def test_tensors_laid_end_to_end_are_seen_through_the_concatenate() -> None:
    text = module(
        P0
        + """\
%b = f32[512]{0} bitcast(%p)
%q = f32[100]{0} parameter(1)
%cat = f32[612]{0} fusion(%b, %q), kind=kLoop, calls=%wrapped_concatenate
%ar = f32[612]{0} all-reduce-start(%cat), $FOURS, to_apply=%add, metadata={scheduling_name="ar"}
%done = f32[612]{0} all-reduce-done(%ar)
%s0 = f32[512]{0} slice(%done), slice={[0:512]}
%r0 = f32[16,32]{1,0} bitcast(%s0), metadata={op_name="jit(f)/al_c4/psum"}
%s1 = f32[100]{0} slice(%done), slice={[512:612]}, metadata={op_name="jit(f)/al_c5/psum"}
ROOT %t = (f32[16,32]{1,0}, f32[100]{0}) tuple(%r0, %s1)
""",
        before="""\
%wrapped_concatenate (x: f32[512], y: f32[100]) -> f32[612] {
  %x = f32[512]{0} parameter(0)
  %y = f32[100]{0} parameter(1)
  ROOT %k = f32[612]{0} concatenate(%x, %y), dimensions={0}
}
""",
    )
    (record,) = collectives_in(text)
    assert record.parts == (512, 100)
    assert set(record.keys) == {4, 5}


def test_source_from_frame_tables_steps_over_this_package() -> None:
    text = module(
        P0
        + """\
ROOT %ar = f32[16,32]{1,0} all-reduce(%p), $FOURS, to_apply=%add, metadata={op_name="jit(f)/psum" stack_frame_id=2}
"""
    )
    tables = """
FileNames
1 "/u/train.py"
2 "PACKAGE/lowering/run.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=30 end_line=30 column=6 end_column=6}
2 {file_name_id=2 function_name_id=1 line=9 end_line=9 column=12 end_column=12}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

"""
    tables = tables.replace("PACKAGE", str(Path(hlo_text.__file__).parents[1]))
    head, _, rest = text.partition("\n")
    (record,) = collectives_in(f"{head}\n{tables}\n{rest}")
    assert record.source == "/u/train.py:30"


def test_text_that_is_not_hlo_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"ENTRY computation, got 5 characters that start with 'hello'; pass the whole"
    ):
        parse_hlo("hello")


def compiled_text(
    f: Callable[..., object], shape: tuple[int, ...], names: tuple[str, ...], *args: jax.ShapeDtypeStruct
) -> str:
    mesh = jax.make_mesh(shape, names)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(mapped).lower(*args).compile().as_text()


def test_a_compiled_loop_in_a_loop_multiplies_and_knows_its_line() -> None:
    def f(x: jax.Array) -> jax.Array:
        def inner(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            with jax.named_scope("al_c7"):
                return jax.lax.psum(jnp.sin(c), "x"), None

        def outer(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.scan(inner, c, None, length=3)[0], None

        return jax.lax.scan(outer, x, None, length=4)[0]

    text = compiled_text(f, (2, 4), ("x", "y"), jax.ShapeDtypeStruct((8, 4), jnp.float32))
    records = collectives_in(text)
    assert sum(r.count for r in records) == 12
    assert {r.keys for r in records} == {(7,)}
    assert all(re.search(r"test_hlo\.py:\d+$", r.source) for r in records)
    stripped = re.sub(r'"known_trip_count":\{"n":"\d+"\}', "", text)
    assert stripped != text
    assert sum(r.count for r in collectives_in(stripped)) == 12  # the same, derived from the conditions
