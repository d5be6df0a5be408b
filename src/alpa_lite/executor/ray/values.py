"""The names of what workers keep for the driver."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

from alpa_lite.errors import ArgumentsError
from alpa_lite.executor.host_tiles import HostTiles
from alpa_lite.executor.ray.group import WorkerGroup
from alpa_lite.executor.sites import Site


class RemoteValues:
    """Of one group of workers.

    A value whose ``RemoteArray`` is gone is dropped with the next step: ``forget`` may be called by Python's collector at any
    time, so it only notes the name.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self.alive: set[int] = set()
        self.read: Any = None  # what the workers read batches with, as far as they were told
        self._numbers = itertools.count()
        self._forgotten: deque[int] = deque()

    def new(self) -> int:
        name = next(self._numbers)
        self.alive.add(name)
        return name

    def holds(self, name: int) -> bool:
        return name in self.alive and not self.group.lost

    def forget(self, name: int) -> None:
        self._forgotten.append(name)

    def dropped(self) -> tuple[int, ...]:
        """Names that nobody wants any more; told once."""
        found = []
        while self._forgotten:
            found.append(self._forgotten.popleft())
        self.alive.difference_update(found)
        return tuple(found)

    def fetch(self, name: int, submesh: int) -> Sequence[HostTiles]:
        """All parts of a value.

        Raises:
            WorkerLost: its workers are gone.
            ArgumentsError: it was donated.
        """
        self.group.check()
        if name not in self.alive:
            raise ArgumentsError(
                "a RemoteArray was read whose value is gone: it was donated to a step. Read results of the last step, or leave "
                "the argument out of donate_argnums."
            )

        def args(site: Site) -> tuple[int] | None:
            return (name,) if site.submesh == submesh else None

        return self.group.each("fetch", args)
