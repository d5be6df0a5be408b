"""An engine's beginning and end: programs compiled and kept, threads, what is copied, what is refused."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import EngineClosed, ServeError
from alpa_lite.executor.compiled import delete_damaged
from alpa_lite.serve import engine as engines
from alpa_lite.serve.layout import plan_graphs
from examples.serving_models import GPT
from tests.serve.engines import (
    SIZES,
    model_and_params,
    pinned,
    prompts_of,
)

pytestmark = pytest.mark.medium  # each model's programs take seconds to compile


_ROOT = __file__.rsplit("/tests/", 1)[0]


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


def test_a_process_of_a_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ServeError, match=r"one of 2 processes of a jax\.distributed job.*test_engine"):
        al.serve.Engine(*model_and_params("gpt"), **SIZES)


@pytest.fixture
def keeps_nothing() -> Iterator[None]:
    """JAX keeps no compiled programs: an engine looks at its folder only where no other one is set."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", folder)


@pytest.mark.usefixtures("keeps_nothing")
def test_sizes_that_are_none_are_refused() -> None:
    model, params = model_and_params("gpt")
    for settings, match in (
        ({"slots": 0}, "slots=0 was given; it must be a whole number from 1"),
        ({"max_length": 2.5}, r"max_length=2\.5 was given"),
        ({"buckets": ()}, r"buckets=\(\) was given; they must be whole numbers from 1 to max_length=32"),
        ({"buckets": (64,)}, r"buckets=\(64,\) was given"),
        ({"buckets": "48"}, "buckets='48' was given"),
        ({"max_length": 1, "buckets": (1,)}, "max_length=1 was given; it must be a whole number from 2"),
        (
            {"compile_cache": ""},
            "al.serve.Engine got '' of type str as a path. Allowed is a str or an os.PathLike, and not an empty",
        ),
        ({"compile_cache": __file__ + "/x"}, r"programs cannot be kept in '.*x': .*test_engine.*--compile-cache"),
        ({"compile_cache": "/proc"}, r"programs cannot be kept in '/proc': .*test_engine.*--compile-cache"),
        ({"queue_limit": 0}, "queue_limit=0 was given"),
        ({"prefills_per_step": 0}, "prefills_per_step=0 was given.*test_engine"),
    ):
        with pytest.raises(ServeError, match=match):
            al.serve.Engine(model, params, **SIZES | settings)

    class Odd(GPT):
        def init_cache(self, slots: int, max_length: int) -> dict:
            return {"flat": jnp.zeros((slots * max_length,))}

    with pytest.raises(
        ServeError, match=r"leaf 'flat' of the model's cache has the shapes \[64\] for 2 slots and \[96\] for 3"
    ):
        al.serve.graphs(Odd(model.config), params, **SIZES)

    class Bare(GPT):
        def init_cache(self, slots: int, max_length: int) -> jax.Array:
            return jnp.zeros((slots * max_length,))

    with pytest.raises(ServeError, match=r"^the model's cache has the shapes \[64\] for 2 slots"):
        al.serve.graphs(Bare(model.config), params, **SIZES)

    class Listed(GPT):
        def init_cache(self, slots: int, max_length: int) -> list:
            return [jnp.zeros((max_length,))] * slots

    with pytest.raises(
        ServeError, match=r"leaves 'cache/0', 'cache/1' for 2 slots and 'cache/0', .* for 3\. .*test_engine"
    ):
        al.serve.graphs(Listed(model.config), params, **SIZES)
    for given in ({"x": 1}, 3):
        with pytest.raises(ServeError, match=r"given=.* for each of 'prefill_4', .*'decode': what the stage before"):
            al.serve.graphs(model, params, **SIZES, given=given)


