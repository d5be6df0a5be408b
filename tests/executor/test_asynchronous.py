"""A pipelined step returns before its devices have worked: whatever waits for a value of the step never returns here.

The arguments come from a producer that a gate holds back, so that nothing of the step can run while it is issued. The gate is
an event, not a time: the test gives the same answer on a loaded machine.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.executor.staged_array import StagedArray
from tests.executor.gate import closed_gate
from tests.executor.pipeline_steps import MICROBATCHES, arguments, loss_fn, scanned_loss_fn, step_of

pytestmark = pytest.mark.medium
PATIENCE_S = 60

Gate = tuple[threading.Event, Callable[[Any], Any]]


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Closed; opened at the end, whatever happens, so that XLA's threads come back."""
    opened, hold = closed_gate()
    yield opened, hold
    opened.set()


def within_patience(call: Callable[[], Any], opened: threading.Event) -> Any:
    """What ``call`` returns, in a thread, so that a call that waits fails instead of hanging."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(PATIENCE_S)
    if not found:
        where = "".join(traceback.format_stack(sys._current_frames()[thread.ident or 0], limit=8))
        opened.set()
        thread.join()
        pytest.fail(f"the step has not returned after {PATIENCE_S} s, it waits here:\n{where}")
    return found[0]


def parallel(loss: Callable[..., Any], **options: Any) -> Any:
    chosen = al.PlanOptions(num_microbatches=MICROBATCHES, **options)
    return al.parallelize(step_of(loss), cluster=al.Cluster.parse("1x8:cpu"), options=chosen)


CASES = {
    "unequal submeshes, halved backward passes": (loss_fn, {"submeshes": ((1, 2), (1, 6)), "schedule": "zb-h1"}),
    "scanned layers": (scanned_loss_fn, {"num_stages": 2, "schedule": "1f1b"}),
}


def behind(hold: Callable[[Any], Any], tree: Any) -> Any:
    """Every array behind the gate, where it lay: one program for all that lie on the same devices."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [leaf.parts if isinstance(leaf, StagedArray) else (leaf,) for leaf in leaves]
    flat = [part for of_leaf in parts for part in of_leaf]
    groups: dict[Any, dict[int, Any]] = defaultdict(dict)
    for number, array in enumerate(flat):
        groups[frozenset(device.id for device in array.devices())][number] = array
    held = {number: array for group in groups.values() for number, array in hold(group).items()}
    numbers = iter(range(len(flat)))
    made = [[held[next(numbers)] for _ in of_leaf] for of_leaf in parts]
    joined = [StagedArray(m) if isinstance(x, StagedArray) else m[0] for x, m in zip(leaves, made, strict=True)]
    return jax.tree.unflatten(structure, joined)


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c == "scanned layers")) for c in CASES])
def test_a_step_returns_before_its_devices_have_worked(case: str, gate: Gate) -> None:
    """Neither state nor batch is there when it is issued, so that what is sent at the start may not be waited for either.

    One step: XLA:CPU lets the caller of a 33rd program on a device wait until the first is over.
    """
    loss, options = CASES[case]
    step = parallel(loss, **options)
    state, batch = arguments(stacked=loss is scanned_loss_fn)
    state, _ = step(state, batch)
    want = jax.block_until_ready(step(state, batch))
    opened, hold = gate
    held = behind(hold, (state, batch))
    made = within_patience(lambda: step(*held), opened)
    assert not opened.is_set() and not made[1].is_ready()
    opened.set()
    for got, expected in zip(jax.tree.leaves(made), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
