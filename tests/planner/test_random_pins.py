"""Random pin sets on a small training step: honoured or refused with a smallest clash."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.errors import MemoryBudgetError, PinClashError
from alpa_lite.plan.plan import Plan
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.plan_step import Versions, plan_step
from alpa_lite.trace.pins import resolve_pins
from alpa_lite.trace.program import Traced, trace
from tests.marks import medium_from

NUM_SETS = 200
NUM_CHECK, NUM_TEST = 10, 40  # in `make check`, in `make test`; all in `make test-all`
AXES = {"data": 2, "model": 2}
CLUSTER = al.Cluster.parse("1x4:v100-sxm2-16gb")
FREE = P.UNCONSTRAINED


@functools.cache
def traced() -> Traced:
    """Two dense layers and their update: state in, next state and loss out; the state is donated."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(x @ params["up"] + params["bias"])
        return jnp.mean((hidden @ params["down"] - y) ** 2)

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], x, y)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        return {"params": jax.tree.map(lambda p, m: p - m, state["params"], momentum), "momentum": momentum}, value

    def f32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"up": f32(64, 256), "bias": f32(256), "down": f32(256, 64)}
    state = {"params": params, "momentum": params}
    return trace(step, (state, f32(512, 64), f32(512, 64)), {}, donate_argnums=(0,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What one random set asks for."""

    pins: tuple[tuple[str, P], ...]
    budget: float = np.inf
    forbid: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.pins) + bool(self.forbid) + bool(np.isfinite(self.budget))


def make_plan(demands: Demands) -> Plan:
    program = traced().program
    options = PlanOptions(
        mesh_shape=tuple(AXES.values()),
        axis_names=tuple(AXES),
        memory_budget_bytes=demands.budget,
        forbid=demands.forbid,
    )
    pins = resolve_pins(
        dict(demands.pins) or None,
        None,
        program.input_paths,
        [program.values[v].shape for v in program.inputs],
        program.output_paths,
        [program.values[v].shape for v in program.outputs],
        mesh=None,
        source="the test",
    )
    return plan_step(program, CLUSTER, pins, options, Versions(jax="0", alpa_lite="0"))


@functools.cache
def free_plan(budget: float, forbid: tuple[str, ...]) -> Plan:
    return make_plan(Demands(pins=(), budget=budget, forbid=forbid))


def leaves() -> dict[str, tuple[int, ...]]:
    program = traced().program
    pairs = [*zip(program.input_paths, program.inputs, strict=True)]
    pairs += [*zip(program.output_paths, program.outputs, strict=True)]
    return {path: program.values[value].shape for path, value in pairs}


def random_spec(rng: np.random.Generator, shape: tuple[int, ...]) -> P:
    left, entries = list(AXES), []
    for size in shape:
        pick = rng.choice(["whole", "free", *left])
        used = [pick] if pick in AXES and size % AXES[str(pick)] == 0 else []
        if used and len(left) == 2 and rng.integers(4) == 0 and size % 4 == 0:
            used = [str(a) for a in rng.permutation(left)]
        left = [a for a in left if a not in used]
        entries.append(FREE if pick == "free" else None if not used else used[0] if len(used) == 1 else tuple(used))
    return P(*entries)


def random_demands(seed: int, *, budgets: bool = False) -> Demands:
    """Pins of arguments and results; an aliased pair is often pinned on both sides; bans, and budgets if asked for."""
    rng = np.random.default_rng(seed)
    shapes = leaves()
    paths = list(shapes)
    chosen = [str(p) for p in rng.choice(paths, rng.integers(1, 6), replace=False)]
    chosen += [f"out/{p}" for p in chosen if rng.integers(3) == 0 and f"out/{p}" in shapes and f"out/{p}" not in chosen]
    pins = tuple((path, random_spec(rng, shapes[path])) for path in chosen)
    budget = float(rng.uniform(0.5, 1.0) * free_plan(np.inf, ()).memory.peak) if budgets else np.inf
    kinds = ["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"]
    forbid = tuple(sorted(str(k) for k in rng.choice(kinds, 3, replace=False))) if rng.integers(4) == 0 else ()
    return Demands(pins=pins, budget=budget, forbid=forbid)


def honours(spec: ShardingSpec, pin: P) -> bool:
    """Whether a planned spec is what the pin says; written apart from ``PinnedDims.allows``."""
    entries = [*pin, *[None] * (len(spec.dims) - len(pin))]
    for axes, entry in zip(spec.dims, entries, strict=True):
        wanted = () if entry is None else (entry,) if isinstance(entry, str) else entry
        if entry is not FREE and axes != tuple(wanted):
            return False
    return not spec.unreduced


def without(demands: Demands, member: str) -> Demands:
    """The demands less the one that a clash names."""
    if "memory budget" in member:
        return Demands(pins=demands.pins, forbid=demands.forbid)
    if "forbid" in member:
        return Demands(pins=demands.pins, budget=demands.budget)
    key = re.match(r"pin '([^']+)'", member)
    assert key is not None, member
    assert key[1] in dict(demands.pins)
    pins = tuple(p for p in demands.pins if p[0] != key[1])
    return Demands(pins=pins, budget=demands.budget, forbid=demands.forbid)


def only(demands: Demands, members: tuple[str, ...]) -> Demands:
    """The demands that a clash names and nothing else."""
    keys = {found[1] for m in members if (found := re.match(r"pin '([^']+)'", m))}
    return Demands(
        pins=tuple(p for p in demands.pins if p[0] in keys),
        budget=demands.budget if any("memory budget" in m for m in members) else np.inf,
        forbid=demands.forbid if any("forbid" in m for m in members) else (),
    )


@pytest.mark.parametrize("seed", medium_from(NUM_CHECK, NUM_TEST, NUM_SETS))
def test_pins_are_honoured_or_refused_with_a_smallest_clash(seed):
    check_demands(random_demands(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_pins_and_a_budget_are_honoured_or_refused_with_a_smallest_clash(seed):
    check_demands(random_demands(seed, budgets=True))


def check_demands(demands: Demands) -> None:
    try:
        plan = make_plan(demands)
    except PinClashError as error:
        check_clash(demands, error)
        return
    specs = {leaf.path: leaf.spec for leaf in plan.inputs + plan.outputs}
    for path, pin in demands.pins:
        assert honours(specs[path], pin), f"{path} is {specs[path]}, pinned {pin}"
    # A plan that the memory limits has the bound of the cheapest one without limit, which is no proof.
    assert plan.status == "optimal" or np.isfinite(demands.budget)
    assert plan.objective >= free_plan(np.inf, demands.forbid).objective * (1 - 1e-6)
    assert plan.memory.peak <= demands.budget


def check_clash(demands: Demands, error: PinClashError) -> None:
    named = only(demands, error.members)
    assert named.count == len(error.members), "a member is named twice, or is none of the demands"
    with pytest.raises((PinClashError, MemoryBudgetError)):
        make_plan(named)
    for member in error.members:
        make_plan(without(named, member))  # raises if the rest still clashes


@pytest.mark.medium
def test_the_random_sets_are_of_all_kinds():
    """What the test above relies on: both outcomes are common, and every kind of member is named."""
    members: list[str] = []
    for seed in range(60):
        try:
            make_plan(random_demands(seed))
        except PinClashError as error:
            members += error.members
    assert any("out/" in m for m in members)
    assert any("forbid" in m for m in members)
    assert 10 < len(members) < 100


@pytest.mark.parametrize("forbid", [(), ("all-gather",), ("reduce-scatter", "all-to-all")])
def test_pinning_the_free_optimum_changes_nothing(forbid):
    free = free_plan(np.inf, forbid)
    pins = tuple(
        (leaf.path, P(*[axes if len(axes) != 1 else axes[0] for axes in leaf.spec.dims]))
        for leaf in free.inputs + free.outputs
    )
    again = make_plan(Demands(pins=pins, forbid=forbid))
    assert again.objective == pytest.approx(free.objective, rel=1e-6)
    assert again.input_specs == free.input_specs
    assert again.output_specs == free.output_specs


@pytest.mark.medium
def test_dropping_a_pin_never_raises_the_objective():
    rng = np.random.default_rng(7)
    shapes = leaves()
    for _ in range(10):
        chosen = [str(p) for p in rng.choice([p for p in shapes if not p.startswith("out")], 4, replace=False)]
        pins = tuple((path, random_spec(rng, shapes[path])) for path in chosen)
        objectives = [make_plan(Demands(pins=pins[:count])).objective for count in range(len(pins) + 1)]
        assert all(a <= b * (1 + 1e-6) for a, b in itertools.pairwise(objectives))
