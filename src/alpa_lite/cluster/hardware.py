"""The hardware table: names of devices -> their figures as frozen records.

Comes in: ``hardware.toml`` (package data). Goes out: ``Device`` and ``Link`` records in base units, and the list of
``Figure`` with unit, basis and source that a report prints.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from alpa_lite.cluster.wiring import Wiring, disjoint_rings
from alpa_lite.errors import ClusterError, user_line

BASES = ("peak", "measured", "estimate")
TOPOLOGIES = ("switch", "torus", "wired")
_RATES = ("f64", "f32", "tf32", "bf16", "f16", "f8")
_UNITS = {
    **dict.fromkeys(_RATES, "FLOP/s"),
    "memory": "byte",
    "memory_bandwidth": "byte/s",
    "bandwidth": "byte/s",
    "detour": "byte/s",
    "matmul_efficiency": "1",
    "memory_efficiency": "1",
    "efficiency": "1",
    "ramp": "s",
    "launch": "s",
    "latency": "s",
    "setup": "s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of the table with its origin.

    Attributes:
        device: name of the device.
        name: what the number is, e.g. "bf16" or "inside.bandwidth".
        value: in ``unit``.
        basis: "peak", "measured" or "estimate".
        source: where it comes from, in words.
        date: when the source said so (year-month).
    """

    device: str
    name: str
    value: float
    unit: str
    basis: str
    source: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How the devices of a group reach each other.

    Attributes:
        bandwidth_bytes_per_s: per direction, what a collective really reaches (peak times efficiency).
        latency_s: one hop.
        setup_s: starting one collective.
        per_host: the devices of a host share the bandwidth; otherwise each device has it to itself.
        topology: "switch" (all pairs alike), "torus" (an all-to-all travels through neighbours) or "wired" (in pairs).
        wiring: of a wired host, the number of links between each two of its devices; ``bandwidth_bytes_per_s`` is of all
            links of a device.
        detour_bytes_per_s: of a wired host, between two devices without a link.
    """

    bandwidth_bytes_per_s: float
    latency_s: float
    setup_s: float
    per_host: bool = False
    topology: str = "switch"
    wiring: Wiring = field(default=(), repr=False)
    detour_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        assert self.bandwidth_bytes_per_s > 0 and self.latency_s >= 0 and self.setup_s >= 0, self
        assert self.topology in TOPOLOGIES, self
        assert (self.topology == "wired") == bool(self.wiring) == (self.detour_bytes_per_s > 0), self
        assert self.wiring == tuple(zip(*self.wiring, strict=True)), "links are of both devices"

    @property
    def single_bytes_per_s(self) -> float:
        """Of one link between two devices; devices of a wired host without one reach each other through a third."""
        return self.bandwidth_bytes_per_s / max((sum(row) for row in self.wiring), default=1)

    def ring_bytes_per_s(self, devices: tuple[int, ...]) -> float:
        """Of the rings that a collective can use among these devices of one host, both ways around each."""
        if not self.wiring:
            return self.bandwidth_bytes_per_s
        ways = 1 if len(devices) == 2 else 2  # between two, a link's two directions are one ring
        return ways * disjoint_rings(self.wiring, devices) * self.single_bytes_per_s or self.detour_bytes_per_s

    def pair_bytes_per_s(self, a: int, b: int) -> float:
        """Directly between two devices of one host."""
        if not self.wiring:
            return self.bandwidth_bytes_per_s
        return self.wiring[a][b] * self.single_bytes_per_s or self.detour_bytes_per_s

    def exchange_bytes_per_s(self, devices: tuple[int, ...]) -> float:
        """What a device sends when each sends to each other one as much, all at once; the detour is shared."""
        if not self.wiring:
            return self.bandwidth_bytes_per_s
        slowest = 0.0
        for a in devices:
            direct = [self.wiring[a][b] for b in devices if b != a and self.wiring[a][b]]
            around = (len(devices) - 1 - len(direct)) / self.detour_bytes_per_s
            slowest = max(slowest, around, *(1 / (links * self.single_bytes_per_s) for links in direct))
        return (len(devices) - 1) / slowest


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        name: its name in the table, e.g. "h100-sxm".
        description: in words.
        platform: JAX's platform, "cpu", "cuda" or "tpu".
        flops_per_s: peak rates by short dtype name, e.g. ("bf16", 989e12).
        memory_bytes: what a program can use of the device's memory.
        memory_bandwidth_bytes_per_s: peak.
        matmul_efficiency: part of a peak rate that a large matmul reaches.
        memory_efficiency: part of the memory bandwidth that a large copy reaches.
        ramp_s: what a matmul takes on top of its FLOPs at that rate.
        launch_s: the least time of an op.
        across_s_per_byte: what a product adds per byte of a first operand that it reads across its rows; measured only.
    """

    name: str
    description: str
    platform: str
    flops_per_s: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    matmul_efficiency: float
    memory_efficiency: float
    ramp_s: float
    launch_s: float
    across_s_per_byte: float = 0.0

    def peak_flops_per_s(self, dtype: str, matmul: bool) -> float:
        """Peak rate for a NumPy-style dtype name; a dtype without a figure runs at the float32 rate.

        Args:
            dtype: e.g. "float32", "bfloat16", "float8_e4m3fn".
            matmul: whether matrix units apply (a float32 matmul uses tf32 where the device has it, as XLA does).
        """
        rates = dict(self.flops_per_s)
        if not matmul:
            return rates["f64"] if dtype == "float64" and "f64" in rates else rates["f32"]
        if dtype == "float32":
            return rates.get("tf32", rates["f32"])
        return rates.get(_short_dtype(dtype), rates["f32"])


