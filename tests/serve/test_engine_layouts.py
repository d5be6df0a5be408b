"""Layouts of an engine: those of another model are refused, memory is what was planned."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import ServeError, TraceError
from alpa_lite.serve.layout import plan_graphs
from alpa_lite.serve.model_graphs import check_instance
from examples.serving_models import GPT
from tests.marks import slow_but
from tests.serve.engines import (
    NAMES,
    PINS,
    SIZES,
    Given,
    assert_greedy,
    model_and_params,
    pinned,
    prompts_of,
    split,
    split_layout,
)

pytestmark = pytest.mark.medium  # each model's programs take seconds to compile


@pytest.mark.parametrize("name", slow_but({"llama"}, NAMES))
def test_the_planned_memory_is_what_compiled_programs_take(name: str) -> None:
    """With a cache that is most of it: it must be counted once, and written in place."""
    model, params = model_and_params(name)
    graphs = al.serve.graphs(model, params, slots=16, max_length=32, buckets=(16,))
    for graph, plan in plan_graphs(graphs).plans.items():
        fn, args = graphs[graph]
        compiled = al.parallelize(fn, plan=plan, donate_argnums=1).compile(*args)
        assert compiled.audit().ok
        assert 0.95 <= plan.memory.peak / compiled.peak_bytes() <= 1.25, graph


@pytest.mark.slow
def test_a_cache_beyond_the_memory_budget_is_refused_when_planning() -> None:
    model, params = model_and_params("llama")
    graphs = al.serve.graphs(model, params, slots=8, max_length=4096, buckets=(8,))
    fn, args = graphs["decode"]
    cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args[1]))
    options = al.PlanOptions(memory_budget_bytes=cache_bytes // 8)
    with pytest.raises(al.AlpaLiteError, match="budget"):
        al.plan(fn, *args, cluster=al.Cluster.parse("1x8:cpu"), donate_argnums=1, options=options)


def test_layouts_that_are_not_of_this_model_are_refused() -> None:
    model, params = model_and_params("gpt")
    plans = plan_graphs(al.serve.graphs(model, params, **SIZES)).plans
    make = partial(al.serve.Engine, model, params)
    with pytest.raises(ServeError, match=r"no plan for 'prefill_12'; it has.*same buckets"):
        make(Given(plans), **SIZES | {"buckets": (4, 12)})
    words = (
        r"of 'decode' the leaf '1/block0/key' is float32\[4, 8, 32.* there and float32\[4, 8, 30.*, as it was planned "
    )
    with pytest.raises(ServeError, match=words + r"for max_length=32 and is used for 30\..*test_engine"):
        make(Given(plans), **SIZES | {"max_length": 30})
    with pytest.raises(ServeError, match=r"it was planned for slots=4, and is used for 2\..*test_engine"):
        make(Given(plans), **SIZES | {"slots": 2})
    other = al.serve.Engine, *model_and_params("llama")
    with pytest.raises(
        ServeError,
        match=r"other sizes: its plan of 'decode' has '0/.* more, missing here and lacks '0/.*, given here\.",
    ):
        partial(*other)(Given(plans), **SIZES)
    missing = {name: leaf for name, leaf in params.items() if name != "head"}
    with pytest.raises(ServeError, match=r"its plan of 'decode' has '0/head/kernel', missing here\. "):
        al.serve.Engine(model, missing, Given(plans), **SIZES)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    with pytest.raises(ServeError, match=r"the leaf '0/.*' is float32\[.* there and bfloat16\[.* here\. Parameters"):
        al.serve.Engine(model, half, Given(plans), **SIZES)
    fn, args = al.serve.graphs(model, params, **SIZES)["decode"]
    free = plans["prefill_4"].specs_by_path["0/block0/up/kernel"]
    pinned = jax.sharding.PartitionSpec(None, plans["decode"].mesh.axis_names[0])
    assert free != pinned
    moved = al.plan(fn, *args, cluster=al.Cluster.local(), donate_argnums=1, pins={"0/block0/up/kernel": pinned})
    with pytest.raises(ServeError, match=r"0/.*lies as .* for 'prefill_4' and as .* for 'decode'.*plan_shared"):
        make(Given(plans | {"decode": moved}), **SIZES)


class Returns(GPT):
    """A model that returns what it must not."""

    def __init__(self, config: Any, method: str, change: Any) -> None:
        super().__init__(config)
        object.__setattr__(self, "method", method)
        object.__setattr__(self, "change", change)

    def prefill(self, *args: Any) -> Any:
        return self.change(*super().prefill(*args)) if self.method == "prefill" else super().prefill(*args)

    def decode(self, *args: Any) -> Any:
        return self.change(*super().decode(*args)) if self.method == "decode" else super().decode(*args)


@jax.tree_util.register_pytree_with_keys_class
class Mapped(dict):
    """Another container with the same paths."""

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.DictKey(name), self[name]) for name in sorted(self)], tuple(sorted(self))

    @classmethod
    def tree_unflatten(cls, names: Any, children: Any) -> Mapped:
        return cls(zip(names, children, strict=True))


def shorter(cache: Any) -> Any:
    return jax.tree.map(lambda x: x[:, :, :-1] if x.ndim > 1 else x, cache)


@pytest.mark.parametrize(
    ("method", "change", "words"),
    [
        (
            "decode",
            lambda x, cache: cache,
            r"Returns\.decode: dict was returned\. It must return a pair \(logits, cache\)",
        ),
        ("prefill", lambda x, cache: x, r"Returns\.prefill: float32\[1, 256\] was returned\. It must return a pair"),
        (
            "prefill",
            lambda x, cache: (x, cache, x),
            r"Returns\.prefill: tuple of 3 was returned\. It must return a pair",
        ),
        (
            "prefill",
            lambda x, cache: (cache, x),
            r"Returns\.prefill: a pair \(dict, float32\[1, 256\]\) was returned\.",
        ),
        (
            "decode",
            lambda x, cache: (x[:3], cache),
            r"Returns\.decode: an array of shape \[3, \d+\] was returned for 4 slots",
        ),
        (
            "decode",
            lambda x, cache: (x, shorter(cache)),
            r"the leaf 'cache/block0/key' was float32\[4, 8, 32.*\] as given and is float32\[4, 8, 31.*\] as returned",
        ),
        ("decode", lambda x, cache: (x, Mapped(cache)), r"the cache's containers are \{.* as given and CustomNode"),
        ("decode", lambda x, cache: (x, {}), r"the cache has the leaves 'cache/block0/key'.* and \(none\) as returned"),
        ("decode", lambda x, cache: (x, jax.tree.map(lambda y: y.astype(jnp.float16), cache)), r"and is float16\["),
        ("prefill", lambda x, cache: (x, shorter(cache)), r"Returns\.prefill: the leaf 'cache/block0/key' was"),
        (
            "prefill",
            lambda x, cache: (x[:, :7], cache),
            r"'prefill_4' returns float32\[1,7\], and 'decode' .*one vocabulary",
        ),
        (
            "prefill",
            lambda x, cache: (x[:, None], cache),
            r"'prefill_4' returns float32\[1,1,\d+\].*\(slots, vocabulary\), of the last token of each prompt alone, of one",
        ),
        (
            "prefill",
            lambda x, cache: (x.astype(jnp.int32), cache),
            r"'prefill_4' returns int32.*floating-point numbers",
        ),
        (
            "decode",
            lambda x, cache: (x[:, :0], cache),
            r"'prefill_4' returns float32\[1,256\], and 'decode' .*vocabulary, which is not empty\.",
        ),
        ("decode", lambda x, cache: (x > 0, cache), r"^'decode' returns bool\[4,\d+\]\. It must be logits"),
    ],
)
def test_what_a_model_must_not_return(method: str, change: Any, words: str) -> None:
    """A cache that is cut short would give wrong answers without a word."""
    model, params = model_and_params("gpt")
    with pytest.raises(ServeError, match=words):
        al.serve.Engine(Returns(model.config, method, change), params, cluster=al.Cluster.parse("1x1:cpu"), **SIZES)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": None}, r"the model None has no init_cache, prefill, decode\..*test_engine"),
        (
            {"layout": "layout.json"},
            r"layout='layout.json' was given; it must be an al.SharedLayout.*SharedLayout.load",
        ),
        ({"model": GPT}, r"the model is the class GPT\. .*test_engine.*Give an instance, e\.g\. GPT\(\.\.\.\)"),
        (
            {"params": {"tokens": jax.ShapeDtypeStruct((2, 3), jnp.float32)}},
            r"the parameter 'params/tokens' is the shape float32\[2, 3\] without values.*test_engine.*StoredParams",
        ),
        ({"layout": {}}, r"layout=\{\} was given"),
        (
            {"params": lambda config: {}},
            r"the parameters are the function <lambda>, and .*'config'\. .*test_engine.*lambda: fn\(",
        ),
        ({"params": "checkpoints"}, r"the parameter 'params' is 'checkpoints'.*al.serve.StoredParams"),
        (
            {"params": {}},
            r"(?s)'prefill_4': GPT\.prefill cannot be traced by JAX: KeyError.*jax\.jit\(GPT\.prefill\) work[^;]*$",
        ),
    ],
)
def test_what_is_no_model_no_layout_and_no_parameters(given: dict[str, Any], words: str) -> None:
    model, params = model_and_params("gpt")
    whole = {"model": model, "params": params} | given
    with pytest.raises((ServeError, TraceError), match=words):
        al.serve.Engine(**whole, **SIZES)


def test_a_parameter_that_was_donated_is_named() -> None:
    model, params = model_and_params("gpt")
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(ServeError, match=r"the parameter 'params/more' was deleted, or donated.*test_engine"):
        al.serve.Engine(model, params | {"more": gone}, **SIZES)


def test_one_plan_is_no_layout() -> None:
    model, params = model_and_params("gpt")
    with pytest.raises(ServeError, match=r"^a Plan, which is of one graph, was given; .*test_engine.*al\.plan_shared"):
        al.serve.Engine(model, params, pinned("gpt").plans["decode"], **SIZES)  # pyrefly: ignore[bad-argument-type]


class Functions:
    """A class without instances may be a model."""

    init_cache, prefill, decode = staticmethod(print), staticmethod(print), staticmethod(print)


def test_a_class_of_static_methods_is_a_model() -> None:
    check_instance(Functions)


def test_a_length_that_the_model_does_not_have() -> None:
    """The default is 2048; the example has learned 64 positions."""
    model, params = model_and_params("gpt")
    words = r"GPT.init_cache\(slots, max_length=2048\) failed: AssertionError: positions are learned up to \d+\. At .*test_engine"
    with pytest.raises(ServeError, match=words + r".*--max-length"):
        al.serve.Engine(model, params)


@pytest.mark.slow
def test_buckets_and_cache_of_a_layout_of_the_parameters_alone(tmp_path: Any) -> None:
    """What a user writes: buckets are those of the layout, and the cache lies as ``decode`` has it."""
    model, params = model_and_params("gpt")
    pins = {path: spec for path, spec in PINS["gpt"].items() if path.startswith("0/")}
    pins |= {"3": P(None, "x"), "out/0": P(None, "y")}  # tokens of prompts, and logits
    sizes, weights = SIZES | {"buckets": (8, 24)}, {"decode": 100.0}
    made = split_layout("gpt", model, params, sizes, shared="0", weights=weights, pins=pins, donate_argnums=())
    made.save(tmp_path / "layout.json")
    layout = al.SharedLayout.load(tmp_path / "layout.json")
    given = {name: lies(plan, "1") for name, plan in layout.plans.items()}
    again = {name for name in given if given[name] != given["decode"]}
    assert again, "the cache lies in one layout by itself"
    with al.serve.Engine(model, params, layout=layout, slots=4, max_length=32) as engine:
        assert engine.buckets == sizes["buckets"]
        assert split(engine.params)
        for name, plan in engine.plans.items():
            assert (lies(plan, "0"), lies(plan, "1")) == (lies(layout.plans["decode"], "0"), given["decode"])
            assert (plan == layout.plans[name]) == (name not in again)
            noted = [note for note in plan.notes if 'al.plan_shared(graphs, shared=("0", "1"), ...)' in note]
            assert len(noted) == (name in again) and all(f"{name!r} was planned again" in note for note in noted)
            assert plan.specs_by_path["out/0"] == P(None, "y")
            assert name == "decode" or plan.specs_by_path["3"] == P(None, "x")
        prompts = prompts_of(1, 8, 13, 24)
        for prompt, tokens in zip(prompts, engine.generate(prompts, max_tokens=6), strict=True):
            assert_greedy("gpt", prompt, tokens)
    tight = {
        name: replace(plan, options=(*plan.options, ("memory_budget_bytes", 1e4))) for name, plan in made.plans.items()
    }
    with pytest.raises(
        ServeError,
        match=r"(?s)the cache lies otherwise for 'prefill_\d+' than for 'decode', .*budget.*test_engine.*shared=\(\"0\", \"1\"\)",
    ):
        al.serve.Engine(model, params, Given(tight), slots=4, max_length=32)


def lies(plan: al.Plan, argument: str) -> dict[str, str]:
    return {leaf.path: str(leaf.spec) for leaf in plan.inputs if leaf.path.startswith(f"{argument}/")}


def test_layouts_without_the_buckets_that_an_engine_needs_are_refused() -> None:
    model, params = model_and_params("gpt")
    plans = pinned("gpt").plans
    make = partial(al.serve.Engine, model, params, slots=4)
    others = {"encode": plans["decode"], "prefill_04": plans["prefill_4"], "decode": plans["decode"]}
    with pytest.raises(
        ServeError,
        match=r"plans for 'encode', 'prefill_04', 'decode', and none to take a prompt in.*test_engine.*buckets=",
    ):
        make(layout=Given(others), max_length=32)
    with pytest.raises(ServeError, match=r"a plan for 'prefill_24', and max_length=16 was given.*test_engine"):
        make(layout=Given(plans), max_length=16)
    with make(layout=Given(plans | others), max_length=32) as engine:  # what it has no use for is left alone
        assert engine.buckets == SIZES["buckets"]


class OtherDecode(GPT):
    def decode(self, params: Any, cache: Any, tokens: Any) -> Any:
        logits, cache = super().decode(params, cache, tokens)
        return 2 * logits + jnp.sin(logits), cache


class OtherPrefill(GPT):
    def prefill(self, params: Any, cache: Any, tokens: Any, lengths: Any) -> Any:
        logits, cache = super().prefill(params, cache, tokens, lengths)
        return jnp.sin(logits), cache


@pytest.mark.parametrize("shared", ["0", ("0", "1")])
def test_a_layout_of_another_model_with_the_same_shapes_is_refused(shared: Any) -> None:
    """At once, not by each request."""
    model, params = model_and_params("gpt")
    layout = split_layout("gpt", model, params, SIZES, shared=shared, pins=None)
    for other, graph in ((OtherDecode, "decode"), (OtherPrefill, "prefill_4")):
        with pytest.raises(
            ServeError,
            match=rf"the layout is of another model, as its plan of '{graph}' shows: .* ops were planned, .*test_engine.*"
            r"Plan the graphs of this model",
        ):
            al.serve.Engine(other(model.config), params, layout, **SIZES)


@pytest.mark.slow
def test_tokens_lie_as_their_plan_has_them() -> None:
    model, params = model_and_params("llama")
    graphs = al.serve.graphs(model, params, **SIZES)
    plans = dict(plan_graphs(graphs).plans)
    mesh = plans["decode"].mesh
    options = al.PlanOptions(mesh_shape=mesh.shape, axis_names=mesh.axis_names)
    axis = next(name for name, size in zip(mesh.axis_names, mesh.shape, strict=True) if SIZES["slots"] % size == 0)
    for name, path, spec in (("decode", "2", (axis,)), ("prefill_8", "3", (None, axis))):
        fn, args = graphs[name]
        pins = {leaf: spec for leaf, spec in plans["decode"].specs_by_path.items() if leaf[:2] in ("0/", "1/")}
        pins[path] = jax.sharding.PartitionSpec(*spec)
        plans[name] = al.plan(fn, *args, cluster=al.Cluster.local(), donate_argnums=1, pins=pins, options=options)
    with al.serve.Engine(model, params, Given(plans), **SIZES) as engine:
        prompts = prompts_of(7, 3)
        for prompt, tokens in zip(prompts, engine.generate(prompts, max_tokens=4), strict=True):
            assert_greedy("llama", prompt, tokens)
