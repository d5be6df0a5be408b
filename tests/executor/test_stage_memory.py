"""The predicted peak of every stage against XLA's figures of its programs, with the buffers that lie beside them."""

from __future__ import annotations

import pytest

import alpa_lite as al
from examples.registry import EXAMPLES

WITHIN = 0.10
CASES = [
    ("gpt_linen", 2, "1f1b"),
    ("gpt_linen", 2, "gpipe"),
    ("gpt_linen", 4, "1f1b"),
    ("moe", 2, "1f1b"),
    ("moe", 2, "gpipe"),
    ("moe", 4, "1f1b"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_stages", "schedule"), CASES)
def test_predicted_peaks_are_those_of_xla(name: str, num_stages: int, schedule: str) -> None:
    example = EXAMPLES[name]()
    options = al.PlanOptions(num_stages=num_stages, schedule=schedule, num_microbatches=4)
    cluster = al.Cluster.parse("1x8:cpu")
    step = al.parallelize(example.train_step, cluster=cluster, options=options, donate_argnums=0)
    found = step.compile(*example.abstract_args()).memory()
    assert [m.stage for m in found] == list(range(num_stages))
    assert all(m.peak_bytes == m.held_bytes + m.own_bytes for m in found)
    assert all(abs(m.ratio - 1) <= WITHIN for m in found), [(m.ratio, m.program) for m in found]
