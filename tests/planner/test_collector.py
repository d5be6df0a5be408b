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
