"""Which conversions are worth running: all pairs of specs up to renaming equal axes and permuting dims."""

from __future__ import annotations

import itertools

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conversion import SpecSpace

Pair = tuple[ShardingSpec, ShardingSpec]


def all_pairs(mesh: DeviceMesh, rank: int) -> list[Pair]:
    """Every (before, after) that a tensor can take: partial sums cannot be made by converting."""
    specs = SpecSpace(mesh=mesh, rank=rank).specs
    return [(b, a) for b, a in itertools.product(specs, specs) if set(a.unreduced) <= set(b.unreduced)]


def one_per_class(mesh: DeviceMesh, rank: int) -> list[Pair]:
    """One pair of each class under renaming axes of equal size and permuting dims."""
    names = mesh.axis_names
    renamings = [
        dict(zip(names, order, strict=True))
        for order in itertools.permutations(names)
        if all(mesh.axis_size(a) == mesh.axis_size(b) for a, b in zip(names, order, strict=True))
    ]
    orders = list(itertools.permutations(range(rank)))

    def image(spec: ShardingSpec, rename: dict[str, str], order: tuple[int, ...]) -> ShardingSpec:
        dims = tuple(tuple(rename[axis] for axis in spec.dims[dim]) for dim in order)
        return ShardingSpec(dims, tuple(rename[axis] for axis in spec.unreduced))

    seen: set[Pair] = set()
    chosen = []
    for before, after in all_pairs(mesh, rank):
        if (before, after) not in seen:
            chosen.append((before, after))
            seen |= {
                (image(before, rename, order), image(after, rename, order)) for rename in renamings for order in orders
            }
    return chosen
