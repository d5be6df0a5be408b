"""A joint plan with stages on several hosts: what one process says, parameters once, new actors for those that are lost."""

from __future__ import annotations

import ctypes
import math
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

import alpa_lite as al
from alpa_lite.errors import ServeError
from examples.serving_models import GPT
from tests.serve.clients import kill_actor_under_load, wait_until
from tests.serve.engines import (
    STAGED_SIZES,
    Given,
    model_and_params,
    staged_expected,
    staged_layout,
    staged_prompts,
)

pytest.importorskip("ray", reason="Ray is not installed: pip install 'alpa-lite[ray]'")
pytestmark = [pytest.mark.ray, pytest.mark.medium]

SIZES = STAGED_SIZES | {"slots": 8}  # in two groups
WATCHED = al.RayExecutor(heartbeat_s=0.5, hang_timeout_s=10.0)


@pytest.fixture(scope="module")
def engine(ray_session: None) -> Iterator[al.serve.Engine]:
    """Two hosts of two devices, with a stage each."""
    model, params = model_and_params("gpt")
    with al.serve.Engine(model, params, staged_layout("gpt", "2x2:cpu"), executor=WATCHED, **SIZES) as made:
        yield made


def held(engine: al.serve.Engine) -> list[list[int]]:
    """Per actor the bytes of parameters on each of its devices."""
    return [list(own.values()) for own in engine.programs.param_bytes()]


def planned(layout: Any, stage: int) -> int:
    """Bytes of parameters on each device of a stage."""
    leaves = [leaf for leaf in layout.shared_leaves if leaf.path.startswith("0/") and leaf.stage == stage]
    mesh = layout.plans["decode"].stages[stage].mesh
    return sum(math.prod(leaf.spec.local_shape(leaf.value.shape, mesh)) * leaf.value.itemsize for leaf in leaves)


@pytest.mark.slow
def test_two_hosts_say_what_one_process_says_and_hold_parameters_once(engine: al.serve.Engine) -> None:
    """A host has its stage's alone; where a row draws, it draws the same."""
    assert engine.generate(staged_prompts(), max_tokens=8) == staged_expected("gpt")
    assert engine.programs.num_groups == 2 and set(engine.plans) == {"decode", "prefill_8", "prefill_24"}
    assert len({pid for _, pid in engine.programs.places} | {os.getpid()}) == 3
    layout = staged_layout("gpt", "2x2:cpu")
    assert held(engine) == [[planned(layout, 0)] * 2, [planned(layout, 1)] * 2]
    drawn = [al.serve.Sampling(temperature=0.5 * (n % 2), seed=n) for n in range(len(staged_prompts()))]
    model, params = model_and_params("gpt")
    with al.serve.Engine(model, params, layout, **SIZES) as local:
        answers = local.generate(staged_prompts(), max_tokens=8, sampling=drawn)
    assert engine.generate(staged_prompts(), max_tokens=8, sampling=drawn) == answers


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_stage_that_is_killed_under_load(engine: al.serve.Engine, number: int) -> None:
    """The first, whose values the other waits for, and the last, which tells the tokens."""
    kill_actor_under_load(engine, number, staged_prompts(), staged_expected("gpt"), max_tokens=8)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["pull", "device_put"])
def test_stages_of_several_hosts_each(
    ray_session: None, engine: al.serve.Engine, transport: Any, tmp_path: Path
) -> None:
    """Four actors: two jobs, or one of all. The layout is read from a file, parameters, rows of which are on each stage, from a
    checkpoint of another plan; the actors end with the engine."""
    engine.close()  # its place is needed; this is the last test that may
    model, params = model_and_params("llama")
    step = al.parallelize(lambda state: state, cluster=al.Cluster.parse("1x1:cpu"))
    step.plan({"params": params})
    step.save(tmp_path / "checkpoints", {"params": params}, step=1)
    stored = al.serve.StoredParams(tmp_path / "checkpoints", jax.eval_shape(lambda: params))
    layout = staged_layout("llama", "4x1:cpu")
    layout.save(tmp_path / "layout.json")
    read = al.SharedLayout.load(tmp_path / "layout.json")
    with al.serve.Engine(model, stored, read, executor=replace(WATCHED, transport=transport), **SIZES) as made:
        assert made.generate(staged_prompts(), max_tokens=8) == staged_expected("llama")
        pids = [pid for _, pid in made.programs.places]
        assert held(made) == [[planned(layout, stage)] for stage in (0, 0, 1, 1)]
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def other_params() -> Any:
    """Not the same in two processes."""
    made = model_and_params("gpt")[0].init_params(jax.random.key(3))
    return made | {"positions": made["positions"].at[0, 0].set(os.getpid())}


