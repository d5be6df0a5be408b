"""From ``kill -9`` of a served engine's process until the next right answer, with requests all the time.

Three times: an engine in one process; one on two hosts of which an actor is killed; the same, with the engine's own process
killed. There is room for one engine. The longest of three is reported.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make `benchmarks` and `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import alpa_lite as al
from benchmarks.ray_session import free_port, local_ray, pids_below
from benchmarks.report import Row, finish
from benchmarks.serve_http import target
from examples.client import Refused, stream

CASES = (("1x1:cpu", "ray::EngineActor"), ("2x1:cpu", "ray::WorkerActor"), ("2x1:cpu", "ray::EngineActor"))
NUM_KILLS = 3
PAUSE_S = 0.2  # between two requests: refusing them takes a processor that the engine needs to start
BODY = {"tokens": [1, 2, 3], "max_tokens": 8}


def asked(port: int) -> list[int] | None:
    """The answer, None if there is none now."""
    try:
        *_, whole = stream(BODY, port=port)
    except (Refused, OSError):
        return None
    return whole["tokens"]


def recovered(cluster: str, title: str) -> Row:
    from alpa_lite.serve import deployment

    port = free_port()
    settings = al.serve.ServerSettings(port=port, slots=4, max_length=64, buckets=(8, 32), cluster=cluster)
    deployment.start(target, settings)
    try:
        right, times_s = asked(port), []
        for _ in range(NUM_KILLS):
            victim = pids_below(title)[0]
            start_s = time.perf_counter()
            os.kill(victim, signal.SIGKILL)
            while os.path.exists(f"/proc/{victim}") or asked(port) != right:
                time.sleep(PAUSE_S)
            times_s.append(time.perf_counter() - start_s)
    finally:
        deployment.stop()
    return Row(
        benchmark="serve_recovery",
        case=f"{cluster}, {title.removeprefix('ray::')} killed",
        value=max(times_s),
        unit="s",
        against=json.dumps([round(time_s, 1) for time_s in times_s]),
        target="<= 20 s",
    )


def main() -> None:
    with local_ray(4):
        finish([recovered(*case) for case in CASES], sys.argv[1:])


if __name__ == "__main__":
    main()
