"""Alpha-beta time of collectives on a mesh over a cluster's links.

Formulation, for a group of n devices on h hosts with m of them in each, and B = ``size_bytes`` as in
``core/collective.py``:

- *bandwidth per device*: inside a host w. Between hosts v, the network port of one device, or its share where the
  devices of a host share one port (all of them communicate at once: every group of a mesh runs the same program).
  Where the devices of a host are wired in pairs, w is what the rings within the group reach (``cluster/wiring.py``), of
  the slowest group, wherever in a host a mesh of this size may lie.
- *all-gather, reduce-scatter*: NCCL's ring. (n-1)/n * B passes every edge of the ring. A ring that leaves a host can
  use the ports of all m members, as NCCL does with one channel per port: bandwidth min(w, m*v). n-1 hops, h-1 of them
  between hosts.
- *all-reduce*: one after the other, so twice that.
- *all-to-all*: each device sends B/n to each other one, m-1 of them in its host and n-m outside; both kinds move at the
  same time. One hop. In a torus the pieces travel through neighbours, n/4 of a ring on average.
- *collective-permute*: B over the slowest link, one hop.

Every collective starts once per phase (``setup_s``). The slowest link that a group touches bounds it. A calibration
replaces the formula for groups inside a host.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.costs.model import Size, linear_price


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The devices that one collective joins, and the links between them.

    Attributes:
        num_devices, num_hosts, num_per_host: n, h and m of the module's formulation.
        inside_bytes_per_s, port_bytes_per_s: w and v.
        exchange_bytes_per_s, pair_bytes_per_s: inside a host, of an all-to-all, and between the two that are worst linked.
        inside_latency_s, between_latency_s: of one hop.
        setup_s: of the slowest link that the group uses.
        torus: whether an all-to-all travels through neighbours.
    """

    num_devices: int
    num_hosts: int
    num_per_host: int
    inside_bytes_per_s: float
    exchange_bytes_per_s: float
    pair_bytes_per_s: float
    port_bytes_per_s: float
    inside_latency_s: float
    between_latency_s: float
    setup_s: float
    torus: bool

    @property
    def slowest_hop_s(self) -> float:
        used = [self.inside_latency_s] * (self.num_per_host > 1) + [self.between_latency_s] * (self.num_hosts > 1)
        return max(used, default=0.0)

    def ring(self) -> tuple[float, float]:
        """Alpha and beta of an all-gather or a reduce-scatter."""
        crossings = self.num_hosts - 1
        hops_s = crossings * self.between_latency_s + (self.num_devices - 1 - crossings) * self.inside_latency_s
        edges = [self.inside_bytes_per_s] * (self.num_per_host > 1)
        edges += [self.port_bytes_per_s * self.num_per_host] * (self.num_hosts > 1)
        return self.setup_s + hops_s, (self.num_devices - 1) / self.num_devices / min(edges)

    def all_to_all(self) -> tuple[float, float]:
        n, m = self.num_devices, self.num_per_host
        inside = (m - 1) / n / self.exchange_bytes_per_s
        outside = (n - m) / n / self.port_bytes_per_s
        detour = max(1.0, n / 4) if self.torus else 1.0
        return self.setup_s + self.slowest_hop_s, detour * max(inside, outside)

    def permute(self) -> tuple[float, float]:
        edges = [self.pair_bytes_per_s] * (self.num_per_host > 1) + [self.port_bytes_per_s] * (self.num_hosts > 1)
        return self.setup_s + self.slowest_hop_s, 1 / min(edges)

    def linear(self, kind: CollectiveKind) -> tuple[float, float]:
        if kind is CollectiveKind.ALL_TO_ALL:
            return self.all_to_all()
        if kind is CollectiveKind.COLLECTIVE_PERMUTE:
            return self.permute()
        alpha, beta = self.ring()
        phases = 2 if kind is CollectiveKind.ALL_REDUCE else 1
        return phases * alpha, phases * beta


