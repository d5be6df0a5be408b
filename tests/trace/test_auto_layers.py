"""Automatic layers: the boundaries are identities, lie where few bytes cross, and cut scans over layers."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import alpa_lite as al
from alpa_lite.errors import LayerError, MicrobatchError
from alpa_lite.interop import cluster_layers
from alpa_lite.trace.auto_layers import LayerCuts
from alpa_lite.trace.flatten import FlatJaxpr
from alpa_lite.trace.flops import op_flops, total_flops
from alpa_lite.trace.layers import Layered, assign_layers
from alpa_lite.trace.microbatch import microbatches
from alpa_lite.trace.program import Traced, trace
from examples.registry import EXAMPLES
from tests.marks import slow_but, slow_rows_but
from tests.trace.cases import floats

DEPTH, WIDTH, BATCH = 6, 8, 12


def cut_into(count: int) -> LayerCuts:
    return lambda flops, cut_bytes: cluster_layers(flops, cut_bytes, count).cuts


def weights(*shape: int) -> Any:
    return floats(*shape) * 0.4


PARAMS = {"w": weights(DEPTH, WIDTH, WIDTH), "b": weights(DEPTH, WIDTH), "out": weights(WIDTH, 2)}
DATA = (weights(BATCH, WIDTH), weights(BATCH, 2))


def block(x: Any, w: Any, b: Any) -> Any:
    return x + jnp.tanh(x @ w + b)


def head(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((x @ params["out"] - y) ** 2)


def unrolled(params: Any, batch: Any) -> Any:
    x, y = batch
    for i in range(DEPTH):
        x = jax.jit(block)(x, params["w"][i], params["b"][i])
    return head(params, x, y)


def scanned(params: Any, batch: Any, reverse: bool = False, remat: bool = False) -> Any:
    x, y = batch
    body = jax.checkpoint(block) if remat else block
    x, _ = lax.scan(lambda x, p: (body(x, *p), None), x, (params["w"], params["b"]), reverse=reverse)
    return head(params, x, y)


def scanned_with_results(params: Any, batch: Any) -> Any:
    """The scan reads a weight as a constant and returns what it did in every layer."""
    x, y = batch
    x, seen = lax.scan(lambda x, p: (block(x, *p) @ params["w"][0], jnp.mean(x)), x, (params["w"], params["b"]))
    return head(params, x, y) + 0.1 * jnp.sum(seen * jnp.arange(DEPTH))


def stacked_up(params: Any, batch: Any) -> Any:
    """What the scan leaves in its state is read by its own iterations alone."""
    x, y = batch

    def layer(x: Any, p: Any) -> Any:
        made = block(x, *p)
        return made, made

    _, seen = lax.scan(layer, x, (params["w"], params["b"]))
    return head(params, seen[-1], y)


MODELS = {
    "unrolled": unrolled,
    "scanned": scanned,
    "reverse": lambda p, b: scanned(p, b, reverse=True),
    "remat": lambda p, b: scanned(p, b, remat=True),
    "remat reverse": lambda p, b: scanned(p, b, reverse=True, remat=True),
    "with results": scanned_with_results,
    "stacked up": stacked_up,
}


def body_of(traced: Traced) -> FlatJaxpr:
    assert traced.layered is not None
    return next(op for op in traced.layered.ops if "al_microbatches" in op.scope and op.bodies).bodies[0]


def flops_of_layers(layered: Layered, backward: bool) -> list[float]:
    found = [0.0] * layered.num_layers
    for op, back, layer in zip(layered.flat.ops, layered.backward, layered.layer, strict=True):
        trips = op.params["length"] if op.name == "scan" else 1
        found[layer] += (back == backward) * (op_flops(op, layered.flat) + trips * sum(map(total_flops, op.bodies)))
    return found


def crossing(layered: Layered) -> list[list[tuple[int, ...]]]:
    """Per cut the shapes of the forward values that later layers read of earlier ones, once each."""
    made: dict[int, int] = {}
    cuts: list[set[int]] = [set() for _ in range(layered.num_layers - 1)]
    for op, back, layer in zip(layered.flat.ops, layered.backward, layered.layer, strict=True):
        if back:
            continue
        made.update((o, layer) for o in op.outputs)
        for value in op.inputs:
            if isinstance(value, int):
                for cut in range(made.get(value, layer), layer):
                    cuts[cut].add(value)
    return [[layered.flat.avals[v].shape for v in sorted(found)] for found in cuts]


@pytest.mark.medium
@pytest.mark.parametrize("count", slow_but({3}, [1, 3]))
@pytest.mark.parametrize("model", slow_but({"unrolled", "remat reverse", "stacked up"}, MODELS))
def test_the_result_is_the_same(model, count):
    step = al.value_and_grad(MODELS[model])
    with microbatches(count):
        plain = jax.jit(lambda *a: step(*a))(PARAMS, DATA)
    with microbatches(count, cut_into(3)):
        cut = jax.jit(lambda *a: step(*a))(PARAMS, DATA)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(cut), strict=True):
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(a)


@pytest.mark.parametrize("model", MODELS)
def test_layers_are_balanced_and_one_activation_crosses(model):
    traced = trace(al.value_and_grad(MODELS[model]), (PARAMS, DATA), {}, num_microbatches=2, layers=cut_into(3))
    layered = assign_layers(body_of(traced))
    assert layered.num_layers == 3
    for backward in (False, True):
        flops = flops_of_layers(layered, backward)
        assert max(flops) <= 1.3 * sum(flops) / 3
    activation = (BATCH // 2, WIDTH)
    assert [shapes.count(activation) for shapes in crossing(layered)] == [1, 1]


def test_a_scan_becomes_shorter_scans_forward_and_backward():
    traced = trace(al.value_and_grad(scanned), (PARAMS, DATA), {}, layers=cut_into(3))
    layered = assign_layers(body_of(traced))
    scans = [
        (op.params["length"], back, layer)
        for op, back, layer in zip(layered.flat.ops, layered.backward, layered.layer, strict=True)
        if op.name == "scan"
    ]
    assert scans == [(2, back, layer) for back in (False, True) for layer in ((2, 1, 0) if back else (0, 1, 2))]


@pytest.mark.medium
def test_a_scan_over_time_stays_whole():
    """What it steps through is the batch, not parameters."""

    def rnn(params: Any, batch: Any) -> Any:
        x, y = batch
        start = x[:, 0] @ params["w"][0]
        last, _ = lax.scan(lambda h, e: (jnp.tanh(h @ params["w"][1] + e), None), start, jnp.moveaxis(x, 1, 0))
        return head(params, last @ params["w"][2], y)

    data = (weights(BATCH, 5, WIDTH), DATA[1])
    traced = trace(al.value_and_grad(rnn), (PARAMS, data), {}, layers=cut_into(2))
    lengths = [op.params["length"] for op in body_of(traced).ops if op.name == "scan"]
    assert lengths == [5, 5]


def test_sources_and_scopes_survive():
    def scoped(params: Any, batch: Any) -> Any:
        x, y = batch
        for i in range(2):
            with jax.named_scope(f"layer{i}"):
                x = jax.jit(block)(x, params["w"][i], params["b"][i])
        return head(params, x, y)

    traced = trace(al.value_and_grad(scoped), (PARAMS, DATA), {}, layers=cut_into(2))
    layered = assign_layers(body_of(traced))
    forward = [op for op, back in zip(layered.flat.ops, layered.backward, strict=True) if not back]
    dots = [op for op in forward if op.name == "dot_general"]
    assert [("layer0" in op.scope, "layer1" in op.scope) for op in dots] == [
        (True, False),
        (False, True),
        (False, False),
    ]
    assert all("test_auto_layers.py" in op.source for op in layered.flat.ops if op.name == "dot_general")


def test_own_boundaries_are_kept():
    def marked(params: Any, batch: Any) -> Any:
        x, y = batch
        x = al.layer_boundary(block(x, params["w"][0], params["b"][0]))
        return head(params, x, y)

    def never(flops: Any, cut_bytes: Any) -> Any:
        raise AssertionError("nothing is to be chosen")

    traced = trace(al.value_and_grad(marked), (PARAMS, DATA), {}, layers=never)
    assert assign_layers(body_of(traced)).num_layers == 2


def test_own_boundary_in_a_scan_is_refused():
    def marked(params: Any, batch: Any) -> Any:
        x, _ = lax.scan(lambda x, p: (al.layer_boundary(block(x, *p)), None), batch[0], (params["w"], params["b"]))
        return head(params, x, batch[1])

    traced = trace(al.value_and_grad(marked), (PARAMS, DATA), {}, layers=cut_into(2))
    with pytest.raises(LayerError, match="boundary inside a scan body"):
        assign_layers(body_of(traced))


def test_cuts_only_where_the_gradient_passes():
    seen: list[Any] = []

    def layers(flops: Any, cut_bytes: Any) -> tuple[int, ...]:
        seen.append((flops, cut_bytes))
        return ()

    def two(params: Any, batch: Any) -> Any:
        x = jnp.sin(batch[0]) * 2  # nothing to differentiate yet
        x = jnp.tanh(x @ params["w"][0])
        return jnp.mean(x @ params["out"] - batch[1])

    trace(al.value_and_grad(two), (PARAMS, DATA), {}, layers=layers)
    flops, cut_bytes = seen[0]
    first = next(i for i, f in enumerate(flops) if f == 2 * BATCH * WIDTH * WIDTH)
    assert all(np.isinf(cut_bytes[:first]))
    assert np.isfinite(cut_bytes[first])
    with pytest.raises(LayerError, match=r"cuts \[1\] .* Allowed are those that the gradient passes"):
        trace(al.value_and_grad(two), (PARAMS, DATA), {}, layers=lambda flops, cut_bytes: (1,))


def test_layers_need_a_marked_gradient():
    with pytest.raises(MicrobatchError, match=r"no al.value_and_grad"):
        trace(jax.value_and_grad(unrolled), (PARAMS, DATA), {}, layers=cut_into(2))


def test_without_layers_nothing_is_kept():
    assert trace(al.value_and_grad(unrolled), (PARAMS, DATA), {}).layered is None


@cache
def example(name: str, count: int) -> Layered:
    made = EXAMPLES[name]("base")
    return assign_layers(body_of(trace(made.train_step, made.abstract_args(), {}, layers=cut_into(count))))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "count"),
    slow_rows_but([("llama_nnx", 4), ("moe", 2)], [("gpt_linen", 4), ("llama_nnx", 4), ("moe", 2), ("resnet18", 3)]),
)
def test_examples(name, count):
    layered = example(name, count)
    assert layered.num_layers == count
    flops = flops_of_layers(layered, backward=False)
    assert max(flops) <= 1.15 * sum(flops) / count
    shapes = crossing(layered)
    print(name, shapes)
    large = [[s for s in cut if len(s) >= 3 and np.prod(s) == max(map(np.prod, cut))] for cut in shapes]
    assert [len(cut) for cut in large] == [1] * (count - 1)


@pytest.mark.medium
def test_the_same_every_time():
    made = EXAMPLES["moe"]("small")
    found = []
    for _ in range(2):
        layered = assign_layers(body_of(trace(made.train_step, made.abstract_args(), {}, layers=cut_into(2))))
        ops = [(op.name, tuple(map(str, op.inputs)), tuple(op.outputs)) for op in layered.flat.ops]
        found.append((ops, layered.layer, layered.backward))
    assert found[0] == found[1]


@pytest.mark.medium
def test_layers_are_contiguous():
    """Forward ops read nothing of later layers, backward ops nothing of earlier layers' backward part."""
    layered = example("gpt_linen", 4)
    made = {o: i for i, op in enumerate(layered.flat.ops) for o in op.outputs if o >= 0}
    for i, op in enumerate(layered.flat.ops):
        for j in (made[v] for v in op.inputs if isinstance(v, int) and v in made):
            if layered.backward[i] == layered.backward[j]:
                low, high = (i, j) if layered.backward[i] else (j, i)
                assert layered.layer[low] <= layered.layer[high]
    assert all(a <= b for a, b in pairwise(sorted(set(layered.layer))))
