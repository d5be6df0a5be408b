"""A server under load by Locust for 60 s (``--seconds N``): some 30 requests per second of users that read, stream, read slowly,
leave, come 120 at once, and make mistakes (``serve_load_users.py``). ``--steady``: 24 per second, without those who come at once.

Every answer is checked against an engine in this process, every mistake against its status. Memory and open files of the engine,
of the process for HTTP and of Ray Serve's proxy are sampled every 2 s at least; the slopes are least squares over what follows
the first third.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make `benchmarks` and `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import alpa_lite as al
from benchmarks.ray_session import free_port, held, local_ray, pids_below
from benchmarks.report import Row, finish
from benchmarks.serve_http import target

# The queue is shorter than an engine of so many slots has: on a slow machine a crowd does not come at once.
SIZES: dict[str, Any] = {"slots": 16, "max_length": 128, "buckets": (8, 32, 96), "queue_limit": 32}
TOKEN, BODY_BYTES = "secret", 4096
NUM_PROMPTS = 32
USERS = Path(__file__).with_name("serve_load_users.py")
NUM_USERS, STEADY = 26, ("Reader", "Streamer", "SlowReader", "Leaver", "Mistaken")
AFTER_S = 3.0  # until connections are closed on both sides
PROCESSES = {"engine": "ray::EngineActor", "HTTP": "ray::ServeReplica", "proxy": "ray::ProxyActor"}


def expected() -> list[tuple[dict[str, Any], list[int]]]:
    """Bodies of mixed lengths, and the tokens that an engine in this process makes for them."""
    rng = random.Random(0)
    served = target()
    with al.serve.Engine(served.model, served.params(), **SIZES) as engine:
        bodies = [
            {
                "tokens": [rng.randrange(engine.vocab_size) for _ in range(rng.randint(1, SIZES["buckets"][-1]))],
                "max_tokens": rng.randint(1, 32),
            }
            for _ in range(NUM_PROMPTS)
        ]
        requests = [engine.submit(body["tokens"], max_tokens=body["max_tokens"]) for body in bodies]
        return [(body, list(request.result())) for body, request in zip(bodies, requests, strict=True)]


def load(seconds: float, steady: bool = False) -> list[Row]:
    """Serves and measures."""
    from alpa_lite.serve import deployment

    port = free_port()
    settings = al.serve.ServerSettings(port=port, token=TOKEN, body_bytes=BODY_BYTES, cluster="1x1:cpu", **SIZES)
    deployment.start(target, settings)
    try:
        with tempfile.TemporaryDirectory() as folder:
            known = Path(folder) / "expected.json"
            longest = SIZES["buckets"][-1]
            known.write_text(
                json.dumps({"token": TOKEN, "body_bytes": BODY_BYTES, "longest": longest, "pairs": expected()})
            )
            stats, samples, files = _run(known, port, seconds, STEADY if steady else ())
        return [*_counted(stats, seconds), *_grown(samples), *_open(samples, files), *_left(port)]
    finally:
        deployment.stop()


def _run(
    known: Path, port: int, seconds: float, users: Sequence[str]
) -> tuple[list[dict[str, Any]], np.ndarray, Sequence[float]]:
    """Locust's statistics, samples while it ran, and open files once its users are gone."""
    command = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(USERS),
        "--expected",
        str(known),
        "--headless",
        "--json",
        "--only-summary",
    ]
    options = ["-H", f"http://127.0.0.1:{port}", "-u", str(NUM_USERS), "-r", str(NUM_USERS), "-t", f"{seconds:.0f}s"]
    options += users
    pids = [pid for title in PROCESSES.values() for pid in pids_below(title)[:1]]
    samples, start_s = [], time.monotonic()
    with (
        tempfile.TemporaryFile("w+") as out,
        subprocess.Popen([*command, "--stop-timeout", "30", *options], stdout=out) as locust,
    ):
        while locust.poll() is None:
            samples.append([time.monotonic() - start_s, *held(pids)])
            time.sleep(max(2.0, seconds / 300))
        time.sleep(AFTER_S)
        out.seek(0)
        return json.load(out), np.asarray(samples), held(pids)[len(pids) :]


def _counted(stats: list[dict[str, Any]], seconds: float) -> list[Row]:
    rows = [
        Row(
            benchmark="serve_load",
            case=f"requests {entry['name']!r}",
            value=entry["num_failures"],
            unit="failures",
            against="{} requests, median {:.0f} ms, 99 % {:.0f} ms".format(
                entry["num_requests"], *(_quantile(entry, share) for share in (0.5, 0.99))
            ),
            target="0",
        )
        for entry in stats
    ]
    count = sum(entry["num_requests"] for entry in stats)
    refused = sum(entry["num_requests"] for entry in stats if entry["name"].endswith(", refused"))
    failures = sum(entry["num_failures"] for entry in stats)
    against = f"{count} requests in {seconds:.0f} s, {count / seconds:.1f} per second"
    return [
        *rows,
        Row(benchmark="serve_load", case="all", value=failures, unit="failures", against=against, target="0"),
        Row(benchmark="serve_load", case="refused, as slots and queue were full", value=refused, unit="requests"),
    ]


def _quantile(entry: dict[str, Any], share: float) -> float:
    """Milliseconds, of Locust's rounded times and their counts."""
    left = share * entry["num_requests"]
    for time_ms, count in sorted((float(time_ms), count) for time_ms, count in entry["response_times"].items()):
        left -= count
        if left <= 0:
            return time_ms
    return float("nan")


def _grown(samples: np.ndarray) -> list[Row]:
    samples = samples[samples[:, 0] >= samples[-1, 0] / 3]
    cases = [f"{who}, {what}" for what in ("memory", "open files") for who in PROCESSES]
    units = ["MiB"] * len(PROCESSES) + ["files"] * len(PROCESSES)
    return [
        Row(
            benchmark="serve_load",
            case=case,
            value=float(np.polyfit(samples[:, 0] / 60, column, 1)[0]),
            unit=f"{unit} per minute",
            against=f"{column[0]:.0f} after {samples[0, 0]:.0f} s, {column[-1]:.0f} after {samples[-1, 0]:.0f} s",
            target="no growth",
        )
        for case, unit, column in zip(cases, units, samples.T[1:], strict=True)
    ]


def _open(samples: np.ndarray, files: Sequence[float]) -> list[Row]:
    """Connections are files: none stays open once the users are gone. Some things are opened with the first request."""
    before = samples[0, 1 + len(PROCESSES) :]
    return [
        Row(
            benchmark="serve_load",
            case=f"{who}, open files left",
            value=float(after - first),
            unit="files",
            against=f"{first:.0f} before the first user, {after:.0f} after the last",
            target="a few",
        )
        for who, first, after in zip(PROCESSES, before, files, strict=True)
    ]


def _left(port: int) -> list[Row]:
    """Nothing waits or holds a slot once all have left."""
    import http.client

    link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    link.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    lines = link.getresponse().read().decode().splitlines()
    link.close()
    found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return [
        Row(
            benchmark="serve_load",
            case=f"{name} at the end",
            value=float(found[f"alpa_lite_{name}"]),
            unit="requests",
            target="0",
        )
        for name in ("queued_requests", "active_requests")
    ]


def main() -> None:
    seconds = float(sys.argv[sys.argv.index("--seconds") + 1]) if "--seconds" in sys.argv else 60.0
    with local_ray(2):
        finish(load(seconds, "--steady" in sys.argv), sys.argv[1:])


if __name__ == "__main__":
    main()
