"""Steps of many kinds x schedules x microbatches x submeshes: every pair of choices is run, against a plain loop.

A gradient that is rounding (below 1e-6 of the norm of all) is compared in absolute terms, as on one mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.planner.options import SCHEDULES
from tests.compiling import QUICK_COMPILE
from tests.executor.step_variants import VARIANTS, loop_value_and_grad, numbers

TOLERANCE, NEGLIGIBLE = 2e-5, 1e-6
SUBMESHES = {
    "8": ((1, 8),),
    "4+4": ((1, 4), (1, 4)),
    "2+6": ((1, 2), (1, 6)),
    "2+2+2+2": ((1, 2),) * 4,
    "1+1+2+4": ((1, 1), (1, 1), (1, 2), (1, 4)),
}
FACTORS = (tuple(VARIANTS), SCHEDULES, (1, 4, 8), tuple(SUBMESHES))
MOST_RUNS, QUICK_RUNS = 60, 5
LONG = ("resnet", "moe", "gpt", "scanned llama")  # to compile

Run = tuple[str, str, int, str]


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    """As ``tests.compiling``, for programs that the pipeline itself compiles."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def pairs(run: Run) -> Iterator[tuple[int, int, Any, Any]]:
    for i, j in itertools.combinations(range(len(run)), 2):
        yield i, j, run[i], run[j]


@cache
def covering() -> tuple[Run, ...]:
    """Runs in which every pair of choices occurs: always the one with the most pairs that are new, the first among equals."""
    every = list(itertools.product(*FACTORS))
    left = {pair for run in every for pair in pairs(run)}
    chosen = []
    while left:
        chosen.append(max(every, key=lambda run: sum(pair in left for pair in pairs(run))))
        left -= set(pairs(chosen[-1]))
    return tuple(chosen)


def chunks(schedule: str, count: int, num_submeshes: int) -> int:
    """Two stages on a submesh where the schedule can interleave them and four layers are enough."""
    return 2 if schedule == "interleaved-1f1b" and num_submeshes == 2 and count % 2 == 0 else 1


def parallel(variant: str, schedule: str, count: int, submeshes: str) -> Any:
    """State that all devices hold whole costs something: steps this small would else not be split."""
    shapes = SUBMESHES[submeshes]
    repeated = chunks(schedule, count, len(shapes))
    options = al.PlanOptions(
        submeshes=shapes * repeated,
        schedule=schedule,
        num_chunks=repeated,
        num_microbatches=count,
        replication_penalty=1e-3,
    )
    step = VARIANTS[variant].step(al.value_and_grad)
    return al.parallelize(step, cluster=al.Cluster.parse("1x8:cpu"), options=options)


@cache
def reference(variant: str, count: int) -> Any:
    step = VARIANTS[variant].step(loop_value_and_grad(count))
    return jax.jit(step, compiler_options=QUICK_COMPILE)(*VARIANTS[variant].arguments())


@cache
def quick() -> frozenset[Run]:
    """The runs of `make test`: of those, always the one with the most choices that no other has, and that compiles fast."""
    chosen: list[Run] = []
    while len(chosen) < QUICK_RUNS:
        seen = {(i, choice) for run in chosen for i, choice in enumerate(run)}
        news = {run: sum((i, c) not in seen for i, c in enumerate(run)) for run in covering()}
        chosen.append(max(covering(), key=lambda run: (news[run], run[0] not in LONG)))
    return frozenset(chosen)


def marked() -> list[Any]:
    return [
        pytest.param(*run, marks=pytest.mark.medium if run in quick() else pytest.mark.slow, id="-".join(map(str, run)))
        for run in covering()
    ]


@pytest.mark.parametrize(("variant", "schedule", "count", "submeshes"), marked())
def test_equals_a_plain_loop(variant, schedule, count, submeshes):
    step, args = parallel(variant, schedule, count, submeshes), VARIANTS[variant].arguments()
    plan = step.plan(*args)
    assert len({stage.first_device for stage in plan.stages}) == len(SUBMESHES[submeshes])
    got, want = step(*args), reference(variant, count)
    gradients = want[1][0]
    largest = math.sqrt(math.fsum(np.linalg.norm(g) ** 2 for g in numbers(gradients)))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(numbers(got), numbers(want), strict=True):
        assert a.dtype == b.dtype
        assert np.linalg.norm(a - b) <= max(TOLERANCE * np.linalg.norm(b), NEGLIGIBLE * largest)


def test_every_pair_is_covered():
    runs = covering()
    every = itertools.combinations(range(len(FACTORS)), 2)
    wanted = {(i, j, a, b) for i, j in every for a in FACTORS[i] for b in FACTORS[j]}
    assert {pair for run in runs for pair in pairs(run)} == wanted
    assert len(runs) <= MOST_RUNS
    few = list(zip(*quick(), strict=True))
    assert len(quick()) == QUICK_RUNS
    assert all(set(found) == set(choices) for found, choices in zip(few[1:], FACTORS[1:], strict=True))
    assert len(set(few[0])) == QUICK_RUNS  # models; the others run with `make test-all`


@pytest.mark.medium
def test_schedules_with_the_same_programs_agree_bit_for_bit():
    args = VARIANTS["dropout"].arguments()
    first, *others = (
        numbers(parallel("dropout", schedule, 4, "2+6")(*args)) for schedule in ("gpipe", "1f1b", "eager-1f1b")
    )
    assert all(np.array_equal(a, b) for other in others for a, b in zip(first, other, strict=True))