@pytest.mark.slow
def test_parameters_that_differ_between_stages_are_refused(ray_session: None, engine: al.serve.Engine) -> None:
    engine.close()
    model, _ = model_and_params("gpt")
    with pytest.raises(
        ServeError,
        match=r"made other values of 'positions' in worker 1 \(host 1, stage 1\) than in worker 0 .*test_staged_hosts",
    ):
        al.serve.Engine(model, other_params, staged_layout("gpt", "2x2:cpu"), executor=WATCHED, **SIZES)


class Scaled(GPT):
    """Every layer reads a number and a table of integers."""

    def init_params(self, key: Any) -> Any:
        return {**super().init_params(key), "scale": jax.numpy.float32(0.5), "table": jax.numpy.full(4, 2, "int32")}

    def _scaled(self, params: Any) -> Any:
        by = params["scale"] * params["table"][1]
        return {k: jax.tree.map(lambda w: w * by, v) for k, v in params.items() if k not in ("scale", "table")}

    def prefill(self, params: Any, cache: Any, tokens: Any, lengths: Any) -> Any:
        return super().prefill(self._scaled(params), cache, tokens, lengths)

    def decode(self, params: Any, cache: Any, tokens: Any) -> Any:
        return super().decode(self._scaled(params), cache, tokens)


@pytest.mark.slow
def test_numbers_that_all_stages_read(ray_session: None, engine: al.serve.Engine) -> None:
    """No stage sends them: each has its own."""
    engine.close()
    model = Scaled(model_and_params("gpt")[0].config)
    params = model.init_params(jax.random.key(3))
    graphs = al.serve.graphs(model, params, **STAGED_SIZES)
    cluster, options = al.Cluster.parse("2x2:cpu"), al.PlanOptions(num_stages=2)
    layout = al.plan_shared(graphs, shared=("0", "1"), cluster=cluster, donate_argnums=1, options=options)
    with al.serve.Engine(model, params, layout, executor=WATCHED, **SIZES) as made:
        assert made.generate(staged_prompts(), max_tokens=8) == staged_expected("gpt")  # 0.5 * 2


class Locked(GPT):
    """The same functions."""

    def __init__(self, config: Any, kept: Any) -> None:
        super().__init__(config)
        object.__setattr__(self, "kept", kept)


@pytest.mark.slow
def test_a_model_that_cannot_be_sent(ray_session: None, engine: al.serve.Engine, tmp_path: Path) -> None:
    engine.close()
    model, params = model_and_params("gpt")
    layout = staged_layout("gpt", "2x2:cpu")
    with (tmp_path / "log").open("w") as file:
        for kept, why in (
            (threading.Lock(), "lock"),
            (file, "files that are not opened for reading"),
            (ctypes.pointer(ctypes.c_int(1)), "containing pointers"),
        ):
            locked = Locked(model.config, kept)
            with pytest.raises(ServeError, match=rf"cannot be sent to the actors: .*{why}.*test_staged_hosts"):
                al.serve.Engine(locked, params, layout, executor=WATCHED, **SIZES)


def test_what_cannot_be() -> None:
    """Nothing is started."""
    model, params = model_and_params("gpt")
    layout = staged_layout("gpt", "2x2:cpu")
    with pytest.raises(ServeError, match=r"a layout of 2 stages was given with num_stages=4.*test_staged_hosts"):
        al.serve.Engine(model, params, layout, executor="ray", num_stages=4, **SIZES)
    with pytest.raises(ServeError, match=r"the cluster 4x8:cpu was given with a layout for 2x2:cpu.*test_staged_hosts"):
        al.serve.Engine(model, params, layout, executor="ray", cluster=al.Cluster.parse("4x8:cpu"), **SIZES)
    # A cache that comes back on another stage would be gone from where the next call takes it.
    decode = layout.plans["decode"]
    number = next(i for i, leaf in enumerate(decode.outputs) if leaf.path == "out/1/block0/key")
    moved = [replace(leaf, stage=1) if i == number else leaf for i, leaf in enumerate(decode.outputs)]
    plans = {**layout.plans, "decode": replace(decode, outputs=tuple(moved))}
    for executor in ("ray", "local"):
        with pytest.raises(
            ServeError,
            match=re.escape(
                "'decode' takes the leaf of the cache '1/block0/key' as [_,x,_,_] on (x=2), and returns it as"
            )
            + r" \[_,x,_,_\] on \(x=2\) from device 2.*test_staged_hosts",
        ):
            al.serve.Engine(model, params, Given(plans), executor=executor, **SIZES)
    with pytest.raises(ServeError, match=r"layout 0 of the list has 2 stages of its own.*test_staged_hosts"):
        al.serve.Engine(model, params, [layout, layout], executor="ray", num_stages=2, **SIZES)
    with pytest.raises(ServeError, match=r"the cluster 1x8:cpu was given with a layout for 2x2:cpu"):
        al.serve.Engine(model, params, [layout], cluster=al.Cluster.parse("1x8:cpu"), **SIZES)
