"""Random plans: every op a random strategy, conversions by the planner, and the lowered step beside the unsharded one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.costs.conversion import Conversions
from alpa_lite.costs.model import PricedInBytes
from alpa_lite.intraop.decision_graph import DecisionGraph, End, Link
from alpa_lite.intraop.decisions import build_graph
from alpa_lite.lowering.lower import Lowering, named_shardings
from alpa_lite.planner.realise import Realised, realise
from alpa_lite.trace.program import Traced, trace
from tests.compiling import QUICK_COMPILE

MESHES = ((8,), (2, 4), (2, 2, 2))


@dataclass(frozen=True)
class RandomCosts(PricedInBytes):
    """Random prices per kind and axes, so that conversions take all kinds of routes."""

    seed: int = 0
    unit: str = "s"
    prices: dict[Any, tuple[float, float]] = field(default_factory=dict)

    def linear(self, kind: CollectiveKind, axes: tuple[str, ...]) -> tuple[float, float]:
        if (kind, axes) not in self.prices:
            rng = np.random.default_rng([self.seed, *f"{kind}{axes}".encode()])
            self.prices[kind, axes] = (float(rng.uniform(1e-6, 2e-6)), float(rng.uniform(1e-9, 4e-9)))
        return self.prices[kind, axes]

    def collective(self, kind: CollectiveKind, axes: tuple[str, ...], size_bytes: float) -> float:
        alpha, beta = self.linear(kind, axes)
        return alpha + beta * size_bytes


def device_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh(shape=shape, axis_names=("x", "y", "z")[: len(shape)])


def jax_mesh(mesh: DeviceMesh) -> jax.sharding.Mesh:
    types = (jax.sharding.AxisType.Auto,) * len(mesh.shape)
    return jax.make_mesh(mesh.shape, mesh.axis_names, axis_types=types)


def random_choice(graph: DecisionGraph, rng: np.random.Generator) -> np.ndarray:
    """A choice for every node that can be carried out: no reader asks for a layout that cannot be made."""
    choice = np.zeros(len(graph.nodes), dtype=np.int64)
    for i, node in enumerate(graph.nodes):
        if node.kind == "port":
            specs = graph.conversions.space(node.rank).specs
            choice[i] = rng.choice([k for k, s in enumerate(node.specs) if not specs[s].unreduced])
    readers: dict[int, list[tuple[Link, End]]] = defaultdict(list)
    for link in graph.links:
        for consumer in link.consumers:
            readers[consumer.node].append((link, consumer))
    for i, node in enumerate(graph.nodes):
        if node.kind == "op":
            usable = np.ones(node.size, dtype=bool)
            for link, consumer in readers[i]:
                usable &= np.isfinite(_costs_from(graph, link, choice)[consumer.specs])
            # Doing nothing along an axis is one option of many; half the time take a strategy that splits more.
            split = node.strategies.split(graph.conversions.mesh)
            splits = usable & (split == split[usable].max())
            choice[i] = rng.choice(np.flatnonzero(splits if rng.integers(2) else usable))
    for link in graph.links:
        if link.copy >= 0:
            choice[link.copy] = rng.choice(_usable_copies(graph, link, choice))
    return choice


def _costs_from(graph: DecisionGraph, link: Link, choice: np.ndarray) -> np.ndarray:
    """Prices from the layout in which a value is made to every other."""
    return graph.conversions.table(link.shape, link.itemsize)[link.producer.specs[choice[link.producer.node]]]


def _usable_copies(graph: DecisionGraph, link: Link, choice: np.ndarray) -> list[int]:
    node = graph.nodes[link.copy]
    made = link.producer.specs[choice[link.producer.node]]
    table = graph.conversions.table(link.shape, link.itemsize)
    wants = [c.specs[choice[c.node]] for c in link.consumers]
    pairs = node.pairs if node.pairs is not None else [(made, kept) for kept in node.specs]
    return [
        k
        for k, (passed, kept) in enumerate(pairs)
        if passed == made
        and np.isfinite(table[made, kept])
        and all(np.isfinite(min(table[kept, w], table[made, w])) for w in wants)
    ]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A random plan of a traced function on a mesh."""

    traced: Traced
    mesh: DeviceMesh
    graph: DecisionGraph
    choice: np.ndarray
    realised: Realised

    def function(self, mesh: jax.sharding.Mesh) -> Callable[..., list[Any]]:
        r = self.realised
        lowering = Lowering.of(self.mesh, r.decisions, r.conversions, r.collectives)
        return lowering.sharded_function(self.traced.flat, r.in_specs, r.out_specs, mesh)

    def describe(self) -> str:
        """Specs of all ops, for the message of a failure."""
        ops = {path: op for path, _, op in self.traced.program.walk()}
        lines = [
            f"{d.path} {ops[d.path].primitive} ({', '.join(map(str, d.operands))})->({', '.join(map(str, d.results))})"
            for d in self.realised.decisions
        ]
        return f"mesh {self.mesh}\n" + "\n".join(lines)


