"""Compiling a step with the target's own compiler on a machine without the target.

In: a step over an abstract mesh, abstract arguments, a GPU name. Out: a ``TargetCompile``: XLA:GPU's optimised HLO (for
``lowering.audit``) and XLA's own memory figures per device. Nothing runs, no GPU and no driver are needed; the optional
extra ``aot`` brings the compiler.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.errors import AlpaLiteError
from alpa_lite.executor.gpu_targets import gpu_target
from alpa_lite.executor.serialize import NotExportable, serialize_step

_WORKER = Path(__file__).with_name("verify_worker.py")
_INSTALL = "pip install 'alpa-lite[aot]'"


class VerificationError(AlpaLiteError):
    """The target's compiler is not installed, or it did not compile the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetCompile:
    """What the target's compiler made of a step.

    Attributes:
        device: GPU name of the hardware table.
        hlo_text: the optimised program.
        compile_s: lowering and compiling.
        peak_bytes: XLA's peak memory per device. The other sizes are its parts; ``alias_bytes`` is what results reuse.
        jax_version: of the compiling environment.
    """

    device: str
    hlo_text: str
    compile_s: float
    peak_bytes: int
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    jax_version: str


def export_step(step: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Lowers a step for CUDA, wherever this process runs.

    Args:
        step: a traceable function, jitted or not; with a ``jax.sharding.AbstractMesh`` it needs no devices.
        args: pytrees of ``jax.ShapeDtypeStruct`` with ``NamedSharding`` over that mesh, whose axes are of type Auto.

    Returns:
        A serialized ``jax.export`` artefact from the leaves of ``args`` to the leaves of the result. Trees
        stay outside, so that any pytree type works.

    Raises:
        VerificationError: the step holds what cannot be exported (host callbacks), or ``flatbuffers`` is missing.
    """
    try:
        return serialize_step(step, args, "cuda")
    except NotExportable as error:
        raise VerificationError(
            f"the step cannot be lowered for CUDA here: {error}\nAllowed is what jax.export takes: no host callbacks "
            f"such as jax.debug.print, no custom calls without a stability promise. Leave them out to verify the step."
        ) from error
    except ImportError as error:
        raise _not_installed(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileJob:
    """One program to compile.

    Attributes:
        exported: from ``export_step``.
        mesh: of the program; devices are numbered row-major, host by host.
        devices_per_host: consecutive devices that share a host.
        donated: positions of argument leaves whose buffers results may reuse.
    """

    exported: bytes
    mesh: DeviceMesh
    devices_per_host: int
    donated: tuple[int, ...] = ()

    def request(self, device: str) -> dict[str, Any]:
        """What the compiling process must know besides the program."""
        hosts, rest = divmod(self.mesh.num_devices, self.devices_per_host)
        if rest:
            raise VerificationError(
                f"the mesh {self.mesh} has {self.mesh.num_devices} devices, but a host has {self.devices_per_host}. For the "
                f"target's compiler it must fill whole hosts. Plan for a cluster whose device count is a multiple of it."
            )
        return {
            "target_config": gpu_target(device).config_text(),
            "topology": f"1x{hosts}x{self.devices_per_host}",
            "mesh_shape": self.mesh.shape,
            "axis_names": self.mesh.axis_names,
            "donated": self.donated,
        }


def compile_for_target(
    exported: bytes,
    *,
    device: str,
    mesh: DeviceMesh,
    devices_per_host: int,
    donated: tuple[int, ...] = (),
    time_limit_s: float = 900.0,
    python: str = sys.executable,
) -> TargetCompile:
    """Compiles an exported step for a cluster of GPUs that need not be there.

    Args:
        exported, mesh, devices_per_host, donated: as in ``CompileJob``.
        device, time_limit_s, python: as in ``compile_all_for_target``.

    Raises:
        VerificationError: not installed, out of time, or the compiler's own error.
        ClusterError: unknown GPU.
    """
    job = CompileJob(exported=exported, mesh=mesh, devices_per_host=devices_per_host, donated=donated)
    return compile_all_for_target([job], device=device, time_limit_s=time_limit_s, python=python)[0]


def compile_all_for_target(
    jobs: Sequence[CompileJob],
    *,
    device: str,
    time_limit_s: float = 900.0,
    python: str = sys.executable,
) -> tuple[TargetCompile, ...]:
    """Compiles exported programs, one after the other in one process.

    Args:
        device: GPU name of the hardware table, e.g. "h100-sxm".
        time_limit_s: the compiling process is ended after this time for each program.
        python: interpreter of the environment with the extra ``aot``.

    Raises:
        VerificationError: not installed, out of time, or the compiler's own error.
        ClusterError: unknown GPU.
    """
    requests = [job.request(device) for job in jobs]
    with tempfile.TemporaryDirectory(prefix="alpa-lite-verify-") as name:
        folder = Path(name)
        (folder / "requests.json").write_text(json.dumps(requests))
        for number, job in enumerate(jobs):
            (folder / f"{number}.bin").write_bytes(job.exported)
        results = _run_worker(folder, python, time_limit_s * len(jobs))
        return tuple(
            TargetCompile(device=device, hlo_text=(folder / f"{number}.hlo").read_text(), **result)
            for number, result in enumerate(results)
        )


def _run_worker(folder: Path, python: str, time_limit_s: float) -> list[dict[str, Any]]:
    environment = os.environ | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_PLATFORMS": "cpu"}
    # -P: the worker's folder must not shadow other packages.
    command = [python, "-P", str(_WORKER), str(folder)]
    try:
        process = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=time_limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise VerificationError(
            f"compiling the step for the target took longer than the time limit of {time_limit_s:g} s. It may take as "
            f"long as compiling on the target itself. Raise the limit, or verify a smaller configuration of the model."
        ) from error
    outcome = folder / "results.json"
    if not outcome.exists():
        raise VerificationError(
            f"the process that compiles for the target ended with code {process.returncode} and no result. It writes "
            f"one whatever happens, so it was stopped from outside or crashed in the compiler. Check the free memory, "
            f"then report it with these last lines:\n{_tail(process.stderr)}"
        )
    result: dict[str, Any] = json.loads(outcome.read_text())
    if result.get("error") == "not-installed":
        raise _not_installed(result["message"])
    if "error" in result:
        raise VerificationError(
            f"the target's compiler refused the step. Allowed is what XLA:GPU compiles. It said: {result['message']}\n"
            f"If it names a line of yours, change that line; else check that the environment has one JAX version "
            f"throughout ({_INSTALL}).\n{_tail(process.stderr)}"
        )
    results: list[dict[str, Any]] = result["programs"]
    return results


def _not_installed(missing: str) -> VerificationError:
    return VerificationError(
        f"verification on the target's own compiler needs packages that are not installed: {missing}. It is an "
        f"optional extra (1.2 GB, no GPU or driver needed). In the environment that runs alpa-lite: {_INSTALL}"
    )


def _tail(text: str, lines: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])
