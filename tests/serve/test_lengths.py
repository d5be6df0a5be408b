"""Acceptance table of alpa #550, the row "serve variable lengths on one parameter copy": buckets 1, 128, 512 and 2048.

Logits at sampled lengths from 1 to 2048 equal the unsharded model's, in every bucket and as decoding goes on, with parameters
and cache split over the devices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from examples.serving_models import MODELS
from tests.compiling import QUICK_COMPILE
from tests.serve.engines import assert_split, pointers, split_layout

pytestmark = pytest.mark.slow
LONGEST, STEPS = 2048, 8
BUCKETS = (1, 128, 512, LONGEST)
LENGTHS = (1, 2, 37, 127, 128, 129, 300, 511, 512, 513, 1000, 1777, 2047, 2048)


def model_of(name: str) -> Any:
    model = MODELS[name]("small")
    return replace(model, config=replace(model.config, seq_len=LONGEST + STEPS))


@pytest.mark.parametrize(("name", "pinned"), [("gpt", True), ("llama", True), ("gpt", False)])
def test_logits_and_greedy_tokens_at_all_lengths(name: str, pinned: bool) -> None:
    model = model_of(name)
    params = jax.jit(model.init_params, compiler_options=QUICK_COMPILE)(jax.random.key(0))
    # After each token, by the training model on one device. One text for all lengths: a prompt is its beginning.
    text = np.random.default_rng(0).integers(0, model.vocab_size, LONGEST + STEPS).astype(np.int32)
    expected = np.asarray(jax.jit(model.logits)(params, text[None]))[0]
    slots = 4
    sizes = {"slots": slots, "max_length": LONGEST + STEPS, "buckets": BUCKETS}
    layout = split_layout(name, model, params, sizes) if pinned else None
    with al.serve.Engine(model, params, layout, **sizes) as engine:
        if pinned:
            assert_split(engine)
        programs, where = engine.programs, pointers(engine.params)
        for first in range(0, len(LENGTHS), slots):
            lengths = np.array([*LENGTHS[first : first + slots], *(1,) * slots])[:slots]
            for slot, length in enumerate(lengths):
                bucket = next(b for b in engine.buckets if b >= length)
                logits = np.asarray(programs.prefill_logits(bucket, slot, text[:length]))[0]
                check(logits, expected[length - 1])
            for _ in range(STEPS):
                logits = np.asarray(programs.decode_logits(text[lengths]))
                lengths = lengths + 1
                for slot, length in enumerate(lengths):
                    check(logits[slot], expected[length - 1])
        assert set(programs.compile_s) == {"decode", *(f"prefill_{bucket}" for bucket in BUCKETS)}
        layouts = [
            {path: spec for path, spec in plan.specs_by_path.items() if path[:2] == "0/"}
            for plan in engine.plans.values()
        ]
        assert len(layouts) == 5 and all(layout == layouts[0] for layout in layouts)
        for path, leaf in jax.tree_util.tree_leaves_with_path(engine.params):
            spec = layouts[0]["0/" + jax.tree_util.keystr(path, simple=True, separator="/")]
            assert leaf.sharding.is_equivalent_to(jax.sharding.NamedSharding(leaf.sharding.mesh, spec), leaf.ndim)
        assert pointers(engine.params) == where, "parameters were moved"


def check(logits: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    second, first = np.sort(expected)[-2:]
    assert logits.argmax() == expected.argmax() or first - second <= 1e-3
