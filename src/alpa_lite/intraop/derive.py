"""The decision graph and the price slots on one mesh, from those on another mesh.

Axes and their sizes decide on what nodes choose from, not on which nodes there are and what joins them: ops, ports, copies, links
and slots are those of the other mesh, with other domains. A node or a link is made when somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, overload

import numpy as np

from alpa_lite.costs.conversion import Conversions
from alpa_lite.intraop.decision_graph import DecisionGraph, End, Link, LinkEnds, Node, OpChoices
from alpa_lite.intraop.domains import DomainMaker
from alpa_lite.intraop.slot_arrays import EdgeArrays, OpArrays, table_of
from alpa_lite.intraop.slots import EdgeSlot, NodeSlot, Slots
from alpa_lite.intraop.strategies import KnownStrategies, StrategySet

T = TypeVar("T")


class _Swapped(Sequence[T]):
    """The items of a sequence with other domains, each made when it is first asked for."""

    def __init__(self, given: Sequence[T], swap: Callable[[T], T]) -> None:
        self._given, self._swap = given, swap
        self._made: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._given)

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[T]: ...
    def __getitem__(self, place: int | slice) -> T | Sequence[T]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        if place not in self._made:
            self._made[place] = self._swap(self._given[place])
        return self._made[place]


@dataclass(eq=False, slots=True)
class _Swap:
    """Domains of one graph -> those of another, by identity."""

    sets: dict[int, StrategySet] = field(default_factory=dict)
    specs: dict[int, np.ndarray] = field(default_factory=dict)

    def add(self, old: StrategySet, new: StrategySet) -> None:
        self.sets[id(old)] = new
        self.specs.update(zip(map(id, (*old.operands, *old.results)), (*new.operands, *new.results), strict=True))

    def node(self, node: Node) -> Node:
        strategies = None if node.strategies is None else self.sets[id(node.strategies)]
        specs = None if node.specs is None else self.specs[id(node.specs)]
        pairs = None if node.pairs is None else self.specs[id(node.pairs)]
        domain = next(d for d in (strategies, pairs, specs) if d is not None)
        return Node(
            kind=node.kind,
            name=node.name,
            size=len(domain),
            weight=node.weight,
            op=node.op,
            program=node.program,
            strategies=strategies,
            specs=specs,
            rank=node.rank,
            pairs=pairs,
            shape=node.shape,
        )

    def end(self, end: End) -> End:
        return End(end.node, self.specs[id(end.specs)], end.key, end.path)

    def link(self, link: Link) -> Link:
        return Link(
            region=link.region,
            value=link.value,
            shape=link.shape,
            itemsize=link.itemsize,
            weight=link.weight,
            producer=self.end(link.producer),
            consumers=list(map(self.end, link.consumers)),
            copy=link.copy,
            made_at=link.made_at,
        )

    def node_slot(self, slot: NodeSlot) -> NodeSlot:
        return NodeSlot(
            self.node(slot.node), slot.penalised, slot.reads, slot.writes, slot.patches, slot.across, slot.link
        )

    def edge_slot(self, slot: EdgeSlot) -> EdgeSlot:
        pairs, copied = (None if rows is None else self.specs[id(rows)] for rows in (slot.pairs, slot.copied))
        ends = tuple(self.end(end) for end in slot.ends)
        return EdgeSlot(slot.link, self.end(slot.producer), ends, slot.kept, slot.looped, pairs, copied)


def derive(
    base: DecisionGraph, slots: Slots, conversions: Conversions, known: KnownStrategies
) -> tuple[DecisionGraph, Slots]:
    """The graph and its slots on the mesh of ``conversions``.

    Args:
        base, slots: of any mesh, built and not derived; no user's ``shard_map`` in it.
        conversions: on the mesh, under the same convention.
        known: strategies found so far, and where those found here go.
    """
    graph = DecisionGraph(
        conversions=conversions,
        inputs=base.inputs,
        outputs=base.outputs,
        op_nodes=base.op_nodes,
        body_ports=base.body_ports,
        loop_reads=base.loop_reads,
    )
    swap = _swap(base, DomainMaker(graph, known))
    graph.nodes, graph.links = _Swapped(base.nodes, swap.node), _Swapped(base.links, swap.link)
    ends, choices = base.link_ends, base.op_choices
    specs = [swap.specs[id(numbers)] for numbers in ends.specs]
    sets = [swap.sets[id(strategies)] for strategies in choices.sets]
    graph.share(
        LinkEnds.over(ends.node, ends.number, ends.link, ends.producer, specs),
        OpChoices.over(choices.node, choices.number, sets),
        base.names,
    )
    table = table_of(slots)
    made, read = ([swap.specs[id(numbers)] for numbers in column] for column in (table.made, table.read))
    arrays = (
        OpArrays.of(table, [swap.sets[id(strategies)] for strategies in table.sets], conversions),
        EdgeArrays.of(table, made, read, conversions),
    )
    return graph, Slots(
        nodes=slots.nodes,
        edges=slots.edges,
        node_slots=_Swapped(slots.node_slots, swap.node_slot),
        edge_slots=_Swapped(slots.edge_slots, swap.edge_slot),
        arrays=arrays,
        _columns=slots.columns(),
    )


def _swap(base: DecisionGraph, maker: DomainMaker) -> _Swap:
    """The domains of ``base`` and those made in their place."""
    old, swap = base.made, _Swap()
    for (_, unreduced, strict), (rule, strategies) in old.sets.items():
        swap.add(strategies, maker.strategies_of(rule, unreduced, strict))
    for key, specs in old.ports.items():
        swap.specs[id(specs)] = maker.port_domain(*key)
    for port, (rank, stacked) in old.stacked.items():
        swap.specs[id(stacked)] = maker.stack_map(rank)[swap.specs[port]]
    for kind, link, domain in old.copies.values():
        made = maker.new_copy_domain(kind, swap.link(link))
        swap.specs[id(domain)] = made
        if domain.ndim == 2:
            swap.specs[id(base.handed(domain))] = maker.graph.handed(made)
    return swap
