"""The planner against brute force: small random steps, every combination of decisions tried.

The scorer below is its own: it walks the links of the decision graph, looks specs up and adds the prices of conversions
and ops, without the edge matrices of ``intraop/pricing.py`` and without anything of the solver.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conventions import cost_model
from alpa_lite.costs.conversion import Conversions
from alpa_lite.costs.memory import timeline
from alpa_lite.intraop.decision_graph import DecisionGraph, Link
from alpa_lite.intraop.decisions import build_graph
from alpa_lite.intraop.pricing import Pricer
from alpa_lite.intraop.problem import Usage
from alpa_lite.intraop.solve import solve
from alpa_lite.plan.pins import PinnedDims, ResolvedPins
from alpa_lite.planner.posing import allowed_choices, pin_ops
from alpa_lite.trace.program import trace
from tests.marks import medium_from

NUM_PROGRAMS = 210
NUM_CHECK, NUM_TEST = 30, 70  # in `make check`, in `make test`; all in `make test-all`
MAX_DECISIONS = 8
MAX_COMBINATIONS = 300_000
MESHES = (((2,), ("x",)), ((4,), ("x",)), ((2, 2), ("x", "y")))


# -- random steps ---------------------------------------------------------------------------------------------------


def random_step(rng: np.random.Generator) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """A function of one to three arrays with one to four ops."""
    sizes = rng.choice([4, 8, 12, 96, 512], 2)
    shapes = [tuple(int(s) for s in rng.choice(sizes, rng.integers(1, 3))) for _ in range(rng.integers(1, 4))]
    script = [(str(rng.choice(list(_OPS))), int(rng.integers(100)), int(rng.integers(100))) for _ in range(4)]
    count, two = int(rng.integers(1, 5)), bool(rng.integers(2))

    def step(*args: jax.Array) -> Any:
        pool = list(args)
        for name, a, b in script[:count]:
            made = _OPS[name](pool[a % len(pool)], pool[b % len(pool)])
            if made is not None:
                pool.append(made)
        return (pool[-1], pool[-2]) if two and len(pool) > len(args) + 1 else pool[-1]

    return step, [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array | None:
    return a @ b if a.ndim and b.ndim and a.shape[-1] == b.shape[0] else None


def _add(a: jax.Array, b: jax.Array) -> jax.Array | None:
    return a + b if a.shape == b.shape else None


def _scan(a: jax.Array, b: jax.Array) -> jax.Array | None:
    if a.ndim != 2 or b.shape != (a.shape[1], a.shape[1]):
        return None
    return jax.lax.scan(lambda carry, _: (carry @ b, None), a, length=3)[0]


_OPS: dict[str, Callable[[jax.Array, jax.Array], jax.Array | None]] = {
    "matmul": _matmul,
    "matmul again": _matmul,
    "add": _add,
    "tanh": lambda a, b: jnp.tanh(a),
    "transpose": lambda a, b: a.T if a.ndim == 2 else None,
    "sum": lambda a, b: a.sum(0) if a.ndim else None,
    "max": lambda a, b: a.max(-1) if a.ndim else None,
    "flat": lambda a, b: a.reshape(-1) if a.ndim == 2 else None,
    "scan": _scan,
}


@dataclass(frozen=True, eq=False)
class Small:
    """A random problem that is small enough, and the price of every combination of its decisions."""

    program: Program
    graph: DecisionGraph
    pricer: Pricer
    combinations: np.ndarray  # [combination, node]
    totals: np.ndarray  # [combination]
    rng: np.random.Generator


def small(seed: int) -> Small:
    for attempt in range(1000):
        rng = np.random.default_rng((seed, attempt))
        step, args = random_step(rng)
        shape, names = MESHES[rng.integers(len(MESHES))]
        mesh = DeviceMesh(shape=shape, axis_names=names)
        donate = (0,) if rng.integers(2) else ()
        program = trace(step, tuple(args), {}, donate_argnums=donate).program
        cluster = al.Cluster.parse(f"2x{mesh.num_devices // 2}:v100-sxm2-16gb")
        penalty = 2e-6 if rng.integers(4) == 0 else None
        costs = cost_model(("roofline", "alpa")[rng.integers(2)], cluster, mesh, replication_penalty=penalty)
        graph = build_graph(program, Conversions(mesh=mesh, costs=costs))
        count = math.prod(node.size for node in graph.nodes)
        if not program.ops or len(graph.nodes) > MAX_DECISIONS or count > MAX_COMBINATIONS:
            continue
        pricer = Pricer.of(program, graph, costs, frozenset(graph.inputs[:1]))
        grid = np.indices([node.size for node in graph.nodes], dtype=np.int32)
        combinations = grid.reshape(len(graph.nodes), -1).T
        return Small(program, graph, pricer, combinations, price_all(graph, pricer, combinations), rng)
    raise AssertionError("no small program in 1000 attempts")


# -- the scorer -----------------------------------------------------------------------------------------------------


def price_all(
    graph: DecisionGraph, pricer: Pricer, combinations: np.ndarray, *, free_gathers: bool = False
) -> np.ndarray:
    """Objective of every combination: ops and ports, then every link, conversion by conversion.

    ``free_gathers``: what a loop reads may be gathered on its way there, where nobody counts the bytes.
    """
    total = np.zeros(len(combinations))
    for index, node in enumerate(graph.nodes):
        if node.kind != "copy":
            total += pricer.priced()[0][pricer.slots.nodes[index]][combinations[:, index]]
    for link in graph.links:
        total += _price_link(graph, link, combinations, free_gathers)
    return total


def _price_link(graph: DecisionGraph, link: Link, combinations: np.ndarray, free_gathers: bool) -> np.ndarray:
    table = graph.conversions.table(link.shape, link.itemsize)
    have = link.producer.specs[combinations[:, link.producer.node]]
    total = np.zeros(len(combinations))
    if link.copy >= 0:
        node, choice = graph.nodes[link.copy], combinations[:, link.copy]
        if node.pairs is None:
            assert node.specs is not None
            kept = node.specs[choice]
        else:
            kept = node.pairs[choice, 1]
            total[node.pairs[choice, 0] != have] = np.inf
        total += table[have, kept]
        have = kept
    for reader in {c.node for c in link.consumers} - {link.producer.node}:
        wants: list[np.ndarray] = []
        for end in (c for c in link.consumers if c.node == reader):
            want = end.specs[combinations[:, reader]]
            again = np.any([want == w for w in wants], axis=0) if wants else np.zeros(len(want), bool)
            price = table[have, want]
            if reader in graph.loop_reads and link.copy >= 0 and not free_gathers:
                price = np.where(_all_gathers(graph, len(link.shape), have, want), np.inf, price)
            total += np.where(again & np.isfinite(price), 0.0, price)
            wants.append(want)
    return total * link.weight


def _all_gathers(graph: DecisionGraph, rank: int, have: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Where every dim loses trailing axes or stays, and some dim loses some."""
    specs = graph.conversions.space(rank).specs
    table = [
        [a != b and all(x[: len(y)] == y for x, y in zip(a.dims, b.dims, strict=True)) for b in specs] for a in specs
    ]
    return np.array(table)[have, want]


