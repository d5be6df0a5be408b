"""A driver whose cluster loses a node for good: trains, tells every step, and at the end what became of the plan.

    python -m tests.executor.elastic_driver ADDRESS FOLDER elastic|fixed

Prints the position of every batch, then a JSON record.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax

NUM_STEPS = 16


def main(address: str, folder: str, mode: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)

    import alpa_lite as al
    from alpa_lite.executor.sites import sites_of
    from alpa_lite.executor.state_bytes import state_bytes
    from tests.executor import pipeline_steps
    from tests.executor.test_fit import batch, state

    executor = al.RayExecutor(address=address, heartbeat_s=0.5, hang_timeout_s=6, start_timeout_s=20)
    step = al.parallelize(
        pipeline_steps.step_of(pipeline_steps.loss_fn),
        cluster=al.Cluster.parse("2x2:cpu"),
        options=al.PlanOptions(num_stages=2, num_microbatches=pipeline_steps.MICROBATCHES),
        donate_argnums=0,
        executor=executor,
    )
    losses: dict[int, float] = {}

    def on_step(report: al.StepReport) -> None:
        losses[report.position] = float(report.metrics)
        print(report.position, flush=True)

    kept = al.Checkpoint(Path(folder), every=2, keep=3)
    done = al.fit(
        step,
        init=state,
        data=batch,
        num_steps=NUM_STEPS,
        checkpoint=kept,
        elastic=al.Elastic(horizon_steps=100) if mode == "elastic" else False,
        on_step=on_step,
    )
    plan = done.step.plan(state(), batch(0))
    (remote,) = done.step._remotes
    predicted = state_bytes(plan, {device: site.number for site in sites_of(plan) for device in site.devices})
    record = {
        "losses": [losses[k] for k in range(NUM_STEPS)],
        "restarts": done.restarts,
        "cluster": plan.identity.cluster,
        "stages": len(plan.stages),
        "read_bytes": remote.read_bytes,
        "predicted_bytes": predicted,
    }
    done.step.close()
    print(json.dumps(record))


if __name__ == "__main__":
    main(*sys.argv[1:])
