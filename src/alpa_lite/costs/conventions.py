"""The named cost conventions behind ``PlanOptions.costs``: seconds ("roofline", "measured") or a convention's own unit.

"measured" is the roofline on a calibrated cluster, and refuses any other; "alpa" is below, the rest in ``counted.py``. All
take the same restrictions: kinds of collectives that are forbidden, a price on replication, and whether a contraction may
be repeated in full. Compute can be left out where it is priced. The solver sees only the ``CostModel`` interface.

**alpa** follows ``alpa/shard_parallel/auto_sharding.py`` and the pass it calls (OSDI'22, section 4). For a full tensor
of B bytes and a mesh axis of n devices, with alpha and beta per axis:

==================  ==============================================
all-gather          alpha + beta * (n-1)/n * B + 0.1
all-reduce          alpha + 2 * beta * (n-1)/n * B + 0.01
reduce-scatter      alpha + beta * (n-1)/n * B + 0.001
all-to-all          alpha + beta * (n-1)/n^2 * B * (n/2) + 0.001
collective-permute  not allowed
==================  ==============================================

B is the tensor as that axis sees it, that is the larger side of the collective; an all-to-all's size per device is B/n.
Over several axes the collectives run one after the other, an all-gather with growing tensors. Compute is free; a
replicated parameter costs the all-reduce of one byte over every axis, truncated (``replication_penalty``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.costs.collectives import MeshCosts
from alpa_lite.costs.compute import op_time_s
from alpa_lite.costs.counted import COUNTED, CountedCosts
from alpa_lite.costs.model import CostModel, PricedInBytes, Size, linear_price
from alpa_lite.errors import AlpaLiteError

CONVENTIONS = ("roofline", "measured", "alpa", *COUNTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCosts(PricedInBytes):
    """Seconds: alpha-beta collectives on the cluster's links, and a roofline for ops.

    Attributes:
        meshes: prices of collectives on the mesh.
        forbid: kinds that cost inf.
        replication_penalty: see ``CostModel``; seconds.
        require_sharded_contractions: a contraction that is repeated in full costs inf.
        computes: whether ops have a price of their own.
    """

    meshes: MeshCosts
    forbid: tuple[CollectiveKind, ...] = ()
    replication_penalty: float = 0.0
    require_sharded_contractions: bool = False
    computes: bool = True

    @property
    def name(self) -> str:
        return "roofline"

    @property
    def unit(self) -> str:
        return "s"

    @property
    def writes_patches(self) -> bool:
        """XLA:CPU's library does (Eigen's ``SpatialConvolution``); those of GPUs keep them in registers."""
        return self.computes and self.meshes.cluster.device.platform == "cpu"

    @property
    def across_passes(self) -> float:
        device = self.meshes.cluster.device
        bandwidth = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
        return device.across_s_per_byte * bandwidth if self.computes else 0.0

    def linear(self, kind: CollectiveKind, axes: tuple[str, ...]) -> tuple[float, float]:
        alpha, beta = self.meshes.linear(kind, axes)
        return (math.inf, 0.0) if kind in self.forbid and beta else (alpha, beta)

    def collective(self, kind: CollectiveKind, axes: tuple[str, ...], size_bytes: Size) -> Size:
        return linear_price(self.linear(kind, axes), size_bytes)

    def inner_extra(self, kind: CollectiveKind, axes: tuple[str, ...]) -> tuple[float, float]:
        return self.meshes.inner_extra(kind, axes)

    def compute(self, flops: Size, size_bytes: Size, dtype: str, heavy: bool) -> Size:
        if not self.computes:
            return linear_price((0.0, 0.0), flops)
        return op_time_s(self.meshes.cluster.device, flops, size_bytes, dtype, "matmul" if heavy else "other")

    def heavy_replication(self, axes: tuple[str, ...], size_bytes: Size) -> Size:
        repeated = self.meshes.mesh.axes_size(axes) > 1
        price = math.inf if repeated and self.require_sharded_contractions else 0.0
        return linear_price((price, 0.0), size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlpaCosts(PricedInBytes):
    """Alpa's closed forms; see the module's table.

    Attributes:
        mesh: the device mesh; Alpa knows one or two axes, further ones are priced alike.
        alpha, beta: per mesh axis; () means 1 for every axis, as in Alpa's tests (its default on two axes has beta
            (1, 0.1), a slow and a fast one).
        forbid: kinds that cost inf.
        replication_penalty: P of one replicated parameter; ``penalty`` gives Alpa's value.
        require_sharded_contractions: a contraction that is repeated in full costs inf, else its operands' all-reduce.
        mixed: allow an all-to-all on a mesh that really has two axes (Alpa: only with mixed mesh shapes).
    """

    mesh: DeviceMesh
    alpha: tuple[float, ...] = ()
    beta: tuple[float, ...] = ()
    forbid: tuple[CollectiveKind, ...] = ()
    replication_penalty: float = 0.0
    require_sharded_contractions: bool = True
    mixed: bool = False

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            given = getattr(self, name) or (1.0,) * len(self.mesh.shape)
            if len(given) != len(self.mesh.shape) or any(x < 0 for x in given):
                raise AlpaLiteError(
                    f"the alpa costs got {name}={given} for the mesh {self.mesh}. They need one number >= 0 per "
                    f"mesh axis, here {len(self.mesh.shape)}. Correct {name} where the cost model is made, or leave it "
                    f"out for 1 each."
                )
            object.__setattr__(self, name, tuple(map(float, given)))

    @property
    def name(self) -> str:
        return "alpa"

    @property
    def unit(self) -> str:
        return "alpa"

    @property
    def penalty(self) -> float:
        """P: the all-reduce of one byte over every axis (of size 1 too; at least two axes are counted), truncated."""
        sizes, alpha, beta = self.mesh.shape, self.alpha, self.beta
        if len(sizes) == 1:
            sizes, alpha, beta = (*sizes, 1), (*alpha, *alpha), (*beta, *beta)
        return float(int(sum(a + 2 * b * (n - 1) / n + 0.01 for n, a, b in zip(sizes, alpha, beta, strict=True))))

    def linear(self, kind: CollectiveKind, axes: tuple[str, ...]) -> tuple[float, float]:
        """Alpha with the tie-breaking constant, and beta, summed over the axes; later axes are gathered first."""
        used = [axis for axis in axes if self.mesh.axis_size(axis) > 1]
        if used and not self._allowed(kind):
            return math.inf, 0.0
        alpha = beta = 0.0
        share = 1.0  # of the larger side that this axis sees: gathers grow towards the first axis
        for axis in used:
            n, index = self.mesh.axis_size(axis), self.mesh.axis_names.index(axis)
            part, constant = _alpa_terms(kind, n)
            alpha += self.alpha[index] + constant
            beta += self.beta[index] * part * share
            if kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER):
                share /= n
        return alpha, beta

    def _allowed(self, kind: CollectiveKind) -> bool:
        if kind in self.forbid or kind is CollectiveKind.COLLECTIVE_PERMUTE:
            return False
        return kind is not CollectiveKind.ALL_TO_ALL or self.mixed or sum(n > 1 for n in self.mesh.shape) <= 1

    def collective(self, kind: CollectiveKind, axes: tuple[str, ...], size_bytes: Size) -> Size:
        return linear_price(self.linear(kind, axes), size_bytes)

    def compute(self, flops: Size, size_bytes: Size, dtype: str, heavy: bool) -> Size:
        return linear_price((0.0, 0.0), flops)

    def heavy_replication(self, axes: tuple[str, ...], size_bytes: Size) -> Size:
        if self.mesh.axes_size(axes) == 1:
            return linear_price((0.0, 0.0), size_bytes)
        if self.require_sharded_contractions:
            return linear_price((math.inf, 0.0), size_bytes)
        return self.collective(CollectiveKind.ALL_REDUCE, axes, size_bytes)


def _alpa_terms(kind: CollectiveKind, n: int) -> tuple[float, float]:
    """The factor of beta * size_bytes and the constant for one axis of n devices."""
    ring = (n - 1) / n
    if kind is CollectiveKind.ALL_GATHER:
        return ring, 0.1
    if kind is CollectiveKind.ALL_REDUCE:
        return 2 * ring, 0.01
    if kind is CollectiveKind.REDUCE_SCATTER:
        return ring, 0.001
    # (n-1)/n^2 * B * n/2 with B = n * size_bytes.
    return (n - 1) / 2, 0.001


def cost_model(
    name: str,
    cluster: Cluster,
    mesh: DeviceMesh,
    *,
    forbid: tuple[str, ...] = (),
    replication_penalty: float | None = None,
    require_sharded_contractions: bool | None = None,
    compute: bool | None = None,
) -> CostModel:
    """The cost model that ``PlanOptions`` asks for.

    Args:
        name: one of ``CONVENTIONS``.
        cluster, mesh: what is priced.
        forbid: names of collective kinds, e.g. "all-gather".
        replication_penalty: None takes the convention's own.
        require_sharded_contractions: refuse contractions that are repeated in full; None takes the convention's own.
        compute: whether ops are priced beside what is moved; None takes the convention's own.

    Raises:
        AlpaLiteError: unknown convention or kind, a mesh or a switch that the convention does not have.
    """
    kinds = tuple(_kind(text) for text in forbid)
    strict = require_sharded_contractions
    if name not in CONVENTIONS:
        raise AlpaLiteError(
            f"costs={name!r} is not a cost convention. Known are {', '.join(map(repr, CONVENTIONS))}. It stands in "
            f"PlanOptions.costs; leave it out for 'roofline', which predicts seconds."
        )
    if name in ("roofline", "measured"):
        _check_measured(name, cluster)
        return RooflineCosts(
            meshes=MeshCosts(cluster=cluster, mesh=mesh),
            forbid=kinds,
            replication_penalty=replication_penalty or 0.0,
            require_sharded_contractions=bool(strict),
            computes=compute is not False,
        )
    cluster.check_mesh(mesh)
    if compute:
        raise AlpaLiteError(
            f"compute=True was given with costs={name!r}, which counts only what is moved. Compute has a price under "
            "'roofline' and 'measured'. It stands in PlanOptions.compute; leave it out, or take one of those."
        )
    if name == "alpa":
        own = AlpaCosts(mesh=mesh).penalty
        penalty = own if replication_penalty is None else replication_penalty
        return AlpaCosts(
            mesh=mesh, forbid=kinds, replication_penalty=penalty, require_sharded_contractions=bool(strict)
        )
    costs = CountedCosts(
        name=name,
        mesh=mesh,
        forbid=kinds,
        replication_penalty=replication_penalty or 0.0,
        require_sharded_contractions=strict,
    )
    _check_axes(costs)
    return costs


def _check_measured(name: str, cluster: Cluster) -> None:
    if name == "measured" and cluster.calibration is None:
        raise AlpaLiteError(
            f"costs='measured' was given with the cluster {cluster}, which has no measurements. Allowed are calibrated "
            "clusters. It stands in PlanOptions.costs; take al.Cluster.local(calibrate=True), or costs='roofline' for the "
            "hardware table's figures."
        )


def _check_axes(costs: CountedCosts) -> None:
    used = [n for n in costs.mesh.shape if n > 1]
    if costs.rules.single_axis and len(used) > 1:
        raise AlpaLiteError(
            f"costs={costs.name!r} was given for the mesh {costs.mesh}. It prices meshes with one axis of more than one "
            f"device. It stands in PlanOptions.costs; take mesh_shape=({costs.mesh.num_devices},), or another convention."
        )


def _kind(text: str) -> CollectiveKind:
    try:
        return CollectiveKind(text)
    except ValueError:
        raise AlpaLiteError(
            f"forbid contains {text!r}, which is no kind of collective. Allowed are {', '.join(CollectiveKind)}. It "
            f"stands in PlanOptions.forbid; correct the name or remove it."
        ) from None
