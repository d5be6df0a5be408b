"""Decision graph + cost model + pins -> ``IntraOpProblem``: node costs, edge matrices, memory usages.

Equal pieces (an op of equal key under equal strategies; a value of equal type between equal ends) share one array object,
so that repeated layers cost nothing to price and presolve sees them as equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.program import Op, Program
from alpa_lite.costs.fusion import fused_values, moved_bytes_weights
from alpa_lite.costs.memory import Timeline
from alpa_lite.intraop.decision_graph import DecisionGraph, End, Link, Node
from alpa_lite.intraop.decisions import CONTRACTIONS
from alpa_lite.intraop.problem import Edge, IntraOpProblem, Usage

if TYPE_CHECKING:
    from alpa_lite.costs.model import CostModel


@dataclass(eq=False, slots=True)
class Pricer:
    """Prices one graph under one cost model; caches by content.

    Attributes:
        state_inputs: ports of state, which some conventions charge for being whole everywhere.
        placed: (region, value) pairs that may not be converted (weights, under some conventions; what stages exchange).
    """

    program: Program
    graph: DecisionGraph
    costs: CostModel
    state_inputs: frozenset[int] = frozenset()
    placed: frozenset[tuple[str, int]] = frozenset()
    _node_cache: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict)
    _edge_cache: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict)
    _fused: dict[int, tuple[bool, ...]] = field(default_factory=dict)
    _size_cache: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict)
    _copy_links: dict[int, Link] = field(default_factory=dict)

    def problem(
        self,
        *,
        allowed: Mapping[int, np.ndarray] | None = None,
        timeline: Timeline | None = None,
        usage_limit: int | None = None,
        classes: np.ndarray | None = None,
    ) -> IntraOpProblem:
        """The ILP.

        Args:
            allowed: per node, a mask of choices that pins permit.
            timeline: with it, memory usages are added.
            usage_limit: bytes per device.
            classes: see ``IntraOpProblem``.
        """
        node_costs = [self.node_cost(i, n) for i, n in enumerate(self.graph.nodes)]
        for node, mask in (allowed or {}).items():
            node_costs[node] = np.where(mask, node_costs[node], np.inf)
        return IntraOpProblem(
            node_costs=tuple(node_costs),
            edges=tuple(self.edges()),
            usages=tuple(self.usages(timeline)) if timeline else (),
            usage_limit=usage_limit,
            num_times=timeline.num_times if timeline else 0,
            names=tuple(n.name for n in self.graph.nodes),
            classes=classes,
        )

    # -- nodes ---------------------------------------------------------------------------------------------------

    def node_cost(self, index: int, node: Node) -> np.ndarray:
        if node.kind == "op":
            return self.op_cost(node)
        if node.kind == "port":
            return self.port_cost(index, node)
        key = ("copy", node.shape, id(node.specs), id(node.pairs), node.weight, self.copy_link(node).itemsize)
        if key not in self._node_cache:
            cost = np.zeros(node.size)
            if node.pairs is not None:
                table = self.graph.conversions.table(node.shape, self.copy_link(node).itemsize)
                cost = table[node.pairs[:, 0], node.pairs[:, 1]] * node.weight
            self._node_cache[key] = cost
        return self._node_cache[key]

    def copy_link(self, node: Node) -> Link:
        if not self._copy_links:
            self._copy_links.update({id(self.graph.nodes[k.copy]): k for k in self.graph.links if k.copy >= 0})
        return self._copy_links[id(node)]

    def port_cost(self, index: int, node: Node) -> np.ndarray:
        """Free, but for the penalty that some conventions put on state that every device holds whole."""
        assert node.specs is not None
        penalised = self.costs.replication_penalty > 0 and index in self.state_inputs
        key = ("port", id(node.specs), penalised)
        if key not in self._node_cache:
            cost = np.zeros(node.size)
            if penalised:
                space = self.graph.conversions.space(node.rank)
                whole = np.array([space.specs[i].is_replicated for i in node.specs])
                cost = cost + whole * self.costs.replication_penalty
            self._node_cache[key] = cost
        return self._node_cache[key]

    def fused(self, program: Program) -> tuple[bool, ...]:
        if id(program) not in self._fused:
            self._fused[id(program)] = fused_values(program)
        return self._fused[id(program)]

    def op_cost(self, node: Node) -> np.ndarray:
        op, program, strategies = node.op, node.program, node.strategies
        assert op is not None and program is not None and strategies is not None
        reads, writes = moved_bytes_weights(op, program, self.fused(program))
        key = ("op", op.key, reads, writes, id(strategies), node.weight)
        if key not in self._node_cache:
            self._node_cache[key] = self._op_cost(op, program, node, reads, writes) * node.weight
        return self._node_cache[key]

    def _op_cost(
        self, op: Op, program: Program, node: Node, reads: tuple[float, ...], writes: tuple[float, ...]
    ) -> np.ndarray:
        strategies = node.strategies
        assert strategies is not None
        sizes = np.zeros(len(strategies))
        tensors = [*zip(op.inputs, strategies.operands, reads, strict=True)]
        tensors += [*zip(op.outputs, strategies.results, writes, strict=True)]
        whole = np.zeros(len(strategies))
        for value, specs, weight in tensors:
            if value >= 0:
                local = self.local_bytes(program, value, specs)
                sizes += weight * local
                whole += local
        heavy = op.primitive in CONTRACTIONS
        moved = any(reads) or any(writes)
        flops = op.flops / strategies.split if moved or heavy else np.zeros(len(strategies))
        value = next((v for v in (*op.inputs, *op.outputs) if v >= 0), -1)
        dtype = program.values[value].dtype if value >= 0 else "float32"
        cost = np.asarray(self.costs.compute(flops, sizes, dtype, heavy), dtype=np.float64).copy()
        if heavy:
            cost += self._repeated(op, program, node)
        for i, axes in enumerate(strategies.reduce_axes):
            if axes:
                v = program.values[op.outputs[0]]
                space = self.graph.conversions.space(len(v.shape))
                size = self.costs.volume(v.shape, v.itemsize) / float(space.shards[strategies.results[0][i]])
                ordered = self.graph.conversions.mesh.sort_axes(axes)
                cost[i] += self.costs.collective(CollectiveKind.ALL_REDUCE, ordered, size)
        return cost

    def _repeated(self, op: Op, program: Program, node: Node) -> np.ndarray:
        """What the convention charges for a contraction that some axes repeat in full."""
        strategies = node.strategies
        assert strategies is not None
        mesh = self.graph.conversions.mesh
        axes = [a for a, n in zip(mesh.axis_names, mesh.shape, strict=True) if n > 1]
        cost = np.zeros(len(strategies))
        sizes = sum(
            self.local_bytes(program, v, s) for v, s in zip(op.inputs, strategies.operands, strict=True) if v >= 0
        )
        for i, row in enumerate(strategies.assignment):
            idle = tuple(a for a, c in zip(axes, row, strict=True) if c == -1)
            if idle:
                cost[i] = self.costs.heavy_replication(idle, float(np.asarray(sizes)[i]))
        return cost

    def local_bytes(self, program: Program, value: int, specs: np.ndarray) -> np.ndarray:
        """Bytes of one device's tile, per choice."""
        v = program.values[value]
        return self.tile_bytes(v.shape, v.itemsize, specs)

    def tile_bytes(self, shape: tuple[int, ...], itemsize: int, specs: np.ndarray) -> np.ndarray:
        space = self.graph.conversions.space(len(shape))
        return math.prod(shape) * itemsize / space.shards[specs]

    # -- edges ---------------------------------------------------------------------------------------------------

    def edges(self) -> list[Edge]:
        out: list[Edge] = []
        for link in self.graph.links:
            self.link_edges(link, out)
        return out

    def link_edges(self, link: Link, out: list[Edge]) -> None:
        by_node: dict[int, list[End]] = {}
        for consumer in link.consumers:
            by_node.setdefault(consumer.node, []).append(consumer)
        if link.copy < 0:
            for node, ends in by_node.items():
                self.add_edge(link, link.producer, node, ends, out)
            return
        node = self.graph.nodes[link.copy]
        if node.pairs is not None:
            key = ("made", link.producer.key, id(node.pairs))
            if key not in self._edge_cache:
                same = link.producer.specs[:, None] == node.pairs[None, :, 0]
                self._edge_cache[key] = np.where(same, 0.0, np.inf)
            out.append(Edge(u=link.producer.node, v=link.copy, costs=self._edge_cache[key]))
            handed = End(link.copy, node.pairs[:, 1], ("copy", id(node.pairs)))
        else:
            assert node.specs is not None
            handed = End(link.copy, node.specs, ("copy", id(node.specs)))
            self.add_edge(link, link.producer, link.copy, [handed], out)
        for reader, ends in by_node.items():
            # A result that is the argument itself keeps the argument's spec: nothing to price.
            if reader != link.producer.node:
                self.add_edge(link, handed, reader, ends, out)

    def add_edge(self, link: Link, producer: End, node: int, ends: list[End], out: list[Edge]) -> None:
        if node == producer.node:
            return
        unique = {e.key: e for e in ends}
        placed = (link.region, link.value) in self.placed
        key = (placed, link.shape, link.itemsize, link.weight, producer.key, *unique)
        if key not in self._edge_cache:
            if placed:
                same = [producer.specs[:, None] == end.specs[None, :] for end in unique.values()]
                self._edge_cache[key] = np.where(np.all(same, axis=0), 0.0, np.inf)
            else:
                self._edge_cache[key] = self.matrix(link, producer, list(unique.values())) * link.weight
        out.append(Edge(u=producer.node, v=node, costs=self._edge_cache[key]))

    def matrix(self, link: Link, producer: End, ends: list[End]) -> np.ndarray:
        """Price of what one consumer reads; the same spec in two operand positions is converted once."""
        table = self.graph.conversions.table(link.shape, link.itemsize)

        def price(specs: np.ndarray) -> np.ndarray:
            return table[producer.specs[:, None], specs[None, :]]

        total = price(ends[0].specs)
        for position, end in enumerate(ends[1:], 1):
            seen = np.zeros(len(end.specs), dtype=bool)
            for earlier in ends[:position]:
                seen |= earlier.specs == end.specs
            extra = price(end.specs)
            total = total + np.where(seen[None, :], np.where(np.isinf(extra), np.inf, 0.0), extra)
        return total

    # -- memory --------------------------------------------------------------------------------------------------

    def usages(self, timeline: Timeline) -> list[Usage]:
        """Arguments and results for the whole step, temporaries and kept copies while they live."""
        out: list[Usage] = []
        links = {(k.region, k.value): k for k in self.graph.links}
        donated = {o for i, o in self.program.aliases if self.program.donated and self.program.donated[i]}
        leaves = [(node, value, 0) for node, value in zip(self.graph.inputs, self.program.inputs, strict=True)]
        # Before a result exists, XLA:CPU puts temporaries into its memory.
        leaves += [
            (node, value, timeline.made.get(("", value), 0) if timeline.order.on_cpu else 0)
            for o, (node, value) in enumerate(zip(self.graph.outputs, self.program.outputs, strict=True))
            if o not in donated and value >= 0
        ]
        for port, value, lo in leaves:
            node = self.graph.nodes[port]
            assert node.specs is not None
            itemsize = self.program.values[value].itemsize
            out.append(self.usage(port, lo, timeline.num_times, node.shape, itemsize, node.specs))
        for interval in timeline.intervals:
            link = links.get((interval.region, interval.value))
            if link is None:
                continue
            end, lo, hi = link.producer, interval.lo, interval.hi
            if link.copy >= 0:
                # Handed on in the copy's layout; as it was made it lives for a moment.
                node = self.graph.nodes[link.copy]
                assert node.specs is not None
                if hi > lo + 1:
                    out.append(self.usage(link.copy, lo + 1, hi, link.shape, link.itemsize, node.specs))
                hi = lo + 1
            out.append(self.usage(end.node, lo, hi, link.shape, link.itemsize, end.specs))
        for link in self.graph.links:
            if link.copy >= 0 and self.graph.nodes[link.copy].specs is None:
                out.append(self.argument_copy_usage(link, timeline))
        return out

    def weight_usages(self, positions: frozenset[int]) -> list[Usage]:
        """Bytes of the arguments at these positions, at one time; a port that several share counts once."""
        ports = {self.graph.inputs[i]: self.program.inputs[i] for i in sorted(positions)}
        out = []
        for port, value in ports.items():
            node = self.graph.nodes[port]
            assert node.specs is not None
            out.append(self.usage(port, 0, 1, node.shape, self.program.values[value].itemsize, node.specs))
        return out

    def argument_copy_usage(self, link: Link, timeline: Timeline) -> Usage:
        """Bytes of an argument's second layout, from its first reader on."""
        node = self.graph.nodes[link.copy]
        assert node.pairs is not None
        lo = timeline.start.get(link.consumers[0].path, timeline.num_times - 1)
        if timeline.order.on_cpu:
            lo = timeline.made.get((link.region, link.value), lo)
        hi = timeline.last_read.get((link.region, link.value), lo + 1)
        key = ("copy", id(node.pairs), link.shape, link.itemsize)
        if key not in self._size_cache:
            kept = self.tile_bytes(link.shape, link.itemsize, node.pairs[:, 1])
            self._size_cache[key] = np.where(node.pairs[:, 0] == node.pairs[:, 1], 0, kept).astype(np.int64)
        return Usage(node=link.copy, lo=lo, hi=max(hi, lo + 1), size_bytes=self._size_cache[key])

    def usage(self, node: int, lo: int, hi: int, shape: tuple[int, ...], itemsize: int, specs: np.ndarray) -> Usage:
        key = ("tile", id(specs), shape, itemsize)
        if key not in self._size_cache:
            self._size_cache[key] = self.tile_bytes(shape, itemsize, specs).astype(np.int64)
        return Usage(node=node, lo=lo, hi=hi, size_bytes=self._size_cache[key])
