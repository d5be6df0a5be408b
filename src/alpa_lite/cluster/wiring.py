"""How the devices of a host are wired in pairs, where no switch joins all of them: the rings that collectives can use.

Comes in: a table of links between pairs of devices, and some of the devices. Goes out: counts of links and rings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

Wiring = tuple[tuple[int, ...], ...]  # number of links between each two devices of a host


@cache
def disjoint_rings(wiring: Wiring, devices: tuple[int, ...]) -> int:
    """The most rings through all of the devices that share no link. Two devices have a ring per link between them.

    Example:
        A square whose diagonals are wired too has 1 ring (of 4 of its 6 links): its second ring would use links twice.
    """
    if len(devices) == 2:
        return wiring[devices[0]][devices[1]]
    left = {(a, b): wiring[a][b] for a in devices for b in devices}
    most = min(sum(left[a, b] for b in devices) for a in devices) // 2
    return _laid(left, devices, most)


def _laid(left: dict[tuple[int, int], int], devices: tuple[int, ...], most: int) -> int:
    """Of ``most`` rings at best, how many can be laid at once with the links that are left."""
    best = 0
    for ring in _rings(left, devices) if most else ():
        edges = list(zip(ring, (*ring[1:], ring[0]), strict=True))
        _take(left, edges, 1)
        best = max(best, 1 + _laid(left, devices, most - 1))
        _take(left, edges, -1)
        if best == most:
            break
    return best


def _take(left: dict[tuple[int, int], int], edges: Sequence[tuple[int, int]], count: int) -> None:
    for a, b in edges:
        left[a, b] -= count
        left[b, a] -= count


def _rings(left: dict[tuple[int, int], int], devices: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every ring through all devices over links that are left, from the first device, each in one direction."""

    def extended(path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(path) == len(devices):
            if left[path[-1], path[0]] and path[1] < path[-1]:
                yield path
            return
        for device in devices:
            if device not in path and left[path[-1], device]:
                yield from extended((*path, device))

    return extended(devices[:1])
