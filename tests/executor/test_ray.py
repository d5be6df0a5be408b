"""The Ray executor beside the local one, on virtual CPU devices."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import AlpaLiteError, ArgumentsError, CheckpointError, ClusterError, WorkerError, WorkerLost
from alpa_lite.executor.ray.settings import RayExecutor
from tests.executor import exported_steps, pipeline_steps
from tests.executor.ray_nodes import LOOPBACK, listening_hosts

pytestmark = [pytest.mark.ray, pytest.mark.medium, pytest.mark.usefixtures("ray_session")]

TWO_STAGES = {
    "cluster": "1x4:cpu",
    "options": al.PlanOptions(num_stages=2, num_microbatches=pipeline_steps.MICROBATCHES),
}
WATCHED = RayExecutor(heartbeat_s=0.5, hang_timeout_s=6.0)


def local_step(loss: Callable[..., Any] = pipeline_steps.loss_fn, **settings: Any) -> Any:
    """A step on two stages unless ``settings`` say otherwise; needs no Ray."""
    given = TWO_STAGES | settings
    return al.parallelize(
        pipeline_steps.step_of(loss), **given | {"cluster": al.Cluster.parse(given["cluster"]), "donate_argnums": 0}
    )


def steps(loss: Callable[..., Any] = pipeline_steps.loss_fn, executor: Any = "ray", **settings: Any) -> tuple[Any, Any]:
    """The local executor's step and the Ray executor's, with one plan."""
    return local_step(loss, **settings), local_step(loss, executor=executor, **settings)


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any]]:
    local, remote = steps(executor=WATCHED)
    yield local, remote
    remote.close()


def copied(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.copy(), tree)


def run(step: Any, state: Any, batch: Any, count: int) -> tuple[Any, list[float]]:
    losses = []
    for _ in range(count):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return state, losses


def assert_equal(one: Any, other: Any) -> None:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))


def workers(step: Any) -> list[int]:
    """Process ids of a step's workers."""
    (remote,) = step._remotes
    return [pid for _, pid in remote.group.places]


def wait_for(condition: Callable[[], bool]) -> None:
    """Ray tells of its resources with a delay."""
    for _ in range(100):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it has not come in 10 s")


def is_gone(pid: int) -> bool:
    """Whether a process has ended, waiting for it a little."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_stages_of_one_host_are_bit_equal_to_the_local_executor(pair: tuple[Any, Any]) -> None:
    local, remote = pair
    state, batch = pipeline_steps.arguments()
    expected, losses = run(local, copied(state), batch, 4)
    made, found = run(remote, state, batch, 4)
    assert found == losses
    assert_equal(expected, made)
    leaf = jax.tree.leaves(made)[0]
    assert isinstance(leaf, al.RemoteArray)
    assert (leaf.shape, str(leaf.dtype), leaf.sharding.spec) == (
        (48, 16),
        "float32",
        jax.sharding.PartitionSpec(None, None),
    )
    assert "RemoteArray(float32[48, 16]" in repr(leaf)


@pytest.mark.slow
def test_a_stage_that_spans_two_hosts() -> None:
    """Hosts 0 and 1 share stage 0 in a world of their own, host 2 is stage 1."""
    options = al.PlanOptions(num_stages=2, num_microbatches=4, submeshes=((2, 2), (1, 2)))
    local, remote = steps(cluster="3x2:cpu", options=options)
    state, batch = pipeline_steps.arguments()
    expected, losses = run(local, copied(state), batch, 20)
    with remote:
        made, found = run(remote, state, batch, 20)
        assert [(s.submesh, s.host, s.devices) for s in remote._remotes[0].parcel.sites] == [
            (0, 0, (0, 1)),
            (0, 1, (2, 3)),
            (1, 2, (4, 5)),
        ]
        if sys.platform == "linux":
            hosts = listening_hosts(workers(remote))
            assert hosts and hosts <= LOOPBACK, hosts  # also JAX's coordinator, whose own choice is every interface
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(made), strict=True):
            np.testing.assert_allclose(np.linalg.norm(np.asarray(a)), np.linalg.norm(np.asarray(b)), rtol=1e-5)


def test_workers_have_their_drivers_priority() -> None:
    """Ray's own default, niceness 15, leaves them next to nothing beside other work of the session."""
    import ray

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    assert ray.get(ray.remote(num_cpus=0)(priority).remote()) == priority()


