"""Every rule family: random strategies on random meshes compute what the unsharded op computes."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from alpa_lite.trace import rules
from alpa_lite.trace.program import trace
from tests.harness import MESHES, check, draw
from tests.trace import dense_cases as dense
from tests.trace import indexed_cases as indexed
from tests.trace import program_cases as programs
from tests.trace.cases import Case, floats

FAMILIES: dict[str, Callable[[], dict[str, Case]]] = {
    f.__name__: f
    for f in (
        dense.elementwise,
        dense.shapes,
        indexed.slices,
        dense.contractions,
        dense.convolutions,
        dense.reductions,
        dense.scans_along_a_dim,
        indexed.gathers,
        indexed.scatters,
        programs.random_numbers,
        dense.windows,
        dense.linear_algebra,
        programs.control_flow,
        programs.partial_sums,
    )
}
NAMES = [(family, name) for family, make in FAMILIES.items() for name in make()]


def _mesh_of(family: str, name: str) -> tuple[int, ...]:
    """One mesh per case, spread evenly and the same in every run."""
    return MESHES[1 + zlib.crc32(f"{family}/{name}".encode()) % 2]


# Compiling takes seconds: these run with the many below only.
COSTLY = frozenset(
    """
    softmax_gradient gelu_gradient unaligned associative dynamic_update_gradient slice_gradient batched_gradient
    strided_gradient grouped_gradient transposed dilated depthwise mean_gradient norms cummax cumlogsumexp sort_gradient
    mode_wrap_gradient mode_clip_gradient points_with_slice along_axis_gradient set_gradient add_gradient segment_max
    raw_key_normal raw_key_uniform raw_key_split raw_key_bernoulli key_split integers permutation categorical gumbel_half
    gamma max_overlap_gradient average_gradient cholesky_gradient solve inverse eigh fft_2d scan_of_remat scan_reversed
    nested cond_gradient scaled linear joined compared concatenated one_dim average_same
    """.split()  # noqa: SIM905
)
# What `make check` runs: some of each family that are compiled in half a second. `make test` also runs every second of those
# that are not costly; all are among the many below.
QUICK = frozenset(
    """
    binary clamp select split regroup stack pad dynamic_slice dynamic_update_slice matmul vector outer strides pointwise
    sum_integer logical bits sort_pairs top_1 approximate_top_k one_hot points windows mode_promise set_scalar min
    columns_set bincount mode_clip_set key_uniform result_key max_overlap qr scan_of_partial_sums while_with_constants cond
    barrier ones updated pooled
    """.split()  # noqa: SIM905
)
CASES = [
    pytest.param(f, n, id=f"{f}-{n}", marks=[] if n in QUICK else [pytest.mark.medium])
    for number, (f, n) in enumerate(NAMES)
    if n in QUICK or (n not in COSTLY and number % 8 == 1)
]


def test_every_family_has_a_quick_case():
    assert {f for f, n in NAMES if n in QUICK} == FAMILIES.keys()


@pytest.mark.medium
@pytest.mark.parametrize(("family", "name"), CASES)
def test_random_strategies_compute_the_same(family, name):
    fn, args = FAMILIES[family]()[name]
    check(fn, args, _mesh_of(family, name), seeds=(0,))


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize(("family", "name"), NAMES, ids=[f"{f}-{n}" for f, n in NAMES])
def test_many_random_strategies_compute_the_same(family, name, shape):
    fn, args = FAMILIES[family]()[name]
    check(fn, args, shape, seeds=range(10, 18))


def test_a_wrong_rule_is_noticed(monkeypatch):
    """The property test can fail: exp is not linear, a cumulative sum does depend on the rows before."""
    import alpa_lite.trace.linearity as linearity

    a, b = floats(8, 16), floats(16, 8) * 0.1
    monkeypatch.setattr(linearity, "_LINEAR_FIRST", linearity._LINEAR_FIRST | {"exp"})

    def fn(a, b):
        return jnp.exp(a @ b)

    drawn = draw(trace(fn, (a, b), {}), (2, 4), range(40))
    seed = next(i for i, d in enumerate(drawn) if d.realised.decisions[1].operands[0].unreduced)
    with pytest.raises(AssertionError, match="differs"):
        check(fn, (a, b), (2, 4), seeds=[seed])


@pytest.mark.medium
def test_a_blocked_dim_is_noticed(monkeypatch):
    import alpa_lite.trace.blocked as blocked

    monkeypatch.setattr(blocked, "_blocked_in_convolution", lambda op, rule: [])
    fn, args = dense.convolutions()["strided_gradient"]
    with pytest.raises(AssertionError, match="differs"):
        check(fn, args, (2, 4), seeds=range(2))


@pytest.mark.parametrize(
    ("fn", "linear"),
    [
        (lambda x: jnp.exp(x), False),
        (lambda x: x * 2.0, True),
        (lambda x: x + 1.0, False),
        (lambda x: x + 0.0, True),
        (lambda x: 1.0 - x, False),
        (lambda x: x / 3.0, True),
        (lambda x: 3.0 / x, False),
        (lambda x: x.astype(jnp.bfloat16), False),
        (lambda x: x.astype(jnp.float8_e4m3fn), False),
        (lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32), False),
        (lambda x: x.T, True),
        (lambda x: jnp.abs(x), False),
        (lambda x: jnp.maximum(x, 0.0), False),
        (lambda x: lax.clamp(0.0, x, 1.0), False),
        (lambda x: lax.pad(x, jnp.float32(0), [(1, 0, 0), (0, 0, 0)]), True),
        (lambda x: lax.pad(x, jnp.float32(1), [(1, 0, 0), (0, 0, 0)]), False),
        (lambda x: lax.div(x.astype(jnp.int32), jnp.int32(2)), False),
        (lambda x: x.at[jnp.array([1, 9])].get(mode="fill", fill_value=1.0), False),
        (lambda x: x.at[jnp.array([1, 9])].get(mode="fill", fill_value=0.0), True),
        (lambda x: jnp.sort(x), False),
        (lambda x: jnp.cumsum(x, 0), True),
    ],
)
def test_partial_sums_pass_linear_ops_only(fn, linear):
    program = trace(fn, (floats(8, 8),), {}).program
    (op,) = [op for op in program.ops if 0 in program.outputs or program.outputs[0] in op.outputs]
    assert bool([g for g in op.rule.linear if g]) is linear, f"{op.primitive} {op.rule}"


def test_truth_values_are_never_partial_sums():
    def fn(x):
        return jnp.where(x > 0, jnp.zeros(x.shape, bool), x < 1)

    program = trace(fn, (jax.ShapeDtypeStruct((8, 8), "float32"),), {}).program
    assert all(not op.rule.linear for op in program.ops)


def test_a_slice_that_starts_too_late_is_clamped_before_it_is_cut_into_tiles():
    fn, args = indexed.slices()["dynamic_slice_clamps"]
    check(fn, args, (2, 2, 2), seeds=[10])


@pytest.mark.parametrize("strides", [None, (2, 1, 1)])
def test_a_slice_has_the_rule_of_the_slice_of_the_same_shape_elsewhere(strides):
    """Of all starts only one is asked for; here each is, alone."""
    sizes, shape = (2, 6, 1), (8, 6, 4)
    found = {}
    for start in range(5):
        for last in range(4):
            stop = [start + (sizes[0] - 1) * (strides or (1,))[0] + 1, 6, last + 1]
            fn = lambda x, start=start, last=last, stop=stop: lax.slice(x, (start, 0, last), stop, strides)  # noqa: E731
            (op,) = trace(fn, (jnp.zeros(shape),), {}).program.ops
            found[start, last] = op.rule
    assert len(found) == 20 and len(set(map(str, found.values()))) == 1


def test_functions_that_share_what_is_known_ask_for_an_op_once(monkeypatch):
    asked = []
    ask = rules._ask_shardy
    monkeypatch.setattr(rules, "_ask_shardy", lambda ops: asked.append(len(ops)) or ask(ops))
    x = jnp.zeros((8, 6))
    known = {}
    one = trace(lambda x: jnp.sin(x[2:4] + x[4:6]), (x,), {}, known=known)
    other = trace(lambda x: jnp.sin(x[0:2] * x[6:8]), (x,), {}, known=known)
    assert asked == [3, 2]  # slice, add, sin; slice, mul
    assert [op.rule for op in one.program.ops if op.primitive in ("slice", "sin")][1:] == [
        op.rule for op in other.program.ops if op.primitive in ("slice", "sin")
    ][1:]