def group_of(cluster: Cluster, mesh: DeviceMesh, axes: tuple[str, ...]) -> Group:
    """The largest group that a collective over ``axes`` joins."""
    num_hosts, num_per_host = cluster.group_extent(mesh, axes)
    inside, between = cluster.inside, cluster.between
    parts = cluster.group_parts(mesh, axes)
    pairs = {pair for part in parts for pair in itertools.combinations(part, 2)}
    sharers = min(cluster.devices_per_host, mesh.num_devices) if between.per_host else 1
    return Group(
        num_devices=mesh.axes_size(axes),
        num_hosts=num_hosts,
        num_per_host=num_per_host,
        inside_bytes_per_s=min(map(inside.ring_bytes_per_s, parts), default=inside.bandwidth_bytes_per_s),
        exchange_bytes_per_s=min(map(inside.exchange_bytes_per_s, parts), default=inside.bandwidth_bytes_per_s),
        pair_bytes_per_s=min((inside.pair_bytes_per_s(*p) for p in pairs), default=inside.bandwidth_bytes_per_s),
        port_bytes_per_s=between.bandwidth_bytes_per_s / sharers,
        inside_latency_s=inside.latency_s,
        between_latency_s=between.latency_s,
        setup_s=max(inside.setup_s * (num_per_host > 1), between.setup_s * (num_hosts > 1)),
        torus=(between if num_hosts > 1 else inside).topology == "torus",
    )


def _linear(cluster: Cluster, group: Group, kind: CollectiveKind) -> tuple[float, float]:
    if group.num_devices == 1:
        return 0.0, 0.0
    return _measured(cluster, group, kind) or group.linear(kind)


def _inner_extra(cluster: Cluster, group: Group, kind: CollectiveKind) -> tuple[float, float]:
    """What was measured of a collective along another dim than the first, beyond the one along the first."""
    if group.num_devices == 1:
        return 0.0, 0.0
    first, inner = (_measured(cluster, group, kind, inner) for inner in (False, True))
    if first is None or inner is None:
        return 0.0, 0.0
    return max(inner[0] - first[0], 0.0), max(inner[1] - first[1], 0.0)


def _measured(cluster: Cluster, group: Group, kind: CollectiveKind, inner: bool = False) -> tuple[float, float] | None:
    calibration = cluster.calibration
    if calibration is None or group.num_hosts > 1:
        return None
    measured = calibration.collective(kind, group.num_devices, inner)
    if measured is None:
        return None
    if kind is CollectiveKind.COLLECTIVE_PERMUTE:
        return measured.alpha_s, measured.beta_s_per_byte
    here, there = group.num_devices, measured.num_devices
    return measured.alpha_s, measured.beta_s_per_byte * ((here - 1) / here) / ((there - 1) / there)


_Prices = dict[tuple[CollectiveKind, tuple[str, ...]], tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCosts:
    """Seconds of collectives on one mesh of a cluster.

    Example:
        ``MeshCosts(cluster=cluster, mesh=mesh).time_s(CollectiveKind.ALL_REDUCE, ("x",), 2**20)``

    Attributes:
        cluster, mesh: where.
    """

    cluster: Cluster
    mesh: DeviceMesh
    # Each price is made when it is first asked for; of some meshes nobody asks for any.
    _groups: dict[tuple[str, ...], Group] = field(default_factory=dict, init=False, repr=False, compare=False)
    _table: _Prices = field(default_factory=dict, init=False, repr=False, compare=False)
    _extra: _Prices = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.cluster.check_mesh(self.mesh)

    def linear(self, kind: CollectiveKind, axes: tuple[str, ...]) -> tuple[float, float]:
        """``(alpha_s, beta_s_per_byte)``; zero over a single device, ``KeyError`` for an unknown axis."""
        found = self._table.get((kind, axes))
        if found is None:
            found = self._table[kind, axes] = _linear(self.cluster, self._group(axes), kind)
        return found

    def _group(self, axes: tuple[str, ...]) -> Group:
        self.mesh.axes_size(axes)
        ordered = self.mesh.sort_axes(axes)
        if ordered not in self._groups:
            self._groups[ordered] = group_of(self.cluster, self.mesh, ordered)
        return self._groups[ordered]

    def inner_extra(self, kind: CollectiveKind, axes: tuple[str, ...]) -> tuple[float, float]:
        """See ``CostModel``; zero without a calibration."""
        found = self._extra.get((kind, axes))
        if found is None:
            found = self._extra[kind, axes] = _inner_extra(self.cluster, self._group(axes), kind)
        return found

    def time_s(self, kind: CollectiveKind, axes: tuple[str, ...], size_bytes: Size) -> Size:
        """Seconds of one execution, for one size or an array of sizes."""
        return linear_price(self.linear(kind, axes), size_bytes)
