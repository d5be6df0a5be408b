"""Recomputed layers: the same results bit for bit, nothing kept but what is asked for, the user's own recomputation untouched."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import alpa_lite as al
from alpa_lite._jax_compat import Literal
from alpa_lite.lowering.user_body import run_flat
from alpa_lite.trace.flatten import flatten
from alpa_lite.trace.layers import Layered, assign_layers
from alpa_lite.trace.remat import recomputable, rematerialised, saved_names
from tests.trace.cases import floats

LAYERS = 3
WEIGHTS = [{"a": floats(8, 16, seed=i), "b": floats(16, 8, seed=i)} for i in range(LAYERS)]
X = floats(4, 8)
DROP = jax.random.key(3)
FIXED = len(jax.tree.leaves((WEIGHTS, DROP)))


def block(w: Any, key: Any, x: Any) -> Any:
    h = checkpoint_name(jnp.tanh(x @ w["a"]), "hidden")
    kept = jax.random.bernoulli(key, 0.9, h.shape)
    return x + jax.nn.gelu((h * kept) @ w["b"])


def loss(weights: Any, key: Any, x: Any, wrap: Any = lambda i, f: f) -> Any:
    for i, w in enumerate(weights):
        x = wrap(i, block)(w, jax.random.fold_in(key, i), x)
        x = al.layer_boundary(x) if i < LAYERS - 1 else x
    return jnp.mean(x**2)


def layered(f: Any = loss) -> Layered:
    return assign_layers(flatten(jax.make_jaxpr(jax.value_and_grad(f))(WEIGHTS, DROP, X), keep_boundaries=True))


def kept(found: Layered) -> list[tuple[int, ...]]:
    """Shapes of what the forward pass makes and the backward pass reads."""
    pairs = list(zip(found.flat.ops, found.backward, strict=True))
    made = {o for op, back in pairs if not back for o in op.outputs}
    read = {v for op, back in pairs if back for v in op.inputs if not isinstance(v, Literal)}
    return sorted(found.flat.avals[v].shape for v in made & read)


@pytest.mark.parametrize(
    ("layers", "saved"), [((0,), ()), ((0, 1, 2), ()), ((1,), ()), ((0, 1), ("hidden",)), ((), ("hidden",))]
)
@pytest.mark.medium
def test_recomputation_changes_no_bit(layers, saved):
    found = rematerialised(layered(), layers, FIXED, saved)
    leaves = jax.tree.leaves((WEIGHTS, DROP, X))
    want = run_flat(layered().flat, leaves)
    assert all(np.array_equal(a, b) for a, b in zip(run_flat(found.flat, leaves), want, strict=True))


def test_only_what_crosses_boundaries_is_kept():
    assert kept(rematerialised(layered(), (0, 1, 2), FIXED)) == [(4, 8), (4, 8)]
    assert len(kept(rematerialised(layered(), (0,), FIXED))) < len(kept(layered()))


def test_saved_values_are_kept_and_not_made_again():
    all_again = rematerialised(layered(), (0, 1), FIXED)
    found = rematerialised(layered(), (0, 1), FIXED, ("hidden",))
    assert kept(found).count((4, 16)) == kept(all_again).count((4, 16)) + 2
    count = [Counter(op.name for op in f.flat.ops)["dot_general"] for f in (layered(), found, all_again)]
    assert count == [count[0], count[0] + 2, count[0] + 4]
    assert saved_names(layered().flat) == ("hidden",)


def test_clones_wait_for_the_cotangent_behind_one_barrier():
    found = rematerialised(layered(), (1,), FIXED)
    barriers = [op for op in found.flat.ops if op.name == "optimization_barrier"]
    assert len({op.params["group"] for op in barriers}) == 1
    backward = {o for op, back in zip(found.flat.ops, found.backward, strict=True) if back for o in op.outputs}
    assert sum(op.inputs[0] in backward for op in barriers) == 1  # the cotangent of the layer's result
    waiting = {op.all_outputs[0] for op in barriers}
    constant: set[int] = set()
    for op in found.flat.ops:
        if "rematted_computation" in op.scope:
            read = {v for v in op.inputs if not isinstance(v, Literal)}
            (constant if read <= constant else waiting).update(op.outputs)
            assert read <= constant or read & waiting, op


@pytest.mark.medium
def test_the_users_own_recomputation_stays_as_it_is():
    found = layered(lambda w, k, x: loss(w, k, x, wrap=lambda i, f: jax.checkpoint(f) if i == 1 else f))
    assert recomputable(found) == (0, 2)
    assert rematerialised(found, (1,), FIXED) is found


def test_the_given_layers_are_not_changed():
    found = layered()
    before = [(op.name, list(op.inputs), list(op.outputs)) for op in found.flat.ops]
    rematerialised(found, (0, 1, 2), FIXED)
    assert before == [(op.name, list(op.inputs), list(op.outputs)) for op in found.flat.ops]
