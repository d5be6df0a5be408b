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
from alpa_lite.costs.fusion import is_update
from alpa_lite.intraop.decisions import CONTRACTIONS
from alpa_lite.intraop.slots import EdgeSlot, NodeSlot, Slots
from alpa_lite.intraop.strategies import StrategySet

_AT_ONCE = 4096  # entries of a matrix up to which its place in the tables is kept
_THIN = (
    64  # mean entries of a matrix up to which the places of all are found at once; larger ones would leave the cache
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotTable:
    """What the slots of a graph have in common with those of graphs that follow from it (``derive.py``): all but domains.

    Attributes:
        ops: numbers of op slots, those of one kind behind one another.
        kinds: (dtype, whether it is a contraction, first op, op after the last) of ops that are priced alike.
        sets: per op, its strategies.
        flops, weight: per op, FLOPs of the whole and executions per step; ``heavy``: whether it is a contraction.
        op, position, rank: per tensor that passes memory: which of these ops, its place among operands and results, its rank.
        size, times, patches, across: bytes of the whole tensor, how often it passes memory, how often its patches do where
            they are written and read, and the dims whose rows it is read across.
        edges: numbers of edge slots whose matrices are parts of a table of conversions times a weight.
        made, read: per such edge, the specs of the producer and of the consumer; ``types``: shape and item size of the
            tensor; ``edge_weight``.
    """

    ops: list[int]
    kinds: list[tuple[str, bool, int, int]]
    sets: list[StrategySet]
    flops: np.ndarray
    weight: np.ndarray
    heavy: list[bool]
    op: np.ndarray
    position: list[int]
    rank: list[int]
    size: np.ndarray
    times: np.ndarray
    patches: np.ndarray
    across: list[tuple[int, ...]]
    edges: list[int]
    made: list[np.ndarray]
    read: list[np.ndarray]
    types: list[tuple[tuple[int, ...], int]]
    edge_weight: np.ndarray

    @classmethod
    def of(cls, nodes: Sequence[NodeSlot], edges: Sequence[EdgeSlot]) -> SlotTable:
        kinds: dict[tuple[str, bool], list[int]] = {}
        for number, slot in enumerate(nodes):
            op, program = slot.node.op, slot.node.program
            if op is not None and program is not None:
                value = next((v for v in (*op.inputs, *op.outputs) if v >= 0), -1)
                dtype = program.values[value].dtype if value >= 0 else "float32"
                kinds.setdefault((dtype, op.primitive in CONTRACTIONS), []).append(number)
        ordered = [number for group in kinds.values() for number in group]
        ends = np.cumsum([len(group) for group in kinds.values()]).tolist()
        sets, flops, weight = [], [], []
        tensors: list[tuple[int, int, int, int, float, float, tuple[int, ...]]] = []
        for place, number in enumerate(ordered):
            slot = nodes[number]
            op, program, strategies = slot.node.op, slot.node.program, slot.node.strategies
            assert op is not None and program is not None and strategies is not None
            values = zip((*op.inputs, *op.outputs), (*slot.reads, *slot.writes), strict=True)
            for position, (value, passes) in enumerate(values):
                patched, rows = (0.0, ()) if position else (2 * slot.patches, slot.across)  # written and read
                if value >= 0 and (passes or patched or rows):
                    v = program.values[value]
                    size_bytes = math.prod(v.shape) * v.itemsize
                    tensors.append((place, position, len(v.shape), size_bytes, passes, patched, rows))
            # An update computes no more than what it writes, whose bytes take longer.
            works = (any(slot.reads) or any(slot.writes) or op.primitive in CONTRACTIONS) and not is_update(op)
            sets.append(strategies)
            flops.append(op.flops if works else 0.0)
            weight.append(slot.node.weight)
        columns = list(zip(*tensors, strict=True)) if tensors else [()] * 7
        plain = [(n, e) for n, e in enumerate(edges) if _is_plain(e)]
        return cls(
            ops=ordered,
            kinds=[(*kind, end - len(group), end) for (kind, group), end in zip(kinds.items(), ends, strict=True)],
            sets=sets,
            flops=np.array(flops, dtype=np.float64),
            weight=np.array(weight, dtype=np.float64),
            heavy=[heavy for (_, heavy), group in kinds.items() for _ in group],
            op=np.array(columns[0], dtype=np.int64),
            position=list(columns[1]),
            rank=list(columns[2]),
            size=np.array(columns[3], dtype=np.float64),
            times=np.array(columns[4], dtype=np.float64),
            patches=np.array(columns[5], dtype=np.float64),
            across=list(columns[6]),
            edges=[n for n, _ in plain],
            made=[e.producer.specs for _, e in plain],
            read=[e.ends[0].specs for _, e in plain],
            types=[(e.link.shape, e.link.itemsize) for _, e in plain],
            edge_weight=np.array([e.link.weight for _, e in plain], dtype=np.float64),
        )


def table_of(slots: Slots) -> SlotTable:
    """Made once."""
    if slots.table is None:
        slots.table = SlotTable.of(slots.node_slots, slots.edge_slots)
    return slots.table


def _is_plain(slot: EdgeSlot) -> bool:
    return slot.pairs is None and slot.copied is None and not slot.kept and not slot.looped and len(slot.ends) == 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpArrays:
    """All op slots; *entries* are their strategies, behind one another.

    Attributes:
        numbers: of the slots, in the order of the entries.
        begin: int64[slots + 1], where the entries of each begin.
        kinds: as in ``SlotTable``.
        ranks: of the tensors; ``spec`` counts the specs of the first rank, then those of the second, and so on.
        spec, size, times, patches, across, entry: per tensor and strategy: spec, bytes of the whole tensor, how often it
            passes memory, how often its patches do where they are written and read, whether it is read across whole rows,
            and the entry it counts for.
        flops, used: per entry FLOPs of the whole op, and the number of the axes that split the work (of ``axes``).
        weight: per entry, executions per step.
        special: places in ``numbers`` of slots of which some strategies cost more than their work and bytes.
    """

    numbers: list[int]
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
    def of(cls, table: SlotTable, sets: Sequence[StrategySet], conversions: Conversions) -> OpArrays:
        """``sets``: the strategies of each op on these meshes."""
        count = np.array([len(s) for s in sets], dtype=np.int64)
        begin = np.concatenate([[0], np.cumsum(count)])
        first: dict[int, int] = {}
        total = 0
        for rank in dict.fromkeys(table.rank):
            first[rank] = total
            total += len(conversions.space(rank).specs)
        tensors = {id(s): (*s.operands, *s.results) for s in sets}
        chosen = zip(table.op.tolist(), table.position, strict=True)
        specs = [tensors[id(sets[op])][position] for op, position in chosen]
        length = count[table.op]
        axes: dict[tuple[str, ...], int] = {}
        used: dict[int, list[int]] = {}
        for some in sets:
            if id(some) not in used:
                used[id(some)] = [axes.setdefault(split, len(axes)) for split in some.used]
        offsets = np.array([first[rank] for rank in table.rank], dtype=np.int64)
        begun = np.cumsum(length) - length
        steps = np.arange(int(length.sum())) - np.repeat(begun, length)
        reduces = {id(s): any(s.reduce_axes) for s in sets}
        across = np.zeros(len(steps))
        whole: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}
        for tensor, rows in enumerate(zip(table.rank, table.across, strict=True)):
            if rows[1]:
                if rows not in whole:
                    whole[rows] = _whole(conversions, *rows)
                across[begun[tensor] : begun[tensor] + length[tensor]] = whole[rows][specs[tensor]]
        return cls(
            numbers=table.ops,
            begin=begin,
            kinds=table.kinds,
            ranks=list(first),
            spec=np.concatenate(specs) + np.repeat(offsets, length) if specs else np.zeros(0, dtype=np.int64),
            size=np.repeat(table.size, length),
            times=np.repeat(table.times, length),
            patches=np.repeat(table.patches, length),
            across=across,
            entry=np.repeat(begin[table.op], length) + steps,
            flops=np.repeat(table.flops, count),
            used=np.array([u for some in sets for u in used[id(some)]], dtype=np.int64),
            axes=list(axes),
            weight=np.repeat(table.weight, count),
            special=[i for i, s in enumerate(sets) if table.heavy[i] or reduces[id(s)]],
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


def _places(
    made: Sequence[np.ndarray], read: Sequence[np.ndarray], tables: Sequence[tuple[int, int]], sizes: np.ndarray
) -> np.ndarray:
    """Per entry of all matrices, ``sizes`` of each, its place in the tables, named by where they begin and how wide they are."""
    if not len(sizes):
        return np.zeros(0, dtype=np.int64)
    if sizes.sum() > _THIN * len(sizes):
        rows: dict[tuple[int, int], np.ndarray] = {}  # most values are made as others of their type are
        places = []
        for there, here, (begin, width) in zip(made, read, tables, strict=True):
            row = rows.get((id(there), begin))
            if row is None:
                row = rows[id(there), begin] = (there * width + begin)[:, None]
            places.append((row + here).ravel())
        return np.concatenate(places)
    deep, wide = (np.fromiter(map(len, ends), dtype=np.int64, count=len(ends)) for ends in (made, read))
    begin, width = np.array(tables, dtype=np.int64).repeat(deep, axis=0).T
    columns, first = wide.repeat(deep), (np.cumsum(wide) - wide).repeat(deep)
    entries = (first - np.cumsum(columns) + columns).repeat(columns) + np.arange(int(columns.sum()))
    return (np.concatenate(made) * width + begin).repeat(columns) + np.concatenate(read)[entries]


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
    def of(
        cls, table: SlotTable, made: Sequence[np.ndarray], read: Sequence[np.ndarray], conversions: Conversions
    ) -> EdgeArrays:
        """``made``, ``read``: the specs of each edge of the table on these meshes."""
        first: dict[tuple[tuple[int, ...], int], tuple[int, int]] = {}
        total = 0
        for kind in dict.fromkeys(table.types):
            width = len(conversions.space(len(kind[0])).specs)
            first[kind] = total, width
            total += width * width
        every = list(zip(map(len, made), map(len, read), strict=True))
        small = [edge for edge, (rows, columns) in enumerate(every) if rows * columns <= _AT_ONCE]
        shapes = [every[edge] for edge in small]
        sizes = np.array([rows * columns for rows, columns in shapes], dtype=np.int64)
        return cls(
            numbers=[table.edges[edge] for edge in small],
            shapes=shapes,
            types=list(first),
            place=_places(
                [made[edge] for edge in small],
                [read[edge] for edge in small],
                [first[table.types[edge]] for edge in small],
                sizes,
            ),
            weight=np.repeat(table.edge_weight[small], sizes),
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
