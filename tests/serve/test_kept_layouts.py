"""Layouts on disk: the next start reads what it would plan, and plans where anything is another one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.plan.encode import encode_plan
from alpa_lite.serve import layout as layouts
from alpa_lite.serve.kept_layouts import _MOST, kept_files
from tests.serve.engines import model_and_params
from tests.serve.test_odd_models import VOCABULARY, Sums

ODD: dict[str, Any] = {"slots": 2, "max_length": 8, "buckets": (4,)}
FEW: dict[str, Any] = {"slots": 4, "max_length": 32, "buckets": (8,)}
CLUSTER = al.Cluster.parse("1x2:cpu")


class Differences(Sums):
    """The same leaves, another function."""

    def decode(self, params: Any, cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        logits, cache = super().decode(params, cache, tokens)
        return jnp.cos(logits), cache


def graphs(model: Any, **sizes: Any) -> Any:
    params = {"table": jnp.ones((VOCABULARY, 16)), "out": jnp.ones((16, VOCABULARY))}
    return al.serve.graphs(model, params, **ODD | sizes)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was planned since."""
    found: list[Any] = []

    def plan(*args: Any) -> al.SharedLayout:
        found.append(plan_graphs(*args))
        return found[-1]

    plan_graphs = layouts.plan_graphs
    monkeypatch.setattr(layouts, "plan_graphs", plan)
    return found


def texts(plans: Any) -> dict[str, bytes]:
    return {name: encode_plan(plan) for name, plan in plans.items()}


def test_the_next_start_reads_what_it_would_plan(planned: list[Any], tmp_path: Path) -> None:
    given = graphs(Sums())
    first, _ = layouts.plans_of(given, None, CLUSTER, str(tmp_path / "made"))
    again, traced = layouts.plans_of(given, None, CLUSTER, str(tmp_path / "made"))
    assert len(planned) == 1
    assert texts(again) == texts(first) == texts(planned[0].plans)
    assert traced is not None and traced.keys() == given.keys()
    assert again["decode"].in_specs == first["decode"].in_specs, "a plan of a file alone has no pytrees"
    assert layouts.plans_of(given, first, CLUSTER, str(tmp_path / "made")) == (first, None), (
        "what the user gives is taken"
    )
    layouts.plans_of(given, None, CLUSTER)  # without a folder
    assert len(planned) == 2


def test_whatever_a_plan_depends_on_names_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def names() -> list[Path]:
        given = [graphs(Sums()), graphs(Sums(), slots=4), graphs(Sums(), buckets=(8,))]
        found = [kept_files(str(tmp_path), one, CLUSTER) for one in given]
        found += [kept_files(str(tmp_path), given[0], al.Cluster.parse(text)) for text in ("1x4:cpu", "1x2:h100-sxm")]
        with jax.enable_x64(True):
            found.append(kept_files(str(tmp_path), given[0], CLUSTER))
        return [file for files in found for file in files]

    before = names()
    assert names() == before
    monkeypatch.setattr("alpa_lite.serve.kept_layouts._planner", lambda: "another version")
    assert len({*before, *names()}) == 2 * len(before)


@pytest.mark.medium
def test_parts_with_the_same_leaves_keep_a_layout_each(planned: list[Any], tmp_path: Path) -> None:
    given = graphs(Sums()), graphs(Differences())
    files = kept_files(str(tmp_path), given[0], CLUSTER)
    assert kept_files(str(tmp_path), given[1], CLUSTER) == files, "else this test says nothing"
    for one, count in ((0, 1), (1, 2), (1, 2), (0, 2), (1, 2)):
        plans, _ = layouts.plans_of(given[one], None, CLUSTER, str(tmp_path))
        assert len(planned) == count
        assert texts(plans) == texts(planned[one].plans)
    assert sorted(tmp_path.iterdir()) == sorted(files[:2])


@pytest.mark.medium
def test_a_damaged_file_is_made_anew_and_files_stay_few(planned: list[Any], tmp_path: Path) -> None:
    given = graphs(Sums()), graphs(Differences())
    files = kept_files(str(tmp_path), given[0], CLUSTER)
    layouts.plans_of(given[0], None, CLUSTER, str(tmp_path))
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[:-100])
    for _ in range(2):
        layouts.plans_of(given[0], None, CLUSTER, str(tmp_path))
        assert (len(planned), files[0].read_bytes()) == (2, whole)
    fewer = al.SharedLayout.load(files[0])
    parts = {name: {"prefill_4": getattr(fewer, name)["prefill_4"]} for name in ("plans", "weights", "own", "shared")}
    replace(fewer, **parts, lower_bound=0.0).save(files[0])  # whole, and of other graphs
    layouts.plans_of(given[0], None, CLUSTER, str(tmp_path))
    assert (len(planned), files[0].read_bytes()) == (3, whole)
    for file in files[1:]:
        file.write_bytes(whole)
    layouts.plans_of(given[1], None, CLUSTER, str(tmp_path))
    assert len(planned) == 4 and len(list(tmp_path.iterdir())) == _MOST
    layouts.plans_of(given[1], None, CLUSTER, str(tmp_path))
    assert len(planned) == 4


def test_a_folder_that_cannot_be_written_to_is_said(planned: list[Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"layout is not kept, so that the next start plans it again: .*file"):
        plans, _ = layouts.plans_of(graphs(Sums()), None, CLUSTER, str(tmp_path / "file"))
    assert texts(plans) == texts(planned[0].plans)


@pytest.mark.medium
@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_engine_answers_the_same_with_a_layout_that_it_reads(
    num_stages: int, planned: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("alpa_lite.serve.engine._keep_compiled", lambda folder: None)  # JAX's is for the whole process
    model, params = model_and_params("gpt")
    cluster = CLUSTER if num_stages == 1 else None
    answers = []
    for _ in range(2):
        given = {"num_stages": num_stages, "cluster": cluster, "compile_cache": tmp_path}
        with al.serve.Engine(model, params, **given, **FEW) as engine:
            answers.append((engine.generate([[1, 2, 3], [4]], max_tokens=6), texts(engine.plans)))
    assert answers[0] == answers[1]
    assert len(planned) == num_stages == len(list(tmp_path.iterdir()))
