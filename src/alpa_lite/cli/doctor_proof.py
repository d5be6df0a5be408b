"""``python -m alpa_lite.cli.doctor_proof``: the devices that JAX finds, and a step planned for them beside the unplanned one.

A process of its own, as the number of virtual CPU devices is set before JAX starts. Prints one JSON line per check. All values
of the step are small whole numbers, so that every order of summation gives the same bits.
"""

from __future__ import annotations

import json
import os
from importlib import metadata
from typing import Any

MAX_DEVICES = 8


def main() -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", MAX_DEVICES)
    jax.config.update("jax_default_matmul_precision", "highest")
    from alpa_lite._jax_compat import short_plugin_errors

    with short_plugin_errors():
        devices = jax.devices()
    kinds = sorted({d.device_kind for d in devices})
    virtual = devices[0].platform == "cpu"
    found = f"{MAX_DEVICES} virtual CPU devices" if virtual else f"{len(devices)} x {', '.join(kinds)}"
    plugins = [d.name for d in metadata.distributions() if (d.name or "").startswith(("jax-cuda", "jax-rocm"))]
    if virtual and os.path.exists("/proc/driver/nvidia/gpus") and not plugins:
        tell("devices", "warn", f"{found}; this machine has an NVIDIA GPU", "pip install 'alpa-lite[cuda12]'")
    elif virtual and plugins:
        todo = "Look at nvidia-smi and JAX_PLATFORMS if there should be one; planning needs none"
        tell("devices", "warn", f"{found}; {plugins[0]} is installed but finds no GPU", todo)
    else:
        tell("devices", "ok", found)
    prove(len(devices))


def prove(available: int) -> None:
    import jax

    import alpa_lite as al

    count = max(n for n in (1, 2, 4, 8) if n <= available)
    device = al.Cluster.local().device.name
    pins = {1: {}, 2: {"1/x": ("data", None)}}.get(count, {"1/x": ("data", None), "0/w1": (None, "model")})
    pins = {path: jax.sharding.PartitionSpec(*spec) for path, spec in pins.items()}
    state, batch = arguments()
    expected = jax.jit(step)(state, batch)
    planned = al.parallelize(step, cluster=al.Cluster.of(device, devices_per_host=count), pins=pins or None)
    made = planned(state, batch)
    plan = planned.plan(state, batch)
    different = differences(expected, made)
    where = f"{count} device{'s' * (count > 1)}"
    if different:
        todo = "Do not train on this machine; report it with the versions above"
        tell("serial = parallel", "FAIL", f"on {where} {', '.join(different)} differ from one device", todo)
    else:
        mesh = ", ".join(f"{n}={s}" for n, s in zip(plan.mesh.axis_names, plan.mesh.shape, strict=True))
        said = f"{where} as mesh ({mesh}), {len(plan.collectives)} collectives: bit-equal to one device"
        tell("serial = parallel", "ok", said)


def step(params: Any, batch: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def loss_fn(params: Any) -> Any:
        hidden = jax.nn.relu(batch["x"] @ params["w1"])
        return jnp.sum((hidden @ params["w2"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda w, g: w - g / 1024, params, grads), loss


def arguments() -> tuple[Any, Any]:
    """Parameters and batch, whole numbers from -1 to 1."""
    import numpy as np

    rng = np.random.default_rng(0)

    def whole(*shape: int) -> Any:
        return rng.integers(-1, 2, shape).astype(np.float32)

    return {"w1": whole(16, 32), "w2": whole(32, 8)}, {"x": whole(16, 16), "y": whole(16, 8)}


def differences(expected: Any, made: Any) -> list[str]:
    """Paths of the leaves that are not bit-equal."""
    import jax
    import numpy as np

    pairs = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(made), strict=True)
    return [jax.tree_util.keystr(path) for (path, a), b in pairs if np.asarray(a).tobytes() != np.asarray(b).tobytes()]


def tell(name: str, status: str, found: str, todo: str = "") -> None:
    print(json.dumps({"name": name, "status": status, "found": found, "todo": todo}), flush=True)


if __name__ == "__main__":
    main()
