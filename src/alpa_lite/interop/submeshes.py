"""Which parts of a cluster a stage may have, and where on the hosts the chosen ones lie.

In come hosts x devices per host; out come submesh shapes, and places for a list of them. Shapes are chosen so that any
list of them with as many devices as the cluster can be placed:

- inside a host: sizes 1 = s_0 < s_1 < ... < s_k = D, each a divisor of the next (powers of two that divide D, then D);
- over hosts: h whole hosts.

Proof. Place by size, largest first, each in the first host with room. Whole hosts come first and leave whole hosts. When a
size s inside a host has its turn, all placed before in that host are multiples of s, and so is D, so the free rest of
every host is a multiple of s: a host with any room has room for it. Some host has room as long as devices are left. QED.

Shapes that a user gives may have any number of devices of one host. They are placed in the same order; on several hosts that
may fail, and is then refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alpa_lite.errors import SlicingError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSubmesh:
    """Devices ``first_device``.. of hosts ``first_host``..; ``shape`` is (hosts, devices per host)."""

    shape: tuple[int, int]
    first_host: int
    first_device: int


def admissible_submeshes(num_hosts: int, devices_per_host: int) -> tuple[tuple[int, int], ...]:
    """Submesh shapes (hosts, devices per host), by size: parts of one host, then 2, 4, ... and all whole hosts.

    Raises:
        SlicingError: a number is below 1.

    Example:
        ``admissible_submeshes(3, 8)`` is ``((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (3, 8))``.
    """
    _check_cluster(num_hosts, devices_per_host)
    return (
        *((1, size) for size in _part_sizes(devices_per_host)),
        *((hosts, devices_per_host) for hosts in _doubling(num_hosts)[1:]),
    )


def place_submeshes(
    shapes: Sequence[tuple[int, int]], num_hosts: int, devices_per_host: int
) -> tuple[PlacedSubmesh, ...]:
    """A place for each shape, in the order given, without overlap.

    Raises:
        SlicingError: a shape is neither part of a host nor whole hosts, they do not use all devices, or no place was found.

    Example:
        ``place_submeshes([(1, 2), (1, 4), (1, 2)], 1, 8)`` puts them on devices 4-5, 0-3 and 6-7.
    """
    _check_cluster(num_hosts, devices_per_host)
    for hosts, devices in shapes:
        inside = hosts == 1 and 1 <= devices <= devices_per_host
        if not inside and not (1 <= hosts <= num_hosts and devices == devices_per_host):
            raise SlicingError(
                f"the submesh {hosts}x{devices} cannot be part of {num_hosts}x{devices_per_host} devices. It must be 1 host "
                f"with at most {devices_per_host} devices, or whole hosts. It was given to place_submeshes; take shapes from "
                f"admissible_submeshes."
            )
    total = sum(hosts * devices for hosts, devices in shapes)
    if total != num_hosts * devices_per_host:
        raise SlicingError(
            f"the submeshes have {total} devices, the cluster {num_hosts}x{devices_per_host} has "
            f"{num_hosts * devices_per_host}. They must use all. They were given to place_submeshes; add or drop a submesh."
        )
    used = [0] * num_hosts
    places: dict[int, PlacedSubmesh] = {}
    for index in sorted(range(len(shapes)), key=lambda index: (-shapes[index][0] * shapes[index][1], index)):
        hosts, devices = shapes[index]
        host = next((host for host in range(num_hosts) if used[host] + devices <= devices_per_host), None)
        if host is None:
            raise SlicingError(
                f"no host has room for the submesh {hosts}x{devices} once all larger ones lie. Parts of hosts must fill every "
                f"host when they are placed largest first. They were given to place_submeshes; take shapes from "
                f"admissible_submeshes, lists of which always fit."
            )
        places[index] = PlacedSubmesh(shape=(hosts, devices), first_host=host, first_device=used[host])
        for taken in range(host, host + hosts):
            used[taken] += devices
    return tuple(places[index] for index in range(len(shapes)))


def _check_cluster(num_hosts: int, devices_per_host: int) -> None:
    if num_hosts < 1 or devices_per_host < 1:
        raise SlicingError(
            f"a cluster of {num_hosts}x{devices_per_host} devices has no submeshes. Hosts and devices per host must be at "
            f"least 1. They were given to admissible_submeshes or place_submeshes; correct them there."
        )


def _part_sizes(devices_per_host: int) -> list[int]:
    """Powers of two that divide the host, and the host: each divides the next."""
    return sorted({size for size in _doubling(devices_per_host) if devices_per_host % size == 0})


def _doubling(most: int) -> list[int]:
    """1, 2, 4, ... up to ``most``, and ``most``."""
    sizes = [1 << power for power in range(most.bit_length())]
    return sizes if sizes[-1] == most else [*sizes, most]