def test_a_workers_port_is_nobody_elses_until_jax_listens() -> None:
    import ray

    from alpa_lite.executor.ray.actor import WorkerActor

    start: Any = WorkerActor
    worker = start.remote()
    port = ray.get(worker.free_port.remote("127.0.0.1"))
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    world = {"coordinator_address": f"127.0.0.1:{port}", "num_processes": 1, "process_id": 0}
    ray.get(worker.setup.remote("cpu", 1, False, "", world))
    socket.create_connection(("127.0.0.1", port), timeout=10).close()
    ray.kill(worker)


@pytest.mark.slow
def test_one_job_of_all_workers_moves_values_by_device_put() -> None:
    """Three stages, so that some process has no part in a transfer; layouts that differ between stages are pulled."""
    executor = RayExecutor(transport="device_put")
    options = al.PlanOptions(num_stages=4, num_microbatches=4)
    local, remote = steps(cluster="1x4:cpu", options=options, executor=executor)
    state, batch = pipeline_steps.arguments()
    expected, losses = run(local, copied(state), batch, 3)
    with remote:
        made, found = run(remote, state, batch, 3)
        assert found == losses
        assert_equal(expected, made)


@pytest.mark.slow
def test_stacked_layers_lie_on_their_stages() -> None:
    """Rows of one leaf on two submeshes, and state that is made by the workers themselves."""
    local, remote = steps(pipeline_steps.scanned_loss_fn, options=al.PlanOptions(num_stages=2, num_microbatches=4))
    state, batch = pipeline_steps.arguments(stacked=True)
    expected, losses = run(local, copied(state), batch, 3)
    with remote:
        remote.plan(state, batch)
        made = remote.init(lambda: pipeline_steps.arguments(stacked=True)[0])
        assert_equal(state, made)
        made, found = run(remote, made, batch, 3)
        assert found == losses
        assert_equal(expected, made)


@pytest.mark.slow
def test_one_mesh_with_keys_and_half_precision() -> None:
    plan = exported_steps.plan(4)
    state, batch = exported_steps.state(), exported_steps.batch()
    local = al.parallelize(exported_steps.step, plan=plan, donate_argnums=0)
    with al.parallelize(exported_steps.step, plan=plan, executor="ray", donate_argnums=0) as remote:
        made = remote(state, batch)
        expected = local(copied(state), batch)
        key = made[0]["key"]
        assert str(key.dtype) == "key<fry>"
        np.testing.assert_array_equal(jax.random.key_data(key.key()), jax.random.key_data(expected[0]["key"]))
        assert_equal((expected[0]["params"], expected[1]), (made[0]["params"], made[1]))
        assert_equal(local(expected[0], batch)[1], remote(made[0], batch)[1])


@pytest.mark.slow
def test_donated_results_are_gone_and_say_so(pair: tuple[Any, Any]) -> None:
    _, remote = pair
    state, batch = pipeline_steps.arguments()
    first, _ = remote(state, batch)
    leaf = jax.tree.leaves(first)[0]
    second, loss = remote(first, batch)
    assert leaf.is_deleted() and not jax.tree.leaves(second)[0].is_deleted()
    with pytest.raises(ArgumentsError, match="'0/0/emb' was donated to an earlier call"):
        remote(first, batch)
    with pytest.raises(ArgumentsError, match="was donated to a step"):
        np.asarray(leaf)
    assert float(loss) == loss.item() and f"{loss:.3f}" == f"{float(loss):.3f}"


@pytest.mark.slow
def test_values_that_nobody_holds_are_dropped(pair: tuple[Any, Any]) -> None:
    _, remote = pair
    state, batch = pipeline_steps.arguments()
    for _ in range(4):
        state, loss = remote(state, batch)
        del loss
    values = remote._remotes[0].values
    count = len(jax.tree.leaves(state))
    assert len(values.alive) <= count + 2  # the state, and the losses that the next step drops


