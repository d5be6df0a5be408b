"""Decision graph + cost model + pins -> ``IntraOpProblem``: node costs, edge matrices, memory usages.

Equal pieces (an op of equal key under equal strategies; a value of equal type between equal ends) share one array object,
so that repeated layers cost nothing to price and presolve sees them as equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.program import Op, Program
from alpa_lite.costs.conversion import Conversions
from alpa_lite.costs.memory import Timeline
from alpa_lite.intraop.decision_graph import DecisionGraph, Link, Node
from alpa_lite.intraop.decisions import CONTRACTIONS
from alpa_lite.intraop.problem import IntraOpProblem, Usage
from alpa_lite.intraop.repeated import Repeated, RepeatedEdges
from alpa_lite.intraop.slot_arrays import EdgeArrays, OpArrays, table_of
from alpa_lite.intraop.slots import EdgeSlot, NodeSlot, Slots, slots_of
from alpa_lite.intraop.strategies import UNUSED

if TYPE_CHECKING:
    from alpa_lite.costs.model import CostModel


def slot_arrays(slots: Slots, conversions: Conversions) -> tuple[OpArrays, EdgeArrays]:
    """The arrays of all slots, made once for all meshes of a graph."""
    if slots.arrays is None:
        table = table_of(slots)
        edges = EdgeArrays.of(table, table.made, table.read, conversions)
        slots.arrays = OpArrays.of(table, table.sets, conversions), edges
    return slots.arrays


@dataclass(eq=False, slots=True)
class Pricer:
    """Prices one graph under one cost model, each slot once.

    Attributes:
        slots: of the graph (``slots_of``).
    """

    program: Program
    graph: DecisionGraph
    costs: CostModel
    slots: Slots
    _priced: tuple[list[np.ndarray], list[np.ndarray]] | None = None
    _counted_edges: list[np.ndarray] | None = None
    _size_cache: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict)
    _tiles: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(
        cls, program: Program, graph: DecisionGraph, costs: CostModel, state_inputs: frozenset[int] = frozenset()
    ) -> Pricer:
        """Of a graph without anything shared; ``state_inputs`` are ports that some conventions charge for being whole."""
        penalised = state_inputs if costs.replication_penalty > 0 else frozenset()
        return cls(program=program, graph=graph, costs=costs, slots=slots_of(program, graph, penalised))

    def problem(
        self,
        *,
        allowed: Mapping[int, np.ndarray] | None = None,
        timeline: Timeline | None = None,
        usage_limit: int | None = None,
        counted: bool = False,
        classes: np.ndarray | None = None,
    ) -> IntraOpProblem:
        """The ILP.

        Args:
            allowed: per node, a mask of choices that pins permit.
            timeline: with it, memory usages are added.
            usage_limit: bytes per device.
            counted: without memory that usages would not see; so it always is with a timeline.
            classes: see ``IntraOpProblem``.
        """
        nodes, edges = self.priced()
        if timeline or counted:
            if self._counted_edges is None:
                slots = self.slots.edge_slots
                self._counted_edges = [self._counted(slot, costs) for slot, costs in zip(slots, edges, strict=True)]
            edges = self._counted_edges
        numbers, (u, v, edge_numbers) = self.slots.columns()
        if allowed:
            pinned = sorted(allowed)
            own = [np.where(allowed[node], nodes[numbers[node]], np.inf) for node in pinned]
            numbers = numbers.copy()
            numbers[pinned] = np.arange(len(nodes), len(nodes) + len(pinned))
            nodes = nodes + own
        return IntraOpProblem(
            node_costs=Repeated(numbers, nodes),
            edges=RepeatedEdges(u, v, Repeated(edge_numbers, edges)),
            usages=tuple(self.usages(timeline)) if timeline else (),
            usage_limit=usage_limit,
            num_times=timeline.num_times if timeline else 0,
            names=self.graph.names,
            classes=classes,
        )

    def priced(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Costs per node slot and per edge slot."""
        if self._priced is None:
            arrays = slot_arrays(self.slots, self.graph.conversions)
            ops, edges = self.op_costs(arrays[0]), arrays[1].costs(self.graph.conversions)
            node_slots, edge_slots = self.slots.node_slots, self.slots.edge_slots
            nodes = [ops[n] if n in ops else self.node_cost(node_slots[n]) for n in range(len(node_slots))]
            others = range(len(edge_slots))
            self._priced = nodes, [edges[n] if n in edges else self.edge_cost(edge_slots[n]) for n in others]
        return self._priced

    # -- nodes ---------------------------------------------------------------------------------------------------

    def node_cost(self, slot: NodeSlot) -> np.ndarray:
        """Of a copy, or of an argument or result."""
        return self.port_cost(slot) if slot.link is None else self.copy_cost(slot.node, slot.link)

    def op_costs(self, ops: OpArrays) -> dict[int, np.ndarray]:
        """Costs of ops by the numbers of their slots; the convention is asked once for all ops of a kind."""
        flops, moved = ops.work(self.graph.conversions.mesh, self.graph.conversions)
        costs, begin = np.zeros(len(flops)), ops.begin.tolist()
        for dtype, heavy, first, end in ops.kinds:
            part = slice(begin[first], begin[end])
            costs[part] = self.costs.compute(flops[part], moved[part], dtype, heavy)
        for place in ops.special:
            self._with_extras(self.slots.node_slots[ops.numbers[place]].node, costs[begin[place] : begin[place + 1]])
        costs *= ops.weight
        return {number: costs[a:b] for number, a, b in zip(ops.numbers, begin, begin[1:], strict=False)}

    def copy_cost(self, node: Node, link: Link) -> np.ndarray:
        if node.pairs is None:
            return np.zeros(node.size)
        table = self.graph.conversions.table(node.shape, link.itemsize)
        return table[node.pairs[:, 0], node.pairs[:, 1]] * node.weight

    def port_cost(self, slot: NodeSlot) -> np.ndarray:
        """Free, but for the penalty that some conventions put on state that every device holds whole."""
        node = slot.node
        assert node.specs is not None
        if not slot.penalised:
            return np.zeros(node.size)
        space = self.graph.conversions.space(node.rank)
        whole = np.array([space.specs[i].is_replicated for i in node.specs])
        return whole * self.costs.replication_penalty

    def _with_extras(self, node: Node, cost: np.ndarray) -> None:
        """Adds what repeating a contraction costs, and the all-reduces inside the op."""
        op, program, strategies = node.op, node.program, node.strategies
        assert op is not None and program is not None and strategies is not None
        if op.primitive in CONTRACTIONS:
            cost += self._repeated(op, program, node)
        for i, axes in enumerate(strategies.reduce_axes):
            if axes:
                v = program.values[op.outputs[0]]
                space = self.graph.conversions.space(len(v.shape))
                size = self.costs.volume(v.shape, v.itemsize) / float(space.shards[strategies.results[0][i]])
                ordered = self.graph.conversions.mesh.sort_axes(axes)
                cost[i] += self.costs.collective(CollectiveKind.ALL_REDUCE, ordered, size)

    def _repeated(self, op: Op, program: Program, node: Node) -> np.ndarray:
        """What the convention charges for a contraction that some axes repeat in full."""
        strategies = node.strategies
        assert strategies is not None
        mesh = self.graph.conversions.mesh
        axes = [a for a, n in zip(mesh.axis_names, mesh.shape, strict=True) if n > 1]
        cost = np.zeros(len(strategies))
        operands = zip(op.inputs, strategies.operands, strict=True)
        sizes = sum((self.local_bytes(program, v, s) for v, s in operands if v >= 0), np.zeros(len(cost)))
        idle = strategies.assignment == UNUSED
        for kind in dict.fromkeys(map(tuple, idle.tolist())):
            some = tuple(itertools.compress(axes, kind))
            if some:
                rows = (idle == kind).all(axis=1)
                cost[rows] = self.costs.heavy_replication(some, sizes[rows])
        return cost

    def local_bytes(self, program: Program, value: int, specs: np.ndarray) -> np.ndarray:
        """Bytes of one device's tile, per choice."""
        v = program.values[value]
        key = (v.shape, v.itemsize, id(specs))
        found = self._tiles.get(key)
        if found is None:
            found = self._tiles[key] = self.tile_bytes(v.shape, v.itemsize, specs)
        return found

    def tile_bytes(self, shape: tuple[int, ...], itemsize: int, specs: np.ndarray) -> np.ndarray:
        space = self.graph.conversions.space(len(shape))
        return math.prod(shape) * itemsize / space.shards[specs]

    # -- edges ---------------------------------------------------------------------------------------------------

    def edge_cost(self, slot: EdgeSlot) -> np.ndarray:
        made = slot.producer.specs[:, None]
        if slot.pairs is not None:
            return np.where(made == slot.pairs[None, :, 0], 0.0, np.inf)
        if slot.kept:
            return np.where(np.all([made == end.specs[None, :] for end in slot.ends], axis=0), 0.0, np.inf)
        return self.matrix(slot, self._made_in_loops(slot) if slot.looped else None) * slot.link.weight

    def _made_in_loops(self, slot: EdgeSlot) -> np.ndarray:
        """What is gathered would be a second layout that the loop keeps: its copy node says so."""
        gathered = self.graph.conversions.space(len(slot.link.shape)).gathered
        return gathered & ~np.eye(len(gathered), dtype=bool)

    def _counted(self, slot: EdgeSlot, costs: np.ndarray) -> np.ndarray:
        """Without second layouts that no usage counts: of an argument that a loop keeps, all but slices (gathers are copies); and
        of a value inside, what was made is gone once it is copied."""
        if slot.kept:
            return costs
        if not slot.looped:
            inside = slot.copied is not None and not slot.link.is_argument
            return self.matrix(replace(slot, copied=None)) * slot.link.weight if inside else costs
        return self.matrix(slot, ~self.graph.conversions.space(len(slot.link.shape)).gathered.T) * slot.link.weight

    def matrix(self, slot: EdgeSlot, barred: np.ndarray | None = None) -> np.ndarray:
        """Price of what one consumer reads, of the nearest layout; the same spec in two operand positions is converted once.

        ``barred``: bool ``[made, read]`` of specs that may not be joined.
        """
        link = slot.link
        table = self.graph.conversions.table(link.shape, link.itemsize)
        if barred is not None:
            table = np.where(barred, np.inf, table)
        made = [slot.producer.specs, *([] if slot.copied is None else [slot.copied[:, 0]])]

        def price(read: np.ndarray) -> np.ndarray:
            found = [table[source[:, None], read[None, :]] for source in made]
            return found[0] if len(found) == 1 else np.minimum(*found)

        total = price(slot.ends[0].specs)
        for position, end in enumerate(slot.ends[1:], 1):
            seen = np.zeros(len(end.specs), dtype=bool)
            for earlier in slot.ends[:position]:
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
            if link is None or interval.updated:
                continue
            end, lo, hi = link.producer, interval.lo, interval.hi
            if link.copy >= 0:
                # Handed on in the copy's layout; as it was made it lives for a moment.
                if hi > lo + 1:
                    handed = self.graph.handed_on(link.copy)
                    out.append(self.usage(link.copy, lo + 1, hi, link.shape, link.itemsize, handed))
                hi = lo + 1
            out.append(self.usage(end.node, lo, hi, link.shape, link.itemsize, end.specs))
        for link in self.graph.links:
            if link.copy >= 0 and link.is_argument and self.graph.nodes[link.copy].pairs is not None:
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
