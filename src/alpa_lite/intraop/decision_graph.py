"""The decision graph as records: who decides what, and which tensors join the decisions; ``decisions`` builds it."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from alpa_lite.core.program import Op, Program
from alpa_lite.core.rule import OpShardingRule
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
        pairs: of copies that know how the value was made (``decisions.py``): (spec as made, spec handed on) numbers per choice.
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

    @property
    def is_argument(self) -> bool:
        """Of the whole program: its buffer stays, whatever is made of it."""
        return self.made_at == "in" and not self.region


@dataclass(eq=False, slots=True)
class Domains:
    """What nodes choose from, each made once, by what it is made for; nothing of that is the size of a mesh axis.

    Attributes:
        sets: (identity of a rule, which operands may be partial sums, whether every axis must be used) -> rule, strategies.
        ports: (shape, whether partial sums are allowed, whether it is fixed) -> specs.
        stacked: identity of a port's specs -> rank, specs of the stack of such tensors.
        copies: by kind and ends of the links, the kind, one of these links, and its specs or (made, handed on) pairs.
    """

    sets: dict[tuple[int, tuple[bool, ...], bool], tuple[OpShardingRule, StrategySet]] = field(default_factory=dict)
    ports: dict[tuple[tuple[int, ...], bool, bool], np.ndarray] = field(default_factory=dict)
    stacked: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)
    copies: dict[tuple[object, ...], tuple[str, Link, np.ndarray]] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class DecisionGraph:
    """All decisions of one program on one mesh.

    ``inputs`` and ``outputs`` are the port nodes of the outer program (an aliased result shares its argument's node);
    ``body_ports[path]`` the ports of a control-flow op's operands and results, ``loop_reads`` those of operands that a
    ``scan`` reads in every iteration.
    """

    conversions: Conversions
    nodes: Sequence[Node] = field(default_factory=list)
    links: Sequence[Link] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    op_nodes: dict[str, int] = field(default_factory=dict)
    body_ports: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    loop_reads: set[int] = field(default_factory=set)
    made: Domains = field(default_factory=Domains)
    _handed: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    # None until they are asked for, then one.
    _ends: list[LinkEnds] = field(default_factory=list)
    _chosen: list[OpChoices] = field(default_factory=list)
    _names: list[tuple[str, ...]] = field(default_factory=list)

    def handed_on(self, copy: int) -> np.ndarray:
        """Per choice of a copy node, the number of the spec that it hands to the consumers."""
        node = self.nodes[copy]
        if node.pairs is None:
            assert node.specs is not None
            return node.specs
        return self.handed(node.pairs)

    def handed(self, pairs: np.ndarray) -> np.ndarray:
        """What is handed on by (made, handed on) pairs."""
        if id(pairs) not in self._handed:
            self._handed[id(pairs)] = pairs, pairs[:, 1].copy()
        return self._handed[id(pairs)][1]

    def changed_links(self, choice: np.ndarray) -> list[int]:
        """Numbers of the links whose value is handed on or read in another spec than it is made in."""
        return self.link_ends.changed(choice)

    @property
    def link_ends(self) -> LinkEnds:
        """The ends of all links."""
        if not self._ends:
            self._ends.append(LinkEnds.of(self))
        return self._ends[0]

    def share(self, ends: LinkEnds, choices: OpChoices, names: tuple[str, ...]) -> None:
        """Enters what is known from another graph."""
        self._ends.append(ends)
        self._chosen.append(choices)
        self._names.append(names)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the nodes."""
        if not self._names:
            self._names.append(tuple(node.name for node in self.nodes))
        return self._names[0]

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
        node, number: per op, its node, and which of ``sets`` that chooses from.
        sets: what the row is made of, and ``begin`` where each of them begins.
        inside: per strategy, whether the op does an all-reduce of its own.
    """

    node: np.ndarray
    number: np.ndarray
    sets: list[StrategySet]
    begin: np.ndarray
    inside: np.ndarray

    @classmethod
    def of(cls, graph: DecisionGraph) -> OpChoices:
        nodes = list(graph.op_nodes.values())
        sets: dict[int, StrategySet] = {}
        numbers: dict[int, int] = {}
        number = []
        for node in nodes:
            strategies = graph.nodes[node].strategies
            assert strategies is not None
            sets.setdefault(id(strategies), strategies)
            number.append(numbers.setdefault(id(strategies), len(numbers)))
        return cls.over(np.array(nodes, dtype=np.int64), np.array(number, dtype=np.int64), list(sets.values()))

    @classmethod
    def over(cls, node: np.ndarray, number: np.ndarray, sets: list[StrategySet]) -> OpChoices:
        inside = np.array([bool(axes) for some in sets for axes in some.reduce_axes], dtype=bool)
        return cls(node=node, number=number, sets=sets, begin=_begins(sets), inside=inside)

    def entries(self, choice: np.ndarray) -> np.ndarray:
        """Per op, the strategy that it chose, as a place in the row."""
        return self.begin[self.number] + choice[self.node]

    def strategy(self, entry: int) -> tuple[StrategySet, int]:
        """What is at a place in the row."""
        number = int(np.searchsorted(self.begin, entry, side="right")) - 1
        return self.sets[number], entry - int(self.begin[number])


@dataclass(frozen=True, slots=True, eq=False)
class LinkEnds:
    """The ends of all links in a few arrays, so that those few links are found that some choice converts.

    Attributes:
        node, number: per end, its node, and which of ``specs`` its spec numbers are.
        link: per end, its link; the producer's comes first, then the copy's if there is one, then the consumers'.
        producer: per link, the producer's end.
        specs: spec numbers of equal ends once, and ``begin`` where each begin in ``all_specs``.
    """

    node: np.ndarray
    number: np.ndarray
    link: np.ndarray
    producer: np.ndarray
    specs: list[np.ndarray]
    begin: np.ndarray
    all_specs: np.ndarray

    @classmethod
    def of(cls, graph: DecisionGraph) -> LinkEnds:
        numbers: dict[int, int] = {}
        parts: list[np.ndarray] = []
        nodes: list[int] = []
        number: list[int] = []
        counts: list[int] = []
        for link in graph.links:
            ends = [(link.producer.node, link.producer.specs)]
            if link.copy >= 0:
                ends.append((link.copy, graph.handed_on(link.copy)))
            ends += [(end.node, end.specs) for end in link.consumers]
            counts.append(len(ends))
            for node, specs in ends:
                found = numbers.get(id(specs))
                if found is None:
                    found = numbers[id(specs)] = len(parts)
                    parts.append(specs)
                nodes.append(node)
                number.append(found)
        count = np.array(counts, dtype=np.int64)
        link_of = np.repeat(np.arange(len(counts)), count)
        ends_of = np.array(nodes, dtype=np.int64), np.array(number, dtype=np.int64)
        return cls.over(*ends_of, link_of, np.cumsum(count) - count, parts)

    @classmethod
    def over(
        cls, node: np.ndarray, number: np.ndarray, link: np.ndarray, producer: np.ndarray, specs: list[np.ndarray]
    ) -> LinkEnds:
        every = np.concatenate(specs) if specs else np.zeros(0, dtype=np.int64)
        return cls(node, number, link, producer, specs, _begins(specs), every)

    def changed(self, choice: np.ndarray) -> list[int]:
        """As ``DecisionGraph.changed_links``."""
        specs = self.all_specs[self.begin[self.number] + choice[self.node]]
        return np.unique(self.link[specs != specs[self.producer][self.link]]).tolist()


def _begins(parts: Sequence[Sized]) -> np.ndarray:
    """Where each part begins in all of them behind one another."""
    return np.cumsum([0, *map(len, parts)])[:-1]
