"""XLA:CPU's choice of what to fuse: which instructions have results in memory, and what each of those reads.

Follows ``InstructionFusion`` and ``CpuInstructionFusion`` (OpenXLA, ``xla/service``): every instruction takes in producers
that are loops, last instructions first. A producer with several readers is computed once per reader if that is cheap and
reads no more memory; otherwise it is stored unless all its readers end in one fusion. Reductions are calls of the CPU
library (``xla/backends/cpu/transforms/ynn_matcher.h``): they take in products, and read everything else from memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from alpa_lite.costs.instructions import InstructionGraph

_RESULT = -1  # stands among the readers of what the region returns


@dataclass(eq=False, slots=True)
class Fusion:
    """One fusion: the roots of others that it reads from memory, and over which of those it may write its result."""

    reads: list[int]
    overwrites: list[int]


def fuse(graph: InstructionGraph) -> dict[int, Fusion]:
    """Root instruction -> its fusion, in the order of the graph; instructions without a reader are left out."""
    return _Fuser(graph).run()


class _Fuser:
    def __init__(self, graph: InstructionGraph) -> None:
        self.nodes = graph.instructions
        self.traits = [node.traits for node in self.nodes]
        self.operands = _library_operands(graph)
        self.readers: list[set[int]] = [set() for _ in self.nodes]
        for o in graph.outputs:
            if o >= 0:
                self.readers[o].add(_RESULT)
        for number in range(len(self.nodes) - 1, -1, -1):
            if self.readers[number]:
                for o in self.operands[number]:
                    self.readers[o].add(number)
        self.stored: set[int] = set()

    def run(self) -> dict[int, Fusion]:
        self.find_stored()
        found: dict[int, Fusion] = {}
        for root in range(len(self.nodes) - 1, -1, -1):
            if self.readers[root] or self.traits[root].held:
                found[root] = self.grow(root)
        return dict(sorted(found.items()))

    def find_stored(self) -> None:
        """``ComputeGloballyUnfusible``: what reads more memory if repeated, and cannot enter all its readers."""
        after = self.descendants()
        for number in range(len(self.nodes) - 1, -1, -1):
            if self.readers[number] and self.traits[number].loop and not self.reads_little(number):
                checked: dict[int, bool] = {}
                inside = all(self.enters(number, r, after[number], checked) for r in self.readers[number])
                if not inside:
                    self.stored.add(number)

    def descendants(self) -> list[int]:
        """Per instruction a bit set of what depends on it."""
        after = [0] * len(self.nodes)
        for number in range(len(self.nodes) - 1, -1, -1):
            for r in self.readers[number]:
                if r != _RESULT:
                    after[number] |= after[r] | 1 << r
        return after

    def reads_little(self, number: int) -> bool:
        """At most one operand of the result's rank, or no more elements read than written."""
        node = self.nodes[number]
        reads = [self.nodes[o] for o in self.operands[number]]
        large = sum(r.rank >= node.rank for r in reads if not r.traits.source)
        return large <= 1 or sum(r.elements for r in reads) <= node.elements

    def enters(self, producer: int, reader: int, after: int, checked: dict[int, bool]) -> bool:
        """``CanFuseOnAllPaths``: whether every way from ``producer`` to ``reader`` can be fused."""
        if reader not in checked:
            checked[reader] = reader != _RESULT and all(
                self.can_join(o, reader) and (o == producer or self.enters(producer, o, after, checked))
                for o in self.operands[reader]
                if o == producer or after >> o & 1
            )
        return checked[reader]

    def can_join(self, producer: int, reader: int) -> bool:
        traits = self.traits[producer]
        once = len(self.readers[producer]) == 1
        return (
            traits.loop
            and self.traits[reader].loop
            and producer not in self.stored
            and (once or not (traits.expensive or traits.joined))
        )

    def grow(self, root: int) -> Fusion:
        """Take producers in, the latest first, until none can come."""
        reads, reused = set(self.operands[root]), set(self.operands[root]) if self.traits[root].source else set()
        members = [self.traits[root]]
        while (
            joined := next((o for o in sorted(reads, reverse=True) if self.joins(o, root, reused)), None)
        ) is not None:
            reads.discard(joined)
            self.readers[joined].discard(root)
            members.append(self.traits[joined])
            for o in self.operands[joined]:
                reads.add(o)
                self.readers[o].add(root)
                if not self.readers[joined]:
                    self.readers[o].discard(joined)
            if self.traits[joined].source or joined in reused:
                reused |= self.operands[joined]
        found = sorted(reads)
        if self.traits[root].updates:
            return Fusion(found, [o for o in self.nodes[root].operands[:1] if o in reads])
        return Fusion(found, found if all(m.elementwise or m.source for m in members) else [])

    def joins(self, producer: int, root: int, reused: set[int]) -> bool:
        return self.can_join(producer, root) and not (self.traits[producer].expensive and producer in reused)


def _library_operands(graph: InstructionGraph) -> list[set[int]]:
    """Operands; a reduction reads what products multiply that it alone reads."""
    traits = [node.traits for node in graph.instructions]
    operands = [set(node.operands) for node in graph.instructions]
    count = [0] * len(operands)
    for o in (o for reads in (*operands, graph.outputs) for o in reads if o >= 0):
        count[o] += 1
    for number, reads in enumerate(operands):
        while traits[number].reduction and (
            own := [r for r in reads if (traits[r].product or traits[r].source) and count[r] == 1]
        ):
            reads.difference_update(own)
            reads.update(o for product in own for o in operands[product])
    return operands
