"""The cluster: hosts, devices per host, what a device can do, and the links. Pure data; no device is touched.

Device ``i`` of a mesh (row-major) is device ``i`` of the cluster, and host ``h`` owns ``devices_per_host`` consecutive
ones: earlier mesh axes run across hosts, later ones inside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from alpa_lite.cluster.calibration import Calibration, calibrated_device
from alpa_lite.cluster.hardware import Device, Link, device_names, read_device
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.errors import ClusterError, user_line
from alpa_lite.units import format_bytes, format_time

_TEXT = re.compile(r"(\d+)x(\d+):([A-Za-z0-9._-]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Hosts of equal make.

    Attributes:
        num_hosts, devices_per_host: the layout.
        device: what each device can do.
        inside: the link between devices of one host.
        between: the link between hosts.
        calibration: measurements that replaced the table's figures, if any.
    """

    num_hosts: int
    devices_per_host: int
    device: Device
    inside: Link
    between: Link
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        if self.num_hosts < 1 or self.devices_per_host < 1:
            raise ClusterError(
                f"a cluster of {self.num_hosts} hosts with {self.devices_per_host} devices each has no device. Both "
                f"numbers must be at least 1, as in '1x8:{self.device.name}'. At {user_line()}. Write the number of hosts first."
            )
        wired = len(self.inside.wiring)
        if wired and self.devices_per_host > wired:
            raise ClusterError(
                f"a cluster with {self.devices_per_host} devices per host was asked for, but a host of {self.device.name} "
                f"has {wired} devices, linked in pairs. At most {wired} are allowed. At {user_line()}. Write more hosts, as "
                f"in '2x{wired}:{self.device.name}'."
            )

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Reads ``"HOSTSxDEVICES:NAME"``, e.g. ``"8x8:h100-sxm"``: hosts, devices per host, device of the table.

        Raises:
            ClusterError: the text has another form, a number is 0, or the device is unknown.
        """
        match = _TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise ClusterError(
                f"the cluster text {text!r} cannot be read. It must be HOSTSxDEVICES_PER_HOST:DEVICE, like "
                f"'8x8:h100-sxm' for 8 hosts with 8 devices each, with a device of {', '.join(device_names())}. At "
                f"{user_line()}. Correct what was given to Cluster.parse (or --cluster); '1x8:cpu' is a laptop."
            )
        hosts, devices, name = match.groups()
        return cls.of(name, num_hosts=int(hosts), devices_per_host=int(devices))

    @classmethod
    def of(
        cls, name: str, *, num_hosts: int = 1, devices_per_host: int, calibration: Calibration | None = None
    ) -> Cluster:
        """A cluster of devices of the hardware table, with measured figures where a calibration is given."""
        device, inside, between = read_device(name)
        if calibration is not None:
            device = calibrated_device(device, calibration)
        return cls(
            num_hosts=num_hosts,
            devices_per_host=devices_per_host,
            device=device,
            inside=inside,
            between=between,
            calibration=calibration,
        )

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    def mesh_candidates(
        self, num_axes: int, *, min_axis_size: int = 1, up_to_symmetry: bool = False
    ) -> tuple[tuple[int, ...], ...]:
        """Every ordered factorisation of the device count into ``num_axes`` axis sizes, lexicographically.

        Args:
            num_axes: number of axes.
            min_axis_size: 2 leaves out shapes that are really shapes of fewer axes.
            up_to_symmetry: on one host, if all its links are alike, keep one shape of those that differ only in order.

        Example:
            ``Cluster.parse("1x8:cpu").mesh_candidates(2)`` is ``((1, 8), (2, 4), (4, 2), (8, 1))``.
        """
        if num_axes < 1:
            raise ClusterError(
                f"a mesh of {num_axes} axes was asked of Cluster.mesh_candidates; it needs at least 1. Give 1, 2 or 3."
            )
        shapes = tuple(_factorisations(self.num_devices, num_axes, min_axis_size))
        if up_to_symmetry and self.num_hosts == 1 and not self.inside.wiring:
            return tuple(shape for shape in shapes if list(shape) == sorted(shape))
        return shapes

    def check_mesh(self, mesh: DeviceMesh) -> None:
        """Refuses a mesh that does not fit (``ClusterError``)."""
        if mesh.num_devices > self.num_devices:
            raise ClusterError(
                f"the mesh {mesh} has {mesh.num_devices} devices, the cluster {self} has {self.num_devices}. A mesh "
                f"may have at most as many devices as its cluster; set PlanOptions.mesh_shape (or --mesh) so that the product is "
                f"{self.num_devices}, or name a larger cluster."
            )

    def group_extent(self, mesh: DeviceMesh, axes: tuple[str, ...]) -> tuple[int, int]:
        """Over the groups along ``axes``: the most hosts that one spans, the most devices that it has in one host."""
        self.check_mesh(mesh)
        groups = _groups(mesh, axes) // self.devices_per_host
        counts = np.zeros((groups.shape[1], self.num_hosts), dtype=np.int64)  # devices of each group in each host
        np.add.at(counts, (np.broadcast_to(np.arange(groups.shape[1]), groups.shape), groups), 1)
        return int((counts > 0).sum(axis=1).max()), int(counts.max())

    def group_parts(self, mesh: DeviceMesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Where hosts are wired in pairs: the distinct parts of the groups along ``axes`` in a host, as places in it.

        A part of a host may lie at any multiple of its size. Parts of one device are left out.
        """
        width, wired = self.devices_per_host, len(self.inside.wiring)
        groups = _groups(mesh, axes).T.tolist() if wired else ()
        found = {
            tuple(start + device % width for device in group if device // width == host)
            for group in groups
            for host in {device // width for device in group}
            for start in range(0, wired, min(width, mesh.num_devices))
        }
        return tuple(sorted(part for part in found if len(part) > 1 and part[-1] < wired))

    def describe(self) -> str:
        """A few lines for people: layout, device, links."""
        device, rates = self.device, ", ".join(f"{d} {rate / 1e12:.4g}" for d, rate in self.device.flops_per_s)
        basis = f"measured {self.calibration.date}" if self.calibration else "hardware table"
        hosts = "1 host" if self.num_hosts == 1 else f"{self.num_hosts} hosts"
        lines = [
            f"{hosts} x {self.devices_per_host} {device.description} ({basis})",
            f"  TFLOP/s {rates}; a large matmul reaches {device.matmul_efficiency:.0%}",
            f"  memory {format_bytes(device.memory_bytes)}, {device.memory_bandwidth_bytes_per_s / 1e9:.4g} GB/s, "
            f"a large copy reaches {device.memory_efficiency:.0%}",
            f"  inside a host {_link_text(self.inside)}",
        ]
        if self.num_hosts > 1:
            lines.append(f"  between hosts {_link_text(self.between)}")
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return f"{self.num_hosts}x{self.devices_per_host}:{self.device.name}"


def _factorisations(number: int, num_axes: int, min_axis_size: int) -> Iterator[tuple[int, ...]]:
    if num_axes == 1:
        if number >= min_axis_size:
            yield (number,)
        return
    for first in range(min_axis_size, number + 1):
        if number % first == 0:
            for rest in _factorisations(number // first, num_axes - 1, min_axis_size):
                yield (first, *rest)


def _groups(mesh: DeviceMesh, axes: tuple[str, ...]) -> np.ndarray:
    """Devices of the groups along ``axes``, shape (devices of a group, groups)."""
    positions = [mesh.axis_names.index(axis) for axis in axes]
    devices = np.arange(mesh.num_devices).reshape(mesh.shape)
    return np.moveaxis(devices, positions, range(len(positions))).reshape(mesh.axes_size(axes), -1)


def _link_text(link: Link) -> str:
    whose = "per host" if link.per_host else "per device"
    wired = f" ({link.single_bytes_per_s / 1e9:.4g} GB/s a link of a pair)" if link.wiring else ""
    return (
        f"{link.bandwidth_bytes_per_s / 1e9:.4g} GB/s {whose} and direction{wired}, {format_time(link.latency_s)} a hop"
    )
