"""``alpa-lite run``: JSON lines in a pipe, going on from a checkpoint, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from alpa_lite.api import StepReport
from alpa_lite.cli.run import _record, _table

TARGETS = """
import jax
import alpa_lite as al
from examples import mlp

target = mlp.target
shapes = mlp.make("small").abstract_args()
step = mlp.make("small").train_step


def no_data() -> al.PlanTarget:
    return al.PlanTarget(step, shapes, init=mlp.make("small").init)


def no_init() -> al.PlanTarget:
    return al.PlanTarget(step, shapes, data=mlp.make("small").batch)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "targets.py").write_text(TARGETS)
    command = [sys.executable, "-m", "alpa_lite", "run", *arguments]
    env_path = {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    import os

    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | env_path, check=False)


@pytest.mark.medium
def test_lines_of_json_and_a_second_run_that_goes_on(tmp_path: Path) -> None:
    target = f"{tmp_path}/targets.py:target"
    kept = ("--checkpoint", str(tmp_path / "run"), "--every", "2", "--cluster", "1x4:cpu")
    first = run(tmp_path, target, "--steps", "3", *kept)
    assert first.returncode == 0, first.stderr
    lines = [json.loads(line) for line in first.stdout.splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["loss"] > 0 and line["step_s"] > 0 and line["rows_per_s"] > 0 for line in lines)
    second = run(tmp_path, target, "--steps", "5", *kept)
    assert [json.loads(line)["step"] for line in second.stdout.splitlines()] == [4, 5]
    third = run(tmp_path, target, "--steps", "5", *kept)
    assert third.stdout == "" and "nothing to do" in third.stderr and third.returncode == 0


@pytest.mark.slow
def test_targets_that_cannot_be_run(tmp_path: Path) -> None:
    for name, arguments, part in (
        ("no_data", (), "has no data. A run needs batches"),
        ("no_init", (), "has shapes for its first argument, and no init"),
        ("target", ("--executor", "dask"), "executor='dask' was given"),
        ("target", ("--on-nan", "hope"), "on_nan='hope' was given"),
    ):
        failed = run(tmp_path, f"{tmp_path}/targets.py:{name}", "--steps", "1", "--cluster", "1x2:cpu", *arguments)
        assert failed.returncode == 2, failed
        assert part in failed.stderr and "Traceback" not in failed.stderr


def test_the_table_keeps_the_last_busy_shares() -> None:
    reports = [
        StepReport(position=k, metrics={"loss": 2.5 - k}, step_s=0.1, busy=(0.5, 0.25) if k == 0 else ())
        for k in (0, 1)
    ]
    records = [_record(report, ("tokens", 4096)) for report in reports]
    assert records[0] == {
        "step": 1,
        "loss": 2.5,
        "step_s": 0.1,
        "tokens_per_s": 40960.0,
        "restarts": 0,
        "busy": [0.5, 0.25],
    }
    console = Console(width=100, record=True)
    console.print(_table(records, "tokens"))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[1] == ["1", "2.50000", "100.0", "ms", "40,960", "50%", "25%", "0"]
    assert lines[2] == ["2", "1.50000", "100.0", "ms", "40,960", "50%", "25%", "0"]
