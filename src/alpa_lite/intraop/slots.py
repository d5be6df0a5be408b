"""Which nodes and edges of a decision graph cost the same, on every mesh and under all prices: each such set is a slot.

Repeated layers fall into the same slots, and meshes with the same graph have the same slots, so what is left for one mesh
is one price per slot (``pricing.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from alpa_lite.core.program import Program
from alpa_lite.costs.facts import Facts
from alpa_lite.costs.fusion import dims_read_across, fused_values, moved_bytes_weights, patch_passes
from alpa_lite.intraop.decision_graph import DecisionGraph, End, Link, Node

if TYPE_CHECKING:
    from alpa_lite.intraop.slot_arrays import EdgeArrays, OpArrays, SlotTable


@dataclass(frozen=True, slots=True, eq=False)
class NodeSlot:
    """One of the equal nodes.

    Attributes:
        node: the decision.
        penalised: whether what it chooses is charged for being whole everywhere.
        reads, writes: of an op, how often each operand and result passes memory.
        patches: of a convolution, elements of its patches for one of its image (``patch_passes``).
        across: of a product, the dims of its first operand that it sums over across the rows (``dims_read_across``).
        link: of a copy, the value.
    """

    node: Node
    penalised: bool = False
    reads: tuple[float, ...] = ()
    writes: tuple[float, ...] = ()
    patches: float = 0.0
    across: tuple[int, ...] = ()
    link: Link | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EdgeSlot:
    """One of the equal edges: the value is made as ``producer`` says and read by one node, as all of ``ends`` say.

    ``kept``: it may not be converted. ``looped``: it is kept for a loop, and may not be gathered on its way there, because
    the copy can do that and its bytes are counted. ``pairs``: the reader is the copy that chooses from these (made, handed
    on) layouts. ``copied``: the producer is such a copy, with these; a reader takes what is nearer of the two.
    """

    link: Link
    producer: End
    ends: tuple[End, ...] = ()
    kept: bool = False
    looped: bool = False
    pairs: np.ndarray | None = None
    copied: np.ndarray | None = None


@dataclass(eq=False, slots=True)
class Slots:
    """All of one graph: a slot number per node, and (node, node, slot number) per edge.

    ``table`` and ``arrays`` are for ``pricing.py`` (``slot_arrays.py``).
    """

    nodes: list[int] = field(default_factory=list)
    edges: list[tuple[int, int, int]] = field(default_factory=list)
    node_slots: Sequence[NodeSlot] = ()
    edge_slots: Sequence[EdgeSlot] = ()
    table: SlotTable | None = None
    arrays: tuple[OpArrays, EdgeArrays] | None = None
    _columns: tuple[np.ndarray, np.ndarray] | None = None

    def columns(self) -> tuple[np.ndarray, np.ndarray]:
        """``nodes``, and ``edges`` as three rows."""
        if self._columns is None:
            edges = np.array(self.edges, dtype=np.int64).reshape(-1, 3).T
            self._columns = np.array(self.nodes, dtype=np.int64), np.ascontiguousarray(edges)
        return self._columns


def slots_of(
    program: Program,
    graph: DecisionGraph,
    penalised: frozenset[int] = frozenset(),
    placed: frozenset[tuple[str, int]] = frozenset(),
    facts: Facts | None = None,
) -> Slots:
    """The slots of a graph.

    Args:
        program: that the graph was built from.
        graph: the decisions.
        penalised: nodes that are charged for being whole everywhere.
        placed: (region, value) pairs that may not be converted (weights, under some conventions; what stages exchange).
        facts: of the program, if some are known.
    """
    sorter = _Sorter(graph, placed)
    copies = {link.copy: link for link in graph.links if link.copy >= 0}
    moved = (Facts(program) if facts is None else facts).of(_moved, program)
    for index, node in enumerate(graph.nodes):
        if node.op is not None and node.program is not None:
            key = ("op", node.op.key, moved[node.name], id(node.strategies), node.weight)
            if sorter.is_new(key):
                reads, writes, patches, across = moved[node.name]
                sorter.node_slots.append(NodeSlot(node, reads=reads, writes=writes, patches=patches, across=across))
        elif node.kind == "port":
            if sorter.is_new(("port", id(node.specs), index in penalised)):
                sorter.node_slots.append(NodeSlot(node, index in penalised))
        else:
            link = copies[index]
            if sorter.is_new(("copy", node.shape, id(node.specs), id(node.pairs), node.weight, link.itemsize)):
                sorter.node_slots.append(NodeSlot(node, link=link))
    for link in graph.links:
        sorter.link(link)
    return sorter.slots


def _moved(program: Program) -> dict[str, tuple[tuple[float, ...], tuple[float, ...], float, tuple[int, ...]]]:
    """Path of every op -> how often each of its operands and results passes memory, and what its library does besides."""
    fused: dict[int, tuple[bool, ...]] = {}
    found = {}
    for path, owner, op in program.walk():
        if id(owner) not in fused:
            fused[id(owner)] = fused_values(owner)
        found[path] = *moved_bytes_weights(op, owner, fused[id(owner)]), patch_passes(op, owner), dims_read_across(op)
    return found


class _Sorter:
    def __init__(self, graph: DecisionGraph, placed: frozenset[tuple[str, int]]) -> None:
        self.graph, self.placed = graph, placed
        self.node_slots: list[NodeSlot] = []
        self.edge_slots: list[EdgeSlot] = []
        self.slots = Slots(node_slots=self.node_slots, edge_slots=self.edge_slots)
        self.node_numbers: dict[tuple[object, ...], int] = {}
        self.edge_numbers: dict[tuple[object, ...], int] = {}

    def is_new(self, key: tuple[object, ...]) -> bool:
        """Gives the next node its slot; whether that is one that is still to be made."""
        number = self.node_numbers.setdefault(key, len(self.node_slots))
        self.slots.nodes.append(number)
        return number == len(self.node_slots)

    def is_new_edge(self, u: int, v: int, key: tuple[object, ...]) -> bool:
        """The same for the edge between two nodes."""
        number = self.edge_numbers.setdefault(key, len(self.edge_slots))
        self.slots.edges.append((u, v, number))
        return number == len(self.edge_slots)

    def link(self, link: Link) -> None:
        by_node: dict[int, list[End]] = {}
        for consumer in link.consumers:
            by_node.setdefault(consumer.node, []).append(consumer)
        if link.copy < 0:
            for node, ends in by_node.items():
                self.read(link, link.producer, node, ends)
            return
        node = self.graph.nodes[link.copy]
        if node.pairs is not None:
            key = ("made", link.producer.key, id(node.pairs))
            if self.is_new_edge(link.producer.node, link.copy, key):
                self.edge_slots.append(EdgeSlot(link, link.producer, pairs=node.pairs))
            handed = End(link.copy, self.graph.handed(node.pairs), ("copy", id(node.pairs)))
        else:
            assert node.specs is not None
            handed = End(link.copy, node.specs, ("copy", id(node.specs)))
            self.read(link, link.producer, link.copy, [handed])
        for reader, ends in by_node.items():
            looped = link.is_argument and reader in self.graph.loop_reads
            # A result that is the argument itself keeps the argument's spec: nothing to price.
            if reader != link.producer.node:
                self.read(link, handed, reader, ends, looped, node.pairs)

    def read(
        self,
        link: Link,
        producer: End,
        node: int,
        ends: list[End],
        looped: bool = False,
        copied: np.ndarray | None = None,
    ) -> None:
        if node == producer.node:
            return
        unique = {e.key: e for e in ends}
        kept = (link.region, link.value) in self.placed
        key = (kept, looped, link.is_argument, link.shape, link.itemsize, link.weight, producer.key, *unique)
        if self.is_new_edge(producer.node, node, key):
            self.edge_slots.append(EdgeSlot(link, producer, tuple(unique.values()), kept, looped, copied=copied))
