"""Servers that do not start: each says why, and nothing of it is left."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from typer.testing import CliRunner

import alpa_lite as al
from alpa_lite.cli import main
from alpa_lite.cli.serve import _check_target
from alpa_lite.errors import EngineClosed, ServeError
from benchmarks.ray_session import free_port
from tests.serve.served_target import not_a_target, target

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'alpa-lite[serve]'")
pytestmark = [pytest.mark.ray, pytest.mark.medium]


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_a_port_that_is_taken(ray_session: None, host: str, shown: str) -> None:
    from alpa_lite.serve import deployment

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
        try:
            listening.bind((host, 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        listening.listen()
        taken = listening.getsockname()[1]
        settings = al.serve.ServerSettings(host=host, port=taken, cluster="1x1:cpu")
        with pytest.raises(ServeError, match=rf"cannot listen on {re.escape(shown)}:{taken}: Address .*--port"):
            deployment.start(target, settings)


def test_more_than_the_cluster_has(ray_session: None) -> None:
    from alpa_lite.serve import deployment

    settings = al.serve.ServerSettings(port=free_port(), cluster="1x1:cpu", num_gpus=1000)
    with pytest.raises(ServeError, match=r"was to take 1000 GPUs, and this Ray cluster has \d+\. .*--gpus"):
        deployment.start(target, settings)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (not_a_target, r"could not be made. Correct its cause:\n(.*\n)*AttributeError: 'int' object"),
        (target, r"could not be started: .*num_stages=2.*At the command line"),
    ],
)
@pytest.mark.slow
def test_an_engine_that_cannot_be_made_says_why_without_rays_traces(ray_session: None, make: Any, words: str) -> None:
    from alpa_lite.serve import deployment

    settings = al.serve.ServerSettings(port=free_port(), cluster="1x1:cpu", slots=4, max_length=48, num_stages=2)
    with pytest.raises(ServeError, match=words) as raised:
        deployment.start(make, settings)
    assert "ServeReplica" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["tests.serve.served_target:nothing"], "has no callable 'nothing'"),
        (["tests.serve.served_target:target", "--buckets", "1,x"], "--buckets '1,x'"),
        (
            ["tests.serve.served_target:target", "--buckets", "64", "--max-length", "48"],
            "--buckets 64 was given. They must be whole numbers from 1 to --max-length 48. Correct one of them, "
            "e.g. --buckets 48",
        ),
        (
            ["tests.serve.served_target:target", "--slots", "0"],
            "--slots 0 was given. It must be a whole number from 1. ",
        ),
        (["tests.serve.served_target:target", "--buckets", ""], "--buckets '' was given. It must be whole numbers"),
        (
            ["tests.serve.served_target:target", "--max-length", "1"],
            "--max-length 1 was given. It must be a whole number from 2, as prompt and answer",
        ),
        (["tests.serve.served_target:target", "--num-stages", "0"], "--num-stages 0 was given"),
        (
            ["tests.serve.served_target:target", "--queue-limit", "-1"],
            "--queue-limit -1 was given. It must be a whole number from 0",
        ),
        (["tests.serve.served_target:target", "--token-file", "/nowhere"], "cannot be read from '/nowhere'"),
        (
            ["tests.serve.served_target:target", "--checkpoint", "tests"],
            "there is no checkpoint in '",
        ),
        (["tests.serve.served_target:target", "--host", ""], "host='' was given; it must be the name or address"),
    ],
)
def test_bad_settings_are_told_at_once(given: list[str], words: str) -> None:
    found = CliRunner().invoke(main, ["serve", *given])
    assert found.exit_code == 2 and words in found.output


@pytest.mark.parametrize(
    ("graphs", "given", "words"),
    [
        (["prefill_8", "decode"], ["--slots", "8", "--buckets", "8"], "slots=4, and slots=8 was given"),
        (
            ["prefill_8", "decode"],
            ["--slots", "4", "--buckets", "8,32"],
            "has no plan of 'prefill_32', but of 'prefill_8'",
        ),
        (["prefill_8"], ["--slots", "4"], "has no plan of 'decode'"),
    ],
)
def test_a_layout_of_other_sizes_is_told_before_ray_starts(
    tmp_path: Path, graphs: list[str], given: list[str], words: str
) -> None:
    made = target()
    all_graphs = al.serve.graphs(made.model, made.params, slots=4, max_length=48, buckets=(8,))
    layout = al.plan_shared(
        {name: all_graphs[name] for name in graphs}, shared="0", cluster=al.Cluster.parse("1x1:cpu"), donate_argnums=1
    )
    layout.save(tmp_path / "layout.json")
    command = ["serve", "tests.serve.served_target:target", "--layout", str(tmp_path / "layout.json"), *given]
    found = CliRunner().invoke(main, command)
    assert found.exit_code == 2 and words in found.output and "(--slots and --buckets" in found.output, found.output


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"port": 70000}, r"port=70000 was given; it must be a whole number from 1 to 65535"),
        ({"port": 0}, r"port=0 "),
        ({"host": " "}, r"host=' ' was given; .*loopback.*--host"),
        ({"host": None}, r"host=None was given"),
        ({"body_bytes": -1}, r"body_bytes=-1 .*--body-bytes"),
        ({"body_timeout_s": 0}, r"body_timeout_s=0 .*--body-timeout"),
        ({"timeout_s": float("nan")}, r"timeout_s=nan was given; it must be seconds"),
        ({"drain_s": -1}, r"drain_s=-1 .*--drain"),
        ({"cluster": 5}, r"cluster=5 was given; it must be a str"),
        ({"layout": 5}, r"layout=5 was given; it must be the path of a file, or None"),
        ({"checkpoint": ["a"]}, r"checkpoint=\['a'\] was given; it must be the path of a folder"),
        ({"checkpoint_path": None}, r"checkpoint_path=None was given; it must be a str"),
        ({"num_gpus": True}, r"num_gpus=True .*\(at the command line --gpus\)"),
        ({"slots": 0}, r"slots=0 was given; it must be a whole number from 1"),
        ({"max_length": 1.5}, r"max_length=1.5 "),
        ({"num_stages": -1}, r"num_stages=-1 "),
        ({"queue_limit": 0}, r"queue_limit=0 "),
        ({"buckets": (64, 4096)}, r"buckets=\(64, 4096\) was given; they must be .* max_length=2048"),
        ({"max_length": 1, "buckets": (1,)}, r"max_length=1 was given; it must be a whole number from 2"),
        ({"token": "s\u00e9cret"}, r"printable ASCII"),
        ({"token": ""}, r"printable ASCII"),
        ({"token": "secret "}, r"begins or ends with a blank"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ServeError, match=words):
        al.serve.ServerSettings(**given)


def test_settings_may_be_numbers_of_numpy() -> None:
    given = {"slots": np.int64(4), "max_length": np.int32(48), "buckets": np.array([8, 4]), "timeout_s": np.float32(5)}
    found = al.serve.ServerSettings(**given, num_stages=np.int64(1), queue_limit=np.int8(9), port=np.uint16(80))
    assert found == al.serve.ServerSettings(
        slots=4, max_length=48, buckets=(4, 8), timeout_s=5.0, queue_limit=9, num_stages=1, port=80
    )
    assert {type(x) for x in (found.slots, found.queue_limit, found.port, *(found.buckets or ()))} == {int}


@pytest.mark.parametrize("name", ["encode", "decode"])
def test_a_target_whose_encode_or_decode_is_no_function(name: str) -> None:
    with pytest.raises(
        ServeError, match=rf"ServeTarget: {name}='utf-8' was given; .*test_start.*encode=tokenizer.encode"
    ):
        al.serve.ServeTarget(model=None, params=None, **{name: "utf-8"})


def a_tuple() -> tuple[int, int]:
    raise AssertionError("it is not called")


def nothing() -> None:
    raise AssertionError("it is not called")


class Named(Protocol):
    """Which Python cannot compare with a class."""

    name: str


def anything() -> Any:
    raise AssertionError("it is not called")


def named() -> Named:
    raise AssertionError("it is not called")


@pytest.mark.parametrize("name", ["anything", "named"])
def test_targets_that_say_little_are_taken(name: str) -> None:
    _check_target(f"tests.serve.test_start:{name}")


@pytest.mark.parametrize("line", ["import not_there", "from json import not_there"])
def test_what_a_target_cannot_import_is_told_of_it(tmp_path: Path, line: str) -> None:
    (tmp_path / "own.py").write_text(f"import json\n{line}\n")
    found = CliRunner().invoke(main, ["serve", f"{tmp_path}/own.py:target"])
    assert found.exit_code == 2, found.output
    assert f"the target '{tmp_path}/own.py:target': " in found.output and "not_there" in found.output
    assert f"({tmp_path}/own.py:2)" in found.output and "Ray" not in found.output


@pytest.mark.parametrize(("name", "said"), [("a_tuple", r"tuple"), ("nothing", "None")])
def test_what_a_target_says_that_it_returns_is_looked_at_before_ray_starts(name: str, said: str) -> None:
    found = CliRunner().invoke(main, ["serve", f"tests.serve.test_start:{name}"])
    assert found.exit_code == 2, found.output
    assert f"says that it returns {said}" in found.output and "al.serve.ServeTarget(model=..., params=" in found.output


def interrupted_serve(
    monkeypatch: pytest.MonkeyPatch, *, connect: Callable[[], None], start: Callable[[], None]
) -> None:
    """What the command came to, where these two do what they do there."""
    from alpa_lite.executor.ray import cluster
    from alpa_lite.serve import deployment

    def started_after(*_: Any, started: Callable[[], object]) -> None:
        start()
        started()

    monkeypatch.setattr(cluster, "connect", lambda *_: connect())
    monkeypatch.setattr(deployment, "start", started_after)
    kinds = signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(kind) for kind in kinds]
    try:
        found = CliRunner().invoke(main, ["serve", "tests.serve.served_target:target", "--port", str(free_port())])
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
    assert found.exit_code == 130 and "the server is still starting" in found.output, found.output
    assert found.output.endswith("ended while it was starting\n")


def terminated() -> None:
    signal.raise_signal(signal.SIGTERM)


def lost() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        terminated()


def failed() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        terminated()
    raise ServeError("the engine could not be made")


@pytest.mark.parametrize("start", [terminated, lost, failed])
def test_whoever_interrupts_a_start_is_told_that_it_was_one(
    monkeypatch: pytest.MonkeyPatch, start: Callable[[], None]
) -> None:
    """Not that it never served: it may have answered before the start had ended. Nor is the signal forgotten where its exception
    is lost, as in JAX's callback for the garbage collector."""
    interrupted_serve(monkeypatch, connect=lambda: None, start=start)


