"""A server whose engine is on several hosts, by a layout file and a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import alpa_lite as al
from benchmarks.ray_session import free_port
from tests.serve.clients import PROMPTS, ask, kill_under_load
from tests.serve.served_target import target_of_two_layers as target

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'alpa-lite[serve]'")
pytestmark = [pytest.mark.ray, pytest.mark.slow]

SIZES: dict[str, Any] = {"slots": 4, "max_length": 48, "buckets": (8, 32)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A layout for two hosts, and a checkpoint of other parameters than the target's."""
    model = target().model
    folder = tmp_path_factory.mktemp("files")
    shapes = jax.eval_shape(model.init_params, jax.random.key(0))
    layout = al.plan_shared(
        al.serve.graphs(model, shapes, **SIZES),
        shared=("0", "1"),
        cluster=al.Cluster.parse("2x1:cpu"),
        donate_argnums=1,
        options=al.PlanOptions(mesh_shape=(2,)),
    )
    layout.save(folder / "layout.json")
    step = al.parallelize(lambda state: state, cluster=al.Cluster.parse("1x1:cpu"))
    state = {"params": model.init_params(jax.random.key(7))}
    step.plan(state)
    step.save(folder / "checkpoints", state, step=1)
    return folder / "layout.json", folder / "checkpoints"


@pytest.fixture(scope="module")
def expected(files: tuple[Path, Path]) -> list[list[int]]:
    """Greedy answers of an engine in this process, with the parameters of the checkpoint."""
    model = target().model
    with al.serve.Engine(model, model.init_params(jax.random.key(7)), **SIZES) as engine:
        return engine.generate(PROMPTS, max_tokens=12)


@pytest.fixture(scope="module")
def port(ray_session: None, files: tuple[Path, Path]) -> Iterator[int]:
    from alpa_lite.serve import deployment

    port, (layout, checkpoint) = free_port(), map(str, files)
    deployment.start(target, al.serve.ServerSettings(port=port, layout=layout, checkpoint=checkpoint, **SIZES))
    yield port
    deployment.stop()


@pytest.mark.parametrize("planned", [False, True], ids=["cut by the model", "as planned"])
def test_stages_on_hosts_of_their_own(ray_session: None, tmp_path: Path, planned: bool) -> None:
    """Before the server of the other tests."""
    from alpa_lite.serve import deployment

    made = target()
    with al.serve.Engine(made.model, made.params, **SIZES) as engine:
        expected = engine.generate(PROMPTS, max_tokens=12)
    port = free_port()
    settings = al.serve.ServerSettings(port=port, cluster="2x1:cpu", num_stages=2, **SIZES)
    if planned:
        layout = al.plan_shared(
            al.serve.graphs(made.model, made.params, **SIZES | {"slots": 2}),
            shared=("0", "1"),
            cluster=al.Cluster.parse("2x1:cpu"),
            donate_argnums=1,
            options=al.PlanOptions(num_stages=2),
        )
        layout.save(tmp_path / "layout.json")
        settings = al.serve.ServerSettings(port=port, layout=str(tmp_path / "layout.json"), **SIZES)
    deployment.start(target, settings)
    try:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            status, raw = ask(port, prompt)
            assert (status, json.loads(raw)["tokens"]) == (200, tokens)
    finally:
        deployment.stop()


def test_answers_come_from_the_checkpoint_on_two_hosts(port: int, expected: list[list[int]]) -> None:
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        status, raw = ask(port, prompt)
        assert (status, json.loads(raw)["tokens"]) == (200, tokens)


@pytest.mark.parametrize("title", ["ray::WorkerActor", "ray::EngineActor"])
def test_an_actor_that_is_killed_under_load(port: int, expected: list[list[int]], title: str) -> None:
    kill_under_load(port, title, expected)
    from ray.util.placement_group import placement_group_table

    groups = placement_group_table().values()  # what the killed process held was given back
    assert [g["state"] for g in groups if g["name"].startswith("alpa_lite/")].count("CREATED") == 1
