"""A cluster of two Ray nodes that other processes started, with a token; the driver belongs to neither."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

import pytest

from benchmarks.ray_session import free_port
from tests.executor.ray_nodes import (
    LOOPBACK,
    ROOT,
    listening_hosts,
    own_environment,
    ray_nodes,
    session_processes,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CONNECT = """
import sys, time
from alpa_lite.errors import ClusterError
from alpa_lite.executor.ray.cluster import connect
start = time.monotonic()
try:
    connect(sys.argv[1], 1)
except ClusterError as error:
    print(f"{time.monotonic() - start:.1f} s: {error}")
else:
    print("joined")
"""


def run(env: Mapping[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env=dict(env), cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    return done.stdout


def test_stages_on_two_nodes_of_a_cluster_that_others_started() -> None:
    with ray_nodes(2, num_cpus=4) as nodes:
        found = json.loads(run(nodes.env, "-m", "tests.executor.ray_nodes_driver", nodes.address).splitlines()[-1])
        assert found["losses"] == found["local_losses"] and found["equal"]
        assert (found["strategy"], found["bundle_nodes"]) == ("STRICT_SPREAD", 2)
        assert found["sites"] == [[0, 0, 1], [1, 2, 3]]
        assert (found["cpus"], found["free_while_running"], found["free"]) == ([4.0, 4.0], 4.0, 8.0)
        assert found["groups"] == ["REMOVED"]

        told = run(nodes.env, "-m", "alpa_lite", "doctor", "--executor", "ray", "--address", nodes.address)
        assert "ok    Ray node 1" in told and "4 CPUs; the same versions as here" in told
        assert "two stages on two nodes send to each other; bit-equal to one device" in told

        wrong = run({**nodes.env, "RAY_AUTH_TOKEN": "0123456789abcdef"}, "-c", CONNECT, nodes.address)
        assert "no Ray cluster answers at" in wrong and "token this process has (RAY_AUTH_TOKEN" in wrong
        assert run(nodes.env, "-c", CONNECT, nodes.address) == "joined\n"  # i.e. it was the token
    assert not any(session_processes(session) for session in nodes.sessions)
    host, _, port = nodes.address.partition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=1)


def test_an_address_where_nobody_listens() -> None:
    address = f"127.0.0.1:{free_port()}"
    start = time.monotonic()
    told = run(own_environment(), "-c", CONNECT, address)
    assert f"no Ray cluster answers at '{address}': [Errno 111] Connection refused. It must be" in told
    assert "correct the address or the token, or leave both out" in told
    assert time.monotonic() - start < 30  # of which starting Python and importing Ray is the most


def test_an_address_where_another_program_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            link, _ = server.accept()
            with link:
                link.recv(100)
                link.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        told = run(own_environment(), "-c", CONNECT, address)
        thread.join()
    assert f"no Ray cluster answers at '{address}': what listens there is no Ray head. It must be" in told


def test_a_machine_where_ray_cannot_start() -> None:
    told = run(own_environment() | {"RAY_TMPDIR": "/dev/null/ray"}, "-c", CONNECT, "")
    assert "Ray could not be started on this machine: [Errno 20] Not a directory: '/dev/null/ray'. It needs" in told


def test_a_cluster_that_is_started_here_listens_on_loopback_alone() -> None:
    start = "import sys\nfrom alpa_lite.executor.ray.cluster import connect\nprint(connect(None, 2), connect(None, 2))"
    env = own_environment() | {"RAY_AUTH_TOKEN": "0123456789abcdef"}
    command = [sys.executable, "-c", f"{start}\nsys.stdout.flush()\nsys.stdin.read()"]
    driver = subprocess.Popen(
        command, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "True True\n"
        hosts = listening_hosts(session_processes(driver.pid))
        assert hosts and hosts <= LOOPBACK, hosts
    finally:
        driver.communicate()
    for _ in range(100):
        if not session_processes(driver.pid):
            return
        time.sleep(0.1)
    raise AssertionError(session_processes(driver.pid))
