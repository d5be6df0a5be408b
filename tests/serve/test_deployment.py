"""A model behind Ray Serve: right answers, an engine that is killed under load, a server that ends, settings that cannot be."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import alpa_lite as al
from alpa_lite.cli.serve import served
from alpa_lite.errors import ServeError
from benchmarks.ray_session import free_port
from examples import client
from tests.serve.clients import PROMPTS, ask, begin, kill_under_load, wait_until
from tests.serve.served_target import target

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'alpa-lite[serve]'")
pytestmark = [pytest.mark.ray, pytest.mark.medium]

SIZES: dict[str, Any] = {"slots": 4, "max_length": 4096, "buckets": (8, 32)}


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Greedy answers of an engine in this process."""
    served = target()
    with al.serve.Engine(served.model, served.params(), cluster=al.Cluster.parse("1x2:cpu"), **SIZES) as engine:
        return [list(tokens) for tokens in engine.generate(PROMPTS, max_tokens=12)]


@pytest.fixture(scope="module")
def port(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    from alpa_lite.serve import deployment

    port = free_port()
    cache = str(tmp_path_factory.mktemp("compiled"))
    settings = al.serve.ServerSettings(
        port=port, cluster="1x2:cpu", compile_cache=cache, body_timeout_s=10.0, timeout_s=120.0, **SIZES
    )
    deployment.start(target, settings)
    yield port
    deployment.stop()


def test_answers_are_the_engines(port: int, expected: list[list[int]]) -> None:
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        status, raw = ask(port, prompt)
        assert (status, json.loads(raw)["tokens"]) == (200, tokens)


def test_the_client_of_the_examples(port: int, expected: list[list[int]]) -> None:
    *events, whole = client.patient({"tokens": PROMPTS[0], "max_tokens": 12}, port=port)
    assert [event["token"] for event in events] == whole["tokens"] == expected[0]
    with pytest.raises(client.Refused, match=r"400: .*max_tokens"):
        list(client.patient({"tokens": PROMPTS[0], "max_tokens": 5000}, port=port))


def test_the_target_of_the_examples_is_found() -> None:
    found = served("examples/served.py:target", os.getcwd())
    assert found.encode is not None and found.decode is not None
    assert found.decode(list(found.encode("def"))) == "def"
    assert found.model.config.seq_len == 64


def test_all_that_ask_at_once_are_told_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that ask after a failure are told the next one."""
    import ray

    from alpa_lite.serve import deployment

    actor = deployment.EngineActor.__new__(deployment.EngineActor)
    actor._listening, actor._failure = None, ""
    context = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    start, failures = deployment.EngineServer.start, ["no port"]

    async def fails_once(server: Any, host: str) -> Any:
        if failures:
            raise OSError(failures.pop())
        return await start(server, host)

    monkeypatch.setattr(deployment.EngineServer, "start", fails_once)

    async def ask() -> None:
        with pytest.raises(OSError, match="no port"):
            await actor.listen("node")
        first, second = await asyncio.gather(actor.listen("node"), actor.listen("node"))
        assert first == second == await actor.listen("node")
        await actor._server.stop()

    asyncio.run(ask())


def test_it_listens_on_loopback_alone(port: int) -> None:
    """By default; addresses as Linux shows them, in hexadecimal."""
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, _, state = line.split()[1:4]
            if state == "0A" and int(address.rpartition(":")[2], 16) == port:
                listening.add(address.rpartition(":")[0])
    assert listening == {"0100007F"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot(port: int, expected: list[list[int]], stream: bool) -> None:
    """On a busy machine the word of it may come when the answer is finished: then it is tried again."""
    assert any(
        _cancelled_by_leaving(port, {"tokens": PROMPTS[0], "max_tokens": 4000, "stream": stream}) for _ in range(3)
    )
    assert json.loads(ask(port, PROMPTS[1])[1])["tokens"] == expected[1]


def _cancelled_by_leaving(port: int, body: dict[str, Any]) -> bool:
    before = _metric(port, 'finished_requests_total{reason="cancelled"}')
    with socket.create_connection(("127.0.0.1", port)) as link:
        data = json.dumps(body).encode()
        link.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        wait_until(lambda: _metric(port, "active_requests") == 1)
    wait_until(lambda: _metric(port, "active_requests") == 0)
    return _metric(port, 'finished_requests_total{reason="cancelled"}') == before + 1


def _metric(port: int, name: str) -> float:
    """0 where it has not been counted yet."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as got:
        lines = got.read().decode().splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"alpa_lite_{name} ")), 0.0)


