"""Where XLA:CPU puts the results of instructions: order of execution, life of every buffer, and the space all of them need.

Instructions run breadth first (``BFSScheduler`` in ``xla/service/hlo_memory_scheduler.cc``, which keeps the thread pool busy):
first in, first out, each once its operands exist. A buffer lives until its last reader has run; a loop may write over an
operand of the same size that dies there. Buffers are placed largest first (``xla/service/buffer_assignment.cc``): results of
the step have memory of their own, in which temporaries lie while it is unused, and everything else shares one block, where
gaps between buffers count (``GlobalDecreasingSizeBestFitHeap`` in ``xla/service/heap_simulator``). Results in the memory of
donated arguments take none, but for what a loop stacks up while the argument is still read, and what is made of the argument
itself by another way than element by element (shifted, in another order): the one is moved there in the end, the other by a
copy (``CopyInsertion``) once it is made.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from alpa_lite.costs.instructions import COPY, Instruction, InstructionGraph
from alpa_lite.costs.loop_fusion import Fusion, fuse
from alpa_lite.costs.memory import peak_usage


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory that is used at times [lo, hi); ``result``: of the step."""

    instruction: Instruction
    lo: int
    hi: int
    size_bytes: int
    result: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlock:
    """The memory of all temporaries: its bytes, when most of it is used, and what lies in it then."""

    size_bytes: int
    time: int
    alive: tuple[Buffer, ...]


def temporaries(
    graph: InstructionGraph, donated: frozenset[int] = frozenset(), moved: frozenset[int] = frozenset()
) -> SharedBlock:
    """Run the graph in time and place all that is neither argument nor result.

    Args:
        graph: the step.
        donated: positions among its outputs that lie in an argument's memory.
        moved: those of them that are made elsewhere.
    """
    buffers: list[Buffer] = []
    fusions = fuse(graph)
    copied = _with_copies(graph, fusions, donated)
    _Run(copied, fusions if copied is graph else fuse(copied), buffers, donated, moved).run(0)
    shared = _outside_results(sorted(buffers, key=lambda b: (-b.size_bytes, not b.result, b.lo - b.hi)))
    times = max((b.hi for b in shared), default=1)
    _, time = peak_usage([b.lo for b in shared], [b.hi for b in shared], [b.size_bytes for b in shared], times)
    alive = tuple(b for b in shared if b.lo <= time < b.hi)
    return SharedBlock(size_bytes=_best_fit(shared), time=time, alive=alive)


def _with_copies(graph: InstructionGraph, fusions: dict[int, Fusion], donated: frozenset[int]) -> InstructionGraph:
    """The same with a copy of each result that is made of the donated argument whose memory it is to take."""
    instructions, outputs = [*graph.instructions], [*graph.outputs]
    for position in sorted(donated):
        made, old = outputs[position], graph.previous.get(outputs[position], -1)
        if made >= 0 and old in fusions[made].reads and not _writes_over(graph, fusions[made], made, old):
            copy = replace(instructions[made], operands=[made], size_bytes=0, traits=COPY, buffer=-1, bodies=())
            outputs[position] = len(instructions)
            instructions.append(copy)
    return InstructionGraph(instructions, outputs, graph.previous) if outputs != graph.outputs else graph


def _writes_over(graph: InstructionGraph, fusion: Fusion, root: int, old: int) -> bool:
    """Whether all that a fusion makes of a tensor on the way to its result is made element by element, or updates it in place."""
    if old in fusion.overwrites:
        return True
    ahead, seen = [(root, True)], set[tuple[int, bool]]()
    while ahead:
        number, straight = ahead.pop()
        node = graph.instructions[number]
        straight = straight and node.traits.elementwise
        for o in node.operands:
            if o == old and not straight:
                return False
            if o not in fusion.reads and (o, straight) not in seen:
                seen.add((o, straight))
                ahead.append((o, straight))
    return True