def draw(traced: Traced, shape: tuple[int, ...], seeds: Sequence[int]) -> list[Drawn]:
    """One random plan per seed."""
    mesh = device_mesh(shape)
    costs: Any = RandomCosts(seeds[0])
    graph = build_graph(traced.program, Conversions(mesh=mesh, costs=costs))
    drawn = []
    for seed in seeds:
        choice = random_choice(graph, np.random.default_rng(seed))
        realised = realise(traced.program, graph, choice, costs)
        drawn.append(Drawn(traced=traced, mesh=mesh, graph=graph, choice=choice, realised=realised))
    return drawn


def run(drawn: Sequence[Drawn], args: tuple[Any, ...]) -> list[list[Any]]:
    """Results of all plans, compiled together (each compilation costs far more than the run)."""
    mesh = jax_mesh(drawn[0].mesh)
    leaves = jax.tree.leaves(args)
    placed = [jax.device_put(leaves, named_shardings(d.realised.in_specs, mesh)) for d in drawn]
    functions = [d.function(mesh) for d in drawn]
    together = jax.jit(
        lambda *many: [f(*some) for f, some in zip(functions, many, strict=True)], compiler_options=QUICK_COMPILE
    )
    return together(*placed)


def check(fn: Callable[..., Any], args: tuple[Any, ...], shape: tuple[int, ...], seeds: Sequence[int] = (0, 1)) -> None:
    """Random plans of ``fn`` compute what ``fn`` computes."""
    args = jax.tree.map(jax.numpy.asarray, args)
    traced = trace(fn, args, {})
    expected = jax.tree.leaves(jax.jit(fn, compiler_options=QUICK_COMPILE)(*args))
    drawn = draw(traced, shape, seeds)
    for seed, one, results in zip(seeds, drawn, run(drawn, args), strict=True):
        for path, got, want in zip(traced.program.output_paths, results, expected, strict=True):
            error = difference(got, want)
            assert error <= 2e-5, f"{path} differs by {error:.1e} (seed {seed})\n{one.describe()}"


def difference(got: Any, want: Any) -> float:
    """Norm of the difference over the norm; integers, booleans and keys must agree exactly (else infinite)."""
    if jax.numpy.issubdtype(want.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    a, b = np.asarray(got), np.asarray(want)
    if not np.issubdtype(b.dtype, np.inexact):
        return 0.0 if (a == b).all() else float("inf")
    odd = ~np.isfinite(b)
    if not np.array_equal(a[odd], b[odd], equal_nan=True) or not np.isfinite(a[~odd]).all():
        return float("inf")
    exact = np.complex128 if np.iscomplexobj(b) else np.float64
    a, b = a[~odd].astype(exact), b[~odd].astype(exact)
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) + 1e-6))
