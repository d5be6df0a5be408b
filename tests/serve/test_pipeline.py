"""A model in stages on parts of the devices: the same logits, tokens and statistics as on one mesh."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import ServeError
from alpa_lite.serve.picked import check_all_picked
from alpa_lite.serve.pipeline import Pipeline, cut_by_model
from examples.serving_models import GPT, MODELS
from tests.compiling import QUICK_COMPILE

pytestmark = pytest.mark.medium
SIZES = {"slots": 4, "max_length": 32, "buckets": (8, 24)}


@cache
def model_and_params(name: str = "gpt") -> tuple[Any, Any]:
    model = MODELS[name]("small")
    return model, jax.jit(model.init_params, compiler_options=QUICK_COMPILE)(jax.random.key(3))


@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_two_stages_give_the_logits_of_the_unsharded_model_on_their_own_devices(name: str) -> None:
    model, params = model_and_params(name)
    expected = jax.jit(model.logits, compiler_options=QUICK_COMPILE)
    pipeline = cut_by_model(model, params, num_stages=2, num_groups=2, **SIZES)
    text = np.random.default_rng(0).integers(0, 256, (SIZES["slots"], 32)).astype(np.int32)
    wanted = np.asarray(expected(params, text))
    lengths = np.array([3, 24, 8, 1])
    for slot, length in enumerate(lengths):
        bucket = 8 if length <= 8 else 24
        logits = pipeline.prefill_logits(bucket, slot, text[slot, :length])
        np.testing.assert_allclose(logits[0], wanted[slot, length - 1], rtol=1e-4, atol=1e-5)
    for _ in range(5):
        logits = pipeline.decode_logits(text[np.arange(4), lengths])
        lengths += 1
        np.testing.assert_allclose(logits, wanted[np.arange(4), lengths - 1], rtol=1e-4, atol=1e-5)
    for number, stage in enumerate(pipeline.stages):
        devices = set(jax.devices()[4 * number : 4 * number + 4])
        assert all(x.sharding.device_set <= devices for x in jax.tree.leaves((stage.params, stage.caches)))
    held = [set(stage) for stage in pipeline.params]
    if name == "gpt":
        assert held[0] == {"block0", "tokens", "positions"} and held[1] == {"block1", "LayerNorm_0", "head"}
    else:
        assert held[0] == {"blocks", "embed"} and held[1] == {"blocks", "norm", "head"}


@pytest.mark.slow
def test_an_engine_of_two_stages_answers_as_one_of_one_mesh() -> None:
    model, params = model_and_params()
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 256, length) for length in (1, 8, 9, 24, 3, 17, 6)]
    drawn = [al.serve.Sampling(temperature=0.5 * (n % 2), seed=n) for n in range(len(prompts))]
    answers = []
    for num_stages in (1, 2):
        with al.serve.Engine(model, params, num_stages=num_stages, **SIZES) as engine:
            answers.append(engine.generate(prompts, max_tokens=8, sampling=drawn))
            seen = engine.statistics()
            assert seen.finished == {"length": 7} and seen.generated_tokens == 56
    assert answers[0] == answers[1]
    assert set(engine.plans) == {f"{k}/{name}" for k in (0, 1) for name in ("decode", "prefill_8", "prefill_24")}


def test_while_a_stage_works_on_a_group_the_one_before_has_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noting:
        def __init__(self, number: int) -> None:
            self.number = number

        def decode_call(self, x: Any, group: int) -> Any:
            order.append((self.number, group))
            return [*x, self.number]

    order: list[tuple[int, int]] = []
    pipeline = object.__new__(Pipeline)
    pipeline.num_groups, pipeline.per_group, pipeline.stages = 3, 1, [Noting(0), Noting(1)]
    assert pipeline._decoded(np.array([7, 8, 9])) == [[7, 0, 1], [8, 0, 1], [9, 0, 1]]
    assert order == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2)]


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    model, params = model_and_params()
    with pytest.raises(ServeError, match=r"num_stages=3 was given for 8 devices.*test_pipeline"):
        al.serve.Engine(model, params, num_stages=3, **SIZES)
    with pytest.raises(ServeError, match=r"num_stages=2 was given, and object has no split.*StagedModel"):
        al.serve.Engine(object(), params, num_stages=2, **SIZES)
    with pytest.raises(ServeError, match=r"4 slots were given in num_groups=3"):
        cut_by_model(model, params, num_stages=2, num_groups=3, **SIZES)

    llama = MODELS["llama"]("small")
    made = llama.init_params(jax.random.key(0))
    keep = al.parallelize(lambda state: state)
    keep.plan({"params": made})
    keep.save(tmp_path, {"params": made})
    stored = al.serve.StoredParams(tmp_path, jax.eval_shape(lambda: made), path="params")
    with pytest.raises(
        ServeError, match=r"cannot be picked of shapes alone: TypeError.*test_pipeline.*Load the parameters"
    ):
        al.serve.Engine(llama, stored, num_stages=2, **SIZES)

    class Wrong(GPT):
        def split(self, num_stages: int) -> list:
            return super().split(num_stages + 1)

    with pytest.raises(ServeError, match=r"Wrong\.split\(2\) gave 3 parts"):
        al.serve.Engine(Wrong(model.config), params, num_stages=2, **SIZES)

    for wrong in (None, 2, [super(Wrong, Wrong(model.config)).split(2)[0][0]] * 2, [("part", "pick")] * 2):

        class Nonsense(GPT):
            def split(self, num_stages: int) -> Any:
                return wrong  # noqa: B023 - used before the next one

        with pytest.raises(ServeError, match=r"Nonsense\.split\(2\) gave .*list of 2 pairs.*test_pipeline"):
            al.serve.Engine(Nonsense(model.config), params, num_stages=2, **SIZES)


def test_a_cut_that_leaves_a_layer_out_is_refused() -> None:
    model, params = model_and_params("llama")
    layers = model.config.num_layers

    class Short(type(model)):  # type: ignore[misc]
        def split(self, num_stages: int) -> Any:
            *parts, (last, pick) = super().split(num_stages)
            short = replace(last, last=layers - 1)
            return [*parts, (last, lambda p: short._picked(p) | {"rest": pick({**p, "blocks": p["norm"]})})]

    with pytest.raises(
        ServeError, match=rf"Short\.split\(2\) leaves parameters out: {layers - 1} of the {layers} rows of .*test_pip"
    ):
        al.serve.Engine(Short(model.config), params, num_stages=2, **SIZES)


def test_rows_that_no_part_picks_are_found() -> None:
    params = {"rows": np.zeros((6, 2)), "table": np.zeros((3, 2))}

    def picks(*runs: slice) -> list[Any]:
        return [lambda p, run=run: {"rows": p["rows"][run], "table": p["table"]} for run in runs]

    check_all_picked("M", params, picks(slice(0, 3), slice(3, 6)))
    check_all_picked("M", params, picks(slice(2, 6), slice(0, 4)))
    check_all_picked("M", params, [lambda p: p["rows"] * 2, lambda p: p["table"]])  # all may be in what is computed
    check_all_picked("M", params, [lambda p: {}["rows"], lambda p: p])  # fails later, as picks of arrays may not
    with pytest.raises(ServeError, match=r"M\.split\(2\) leaves parameters out: 2, 5 of the 6 rows of 'params/rows'"):
        check_all_picked("M", params, [*picks(slice(0, 2)), lambda p: jax.lax.slice_in_dim(p["rows"], 3, 5)])
    with pytest.raises(ServeError, match=r"split\(1\) leaves parameters out: 'params/table' is in no part"):
        check_all_picked("M", params, [lambda p: p["rows"]])
