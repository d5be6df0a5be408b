"""Small models of the examples on 8 virtual devices, in layouts that split them.

Small models are planned with all parameters whole on every device, where much holds by itself. So layouts are pinned here.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from examples.serving_models import MODELS
from tests.compiling import QUICK_COMPILE

SIZES = {"slots": 4, "max_length": 32, "buckets": (4, 8, 16, 24)}  # with decode, 5 graphs
NAMES = sorted(MODELS)
PINS = {
    "gpt": {
        "0/**/query/kernel": P(None, "y"),
        "0/**/up/kernel": P(None, "y"),
        "0/**/down/kernel": P("y"),
        "0/head/kernel": P("x", "y"),
        "0/tokens/embedding": P("y"),
        "1/*/key": P(None, "y"),
        "1/*/value": P(None, "y"),
    },
    "llama": {
        "0/blocks/up/kernel": P(None, None, "y"),
        "0/blocks/down/kernel": P(None, "y"),
        "0/head/kernel": P("x", "y"),
        "0/embed/embedding": P("y"),
        "1/*/key": P(None, "y"),
        "1/*/value": P(None, "y"),
    },
}
STAGED_SIZES: dict[str, Any] = {"slots": 4, "max_length": 32, "buckets": (8, 24)}
STAGED_PINS = {
    "gpt": {
        "0/**/up/kernel": P(None, "x"),
        "0/**/down/kernel": P("x"),
        "0/head/kernel": P(None, "x"),
        "0/tokens/embedding": P("x"),
        "1/*/key": P(None, "x"),
        "1/*/value": P(None, "x"),
    },
    "llama": {
        "0/blocks/up/kernel": P(None, None, "x"),
        "0/blocks/down/kernel": P(None, "x"),
        "0/head/kernel": P(None, "x"),
        "0/embed/embedding": P("x"),
        "1/*/key": P(None, "x"),
        "1/*/value": P(None, "x"),
    },
}
TWO_AXES = al.PlanOptions(mesh_shape=(2, 4), axis_names=("x", "y"))


@cache
def model_and_params(name: str) -> tuple[Any, Any]:
    model = MODELS[name]("small")
    return model, jax.jit(model.init_params, compiler_options=QUICK_COMPILE)(jax.random.key(3))


@cache
def unsharded(name: str) -> Any:
    """``logits(tokens)`` of the training model on one device, after each token."""
    model, params = model_and_params(name)
    run = jax.jit(partial(model.logits, params), compiler_options=QUICK_COMPILE)

    def logits(tokens: Any) -> np.ndarray:
        padded = np.zeros((1, SIZES["max_length"]), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(run(padded))[0, : len(tokens)]

    return logits


def split_layout(name: str, model: Any, params: Any, sizes: dict[str, Any], **settings: Any) -> al.SharedLayout:
    """A joint layout in which parameters and the heads of the cache are split."""
    given = {"shared": ("0", "1"), "options": TWO_AXES, "pins": PINS[name], "donate_argnums": 1, **settings}
    return al.plan_shared(al.serve.graphs(model, params, **sizes), cluster=al.Cluster.local(), **given)


@cache
def pinned(name: str) -> al.SharedLayout:
    return split_layout(name, *model_and_params(name), SIZES)


class Given:
    """A layout, as ``al.plan_shared`` gives it."""

    def __init__(self, plans: Any) -> None:
        self.plans = plans


def assert_greedy(name: str, prompt: Any, tokens: Any) -> None:
    """Each token is the unsharded model's likeliest, wherever it is likelier than the next by more than 1e-3."""
    whole = [*prompt, *tokens]
    logits = unsharded(name)(whole)[len(prompt) - 1 : -1]
    for token, row in zip(tokens, logits, strict=True):
        second, first = np.sort(row)[-2:]
        assert token == row.argmax() or first - second <= 1e-3


def prompts_of(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, length) for length in lengths]


def split(tree: Any) -> list[str]:
    """Paths of the leaves of which devices hold a part."""
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if x.sharding.shard_shape(x.shape) != x.shape
    ]


def assert_split(engine: al.serve.Engine) -> None:
    """Parameters and the cache, so that what is said of where they lie says something."""
    assert split(engine.params) and split(engine.programs.cache)


def pointers(tree: Any) -> list[int]:
    return [s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for s in x.addressable_shards]


@cache
def staged_layout(name: str, cluster: str = "1x4:cpu") -> al.SharedLayout:
    """Of two stages, in which parameters and the cache are split over the devices of their stage."""
    model, params = model_and_params(name)
    made = al.plan_shared(
        al.serve.graphs(model, params, **STAGED_SIZES),
        shared=("0", "1"),
        cluster=al.Cluster.parse(cluster),
        donate_argnums=1,
        pins=STAGED_PINS[name],
        options=al.PlanOptions(num_stages=2, mesh_shape=(2,), axis_names=("x",)),
    )
    split = [(leaf.path[0], leaf.stage) for leaf in made.shared_leaves if any(leaf.spec.dims)]
    assert set(split) == {("0", 0), ("0", 1), ("1", 0), ("1", 1)}
    return made


def staged_prompts() -> list[np.ndarray]:
    return prompts_of(1, 8, 9, 24, 3, 17, 6, 8, 2, seed=1)


@cache
def staged_expected(name: str) -> list[list[int]]:
    """Greedy answers on one mesh, as the engine plans it."""
    model, params = model_and_params(name)
    with al.serve.Engine(model, params, **STAGED_SIZES) as engine:
        return engine.generate(staged_prompts(), max_tokens=8)


def addresses(cache: Any) -> list[int]:
    """Where arrays, or rows of them that lie on several stages, are in memory."""
    parts = [part for leaf in jax.tree.leaves(cache) for part in getattr(leaf, "parts", (leaf,))]
    return [shard.data.unsafe_buffer_pointer() for part in parts for shard in part.addressable_shards]
