"""How the Ray executor starts and watches its workers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from alpa_lite.errors import AlpaLiteError

DEFAULT_CACHE = "~/.cache/alpa_lite/compiled"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayExecutor:
    """``executor="ray"`` with other settings than the usual ones.

    Attributes:
        address: of a Ray cluster, "auto" for one that runs on this host, None for the one that RAY_ADDRESS names or, if it names
            none, one that is started on this machine and ends with this process.
        heartbeat_s: how often workers are asked whether they live, while a step takes longer than that.
        hang_timeout_s: a worker that has not answered for so long is taken for lost.
        progress_timeout_s: one that answers, but has issued no call for so long, as well; longer than the longest compilation.
        start_timeout_s: within which the cluster must give the hosts; as long again for each of what workers then do one after
            the other: start, import JAX and join each other, connect.
        env_vars: of the workers, set before JAX is imported there, e.g. {"XLA_FLAGS": "..."}.
        transport: of what one stage sends another: "pull", JAX's transfer server, between processes that know nothing of each
            other; or "device_put", JAX's own copies within one job of all workers, which use the links between GPUs. The latter
            is not proven on GPUs yet, and a worker that dies takes the others' processes with it.
        name: of what it holds of the cluster. A process that starts workers under a name takes away what others hold under it:
            a driver that is an actor of Ray may die, and what it held stays until its job ends. Two that run at once need two
            names. "" = none.
        compile_cache: folder for compiled programs on every host, and on the driver's for layouts that engines planned; None =
            ``~/.cache/alpa_lite/compiled``, "" = no cache.
    """

    address: str | None = None
    heartbeat_s: float = 2.0
    hang_timeout_s: float = 20.0
    progress_timeout_s: float = 600.0
    start_timeout_s: float = 120.0
    env_vars: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    transport: Literal["pull", "device_put"] = "pull"
    name: str = ""
    compile_cache: str | None = None

    @property
    def cache_folder(self) -> str:
        """For compiled programs; "~" is the home of whoever looks there, other paths begin where this process is. "" = none."""
        folder = DEFAULT_CACHE if self.compile_cache is None else self.compile_cache
        return folder if not folder or folder.startswith("~") else os.path.abspath(folder)

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "hang_timeout_s", "progress_timeout_s", "start_timeout_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or value <= 0:
                raise AlpaLiteError(
                    f"{name}={value!r} was given. It must be a positive number of seconds. It stands in RayExecutor(...); give, "
                    "e.g., 20.0."
                )
        if self.transport not in ("pull", "device_put"):
            raise AlpaLiteError(
                f"transport={self.transport!r} was given. It must be 'pull' or 'device_put'. It stands in RayExecutor(...); "
                "leave it out for 'pull'."
            )
        if not isinstance(self.name, str):
            raise AlpaLiteError(
                f"name={self.name!r} was given. It must be a text. It stands in RayExecutor(...); give, e.g., 'trainer', or "
                "leave it out."
            )
        if self.hang_timeout_s < self.heartbeat_s:
            raise AlpaLiteError(
                f"hang_timeout_s={self.hang_timeout_s} is shorter than heartbeat_s={self.heartbeat_s}. A worker must be asked at "
                "least once before it counts as lost. They stand in RayExecutor(...); raise the former or lower the latter."
            )
