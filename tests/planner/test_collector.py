"""The garbage collector rests while a plan is made, and is left as it was found."""

from __future__ import annotations

import gc

import pytest

from alpa_lite.planner.collector import collector_paused


def test_the_collector_rests_and_comes_back_after_errors_too() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"), collector_paused():
        assert not gc.isenabled()
        raise ValueError("inside")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_paused_functions_may_call_each_other() -> None:
    @collector_paused()
    def count(depth: int) -> int:
        assert not gc.isenabled()
        return 1 + count(depth - 1) if depth else 0

    assert count(3) == 3
    assert gc.isenabled()


def test_what_is_left_is_old_and_not_looked_at_at_once() -> None:
    seen: list[str] = []
    gc.callbacks.append(lambda phase, info: seen.append(phase))
    try:
        with collector_paused():
            made: list[list[int]] = [[] for _ in range(10_000)]
            seen.clear()
        during = list(seen)
    finally:
        gc.callbacks.pop()
    assert not during
    assert any(found is made[0] for found in gc.get_objects(generation=2))
    assert gc.get_freeze_count() == 0


def test_objects_that_the_caller_froze_stay_frozen() -> None:
    gc.freeze()
    try:
        with collector_paused():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
