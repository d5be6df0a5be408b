"""One process of a launch: ``python -m alpa_lite.executor.launch_worker REQUEST``, started by ``launch.py``.

In: the request as JSON, with this process's number. Out: in process 0's report the scalar results of every step and the norm
of every other result; in the file that the request names, if any, all results of the last step.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from alpa_lite.errors import AlpaLiteError
from alpa_lite.plan.files import whole_file
from alpa_lite.plan.records import Leaf

_WIDE = ("float64", "int64", "uint64", "complex128")


def main(text: str) -> None:
    request = json.loads(text)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _set_up(request)
        _run(request)
    except BaseException as error:
        if isinstance(error, AlpaLiteError):
            sys.stderr.write(f"{error}\n")
        else:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # not by sys.exit: JAX's shutdown would wait for the other ranks


def _end_with_parent() -> None:
    os.read(0, 1)  # not sys.stdin: its lock would be held when Python ends
    os._exit(1)


def _set_up(request: dict[str, Any]) -> None:
    """CPU devices and the job, before JAX starts its backends."""
    import jax

    from alpa_lite.plan.manifest import read_manifest

    alone = request["num_processes"] == 1
    num_ranks = read_manifest(Path(request["folder"])).num_ranks
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_ranks if alone else 1)
    jax.config.update("jax_enable_preemption_service", False)  # it swallows SIGTERM (JAX 0.10.2)
    if not alone:
        jax.distributed.initialize(
            request["address"],
            request["num_processes"],
            request["process"],
            initialization_timeout=max(1, int(request["timeout_s"])),
            coordinator_bind_address=request["address"],  # JAX's own choice is every interface of the machine
        )


def _run(request: dict[str, Any]) -> None:
    import jax

    from alpa_lite.executor.global_arguments import given_values, global_arguments
    from alpa_lite.executor.load_export import ExportedPart, load_part

    folder = Path(request["folder"])
    own = {d.id: rank for rank, d in enumerate(jax.devices()) if d.process_index == jax.process_index()}
    parts = {rank: part for rank in own.values() if isinstance(part := load_part(folder, rank), ExportedPart)}
    part = next(iter(parts.values()))
    if any(leaf.value.dtype in _WIDE for leaf in (*part.plan.inputs, *part.plan.outputs)):
        jax.config.update("jax_enable_x64", True)
    mesh = part.mesh()
    values = given_values(part, request["inputs"], request["seed"])
    step, leaves = part.step(mesh), global_arguments(parts, mesh, values)
    results: tuple[Any, ...] = ()
    lines = []
    for number in range(request["num_steps"]):
        results = step(*leaves)
        for argument, result in part.manifest.state:
            leaves[argument] = results[result]
        lines.append(f"step {number + 1}: {_scalars(part.plan.output_paths, results)}")
    gathered: dict[str, Any] = {p: _gathered(r) for p, r in zip(part.plan.output_paths, results, strict=True)}
    if jax.process_index() == 0:
        lines += _norms(part.plan.outputs, gathered)
        Path(request["report"]).write_text("\n".join(lines) + "\n", encoding="utf-8")
        if request["out"]:
            with whole_file(request["out"]) as file:  # by name, NumPy would add its suffix
                np.savez(file, **gathered)


def _gathered(result: Any) -> np.ndarray:
    """The whole value on every process, as a type that ``.npz`` knows."""
    import jax
    from jax.experimental import multihost_utils

    if jax.dtypes.issubdtype(result.dtype, jax.dtypes.prng_key):
        result = jax.jit(jax.random.key_data)(result)
    if result.is_fully_addressable or result.is_fully_replicated:
        value = np.asarray(result.addressable_data(0) if result.is_fully_replicated else result)
    else:
        value = np.asarray(multihost_utils.process_allgather(result, tiled=True))
    return value if value.dtype.isbuiltin == 1 else value.astype(np.float32)


def _scalars(paths: tuple[str, ...], results: tuple[Any, ...]) -> str:
    import jax

    scalars = [
        f"{path} = {np.asarray(result.addressable_data(0))!s}"
        for path, result in zip(paths, results, strict=True)
        if not result.shape and not jax.dtypes.issubdtype(result.dtype, jax.dtypes.prng_key)
    ]
    return ", ".join(scalars) or "no scalar results"


def _norms(leaves: tuple[Leaf, ...], values: dict[str, np.ndarray]) -> Iterator[str]:
    for leaf in leaves:
        if leaf.value.shape:
            norm = float(np.linalg.norm(np.abs(values[leaf.path]).astype(np.float64).ravel()))
            yield f"{leaf.path}: {leaf.value}, norm {norm:.6g}"


if __name__ == "__main__":
    main(sys.argv[1])
