"""Plans for fewer hosts: how they are chosen, and a run whose cluster loses a node for good."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.api.elastic import Elastic, candidates
from alpa_lite.errors import AlpaLiteError
from alpa_lite.executor.sites import sites_of
from alpa_lite.executor.state_bytes import state_bytes
from tests.executor.elastic_driver import NUM_STEPS
from tests.executor.ray_nodes import ROOT, Nodes, ray_nodes, session_processes
from tests.executor.test_fit import batch, state
from tests.executor.test_ray import local_step


def found_for(elastic: Elastic, cluster: str = "1x4:cpu") -> list[Any]:
    local = local_step(cluster="2x4:cpu")
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state(), batch(0)))
    return candidates(local, args, al.Cluster.parse(cluster), local.plan(*args), elastic)


@pytest.mark.slow
def test_a_long_horizon_takes_the_faster_plan_and_a_short_one_that_moves_less() -> None:
    fast = found_for(Elastic(horizon_steps=10**9))
    assert [c.plan.objective for c in fast] == sorted(c.plan.objective for c in fast)
    near = found_for(Elastic(horizon_steps=1, move_bytes_per_s=1.0))
    assert [c.moved_bytes for c in near] == sorted(c.moved_bytes for c in near)
    assert {len(c.plan.stages) for c in fast} == {1, 2}
    for one in fast:
        assert one.total_s == pytest.approx(10**9 * one.plan.objective + one.moved_bytes / 1e9)
        assert one.plan.identity.cluster == "1x4:cpu"


@pytest.mark.medium
def test_bytes_of_a_state_count_each_tile_once_per_process() -> None:
    """One process on a mesh holds everything once, replicated or split; two processes hold what is replicated twice."""
    local = local_step(cluster="1x4:cpu", options=al.PlanOptions(num_stages=1, num_microbatches=4))
    plan = local.plan(state(), batch(0))
    whole = sum(np.asarray(x).nbytes for x in jax.tree.leaves(state()))
    assert state_bytes(plan, dict.fromkeys(range(4), 0)) == whole
    halves = state_bytes(plan, {0: 0, 1: 0, 2: 1, 3: 1})
    assert whole <= halves <= 2 * whole
    stages = local_step(cluster="1x4:cpu")
    plan = stages.plan(state(), batch(0))
    assert state_bytes(plan, {d: s.number for s in sites_of(plan) for d in s.devices}) == whole


def test_values_that_cannot_be() -> None:
    with pytest.raises(AlpaLiteError, match=r"horizon_steps=0\. It must be a positive number"):
        Elastic(horizon_steps=0)
    with pytest.raises(AlpaLiteError, match="move_bytes_per_s"):
        Elastic(move_bytes_per_s=-1.0)
    for value in (float("inf"), True, "many", None):
        with pytest.raises(AlpaLiteError, match="It must be a positive number"):
            Elastic(horizon_steps=value)


# -- a node that is gone ----------------------------------------------------------------------------------------------


def losing_a_node(nodes: Nodes, folder: Path, mode: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a driver whose second node dies after batch 7."""
    command = [sys.executable, "-m", "tests.executor.elastic_driver", nodes.address, str(folder), mode]
    driver = subprocess.Popen(
        command, env=dict(nodes.env), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert driver.stdout is not None
        told = []
        while not told or told[-1].strip() != "7":
            told.append(driver.stdout.readline())
            assert told[-1], driver.communicate(timeout=10)
        for pid in session_processes(nodes.sessions[1]):
            os.kill(pid, signal.SIGKILL)
        out, err = driver.communicate(timeout=240)
        return driver.returncode, "".join(told) + out, err
    finally:
        driver.kill()
        driver.communicate()


@pytest.mark.ray
@pytest.mark.slow
def test_a_host_that_is_gone_for_good(tmp_path: Path) -> None:
    step = local_step(cluster="2x2:cpu")
    made, expected = state(), []
    for position in range(NUM_STEPS):
        made, loss = step(made, batch(position))
        expected.append(float(loss))
    with ray_nodes(2, num_cpus=2) as nodes:
        code, out, err = losing_a_node(nodes, tmp_path / "run", "elastic")
        assert code == 0, err
        record = json.loads(out.splitlines()[-1])
    np.testing.assert_allclose(record["losses"], expected, rtol=1e-4)
    assert (record["cluster"], record["restarts"]) == ("1x2:cpu", 1)
    assert record["read_bytes"] == record["predicted_bytes"] > 0
    assert "2x2:cpu has become 1x2:cpu; plans over 100 steps:" in err
    assert "to move," in err and "  * " in err


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_that_may_not_change_its_plan_says_what_is_missing(tmp_path: Path) -> None:
    with ray_nodes(2, num_cpus=2) as nodes:
        code, _, err = losing_a_node(nodes, tmp_path / "run", "fixed")
    assert code == 1
    assert "ClusterError: the " in err and ("the Ray cluster did not give" in err or "the plan needs" in err)
