"""The Ray cluster: which one, what it has, and the place of every host of a plan in it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray._private import ray_constants

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.cluster.hardware import device_names
from alpa_lite.errors import ClusterError, user_line
from alpa_lite.executor.ray import guardian
from alpa_lite.executor.sites import Site

_OBJECT_STORE_BYTES = 512 * 2**20
_MARK = "ALPA_LITE_RAY"  # names the cluster in the environment of its processes
_CONNECT_S = 5.0
_connecting = threading.Lock()  # Ray starts once, and environment variables are set meanwhile
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(
    (0, 0, 0, 4, 0, 0, 0, 0, 0)
)  # RFC 9113, 3.4: and empty settings


def connect(address: str | None, num_cpus: int) -> bool:
    """Join the cluster at ``address``, or the one that is joined already, or start one here.

    Args:
        address: as in ``RayExecutor``.
        num_cpus: what a cluster that is started here offers at least.

    Returns:
        Whether all hosts of the cluster are this machine.

    Raises:
        ClusterError: there is no cluster at the address, it refuses the token, or none can be started here.
    """
    with _connecting:
        return _connected(address, num_cpus)


def _connected(address: str | None, num_cpus: int) -> bool:
    if ray.is_initialized():
        return is_one_machine()
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:
        # Loopback alone, no dashboard: nothing of a laptop's session can be reached from elsewhere. Token authentication is
        # what the user's Ray says (on by default since 2.59).
        with _guarded(), _on_loopback(), _started_here():
            _init(
                address="local",
                num_cpus=max(num_cpus, os.cpu_count() or 1),
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                object_store_memory=_OBJECT_STORE_BYTES,
                # Ray tells of calls that it tries again as of failures. Ray Serve's clean end has such: its controller is
                # killed while this process waits for two. And Ray gives workers niceness 15, with which they hardly run
                # beside any other work of the session: Ray Serve's proxy then takes minutes to start.
                _system_config={"enable_output_error_log_if_still_retry": False, "worker_niceness": 0},
            )
        return True
    try:
        _check_answers(address)
        _init(address=address)
    except Exception as error:  # Ray's own kinds: ConnectionError, RuntimeError, AuthenticationError, ValueError
        raise ClusterError(
            f"no Ray cluster answers at {address!r}: {_first_line(error)}. It must be the address of a running cluster whose "
            "token this process has (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token); Ray's own lines above, if there "
            f"are any, name a token that it refused. It was given as address= or RAY_ADDRESS, at {user_line()}. "
            "Start one (ray start --head), correct the address or the token, or leave both out to start one on this machine."
        ) from error
    return is_one_machine()


def _check_answers(address: str) -> None:
    """Raises OSError where nobody listens, or somebody who does not speak gRPC: Ray 2.60 itself tries for 14 minutes.

    It resolves "auto" itself.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in address:
        return
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S) as link:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return
        link.sendall(_HTTP2_HELLO)
        answer = link.recv(9)
    if answer[3:4] != b"\4":  # the type of a frame with settings, which a server sends first
        raise ConnectionError("what listens there is no Ray head")


def is_gone() -> bool:
    """Whether nobody answers any more where the cluster was that this process joined."""
    try:
        _check_answers(ray.get_runtime_context().gcs_address)
    except ConnectionError:
        return True
    except OSError:  # no answer yet, on a machine that is busy or far
        return False
    return False


@contextlib.contextmanager
def _started_here() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Ray's own are plain ones
        raise ClusterError(
            f"Ray could not be started on this machine: {_first_line(error)}. It needs some seconds of a core, memory, and room "
            "in its folder (/tmp/ray). Its logs there say more. Try again when the machine is less busy, or give the address of "
            "a cluster that runs."
        ) from error


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """What Ray starts meanwhile ends with this process, however that ends: see ``guardian.py``."""
    if not os.path.isdir("/proc/self"):  # not Linux
        yield
        return
    mark = secrets.token_hex(16)
    read_end, write_end = os.pipe()  # write_end stays open as long as this process lives; no other program inherits it
    command = [sys.executable, "-I", "-S", guardian.__file__, mark]
    os.posix_spawn(command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, read_end, 0)], setsid=True)
    os.close(read_end)
    os.environ[_MARK] = mark
    try:
        yield
        # A child that this process forks is not this process. Once: a child's own children have other files under that number.
        held = [write_end]
        os.register_at_fork(after_in_child=lambda: held and os.close(held.pop()))
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.environ.pop(_MARK)


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """What Ray starts meanwhile listens at 127.0.0.1 alone, as it does on macOS and Windows.

    On Linux Ray 2.60 replaces that address by the host's own, and listens on all interfaces; this is the switch that it has for
    the other systems. It reads its environment variable at import, so the value is set too.
    """
    name, value = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    given = os.environ.get(name)
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = value
        os.environ.pop(name)
        if given is not None:
            os.environ[name] = given