class _Run:
    """One region in time. ``donated`` is None for a body, whose results lie in buffers outside."""

    def __init__(
        self,
        graph: InstructionGraph,
        fusions: dict[int, Fusion],
        buffers: list[Buffer],
        donated: frozenset[int] | None,
        moved: frozenset[int] = frozenset(),
    ) -> None:
        self.graph, self.buffers, self.donated, self.moved = graph, buffers, donated, moved
        self.nodes = graph.instructions
        self.fusions = fusions
        self.start: dict[int, int] = {}
        self.end: dict[int, int] = {}

    def run(self, time: int) -> int:
        """Returns the time after the region."""
        for root in _breadth_first(self.fusions):
            self.start[root] = time
            time += not self.nodes[root].traits.held
            for body in self.nodes[root].bodies:
                time = _Run(body, fuse(body), self.buffers, None).run(time)
            self.end[root] = time
        free = self.lives(time)
        outputs = {self.owner(o): position for position, o in enumerate(self.graph.outputs) if o >= 0}
        for root, lo in self.start.items():
            size = self.nodes[root].size_bytes
            if self.nodes[root].traits.held or not size:
                continue
            position = outputs.get(root, -1)
            if position >= 0 and position not in self.moved and self.is_elsewhere(root, position, free):
                continue
            result = position >= 0 and self.donated is not None and position not in self.donated
            branches = [o for o in self.fusions[root].reads if self.nodes[o].bodies]  # they write their result
            lo = min([lo, *(self.start[o] for o in branches)])
            self.buffers.append(Buffer(self.nodes[root], lo, max(free[root], lo + 1), size, result))
        return time

    def owner(self, root: int) -> int:
        """The instruction that made the memory of a result."""
        while self.nodes[root].buffer >= 0:
            root = self.nodes[root].buffer
        return root

    def lives(self, last: int) -> dict[int, int]:
        """Root -> the time from which its memory is free."""
        free = dict(self.end)
        free.update((o, last) for o in self.graph.outputs if o >= 0)
        for root in sorted(self.fusions, reverse=True):
            for o in self.fusions[root].reads:
                free[o] = max(free[o], free[root] if o == self.nodes[root].buffer else self.end[root])
        self.overwrite(free)
        return free

    def overwrite(self, free: dict[int, int]) -> None:
        """Elementwise loops and updates write over one operand of the same size that nobody reads later."""
        taken: set[int] = set()
        for root in self.start:
            for o in self.fusions[root].overwrites:
                dying = self.nodes[o]
                same = dying.size_bytes == self.nodes[root].size_bytes and not dying.traits.held and dying.buffer < 0
                if same and o not in taken and free[o] == self.end[root]:
                    taken.add(o)
                    free[o] = self.start[root]
                    break

    def is_elsewhere(self, root: int, position: int, free: dict[int, int]) -> bool:
        """Whether a result lies in an argument's memory, or in a buffer outside the body."""
        return position in self.donated if self.donated is not None else self.in_place(root, free)

    def in_place(self, root: int, free: dict[int, int]) -> bool:
        """Whether a body can write a result straight to where it goes: its last value is not read any more."""
        if root not in self.graph.previous:
            return True
        old = self.graph.previous[root]
        return free[old] <= (self.end if old in self.fusions[root].overwrites else self.start)[root]


def _breadth_first(fusions: dict[int, Fusion]) -> list[int]:
    waiting = {root: len(fusion.reads) for root, fusion in fusions.items()}
    readers: dict[int, list[int]] = {root: [] for root in fusions}
    for root, fusion in fusions.items():
        for o in fusion.reads:
            readers[o].append(root)
    queue = deque(root for root, count in waiting.items() if not count)
    order = []
    while queue:
        order.append(queue.popleft())
        for reader in readers[order[-1]]:
            waiting[reader] -= 1
            if not waiting[reader]:
                queue.append(reader)
    return order


def _outside_results(ordered: list[Buffer]) -> list[Buffer]:
    """The temporaries for which no result's memory is free; largest first."""
    results: list[list[Buffer]] = []
    shared = []
    for buffer in ordered:
        if buffer.result:
            results.append([buffer])
            continue
        home = (m for m in reversed(results) if all(b.hi <= buffer.lo or buffer.hi <= b.lo for b in m))
        next(home, shared).append(buffer)
    return shared


def _best_fit(ordered: list[Buffer]) -> int:
    """Bytes of the block: every buffer goes into the tightest gap among those that live at the same time."""
    lo, hi = (np.array([getattr(b, end) for b in ordered], dtype=np.int64) for end in ("lo", "hi"))
    sizes = np.array([b.size_bytes for b in ordered], dtype=np.int64)
    offsets = np.zeros(len(ordered), dtype=np.int64)
    for number in range(len(ordered)):
        at_once = np.flatnonzero((lo[:number] < hi[number]) & (lo[number] < hi[:number]))
        at_once = at_once[np.argsort(offsets[at_once], kind="stable")]
        below = np.maximum.accumulate(np.concatenate([[0], offsets[at_once] + sizes[at_once]]))
        gaps = offsets[at_once] - below[:-1]
        fits = np.flatnonzero(gaps >= sizes[number])
        offsets[number] = below[fits[gaps[fits].argmin()]] if len(fits) else below[-1]
    return int((offsets + sizes).max(initial=0))