def test_a_body_that_does_not_come_is_refused(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as link:
        link.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert link.recv(100).startswith(b"HTTP/1.1 408")


def test_an_engine_that_is_killed_under_load(port: int, expected: list[list[int]]) -> None:
    kill_under_load(port, "ray::EngineActor", expected)


def test_a_second_server_is_refused_and_the_first_stays(port: int, expected: list[list[int]]) -> None:
    from alpa_lite.serve import deployment

    with pytest.raises(ServeError, match=r"runs on this Ray cluster already, with 'alpa_lite'.*--address"):
        deployment.start(target, al.serve.ServerSettings(port=free_port(), cluster="1x1:cpu", **SIZES))
    assert json.loads(ask(port, PROMPTS[0])[1])["tokens"] == expected[0]


@pytest.mark.parametrize("comes", ["soon", "late", "again", "never"])
def test_a_proxy_that_is_started_again_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, comes: str
) -> None:
    """On a busy machine Ray Serve gives up its first proxy, and with it ``serve.start``, or while that returns. Where none
    comes, Ray Serve itself is started once more."""
    import ray
    from ray import serve
    from ray.exceptions import ActorDiedError
    from ray.serve.schema import ProxyStatus, ServeStatus

    from alpa_lite.serve import deployment

    calls: list[str] = []

    def start(**_: Any) -> None:
        calls.append("start")
        if comes != "soon":
            raise ActorDiedError if len(calls) == 1 else TimeoutError

    def status() -> ServeStatus:
        healthy = comes in ("soon", "late") or (comes == "again" and "shutdown" in calls)
        last = ProxyStatus.HEALTHY if healthy else ProxyStatus.UNHEALTHY
        return ServeStatus(proxies={"node": next(statuses, last)})

    logs = tmp_path / "session" / "logs" / "serve"
    logs.mkdir(parents=True)
    (logs / "controller_1.log").write_text(
        "INFO now controller 1 -- Fine.\nWARNING now controller 1 -- Not ready.\n" * 2
    )
    context = SimpleNamespace(get_temp_dir=lambda: str(tmp_path), get_session_name=lambda: "session")
    statuses = iter([ProxyStatus.STARTING, ProxyStatus.UNHEALTHY, ProxyStatus.STARTING])
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(serve, "start", start)
    monkeypatch.setattr(serve, "status", status)
    monkeypatch.setattr(serve, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(deployment, "_PROXY_S", 1.0)
    settings = al.serve.ServerSettings(port=free_port(), **SIZES)
    if comes == "never":
        told = (
            r"proxy did not start on 127\.0\.0\.1:\d+ within 1 s, 2 times; Not ready\. .* session in /.*, and try again"
        )
        with pytest.raises(ServeError, match=told):
            deployment._start_proxy(settings)
    else:
        deployment._start_proxy(settings)
    assert next(statuses, None) is None
    once, again = ["start"], ["start", "shutdown", "start"]
    assert calls == {"soon": once, "late": once, "again": again, "never": [*again, "shutdown"]}[comes]


@pytest.mark.parametrize("gone", [True, False])
def test_the_end_does_not_wait_for_a_cluster_that_is_gone(
    ray_session: None, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    from alpa_lite.executor.ray.cluster import is_gone
    from alpa_lite.serve import deployment

    assert not is_gone()
    waits = threading.Event()
    monkeypatch.setattr(deployment, "_end", lambda drain_s: waits.wait(300 if gone else 0.3))
    monkeypatch.setattr(deployment, "_LOOK_S", 0.1)
    if gone:
        with socket.socket() as bound:  # to a port where nobody listens
            bound.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{bound.getsockname()[1]}"
            monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address=address))
            with pytest.raises(ServeError, match=r"Ray has ended before the server.* KillMode=mixed"):
                deployment.stop()
    else:
        deployment.stop()
    waits.set()


def test_what_fails_at_the_end_is_raised(ray_session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from alpa_lite.serve import deployment

    def fails(drain_s: float) -> None:
        raise OSError("no more files")

    monkeypatch.setattr(deployment, "_end", fails)
    with pytest.raises(OSError, match="no more files"):
        deployment.stop()


def command_line(port: int, *options: str, **settings: Any) -> subprocess.Popen[str]:
    """``alpa-lite serve`` in a process with a Ray of its own."""
    environment = os.environ | {"RAY_AUTH_TOKEN": "0" * 32}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "alpa_lite", "serve", "tests.serve.served_target:target"]
    fixed = ["--buckets", "8", "--slots", "2", "--max-length", "4096", "--cluster", "1x1:cpu", "--port", str(port)]
    return subprocess.Popen(
        [*command, *fixed, *options], env=environment, stdout=subprocess.PIPE, text=True, **settings
    )


@pytest.mark.slow
def test_a_signal_to_rays_processes_too_ends_the_server_soon() -> None:
    with command_line(free_port(), stderr=subprocess.PIPE, start_new_session=True) as served:
        try:
            assert served.stdout is not None and any(line.startswith("serving ") for line in served.stdout)
            os.killpg(served.pid, signal.SIGTERM)
            _, told = served.communicate(timeout=50)  # Ray's client itself waits for 60 s
        finally:
            served.kill()
    assert served.returncode and "Ray has ended before the server, and requests that ran are lost" in told


def test_the_command_line_serves_and_ends(ray_session: None, tmp_path: Path) -> None:
    """SIGTERM ends it, a request that runs gets its whole answer, nothing is left, and no failure is told."""
    port, token = free_port(), tmp_path / "token"
    token.write_text("secret\n")
    with (
        (tmp_path / "errors").open("w") as errors,
        command_line(port, "--drain", "300", "--token-file", str(token), stderr=errors) as served,
    ):
        assert served.stdout is not None
        try:
            assert any(line.startswith("serving ") for line in served.stdout)
            assert ask(port, [1, 2])[0] == 401
            assert ask(port, [1, 2], Authorization="Bearer secret")[0] == 200
            body = {"tokens": [1, 2], "max_tokens": 1000, "stream": True}
            with begin(port, body, Authorization="Bearer secret") as running:
                events = [running.readline()]
                served.send_signal(signal.SIGTERM)
                while ask(port, [1, 2], Authorization="Bearer secret")[0] != 503:
                    pass
                with pytest.raises(urllib.error.HTTPError, match="503"):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60)
                events += running.read().splitlines()
        except BaseException:
            served.terminate()
            raise
        told, _ = served.communicate(timeout=300)
    tokens = [json.loads(event.removeprefix(b"data: ")) for event in events if event.strip()]
    assert len(tokens) == 1001 and tokens[-1]["finish_reason"] == "length"
    assert served.returncode == 0 and told == "ending: requests that run have 300 s\n"
    assert "INFO" not in (tmp_path / "errors").read_text(), "Ray Serve calls ready what has no engine yet"
    with pytest.raises(OSError):
        ask(port, [1, 2])
