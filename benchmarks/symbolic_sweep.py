"""How much faster a symbolic plan answers for many numbers of workers than as many plans.

Every case takes the numbers 1 to 16 (the last one 1 to 64). The sweep makes the symbolic plan, finds its regimes and reads memory
and traffic of every number; against it stand ``al.plan`` calls, one per number, whose answers must be the same. Both come after a
plan that is not timed, so that JAX and the solver are loaded.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make `benchmarks` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

import alpa_lite as al
from benchmarks import models
from benchmarks.report import Row, finish
from examples import seven_b
from examples.registry import EXAMPLES

TARGET = ">= 10"
NUM_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and the numbers of workers; ``fixed`` are the sizes of the other mesh axes."""

    model: str
    last: int = 16
    fixed: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        mesh = ", ".join(map(str, ("n", *self.fixed)))
        return f"{self.model}, mesh ({mesh}), n = 1 to {self.last}"


CASES = (
    Case(model="mlp"),
    Case(model="gpt_linen"),
    Case(model="gpt_linen", fixed=(2,)),
    Case(model="gpt2-124m"),
    Case(model="seven_b"),
    Case(model="gpt_linen", last=64),
)


def target(model: str) -> tuple[Any, tuple[Any, ...], int | tuple[int, ...]]:
    """(step, abstract arguments, donated positions)."""
    if model in EXAMPLES:
        example = EXAMPLES[model]("small", optimizer="sgd")
        state = jax.eval_shape(example.init, jax.random.key(0))
        return example.grads_step, (state, jax.eval_shape(lambda: example.batch(0))), ()
    if model == "seven_b":  # of a row of acceptance, as docs/symbolic.md says
        return seven_b.step, seven_b.ARGS, 0
    step = models.make(model)
    return step.fn, step.args, 0


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result, without what others left to collect."""
    gc.collect()
    start_s = time.perf_counter()
    result = run()
    return time.perf_counter() - start_s, result


def measure(case: Case) -> Row:
    """Seconds of the sweep, and how many times longer the single plans take together: medians of rounds of both in turn."""
    fn, args, donated = target(case.model)
    cluster = al.Cluster.symbolic("n", device="h100-sxm", devices_per_host=8, values=range(1, case.last + 1))
    others = 1
    for size in case.fixed:
        others *= size

    def plan(where: Any, first: int | str) -> Any:
        options = al.PlanOptions(mesh_shape=(first, *case.fixed), padding="off", remat="none")
        return al.plan(fn, *args, cluster=where, donate_argnums=donated, options=options)

    def sweep() -> tuple[Any, dict[int, Any]]:
        swept = plan(cluster, "n")
        of = {n: regime for regime in swept.regimes for n in regime.values}
        return swept, {n: (swept.objective(n), of[n].memory_at(n), of[n].traffic_at(n)) for n in swept.values}

    def singles() -> dict[int, Any]:
        return {n: plan(cluster.specialize(n, others=others), n) for n in cluster.values}

    plan(cluster.specialize(2, others=others), 2)
    sweeps_s, singles_s = [], []
    for _ in range(NUM_ROUNDS):
        time_s, (swept, found) = timed(sweep)
        sweeps_s.append(time_s)
        time_s, single = timed(singles)
        singles_s.append(time_s)
        assert all(found[n][:2] == (p.objective, p.memory) for n, p in single.items())
    sweep_s, single_s = statistics.median(sweeps_s), statistics.median(singles_s)
    return Row(
        benchmark="symbolic_sweep",
        case=f"{case.text}: {len(swept.regimes)} regimes",
        value=sweep_s,
        unit="s",
        against=f"{len(single)} plans, {single_s:.2f} s",
        ratio=single_s / sweep_s,
        target=TARGET if case.last == 16 else "",
    )


if __name__ == "__main__":
    finish([measure(case) for case in CASES], sys.argv)
