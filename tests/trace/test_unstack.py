"""Stacked parameters in parts: the same numbers, and no part is made of, or sent with, another layer's zeros."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import alpa_lite as al
from alpa_lite._jax_compat import Literal
from alpa_lite.interop import cluster_layers
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp
from alpa_lite.trace.layers import assign_layers
from alpa_lite.trace.program import Traced, trace
from alpa_lite.trace.unstack import LayeredStep, LeafPart, unstack
from tests.trace.cases import floats

DEPTH, WIDTH, BATCH = 6, 8, 20
PARAMS = {"b": np.zeros((DEPTH, WIDTH), np.float32), "w": floats(DEPTH, WIDTH, WIDTH) * 0.4}
X = floats(BATCH, WIDTH)


def scanned(params: Any, x: Any) -> Any:
    x, _ = lax.scan(lambda x, p: (x + jnp.tanh(x @ p["w"] + p["b"]), None), x, params)
    return jnp.mean(x**2)


def half(params: Any, x: Any) -> Any:
    """In half precision: a cast stands between the parameters and the scan."""
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    return scanned(params, x.astype(jnp.bfloat16)).astype(jnp.float32)


def also_whole(params: Any, x: Any) -> Any:
    """The loss reads the stacked weights once more, as a whole and one by one."""
    return scanned(params, x) + jnp.sum(jnp.sin(params["w"].T)) + jnp.sum(params["w"][1] * params["w"][4])


def twice(params: Any, x: Any) -> Any:
    """Two scans over the same weights, so cut in different places."""
    return scanned(params, x) + scanned(params, 2 * x)


LOSSES = {"plain": scanned, "half": half, "whole": also_whole, "twice": twice}


def sgd(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def no_update(params: Any, grads: Any) -> Any:
    return grads


def clipped(params: Any, grads: Any) -> Any:
    """Several reductions: a global norm, a maximum per layer, whether all is finite."""
    largest = jnp.max(jnp.abs(grads["w"]), axis=(1, 2), keepdims=True)
    finite = jnp.all(jnp.isfinite(grads["w"]))
    grads = {"b": grads["b"] / optax.tree.norm(grads), "w": grads["w"] / largest}
    return jax.tree.map(lambda p, g: jnp.where(finite, p - 0.1 * g, p), params, grads)


def mixing(params: Any, grads: Any) -> Any:
    """What no part can do alone: it turns the order of the layers around."""
    return {"b": params["b"] - grads["b"][::-1], "w": params["w"] - jnp.cumsum(grads["w"], axis=0)}


UPDATES = {"sgd": sgd, "no update": no_update, "clipped": clipped, "mixing": mixing}


def step_of(loss: str, update: str) -> Any:
    def step(params: Any, x: Any) -> Any:
        value, grads = al.value_and_grad(LOSSES[loss])(params, x)
        return UPDATES[update](params, grads), value

    return step


def traced(step: Any, *args: Any, layers: int = 3) -> tuple[Traced, LayeredStep]:
    def cuts(flops: Sequence[float], cut_bytes: Sequence[float], **_: Any) -> tuple[int, ...]:
        return cluster_layers(flops, cut_bytes, layers).cuts

    found = trace(step, args, {}, num_microbatches=2, layers=cuts)
    assert found.layered is not None
    return found, unstack(found.layered, found.program.aliases)


def evaluate(flat: FlatJaxpr, args: Sequence[Any]) -> list[Any]:
    env = {**flat.constants, **dict(zip(flat.inputs, args, strict=True))}

    def read(value: Any) -> Any:
        return value.val if isinstance(value, Literal) else env[value]

    for op in flat.ops:
        given = [read(v) for v in op.inputs]
        env.update(zip(op.all_outputs, run(op, given), strict=True))
        assert [env[o].shape for o in op.all_outputs] == [flat.avals[o].shape for o in op.all_outputs]
    return [read(v) for v in flat.outputs]


def run(op: FlatOp, given: list[Any]) -> list[Any]:
    if op.name != "scan":
        params = {k: v for k, v in op.params.items() if k != "group"}
        made = op.primitive.bind(*given, **params)
        return list(made) if op.primitive.multiple_results else [made]
    if "num_carry" not in op.params:  # as in JAX from 0.12 on: a scan that was not rewritten
        return op.primitive.bind(*given, **op.params)
    consts, carry = op.params["num_consts"], op.params["num_carry"]

    def body(sums: Any, xs: Any) -> Any:
        made = evaluate(op.bodies[0], [*given[:consts], *sums, *xs])
        return made[:carry], made[carry:]

    length, reverse = op.params["length"], op.params["reverse"]
    sums, rows = lax.scan(body, given[consts : consts + carry], given[consts + carry :], length=length, reverse=reverse)
    return [*sums, *rows]


STEPS = [*((loss, "sgd") for loss in LOSSES), *(("plain", update) for update in UPDATES), ("whole", "mixing")]
QUICK = (("plain", "sgd"), ("whole", "mixing"))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("loss", "update"),
    [pytest.param(*step, marks=[pytest.mark.slow] * (step not in QUICK)) for step in dict.fromkeys(STEPS)],
)
def test_the_step_is_the_same(loss, update):
    step = step_of(loss, update)
    _, layered = traced(step, PARAMS, X)
    assert any(part.stop >= 0 for part in layered.arguments)
    got = layered.join(evaluate(layered.flat, layered.split(jax.tree.leaves((PARAMS, X)))))
    want = jax.tree.leaves(jax.jit(step)(PARAMS, X))
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(a - b) <= (3e-2 if loss == "half" else 2e-6) * np.linalg.norm(b)


def test_state_is_split_where_the_scan_is_cut():
    found, layered = traced(step_of("plain", "sgd"), PARAMS, X)
    parts = [(0, 2), (2, 4), (4, 6)]
    assert layered.arguments == (*(LeafPart(leaf, *p) for leaf in (0, 1) for p in parts), LeafPart(2))
    assert layered.results == (*(LeafPart(leaf, *p) for leaf in (0, 1) for p in parts), LeafPart(2))
    assert layered.aliases == tuple((i, i) for i in range(6))
    paths = [part.path(found.program.input_paths[part.leaf]) for part in layered.arguments]
    assert paths[:3] == ["0/b[0:2]", "0/b[2:4]", "0/b[4:6]"]
    assert paths[-1] == "1"


@pytest.mark.parametrize("loss", ["plain", "half"])
def test_no_stacked_array_is_left(loss):
    """Not even zeros of one; Adam's moments are split with the weights."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))

    def step(params: Any, state: Any, x: Any) -> Any:
        value, grads = al.value_and_grad(LOSSES[loss])(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    _, layered = traced(step, PARAMS, optimizer.init(PARAMS), X)
    body = next(op for op in layered.flat.ops if op.bodies).bodies[0]
    for flat in (layered.flat, body):
        used = {v for op in flat.ops for v in (*op.inputs, *op.outputs) if isinstance(v, int) and v >= 0}
        assert not {v for v in used if flat.avals[v].shape[:1] == (DEPTH,)}
        assert not [op for op in flat.ops if op.name in ("pad", "concatenate")]


def test_what_no_scan_reads_stays_whole():
    def step(params: Any, x: Any) -> Any:
        value, grads = al.value_and_grad(lambda p, x: jnp.mean(jnp.tanh(x @ p["w"][0] + p["b"][0]) @ p["w"][1]))(
            params, x
        )
        return sgd(params, grads), value

    _, layered = traced(step, PARAMS, X, layers=2)
    assert layered.arguments == tuple(map(LeafPart, range(3)))
    assert layered.aliases == ((0, 0), (1, 1))


CACHE = floats(DEPTH, 3, 4, WIDTH)
NEW_AT = np.array([0, 2, 1])


def cached(put: Any, *, joined: bool = False) -> Any:
    """A function without a gradient, whose layers make rows of a cache; ``put``: these and the cache -> the next cache."""

    def step(params: Any, cache: Any, x: Any) -> Any:
        def layer(x: Any, row: Any) -> Any:
            w, b = row
            x = jnp.tanh(x @ w + b)
            return x, x[:3]

        if joined:
            made = []
            for w, b in zip(params["w"], params["b"], strict=True):
                x, row = layer(x, (w, b))
                made.append(row)
            rows = jnp.stack(made)
        else:
            x, rows = lax.scan(layer, x, (params["w"], params["b"]))
        return jnp.sum(x), put(cache, rows)

    return step


PUTS = {
    "update slice": lambda cache, rows: lax.dynamic_update_slice_in_dim(cache, rows[:, :, None], 1, axis=2),
    "scatter": lambda cache, rows: cache.at[:, np.arange(3), NEW_AT].set(rows),
    "slices": lambda cache, rows: cache.at[:, :, :2].set(jnp.stack([rows, -rows], axis=2)),
    "pad": lambda cache, rows: cache + jnp.pad(rows[:, :, None], ((0, 0), (0, 0), (1, 2), (0, 0))),
    "transpose": lambda cache, rows: cache + jnp.transpose(rows, (0, 2, 1)).swapaxes(1, 2)[:, :, None],
    "reshape": lambda cache, rows: (cache.reshape(DEPTH, -1, WIDTH) + rows.reshape(DEPTH, -1)[:, :1, None]).reshape(
        cache.shape
    ),
    "concatenate": lambda cache, rows: jnp.concatenate([cache[:, :, 1:], rows[:, :, None]], axis=2),
    "part of rows": lambda cache, rows: cache * lax.dynamic_slice_in_dim(rows, 1, 1, axis=1)[:, :, None],
    "cast": lambda cache, rows: cache + rows.astype(jnp.bfloat16)[:, :, None].astype(jnp.float32),
}


def forward(step: Any, layers: int = 3) -> LayeredStep:
    def cuts(flops: Sequence[float], cut_bytes: Sequence[float], **_: Any) -> tuple[int, ...]:
        return cluster_layers(flops, cut_bytes, layers).cuts

    found = trace(step, (PARAMS, CACHE, X), {}, donate_argnums=(1,), layers=cuts, forward=True)
    assert found.layered is not None
    return unstack(found.layered, found.program.aliases)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("put", "joined"),
    [
        pytest.param(
            put,
            joined,
            marks=pytest.mark.slow if joined and put != "update slice" else (),
        )
        for put in PUTS
        for joined in (False, True)
    ],
)
def test_rows_of_a_cache_are_written_where_they_are_made(put: str, joined: bool) -> None:
    step = cached(PUTS[put], joined=joined)
    layered = forward(step)
    cache = [part for part in layered.arguments if part.leaf == 2]
    assert len(cache) == 3 and cache == [replace(part, leaf=2) for part in layered.results if part.leaf == 1]
    got = layered.join(evaluate(layered.flat, layered.split(jax.tree.leaves((PARAMS, CACHE, X)))))
    for a, b in zip(got, jax.tree.leaves(jax.jit(step)(PARAMS, CACHE, X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    (loop,) = (op for op in layered.flat.ops if op.bodies)
    found = assign_layers(loop.bodies[0])
    homes = {v: k for op, k in zip(found.flat.ops, found.layer, strict=True) for v in op.outputs}
    assert [homes[v] for v in found.flat.outputs[:3]] == [0, 1, 2]


def test_rows_that_no_layer_reads_lie_where_they_are_made() -> None:
    """Each is made of the layer's activation and of the old row."""

    def step(params: Any, cache: Any, x: Any) -> Any:
        rows = []
        for w, b, row in zip(params["w"], params["b"], cache, strict=True):
            x = jnp.tanh(x @ w + b)
            rows.append(0.5 * row + x[:3, None])
        return jnp.sum(x), jnp.stack(rows)

    (loop,) = (op for op in forward(step).flat.ops if op.bodies)
    found = assign_layers(loop.bodies[0])
    homes = {v: k for op, k in zip(found.flat.ops, found.layer, strict=True) for v in op.outputs}
    assert [homes[v] for v in found.flat.outputs[:3]] == [0, 1, 2]


MIXING = {
    "turned around": lambda cache, rows: cache + rows[::-1][:, :, None],
    "shifted": lambda cache, rows: jnp.concatenate([cache[1:], rows[:1, :, None] + cache[:1]]),
    "by a mean": lambda cache, rows: cache + jnp.mean(rows, axis=0)[:, None],
    "one row": lambda cache, rows: lax.dynamic_update_slice_in_dim(cache, rows[:1, :, None] + cache[:1], 2, axis=0),
    "some rows": lambda cache, rows: cache.at[NEW_AT].set(rows[:3, :, None] + cache[:3]),
    "other dims first": lambda cache, rows: cache + jnp.transpose(rows, (1, 0, 2)).reshape(DEPTH, 3, WIDTH)[:, :, None],
}


@pytest.mark.medium
@pytest.mark.parametrize("put", MIXING)
def test_rows_that_depend_on_others_give_the_same_numbers(put: str) -> None:
    step = cached(MIXING[put])
    layered = forward(step)
    got = layered.join(evaluate(layered.flat, layered.split(jax.tree.leaves((PARAMS, CACHE, X)))))
    for a, b in zip(got, jax.tree.leaves(jax.jit(step)(PARAMS, CACHE, X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
