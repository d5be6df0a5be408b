"""Ops on local tiles that need more than local sizes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from alpa_lite.core.spec import ShardingSpec
from alpa_lite.lowering.local_ops import LocalOp, evaluate
from tests.compiling import QUICK_COMPILE
from tests.harness import device_mesh, difference, jax_mesh

# What a device makes of the transform of rows that all devices hold, and what that is on the host.
READERS = {
    "all_gather": (lambda x: lax.all_gather(x, "x", axis=1, tiled=True), lambda want: np.tile(want, 8)),
    "reduce_scatter": (
        lambda x: lax.all_gather(lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True), "x", axis=1, tiled=True),
        lambda want: 8 * want,
    ),
    "elementwise_between": (
        lambda x: lax.all_gather(2 * x + 1, "x", axis=1, tiled=True),
        lambda want: np.tile(2 * want + 1, 8),
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_a_collective_along_an_inner_dim_may_read_an_fft(name):
    """On its own it makes XLA:CPU lay out the FFT in an order of dims that it then refuses to run."""
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.complex64)
    mesh, whole = device_mesh((8,)), ShardingSpec.replicated(2)
    op = LocalOp(
        name="fft",
        primitive=lax.fft_p,
        params={"fft_type": lax.FftType.FFT, "fft_lengths": (16,)},
        operands=(whole,),
        results=(whole,),
        operand_shapes=(x.shape,),
        result_shapes=(x.shape,),
        mesh=mesh,
    )
    read, on_host = READERS[name]
    local = jax.shard_map(
        lambda x: read(*evaluate(op, [x])),
        mesh=jax_mesh(mesh),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    got = jax.jit(local, compiler_options=QUICK_COMPILE)(x)
    assert difference(got, on_host(np.fft.fft(x)).astype(np.complex64)) < 1e-5
