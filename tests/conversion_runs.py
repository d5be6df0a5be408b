"""Runs many conversions in one compiled program (compiling is what costs) and checks values, bytes and collectives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conversion import Conversions
from alpa_lite.costs.priced import PricedConversion, price_conversion
from alpa_lite.lowering.audit import audit
from alpa_lite.lowering.reshard import conversion_function, stacked_spec
from benchmarks.conversion_pairs import Pair
from tests.harness import jax_mesh

CHUNK = 128  # conversions per program


def whole_tensor(shape: tuple[int, ...], number: int) -> np.ndarray:
    """Distinct whole numbers, so that sums are exact in any order; another offset for every tensor."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 3 * number


def stacked(whole: np.ndarray, spec: ShardingSpec, mesh: DeviceMesh) -> np.ndarray:
    """Partial sums that add up to ``whole``, one per device along the unreduced axes, all different."""
    if not spec.unreduced:
        return whole
    count = mesh.axes_size(spec.unreduced)
    parts = [
        np.full_like(whole, i + 1) * (np.arange(whole.size).reshape(whole.shape) % (i + 2)) for i in range(count - 1)
    ]
    return np.stack([*parts, whole - sum(parts)]).astype(np.float32)


def check_conversions(
    made: Conversions, pairs: Sequence[Pair], shape: tuple[int, ...], *, by_xla: bool = True
) -> list[PricedConversion]:
    """Runs the conversions of ``made`` for all pairs, and XLA's own; every device's tile must be exact.

    The collectives of the compiled program must be those that were priced, one for one and with their bytes.
    """
    priced = [price_conversion(made, before, after, shape, "float32", 4) for before, after in pairs]
    for start in range(0, len(priced), CHUNK):
        chunk = priced[start : start + CHUNK]
        grid, wholes = jax_mesh(made.mesh), [whole_tensor(shape, i) for i in range(len(chunk))]
        inputs = [
            jax.device_put(stacked(whole, c.before, made.mesh), NamedSharding(grid, stacked_spec(c.before)))
            for whole, c in zip(wholes, chunk, strict=True)
        ]
        _run_ours(chunk, wholes, inputs, grid)
        if by_xla:
            _run_xla(chunk, wholes, inputs, grid)
    return priced


def _run_ours(
    priced: Sequence[PricedConversion], wholes: Sequence[np.ndarray], inputs: Sequence[jax.Array], grid: Mesh
) -> None:
    first = itertools.accumulate((len(c.collectives) for c in priced), initial=0)
    functions = [conversion_function(c, grid, number) for c, number in zip(priced, first, strict=False)]
    compiled = jax.jit(lambda xs: [f(x) for f, x in zip(functions, xs, strict=True)]).lower(inputs).compile()
    planned = [collective for c in priced for collective in c.collectives]
    report = audit(planned, compiled.as_text(), priced[0].mesh)
    assert report.ok and not report.merged, str(report)
    assert len(report.compiled) == len(planned), str(report)
    for c, whole, result in zip(priced, wholes, compiled(inputs), strict=True):
        check_shards(c, whole, result, "explicit collectives")


def _run_xla(
    priced: Sequence[PricedConversion], wholes: Sequence[np.ndarray], inputs: Sequence[jax.Array], grid: Mesh
) -> None:
    """Pairs whose target holds partial sums are left out: there is no sharding to ask XLA for."""
    chosen = [i for i, c in enumerate(priced) if not c.after.unreduced]
    run = jax.jit(
        lambda xs: [x.sum(0) if priced[i].before.unreduced else x for i, x in zip(chosen, xs, strict=True)],
        out_shardings=[NamedSharding(grid, stacked_spec(priced[i].after)) for i in chosen],
    )
    for i, result in zip(chosen, run([inputs[i] for i in chosen]), strict=True):
        check_shards(priced[i], wholes[i], result, "XLA")


def check_shards(c: PricedConversion, whole: np.ndarray, result: jax.Array, by: str) -> None:
    """Every device's tile, replicas too; partial sums must add up."""
    if c.after.unreduced:
        np.testing.assert_array_equal(np.asarray(result).sum(0), whole, err_msg=f"{by}: {c}")
        return
    for shard in result.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index], err_msg=f"{by}: {c}")
