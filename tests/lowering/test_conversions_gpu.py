"""Conversions compiled by XLA:GPU, without a GPU: the collectives in its program are those that were priced."""

from __future__ import annotations

import importlib.util
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.collective import CollectiveKind
from alpa_lite.costs.conventions import cost_model
from alpa_lite.costs.conversion import Conversions
from alpa_lite.costs.priced import price_conversion
from alpa_lite.executor.verify import compile_for_target, export_step
from alpa_lite.lowering.audit import audit
from alpa_lite.lowering.reshard import conversion_function, stacked_spec
from benchmarks.conversion_pairs import one_per_class
from tests.harness import device_mesh

NO_COMPILER = any(importlib.util.find_spec(module) is None for module in ("jax_cuda12_plugin", "flatbuffers"))
SHAPE = (64, 64)


@pytest.mark.skipif(NO_COMPILER, reason="XLA:GPU is not installed: pip install 'alpa-lite[aot]'")
def test_one_pair_of_every_class_on_two_axes() -> None:
    mesh = device_mesh((2, 4))
    here = AbstractMesh(mesh.shape, mesh.axis_names, axis_types=(AxisType.Auto,) * 2)
    made = Conversions(mesh=mesh, costs=cost_model("roofline", Cluster.parse("1x8:h100-sxm"), mesh))
    pairs = [(b, a) for b, a in one_per_class(mesh, 2) if b != a and not b.unreduced]
    priced = [price_conversion(made, before, after, SHAPE, "float32", 4) for before, after in pairs]
    first = itertools.accumulate((len(c.collectives) for c in priced), initial=0)
    functions = [conversion_function(c, here, number) for c, number in zip(priced, first, strict=False)]
    arguments = tuple(
        jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=NamedSharding(here, stacked_spec(c.before))) for c in priced
    )
    program = export_step(partial(_all, functions), arguments)
    text = compile_for_target(program, device="h100-sxm", mesh=mesh, devices_per_host=8).hlo_text
    report = audit([collective for c in priced for collective in c.collectives], text, mesh)
    assert report.ok, str(report)
    kinds = {collective.kind for c in priced for collective in c.collectives}
    assert kinds == {CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL, CollectiveKind.COLLECTIVE_PERMUTE}


def _all(functions: list, *tensors: jax.Array) -> list[jax.Array]:
    return [function(x) for function, x in zip(functions, tensors, strict=True)]
