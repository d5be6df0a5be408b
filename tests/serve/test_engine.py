"""The engine with the examples' models on 8 virtual devices: right answers, parameters that never move."""

from __future__ import annotations

import gc
import math
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import RequestError, ServeError
from alpa_lite.serve import programs
from alpa_lite.serve.statistics import Histogram
from tests.marks import slow_but
from tests.serve.clients import wait_until
from tests.serve.engines import (
    NAMES,
    SIZES,
    assert_greedy,
    assert_split,
    model_and_params,
    pinned,
    pointers,
    prompts_of,
    unsharded,
)

pytestmark = pytest.mark.medium  # each model's programs take seconds to compile


@pytest.fixture(scope="module", params=slow_but({"llama"}, [*NAMES, "gpt, not pinned"]))
def engine(request: pytest.FixtureRequest) -> Iterator[al.serve.Engine]:
    name = request.param.split(",")[0]
    layout = pinned(name) if name == request.param else None
    with al.serve.Engine(*model_and_params(name), layout, **SIZES) as made:
        made.name = name
        made.warm_up()
        if layout is not None:
            assert_split(made)
        yield made


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
    assert 0 < after.time_to_first_token.quantile(0.5) < 60.0
    assert Histogram().quantile(0.5) == Histogram().mean == 0


def test_few_numbers_stay_on_the_devices(engine: al.serve.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lengths there may be as many as tokens of the longest prompt."""
    monkeypatch.setattr(programs, "_MOST_NUMBERS", 4)
    assert isinstance(engine.programs, programs.Programs)
    engine.programs._numbers.clear()
    prompts = prompts_of(*range(1, 9))
    answers = [engine.generate([prompt], max_tokens=3) for _ in range(2) for prompt in prompts]
    assert answers[:8] == answers[8:] and len(engine.programs._numbers) == 4


def test_numbers_of_numpy_and_jax_are_numbers(engine: al.serve.Engine) -> None:
    settings = {"max_tokens": np.int64(3), "timeout_s": np.float32(500), "stop": jax.numpy.array([255, 254])}
    with engine.submit(np.array([1, 2, 3], np.uint8), **settings) as request:
        assert 1 <= len(request.result(np.float32(500))) <= 3
    mixed = [np.uint64(1), np.int8(2), jax.numpy.int32(3)]  # NumPy's type for these is float64
    assert engine.generate([mixed, (1, 2, 3)], max_tokens=3) == [list(request.tokens[:3])] * 2
    assert (request.stop, request.timeout_s, type(request.max_tokens)) == ({254, 255}, 500.0, int)
    with pytest.raises(
        RequestError, match=r"timeout_s='a' was given; it must be a number of seconds up to .*test_engine"
    ):
        request.result("a")  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ServeError, match=r"drain_s='a' was given; it must be a number of seconds from 0.*test_engine"):
        engine.close(drain_s="a")  # pyrefly: ignore[bad-argument-type]
    assert not engine.closed
    sizes = {"slots": np.int64(4), "max_length": np.int32(32), "buckets": np.array([8, 4])}
    graphs = al.serve.graphs(*model_and_params("gpt"), **sizes)
    assert list(graphs) == ["prefill_4", "prefill_8", "decode"]


def test_requests_that_cannot_be_served_are_refused(engine: al.serve.Engine) -> None:
    deleted = jax.numpy.arange(3)
    deleted.delete()
    for prompt, settings, match in (
        ([], {}, "an empty prompt was given"),
        ([1] * 25, {}, "a prompt of 25 tokens was given; the largest bucket holds 24"),
        ([1] * 24, {"max_tokens": 9}, "together they may be at most max_length=32"),
        ([1.5], {}, "it must be a list of whole numbers"),
        ([[1]], {}, "it must be a list of whole numbers"),
        ([True, 1], {}, "it must be a list of whole numbers"),
        ([2**70], {}, "it must be a list of whole numbers"),
        (jax.random.key(0), {}, "a prompt was given that cannot be read: .*test_engine"),
        (deleted, {}, "a prompt was given that cannot be read: Array has been deleted"),
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
    for prompts in (
        "text",
        b"text",
        [1, 2],
        np.ones(3, np.int32),
        jax.numpy.ones(3, int),
        {"a": [1]},
        (x for x in [[1]]),
    ):
        with pytest.raises(
            RequestError, match=r"(?s)prompts=.* was given; it must be a list of prompts.*test_engine.*tokenizer"
        ):
            engine.generate(prompts)  # pyrefly: ignore[bad-argument-type]
    for sampling in ({"temperature": 1}, 0.5, "greedy"):
        with pytest.raises(RequestError, match=r"sampling=.* was given; .*test_engine.*sampling=al\.serve\.Sampling\("):
            engine.generate([[1]], sampling=sampling)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(RequestError, match=r"a prompt of text, 'class ', was given; .*test_engine.*text\.encode\(\)"):
        engine.generate(["class "])  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(RequestError, match="2 samplings were given for 1 prompts"):
        engine.generate([[1]], sampling=[al.serve.Sampling()] * 2)
