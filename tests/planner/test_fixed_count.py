"""The number of stages is given, and their layers, submeshes and meshes are searched."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import alpa_lite as al
from alpa_lite.errors import AlpaLiteError, LayerError, MemoryBudgetError
from tests.planner.test_stage_search import plan


@pytest.mark.medium
def test_no_cut_into_as_many_stages_is_better():
    searched = plan(num_stages=3, submeshes="auto")
    by_hand = [
        plan(submeshes=tuple((1, n) for n in sizes), stage_layers=layers)
        for sizes in sorted(set(itertools.permutations((1, 1, 2))))
        for layers in sorted(set(itertools.permutations((1, 1, 2))))
    ]
    assert len(searched.stages) == 3
    assert searched.objective == pytest.approx(min(p.objective for p in by_hand), rel=1e-6)
    assert [(row.num_stages, row.status) for row in searched.stage_counts] == [(3, "planned")]


@pytest.mark.medium
def test_one_stage_is_one_mesh():
    assert plan(num_stages=1, submeshes="auto").objective == plan(num_stages=1).objective


@pytest.mark.medium
def test_no_cut_fits():
    with pytest.raises(
        MemoryBudgetError, match=r"no cut of 4 layers into 2 stages on 1x4:h100-sxm .* fits 1\.00 MiB per device"
    ):
        plan(num_stages=2, submeshes="auto", memory_budget_bytes=2**20)


@pytest.mark.parametrize(
    ("options", "error", "parts"),
    [
        ({"num_stages": 5}, LayerError, r"num_stages=5 was given for the 4 devices of 1x4:h100-sxm"),
        ({"num_stages": 3, "num_layers": 2}, LayerError, r"num_stages=3 for a step of 2 layers.*Mark more layers"),
        ({"num_stages": 2, "stage_layers": (2, 2)}, AlpaLiteError, r"submeshes='auto' was given beside stage_layers"),
        ({"num_stages": 2, "mesh_shape": (2,)}, AlpaLiteError, r"beside .* mesh_shape. .* Leave these out"),
        ({"num_stages": 2, "num_microbatches": 1}, AlpaLiteError, r"num_microbatches=1, .* at least 2 microbatches"),
        ({"num_stages": 2, "schedule": "zb-h1"}, AlpaLiteError, r"schedule='zb-h1'.*'gpipe', '1f1b'"),
        ({"num_stages": 2, "submeshes": "best"}, AlpaLiteError, r"submeshes='best' was given; it must be a tuple"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], parts: str):
    with pytest.raises(error, match=parts):
        plan(**{"submeshes": "auto", **options})


@pytest.mark.medium
def test_the_option_is_in_the_plan_file(tmp_path):
    made = plan(num_stages=3, submeshes="auto")
    made.save(tmp_path / "plan.json")
    again = al.load_plan(tmp_path / "plan.json")
    assert dict(again.options)["submeshes"] == "auto"
    assert again == made
