"""An engine whose mesh spans hosts: actors of one job, the tokens of one process, and new actors for those that are lost."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import ClusterError, EngineClosed, ServeError
from examples.serving_models import Llama
from tests.serve.clients import BACK_S, kill_actor_under_load, wait_until
from tests.serve.test_odd_models import Bigrams, ByName, Called, WithKeys

pytest.importorskip("ray", reason="Ray is not installed: pip install 'alpa-lite[ray]'")
pytestmark = [pytest.mark.ray, pytest.mark.medium]

SIZES: dict[str, Any] = {"slots": 4, "max_length": 32, "buckets": (8, 16)}
WATCHED = al.RayExecutor(heartbeat_s=0.5, hang_timeout_s=10.0)
MODEL = Llama.of("small")


def params() -> Any:
    return MODEL.init_params(jax.random.key(3))


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, length) for length in (1, 5, 8, 11, 16, 3)]


@pytest.fixture(scope="module")
def layout() -> Any:
    """Of two hosts with two devices each; every one of them works. Parameters are split over hosts, and over devices of one."""
    graphs = al.serve.graphs(MODEL, jax.eval_shape(params), **SIZES)
    return al.plan_shared(
        graphs,
        shared=("0", "1"),
        cluster=al.Cluster.parse("2x2:cpu"),
        donate_argnums=1,
        options=al.PlanOptions(mesh_shape=(2, 2), axis_names=("x", "y")),
        pins={
            "0/blocks/up/kernel": P(None, None, "y"),
            "0/blocks/down/kernel": P(None, "y"),
            "0/head/kernel": P("x", "y"),
            "0/embed/embedding": P("x"),
        },
    )


@pytest.fixture(scope="module")
def expected(layout: Any) -> list[list[int]]:
    """Of the same plans in this process."""
    with al.serve.Engine(MODEL, params(), layout, **SIZES) as engine:
        return engine.generate(prompts(), max_tokens=10)


@pytest.fixture(scope="module")
def engine(ray_session: None, layout: Any) -> Iterator[al.serve.Engine]:
    with al.serve.Engine(MODEL, params, layout, executor=WATCHED, **SIZES) as made:
        made.warm_up()
        yield made


def test_two_hosts_say_what_one_process_says(engine: al.serve.Engine, expected: list[list[int]]) -> None:
    assert engine.generate(prompts(), max_tokens=10) == expected
    places = engine.programs.places
    assert len({pid for _, pid in places} | {os.getpid()}) == 3


def test_the_parameters_lie_once_over_all_hosts(engine: al.serve.Engine, layout: Any) -> None:
    per_device = [held for actor in engine.programs.param_bytes() for held in actor.values()]
    leaves = [leaf for leaf in layout.plans["decode"].inputs if leaf.path.startswith("0/")]
    planned = sum(4 * math.prod(leaf.spec.local_shape(leaf.value.shape, layout.mesh)) for leaf in leaves)
    assert per_device == [planned] * 4
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(params)))
    assert planned < whole < 4 * planned, "some are split, and some are whole"


@pytest.mark.slow
def test_an_actor_that_is_killed_under_load(engine: al.serve.Engine, expected: list[list[int]]) -> None:
    kill_actor_under_load(engine, 1, prompts(), expected, max_tokens=10)


@pytest.mark.slow
def test_an_actor_that_is_killed_while_nobody_asks(
    engine: al.serve.Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request need find out; one of the new actors dies while it starts."""
    from alpa_lite.serve import hosts

    starts: list[hosts.PartGroup] = []

    class Dying(hosts.PartGroup):
        def _give(self) -> None:
            starts.append(self)
            if len(starts) == 1:
                os.kill(self.places[0][1], signal.SIGKILL)
            super()._give()

    monkeypatch.setattr(hosts, "PartGroup", Dying)
    earlier = {pid for _, pid in engine.programs.places}
    os.kill(min(earlier), signal.SIGKILL)
    ended_s = time.monotonic() + BACK_S
    while len(starts) < 2 or not starts[1].started:
        assert time.monotonic() < ended_s
        time.sleep(0.1)
    assert engine.generate(prompts(), max_tokens=10) == expected
    assert earlier.isdisjoint(pid for _, pid in engine.programs.places)


def test_actors_end_with_the_engine(ray_session: None, layout: Any) -> None:
    host = jax.device_get(params())
    engine = al.serve.Engine(MODEL, host, layout, executor=WATCHED, **SIZES)
    pids = [pid for _, pid in engine.programs.places]
    request = engine.submit([1, 2], max_tokens=30)
    engine.close()
    with pytest.raises(EngineClosed):
        request.result(10)
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def other_params() -> Any:
    """Not the same in two processes."""
    made = params()
    return made | {"head": {"kernel": made["head"]["kernel"].at[0, 0].set(os.getpid())}}


