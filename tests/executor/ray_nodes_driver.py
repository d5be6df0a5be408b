"""A driver outside the nodes of its cluster: a pipeline step beside the local executor, and what it leaves behind.

    python -m tests.executor.ray_nodes_driver ADDRESS

Prints a JSON record.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import jax

NUM_STEPS = 3


def main(address: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    import numpy as np
    import ray
    from ray.util import placement_group_table

    import alpa_lite as al
    from alpa_lite.executor.ray.cluster import alive_nodes
    from tests.executor import pipeline_steps

    settings: dict[str, Any] = {
        "cluster": al.Cluster.parse("2x2:cpu"),
        "options": al.PlanOptions(num_stages=2, num_microbatches=pipeline_steps.MICROBATCHES),
        "donate_argnums": 0,
    }
    fn = pipeline_steps.step_of(pipeline_steps.loss_fn)
    record: dict[str, Any] = {}
    with al.parallelize(fn, executor="ray", address=address, **settings) as step:
        record["losses"], state = run(step)
        record["cpus"] = [node["Resources"].get("CPU") for node in alive_nodes()]
        group = step._remotes[0].group
        table = placement_group_table(group.group)
        record["strategy"] = table["strategy"]
        record["bundle_nodes"] = len(set(table["bundles_to_node_id"].values()))
        record["sites"] = [[s.host, *s.devices] for s in group.sites]
        record["free_while_running"] = ray.available_resources().get("CPU", 0)
        found = [np.asarray(x) for x in jax.tree.leaves(state)]
    local = al.parallelize(fn, **settings)
    record["local_losses"], state = run(local)
    record["equal"] = all(np.array_equal(a, np.asarray(b)) for a, b in zip(found, jax.tree.leaves(state), strict=True))
    for _ in range(100):  # Ray gives resources back a moment after the actor's end
        record["free"] = ray.available_resources().get("CPU", 0)
        if record["free"] == sum(record["cpus"]):
            break
        time.sleep(0.1)
    record["groups"] = sorted({g["state"] for g in placement_group_table().values()})
    print(json.dumps(record))


def run(step: Any) -> tuple[list[float], Any]:
    from tests.executor import pipeline_steps

    state, batch = pipeline_steps.arguments()
    losses = []
    for _ in range(NUM_STEPS):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses, state


if __name__ == "__main__":
    main(sys.argv[1])
