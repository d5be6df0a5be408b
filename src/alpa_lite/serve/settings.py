"""What a server serves, and how: plain values, checked, before Ray is asked for anything."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from types import NoneType
from typing import Any

from alpa_lite.api.shared_layout import SharedLayout
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.errors import ServeError, user_line
from alpa_lite.numeric import real, whole
from alpa_lite.plan.identity import some
from alpa_lite.serve.model_graphs import DECODE, checked_counts, checked_sizes, prefill_name

_MARGIN = 64  # requests for /health and /metrics, and those that are being refused


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeTarget:
    """What a server serves.

    Attributes:
        model: see ``al.serve.Model``.
        params: its parameters, as ``Engine`` takes them.
        encode, decode: text to tokens and back; None: requests and answers are tokens.

    Raises:
        ServeError: one of these is no function.
    """

    model: Any
    params: Any
    encode: Callable[[str], Sequence[int]] | None = None
    decode: Callable[[Sequence[int]], str] | None = None

    def __post_init__(self) -> None:
        for name in ("encode", "decode"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ServeError(
                    f"ServeTarget: {name}={value!r:.60} was given; it must be a function, or None where requests and answers are "
                    f"tokens. At {user_line()}. Give for example encode=tokenizer.encode, decode=tokenizer.decode."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How it is served.

    Attributes:
        host, port: where it listens; loopback unless told otherwise.
        buckets, slots, max_length, queue_limit, compile_cache: of the engine.
        token: that requests must bring; None = none.
        body_bytes, body_timeout_s, timeout_s: limits of a request: size of its body, how long that may take to come, and how long
            all of it may take.
        drain_s: how long requests may go on for when the server ends.
        cluster: "HOSTSxDEVICES:DEVICE", of several hosts an actor on each; "" = the layout's, or all devices of the engine's
            process.
        num_stages: parts of the model, each on its part of the devices or hosts (``Engine``).
        layout: a file of ``SharedLayout.save``; None plans the graphs.
        checkpoint: a folder of checkpoints in place of the target's own parameters, of which only the shapes are looked at then.
        checkpoint_path: of the parameters in the state there.
        num_cpus, num_gpus: that the engine takes of the Ray cluster.

    Raises:
        ServeError: a value is not allowed, or none that an engine takes.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    buckets: tuple[int, ...] | None = None
    slots: int = 16
    max_length: int = 2048
    queue_limit: int | None = None
    compile_cache: str | None = None
    token: str | None = None
    body_bytes: int = 2**20
    body_timeout_s: float = 30.0
    timeout_s: float = 300.0
    drain_s: float = 30.0
    cluster: str = ""
    num_stages: int = 1
    layout: str | None = None
    checkpoint: str | None = None
    checkpoint_path: str = "params"
    num_cpus: float = 1.0
    num_gpus: float = 0.0

    def __post_init__(self) -> None:
        counted = "a whole number"
        for name, low, high, kind in (
            ("port", 1, 2**16 - 1, counted),
            ("body_bytes", 1, math.inf, counted),
            ("body_timeout_s", 1e-3, threading.TIMEOUT_MAX, "seconds"),
            ("timeout_s", 1e-3, threading.TIMEOUT_MAX, "seconds"),
            ("drain_s", 0, threading.TIMEOUT_MAX, "seconds"),
            ("num_cpus", 0, math.inf, "a number"),
            ("num_gpus", 0, math.inf, "a number"),
        ):
            value = getattr(self, name)
            found = whole(value) if kind is counted else real(value)
            if found is None or not low <= found <= high:
                option = name.removesuffix("_s").replace("_", "-").replace("num-gpus", "gpus")
                at = "" if name == "num_cpus" else f" (at the command line --{option})"
                most = "" if high == math.inf else f" to {high:g}"
                raise ServeError(
                    f"{name}={value!r:.60} was given; it must be {kind} from {low:g}{most}. Correct it{at}."
                )
            object.__setattr__(self, name, found)
        if not isinstance(self.host, str) or not self.host.strip():  # "" would be every interface
            raise ServeError(
                f"host={self.host!r:.60} was given; it must be the name or address of one of this machine's interfaces. Leave it "
                "out for loopback, or write 0.0.0.0 for all of them (at the command line --host)."
            )
        for name, kinds, allowed in (
            ("cluster", (str,), "a str"),
            ("layout", (str, PathLike, NoneType), "the path of a file, or None"),
            ("checkpoint", (str, PathLike, NoneType), "the path of a folder, or None"),
            ("checkpoint_path", (str,), "a str"),
            ("compile_cache", (str, PathLike, NoneType), "the path of a folder, or None"),
        ):
            if not isinstance(getattr(self, name), kinds):
                raise ServeError(f"{name}={getattr(self, name)!r:.60} was given; it must be {allowed}. Correct it.")
        slots, max_length, buckets = checked_sizes(
            self.slots, self.max_length, (1,) if self.buckets is None else self.buckets
        )
        num_stages, limit = checked_counts(
            num_stages=self.num_stages, queue_limit=1 if self.queue_limit is None else self.queue_limit
        )
        for name, value in {
            "slots": slots,
            "max_length": max_length,
            "num_stages": num_stages,
            "buckets": None if self.buckets is None else buckets,
            "queue_limit": None if self.queue_limit is None else limit,
        }.items():
            object.__setattr__(self, name, value)
        token = self.token
        if token is not None and not (token and token.isascii() and token.isprintable() and token == token.strip()):
            raise ServeError(
                "a token was given that is empty, begins or ends with a blank, or has other characters than printable ASCII, "
                "which HTTP headers cannot carry safely. Take letters and digits, e.g. of `openssl rand -hex 32`."
            )

    def planned_for(self, layout: SharedLayout | None) -> Cluster | None:
        """What the engine runs on; None = whatever its process has.

        Raises:
            ServeError: the layout is not of these graphs, as far as can be said without the model.
        """
        if layout is not None:
            self._check_layout(layout)
        text = self.cluster or ("" if layout is None else layout.plans[DECODE].identity.cluster)
        return Cluster.parse(text) if text else None

    def _check_layout(self, layout: SharedLayout) -> None:
        plans = layout.plans
        buckets = map(prefill_name, self.buckets) if self.buckets else ()
        fault = ""
        if missing := [name for name in (DECODE, *buckets) if name not in plans]:
            fault = f"has no plan of {missing[0]!r}, but of {some(list(plans))}"
        else:
            decode = plans[DECODE]
            planned = next(
                iter(decode.inputs[-1].value.shape), 1
            )  # of its tokens; with stages, slots are groups of so many
            if self.slots % planned or (len(decode.stages) == 1 and self.slots != planned):
                fault = f"was planned for slots={planned}, and slots={self.slots} was given"
        if fault:
            raise ServeError(
                f"the layout {self.layout!r} {fault}. Slots and buckets must be those that were planned. At {user_line()}. Give "
                "those (--slots and --buckets at the command line), or plan al.serve.graphs(...) with these sizes."
            )

    @property
    def address(self) -> str:
        """As a URL has it."""
        return f"{bracketed(self.host)}:{self.port}"

    @property
    def most_requests(self) -> int:
        """That are let through to the engine, which itself says when it has too many."""
        limit = 4 * self.slots if self.queue_limit is None else self.queue_limit
        return 2 * (self.slots + limit + _MARGIN)


def bracketed(host: str) -> str:
    """A host as it stands before a port: IPv6 has colons of its own."""
    return f"[{host}]" if ":" in host else host
