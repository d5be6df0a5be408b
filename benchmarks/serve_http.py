"""What HTTP adds to the engine: requests for one token to a server, beside an empty deployment of Ray Serve in the same run.

The engine's own part, from submission until the token, is what the server's metrics say of each of these very requests. What
HTTP adds is the median of what each took beyond that, less the median of the empty deployment.
"""

from __future__ import annotations

import http.client
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: make `benchmarks` and `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import alpa_lite as al
from benchmarks.ray_session import free_port, local_ray
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

    def engine_seconds(self) -> float:
        """Until first tokens, of all requests so far."""
        name = "alpa_lite_time_to_first_token_seconds_sum"
        found = dict(line.rsplit(" ", 1) for line in self.text("GET", "/metrics").splitlines() if line.startswith(name))
        return float(found[name])


def added() -> Row:
    from ray import serve

    from alpa_lite.serve import deployment

    port = free_port()
    settings = al.serve.ServerSettings(port=port, slots=4, max_length=64, buckets=(8, 32), cluster="1x1:cpu")
    deployment.start(target, settings)
    serve.run(serve.deployment(Empty).bind(), name="empty", route_prefix="/empty")
    try:
        client = Client(port)
        empty, server, engine, beyond = [], [], [], []
        for number in range(NUM_WARM_UP + NUM_REQUESTS):
            empty_s = client.seconds("POST", "/empty", BODY)
            before_s = client.engine_seconds()
            server_s = client.seconds("POST", "/generate", BODY)
            engine_s = client.engine_seconds() - before_s
            if number >= NUM_WARM_UP:
                empty.append(empty_s)
                server.append(server_s)
                engine.append(engine_s)
                beyond.append(server_s - engine_s)
    finally:
        deployment.stop()
    empty_ms, server_ms, engine_ms, beyond_ms = (statistics.median(x) * 1e3 for x in (empty, server, engine, beyond))
    return Row(
        benchmark="serve_http",
        case="HTTP beyond the engine and an empty deployment",
        value=beyond_ms - empty_ms,
        unit="ms",
        against=f"medians: server {server_ms:.2f} ms, engine {engine_ms:.2f} ms, empty {empty_ms:.2f} ms",
        target="<= 3 ms",
    )


def main() -> None:
    with local_ray(2):
        finish([added()], sys.argv[1:])


if __name__ == "__main__":
    main()
