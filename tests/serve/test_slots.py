"""The slot allocator under random arrivals and cancellations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.serve.slots import Slots


@given(st.integers(1, 8), st.lists(st.one_of(st.just("arrive"), st.integers(0, 20)), max_size=80))
def test_no_slot_is_used_twice_and_all_are_freed(count: int, events: list[str | int]) -> None:
    """A number among the events cancels (or ends) the request of that rank among those that run."""
    slots, running = Slots(count), []
    for event in events:
        if event == "arrive":
            slot = slots.take()
            assert (slot is None) == (len(running) == count)
            if slot is not None:
                assert 0 <= slot < count and slot not in running
                assert slot == min(set(range(count)) - set(running))
                running.append(slot)
        elif running:
            slots.give_back(running.pop(int(event) % len(running)))
        assert slots.taken == tuple(sorted(running))
        assert slots.num_taken + slots.num_free == count
    for slot in running:
        slots.give_back(slot)
    assert slots.num_free == count and [slots.take() for _ in range(count)] == list(range(count))


def test_giving_back_what_was_not_taken_is_a_mistake_of_ours() -> None:
    slots = Slots(2)
    slot = slots.take()
    assert slot == 0
    slots.give_back(slot)
    with pytest.raises(AssertionError, match="slot 0 was not taken"):
        slots.give_back(slot)