def test_a_killed_worker_is_told_at_once_and_takes_the_others_with_it(pair: tuple[Any, Any]) -> None:
    _, remote = pair
    state, batch = pipeline_steps.arguments()
    made, losses = run(remote, state, batch, 2)
    pids = workers(remote)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(al.WorkerLost, match="2 steps had ended") as lost:
        remote(made, batch)
    assert lost.value.position == 2
    assert all(is_gone(pid) for pid in pids)
    with pytest.raises(al.WorkerLost):  # until it is closed, so that nobody goes on with other state by mistake
        remote(made, batch)
    remote.close()
    _, found = run(remote, pipeline_steps.arguments()[0], batch, 2)
    assert found == losses


@pytest.mark.slow
def test_a_stopped_worker_is_taken_for_lost(pair: tuple[Any, Any]) -> None:
    _, remote = pair
    state, batch = pipeline_steps.arguments()
    state, _ = remote(state, batch)
    pids = workers(remote)
    os.kill(pids[0], signal.SIGSTOP)
    with pytest.raises(al.WorkerLost, match=r"worker 0 \(host 0, stage 0\) has not answered for \d+ s"):
        remote(state, batch)
    assert all(is_gone(pid) for pid in pids)


def test_closing_gives_everything_back(pair: tuple[Any, Any]) -> None:
    import ray

    _, remote = pair
    free = ray.cluster_resources()["CPU"]
    wait_for(lambda: ray.available_resources().get("CPU") == free)  # what tests before have given back
    remote(*pipeline_steps.arguments())
    assert ray.available_resources().get("CPU", 0) <= free - 4
    pids = workers(remote)
    remote.close()
    assert all(is_gone(pid) for pid in pids)
    wait_for(lambda: ray.available_resources().get("CPU") == free)


# -- bad input --------------------------------------------------------------------------------------------------------


def test_more_devices_than_the_cluster_has() -> None:
    _, remote = steps(cluster="2x8:cpu")
    with pytest.raises(ClusterError, match=r"the plan needs 8 CPU and 8 CPU on its 2 hosts, the Ray cluster has 8 CPU"):
        remote(*pipeline_steps.arguments())


def test_a_worker_with_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    _, remote = steps()
    monkeypatch.setattr("alpa_lite.executor.parcel.__version__", "0.0.7")
    with pytest.raises(WorkerError, match=r"the driver has alpa_lite 0\.0\.7, a worker has alpa_lite"):
        remote(*pipeline_steps.arguments())


def test_other_executors_are_refused() -> None:
    with pytest.raises(
        AlpaLiteError, match=r"executor='dask' was given. It must be 'local', 'ray' or an al.RayExecutor"
    ):
        al.parallelize(pipeline_steps.loss_fn, executor="dask")
    with pytest.raises(AlpaLiteError, match="address='auto' was given without executor='ray'"):
        al.parallelize(pipeline_steps.loss_fn, address="auto")
    with pytest.raises(AlpaLiteError, match=r"hang_timeout_s=1\.0 is shorter than heartbeat_s=2\.0"):
        RayExecutor(hang_timeout_s=1.0)
    with pytest.raises(AlpaLiteError, match=r"heartbeat_s=0 was given\. It must be a positive number"):
        RayExecutor(heartbeat_s=0)


def test_a_cluster_to_plan_for() -> None:
    assert str(al.Cluster.from_ray()) == "1x8:cpu"
    assert str(al.Cluster.from_ray(4)) == "1x4:cpu"
    with pytest.raises(ClusterError, match="devices_per_host=9 was asked of a Ray cluster whose hosts have 8 at most"):
        al.Cluster.from_ray(9)