@pytest.mark.parametrize("impatient", [False, True])
def test_ray_is_not_left_half_started(monkeypatch: pytest.MonkeyPatch, impatient: bool) -> None:
    """It ends with a segmentation fault then. Whoever asks twice does not wait for a cluster that never answers."""
    seen: list[str] = []

    def connect() -> None:
        signal.raise_signal(signal.SIGINT)
        seen.append("first")
        if impatient:
            signal.raise_signal(signal.SIGINT)
            seen.append("second")

    interrupted_serve(monkeypatch, connect=connect, start=lambda: seen.append("server"))
    assert seen == ["first"]


def test_a_token_that_headers_cannot_carry(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s\u00e9cret", encoding="utf-8")
    found = CliRunner().invoke(
        main, ["serve", "tests.serve.served_target:target", "--token-file", str(tmp_path / "token")]
    )
    assert found.exit_code == 2 and "printable ASCII" in found.output


@pytest.mark.slow
def test_whoever_interrupts_a_start_leaves_no_server(ray_session: None) -> None:
    """At the last moment: from ``started`` on there is a server to be stopped."""
    from ray import serve

    from alpa_lite.serve import deployment

    def interrupted() -> None:
        assert list(serve.status().applications)
        raise KeyboardInterrupt

    settings = al.serve.ServerSettings(port=free_port(), cluster="1x1:cpu", slots=1, max_length=48, buckets=(8,))
    with pytest.raises(KeyboardInterrupt):
        deployment.start(target, settings, started=interrupted)
    assert not serve.status().applications


def broken() -> al.serve.ServeTarget:
    raise ValueError("a secret path")


def test_clients_are_not_told_why_an_engine_is_missing(capsys: pytest.CaptureFixture) -> None:
    """Who runs the server is: the replica by ``listen``, and the log of the engine's process."""
    from alpa_lite.serve.deployment import EngineActor

    actor = EngineActor(broken, al.serve.ServerSettings())
    with pytest.raises(EngineClosed, match="Its log says why") as raised:
        actor._made()
    assert "secret" not in str(raised.value)
    assert "ValueError: a secret path" in actor._failure
    assert "ValueError: a secret path" in capsys.readouterr().err


def test_two_signals_at_once_end_a_server() -> None:
    """Several at once may come while one is handled, or be taken by another thread while the first one waits for good."""
    script = (
        "from alpa_lite.cli.serve import _Ending\n"
        "ending = _Ending()\n"
        "ending.catch()\n"
        "ending.has_begun()\n"
        "while True:\n"
        "    ending.asked = False\n"
        "    print('waits', flush=True)\n"
        "    ending.wait()\n"
        "    print('ended', flush=True)\n"
        "    input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        watch = threading.Timer(60, child.kill)
        watch.start()
        try:
            assert child.stdin is not None and child.stdout is not None
            for gap in range(40):
                assert child.stdout.readline() == "waits\n"
                time.sleep(0.005)
                child.send_signal(signal.SIGINT)
                for _ in range(15 * gap):
                    pass
                child.send_signal(signal.SIGTERM)
                assert child.stdout.readline() == "ended\n"
                child.stdin.write("\n")
                child.stdin.flush()
        finally:
            watch.cancel()
            child.kill()
