"""The slots of one graph in a few arrays, so that all of them are priced at once, and again on every mesh of that graph.

Nothing here knows a price or the size of a mesh axis: bytes and FLOPs are those of whole tensors and ops, to be divided by how
many tiles a spec has, or over how many devices a strategy splits the work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.costs.conversion import Conversions
from alpa_lite.intraop.decisions import CONTRACTIONS
from alpa_lite.intraop.slots import EdgeSlot, NodeSlot

_AT_ONCE = 4096  # entries of a matrix up to which its place in the tables is kept


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpArrays:
    """All op slots; *entries* are their strategies, behind one another.

    Attributes:
        slots: in the order of the entries.
        begin: int64[slots + 1], where the entries of each begin.
        kinds: (dtype, whether it is a contraction, first slot, slot after the last) of slots that are priced alike.
        ranks: of the tensors; ``spec`` counts the specs of the first rank, then those of the second, and so on.
        spec, size, times, patches, across, entry: per tensor and strategy: spec, bytes of the whole tensor, how often it
            passes memory, how often its patches do where they are written and read, whether it is read across whole rows,
            and the entry it counts for.
        flops, used: per entry FLOPs of the whole op, and the number of the axes that split the work (of ``axes``).
        weight: per entry, executions per step.
        special: slots of which some strategies cost more than their work and bytes.
    """

    slots: Sequence[NodeSlot]
    begin: np.ndarray
    kinds: list[tuple[str, bool, int, int]]
    ranks: list[int]
    spec: np.ndarray
    size: np.ndarray
    times: np.ndarray
    patches: np.ndarray
    across: np.ndarray
    entry: np.ndarray
    flops: np.ndarray
    used: np.ndarray
    axes: list[tuple[str, ...]]
    weight: np.ndarray
    special: list[int]

    @classmethod
    def of(cls, slots: Sequence[NodeSlot], conversions: Conversions) -> OpArrays:
        kinds: dict[tuple[str, bool], list[NodeSlot]] = {}
        for slot in slots:
            op, program = slot.node.op, slot.node.program
            assert op is not None and program is not None
            value = next((v for v in (*op.inputs, *op.outputs) if v >= 0), -1)
            dtype = program.values[value].dtype if value >= 0 else "float32"
            kinds.setdefault((dtype, op.primitive in CONTRACTIONS), []).append(slot)
        ordered = [slot for group in kinds.values() for slot in group]
        begin = np.cumsum([0, *(slot.node.size for slot in ordered)])
        first: dict[int, int] = {}
        total = 0
        specs, sizes, times, patches, across, lengths, starts = [], [], [], [], [], [], []
        flops = []
        axes: dict[tuple[str, ...], int] = {}
        used: dict[int, list[int]] = {}
        for slot, start in zip(ordered, begin.tolist(), strict=False):
            op, program, strategies = slot.node.op, slot.node.program, slot.node.strategies
            assert op is not None and program is not None and strategies is not None
            tensors = [*zip(op.inputs, strategies.operands, slot.reads, strict=True)]
            tensors += [*zip(op.outputs, strategies.results, slot.writes, strict=True)]
            for position, (value, numbers, passes) in enumerate(tensors):
                patched, rows = (0.0, ()) if position else (2 * slot.patches, slot.across)  # written and read
                if value < 0 or not (passes or patched or rows):
                    continue
                v = program.values[value]
                rank = len(v.shape)
                if rank not in first:
                    first[rank] = total
                    total += len(conversions.space(rank).specs)
                specs.append(numbers + first[rank])
                sizes.append(math.prod(v.shape) * v.itemsize)
                times.append(passes)
                patches.append(patched)
                across.append(_whole(conversions, rank, rows)[numbers] if rows else np.zeros(len(numbers)))
                lengths.append(len(numbers))
                starts.append(start)
            works = any(slot.reads) or any(slot.writes) or op.primitive in CONTRACTIONS
            flops.append(op.flops if works else 0.0)
            if id(strategies) not in used:
                used[id(strategies)] = [axes.setdefault(some, len(axes)) for some in strategies.used]
        length = np.array(lengths, dtype=np.int64)
        steps = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
        count = np.diff(begin)
        ends = np.cumsum([len(group) for group in kinds.values()]).tolist()
        return cls(
            slots=ordered,
            begin=begin,
            kinds=[(*kind, end - len(group), end) for (kind, group), end in zip(kinds.items(), ends, strict=True)],
            ranks=list(first),
            spec=np.concatenate(specs) if specs else np.zeros(0, dtype=np.int64),
            size=np.repeat(np.array(sizes, dtype=np.float64), length),
            times=np.repeat(np.array(times, dtype=np.float64), length),
            patches=np.repeat(np.array(patches, dtype=np.float64), length),
            across=np.concatenate(across) if across else np.zeros(0),
            entry=np.repeat(np.array(starts, dtype=np.int64), length) + steps,
            flops=np.repeat(np.array(flops, dtype=np.float64), count),
            used=np.array([u for slot in ordered for u in used[id(slot.node.strategies)]], dtype=np.int64),
            axes=list(axes),
            weight=np.repeat(np.array([slot.node.weight for slot in ordered], dtype=np.float64), count),
            special=[i for i, slot in enumerate(ordered) if _is_special(slot)],
        )

    def work(self, mesh: DeviceMesh, conversions: Conversions) -> tuple[np.ndarray, np.ndarray]:
        """Per entry, FLOPs and moved bytes of one device."""
        times = self.times + self.patches if conversions.costs.writes_patches else self.times
        if conversions.costs.across_passes:
            times = times + conversions.costs.across_passes * self.across
        shards = [conversions.space(rank).shards for rank in self.ranks]
        tiles = np.concatenate(shards)[self.spec] if shards else self.spec
        moved = np.bincount(self.entry, weights=times * (self.size / tiles), minlength=len(self.flops))
        split = np.array([mesh.axes_size(some) for some in self.axes], dtype=np.float64)
        return self.flops / split[self.used], moved


def _whole(conversions: Conversions, rank: int, dims: Sequence[int]) -> np.ndarray:
    """1.0 for every spec of a rank that splits none of these dims, else 0.0."""
    return np.array([not any(spec.dims[d] for d in dims) for spec in conversions.space(rank).specs], dtype=np.float64)


def _is_special(slot: NodeSlot) -> bool:
    assert slot.node.op is not None and slot.node.strategies is not None
    return slot.node.op.primitive in CONTRACTIONS or any(slot.node.strategies.reduce_axes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EdgeArrays:
    """Edge slots whose matrices are taken from the tables of conversions as they are, times a weight.

    Attributes:
        numbers: of the slots; ``shapes`` are those of their matrices.
        types: shapes and item sizes of the tensors, whose tables stand behind one another.
        place: per entry of all matrices, its place in the tables.
        weight: per entry.
    """

    numbers: list[int]
    shapes: list[tuple[int, int]]
    types: list[tuple[tuple[int, ...], int]]
    place: np.ndarray
    weight: np.ndarray

    @classmethod
    def of(cls, slots: Sequence[EdgeSlot], conversions: Conversions) -> EdgeArrays:
        first: dict[tuple[tuple[int, ...], int], int] = {}
        rows: dict[tuple[int, object], np.ndarray] = {}  # most values are made as others of their type are
        total = 0
        numbers, shapes, places, weights = [], [], [], []
        for number, slot in enumerate(slots):
            shape = (len(slot.producer.specs), len(slot.ends[0].specs) if slot.ends else 0)
            plain = slot.pairs is None and not slot.kept and not slot.looped and len(slot.ends) == 1
            if not plain or shape[0] * shape[1] > _AT_ONCE:
                continue
            kind, width = (slot.link.shape, slot.link.itemsize), len(conversions.space(len(slot.link.shape)).specs)
            if kind not in first:
                first[kind] = total
                total += width * width
            made = id(slot.producer.specs), kind
            if made not in rows:
                rows[made] = (slot.producer.specs * width + first[kind])[:, None]
            places.append((rows[made] + slot.ends[0].specs).ravel())
            numbers.append(number)
            shapes.append(shape)
            weights.append(slot.link.weight)
        sizes = [a * b for a, b in shapes]
        return cls(
            numbers=numbers,
            shapes=shapes,
            types=list(first),
            place=np.concatenate(places) if places else np.zeros(0, dtype=np.int64),
            weight=np.repeat(np.array(weights, dtype=np.float64), np.array(sizes, dtype=np.int64)),
        )

    def costs(self, conversions: Conversions) -> dict[int, np.ndarray]:
        """Matrices by the number of the slot."""
        if not self.numbers:
            return {}
        tables = np.concatenate([table.ravel() for table in conversions.tables(self.types)])
        everything, found, begin = tables[self.place] * self.weight, {}, 0
        for number, shape in zip(self.numbers, self.shapes, strict=True):
            end = begin + shape[0] * shape[1]
            found[number] = everything[begin:end].reshape(shape)
            begin = end
        return found
