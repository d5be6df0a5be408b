"""Users of a server, for Locust: those who read, stream, read slowly, leave, come all at once, or make mistakes.

``serve_load.py`` starts it. Each user knows what must come back; what is otherwise is a failure.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import gevent
from locust import HttpUser, constant_throughput, events, task
from urllib3 import PoolManager

TIMEOUT_S = 60.0  # what takes longer hangs
AT_ONCE, EVERY_S = 120, 20.0


@events.init_command_line_parser.add_listener
def _add_argument(parser: Any) -> None:
    parser.add_argument(
        "--expected", help="a JSON file: token, body_bytes, longest, and pairs of a body and its tokens"
    )


class _User(HttpUser):
    abstract = True

    def on_start(self) -> None:
        known = json.loads(Path(self.environment.parsed_options.expected).read_text())
        self.pairs, self.body_bytes, self.longest = known["pairs"], known["body_bytes"], known["longest"]
        self.headers = {"Authorization": f"Bearer {known['token']}"}
        self.random = random.Random(0)

    def post(self, body: Any, name: str, **given: Any) -> Any:
        given = {"headers": self.headers, "timeout": TIMEOUT_S, "catch_response": True} | given
        data = body if isinstance(body, (str, bytes)) else json.dumps(body)
        return self.client.post("/generate", data, name=name, **given)

    def refused(self, got: Any) -> bool:
        """Whether the server was full, which is counted apart."""
        if got.status_code != 429 or "Retry-After" not in got.headers:
            return False
        got.request_meta["name"] += ", refused"
        got.success()
        return True

    def whole(self, name: str) -> None:
        body, tokens = self.random.choice(self.pairs)
        with self.post(body, name) as got:
            if not self.refused(got) and (got.status_code != 200 or got.json()["tokens"] != tokens):
                got.failure(f"status {got.status_code}: {got.text[:200]}")

    def streamed(self, name: str, wait_s: float = 0.0, leave: bool = False) -> None:
        body, tokens = self.random.choice(self.pairs)
        with self.post(body | {"stream": True}, name, stream=True) as got:
            if self.refused(got):
                return
            if got.status_code != 200:
                got.failure(f"status {got.status_code}: {got.text[:200]}")
                return
            seen = []
            for line in got.iter_lines(chunk_size=1):
                if line:
                    seen.append(json.loads(line.removeprefix(b"data: ")))
                    gevent.sleep(wait_s)
                    if leave:
                        got.close()
                        return
            found = [event["token"] for event in seen[:-1]]
            if not found == seen[-1].get("tokens") == tokens:
                got.failure(f"{found} was streamed and {seen[-1]} at its end, not {tokens}")


class Reader(_User):
    fixed_count = 15
    wait_time = constant_throughput(1)

    @task
    def read(self) -> None:
        self.whole("whole")


class Streamer(_User):
    fixed_count = 4
    wait_time = constant_throughput(1)

    @task
    def read(self) -> None:
        self.streamed("streamed")


class SlowReader(_User):
    fixed_count = 2
    wait_time = constant_throughput(0.5)

    @task
    def read(self) -> None:
        self.streamed("read slowly", wait_s=0.2)


class Leaver(_User):
    fixed_count = 2
    wait_time = constant_throughput(1)

    @task
    def leave(self) -> None:
        self.streamed("left", leave=True)


class Crowd(_User):
    """Many at once, more than slots and queue hold."""

    fixed_count = 1
    wait_time = constant_throughput(1 / EVERY_S)
    pool_manager = PoolManager(maxsize=AT_ONCE)

    @task
    def come(self) -> None:
        gevent.joinall([gevent.spawn(self.whole, "at once") for _ in range(AT_ONCE)])


class Mistaken(_User):
    fixed_count = 2
    wait_time = constant_throughput(1)

    def on_start(self) -> None:
        super().on_start()
        self.mistakes = itertools.cycle(
            [
                ("not JSON", "{not JSON", self.headers, 400),
                ("unknown field", {"prompt": "def"}, self.headers, 400),
                ("out of range", {"tokens": [10**9]}, self.headers, 400),
                ("too long a prompt", {"tokens": [1] * (self.longest + 1)}, self.headers, 400),
                ("too large a body", {"tokens": [1] * self.body_bytes}, self.headers, 413),
                ("wrong token", {"tokens": [1]}, {"Authorization": "Bearer guess"}, 401),
                ("no token", {"tokens": [1]}, {}, 401),
            ]
        )

    @task
    def err(self) -> None:
        name, body, headers, status = next(self.mistakes)
        with self.post(body, name, headers=headers) as got:
            got.request_meta["name"] += f", {got.status_code}"
            if got.status_code == status:
                got.success()
            else:
                got.failure(f"status {got.status_code} instead of {status}: {got.text[:200]}")