@pytest.mark.slow
def test_parameters_of_any_kind(ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree that can be called, keys, a function that makes keys, and a checkpoint by a path from the user's folder."""
    following = np.random.default_rng(0).permutation(32)
    table = np.eye(32, dtype=np.float32)[following]
    keyed = {"table": table, "key": jax.random.key(1)}
    saved = al.parallelize(lambda state: state)
    saved.plan({"params": {"table": table}})
    saved.save(tmp_path / "checkpoints", {"params": {"table": table}}, step=1)
    monkeypatch.chdir(tmp_path)
    stored = al.serve.StoredParams("checkpoints", {"table": jax.ShapeDtypeStruct((32, 32), np.float32)})
    wanted = [3]
    for _ in range(4):
        wanted.append(int(following[wanted[-1]]))
    for model, given in (
        (ByName(), Called(jnp.asarray(table))),
        (WithKeys(), keyed),
        (WithKeys(), lambda: keyed),
        (Bigrams(), stored),
    ):
        cluster = al.Cluster.parse("2x1:cpu")
        with al.serve.Engine(
            model, given, executor=WATCHED, cluster=cluster, slots=2, max_length=8, buckets=(4,)
        ) as made:
            assert made.generate([[3]], max_tokens=4) == [wanted[1:]]


@pytest.mark.slow
def test_parameters_that_differ_between_hosts_are_refused(ray_session: None, layout: Any) -> None:
    with pytest.raises(
        ServeError, match=r"made other values of 'head/kernel' in worker 1 .*than in worker 0 .*test_hosts"
    ):
        al.serve.Engine(MODEL, other_params, layout, executor=WATCHED, **SIZES)


@pytest.fixture(scope="module")
def staged(ray_session: None, engine: al.serve.Engine) -> Iterator[al.serve.Engine]:
    """Two stages of two hosts with a device each: four actors, in two jobs. After the other tests, whose actors have ended."""
    engine.close()
    cluster = al.Cluster.parse("4x1:cpu")
    with al.serve.Engine(MODEL, params, executor=WATCHED, cluster=cluster, num_stages=2, **SIZES) as made:
        made.warm_up()
        yield made


@pytest.mark.slow
def test_stages_on_hosts_of_their_own_say_what_one_process_says(staged: al.serve.Engine) -> None:
    """Each stage has its layers' parameters alone, and slots are served in four groups."""
    drawn = [al.serve.Sampling(temperature=0.5 * (n % 2), seed=n) for n in range(len(prompts()))]
    answers = staged.generate(prompts(), max_tokens=10, sampling=drawn)
    with al.serve.Engine(MODEL, params(), num_stages=2, **SIZES) as local:
        assert local.generate(prompts(), max_tokens=10, sampling=drawn) == answers
    assert staged.programs.num_groups == 4
    assert set(staged.plans) == {f"{k}/{name}" for k in (0, 1) for name in ("decode", "prefill_8", "prefill_16")}
    first, second = staged.params
    assert "embed" in first and "head" in second and "embed" not in second
    assert len({pid for _, pid in staged.programs.places} | {os.getpid()}) == 5


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 3])
def test_a_stage_that_is_killed_under_load(staged: al.serve.Engine, number: int) -> None:
    """The first actor of the first stage, whose values others wait for; the second one of the last, which tells nobody."""
    expected = staged.generate(prompts(), max_tokens=10)
    kill_actor_under_load(staged, number, prompts(), expected, max_tokens=10)


class Louder(Llama):
    def decode(self, params: Any, cache: Any, tokens: Any) -> Any:
        logits, cache = super().decode(params, cache, tokens)
        return logits + jnp.sin(logits), cache


def test_what_cannot_be(ray_session: None, layout: Any) -> None:
    with pytest.raises(ServeError, match=r"num_stages=3 was given for the cluster 2x2:cpu; .*test_hosts"):
        al.serve.Engine(MODEL, params, executor="ray", cluster=al.Cluster.parse("2x2:cpu"), num_stages=3, **SIZES)
    with pytest.raises(ServeError, match=r"1 layouts were given for num_stages=2; .*test_hosts"):
        al.serve.Engine(MODEL, params, [layout], executor="ray", num_stages=2, **SIZES)
    with pytest.raises(
        ServeError, match=r"of another model, as its plan of 'decode' shows: .* were planned.*test_hosts"
    ):
        al.serve.Engine(Louder(MODEL.config), params, layout, executor=WATCHED, **SIZES)
    with pytest.raises(al.AlpaLiteError, match="executor='rays' was given"):
        al.serve.Engine(MODEL, params, executor="rays", **SIZES)
    with pytest.raises(ClusterError, match="the plan needs"):
        al.serve.Engine(MODEL, params, executor="ray", cluster=al.Cluster.parse("2x4096:cpu"), **SIZES)