@pytest.mark.slow
def test_who_starts_under_a_name_takes_away_what_is_there_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an earlier process would have left it: Ray keeps the placement groups of an actor that died."""
    from ray.util.placement_group import placement_group_table

    earlier, later = (steps(executor=RayExecutor(name="trainer", heartbeat_s=0.5))[1] for _ in range(2))
    with earlier, later:
        with monkeypatch.context() as another:
            another.setattr("alpa_lite.executor.ray.group._process", lambda: "another process")
            run(earlier, *pipeline_steps.arguments(), 1)
        run(later, *pipeline_steps.arguments(), 1)
        named = [g["state"] for g in placement_group_table().values() if g["name"].startswith("trainer/")]
        assert sorted(named) == ["CREATED", "REMOVED"]
        with pytest.raises(al.WorkerLost):
            run(earlier, *pipeline_steps.arguments(), 1)
        run(later, *pipeline_steps.arguments(), 1)


def held_under(name: str) -> list[str]:
    """States of the placement groups of a name that hold something."""
    from ray.util.placement_group import placement_group_table

    groups = placement_group_table().values()
    return [g["state"] for g in groups if g["name"].startswith(f"{name}/") and g["state"] != "REMOVED"]


def test_two_sizes_of_batches_and_a_step_that_is_dropped(tmp_path: Path) -> None:
    """Each size has workers of its own, which keep what they return, and whose place nobody takes away but their end."""

    def add(state: Any, batch: Any) -> Any:
        return {"w": state["w"] + batch.sum()}, state["w"].sum()

    first = {"w": np.ones(4, np.float32)}
    batches = {size: np.ones(size, np.float32) for size in (2, 3)}
    executor = RayExecutor(name="sizes", heartbeat_s=0.5)
    step = al.parallelize(add, cluster=al.Cluster.parse("1x1:cpu"), executor=executor)
    states = {2: step(first, batches[2])[0]}
    with pytest.raises(ArgumentsError, match=r"'0/w' is a RemoteArray of .* other shapes or types.*pad the last one"):
        step(states[2], batches[3])
    assert len(held_under("sizes")) == 1, "workers were started for a call that cannot be"
    states[3] = step(first, batches[3])[0]
    assert len(held_under("sizes")) == 2
    for size, state in states.items():
        states[size], loss = step(state, batches[size])
        assert float(loss) == 4 * (1 + size)
        step.save(tmp_path, states[size], step=size)
    del step, states, state, loss
    gc.collect()  # tells a thread
    wait_for(lambda: not held_under("sizes"))


def test_only_what_its_own_workers_keep_is_saved(tmp_path: Path) -> None:
    """Values have names that other workers, of another step or of the same step later on, use for others."""

    def add(state: Any, batch: Any) -> Any:
        return {"w": state["w"] + batch}, (state["w"] * batch).sum()

    def made() -> Any:
        return al.parallelize(add, cluster=al.Cluster.parse("1x1:cpu"), executor=WATCHED, donate_argnums=0)

    def whole(value: float) -> Any:
        return {"w": np.full(4, value, np.float32)}

    one = np.ones(4, np.float32)
    step, other = made(), made()
    try:
        donated, _ = step(whole(0), one)
        state, _ = step(donated, one)
        others, _ = other(whole(900), one)
        with pytest.raises(CheckpointError, match=r"'w' .* is a RemoteArray of another step"):
            step.save(tmp_path, others, step=1)
        with pytest.raises(CheckpointError, match=r"'w' .* was donated to a later call"):
            step.save(tmp_path, donated, step=1)
        step.close()
        step(whole(50), one)
        with pytest.raises(WorkerLost):
            step.save(tmp_path, state, step=1)
        assert not list(tmp_path.iterdir())
    finally:
        step.close()
        other.close()


def test_a_call_that_only_some_workers_were_asked_for_ends_them(pair: tuple[Any, Any]) -> None:
    """Else the next call would get the answer of that one from those that were."""
    _, remote = pair
    state, batch = pipeline_steps.arguments()
    state, _ = remote(state, batch)
    group = remote._remotes[0].group

    class Interrupted:
        """A signal comes as it is to be asked."""

        @property
        def call(self) -> Any:
            raise KeyboardInterrupt

    own = group.actors[-1]
    group.actors[-1] = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        remote(state, batch)
    group.actors[-1:] = [own]
    with pytest.raises(WorkerLost, match="only 1 of 2 workers were asked"):
        remote(state, batch)


def test_an_answer_that_is_waited_for_holds_up_no_sign_of_life() -> None:
    """Stages get one another's answers; the one that waits for a first compilation must not be taken for lost."""
    import ray

    from alpa_lite.executor.ray.actor import Later, WorkerActor

    @ray.remote(num_cpus=0)
    def slow() -> int:
        time.sleep(3)
        return 7

    actor = WorkerActor.options(num_cpus=0).remote()  # pyrefly: ignore[missing-attribute]
    try:
        ray.get(actor.ping.remote())
        begun_s = time.monotonic()
        answer = actor.call.remote("__eq__", Later(slow.remote()))  # of its worker, which is None
        ray.get(actor.ping.remote())
        assert time.monotonic() - begun_s < 2.5
        assert ray.get(answer) is NotImplemented and time.monotonic() - begun_s > 2.5
    finally:
        ray.kill(actor)


