"""The audit on fresh output of XLA:GPU, compiled without a GPU."""

from __future__ import annotations

import importlib.util

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.executor.verify import compile_for_target, export_step
from alpa_lite.lowering.audit import audit

from .gpu_programs import PROGRAMS

GRID = DeviceMesh(shape=(2, 4), axis_names=("x", "y"))
NO_COMPILER = any(importlib.util.find_spec(module) is None for module in ("jax_cuda12_plugin", "flatbuffers"))


@pytest.mark.skipif(NO_COMPILER, reason="XLA:GPU is not installed: pip install 'alpa-lite[aot]'")
@pytest.mark.parametrize("device", ["h100-sxm", "v100-sxm2-16gb"])
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_programs_that_xla_gpu_rewrites(name: str, device: str) -> None:
    """As in test_audit.py on stored text, with what this version of the compiler prints."""
    function, arguments, planned = PROGRAMS[name]
    here = AbstractMesh(GRID.shape, GRID.axis_names, axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(function, mesh=here, in_specs=P(), out_specs=P(), check_vma=False)
    placed = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(here, P())) for a in arguments)
    result = compile_for_target(export_step(mapped, placed), device=device, mesh=GRID, devices_per_host=8)
    report = audit(planned, result.hlo_text, GRID)
    assert report.ok, str(report)
