"""Conversions for users: ``al.conversion`` shows one with its bytes and price, ``al.reshard`` carries one out.

Both ask the engine that the planner asks (``costs/conversion.py``) and run the steps that lowering runs
(``collectives.py``), so that a conversion can be looked at and measured alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.cluster.hardware import device_name_of_kind
from alpa_lite.core.conversion import Step
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conventions import cost_model
from alpa_lite.costs.conversion import Conversions
from alpa_lite.costs.priced import PricedConversion, price_conversion, read_mesh, read_spec
from alpa_lite.errors import SpecError
from alpa_lite.lowering.collectives import run_alone
from alpa_lite.lowering.lower import partition_spec

SpecLike = PartitionSpec | ShardingSpec | str


def conversion(
    before: SpecLike,
    after: SpecLike,
    shape: tuple[int, ...],
    dtype: Any = "float32",
    *,
    mesh: Any,
    cluster: Cluster | None = None,
    costs: str = "roofline",
    tensor: str = "the tensor",
) -> PricedConversion:
    """The cheapest sequence of collectives from one spec to another; ``print`` shows it as a table.

    Args:
        before, after: ``PartitionSpec``, or the text of a spec like ``"[x,_]+{y}"`` (unreduced over y).
        shape, dtype: of the whole tensor.
        mesh: sizes by axis name, ``{"x": 2, "y": 4}``, a ``DeviceMesh``, or a ``jax.sharding.Mesh``.
        cluster: whose links are priced; may be left out for a ``jax.sharding.Mesh``, whose devices are then taken.
        costs: the cost convention, as ``PlanOptions.costs``.
        tensor: its name in error messages.

    Raises:
        SpecError: a spec does not fit the tensor or the mesh, or ``after`` cannot be reached.

    Example:
        >>> print(al.conversion("[x,_]", "[_,x]", (1024, 1024), mesh={"x": 8}, cluster=al.Cluster.parse("1x8:h100-sxm")))
        float32[1024,1024] on (x=8): [x,_] -> [_,x]
        step        over  then   size     sent     cost
        all-to-all  x     [_,x]  512 KiB  448 KiB  7.27 us
        total                             448 KiB  7.27 us
    """
    where = "al.conversion"
    if not isinstance(shape, tuple | list) or not all(isinstance(n, Integral) and int(n) >= 1 for n in shape):
        raise SpecError(
            f"{tensor} was given the shape {shape!r}. A shape is a tuple of sizes of at least 1, like (1024, 1024). It was "
            f"given to {where} (shape); correct it there."
        )
    if isinstance(mesh, DeviceMesh):
        device_mesh = mesh
    else:
        device_mesh = read_mesh(dict(mesh.shape) if hasattr(mesh, "shape") else mesh, f"{where} (mesh)")
    if cluster is None:
        cluster = _cluster_of(mesh, device_mesh)
    elif not isinstance(cluster, Cluster):
        raise SpecError(
            f"{where} was given cluster={cluster!r}. Allowed is an al.Cluster, whose links are priced. It was given to {where} "
            "(cluster); write for example cluster=al.Cluster.parse('1x8:h100-sxm')."
        )
    made = Conversions(mesh=device_mesh, costs=cost_model(costs, cluster, device_mesh))
    kind = _dtype(dtype, tensor, where)
    old = _read(before, shape, device_mesh, tensor, f"{where} (before)")
    new = _read(after, shape, device_mesh, tensor, f"{where} (after)")
    return price_conversion(made, old, new, shape, kind.name, kind.itemsize)


def reshard(x: jax.Array, sharding: NamedSharding, *, cluster: Cluster | None = None) -> jax.Array:
    """``x`` in another sharding on the same mesh, by the steps that the planner would choose.

    Args:
        x: an array with a ``NamedSharding``.
        sharding: the wanted one, on the mesh of ``x``.
        cluster: whose links are priced; the mesh's own devices by default.

    Raises:
        SpecError: ``x`` is traced or lies on another mesh, or the spec does not fit it.

    Example:
        >>> y = al.reshard(x, NamedSharding(x.sharding.mesh, P(None, "x")))
    """
    if not isinstance(sharding, NamedSharding):
        raise SpecError(
            f"al.reshard was asked for {sharding!r}. Allowed is a NamedSharding on the mesh of the array. It was given as "
            "sharding; write jax.sharding.NamedSharding(x.sharding.mesh, spec)."
        )
    has = getattr(x, "sharding", None)  # of a traced value: None, or one on an abstract mesh
    if not isinstance(has, NamedSharding) or has.mesh != sharding.mesh:
        raise SpecError(
            f"al.reshard was given {_describe(x, has)}, to be laid out on {sharding.mesh}. It converts arrays with a "
            f"NamedSharding on the mesh of the new sharding. Between meshes, and inside jit, use jax.device_put or "
            f"jax.lax.with_sharding_constraint; inside a planned step, al.pin."
        )
    return _run(x, mesh=sharding.mesh, before=has.spec, after=sharding.spec, cluster=cluster)


@partial(jax.jit, static_argnames=("mesh", "before", "after", "cluster"))
def _run(
    x: jax.Array, *, mesh: Mesh, before: PartitionSpec, after: PartitionSpec, cluster: Cluster | None
) -> jax.Array:
    """Steps are looked for while it is traced, so that a second array of the same kind costs a call and no search."""
    chosen = conversion(before, after, x.shape, x.dtype, mesh=mesh, cluster=cluster)
    steps = [s.step for s in chosen.steps]
    run = partial(run_alone, steps=steps, numbers=(-1,) * len(steps), mesh=chosen.mesh)
    return jax.shard_map(run, mesh=mesh, in_specs=(before,), out_specs=after, check_vma=False)(x)


def conversion_function(
    chosen: PricedConversion, mesh: Mesh | AbstractMesh, first: int = 0
) -> Callable[[jax.Array], jax.Array]:
    """A conversion as a function of a whole tensor, to be called under ``jax.jit``.

    A tensor that is unreduced is represented with a leading dim, split over its unreduced axes, with one partial sum per
    entry (``stacked_spec``).

    Args:
        chosen: the conversion.
        mesh: with the axes of ``chosen.mesh``.
        first: number of its first collective, for the audit of a program that holds several conversions.
    """
    steps: list[Step] = [s.step for s in chosen.steps]
    counter = iter(range(first, first + len(steps)))
    numbers = [-1 if s.kind is None else next(counter) for s in steps]

    def run(x: jax.Array) -> jax.Array:
        tile = run_alone(x[0] if chosen.before.unreduced else x, steps, numbers, chosen.mesh)
        return tile[None] if chosen.after.unreduced else tile

    specs = stacked_spec(chosen.before), stacked_spec(chosen.after)
    return jax.shard_map(run, mesh=mesh, in_specs=specs[:1], out_specs=specs[1], check_vma=False)


def stacked_spec(spec: ShardingSpec) -> PartitionSpec:
    """The public form of a spec; partial sums become a leading dim over the unreduced axes."""
    reduced = partition_spec(ShardingSpec(spec.dims))
    return PartitionSpec(spec.unreduced, *reduced) if spec.unreduced else reduced


def _read(spec: SpecLike, shape: tuple[int, ...], mesh: DeviceMesh, tensor: str, where: str) -> ShardingSpec:
    if isinstance(spec, str):
        try:
            spec = ShardingSpec.parse(spec)
        except ValueError as error:
            raise SpecError(
                f"{tensor} was given the spec {spec!r}: {error}. It was given to {where}; write one entry per dim, '_' "
                f"for a whole one, axes joined with '.', like '[x.y,_]', and each axis once."
            ) from None
    if isinstance(spec, ShardingSpec):
        return read_spec(spec.dims, spec.unreduced, shape, mesh, tensor, where)
    if not isinstance(spec, PartitionSpec):
        raise SpecError(
            f"{tensor} was given the spec {spec!r} of type {type(spec).__name__}. Allowed are a PartitionSpec, or the text of a "
            f"spec like '[x,_]' or '[_,_]+{{y}}'. It was given to {where}; correct it there."
        )
    entries = [() if e is None else (e,) if isinstance(e, str) else e for e in spec.partitions]
    if PartitionSpec.UNCONSTRAINED in spec.partitions:
        raise SpecError(
            f"{tensor} was given the spec {spec} with a free dim. A conversion is between two known layouts. It was "
            f"given to {where}; write None for a whole dim or name its axes."
        )
    return read_spec(entries, sorted(spec.unreduced), shape, mesh, tensor, where)


def _dtype(dtype: Any, tensor: str, where: str) -> np.dtype:
    try:
        return np.dtype(dtype)
    except TypeError:
        raise SpecError(
            f"{tensor} was given the dtype {dtype!r}, which NumPy does not know. A name like 'float32' or 'bfloat16', or a "
            f"dtype itself, is allowed. It was given to {where} (dtype); correct it there."
        ) from None


def _cluster_of(mesh: Any, device_mesh: DeviceMesh) -> Cluster:
    """The devices of a ``jax.sharding.Mesh`` as a cluster, hosts being processes."""
    if not isinstance(mesh, Mesh):
        raise SpecError(
            f"al.conversion was given the mesh {device_mesh} and no cluster. Prices need links: give a jax.sharding.Mesh "
            f"of real devices, or name the cluster. Add for example "
            f"cluster=al.Cluster.parse('1x{device_mesh.num_devices}:h100-sxm')."
        )
    devices = mesh.devices.flatten()
    hosts = len({d.process_index for d in devices})
    name = device_name_of_kind(devices[0].platform, devices[0].device_kind)
    return Cluster.of(name, num_hosts=hosts, devices_per_host=math.ceil(len(devices) / hosts))


def _describe(x: Any, sharding: Any) -> str:
    what = f"an array of shape {getattr(x, 'shape', None)}"
    return f"{what} with sharding {sharding}" if sharding is not None else f"{what} without a known sharding"
