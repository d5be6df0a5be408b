"""A plain ``jax.distributed`` job of several processes runs a one-mesh plan as one process does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from benchmarks.ray_session import free_port
from examples import mlp
from examples.cluster import train
from tests.executor.exported_steps import batch, state, step
from tests.executor.job_worker import flat, pipelined, weights_and_x

TIMEOUT_S = 240  # on a busy machine


def job(case: str, folder: Path, num_processes: int, devices_each: int) -> list[Any]:
    """What every process of the job returned."""
    start = [sys.executable, "-m", "tests.executor.job_worker", case]
    rest = [str(num_processes), str(devices_each), str(free_port()), str(folder)]
    run_all([[*start, str(rank), *rest] for rank in range(num_processes)], [{}] * num_processes, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)]


def run_all(commands: list[list[str]], environments: list[dict[str, str]], folder: Path) -> list[str]:
    """What the processes of a job said on stdout and stderr; all of them have to end well."""
    logs = [folder / f"{rank}.log" for rank in range(len(commands))]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for command, more, log in zip(commands, environments, logs, strict=True):
            with log.open("wb") as out:
                env = {**os.environ, **more}
                ranks.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=env))
        end = time.monotonic() + TIMEOUT_S
        while any(rank.poll() is None for rank in ranks):
            said = [log.read_text(errors="replace")[-3000:] for log in logs]
            assert time.monotonic() < end and not any(rank.poll() for rank in ranks), said
            time.sleep(0.02)
        assert [rank.returncode for rank in ranks] == [0] * len(ranks)
        return [log.read_text(errors="replace") for log in logs]
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.communicate()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("num_processes", "devices_each"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)], ids=["two", "four"]
)
def test_three_steps_are_those_of_one_process(tmp_path, num_processes, devices_each):
    found = job("three_steps", tmp_path, num_processes, devices_each)
    assert all(one == found[0] for one in found)
    assert found[0]["cluster"] == f"{num_processes}x{devices_each}:cpu"
    assert found[0]["audit"] and found[0]["collectives"] and not found[0]["addressable"]
    assert found[0]["compilations"] == 2  # by compile() and by the first call, whatever later arguments are
    run = al.parallelize(step, plan=al.load_plan(tmp_path / "plan.json"), donate_argnums=0)
    now, losses = run.init(state), []
    for _ in range(3):
        now, loss = run(now, batch())
        losses.append(float(loss))
    assert found[0]["losses"] == losses
    assert found[0]["again"] == losses[:1] * 3
    words = now | {"key": jax.random.key_data(now["key"])}
    saved = np.load(tmp_path / "state.npz")
    for path, value in flat(words).items():
        np.testing.assert_array_equal(saved[path], np.asarray(value, dtype="float64"))


@pytest.mark.medium
def test_single_values_are_placed(tmp_path):
    for found in job("placements", tmp_path, 2, 2):
        assert all(found.values()), found


@pytest.mark.medium
def test_what_a_job_cannot_run_is_refused_in_every_process(tmp_path):
    eight = jax.ShapeDtypeStruct((8, 8), "float32")
    al.plan(lambda x: 2 * x, eight, cluster=al.Cluster.parse("1x4:cpu")).save(tmp_path / "plan.json")
    options = al.PlanOptions(num_stages=2, num_microbatches=2)
    stages = al.plan(pipelined, *weights_and_x(), cluster=al.Cluster.parse("1x2:cpu"), options=options)
    stages.save(tmp_path / "stages.json")
    first, second = job("refusals", tmp_path, 2, 1)
    expected = {
        "shapes": r"ArgumentsError: .*process 1 has argument 0 float32\[4,8\], process 0 argument 0 float32\[8,8\]\. All must",
        "steps": r"ArgumentsError: .*process 1 has step halve, process 0 step double\. .*Correct the calls",
        "plans": r"ArgumentsError: .*process 1 has plan sha256:\w+, process 0 plan sha256:\w+\. .*save one",
        "count": r"ClusterError: the plan's mesh .* has 4 devices, this jax.distributed job has 2 in 2 processes\..*Start",
        "restored": r"ClusterError: the plan's mesh .* has 4 devices, this jax.distributed job has 2 in 2 processes",
        "stages": r"LayerError: a plan with 2 stages .* job of 2 processes\. .*num_stages=1.*one process",
        "calibrate": r"ClusterError: calibrate=True was given in a jax.distributed job of 2 processes\..*load_plan",
    }
    for name, pattern in expected.items():
        for said in (first, second):
            assert re.search(pattern, said[name], re.DOTALL), (name, said[name])
    assert first["after"] == second["after"] == "128.0"  # the job goes on
    assert re.search(r"ArgumentsError: .*process 1 made no such call within 1 s\. ", first["absent"])


@pytest.mark.slow
def test_the_example_trains_as_slurm_starts_it(tmp_path):
    example = mlp.make()
    state, expected = example.init(jax.random.key(0)), []
    for index in range(3):
        state, metrics = jax.jit(example.train_step)(state, example.batch(index))
        expected.append(float(metrics["loss"]))
    # JAX takes the coordinator's port from the job's number (JAX 0.10.2).
    slurm = {"SLURM_JOB_ID": str(free_port(range(61_440, 65_536)) - 61_440), "SLURM_STEP_NODELIST": "localhost"}
    slurm |= {"SLURM_NTASKS": "2", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    environments = [slurm | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    script = Path(train.__file__)
    first, second = run_all([[sys.executable, str(script), "--steps", "3"]] * 2, environments, tmp_path)
    assert "2x2:cpu" in first and "loss" not in second
    losses = [float(text) for text in re.findall(r"^step +\d+  loss ([\d.]+)$", first, re.MULTILINE)]
    assert losses == pytest.approx(expected, rel=1e-4)
    batch_script = script.with_name("slurm_jax.sh")
    subprocess.run(["bash", "-n", str(batch_script)], check=True, timeout=60)
    assert "examples/cluster/train.py --size base --steps 100 --cluster 2x8:h100-sxm" in batch_script.read_text()
