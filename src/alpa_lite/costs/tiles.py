"""Resharding between device meshes: which device sends which part of a tensor to which other device, as data.

In: a tensor's shape, its spec on a source mesh and a spec on a target mesh, each mesh with its devices (which may overlap).
Out: a ``TilePlan``, a list of ``Transfer``s in the order in which a receiver puts its tile together. Whoever executes it
does, for every transfer: ``target_tile[transfer.target_box] = source_tile[transfer.source_box]``, where a tile is what one
device holds of the tensor. A transfer whose devices are equal is a copy on the spot and moves no bytes.

Each tile of the target is the disjoint union of its intersections with the tiles of the source. Where several devices hold
the same source tile (replicas), one of them sends: the receiver itself if it is one of them, then one on the receiver's own
host, then the one that has sent the fewest bytes so far, then the first. Large transfers are dealt out first.
Replicas of a target tile each receive their own copy.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.errors import SpecError

Box = tuple[tuple[int, int], ...]  # per dim: first index and the one after the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One side of a transfer: a spec on a mesh of certain devices.

    Attributes:
        spec: without unreduced axes; partial sums are reduced on their own mesh first.
        mesh: the mesh.
        devices: ids in mesh order (row-major), all different.
    """

    spec: ShardingSpec
    mesh: DeviceMesh
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.devices) != self.mesh.num_devices or len(set(self.devices)) != len(self.devices):
            raise SpecError(
                f"the mesh {self.mesh} was given the devices {self.devices}. It needs {self.mesh.num_devices} different "
                f"ids, row-major. They stand in Placement.devices; give one per device of the mesh."
            )
        if self.spec.unreduced:
            raise SpecError(
                f"a tensor with the spec {self.spec} was to be moved between meshes. Partial sums stay on their mesh. The "
                f"spec stands in Placement.spec; reduce over {', '.join(self.spec.unreduced)} first."
            )

    def boxes(self, shape: tuple[int, ...]) -> dict[int, Box]:
        """Per device the part of the tensor that it holds."""
        local = self.spec.local_shape(shape, self.mesh)
        found = {}
        for device, coords in zip(self.devices, itertools.product(*map(range, self.mesh.shape)), strict=True):
            at = dict(zip(self.mesh.axis_names, coords, strict=True))
            box = []
            for size, axes in zip(local, self.spec.dims, strict=True):
                index = 0
                for axis in axes:
                    index = index * self.mesh.axis_size(axis) + at[axis]
                box.append((index * size, (index + 1) * size))
            found[device] = tuple(box)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One piece on its way.

    Attributes:
        source, target: device ids.
        box: the piece, in indices of the whole tensor.
        source_box, target_box: the same piece, in indices of the source's and of the target's tile.
        size_bytes: of the piece.
    """

    source: int
    target: int
    box: Box
    source_box: Box
    target_box: Box
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """How one tensor gets from one placement to another.

    Attributes:
        shape, itemsize: of the whole tensor.
        before, after: where it is and where it is wanted.
        transfers: ordered by target device, then by place in its tile.
    """

    shape: tuple[int, ...]
    itemsize: int
    before: Placement
    after: Placement
    transfers: tuple[Transfer, ...]

    @property
    def moved_bytes(self) -> int:
        """Between different devices, all together."""
        return sum(t.size_bytes for t in self.transfers if t.source != t.target)

    def sent_bytes(self) -> dict[int, int]:
        """Per source device what it sends to others."""
        sent = dict.fromkeys(self.before.devices, 0)
        for t in self.transfers:
            if t.source != t.target:
                sent[t.source] += t.size_bytes
        return sent

    def __str__(self) -> str:
        lines = [
            f"{list(self.shape)} x {self.itemsize} B: {self.before.spec} on {self.before.mesh} -> {self.after.spec} on "
            f"{self.after.mesh}, {self.moved_bytes} B moved"
        ]
        for t in self.transfers:
            piece = ",".join(f"{lo}:{hi}" for lo, hi in t.box)
            lines.append(f"  {t.source} -> {t.target}  [{piece}]  {t.size_bytes} B{'  stays' * (t.source == t.target)}")
        return "\n".join(lines) + "\n"


def plan_tiles(
    shape: tuple[int, ...],
    itemsize: int,
    before: Placement,
    after: Placement,
    host_of: Mapping[int, int] | Callable[[int], int] | None = None,
) -> TilePlan:
    """The transfers that bring a tensor from ``before`` to ``after``; deterministic.

    Args:
        shape, itemsize: of the whole tensor; both specs must divide it (``ValueError`` names the dim).
        before, after: placements; their devices may be the same, overlap or be others.
        host_of: host of a device id, as a mapping or a function; None if all devices are alike.

    Example:
        >>> line = DeviceMesh(shape=(2,), axis_names=("x",))
        >>> split, whole = ShardingSpec.parse("[x]"), ShardingSpec.parse("[_]")
        >>> print(plan_tiles((4,), 4, Placement(spec=split, mesh=line, devices=(0, 1)),
        ...                  Placement(spec=whole, mesh=line, devices=(4, 5))))
        [4] x 4 B: [x] on (x=2) -> [_] on (x=2), 32 B moved
          0 -> 4  [0:2]  8 B
          1 -> 4  [2:4]  8 B
          0 -> 5  [0:2]  8 B
          1 -> 5  [2:4]  8 B
    """
    host = host_of if callable(host_of) else (host_of or {}).get
    holders: dict[Box, list[int]] = defaultdict(list)
    for device, box in before.boxes(shape).items():
        holders[box].append(device)
    wanted = []
    for target, whole in after.boxes(shape).items():
        for held, replicas in _overlapping(holders, whole):
            piece = _intersection(held, whole)
            wanted.append((_volume(piece) * itemsize, target, whole, held, piece, replicas))
    sent: dict[int, int] = defaultdict(int)
    order = {device: i for i, device in enumerate(after.devices)}
    chosen = []
    for size, target, whole, held, piece, replicas in sorted(wanted, key=lambda w: (-w[0], order[w[1]], w[4])):
        near = [d for d in replicas if host_of is not None and host(d) == host(target)] or replicas
        source = target if target in replicas else min(near, key=lambda d: sent[d])
        sent[source] += size if source != target else 0
        chosen.append(
            Transfer(
                source=source,
                target=target,
                box=piece,
                source_box=_within(piece, held),
                target_box=_within(piece, whole),
                size_bytes=size,
            )
        )
    chosen.sort(key=lambda t: (order[t.target], t.box))
    plan = TilePlan(shape=shape, itemsize=itemsize, before=before, after=after, transfers=tuple(chosen))
    check_tiles(plan)
    return plan


def check_tiles(plan: TilePlan) -> None:
    """Verifier: every byte of every target tile is written exactly once, from a device that holds it.

    Raises:
        AssertionError: naming the transfer or the device; a plan that fails is our mistake, not the user's.
    """
    held, wanted = plan.before.boxes(plan.shape), plan.after.boxes(plan.shape)
    written: dict[int, list[Box]] = {device: [] for device in wanted}
    for t in plan.transfers:
        assert t.source in held and t.target in wanted, f"{t} names a device of neither mesh"
        assert _intersection(t.box, held[t.source]) == t.box, f"device {t.source} does not hold the piece of {t}"
        assert _intersection(t.box, wanted[t.target]) == t.box, f"device {t.target} does not want the piece of {t}"
        assert t.source_box == _within(t.box, held[t.source]), f"{t}: place in the source tile"
        assert t.target_box == _within(t.box, wanted[t.target]), f"{t}: place in the target tile"
        assert t.size_bytes == _volume(t.box) * plan.itemsize, f"{t}: bytes"
        written[t.target].append(t.box)
    for device, boxes in written.items():
        # Pieces inside a tile that do not overlap fill it if they are as large together.
        assert not _overlaps(boxes), f"device {device}: a part of its tile is written twice"
        size, whole = sum(map(_volume, boxes)), _volume(wanted[device])
        assert size == whole, f"device {device}: {size} of {whole} elements of its tile are written"


def _overlaps(boxes: Sequence[Box]) -> bool:
    """Whether any two share an element."""
    corners = np.array(boxes, dtype=np.int64)  # [box, dim, 2]
    if corners.size == 0:
        return len(boxes) > 1
    lo, hi = corners[:, :, 0], corners[:, :, 1]
    shared = (np.maximum(lo[:, None], lo) < np.minimum(hi[:, None], hi)).all(axis=2)
    return int(shared.sum()) > len(boxes)  # each overlaps itself


def move_tiles(plan: TilePlan, tiles: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Carries a plan out on NumPy tiles, by device id: the meaning of the record, and the reference for executors."""
    some = next(iter(tiles.values()))
    moved = {d: np.empty([hi - lo for lo, hi in box], some.dtype) for d, box in plan.after.boxes(plan.shape).items()}
    for t in plan.transfers:
        moved[t.target][slices(t.target_box)] = tiles[t.source][slices(t.source_box)]
    return moved


def slices(box: Box) -> tuple[slice, ...]:
    """The index of a box in an array."""
    return tuple(slice(lo, hi) for lo, hi in box)


def _overlapping(holders: Mapping[Box, Sequence[int]], whole: Box) -> list[tuple[Box, Sequence[int]]]:
    return [
        (held, devices)
        for held, devices in holders.items()
        if all(a < d and c < b for (a, b), (c, d) in zip(held, whole, strict=True))
    ]


def _volume(box: Box) -> int:
    return math.prod(hi - lo for lo, hi in box)


def _intersection(one: Box, other: Box) -> Box:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def _within(piece: Box, tile: Box) -> Box:
    return tuple((lo - start, hi - start) for (lo, hi), (start, _) in zip(piece, tile, strict=True))
