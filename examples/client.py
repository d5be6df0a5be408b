"""A client of ``alpa-lite serve``, with nothing but the standard library: prints text as it comes.

``python examples/client.py "    def __init__(self, " --port 8000 --temperature 0.7``
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

PATIENCE_S = 120.0  # an engine that was lost has its parameters to read


class Refused(Exception):
    """The server's error, with its HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


def stream(body: dict[str, Any], *, host: str = "127.0.0.1", port: int = 8000, token: str = "") -> Iterator[dict]:
    """Events of a request as they come: tokens with their text, at the end the whole answer.

    Args:
        body: what ``POST /generate`` takes.

    Raises:
        Refused: the server said no, or that it failed on the way.
        OSError, http.client.HTTPException: it cannot be reached, or the connection was cut.
    """
    link = http.client.HTTPConnection(host, port, timeout=60)
    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        link.request("POST", "/generate", json.dumps(body | {"stream": True}), headers)
        got = link.getresponse()
        if got.status != 200:
            raise Refused(got.status, told(got.read()))
        for line in got:
            if line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise Refused(event["status"], event["error"])
                yield event
                if "tokens" in event:
                    return
        raise ConnectionError("the connection was cut before the end of the answer")
    finally:
        link.close()


def told(answer: bytes) -> str:
    """The server's error; a proxy on the way may answer with something else."""
    try:
        return json.loads(answer)["error"]
    except (ValueError, KeyError, TypeError):
        return answer.decode(errors="replace")


def patient(body: dict[str, Any], **where: Any) -> Iterator[dict]:
    """``stream``, again after a second when the server is full or is starting its engine again (429 and 503)."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        events = stream(body, **where)
        try:
            first = next(events)
        except Refused as refused:
            if refused.status not in (429, 503) or time.monotonic() > end_s:
                raise
            time.sleep(1.0)
        else:
            yield first
            yield from events  # what fails from here on was partly shown: it is not tried again
            return


def main() -> None:
    parser = argparse.ArgumentParser(description="Continue a text.")
    parser.add_argument("text")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args()
    body = {"text": given.text, "max_tokens": given.max_tokens, "temperature": given.temperature}
    print(given.text, end="", flush=True)
    try:
        for event in patient(body, host=given.host, port=given.port, token=os.environ.get("TOKEN", "")):
            print(
                event.get("text", f" {event['token']}") if "token" in event else f"\n[{event['finish_reason']}]",
                end="",
                flush=True,
            )
    except (Refused, OSError, http.client.HTTPException) as error:
        sys.exit(f"\n{given.host}:{given.port}: {error}")
    print()


if __name__ == "__main__":
    main()
