"""What the nodes of a decision graph choose from: layouts of ports, strategies of ops, layouts that copies hand on."""

from __future__ import annotations

from collections import Counter

import numpy as np

from alpa_lite.core.rule import OpShardingRule
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.intraop.decision_graph import DecisionGraph, End, Link
from alpa_lite.intraop.strategies import KnownStrategies, StrategySet


class DomainMaker:
    """Makes the domains of one graph, each once; ``known``: strategies found on meshes with the same axes."""

    def __init__(self, graph: DecisionGraph, known: KnownStrategies) -> None:
        self.graph, self.known = graph, known
        self.conversions, self.made, self.loop_reads = graph.conversions, graph.made, graph.loop_reads
        self.stack_maps: dict[int, np.ndarray] = {}
        self.shapes: dict[tuple[int, ...], np.ndarray] = {}  # which specs divide one
        self.masks: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # spec numbers, by identity, and bool per spec

    def port_domain(self, shape: tuple[int, ...], unreduced: bool, fixed: bool) -> np.ndarray:
        """The specs that a port chooses from, replicated first."""
        key = (shape, unreduced, fixed)
        if key not in self.made.ports:
            space, valid = self.conversions.space(len(shape)), self.valid(shape)
            keep = [i for i, s in enumerate(space.specs) if valid[i] and (unreduced or not s.unreduced)]
            keep.sort(key=lambda i: (not space.specs[i].is_replicated, i))
            self.made.ports[key] = np.array(keep[:1] if fixed else keep, dtype=np.int64)
        return self.made.ports[key]

    def stack_map(self, rank: int) -> np.ndarray:
        """Spec number of a slice -> spec number of the stacked tensor."""
        if rank not in self.stack_maps:
            inner, outer = self.conversions.space(rank), self.conversions.space(rank + 1)
            self.stack_maps[rank] = np.array(
                [outer.index[ShardingSpec(((), *s.dims), s.unreduced)] for s in inner.specs], dtype=np.int64
            )
        return self.stack_maps[rank]

    def strategies_of(self, rule: OpShardingRule, unreduced: tuple[bool, ...], strict: bool) -> StrategySet:
        mesh = self.conversions.mesh
        return self.known.of(rule, mesh, unreduced_inputs=unreduced, sharded_contractions=strict)

    def copy_domain(self, kind: str, link: Link) -> np.ndarray:
        """What the copy node of a value chooses from; links of equal ends share it."""
        key: tuple[object, ...] = (kind, link.producer.key, link.shape)
        if kind != "reduced":  # one reader does not want what two of a kind do, nor a loop what others do
            readers = Counter((c.key, c.node in self.loop_reads) for c in link.consumers)
            key = (*key, *((reader, count > 1) for reader, count in readers.items()))
        found = self.made.copies.get(key)
        if found is None:
            found = self.made.copies[key] = kind, link, self.new_copy_domain(kind, link)
        return found[2]

    def new_copy_domain(self, kind: str, link: Link) -> np.ndarray:
        if kind in ("pairs", "rows"):
            return self.all_pairs(link, by_gathers=kind == "rows")
        return self.handed_on(link) if kind == "handed on" else self.reductions(link)

    def valid(self, shape: tuple[int, ...]) -> np.ndarray:
        """bool per spec, whether it divides a shape."""
        found = self.shapes.get(shape)
        if found is None:
            found = self.shapes[shape] = self.conversions.space(len(shape)).valid(shape)
        return found

    def mask(self, specs: np.ndarray, count: int) -> np.ndarray:
        """bool per spec of so many, whether it is one of these."""
        if id(specs) not in self.masks:
            self.masks[id(specs)] = specs, np.bincount(specs, minlength=count) > 0
        return self.masks[id(specs)][1]

    def handed_on(self, link: Link) -> np.ndarray:
        """Specs in which a value may be handed to its consumers: as it is made, or as several of them want it."""
        return np.array(sorted({*link.producer.specs.tolist(), *self.wanted(link)}), dtype=np.int64)

    def reductions(self, link: Link) -> np.ndarray:
        """(made, handed on) spec numbers of a copy that reduces partial sums, for all consumers together."""
        space, valid = self.conversions.space(len(link.shape)), self.valid(link.shape)
        rows = []
        for made in sorted(set(link.producer.specs.tolist())):
            before = space.specs[made]
            after = [i for i, s in enumerate(space.specs) if valid[i] and _reduces_to(before, s)]
            rows += [(made, i) for i in after] if before.unreduced else [(made, made)]
        return np.array(rows, dtype=np.int64).reshape(-1, 2)

    def wanted(self, link: Link) -> list[int]:
        """Specs that at least two consumers can read."""
        valid = self.valid(link.shape)
        count = np.zeros(len(valid), dtype=np.int64)
        for consumer in link.consumers:
            count += self.mask(consumer.specs, len(valid))
        found: list[int] = np.flatnonzero((count > 1) & valid).tolist()
        return found

    def in_loops(self, link: Link) -> list[End]:
        """Consumers that read the value in every iteration: a second layout of it is kept while the loop runs."""
        return [c for c in link.consumers if c.node in self.loop_reads] if self.loop_reads else []

    def all_pairs(self, link: Link, *, by_gathers: bool) -> np.ndarray:
        """(made, handed on) spec numbers; what nothing divides is handed on as it is made. ``by_gathers``: only what all-gathers
        reach."""
        rank, looped, valid = len(link.shape), self.in_loops(link), self.valid(link.shape)
        shared = sorted({*self.wanted(link), *(s for c in looped for s in c.specs.tolist() if valid[s])})
        gathered, rows = self.conversions.space(rank).gathered, []
        for made in sorted(set(link.producer.specs.tolist())):
            rows.append((made, made))
            rows += [(made, k) for k in shared if k != made and (gathered[made, k] or not by_gathers)]
        return np.array(rows, dtype=np.int64).reshape(-1, 2)


def _reduces_to(made: ShardingSpec, spec: ShardingSpec) -> bool:
    """Whether reducing alone leads from ``made`` to ``spec``: no axis is left partial, none that split a dim is moved."""
    added = [s[len(m) :] for m, s in zip(made.dims, spec.dims, strict=True) if s[: len(m)] == m]
    scattered = {axis for dim in added for axis in dim}
    return len(added) == made.rank and not spec.unreduced and scattered <= set(made.unreduced)
