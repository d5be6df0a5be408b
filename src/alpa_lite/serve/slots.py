"""Which slots of a cache are in use: a number in, a number out; no arrays."""

from __future__ import annotations

import heapq


class Slots:
    """``count`` slots, of which the lowest free one is taken first."""

    def __init__(self, count: int) -> None:
        assert count >= 1, count
        self.count = count
        self._free = list(range(count))
        self._taken: set[int] = set()

    def take(self) -> int | None:
        """A slot that nobody has; None if all are taken."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._taken.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """A slot that was taken is free again."""
        assert slot in self._taken, f"slot {slot} was not taken"
        self._taken.remove(slot)
        heapq.heappush(self._free, slot)

    @property
    def taken(self) -> tuple[int, ...]:
        """In rising order."""
        return tuple(sorted(self._taken))

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    @property
    def num_free(self) -> int:
        return len(self._free)
