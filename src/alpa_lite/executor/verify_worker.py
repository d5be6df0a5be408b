"""The compiling half of ``verify.py``: a script that runs in a process of its own and needs only JAX.

In: a folder with ``requests.json`` and per program a ``<number>.bin`` (a serialized ``jax.export`` artefact for cuda). Out, in
the same folder: ``results.json`` (memory, seconds, or what went wrong) and ``<number>.hlo`` (XLA:GPU's optimised programs).

Why a process: XLA:GPU compiles without a GPU only if ``JAX_SKIP_CUDA_CONSTRAINTS_CHECK`` is set before JAX is imported,
and a plugin that was loaded this way is of no use for running. Why a script: the interpreter may be another
environment's.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    """Compiles the requests in ``folder``."""
    result = _missing_packages()
    if not result:
        requests = json.loads((folder / "requests.json").read_text())
        try:
            result = {"programs": [_compile(request, folder, str(k)) for k, request in enumerate(requests)]}
        except Exception as error:  # whatever XLA or JAX say goes to the parent, which names what to do
            result = {"error": "compile", "message": f"{type(error).__name__}: {error}"}
    (folder / "results.json").write_text(json.dumps(result))


def _missing_packages() -> dict[str, Any]:
    """An error record if the compiler is not installed; JAX itself is imported only afterwards."""
    needed = {"jax": "jax", "jax_plugins": "jax-cuda12-pjrt", "flatbuffers": "flatbuffers"}
    missing = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
    plugins = [f"jax_plugins.xla_cuda{major}" for major in (12, 13)]
    if not missing and not any(importlib.util.find_spec(plugin) for plugin in plugins):
        missing = ["jax-cuda12-pjrt"]
    return {"error": "not-installed", "message": ", ".join(missing)} if missing else {}


def _compile(request: dict[str, Any], folder: Path, name: str) -> dict[str, Any]:
    import jax
    import numpy as np
    from jax import export
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=request["target_config"], topology=request["topology"]
    )
    devices = np.array(sorted(topology.devices, key=lambda device: device.id))
    names = tuple(request["axis_names"])
    automatic = (jax.sharding.AxisType.Auto,) * len(names)  # must equal the exported mesh's, see export_step
    mesh = jax.sharding.Mesh(devices.reshape(request["mesh_shape"]), names, axis_types=automatic)
    exported = export.deserialize(bytearray((folder / f"{name}.bin").read_bytes()))
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, exported.in_shardings_jax(mesh), strict=True)
    ]
    step = jax.jit(
        exported.call,
        donate_argnums=tuple(request["donated"]),  # donation does not survive export
        out_shardings=tuple(exported.out_shardings_jax(mesh)),
        keep_unused=True,
    )
    begin = time.perf_counter()
    compiled = step.lower(*arguments).compile()
    seconds = time.perf_counter() - begin
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None, "XLA:GPU gives both"
    (folder / f"{name}.hlo").write_text(text)
    return {
        "compile_s": seconds,
        "peak_bytes": memory.peak_memory_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "jax_version": jax.__version__,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