def peaks(usages: list[Usage], num_times: int, combinations: np.ndarray) -> np.ndarray:
    live = np.zeros((len(combinations), num_times), dtype=np.int64)
    for usage in usages:
        live[:, usage.lo : usage.hi] += usage.size_bytes[combinations[:, usage.node]][:, None]
    return live.max(axis=1)


def keeps(pin: PinnedDims, spec: ShardingSpec) -> bool:
    pairs = zip(pin.dims, spec.dims, strict=True)
    return not spec.unreduced and all(wanted is None or wanted == axes for wanted, axes in pairs)


# -- random demands -------------------------------------------------------------------------------------------------


def random_pins(s: Small) -> ResolvedPins:
    """Each argument and result is pinned with probability 1/2, each of its dims with probability 2/3."""
    mesh = s.graph.conversions.mesh

    def pin(path: str, shape: tuple[int, ...]) -> PinnedDims:
        left = list(mesh.axis_names)
        dims: list[tuple[str, ...] | None] = []
        pinned = s.rng.integers(2)
        for size in shape:
            fits = [a for a in left if size % mesh.axis_size(a) == 0]
            kind = int(s.rng.integers(3))
            axis = str(s.rng.choice(fits)) if fits and kind == 1 else ""
            left = [a for a in left if a != axis]
            dims.append(None if kind == 0 or not pinned else (axis,) if axis else ())
        return PinnedDims(path=path, shape=shape, dims=tuple(dims), origin=path)

    values, p = s.program.values, s.program
    outputs = [values[v].shape if v >= 0 else () for v in p.outputs]
    return ResolvedPins(
        inputs=tuple(pin(path, values[v].shape) for path, v in zip(p.input_paths, p.inputs, strict=True)),
        outputs=tuple(pin(path, shape) for path, shape in zip(p.output_paths, outputs, strict=True)),
    )