def _init(**settings: Any) -> None:
    """``ray.init`` without a warning that JAX has threads: what Ray starts here are programs of their own, not Python."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **settings)


def is_one_machine() -> bool:
    """Whether all hosts of the cluster are this machine."""
    return {node["NodeManagerAddress"] for node in alive_nodes()} == {ray.util.get_node_ip_address()}


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def ray_cluster(address: str | None = None, devices_per_host: int | None = None, device: str | None = None) -> Cluster:
    """The hosts of a Ray cluster as something to plan for.

    Args:
        address: as in ``RayExecutor``.
        devices_per_host: GPUs of every host, or virtual CPU devices; None = as many as every host has.
        device: of the hardware table; None = by the name that Ray knows the GPUs by, or "cpu".

    Raises:
        ClusterError: no host has so many, hosts differ, or the GPU is not in the table.
    """
    connect(address, devices_per_host or 1)
    hosts = [node["Resources"] for node in alive_nodes()]
    gpus = [int(r.get("GPU", 0)) for r in hosts if r.get("GPU", 0)]
    counts = gpus or [int(r.get("CPU", 0)) for r in hosts if r.get("CPU", 0)]
    if not counts:
        raise ClusterError(
            f"the Ray cluster has {len(hosts)} hosts without GPUs or CPUs to work on. At least one is needed. At {user_line()}. "
            "Start its nodes with --num-gpus or --num-cpus."
        )
    if devices_per_host is None and len(set(counts)) > 1:
        raise ClusterError(
            f"the hosts of the Ray cluster have {', '.join(map(str, sorted(set(counts))))} devices each. A plan is for hosts of "
            f"equal make. At {user_line()}. Say how many of each to use: Cluster.from_ray(devices_per_host={min(counts)})."
        )
    per_host = devices_per_host or counts[0]
    fitting = sum(count >= per_host for count in counts)
    if not fitting:
        raise ClusterError(
            f"devices_per_host={per_host} was asked of a Ray cluster whose hosts have {max(counts)} at most. At {user_line()}. "
            "Ask for fewer, or start larger nodes."
        )
    return Cluster.of(device or (_gpu_name(hosts) if gpus else "cpu"), num_hosts=fitting, devices_per_host=per_host)


def _gpu_name(hosts: Sequence[dict[str, float]]) -> str:
    """The hardware table's name of the GPUs; Ray lists them as "accelerator_type:H100"."""
    found = {key.split(":")[1].lower() for r in hosts for key in r if key.startswith("accelerator_type:")}
    names = [n for n in device_names() if any(n == f or n.startswith(f"{f}-") for f in found)]
    if len(found) != 1 or len(names) != 1:
        raise ClusterError(
            f"the GPUs of the Ray cluster are {', '.join(sorted(found)) or 'of no known kind'}, which is not one device of the "
            f"hardware table: {', '.join(device_names())}. At {user_line()}. Name it: Cluster.from_ray(device='h100-sxm')."
        )
    return names[0]


def bundles(sites: Sequence[Site], platform: str) -> list[dict[str, float]]:
    """What every host of a plan needs, in the order of the hosts."""
    found = []
    for host in sorted({site.host for site in sites}):
        own = [site for site in sites if site.host == host]
        devices = sum(len(site.devices) for site in own)
        found.append({"CPU": float(devices)} if platform == "cpu" else {"GPU": float(devices), "CPU": float(len(own))})
    return found


def check_room(wanted: Sequence[dict[str, float]]) -> None:
    """Refuse what does not fit the cluster even if nobody else used it.

    Raises:
        ClusterError: there are fewer devices than the plan has.
    """
    nodes = alive_nodes()
    free = sorted(({k: v for k, v in n["Resources"].items() if k in ("CPU", "GPU")} for n in nodes), key=str)
    for bundle in wanted:
        node = next((f for f in free if all(f.get(k, 0) >= v for k, v in bundle.items())), None)
        if node is None:
            has = ", ".join(f"{_resources(n['Resources'])} on {n['NodeManagerAddress']}" for n in nodes)
            raise ClusterError(
                f"the plan needs {' and '.join(map(_resources, wanted))} on its {len(wanted)} hosts, the Ray cluster has {has}. "
                f"Every host of the plan must fit on a node; a virtual CPU device takes one CPU. At {user_line()}. Plan for "
                "al.Cluster.from_ray(), or start more nodes (ray start --address=... --num-cpus or --num-gpus)."
            )
        for key, value in bundle.items():
            node[key] -= value


def _resources(resources: dict[str, float]) -> str:
    return " + ".join(f"{int(resources[key])} {key}" for key in ("GPU", "CPU") if resources.get(key)) or "nothing"
