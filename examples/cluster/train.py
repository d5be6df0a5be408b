"""Trains the MLP in a plain JAX job, without Ray: the same script in every process, as ``slurm_jax.sh`` starts it.

srun python examples/cluster/train.py --cluster 2x8:h100-sxm
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make the package `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax

import alpa_lite as al
from examples import mlp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", help="what to plan for; without it every process counts as a host")
    parser.add_argument("--size", default="small", choices=mlp.CONFIGS)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    # JAX's preemption service takes SIGTERM for itself; without it a process ends when Slurm says so.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize()  # on Slurm, and where else JAX knows the environment, nothing needs to be said

    example = mlp.make(options.size)
    cluster = al.Cluster.parse(options.cluster) if options.cluster else None
    step = al.parallelize(example.train_step, cluster=cluster, donate_argnums=(0,))
    plan = step.plan(*example.abstract_args())
    first = jax.process_index() == 0
    if first:
        print(plan, flush=True)
    state = step.init(example.init, jax.random.key(0))
    for index in range(options.steps):
        state, metrics = step(state, example.batch(index))  # the whole batch in every process; each keeps its part
        loss = float(metrics["loss"])
        if first:
            print(f"step {index:3d}  loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
