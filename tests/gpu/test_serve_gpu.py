"""Serving on one GPU (``pytest -m gpu``): answers, parameters once, caches in place, memory as XLA takes it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from examples.serving_models import MODELS
from tests.costs.test_donated_memory import ARGS, ON_GPUS, STEPS
from tests.serve.engines import NAMES, pointers, prompts_of

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"slots": 4, "max_length": 32, "buckets": (4, 8, 16, 24)}


@pytest.fixture(autouse=True)
def whole_float32() -> Iterator[None]:
    """Without it float32 matmuls run in TF32, whose rounding is larger than what is asked for here."""
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    yield
    jax.config.update("jax_default_matmul_precision", before)


@pytest.mark.parametrize("name", NAMES)
def test_answers_and_logits_are_those_of_the_unsharded_model(name: str) -> None:
    model = MODELS[name]("small")
    params = jax.jit(model.init_params)(jax.random.key(3))
    whole = jax.jit(partial(model.logits, params))

    def logits(tokens: Any) -> np.ndarray:
        padded = np.zeros((1, SIZES["max_length"]), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(whole(padded))[0, : len(tokens)]

    prompts = prompts_of(1, 4, 5, 8, 9, 13, 16, 17, 24, 2)
    with al.serve.Engine(model, params, **SIZES) as engine:
        for prompt, tokens in zip(prompts, engine.generate(prompts, max_tokens=8), strict=True):
            for token, row in zip(tokens, logits([*prompt, *tokens])[len(prompt) - 1 : -1], strict=True):
                second, first = np.sort(row)[-2:]
                assert token == row.argmax() or first - second <= 1e-3
        programs = engine.programs
        for slot, prompt in enumerate(prompts[-SIZES["slots"] :]):
            bucket = next(b for b in engine.buckets if b >= prompt.size)
            found = programs.prefill_logits(bucket, slot, prompt)
            np.testing.assert_allclose(found[0], logits(prompt)[-1], rtol=1e-4, atol=1e-5)
        new = np.arange(SIZES["slots"], dtype=np.int32)
        found = np.asarray(programs.decode_logits(new))
        for slot, prompt in enumerate(prompts[-SIZES["slots"] :]):
            np.testing.assert_allclose(found[slot], logits([*prompt, slot])[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_there_once_and_caches_stay_where_they_are(name: str) -> None:
    model = MODELS[name]("small")
    host = jax.tree.map(np.asarray, jax.jit(model.init_params)(jax.random.key(3)))
    gc.collect()
    before = sum(x.nbytes for x in jax.live_arrays())
    with al.serve.Engine(model, host, **SIZES) as engine:
        engine.warm_up()
        programs = engine.programs
        gc.collect()
        held = sum(x.nbytes for x in jax.tree.leaves((engine.params, programs.cache)))
        assert sum(x.nbytes for x in jax.tree.leaves(engine.params)) == sum(x.nbytes for x in jax.tree.leaves(host))
        small = 4096  # numbers of slots and lengths, which are kept
        assert held <= sum(x.nbytes for x in jax.live_arrays()) - before <= held + small
        params_at, cache_at = pointers(engine.params), pointers(programs.cache)
        with jax.transfer_guard("disallow"), jax.transfer_guard_host_to_device("allow"):
            for bucket in (4, 24, 8, 16, 4):
                jax.block_until_ready(programs.prefill_logits(bucket, 1, np.ones(bucket, np.int32)))
                jax.block_until_ready(programs.decode_logits(np.ones(SIZES["slots"], np.int32)))
        assert pointers(engine.params) == params_at
        assert pointers(programs.cache) == cache_at, "a donated cache stays where it is"


@pytest.mark.parametrize("form", ON_GPUS)
def test_a_step_of_caches_takes_the_memory_that_is_planned(form: str) -> None:
    plan = al.plan(STEPS[form], *ARGS, cluster=al.Cluster.parse("1x1:h100-sxm"), donate_argnums=1)
    found = jax.jit(STEPS[form], donate_argnums=1, keep_unused=True).lower(*ARGS).compile().memory_analysis()
    peak = found.argument_size_in_bytes + found.temp_size_in_bytes
    peak += found.output_size_in_bytes - found.alias_size_in_bytes
    assert 0.98 <= plan.memory.peak / peak <= 1.02
