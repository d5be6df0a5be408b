"""hidet 335: the rows of its table on parts on disk and their launcher, each a test of that name.

``docs/export.md`` lists them with hidet's configuration keys beside ours.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

import alpa_lite as al
from alpa_lite.cli import main
from tests.acceptance.models import mlp, mlp_args, random_like

pytest.importorskip("flatbuffers", reason="flatbuffers is not installed: pip install 'alpa-lite[export]'")

SHAPES = mlp_args(seq_len=8, width=32)


def hidet_plan(num_devices: int, **options: Any) -> al.Plan:
    """The search as hidet sets it up: bytes of the weights limited, so that they must be split."""
    weight_bytes = sum(4 * math.prod(x.shape) for x in jax.tree.leaves(SHAPES[0]))
    budget = weight_bytes / num_devices * 1.05
    settings = al.PlanOptions(costs="hidet", memory_budget_bytes=budget, time_limit_s=30, **options)
    return al.plan(mlp, *SHAPES, cluster=al.Cluster.parse(f"1x{num_devices}:cpu"), options=settings)


@pytest.mark.medium
def test_partition_and_load_partition(tmp_path):
    """Original graph text, plan file, readable scheme list, and one part per rank that no other rank's part overlaps."""
    plan = hidet_plan(2)
    weights = random_like(SHAPES[0], seed=0)
    plan.export(mlp, tmp_path / "out", weights, SHAPES[1])
    names = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert {"program.txt", "plan.json", "scheme.txt", "step_cpu.jax_export", "manifest.json"} <= names
    assert {n.partition("/")[0] for n in names if n.startswith("rank_")} == {"rank_0", "rank_1"}
    assert len(re.findall(r"= dot_general\(", (tmp_path / "out" / "program.txt").read_text())) == 2
    scheme = (tmp_path / "out" / "scheme.txt").read_text()
    split = [leaf for leaf in plan.inputs if not leaf.spec.is_replicated]
    assert split and all(f"shard    {leaf.path}: {leaf.spec}" in scheme for leaf in split)
    assert al.load_plan(tmp_path / "out" / "plan.json") == plan

    parts = [al.load_export(tmp_path / "out", rank) for rank in range(2)]
    stored = sum(value.nbytes for value in parts[0].parameters.values())
    whole = dict(zip(plan.input_paths, jax.tree.leaves(weights), strict=False))
    assert 0 < stored <= 1.05 * sum(value.nbytes for value in whole.values()) / 2
    for path, value in whole.items():
        for part in parts:
            tile = tuple(slice(*bounds) for bounds in part.slices[path])
            np.testing.assert_array_equal(part.parameters[path], np.asarray(value)[tile])


def test_partition_out_dir_is_an_argument_and_not_a_key_of_the_configuration(tmp_path):
    with pytest.raises(TypeError, match="out_dir"):
        hidet_plan(2, out_dir=str(tmp_path))
    (tmp_path / "mine").write_text("notes")
    with pytest.raises(al.AlpaLiteError, match=r"is not empty \(mine\)\..*out_dir.*overwrite=True"):
        hidet_plan(2).export(mlp, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_partition_configuration_has_hidets_keys():
    """Device count, memory budget, search seconds, parallel kind; verbosity below."""
    assert hidet_plan(4).mesh.num_devices == 4
    assert dict(hidet_plan(2).options)["time_limit_s"] == 30
    with pytest.raises(al.AlpaLiteError, match="budget"):
        hidet_options = al.PlanOptions(costs="hidet", memory_budget_bytes=16)
        al.plan(mlp, *SHAPES, cluster=al.Cluster.parse("1x2:cpu"), options=hidet_options)
    # hidet's kinds: data parallel keeps the weights whole, tensor parallel the batch.
    data, tensor = {"0/**": P(), "1": P("x")}, {"0/*/weight": P(None, "x"), "1": P()}
    for pins in (data, tensor):
        plan = al.plan(mlp, *SHAPES, cluster=al.Cluster.parse("1x2:cpu"), pins=pins)
        split = {leaf.path for leaf in plan.inputs if not leaf.spec.is_replicated}
        assert split == ({"1"} if pins is data else {"0/fc1/weight", "0/fc2/weight"})


def test_partition_configuration_solver_verbosity(capsys):
    quiet = hidet_plan(2)
    assert capsys.readouterr().err == ""
    assert hidet_plan(2, verbose=True) == quiet
    said = capsys.readouterr().err
    assert re.search(r"alpa_lite: planning \d+ ops on mesh \(x=2\)\n", said)
    assert re.search(r"alpa_lite: mesh \(x=2\): optimal, objective .*, lower bound .*, after \d", said)


@pytest.mark.parametrize(
    "key", ["ngpus", "mem_budget", "search_max_seconds", "solver_verbose", "parallelism", "out_dir"]
)
def test_partition_unknown_key_is_an_error(key):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{key}'"):
        al.PlanOptions(**{key: 1})


@pytest.mark.parametrize(
    "num_ranks",
    [
        pytest.param(1, marks=pytest.mark.medium),
        pytest.param(2, marks=[pytest.mark.medium, pytest.mark.slow]),
        pytest.param(4, marks=pytest.mark.slow),
    ],
)
def test_launcher(num_ranks, tmp_path):
    """One command starts n ranks on n forced CPU devices, ends with 0, and gives the output of one process."""
    weights, x = random_like(SHAPES[0], seed=0), random_like(SHAPES[1], seed=1)
    hidet_plan(num_ranks).export(mlp, tmp_path / "out", weights, SHAPES[1])
    np.savez(tmp_path / "inputs.npz", **{"1": x})
    command = ["launch", str(tmp_path / "out"), "--inputs", str(tmp_path / "inputs.npz")]
    found = {}
    for name, choice in {"ranks": ["--ranks", str(num_ranks)], "one": ["--single-process"]}.items():
        result = CliRunner().invoke(main, [*command, *choice, "--out", str(tmp_path / f"{name}.npz")])
        assert result.exit_code == 0, result.output
        found[name] = np.load(tmp_path / f"{name}.npz")["out"]
    np.testing.assert_allclose(found["ranks"], found["one"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found["ranks"], jax.jit(mlp)(weights, x), rtol=1e-5, atol=1e-5)
    ranks = json.loads((tmp_path / "out" / "manifest.json").read_text())["num_ranks"]
    assert ranks == num_ranks
