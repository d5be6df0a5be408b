"""The engine with the examples' models on 8 virtual devices: right answers, parameters that never move, clean ends.

Small models are planned with all parameters whole on every device, where much holds by itself. So layouts are pinned here.
"""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import EngineClosed, RequestError, ServeError
from alpa_lite.serve.layout import plan_graphs
from examples.serving_models import GPT, MODELS
from tests.compiling import QUICK_COMPILE
from tests.serve.clients import wait_until

pytestmark = pytest.mark.medium  # each model's programs take seconds to compile

SIZES = {"slots": 4, "max_length": 32, "buckets": (4, 8, 16, 24)}  # with decode, 5 graphs
NAMES = sorted(MODELS)
PINS = {
    "gpt": {
        "0/**/query/kernel": P(None, "y"),
        "0/**/up/kernel": P(None, "y"),
        "0/**/down/kernel": P("y"),
        "0/head/kernel": P("x", "y"),
        "0/tokens/embedding": P("y"),
        "1/*/key": P(None, None, "y"),
        "1/*/value": P(None, None, "y"),
    },
    "llama": {
        "0/blocks/up/kernel": P(None, None, "y"),
        "0/blocks/down/kernel": P(None, "y"),
        "0/head/kernel": P("x", "y"),
        "0/embed/embedding": P("y"),
        "1/*/key": P(None, None, "y"),
        "1/*/value": P(None, None, "y"),
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


class Given:
    """A layout, as ``al.plan_shared`` gives it."""

    def __init__(self, plans: Any) -> None:
        self.plans = plans


@pytest.fixture(scope="module", params=[*NAMES, "gpt, not pinned"])
def engine(request: pytest.FixtureRequest) -> Iterator[al.serve.Engine]:
    name = request.param.split(",")[0]
    layout = pinned(name) if name == request.param else None
    with al.serve.Engine(*model_and_params(name), layout, **SIZES) as made:
        made.name = name
        made.warm_up()
        if layout is not None:
            assert_split(made)
        yield made


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


def test_answers_are_those_of_the_unsharded_model(engine: al.serve.Engine) -> None:
    prompts = prompts_of(1, 4, 5, 8, 9, 13, 16, 17, 24, 2)
    for prompt, tokens in zip(prompts, engine.generate(prompts, max_tokens=8), strict=True):
        assert len(tokens) == 8
        assert_greedy(engine.name, prompt, tokens)


def test_logits_are_those_of_the_unsharded_model_in_every_slot_and_bucket(engine: al.serve.Engine) -> None:
    programs = engine.programs
    slots = SIZES["slots"]
    for round_ in range(2):
        prompts = prompts_of(*((3, 7, 11, 24), (1, 16, 20, 5))[round_], seed=round_)
        for slot, prompt in enumerate(prompts):
            bucket = next(b for b in engine.buckets if b >= prompt.size)
            logits = programs.prefill_logits(bucket, slot, prompt)
            np.testing.assert_allclose(logits[0], unsharded(engine.name)(prompt)[-1], rtol=1e-4, atol=1e-5)
        for step in range(3):
            new = np.arange(slots, dtype=np.int32) + 7 * step
            prompts = [np.append(prompt, token) for prompt, token in zip(prompts, new, strict=True)]
            logits = np.asarray(programs.decode_logits(new))
            for slot, prompt in enumerate(prompts):
                np.testing.assert_allclose(logits[slot], unsharded(engine.name)(prompt)[-1], rtol=1e-4, atol=1e-5)


def pointers(tree: Any) -> list[int]:
    return [s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for s in x.addressable_shards]


def test_switching_buckets_moves_no_byte_of_parameters_and_cache(engine: al.serve.Engine) -> None:
    programs = engine.programs
    before = pointers(engine.params)
    engine.generate(prompts_of(1, 6, 12, 20, 3), max_tokens=3)
    where = pointers(programs.cache)
    # Prompts and tokens come from the host; nothing else crosses but what is fetched by name.
    with jax.transfer_guard("disallow"), jax.transfer_guard_host_to_device("allow"):
        for bucket in (4, 24, 8, 16, 4):
            jax.block_until_ready(programs.prefill_logits(bucket, 1, np.ones(bucket, np.int32)))
            jax.block_until_ready(programs.decode_logits(np.ones(SIZES["slots"], np.int32)))
    assert pointers(engine.params) == before
    assert pointers(programs.cache) == where, "a donated cache stays where it is"


def test_an_engine_runs_where_the_user_watches_for_transfers(engine: al.serve.Engine) -> None:
    before = jax.config.jax_transfer_guard_host_to_device
    jax.config.update("jax_transfer_guard_host_to_device", "disallow")  # in every thread
    try:
        assert len(engine.generate(prompts_of(2), max_tokens=3)[0]) == 3
    finally:
        jax.config.update("jax_transfer_guard_host_to_device", before)


def test_all_graphs_have_one_layout_and_count_the_cache_in_their_memory(engine: al.serve.Engine) -> None:
    count = len(jax.tree.leaves((engine.params, engine.programs.cache)))
    assert set(engine.plans) == {"prefill_4", "prefill_8", "prefill_16", "prefill_24", "decode"}
    assert len({tuple((leaf.path, leaf.spec) for leaf in plan.inputs[:count]) for plan in engine.plans.values()}) == 1
    held = sum(
        shard.data.nbytes
        for x in jax.tree.leaves((engine.params, engine.programs.cache))
        for shard in x.addressable_shards
        if shard.device == jax.devices()[0]
    )
    assert all(plan.memory.peak >= held for plan in engine.plans.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_planned_memory_is_what_compiled_programs_take(name: str) -> None:
    """With a cache that is most of it: it must be counted once, and written in place."""
    model, params = model_and_params(name)
    graphs = al.serve.graphs(model, params, slots=16, max_length=32, buckets=(16,))
    for graph, plan in plan_graphs(graphs).items():
        fn, args = graphs[graph]
        compiled = al.parallelize(fn, plan=plan, donate_argnums=1).compile(*args)
        assert compiled.audit().ok
        assert 0.95 <= plan.memory.peak / compiled.peak_bytes() <= 1.25, graph


def test_a_cache_beyond_the_memory_budget_is_refused_when_planning() -> None:
    model, params = model_and_params("llama")
    graphs = al.serve.graphs(model, params, slots=8, max_length=4096, buckets=(8,))
    fn, args = graphs["decode"]
    cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args[1]))
    options = al.PlanOptions(memory_budget_bytes=cache_bytes // 8)
    with pytest.raises(al.AlpaLiteError, match="budget"):
        al.plan(fn, *args, cluster=al.Cluster.parse("1x8:cpu"), donate_argnums=1, options=options)


def test_each_device_holds_its_part_of_the_parameters_once_for_five_graphs() -> None:
    model, params = model_and_params("gpt")
    host = jax.tree.map(np.array, params)  # np.asarray is a view of the buffer on the first device
    shapes = {x.shape for x in jax.tree.leaves(host)} - {(4,)}

    def live_bytes() -> Counter[int]:
        """By device; what several arrays are views of counts once."""
        gc.collect()
        shards = [s for x in jax.live_arrays() if x.shape in shapes for s in x.addressable_shards]
        buffers = {(s.device.id, s.data.unsafe_buffer_pointer()): s.data.nbytes for s in shards}
        found: Counter[int] = Counter()
        for (device, _), size_bytes in buffers.items():
            found[device] += size_bytes
        return found

    before = live_bytes()
    with al.serve.Engine(model, host, pinned("gpt"), **SIZES) as engine:
        assert_split(engine)
        where = pointers(engine.params)
        engine.warm_up()
        assert len(engine.programs.compile_s) == 5
        plan = engine.plans["decode"]
        leaves = [leaf for leaf in plan.inputs if leaf.path.startswith("0/")]
        own = sum(
            math.prod(leaf.spec.local_shape(leaf.value.shape, plan.mesh)) * leaf.value.itemsize for leaf in leaves
        )
        assert own < sum(x.nbytes for x in jax.tree.leaves(host)) < 8 * own, "some are split, and some are whole"
        for _ in range(2):
            found = live_bytes()
            assert {device: found[device] - before[device] for device in range(8)} == dict.fromkeys(range(8), own)
            for bucket in SIZES["buckets"]:
                engine.programs.prefill_logits(bucket, 1, np.ones(bucket, np.int32))
                engine.programs.decode_logits(np.ones(SIZES["slots"], np.int32))
            assert pointers(engine.params) == where, "other buffers"


def test_programs_are_compiled_when_first_used(caplog: pytest.LogCaptureFixture) -> None:
    def compiled() -> int:
        return sum("Finished XLA compilation of jit(step)" in record.getMessage() for record in caplog.records)

    before = jax.config.jax_log_compiles
    jax.config.update("jax_log_compiles", True)  # in every thread
    try:
        with al.serve.Engine(*model_and_params("gpt"), pinned("gpt"), **SIZES) as engine:
            assert compiled() == len(engine.programs.compile_s) == 0
            engine.generate(prompts_of(6), max_tokens=3)
            assert set(engine.programs.compile_s) == {"prefill_8", "decode"}
            assert compiled() == 2
            engine.generate(prompts_of(5, 8), max_tokens=3)
            assert compiled() == 2
    finally:
        jax.config.update("jax_log_compiles", before)


def test_sampling_depends_on_the_seed_and_not_on_who_else_is_there(engine: al.serve.Engine) -> None:
    prompt, others = prompts_of(9)[0], prompts_of(3, 14, 20, 7, 11, seed=1)
    drawn = al.serve.Sampling(temperature=1.0, top_k=50, seed=4)
    alone = engine.generate([prompt], max_tokens=12, sampling=drawn)[0]
    samplings = [al.serve.Sampling(temperature=1.5, seed=n) for n in range(5)]
    crowd = engine.generate([*others, prompt], max_tokens=12, sampling=[*samplings, drawn])
    assert crowd[-1] == alone
    assert engine.generate([prompt], max_tokens=12, sampling=replace(drawn, seed=5))[0] != alone


def test_two_engines_do_not_disturb_each_other(engine: al.serve.Engine) -> None:
    other = next(name for name in NAMES if name != engine.name)
    prompts = prompts_of(2, 6, 11, 18, 3, 9)
    found: dict[str, Any] = {}
    with al.serve.Engine(*model_and_params(other), **SIZES | {"slots": 3, "buckets": (24,)}) as second:

        def use(name: str, used: al.serve.Engine) -> None:
            found[name] = used.generate(prompts, max_tokens=6)

        threads = [threading.Thread(target=use, args=pair) for pair in ((engine.name, engine), (other, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for name, answers in found.items():
        for prompt, tokens in zip(prompts, answers, strict=True):
            assert_greedy(name, prompt, tokens)
    assert len(found) == 2 and found[NAMES[0]] != found[NAMES[1]]
    assert not engine.closed and second.closed


def test_statistics_and_readiness_of_the_engine(engine: al.serve.Engine) -> None:
    before = engine.statistics()
    engine.generate(prompts_of(3, 8), max_tokens=4)
    after = engine.statistics()
    assert after.generated_tokens - before.generated_tokens == 8
    assert after.padded_tokens[4] - before.padded_tokens[4] == 1
    assert after.prefills[8] - before.prefills[8] == 1 and after.queued == 0
    wait_until(lambda: engine.statistics().active == 0)  # slots are free with the next step
    assert after.time_to_first_token.quantile(0.5) < 60.0


def test_requests_that_cannot_be_served_are_refused(engine: al.serve.Engine) -> None:
    for prompt, settings, match in (
        ([], {}, "an empty prompt was given"),
        ([1] * 25, {}, "a prompt of 25 tokens was given; the largest bucket holds 24"),
        ([1] * 24, {"max_tokens": 9}, "together they may be at most max_length=32"),
        ([1.5], {}, "it must be a list of whole numbers"),
        ([[1]], {}, "it must be a list of whole numbers"),
        ([256], {}, "the token 256 was given; the model's tokens are 0 to 255"),
        ([-1], {}, "the token -1 was given"),
        ([1], {"max_tokens": 0}, "max_tokens=0 was given"),
        ([1], {"sampling": 0.5}, r"sampling=0\.5 was given; it must be an al\.serve\.Sampling"),
        ([1], {"timeout_s": 0}, "timeout_s=0 was given.*test_engine"),
        ([1], {"timeout_s": True}, "timeout_s=True was given"),
        ([1], {"timeout_s": 10**400}, "timeout_s=1000.* was given; it must be a positive number of seconds"),
        ([[1], [2, 3]], {}, "it must be a list of whole numbers"),
        ([1], {"stop": "\n"}, r"stop='\\n' was given; it must be a list of tokens, from 0 to 255.*test_engine"),
        ([1], {"stop": [256]}, r"stop=\[256\] was given"),
        ([1], {"stop": [[1]]}, r"stop=\[\[1\]\] was given"),
        ([1], {"stop": 10}, "stop=10 was given"),
    ):
        with pytest.raises(RequestError, match=match):
            engine.submit(prompt, **settings)
    with pytest.raises(RequestError, match="stop=10 was given"):
        engine.generate([[1]], stop=10)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(RequestError, match="2 samplings were given for 1 prompts"):
        engine.generate([[1]], sampling=[al.serve.Sampling()] * 2)


def test_layouts_that_are_not_of_this_model_are_refused() -> None:
    model, params = model_and_params("gpt")
    plans = plan_graphs(al.serve.graphs(model, params, **SIZES))
    make = partial(al.serve.Engine, model, params)
    with pytest.raises(ServeError, match=r"no plan for 'prefill_12'; it has.*same buckets"):
        make(Given(plans), **SIZES | {"buckets": (4, 12)})
    with pytest.raises(ServeError, match=r"plan of 'prefill_4' the leaf '1/block0/key' is .*4, 32.* there and .*4, 30"):
        make(Given(plans), **SIZES | {"max_length": 30})
    other = al.serve.Engine, *model_and_params("llama")
    with pytest.raises(ServeError, match=r"another model or other sizes.*leaf '0/"):
        partial(*other)(Given(plans), **SIZES)
    fn, args = al.serve.graphs(model, params, **SIZES)["decode"]
    free = plans["prefill_4"].specs_by_path["0/block0/up/kernel"]
    pinned = jax.sharding.PartitionSpec(None, plans["decode"].mesh.axis_names[0])
    assert free != pinned
    moved = al.plan(fn, *args, cluster=al.Cluster.local(), donate_argnums=1, pins={"0/block0/up/kernel": pinned})
    with pytest.raises(ServeError, match=r"0/.*lies as .* for 'prefill_4' and as .* for 'decode'.*plan_shared"):
        make(Given(plans | {"decode": moved}), **SIZES)


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
        assert_split(engine)
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


def test_tokens_lie_as_their_plan_has_them() -> None:
    model, params = model_and_params("llama")
    graphs = al.serve.graphs(model, params, **SIZES)
    plans = plan_graphs(graphs)
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


def test_sizes_that_are_none_are_refused() -> None:
    model, params = model_and_params("gpt")
    for settings, match in (
        ({"slots": 0}, "slots=0 was given; it must be a whole number from 1"),
        ({"max_length": 2.5}, r"max_length=2\.5 was given"),
        ({"buckets": ()}, r"buckets=\(\) was given; they must be whole numbers from 1 to max_length=32"),
        ({"buckets": (64,)}, r"buckets=\(64,\) was given"),
        ({"queue_limit": 0}, "queue_limit=0 was given"),
        ({"prefills_per_step": 0}, "prefills_per_step=0 was given.*test_engine"),
    ):
        with pytest.raises(ServeError, match=match):
            al.serve.Engine(model, params, **SIZES | settings)

    class Odd:
        def init_cache(self, slots: int, max_length: int) -> dict:
            return {"flat": jnp.zeros((slots * max_length,))}

    with pytest.raises(
        ServeError, match=r"leaf 'flat' of the model's cache has the shapes \[64\] for 2 slots and \[96\] for 3"
    ):
        al.serve.graphs(Odd(), params, **SIZES)


def test_a_process_of_a_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ServeError, match=r"one of 2 processes of a jax\.distributed job.*test_engine"):
        al.serve.Engine(*model_and_params("gpt"), **SIZES)


def test_the_thread_ends_when_the_engine_is_closed_or_forgotten() -> None:
    model, params = model_and_params("gpt")
    layout = Given(plan_graphs(al.serve.graphs(model, params, **SIZES)))

    def engines() -> int:
        return sum(thread.name == "alpa_lite-engine" for thread in threading.enumerate())

    before = engines()
    closed, forgotten = (al.serve.Engine(model, params, layout, **SIZES) for _ in range(2))
    assert engines() == before + 2
    request = closed.submit([1, 2, 3], max_tokens=28)
    closed.close()
    closed.close()
    assert closed.closed and request.done and engines() == before + 1
    with pytest.raises(EngineClosed):
        closed.submit([1])
    del forgotten
    gc.collect()
    assert engines() == before


SCRIPT = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
import alpa_lite as al
from examples.serving_models import GPT, MODELS
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.rsplit("/", 1)[-1]))
model = MODELS["llama"]("small")
params = jax.jit(model.init_params)(jax.random.key(3))
engine = al.serve.Engine(model, params, slots=2, max_length=16, buckets=(8,), compile_cache=sys.argv[1])
print(engine.generate([[1, 2, 3]], max_tokens=5)[0], hits.count("cache_hits") > 2)
"""  # it ends without closing the engine


def test_programs_are_kept_on_disk_and_a_process_ends_with_an_engine_open(tmp_path: Any) -> None:
    lines = []
    for _ in range(2):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "compiled")]
        found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=_ROOT)
        assert found.returncode == 0 and not found.stderr.strip(), found.stderr
        lines.append(found.stdout.rsplit(" ", 1))
    assert lines[0][0] == lines[1][0], "other tokens"
    assert [line[1].strip() for line in lines] == ["False", "True"]


def test_programs_that_were_written_half_are_made_again(tmp_path: Any) -> None:
    place = tmp_path / "compiled"
    command = [sys.executable, "-c", SCRIPT, str(place)]
    subprocess.run(command, capture_output=True, timeout=300, check=True, cwd=_ROOT)
    files = {file: file.stat().st_size for file in place.glob("*-cache")}
    for file, size in files.items():
        with file.open("r+b") as damaged:
            damaged.truncate(size // 2)
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, cwd=_ROOT)
    assert not found.stderr.strip(), "JAX warns of what it cannot read"
    assert {file: file.stat().st_size for file in place.glob("*-cache")}.keys() == files.keys()
    assert all(file.stat().st_size > size // 2 for file, size in files.items())


def test_parameters_of_the_host_are_copied() -> None:
    """Also where an array's place would let JAX on CPUs use it as it is."""
    model, params = model_and_params("gpt")

    def aligned(x: Any) -> np.ndarray:
        room = np.empty(x.nbytes + 64, np.uint8)
        start = -room.ctypes.data % 64
        made = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
        made[...] = x
        return made

    given = jax.tree.map(aligned, params)
    with al.serve.Engine(
        model, given, slots=2, max_length=32, buckets=(8,), cluster=al.Cluster.parse("1x1:cpu")
    ) as engine:
        before = engine.generate([[1, 2, 3]])
        for x in jax.tree.leaves(given):
            x[...] = 0
        assert engine.generate([[1, 2, 3]]) == before


def test_an_answer_that_is_kept_does_not_keep_the_engine() -> None:
    model, params = model_and_params("gpt")
    engine = al.serve.Engine(model, params, slots=2, max_length=32, buckets=(8,), cluster=al.Cluster.parse("1x1:cpu"))
    request = engine.submit([1, 2, 3], max_tokens=2)
    tokens, programs = request.result(), weakref.ref(engine.programs)
    engine.close()
    del engine
    gc.collect()
    assert request.tokens == tokens and programs() is None


_ROOT = __file__.rsplit("/tests/", 1)[0]
