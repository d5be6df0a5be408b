"""Strategies of single ops: how many, which specs, and which are ruled out."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.rule import Factor, FactorKind, OpShardingRule
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conversion import Conversions
from alpa_lite.intraop.strategies import UNUSED, KnownStrategies, StrategySet
from tests.harness import RandomCosts, device_mesh


def matmul(i: int, j: int, k: int, **settings) -> OpShardingRule:
    """``[i,k] x [k,j] -> [i,j]`` with factors numbered i, j, k."""
    return OpShardingRule(
        operands=(((0,), (2,)), ((2,), (1,))),
        results=(((0,), (1,)),),
        factors=(Factor(size=i), Factor(size=j), Factor(size=k, kind=FactorKind.REDUCTION)),
        reduce_op="add",
        linear=((0,), (1,)),
        **settings,
    )


def merge(a: int, b: int) -> OpShardingRule:
    """A reshape ``[a,b] -> [ab]``."""
    return OpShardingRule(
        operands=(((0,), (1,)),), results=(((0, 1),),), factors=(Factor(size=a), Factor(size=b)), linear=((0,),)
    )


def strategies(
    rule: OpShardingRule, shape: tuple[int, ...], unreduced: tuple[bool, ...] = (), **settings
) -> StrategySet:
    mesh = device_mesh(shape)
    unreduced = unreduced or (False,) * len(rule.operands)
    return KnownStrategies().of(rule, mesh, unreduced_inputs=unreduced, **settings)


def _conversions(mesh: DeviceMesh) -> Conversions:
    costs = RandomCosts()
    return Conversions(mesh=mesh, costs=costs)  # type: ignore[arg-type]


def texts(rule: OpShardingRule, shape: tuple[int, ...], made: StrategySet) -> list[str]:
    conversions = _conversions(device_mesh(shape))
    rows = []
    for s in range(len(made)):
        tensors = zip((*rule.operands, *rule.results), (*made.operands, *made.results), strict=True)
        specs = [str(conversions.space(len(dims)).specs[numbers[s]]) for dims, numbers in tensors]
        rows.append(" ".join(specs))
    return rows


def test_a_matmul_on_one_axis_has_four_strategies():
    rule = matmul(8, 8, 8)
    assert sorted(texts(rule, (4,), strategies(rule, (4,)))) == sorted(
        ["[_,_] [_,_] [_,_]", "[x,_] [_,_] [x,_]", "[_,_] [_,x] [_,x]", "[_,x] [x,_] [_,_]+{x}"]
    )


def test_operands_that_may_be_partial_sums_add_strategies():
    rule = matmul(8, 8, 8)
    made = strategies(rule, (4,), (True, False))
    assert len(made) == 5
    assert "[_,_]+{x} [_,_] [_,_]+{x}" in texts(rule, (4,), made)
    assert len(strategies(rule, (4,), (True, True))) == 6


@pytest.mark.parametrize(("shape", "count"), [((8,), 4), ((2, 4), 16), ((2, 2, 2), 64), ((1, 8), 4), ((1, 1), 1)])
def test_counts_on_larger_meshes(shape, count):
    assert len(strategies(matmul(64, 64, 64), shape)) == count


def test_sizes_that_do_not_divide_are_ruled_out():
    assert len(strategies(matmul(6, 8, 8), (4,))) == 3


def test_two_axes_on_one_dim_need_their_product():
    # i=4 divides by 2 and by 4, not by 8.
    assert len(strategies(matmul(4, 64, 64), (2, 4))) == 15
    assert len(strategies(matmul(8, 64, 64), (2, 4))) == 16


def test_a_dim_of_size_one_or_zero_is_never_split():
    for size in (1, 0):
        assert len(strategies(matmul(size, 8, 8), (4,))) == 3


def test_a_minor_factor_waits_for_the_major_ones():
    rule = merge(4, 8)
    shown = texts(rule, (2, 2), strategies(rule, (2, 2)))
    assert sorted(shown) == sorted(["[_,_] [_]", "[x,_] [x]", "[y,_] [y]", "[x.y,_] [x.y]"])
    # The major factor is split completely by x: now y may take the minor one.
    rule = merge(2, 8)
    assert "[x,y] [x.y]" in texts(rule, (2, 2), strategies(rule, (2, 2)))
    assert "[_,y] [y]" not in texts(rule, (2, 2), strategies(rule, (2, 2)))


def test_blocked_factors_are_not_split():
    rule = OpShardingRule(
        operands=(((0,),),), results=(((0,),),), factors=(Factor(size=8, kind=FactorKind.REPLICATED),)
    )
    assert texts(rule, (4,), strategies(rule, (4,))) == ["[_] [_]"]


def test_a_maximum_is_reduced_inside_the_op():
    rule = OpShardingRule(
        operands=(((0,), (1,)),),
        results=(((0,),),),
        factors=(Factor(size=8), Factor(size=8, kind=FactorKind.REDUCTION)),
        reduce_op="max",
    )
    made = strategies(rule, (2, 2))
    shown = dict(zip(texts(rule, (2, 2), made), made.reduce_axes, strict=True))
    assert shown["[_,x.y] [_]"] == ("x", "y")
    assert shown["[x,y] [x]"] == ("y",)
    assert shown["[x,_] [x]"] == ()


def test_every_axis_must_work_for_sharded_contractions():
    rule = matmul(8, 8, 8)
    assert len(strategies(rule, (2, 2), sharded_contractions=True)) == 9
    assert len(strategies(matmul(3, 3, 3), (2, 2), sharded_contractions=True)) == 1  # nothing else is possible


def test_a_group_of_operands_is_unreduced_together():
    rule = OpShardingRule(operands=(((0,),), ((0,),)), results=(((0,),),), factors=(Factor(size=8),), linear=((0, 1),))
    assert len(strategies(rule, (4,), (True, False))) == 2
    made = strategies(rule, (4,), (True, True))
    assert texts(rule, (4,), made)[-1] == "[_]+{x} [_]+{x} [_]+{x}"


@pytest.mark.medium
@settings(max_examples=60)
@given(
    st.tuples(*[st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])] * 3),
    st.sampled_from([(4,), (8,), (2, 4), (4, 2), (2, 2, 2)]),
    st.tuples(st.booleans(), st.booleans()),
)
def test_every_strategy_is_valid_and_unique(sizes, shape, unreduced):
    rule, mesh = matmul(*sizes), device_mesh(shape)
    i, j, k = sizes
    conversions = _conversions(mesh)
    made = strategies(rule, shape, unreduced)
    rows = texts(rule, shape, made)
    assert len(set(rows)) == len(rows)
    assert made.assignment.shape == (len(made), sum(n > 1 for n in shape))
    for s in range(len(made)):
        shapes = ((i, k), (k, j), (i, j))
        for tensor, numbers in zip(shapes, (*made.operands, *made.results), strict=True):
            spec: ShardingSpec = conversions.space(2).specs[numbers[s]]
            assert spec.divides(tensor, mesh)
            for axes in spec.dims:
                assert axes == mesh.sort_axes(axes)
        assert made.split(mesh)[s] == math.prod(
            mesh.shape[a] for a, choice in enumerate(made.assignment[s]) if choice >= 0
        )


def one_by_one(rule: OpShardingRule, mesh: DeviceMesh, unreduced: tuple[bool, ...], sharded: bool) -> list[str]:
    """What the docstring of the module says, assignment after assignment: the axes' choices and the specs they give."""
    axes = [a for a, n in zip(mesh.axis_names, mesh.shape, strict=True) if n > 1]
    groups = [-2 - g for g, group in enumerate(rule.linear) if all(unreduced[i] for i in group)]
    may = [i for i, f in enumerate(rule.factors) if f.size and f.kind is not FactorKind.REPLICATED]
    found = []
    for row in itertools.product([UNUSED, *may, *groups], repeat=len(axes)):
        on = {f: tuple(a for a, c in zip(axes, row, strict=True) if c == f) for f in range(len(rule.factors))}
        sizes = {f: mesh.axes_size(some) for f, some in on.items()}
        valid = all(rule.factors[f].size % n == 0 for f, n in sizes.items() if n > 1)
        summed = [a for a, c in zip(axes, row, strict=True) if c in rule.reduction_factors and rule.reduce_op == "add"]
        specs = []
        for position, dims in enumerate((*rule.operands, *rule.results)):
            partial = {
                a
                for a, c in zip(axes, row, strict=True)
                if c <= -2 and (position >= len(rule.operands) or position in rule.linear[-2 - c])
            }
            partial |= set(summed if position >= len(rule.operands) else ())
            for dim in dims:
                for k, f in enumerate(dim):
                    valid &= not on[f] or all(sizes[major] == rule.factors[major].size for major in dim[:k])
            specs.append(ShardingSpec(tuple(sum((on[f] for f in dim), ()) for dim in dims), tuple(partial)))
        if valid:
            found.append((row, " ".join(map(str, specs))))
    full = [pair for pair in found if UNUSED not in pair[0]]
    return [f"{row} {specs}" for row, specs in (full if sharded and full else found)]


