"""A decoder whose layers and caches are stacked, in the ways in which JAX programs write that."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LAYERS, WIDTH, HEADS, VOCABULARY = 4, 16, 2, 64
FORMS = ("rows", "late", "carried", "scattered", "counted", "written out", "by number")


def init_params(key: jax.Array) -> Any:
    names = {
        "query": (WIDTH, WIDTH),
        "key": (WIDTH, WIDTH),
        "value": (WIDTH, WIDTH),
        "up": (WIDTH, 32),
        "down": (32, WIDTH),
    }
    keys = dict(zip((*names, "embed", "head"), jax.random.split(key, len(names) + 2), strict=True))
    blocks = {name: 0.3 * jax.random.normal(keys[name], (LAYERS, *shape)) for name, shape in names.items()}
    embed = jax.random.normal(keys["embed"], (VOCABULARY, WIDTH))
    return {"embed": embed, "blocks": blocks, "head": jax.random.normal(keys["head"], (WIDTH, VOCABULARY))}


class Stacked:
    """``form``: how the caches of all layers, key and value (layers, slots, length, heads, width of a head), are gone through.

    - "rows": ``scan`` takes a row of each and gives the new one back.
    - "late": it gives back what is new alone, which is put into the caches of all layers behind it.
    - "carried": it carries them, with slices that are updated.
    - "scattered": it carries them, with ``.at[layer, ...].set``.
    - "counted": ``fori_loop`` carries them and takes the parameters of a layer by its number.
    - "written out": a Python loop takes a row of each, and the new ones are stacked.
    - "by number": a Python loop writes with ``.at[layer, ...].set`` to all of them.
    """

    def __init__(self, form: str) -> None:
        self.form = form

    def init_cache(self, slots: int, max_length: int) -> Any:
        shape = LAYERS, slots, max_length, HEADS, WIDTH // HEADS
        return {"key": jnp.zeros(shape), "value": jnp.zeros(shape), "length": jnp.zeros((slots,), jnp.int32)}

    def prefill(self, params: Any, cache: Any, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Any]:
        x, cache = self.run(params, cache, tokens, jnp.zeros_like(lengths), lengths)
        return jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0] @ params["head"], cache

    def decode(self, params: Any, cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        x, cache = self.run(params, cache, tokens[:, None], cache["length"], cache["length"] + 1)
        return x[:, 0] @ params["head"], cache

    def run(self, params: Any, cache: Any, tokens: jax.Array, start: jax.Array, end: jax.Array) -> tuple[Any, Any]:
        slots, size = tokens.shape
        at = start[:, None] + jnp.arange(size)
        slot = jnp.arange(slots)[:, None]
        x = params["embed"][tokens]

        def heads(w: jax.Array, x: jax.Array) -> jax.Array:
            return (x @ w).reshape(slots, size, HEADS, -1)

        def put(row: jax.Array, new: jax.Array) -> jax.Array:
            return row.at[slot, at].set(new)

        def layer(x: jax.Array, w: Any, key: jax.Array, value: jax.Array) -> jax.Array:
            scores = jnp.einsum("sqhd,skhd->shqk", heads(w["query"], x), key)
            seen = jnp.arange(key.shape[1])[None, None] <= at[..., None]
            weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e9))
            x = x + jnp.einsum("shqk,skhd->sqhd", weights, value).reshape(slots, size, WIDTH)
            return x + jnp.tanh(x @ w["up"]) @ w["down"]

        def by_rows(x: jax.Array, row: Any) -> Any:
            w, key, value = row
            new = heads(w["key"], x), heads(w["value"], x)
            key, value = put(key, new[0]), put(value, new[1])
            return layer(x, w, key, value), new if self.form == "late" else (key, value)

        def carried(state: Any, row: Any) -> Any:
            x, keys, values = state
            w, i = row
            new = heads(w["key"], x), heads(w["value"], x)
            if self.form in ("scattered", "by number"):
                keys, values = keys.at[i, slot, at].set(new[0]), values.at[i, slot, at].set(new[1])
            else:
                keys = lax.dynamic_update_index_in_dim(keys, put(keys[i], new[0]), i, 0)
                values = lax.dynamic_update_index_in_dim(values, put(values[i], new[1]), i, 0)
            return (layer(x, w, keys[i], values[i]), keys, values), None

        stacks = cache["key"], cache["value"]
        if self.form in ("rows", "late"):
            x, stacks = lax.scan(by_rows, x, (params["blocks"], *stacks))
        elif self.form == "counted":

            def counted(i: Any, state: Any) -> Any:
                return carried(state, (jax.tree.map(lambda w: w[i], params["blocks"]), i))[0]

            x, *stacks = lax.fori_loop(0, LAYERS, counted, (x, *stacks))
        elif self.form == "written out":
            made = []
            for i in range(LAYERS):
                x, rows = by_rows(x, jax.tree.map(lambda stack, i=i: stack[i], (params["blocks"], *stacks)))
                made.append(rows)
            stacks = [jnp.stack(rows) for rows in zip(*made, strict=True)]
        elif self.form == "by number":
            for i in range(LAYERS):
                (x, *stacks), _ = carried((x, *stacks), (jax.tree.map(lambda w, i=i: w[i], params["blocks"]), i))
        else:
            (x, *stacks), _ = lax.scan(carried, (x, *stacks), (params["blocks"], jnp.arange(LAYERS)))
        if self.form == "late":
            stacks = [cache[k].at[:, slot, at].set(new) for k, new in zip(("key", "value"), stacks, strict=True)]
        return x, {"key": stacks[0], "value": stacks[1], "length": end}
