"""What HTTP adds to the engine: requests for one token to a server, beside an empty deployment of Ray Serve in the same run.

The engine's own part, from submission until the token, is what the server's metrics say of these very requests.
"""

from __future__ import annotations

import http.client
import json
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make `benchmarks` and `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import alpa_lite as al
from benchmarks.ray_session import local_ray
from benchmarks.report import Row, finish

NUM_REQUESTS, NUM_WARM_UP = 300, 50
BODY = json.dumps({"tokens": [1, 2, 3], "max_tokens": 1})


def target() -> Any:
    """The examples' Llama, small, with random parameters."""
    import jax

    from examples.serving_models import Llama

    model = Llama.of("small")
    return al.serve.ServeTarget(model=model, params=lambda: model.init_params(jax.random.key(0)))


class Empty:
    """Reads the body and answers."""

    async def __call__(self, request: Any) -> Any:
        await request.body()
        return {"status": "ok"}


class Client:
    """One connection."""

    def __init__(self, port: int) -> None:
        self._link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def seconds(self, method: str, path: str, body: str | None = None) -> float:
        start_s = time.perf_counter()
        self.text(method, path, body)
        return time.perf_counter() - start_s

    def text(self, method: str, path: str, body: str | None = None) -> str:
        self._link.request(method, path, body)
        got = self._link.getresponse()
        text = got.read().decode()
        assert got.status == 200, text
        return text

    def engine_time(self) -> tuple[float, float]:
        """Seconds until first tokens, of how many requests."""
        name = "alpa_lite_time_to_first_token_seconds"
        found = dict(line.rsplit(" ", 1) for line in self.text("GET", "/metrics").splitlines() if line.startswith(name))
        return float(found[f"{name}_sum"]), float(found[f"{name}_count"])


def added() -> Row:
    from ray import serve

    from alpa_lite.serve import deployment

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    settings = al.serve.ServerSettings(port=port, slots=4, max_length=64, buckets=(8, 32), cluster="1x1:cpu")
    deployment.start(target, settings)
    serve.run(serve.deployment(Empty).bind(), name="empty", route_prefix="/empty")
    try:
        client = Client(port)
        paths = {"empty": "/empty", "server": "/generate"}
        times: dict[str, list[float]] = {name: [] for name in paths}
        for number in range(NUM_WARM_UP + NUM_REQUESTS):
            if number == NUM_WARM_UP:
                sum_s, count = client.engine_time()
            for name, path in paths.items():
                took_s = client.seconds("POST", path, BODY)
                if number >= NUM_WARM_UP:
                    times[name].append(took_s)
        all_sum_s, all_count = client.engine_time()
    finally:
        deployment.stop()
    engine_s = (all_sum_s - sum_s) / (all_count - count)
    empty_s, server_s = (statistics.median(times[name]) for name in paths)
    return Row(
        benchmark="serve_http",
        case="HTTP beyond the engine and an empty deployment",
        value=(server_s - engine_s - empty_s) * 1e3,
        unit="ms",
        against=f"server {server_s * 1e3:.2f} ms, engine {engine_s * 1e3:.2f} ms, empty {empty_s * 1e3:.2f} ms",
        target="<= 3 ms",
    )


def main() -> None:
    with local_ray(2):
        finish([added()], sys.argv[1:])


if __name__ == "__main__":
    main()
