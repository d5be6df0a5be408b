"""The decision graph as records: who decides what, and which tensors join the decisions; ``decisions`` builds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from alpa_lite.core.program import Op, Program
from alpa_lite.costs.conversion import Conversions
from alpa_lite.intraop.strategies import StrategySet


@dataclass(eq=False, slots=True)
class Node:
    """One decision.

    Attributes:
        kind: "op", "port" or "copy".
        name: op path, or what a port is for.
        size: number of choices.
        weight: executions per step.
        op, program, strategies: of an op node (``program``: the region that holds it).
        specs: of a port or copy: the spec number per choice, at rank ``rank`` (of a copy: the spec handed on).
        pairs: of the copy of an argument or a partial sum: (spec as made, spec handed on) numbers per choice.
        shape: of a port or copy: global shape of its tensor.
    """

    kind: str
    name: str
    size: int
    weight: float = 1.0
    op: Op | None = None
    program: Program | None = None
    strategies: StrategySet | None = None
    specs: np.ndarray | None = None
    rank: int = 0
    pairs: np.ndarray | None = None
    shape: tuple[int, ...] = ()


class End(NamedTuple):
    """A tensor at a node: per choice of the node, the tensor's spec number.

    ``key`` identifies the array, so that equal pieces are priced once. ``path`` is where a consumer stands.
    """

    node: int
    specs: np.ndarray
    key: tuple[object, ...]
    path: str = ""


@dataclass(eq=False, slots=True)
class Link:
    """One value: its producer, its consumers in program order, and its copy node (-1: none).

    ``made_at`` is the path of the producing op, "in" for inputs of a region; ``region`` the path prefix.
    """

    region: str
    value: int
    shape: tuple[int, ...]
    itemsize: int
    weight: float
    producer: End
    consumers: list[End] = field(default_factory=list)
    copy: int = -1
    made_at: str = ""


@dataclass(eq=False, slots=True)
class DecisionGraph:
    """All decisions of one program on one mesh.

    ``inputs`` and ``outputs`` are the port nodes of the outer program (an aliased result shares its argument's node);
    ``body_ports[path]`` the ports of a control-flow op's operands and results, ``loop_reads`` those of operands that a
    ``scan`` reads in every iteration.
    """

    conversions: Conversions
    nodes: list[Node] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    op_nodes: dict[str, int] = field(default_factory=dict)
    body_ports: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    loop_reads: set[int] = field(default_factory=set)
    _handed: dict[int, np.ndarray] = field(default_factory=dict)
    # None until they are asked for, then one.
    _ends: list[LinkEnds] = field(default_factory=list)
    _chosen: list[OpChoices] = field(default_factory=list)

    def handed_on(self, copy: int) -> np.ndarray:
        """Per choice of a copy node, the number of the spec that it hands to the consumers."""
        node = self.nodes[copy]
        if node.pairs is None:
            assert node.specs is not None
            return node.specs
        if copy not in self._handed:
            self._handed[copy] = node.pairs[:, 1].copy()
        return self._handed[copy]

    def changed_links(self, choice: np.ndarray) -> list[int]:
        """Numbers of the links whose value is handed on or read in another spec than it is made in."""
        if not self._ends:
            self._ends.append(LinkEnds.of(self))
        return self._ends[0].changed(choice)

    @property
    def op_choices(self) -> OpChoices:
        """The choices of all ops."""
        if not self._chosen:
            self._chosen.append(OpChoices.of(self))
        return self._chosen[0]


@dataclass(frozen=True, slots=True, eq=False)
class OpChoices:
    """All strategies that ops choose from in one row, so that what they chose is found at once.

    Attributes:
        node, first: per op, its node, and where the strategies of that begin in the row.
        sets: what the row is made of, and ``begin`` where each of them begins.
        inside: per strategy, whether the op does an all-reduce of its own.
    """

    node: np.ndarray
    first: np.ndarray
    sets: list[StrategySet]
    begin: np.ndarray
    inside: np.ndarray

    @classmethod
    def of(cls, graph: DecisionGraph) -> OpChoices:
        begin: dict[int, int] = {}
        sets: list[StrategySet] = []
        first: list[int] = []
        total = 0
        for number in graph.op_nodes.values():
            strategies = graph.nodes[number].strategies
            assert strategies is not None
            place = begin.get(id(strategies))
            if place is None:
                place = begin[id(strategies)] = total
                sets.append(strategies)
                total += len(strategies)
            first.append(place)
        return cls(
            node=np.array(list(graph.op_nodes.values()), dtype=np.int64),
            first=np.array(first, dtype=np.int64),
            sets=sets,
            begin=np.array(list(begin.values()), dtype=np.int64),
            inside=np.array([bool(axes) for some in sets for axes in some.reduce_axes], dtype=bool),
        )

    def entries(self, choice: np.ndarray) -> np.ndarray:
        """Per op, the strategy that it chose, as a place in the row."""
        return self.first + choice[self.node]

    def strategy(self, entry: int) -> tuple[StrategySet, int]:
        """What is at a place in the row."""
        number = int(np.searchsorted(self.begin, entry, side="right")) - 1
        return self.sets[number], entry - int(self.begin[number])


@dataclass(frozen=True, slots=True, eq=False)
class LinkEnds:
    """The ends of all links in a few arrays, so that those few links are found that some choice converts.

    Attributes:
        numbers: spec numbers of all ends, those of equal ends once.
        node, first: per end, its node, and where its spec numbers begin.
        link: per end, its link; the producer's comes first, then the copy's if there is one, then the consumers'.
        producer: per link, the producer's end.
    """

    numbers: np.ndarray
    node: np.ndarray
    first: np.ndarray
    link: np.ndarray
    producer: np.ndarray

    @classmethod
    def of(cls, graph: DecisionGraph) -> LinkEnds:
        begin: dict[int, int] = {}
        parts: list[np.ndarray] = []
        nodes: list[int] = []
        first: list[int] = []
        counts: list[int] = []
        total = 0
        for link in graph.links:
            ends = [(link.producer.node, link.producer.specs)]
            if link.copy >= 0:
                ends.append((link.copy, graph.handed_on(link.copy)))
            ends += [(end.node, end.specs) for end in link.consumers]
            counts.append(len(ends))
            for node, specs in ends:
                place = begin.get(id(specs))
                if place is None:
                    place = begin[id(specs)] = total
                    parts.append(specs)
                    total += len(specs)
                nodes.append(node)
                first.append(place)
        numbers = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        count = np.array(counts, dtype=np.int64)
        link_of = np.repeat(np.arange(len(counts)), count)
        return cls(
            numbers, np.array(nodes, dtype=np.int64), np.array(first, dtype=np.int64), link_of, np.cumsum(count) - count
        )

    def changed(self, choice: np.ndarray) -> list[int]:
        """As ``DecisionGraph.changed_links``."""
        specs = self.numbers[self.first + choice[self.node]]
        return np.unique(self.link[specs != specs[self.producer][self.link]]).tolist()