def _short_dtype(dtype: str) -> str:
    if dtype.startswith("float8"):
        return "f8"
    return {"bfloat16": "bf16", "float16": "f16", "float64": "f64"}.get(dtype, "f32")


@cache  # a file of the package, and nobody writes to what is returned
def _read_table() -> Mapping[str, Any]:
    return tomllib.loads(resources.files("alpa_lite.cluster").joinpath("hardware.toml").read_text(encoding="utf-8"))


def device_names() -> tuple[str, ...]:
    """All devices of the table, in its order."""
    return tuple(_read_table()["devices"])


def read_device(name: str) -> tuple[Device, Link, Link]:
    """One device with its links inside a host and between hosts.

    Raises:
        ClusterError: the table has no such device.
    """
    devices = _read_table()["devices"]
    if name not in devices:
        close = [known for known in devices if name and known.startswith(name.lower())]
        close += difflib.get_close_matches(name.lower(), devices, n=1, cutoff=0.4)
        guess = f" Did you mean {close[0]!r}?" if close else ""
        raise ClusterError(
            f"device {name!r} is not in the hardware table, which has {', '.join(devices)}.{guess} The device is the "
            f"part after ':' in a cluster text like '1x8:h100-sxm'. At {user_line()}. Take one of these names, or the closest "
            "one and calibrate on the real devices."
        )
    entry = devices[name]

    def value(key: str) -> float:
        return float(entry[key][0])

    device = Device(
        name=name,
        description=entry["description"],
        platform=entry["platform"],
        flops_per_s=tuple((rate, value(rate)) for rate in _RATES if rate in entry),
        memory_bytes=int(value("memory")),
        memory_bandwidth_bytes_per_s=value("memory_bandwidth"),
        matmul_efficiency=value("matmul_efficiency"),
        memory_efficiency=value("memory_efficiency"),
        ramp_s=value("ramp"),
        launch_s=value("launch"),
    )
    return device, _link(entry["inside"]), _link(entry["between"])


def _link(entry: Mapping[str, Any]) -> Link:
    return Link(
        bandwidth_bytes_per_s=float(entry["bandwidth"][0]) * float(entry["efficiency"][0]),
        latency_s=float(entry["latency"][0]),
        setup_s=float(entry["setup"][0]),
        per_host=entry["per"] == "host",
        topology=entry["topology"],
        wiring=tuple(tuple(row) for row in entry.get("wiring", ())),
        detour_bytes_per_s=float(entry["detour"][0]) * float(entry["efficiency"][0]) if "detour" in entry else 0.0,
    )


def device_name_of_kind(platform: str, device_kind: str) -> str:
    """The table's name for what JAX calls ``device.platform`` and ``device.device_kind``.

    Raises:
        ClusterError: the device is not in the table.
    """
    if platform == "cpu":
        return "cpu"
    devices = _read_table()["devices"]
    for name, entry in devices.items():
        if device_kind.lower() in (kind.lower() for kind in entry["kinds"]):
            return name
    known = "; ".join(f"{name} ({', '.join(entry['kinds'])})" for name, entry in devices.items())
    raise ClusterError(
        f"the devices of this process are {device_kind!r} on platform {platform!r}, which the hardware table does not "
        f"have. It has {known}. Name the closest one with al.Cluster.parse('1x8:NAME'); its figures are then used."
    )


def figures(name: str) -> tuple[Figure, ...]:
    """Every figure of one device with unit, basis, source and date; ``ClusterError`` for an unknown device."""
    read_device(name)
    table = _read_table()
    return tuple(_figures(name, table["devices"][name], table["sources"], ""))


def _figures(device: str, entry: Mapping[str, Any], sources: Mapping[str, Any], prefix: str) -> Iterator[Figure]:
    for key, item in entry.items():
        if isinstance(item, dict):
            yield from _figures(device, item, sources, f"{key}.")
        elif key in _UNITS:
            value, unit, basis, source = item
            assert unit == _UNITS[key], f"{device}.{prefix}{key} is in {unit}, not {_UNITS[key]}"
            assert basis in BASES, f"{device}.{prefix}{key} is {basis}, not one of {BASES}"
            origin = sources[source]
            yield Figure(
                device=device,
                name=prefix + key,
                value=float(value),
                unit=unit,
                basis=basis,
                source=origin["text"],
                date=origin["date"],
            )
