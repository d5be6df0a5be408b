"""The examples' models with a cache give what the training models give, on the training state's own parameters."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import gpt_linen, llama_nnx
from examples.serving_models import MODELS
from tests.compiling import QUICK_COMPILE
from tests.marks import slow_but

NAMES = [pytest.param(name, marks=pytest.mark.medium) for name in sorted(MODELS)]  # compiling takes seconds
quick = partial(jax.jit, compiler_options=QUICK_COMPILE)
MAX_LENGTH = 32
LENGTHS = (1, 2, 5, 11, 16, 31)


@cache
def given(name: str) -> tuple[Any, Any, jax.Array, jax.Array]:
    """Model, the parameters of a training state, prompts of full length, and the training model's logits."""
    model = MODELS[name]("small")
    example = {"gpt": gpt_linen, "llama": llama_nnx}[name].make("small")
    state = quick(example.init)(jax.random.key(0))
    params = state["params"] if isinstance(state, dict) else state.params
    tokens = jax.random.randint(jax.random.key(1), (len(LENGTHS), MAX_LENGTH), 0, model.vocab_size)
    return model, params, tokens, quick(model.logits)(params, tokens)


@pytest.mark.medium
@pytest.mark.parametrize("name", slow_but(("llama",), sorted(MODELS)))
def test_params_are_those_of_the_training_state(name: str) -> None:
    model, params, _, _ = given(name)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), params)
    own = jax.eval_shape(model.init_params, jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), own) == shapes


@pytest.mark.parametrize("name", NAMES)
def test_prefill_of_any_length_gives_the_last_token_of_the_training_model(name: str) -> None:
    model, params, tokens, expected = given(name)
    lengths, rows = jnp.array(LENGTHS), jnp.arange(len(LENGTHS))
    logits, filled = quick(model.prefill)(params, model.init_cache(len(LENGTHS), MAX_LENGTH), tokens, lengths)
    np.testing.assert_allclose(logits, expected[rows, lengths - 1], rtol=1e-4, atol=1e-5)
    assert filled["length"].tolist() == list(LENGTHS)


@pytest.mark.parametrize("name", NAMES)
def test_decoding_with_the_cache_is_computing_it_all_again(name: str) -> None:
    model, params, tokens, expected = given(name)
    # Prompts of other lengths in a bucket of 16, so that padding lies where tokens go later.
    lengths, rows = jnp.array([1, 2, 5, 11, 16, 9]), jnp.arange(len(LENGTHS))
    _, filled = quick(model.prefill)(params, model.init_cache(6, MAX_LENGTH), tokens[:, :16], lengths)
    decode = quick(model.decode)
    for _ in range(14):
        logits, filled = decode(params, filled, tokens[rows, lengths])
        lengths = lengths + 1
        np.testing.assert_allclose(logits, expected[rows, lengths - 1], rtol=1e-4, atol=1e-5)
    assert filled["length"].tolist() == lengths.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_slot_that_is_full_stays_full(name: str) -> None:
    """Slots without a request go on decoding nonsense: they must not count beyond their end."""
    model, params, tokens, _ = given(name)
    filled = model.init_cache(6, MAX_LENGTH) | {"length": jnp.full((6,), MAX_LENGTH, jnp.int32)}
    logits, filled = quick(model.decode)(params, filled, tokens[:, 0])
    assert np.isfinite(np.asarray(logits)).all() and filled["length"].tolist() == [MAX_LENGTH] * 6
