"""Compiling with XLA:GPU without a GPU, and the audit of what it compiled."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from alpa_lite.core.collective import Collective, CollectiveKind
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.executor import verify
from alpa_lite.executor.gpu_targets import gpu_targets
from alpa_lite.executor.verify import VerificationError, compile_for_target, export_step
from alpa_lite.lowering.audit import audit

NO_COMPILER = any(importlib.util.find_spec(module) is None for module in ("jax_cuda12_plugin", "flatbuffers"))
needs_compiler = pytest.mark.skipif(NO_COMPILER, reason="XLA:GPU is not installed: pip install 'alpa-lite[aot]'")
needs_export = pytest.mark.skipif(
    importlib.util.find_spec("flatbuffers") is None, reason="flatbuffers is not installed: pip install 'alpa-lite[aot]'"
)
GRID = DeviceMesh(shape=(2, 4), axis_names=("x", "y"))
BATCH, WIDTH, HIDDEN = 256, 512, 1024


def abstract(mesh: DeviceMesh) -> AbstractMesh:
    return AbstractMesh(mesh.shape, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.shape))


def mlp_step(mesh: DeviceMesh) -> tuple[Callable[..., object], tuple[object, ...], tuple[Collective, ...]]:
    """Gradient step of a two-layer MLP, batch and first weight split over x, hidden dim over y; with its plan."""
    x, y = mesh.shape
    specs = {"in": P("x", "y"), "out": P("y", None)}

    def loss(weights: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        with jax.named_scope("al_c0"):
            first = jax.lax.all_gather(weights["in"], "x", axis=0, tiled=True)
        with jax.named_scope("al_c1"):
            result = jax.lax.psum(jnp.tanh(batch @ first) @ weights["out"], "y")
        return (result**2).mean()

    def step(weights: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        value, gradients = jax.value_and_grad(loss)(weights, batch)
        with jax.named_scope("al_c4"):
            gradients["out"] = jax.lax.psum(gradients["out"], "x")
        with jax.named_scope("al_c5"):
            value = jax.lax.psum(value, "x")
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    here = abstract(mesh)
    mapped = jax.shard_map(step, mesh=here, in_specs=(specs, P("x", None)), out_specs=(specs, P()), check_vma=False)

    def argument(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(here, spec))

    arguments = (
        {"in": argument((WIDTH, HIDDEN), specs["in"]), "out": argument((HIDDEN, WIDTH), specs["out"])},
        argument((BATCH, WIDTH), P("x", None)),
    )
    activations, first = BATCH // x * WIDTH * 4, WIDTH * HIDDEN // y * 4
    kinds = CollectiveKind
    planned = (
        Collective(kind=kinds.ALL_GATHER, axes=("x",), size_bytes=first),
        Collective(kind=kinds.ALL_REDUCE, axes=("y",), size_bytes=activations),
        Collective(kind=kinds.ALL_REDUCE, axes=("y",), size_bytes=activations),  # the transpose of a psum is one
        Collective(kind=kinds.REDUCE_SCATTER, axes=("x",), size_bytes=first),
        Collective(kind=kinds.ALL_REDUCE, axes=("x",), size_bytes=HIDDEN // y * WIDTH * 4),
        Collective(kind=kinds.ALL_REDUCE, axes=("x",), size_bytes=4),
    )
    return mapped, arguments, planned


@needs_compiler
@pytest.mark.parametrize(("shape", "hosts"), [((1, 8), 1), ((2, 4), 1), ((8, 8), 8)])
def test_mlp_step_compiles_for_h100_as_planned(shape: tuple[int, ...], hosts: int) -> None:
    mesh = DeviceMesh(shape=shape, axis_names=("x", "y"))
    step, arguments, planned = mlp_step(mesh)
    result = compile_for_target(
        export_step(step, arguments),
        device="h100-sxm",
        mesh=mesh,
        devices_per_host=mesh.num_devices // hosts,
        donated=(0, 1),
    )
    report = audit(planned, result.hlo_text, mesh)
    assert report.ok, str(report)
    assert len(report.matched) + len(report.free) == len(planned)
    weights = 2 * WIDTH * HIDDEN * 4 // mesh.shape[1]
    held = weights // 2 // shape[0] + weights // 2 + BATCH // shape[0] * WIDTH * 4
    assert result.argument_bytes == held
    assert result.alias_bytes == held - BATCH // shape[0] * WIDTH * 4  # both weights are updated in place
    assert held < result.peak_bytes < 20 * held
    assert result.compile_s > 0


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("device", sorted(gpu_targets()))
def test_every_target_compiles(device: str) -> None:
    step, arguments, planned = mlp_step(GRID)
    result = compile_for_target(export_step(step, arguments), device=device, mesh=GRID, devices_per_host=4)
    report = audit(planned, result.hlo_text, GRID)
    assert report.ok, str(report)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that other tests, which may run at the same time, do not use."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def compile_with(worker: Path, monkeypatch: pytest.MonkeyPatch, time_limit_s: float = 60.0) -> None:
    monkeypatch.setattr(verify, "_WORKER", worker)
    compile_for_target(b"", device="h100-sxm", mesh=GRID, devices_per_host=8, time_limit_s=time_limit_s)


REPORTS = "import json, pathlib, sys\npathlib.Path(sys.argv[1], 'results.json').write_text(json.dumps({}))\n"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            REPORTS.format({"error": "not-installed", "message": "jax-cuda12-pjrt"}),
            r"not installed: jax-cuda12-pjrt\..*optional extra.*pip install 'alpa-lite\[aot\]'",
        ),
        (
            REPORTS.format({"error": "compile", "message": "ValueError: no"}),
            r"refused the step.*It said: ValueError: no",
        ),
        ("import sys\nsys.exit('boom')\n", r"(?s)ended with code 1 and no result.*Check the free memory.*boom"),
    ],
)
def test_failures_say_what_to_do_and_leave_no_files(
    script: str, message: str, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(script)
    with pytest.raises(VerificationError, match=message):
        compile_with(worker, monkeypatch)
    assert not list(temporary.iterdir())


def test_time_limit(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(VerificationError, match=r"longer than the time limit of 0\.5 s.*Raise the limit"):
        compile_with(worker, monkeypatch, time_limit_s=0.5)
    assert not list(temporary.iterdir())


@pytest.mark.skipif(not NO_COMPILER, reason="XLA:GPU is installed here")
def test_without_the_extra_the_worker_says_what_to_install() -> None:
    with pytest.raises(VerificationError, match=r"pip install 'alpa-lite\[aot\]'"):
        compile_for_target(b"", device="h100-sxm", mesh=GRID, devices_per_host=8)


@needs_compiler
def test_what_the_compiler_says_is_passed_on() -> None:
    with pytest.raises(VerificationError, match=r"the target's compiler refused the step.*It said: \w+"):
        compile_for_target(b"not an artefact", device="h100-sxm", mesh=GRID, devices_per_host=8)


def test_mesh_must_fill_hosts() -> None:
    with pytest.raises(VerificationError, match=r"has 8 devices, but a host has 3.*multiple of it"):
        compile_for_target(b"", device="h100-sxm", mesh=GRID, devices_per_host=3)


@needs_export
def test_export_takes_any_tree_and_needs_no_devices() -> None:
    big = DeviceMesh(shape=(64, 64), axis_names=("x", "y"))
    step, arguments, _ = mlp_step(big)
    artefact = jax.export.deserialize(bytearray(export_step(step, arguments)))
    assert artefact.nr_devices == 4096 and artefact.platforms == ("cuda",)
    assert len(artefact.in_avals) == 3 and len(artefact.out_avals) == 3


def test_what_cannot_be_exported_is_named() -> None:
    def step(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x)
        return x

    argument = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(abstract(GRID), P()))
    with pytest.raises(VerificationError, match=r"(?s)cannot be lowered for CUDA here: .*callbacks.*Leave them out"):
        export_step(step, (argument,))
