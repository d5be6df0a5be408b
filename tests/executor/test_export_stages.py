"""``plan.export`` of a pipeline: every program of every stage and what is done with them, so that anybody can run the step."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import ClusterError, ExportError
from alpa_lite.executor.calls import calls_csv, parse_calls
from alpa_lite.executor.launch import LaunchRequest, launch
from alpa_lite.executor.load_stages import ExportedStages
from alpa_lite.executor.staged_array import StagedArray
from tests.executor.pipeline_steps import MICROBATCHES, arguments, loss_fn, scanned_loss_fn, step_of

pytest.importorskip("flatbuffers", reason="flatbuffers is not installed: pip install 'alpa-lite[export]'")
pytestmark = pytest.mark.medium

CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "unequal submeshes": (loss_fn, {"submeshes": ((1, 2), (1, 6)), "schedule": "zb-h1"}),
    "scanned layers": (scanned_loss_fn, {"num_stages": 2, "schedule": "1f1b"}),
    "stages that share a submesh": (loss_fn, {"num_stages": 4, "schedule": "interleaved-1f1b", "num_chunks": 2}),
}


@cache
def parallel(case: str) -> Any:
    loss, options = CASES[case]
    chosen = al.PlanOptions(num_microbatches=MICROBATCHES, **options)
    return al.parallelize(step_of(loss), cluster=al.Cluster.parse("1x8:cpu"), options=chosen, donate_argnums=0)


def given(case: str) -> Any:
    return arguments(stacked=case == "scanned layers")


PARAMS = [pytest.param(case, marks=[pytest.mark.slow] * (case != "scanned layers")) for case in CASES]


@pytest.fixture(scope="module", params=PARAMS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp("export") / "out"
    state, batch = given(request.param)
    parallel(request.param).plan(state, batch).export(step_of(CASES[request.param][0]), out, state, batch)
    return request.param, out


def part_of(out: Path, rank: int) -> ExportedStages:
    part = al.load_export(out, rank)
    assert isinstance(part, ExportedStages)
    return part


def whole(out: Path, path: str) -> np.ndarray:
    """An argument, put together from the slices of all ranks that have it."""
    parts = [part for rank in range(8) if path in (part := part_of(out, rank)).slices]
    leaf = next(leaf for leaf in parts[0].plan.inputs if leaf.path == path)
    value = np.zeros(leaf.value.shape, leaf.value.dtype)
    for part in parts:
        value[tuple(slice(*bounds) for bounds in part.slices[path])] = part.parameters[path]
    return value


def leaves_of(tree: Any) -> list[Any]:
    parts = [leaf.parts if isinstance(leaf, StagedArray) else (leaf,) for leaf in jax.tree.leaves(tree)]
    return [np.asarray(part) for of_leaf in parts for part in of_leaf]


def test_a_folder_runs_as_the_step_does(exported: tuple[str, Path]) -> None:
    """From the files alone, for two steps, bit for bit."""
    case, out = exported
    part = part_of(out, 0)
    step = part.step()
    leaves: list[Any] = [whole(out, path) for path in part.plan.input_paths]
    state, batch = jax.tree.map(jnp.copy, given(case))
    for _ in range(2):
        results = step(*leaves)
        state, loss = parallel(case)(state, batch)
        for path, ours, theirs in zip(part.plan.output_paths, results, leaves_of((state, loss)), strict=True):
            np.testing.assert_array_equal(np.asarray(ours), theirs, err_msg=path)
        for argument, result in part.manifest.state:
            leaves[argument] = results[result]
    for leaf, planned in zip(results, part.plan.outputs, strict=True):
        stage = part.plan.stages[planned.stage]
        assert {d.id for d in leaf.devices()} == set(
            range(stage.first_device, stage.first_device + stage.mesh.num_devices)
        )


def test_the_files(exported: tuple[str, Path]) -> None:
    """What is there to read: the plan, what is done in which order, who has which slices."""
    case, out = exported
    plan = parallel(case).plan(*given(case))
    assert al.load_plan(out / "plan.json") == plan
    assert (out / "scheme.txt").read_text().startswith(str(plan))
    text = (out / "instructions.csv").read_text()
    calls = parse_calls(text)
    assert calls_csv(calls) == text
    runs = [(c.stage, c.program, c.microbatch) for c in calls if c.kind == "run"]
    assert len(runs) == len(set(runs))
    for stage in range(len(plan.stages)):
        assert [m for s, name, m in runs if (s, name) == (stage, "forward")] == list(range(MICROBATCHES))
        assert (out / f"stage_{stage}" / "program.txt").is_file()
    instructions = (out / "instructions.txt").read_text()
    assert instructions.count("RUN") == sum(len(column) for column in _columns(case))
    specs = json.loads((out / "partition_specs.json").read_text())
    assert specs["stage_of"] == {leaf.path: leaf.stage for leaf in (*plan.inputs, *plan.outputs)}
    assert [stage["first_device"] for stage in specs["stages"]] == [stage.first_device for stage in plan.stages]


def _columns(case: str) -> Any:
    return parallel(case)._step(given(case), {}).step.schedule.columns


def test_a_rank_has_what_is_of_its_stages(exported: tuple[str, Path]) -> None:
    _, out = exported
    for rank in (0, 7):
        part = part_of(out, rank)
        homes = {leaf.path: leaf.stage for leaf in part.plan.inputs}
        assert set(part.slices) == {path for path, stage in homes.items() if stage in part.stages}
        programs = part.programs("cpu")
        assert {stage for stage, _ in programs} == set(part.stages)
        for (stage, _), program in programs.items():
            assert program.nr_devices == part.plan.stages[stage].mesh.num_devices


def test_what_does_not_fit_is_refused(exported: tuple[str, Path]) -> None:
    _, out = exported
    with pytest.raises(ClusterError, match="has 8 ranks, 4 devices"):
        part_of(out, 0).step(jax.devices()[:4])
    with pytest.raises(ExportError, match="is a pipeline"):
        launch(LaunchRequest(folder=str(out)))


def test_a_program_that_was_changed_is_found(exported: tuple[str, Path], tmp_path: Path) -> None:
    case, _ = exported
    out = tmp_path / "out"
    shapes = jax.eval_shape(lambda: given(case))
    parallel(case).plan(*shapes).export(step_of(CASES[case][0]), out, *shapes)
    part = part_of(out, 0)
    assert not part.parameters
    changed = next((out / "stage_0").glob("forward_cpu*"))
    changed.write_bytes(changed.read_bytes()[:-1] + b"x")
    with pytest.raises(ExportError, match="was changed"):
        part.step()