def test_the_thread_ends_when_the_engine_is_closed_or_forgotten() -> None:
    model, params = model_and_params("gpt")
    layout = plan_graphs(al.serve.graphs(model, params, **SIZES))

    def engines() -> int:
        return sum(thread.name == "alpa_lite-engine" for thread in threading.enumerate())

    before = engines()
    closed, forgotten = (al.serve.Engine(model, params, layout, **SIZES) for _ in range(2))
    assert engines() == before + 2
    request = closed.submit([1, 2, 3], max_tokens=28)
    closers = [threading.Thread(target=closed.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    closed.close()
    assert not closed._thread.is_alive() and request.done  # also for who is not the first
    for closer in closers:
        closer.join()
    closed.close()
    assert closed.closed and request.done and engines() == before + 1
    with pytest.raises(EngineClosed):
        closed.submit([1])
    busy = threading.Event()
    forgotten._scheduler.call(lambda: busy.wait() and None)
    request = forgotten.submit([1, 2, 3], max_tokens=28)
    threading.Timer(0.2, busy.set).start()
    thread = forgotten._thread
    del forgotten
    gc.collect()
    thread.join(120)
    assert engines() == before
    with pytest.raises(EngineClosed, match=r"it was dropped, or its process ended, without close\(\)"):
        request.result()


def test_an_engine_is_dropped_by_the_collector_while_a_request_is_read() -> None:
    """Its thread may wait for that request, so the one that drops it must not wait for the thread."""
    engine = al.serve.Engine(*model_and_params("gpt"), **SIZES)
    thread, request = engine._thread, engine.submit([1, 2, 3], max_tokens=28)
    held, dropped = [engine], threading.Event()
    held.append(held)
    del engine

    def drop() -> None:
        with request._changed:
            held.pop(0)
            gc.collect()
        dropped.set()

    threading.Thread(target=drop, daemon=True).start()
    assert dropped.wait(60)
    thread.join(60)
    assert not thread.is_alive() and request.finish_reason == "closed"


def test_all_requests_of_an_engine_that_is_closed_end_as_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that end after the first one has told its reader."""
    engine = al.serve.Engine(*model_and_params("gpt"), **SIZES)
    entered, closed = threading.Event(), threading.Event()
    told = engine._scheduler._finished
    monkeypatch.setattr(engine._scheduler, "_finished", lambda request: (told(request), time.sleep(0.3)))

    def busy() -> None:
        entered.set()
        closed.wait(60)

    engine._scheduler.call(busy)
    assert entered.wait(60)
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            engine.generate([[1], [2], [3]])
        except EngineClosed as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    while engine.statistics().queued < 3:
        time.sleep(0.01)
    closing = threading.Thread(target=engine.close)
    closing.start()
    while not engine.closed:
        time.sleep(0.01)
    closed.set()
    asking.join(60)
    closing.join(60)
    assert failed and engine.statistics().finished["closed"] == 3


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
    env = dict(os.environ)
    del env["JAX_COMPILATION_CACHE_DIR"]  # that of all tests
    for _ in range(2):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "compiled")]
        found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=_ROOT, env=env)
        assert found.returncode == 0 and not found.stderr.strip(), found.stderr
        lines.append(found.stdout.rsplit(" ", 1))
    assert lines[0][0] == lines[1][0], "other tokens"
    assert [line[1].strip() for line in lines] == ["False", "True"]


@pytest.mark.slow
def test_programs_that_were_written_half_are_made_again(tmp_path: Any) -> None:
    place = tmp_path / "compiled"
    command = [sys.executable, "-c", SCRIPT, str(place)]
    subprocess.run(command, capture_output=True, timeout=300, check=True, cwd=_ROOT)
    files = {file: file.stat().st_size for file in place.glob("*-cache")}
    for file, size in files.items():
        with file.open("r+b") as damaged:
            damaged.truncate(size // 2)
        os.utime(file, (0, 0))
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, cwd=_ROOT)
    assert not found.stderr.strip(), "JAX warns of what it cannot read"
    assert {file: file.stat().st_size for file in place.glob("*-cache")}.keys() == files.keys()
    assert all(file.stat().st_size > size // 2 for file, size in files.items())


def test_the_folder_of_programs_may_begin_at_home(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    kept: list[str] = []
    monkeypatch.setattr(engines, "_keep_compiled", kept.append)
    model, params = model_and_params("gpt")
    with al.serve.Engine(model, params, **SIZES, compile_cache="~/programs"):
        pass
    assert kept == [str(tmp_path / "home" / "programs")]
    assert [file.suffix for file in (tmp_path / "home" / "programs").iterdir()] == [".json"], "the layout"
    assert not (tmp_path / "~").exists()
    relative = al.RayExecutor(compile_cache="programs")
    assert relative.cache_folder == str(tmp_path / "programs"), "actors begin elsewhere"
    assert al.RayExecutor(compile_cache="~/programs").cache_folder == "~/programs", "each has a home of its own"
    assert al.RayExecutor(compile_cache="").cache_folder == ""


def test_what_another_process_is_writing_stays(tmp_path: Any) -> None:
    files = [tmp_path / f"{name}-cache" for name in ("old", "young")]
    for file in files:
        file.write_bytes(b"half of it")
    os.utime(files[0], (0, 0))
    delete_damaged(tmp_path)
    assert [file.exists() for file in files] == [False, True]


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


def test_parameters_on_other_devices_are_copied() -> None:
    """Also where one of the engine's devices has the array already: whose it is may donate it."""
    model, params = model_and_params("gpt")
    given = jax.device_put(jax.tree.map(jnp.copy, params), jax.devices()[0])
    with al.serve.Engine(model, given, slots=2, max_length=32, buckets=(8,)) as engine:
        assert any(leaf.is_fully_replicated for leaf in jax.tree.leaves(engine.params))
        before = engine.generate([[1, 2, 3]])
        for leaf in jax.tree.leaves(given):
            leaf.delete()
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
