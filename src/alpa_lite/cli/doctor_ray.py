"""``python -m alpa_lite.cli.doctor_ray [ADDRESS]``: whether a Ray cluster can run steps. Prints one JSON line per check.

A cluster that is started here ends with this process; of another one nothing is left but what it had.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from alpa_lite.cli.doctor_proof import differences, tell

_PACKAGES = ("alpa-lite", "jax", "jaxlib", "ray")
_ANSWER_S, _STEPS = 30.0, 2


def main(address: str = "") -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")  # of the driver, which needs no device
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_default_matmul_precision", "highest")
    import ray

    from alpa_lite.errors import AlpaLiteError
    from alpa_lite.executor.ray.cluster import alive_nodes, connect

    try:
        connect(address or None, 2)
    except AlpaLiteError as error:
        tell("Ray cluster", "FAIL", *sentences(error))
        return
    try:
        nodes = alive_nodes()
        where = ray.get_runtime_context().gcs_address
        s = "s" * (len(nodes) > 1)
        tell("Ray cluster", "ok", f"{len(nodes)} node{s} at {where}, Ray {ray.__version__}")
        for number, node in enumerate(nodes):
            look_at(number, node)
        try:
            room(nodes, address)
        except AlpaLiteError as error:
            tell("Ray workers", "FAIL", *sentences(error))
    finally:
        ray.shutdown()


def sentences(error: Exception) -> tuple[str, str]:
    """A message of ours as what was found and what to do."""
    found, _, todo = " ".join(str(error).split()).partition(". ")
    return found, todo


def look_at(number: int, node: dict[str, Any]) -> None:
    """A node's devices, and the versions of what a worker there would load."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    resources = node["Resources"]
    gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    kind = next((key.partition(":")[2] for key in resources if key.startswith("accelerator_type:")), "GPU")
    has = f"{node['NodeManagerAddress']}: " + (f"{gpus} x {kind}, {cpus} CPUs" if gpus else f"{cpus} CPUs")
    name = f"Ray node {number}"

    def versions(packages: tuple[str, ...]) -> dict[str, str]:  # inside: it travels by value, whatever the node has
        from importlib import metadata

        found = {d.name.lower().replace("_", "-"): d.version for d in metadata.distributions() if d.name}
        return {p: found.get(p, "none") for p in packages}

    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    task: Any = ray.remote(num_cpus=0, max_retries=0)(versions)
    try:
        found = ray.get(task.options(scheduling_strategy=strategy).remote(_PACKAGES), timeout=_ANSWER_S)
    except RayError as error:
        reason = str(error).strip().splitlines()[0]
        tell(name, "FAIL", f"{has}; a task there gave no answer: {reason}", "Look at the node's logs, or restart it")
        return
    other = [f"{p} {found[p]}, here {metadata.version(p)}" for p in _PACKAGES if found[p] != metadata.version(p)]
    if other:
        tell(name, "FAIL", f"{has}; it has {'; '.join(other)}", "Install the same versions on all nodes")
    else:
        tell(name, "ok", f"{has}; the same versions as here")


def room(nodes: Sequence[dict[str, Any]], address: str) -> None:
    """Two workers, on two nodes if there are as many, run a pipelined step whose activations go from one to the other."""
    import jax
    import ray

    import alpa_lite as al

    kind = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
    free = ray.available_resources().get(kind, 0)
    if free < 2:
        total = ray.cluster_resources().get(kind, 0)
        found = f"{free:g} of {total:g} {kind}s are free: no room for two workers, so no transfer was tried"
        tell("Ray workers", "warn", found, "Try again when others have ended, or add nodes")
        return
    device = al.Cluster.from_ray(1, address=address or None).device.name
    hosts = min(sum(node["Resources"].get(kind, 0) >= 1 for node in nodes), 2)  # a head often has no devices
    cluster = al.Cluster.of(device, num_hosts=hosts, devices_per_host=2 // hosts)
    options = al.PlanOptions(num_stages=2, num_microbatches=2)
    state, batch = arguments()
    expected = jax.jit(staged_step)(state, batch)
    settings = al.RayExecutor(address=address or None, start_timeout_s=60.0, progress_timeout_s=60.0)
    with al.parallelize(staged_step, cluster=cluster, options=options, executor=settings) as planned:
        made = planned(state, batch)
        different = differences(expected, made)
        times = [planned(state, batch) and planned._remotes[0].times.call_s for _ in range(_STEPS)]
    if different:
        todo = "Do not train on this cluster; report it with the versions above"
        tell("Ray workers", "FAIL", f"{', '.join(different)} differ from the step on one device", todo)
        return
    on = "two nodes" if hosts == 2 else "one node"
    found = f"two stages on {on} send to each other; bit-equal to one device, {min(times) * 1e3:.1f} ms per step"
    tell("Ray workers", "ok", found)


def staged_step(params: Any, batch: Any) -> Any:
    """A step in two layers; whole numbers, as in ``doctor_proof``."""
    import jax
    import jax.numpy as jnp

    import alpa_lite as al

    def loss_fn(params: Any, batch: Any) -> Any:
        hidden = al.layer_boundary(jax.nn.relu(batch["x"] @ params["w1"]))
        return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)

    loss, grads = al.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda w, g: w - g / 8, params, grads), loss


def arguments() -> tuple[Any, Any]:
    from alpa_lite.cli import doctor_proof

    return doctor_proof.arguments()


if __name__ == "__main__":
    main(*sys.argv[1:2])