RULES = [
    matmul(8, 12, 16),
    matmul(6, 0, 5),
    merge(4, 6),
    merge(2, 8),
    OpShardingRule(  # three factors of one dim, one of them in another order elsewhere
        operands=(((0, 1, 2),),),
        results=(((2,), (1, 0)),),
        factors=(Factor(size=2), Factor(size=4), Factor(size=8)),
        linear=((0,),),
    ),
]


@pytest.mark.medium
@pytest.mark.parametrize(
    "shapes",
    [
        ((4, 2), (2, 2), (8, 2), (3, 2), (16, 2), (6, 4), (1, 2)),
        ((4,), (2,), (16,), (3,), (1,)),
        ((2, 2, 2), (2, 4, 2), (4, 2, 1)),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_strategies_of_one_mesh_after_another_are_all_assignments_that_are_valid(shapes, sharded):
    known = KnownStrategies()
    for shape in shapes:
        mesh = device_mesh(shape)
        for rule in RULES:
            for unreduced in {(False,) * len(rule.operands), (True,) * len(rule.operands)}:
                made = known.of(rule, mesh, unreduced_inputs=unreduced, sharded_contractions=sharded)
                rows = [
                    f"{tuple(row)} {text}"
                    for row, text in zip(made.assignment.tolist(), texts(rule, shape, made), strict=True)
                ]
                assert rows == one_by_one(rule, mesh, unreduced, sharded), (shape, str(rule))


@pytest.mark.parametrize("shape", [(1, 8), (2, 1), (1, 1), (2, 4), (2, 1, 2), (1, 2, 2)])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("rule", [matmul(8, 16, 4), merge(2, 8)])
def test_axes_of_one_device_may_be_enumerated_with_the_others(
    rule: OpShardingRule, shape: tuple[int, ...], strict: bool
) -> None:
    mesh, unreduced = device_mesh(shape), (True,) * len(rule.operands)
    known = KnownStrategies()
    known.over = mesh.axis_names
    given = known.of(rule, mesh, unreduced_inputs=unreduced, sharded_contractions=strict)
    alone = strategies(rule, shape, unreduced, sharded_contractions=strict)
    assert given.assignment.tolist() == alone.assignment.tolist()
    for one, other in zip((*given.operands, *given.results), (*alone.operands, *alone.results), strict=True):
        assert one.tolist() == other.tolist()
    assert (given.used, given.reduce_axes) == (alone.used, alone.reduce_axes)