def kept_by(s: Small, pins: ResolvedPins) -> np.ndarray:
    """Which combinations keep all pins."""
    kept = np.ones(len(s.combinations), dtype=bool)
    for ports, pinned in ((s.graph.inputs, pins.inputs), (s.graph.outputs, pins.outputs)):
        for port, pin in zip(ports, pinned, strict=True):
            node = s.graph.nodes[port]
            assert node.specs is not None
            space = s.graph.conversions.space(node.rank)
            fits = np.array([keeps(pin, space.specs[int(i)]) for i in node.specs])
            kept &= fits[s.combinations[:, port]]
    return kept


# -- the tests ------------------------------------------------------------------------------------------------------


def check(s: Small, pins: ResolvedPins | None, budget: int | None, peak: np.ndarray) -> None:
    """The solver's answer is the cheapest combination among those that keep the pins and the budget."""
    line = timeline(s.program)
    allowed = allowed_choices(pin_ops(s.program), s.graph, pins) if pins else None
    problem = s.pricer.problem(allowed=allowed, timeline=line if budget is not None else None, usage_limit=budget)
    solution = solve(problem, time_limit_s=30.0)
    possible = kept_by(s, pins) if pins else np.ones(len(s.totals), dtype=bool)
    if budget is not None:
        possible &= peak <= budget
    best = float(np.min(s.totals, where=possible, initial=np.inf))
    if math.isinf(best):
        assert solution.status == "infeasible", f"brute force finds nothing, the solver says {solution.status}"
        return
    assert solution.status == "optimal"
    assert solution.objective == pytest.approx(best, rel=2e-6, abs=1e-15)
    assert solution.lower_bound <= best * (1 + 1e-9) + 1e-15
    chosen = int(np.ravel_multi_index(solution.choice, [n.size for n in s.graph.nodes]))
    assert possible[chosen], "the solver's choice breaks a pin or the budget"
    assert s.totals[chosen] == pytest.approx(solution.objective, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("seed", medium_from(NUM_CHECK, NUM_TEST, NUM_PROGRAMS))
def test_the_optimum_is_that_of_brute_force(seed):
    s = small(seed)
    line = timeline(s.program)
    peak = peaks(s.pricer.usages(line), line.num_times, s.combinations)
    check(s, None, None, peak)
    pins = random_pins(s)
    check(s, pins, None, peak)
    finite = peak[np.isfinite(s.totals)]
    for budget in {int(finite.min()) - 1, int(finite.min()), int(np.quantile(finite, s.rng.uniform(0, 0.6)))}:
        check(s, None, budget, peak)
        check(s, pins, budget, peak)


@pytest.mark.medium
def test_counting_what_is_kept_for_loops_costs_nothing():
    """A gather that only the copy may do is as cheap as one on the way to the loop."""
    for seed in range(40):
        s = small(seed)
        free = price_all(s.graph, s.pricer, s.combinations, free_gathers=True)
        assert s.totals.min() == pytest.approx(free.min(), rel=1e-12)


@pytest.mark.medium
def test_the_random_problems_are_of_all_kinds():
    """What the test above relies on: loops, matmuls and shared values occur, and budgets and pins do bind."""
    problems = [small(seed) for seed in range(40)]
    primitives = {op.primitive for s in problems for _, _, op in s.program.walk()}
    assert {"dot_general", "scan", "transpose", "reduce_sum", "tanh"} <= primitives
    assert any(link.copy >= 0 for s in problems for link in s.graph.links)
    assert sum(not kept_by(s, random_pins(s)).all() for s in problems) > 20