def test_a_users_mistake_on_a_worker_is_told_as_it_is() -> None:
    """No complaint about layouts, which would be asked again, of workers that are gone; nor a loss, to begin again after."""

    def add(state: Any, batch: Any) -> Any:
        return {"w": state["w"] + batch}, (state["w"] * batch).sum()

    def no_shard(position: int, path: str, index: tuple[slice, ...]) -> np.ndarray:
        if position == 2:
            raise ValueError("shard 2 is not there")
        return np.ones(4, np.float32)[index]

    data = al.HostData(no_shard, jax.ShapeDtypeStruct((4,), np.float32))
    step = al.parallelize(add, cluster=al.Cluster.parse("1x1:cpu"), executor=WATCHED, donate_argnums=0)
    with step, pytest.raises(ValueError, match=r"^shard 2 is not there$") as told:
        al.fit(step, init={"w": np.zeros(4, np.float32)}, data=data, num_steps=4)
    assert not isinstance(told.value, AlpaLiteError)
    assert "in no_shard" in str(told.value.__cause__), "where it happened on the worker"


def test_a_name_that_begins_like_another_is_another() -> None:
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    from alpa_lite.executor.ray.group import _remove_left

    def state_of(name: str) -> str:
        return next(entry["state"] for entry in placement_group_table().values() if entry["name"] == name)

    held = placement_group([{"CPU": 1.0}], name="run/eval/another process/1234")
    try:
        assert held.wait(20)
        _remove_left("run")
        assert state_of("run/eval/another process/1234") == "CREATED"
        _remove_left("run/eval")
        wait_for(lambda: state_of("run/eval/another process/1234") == "REMOVED")
    finally:
        remove_placement_group(held)


def test_a_users_error_that_cannot_be_sent_is_no_loss() -> None:
    class ShardMissing(Exception):
        def __init__(self, shard: int, folder: str) -> None:
            super().__init__(f"shard {shard} is not in {folder}")

    def no_shard(position: int, path: str, index: tuple[slice, ...]) -> np.ndarray:
        raise ShardMissing(position, "data")

    def add(state: Any, batch: Any) -> Any:
        return {"w": state["w"] + batch}, state["w"].sum()

    data = al.HostData(no_shard, jax.ShapeDtypeStruct((4,), np.float32))
    step = al.parallelize(add, cluster=al.Cluster.parse("1x1:cpu"), executor=WATCHED, donate_argnums=0)
    with step, pytest.raises(Exception, match="shard 0 is not in data") as told:
        al.fit(step, init={"w": np.zeros(4, np.float32)}, data=data, num_steps=4, max_restarts=0)
    assert not isinstance(told.value, WorkerLost)


def test_results_of_a_call_that_was_interrupted_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(state: Any, batch: Any) -> Any:
        return {"w": state["w"] + batch}, state["w"].sum()

    one = np.ones(4, np.float32)
    with al.parallelize(add, cluster=al.Cluster.parse("1x1:cpu"), executor=WATCHED) as step:
        state, _ = step({"w": one}, one)
        values, group = step._remotes[0].values, step._remotes[0].group
        collect = group._collect

        def interrupted(*args: Any) -> None:
            collect(*args)
            raise KeyboardInterrupt

        step(state, one)
        step(state, one)
        held = len(values.alive)
        for _ in range(3):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(group, "_collect", interrupted)
                step(state, one)
        step(state, one)
        step(state, one)
        assert len(values.alive) <= held
