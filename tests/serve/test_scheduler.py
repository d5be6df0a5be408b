"""Continuous batching without a model: every request gets its own answer whatever else comes, goes, or breaks."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.errors import DeadlineExceeded, EngineClosed, QueueFull, ServeError
from alpa_lite.serve.request import Request
from alpa_lite.serve.sampling import NO_TOKEN, Rows
from alpa_lite.serve.statistics import Histogram
from tests.serve.fake_runner import FakeRunner, answer, finish, request_of, running, scheduler_of

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.lists(st.integers(0, 100), min_size=1, max_size=16), st.integers(1, 5)),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.none()),
        st.tuples(st.just("expire"), st.integers(0, 30), st.none()),
        st.tuples(st.just("step"), st.none(), st.none()),
    ),
    max_size=60,
)


@given(EVENTS, st.integers(1, 4), st.integers(1, 3), st.integers(-1, 12))
def test_everyone_gets_their_own_answer(events: list, slots: int, prefills_per_step: int, fail_at: int) -> None:
    runner = FakeRunner(slots, fail_at=fail_at)
    scheduler = scheduler_of(runner, queue_limit=3, prefills_per_step=prefills_per_step)
    requests: list[Request] = []
    refused = 0
    for kind, value, count in events:
        if kind == "submit":
            request = request_of(*value, count=count)
            waiting = scheduler.statistics().queued
            try:
                scheduler.submit(request)
                assert waiting < 3
                requests.append(request)
            except QueueFull:
                assert waiting == 3
                refused += 1
        elif kind == "step":
            scheduler.step()
        elif requests:
            chosen = requests[value % len(requests)]
            if kind == "cancel":
                chosen.cancel()
            else:
                chosen.deadline_s = 0.0
        assert scheduler.statistics().active <= slots
    finish(scheduler)
    scheduler.step()
    for request in requests:
        whole = answer(request.prompt.tolist(), request.max_tokens)
        assert list(request.tokens) == whole[: len(request.tokens)]
        assert request.finish_reason in ("length", "cancelled", "deadline", "error")
        if request.finish_reason == "length":
            assert list(request.result()) == whole
    found = scheduler.statistics()
    assert (found.active, found.queued) == (0, 0), "a slot was not freed"
    assert sum(found.finished.values()) == len(requests) + refused
    assert found.finished.get("refused", 0) == refused
    assert found.generated_tokens >= sum(len(r.tokens) for r in requests)
    assert sum(found.prefills.values()) == found.time_to_first_token.count == found.queue_time.count
    assert found.time_per_token.count == found.decoded_rows <= found.decode_steps * slots


def test_requests_enter_between_the_steps_of_others() -> None:
    scheduler = scheduler_of(FakeRunner(2))
    long, short, late = request_of(1, count=6), request_of(2, count=2), request_of(3, count=2)
    for request in (long, short, late):
        scheduler.submit(request)
    scheduler.step()
    assert [len(r.tokens) for r in (long, short, late)] == [2, 2, 0] and short.done
    scheduler.step()
    assert [len(r.tokens) for r in (long, short, late)] == [3, 2, 2]
    finish(scheduler)
    assert scheduler.statistics().batch_fill == pytest.approx((2 + 2 + 1 + 1 + 1) / (5 * 2))


def test_at_most_so_many_prompts_between_two_tokens() -> None:
    runner = FakeRunner(4)
    scheduler = scheduler_of(runner, prefills_per_step=1)
    requests = [request_of(n, count=8) for n in range(4)]
    for request in requests:
        scheduler.submit(request)
    for _ in range(3):
        scheduler.step()
    assert [len(r.tokens) for r in requests] == [4, 3, 2, 0]


def test_prompts_go_into_the_smallest_bucket_and_the_padding_is_counted() -> None:
    runner = FakeRunner(buckets=(2, 4, 16))
    scheduler = scheduler_of(runner)
    for size in (1, 2, 3, 5, 16):
        scheduler.submit(request_of(*range(size), count=1))
    finish(scheduler)
    assert runner.used == [2, 2, 4, 16, 16]
    found = scheduler.statistics()
    assert found.prefills == {2: 2, 4: 1, 16: 2} and found.padded_tokens == {2: 1, 4: 1, 16: 11}
    assert found.padding_waste == pytest.approx(13 / 40) and found.prompt_tokens == 27


def test_a_stop_token_is_the_last_one() -> None:
    scheduler = scheduler_of()
    tokens = answer([1, 2], 10)
    stopping, other = request_of(1, 2, count=10, stop=frozenset({tokens[3]})), request_of(1, 2, count=10)
    scheduler.submit(stopping)
    scheduler.submit(other)
    finish(scheduler)
    assert list(stopping.result()) == tokens[: tokens.index(tokens[3]) + 1] and stopping.finish_reason == "stop"
    assert list(other.result()) == tokens and other.finish_reason == "length"


def test_a_cancelled_request_leaves_the_queue_at_once_and_its_slot_with_the_next_step() -> None:
    scheduler = scheduler_of(FakeRunner(1), queue_limit=1)
    first, second, third = request_of(1, count=50), request_of(2, count=2), request_of(3, count=2)
    scheduler.submit(first)
    scheduler.step()
    scheduler.submit(second)
    with pytest.raises(QueueFull, match=r"1 requests wait already for one of 1 slots.*queue_limit=1.*Try again later"):
        scheduler.submit(third)
    second.cancel()
    scheduler.submit(third)
    first.cancel()
    scheduler.step()
    assert third.done and list(third.tokens) == answer([3], 2)
    assert second.result() == () and second.finish_reason == "cancelled"


@pytest.mark.medium
def test_what_runs_the_model_is_checked_while_nobody_asks() -> None:
    runner = FakeRunner(fail_at=3)
    runner.check_s = 0.01
    with running(scheduler_of(runner)) as scheduler:
        ended_s = time.monotonic() + 10
        while runner.calls < 6:  # also after the one that failed
            assert time.monotonic() < ended_s
            time.sleep(0.01)
        request = request_of(1, 2)
        scheduler.submit(request)
        assert list(request.result(10)) == answer([1, 2], 3)


def test_deadlines_end_requests_in_the_queue_and_in_a_slot() -> None:
    scheduler = scheduler_of(FakeRunner(1))
    running_one, waiting = request_of(1, count=9, timeout_s=60.0), request_of(2, count=9, timeout_s=0.001)
    scheduler.submit(running_one)
    scheduler.submit(waiting)
    time.sleep(0.002)
    scheduler.step()
    assert waiting.finish_reason == "deadline" and not running_one.done
    running_one.deadline_s = 0.0
    scheduler.step()
    assert running_one.finish_reason == "deadline" and scheduler.idle
    with pytest.raises(DeadlineExceeded, match=r"within its 0\.001 s: 0 of 9 tokens had come"):
        waiting.result()
    seen = []
    with pytest.raises(DeadlineExceeded, match=r"2 of 9 tokens"):
        for token in running_one:
            seen.append(token)
    assert seen == answer([1], 2)


def test_a_failing_step_ends_what_runs_and_nothing_else() -> None:
    scheduler = scheduler_of(FakeRunner(1, fail_at=3))
    first, second = request_of(1, count=5), request_of(2, count=5)
    scheduler.submit(first)
    scheduler.submit(second)
    finish(scheduler)
    with pytest.raises(ServeError, match=r"failed: RuntimeError: out of memory.*Try again") as raised:
        first.result()
    assert isinstance(raised.value.__cause__, RuntimeError) and list(first.tokens) == answer([1], 2)
    assert list(second.result()) == answer([2], 5)


@pytest.mark.parametrize("drawn", [0, 2])
def test_logits_that_are_no_numbers_end_their_request_and_nothing_else(drawn: int) -> None:
    class Odd(FakeRunner):
        def prefill(self, bucket: int, slot: int, prompt: np.ndarray, rows: Rows) -> int:
            token = super().prefill(bucket, slot, prompt, rows)
            return NO_TOKEN if prompt[0] == 9 and not drawn else token

        def decode(self, tokens: np.ndarray, rows: Rows) -> list[int]:
            odd = [(held or [0])[0] == 9 and rows.drawn[slot] == drawn for slot, held in enumerate(self.tokens)]
            return [NO_TOKEN if o else token for o, token in zip(odd, super().decode(tokens, rows), strict=True)]

    scheduler = scheduler_of(Odd())
    requests = [request_of(first, 2, count=4) for first in (1, 9, 3, 5)]
    for request in requests:
        scheduler.submit(request)
    finish(scheduler)
    for request, first in zip(requests, (1, 9, 3, 5), strict=True):
        if first == 9:
            with pytest.raises(ServeError, match=rf"no numbers.*after 2 tokens of prompt and {drawn} of answer"):
                request.result()
            assert request.finish_reason == "error"
        else:
            assert list(request.result()) == answer([first, 2], 4)
    found = scheduler.statistics()
    assert found.generated_tokens == 3 * 4 + drawn
    assert found.time_to_first_token.count == 3 + (drawn > 0)


def test_a_runner_that_cannot_begin_anew_closes_the_engine_and_leaves_nobody_waiting() -> None:
    class Broken(FakeRunner):
        def reset(self) -> None:
            raise RuntimeError("no device")

    scheduler = scheduler_of(Broken(1, fail_at=2))
    requests = [request_of(n, count=5) for n in range(3)]
    for request in requests:
        scheduler.submit(request)
    with pytest.raises(RuntimeError, match="no device"):
        scheduler.run()
    assert [r.finish_reason for r in requests] == ["error", "closed", "closed"]
    with pytest.raises(EngineClosed, match="it failed: RuntimeError: no device"):
        requests[1].result()
    with pytest.raises(EngineClosed, match="the engine is closed"):
        scheduler.submit(request_of(1))


def test_a_call_that_fails_where_nothing_can_begin_anew_is_told() -> None:
    class Broken(FakeRunner):
        def reset(self) -> None:
            raise RuntimeError("no device")

    def fail() -> None:
        raise ValueError("does not compile")

    scheduler = scheduler_of(Broken(1))
    called = scheduler.call(fail)
    with pytest.raises(RuntimeError, match="no device"):
        scheduler.run()
    with pytest.raises(ValueError, match="does not compile"):
        called.result(timeout=10)


def test_refusals_do_not_pile_up() -> None:
    """Each is an error of its own: one that is raised again and again grows with each."""
    scheduler = scheduler_of()
    scheduler.close("it was asked to")
    errors = []
    for _ in range(2):
        with pytest.raises(EngineClosed, match="it was asked to") as raised:
            scheduler.submit(request_of(1))
        errors.append(raised.value)
    assert errors[0] is not errors[1]


def test_closing_ends_all_and_draining_lets_them_finish() -> None:
    with running(scheduler_of(FakeRunner(1, delay_s=0.005))) as scheduler:
        requests = [request_of(n, count=1000) for n in range(3)]
        for request in requests:
            scheduler.submit(request)
        scheduler.close("the test says so")
        for request in requests:
            with pytest.raises(EngineClosed, match="the test says so"):
                request.result(10)
    with running(scheduler_of(FakeRunner(1, delay_s=0.001))) as scheduler:
        requests = [request_of(n, count=5) for n in range(3)]
        for request in requests:
            scheduler.submit(request)
        scheduler.drain()
        with pytest.raises(EngineClosed, match=r"about to end|has ended"):
            scheduler.submit(request_of(1))
        assert [list(r.result(10)) for r in requests] == [answer([n], 5) for n in range(3)]


def test_calls_wait_until_no_request_runs() -> None:
    scheduler = scheduler_of()
    request = request_of(1, count=3)
    scheduler.submit(request)
    scheduler.step()
    called = []
    future = scheduler.call(lambda: called.append(request.done))
    failing = scheduler.call(lambda: 1 / 0)
    finish(scheduler)
    scheduler.step()
    assert called == [True] and future.result(1) is None
    with pytest.raises(ZeroDivisionError):
        failing.result(1)


def test_nobody_enters_while_a_call_waits() -> None:
    """Where requests came without a pause it waited for good."""
    scheduler = scheduler_of()
    requests = [request_of(1, count=3)]
    scheduler.submit(requests[0])
    scheduler.step()
    call = scheduler.call(lambda: None)
    for number in range(6):
        requests.append(request_of(number, count=3))
        scheduler.submit(requests[-1])
        scheduler.step()
    assert call.done() and requests[0].done and requests[1].done
    finish(scheduler)
    assert all(len(request.result(1)) == 3 for request in requests)


def test_a_call_that_ends_the_engine_is_told() -> None:
    """As what may not be caught does: whoever waits for the call must not wait for ever."""

    def ends() -> None:
        raise SystemExit("no more")

    scheduler = scheduler_of()
    call = scheduler.call(ends)
    with pytest.raises(SystemExit, match="no more"):
        scheduler.run()
    with pytest.raises(SystemExit, match="no more"):
        call.result(0)
    assert scheduler.shut


def test_a_request_is_always_in_the_queue_or_in_a_slot() -> None:
    """Whoever looks, and whenever."""
    scheduler, seen = scheduler_of(), []
    take = scheduler._slots.take

    def looked_at() -> int | None:
        look = threading.Thread(target=lambda: seen.append(scheduler.statistics()))
        looks.append(look)
        look.start()
        look.join(0.1)
        return take()

    looks: list[threading.Thread] = []
    scheduler._slots.take = looked_at  # pyrefly: ignore[bad-assignment]
    scheduler.submit(request_of(1))
    scheduler.step()
    for look in looks:
        look.join()
    assert [found.queued + found.active for found in seen] == [1]


@pytest.mark.medium
def test_the_collector_may_end_a_request_while_others_are_counted() -> None:
    """A reader that was dropped in a reference cycle holds its request until the collector comes, in any thread at any place."""
    with running(scheduler_of()) as scheduler:
        request = request_of(1, count=10**6)
        scheduler.submit(request)

        def collected() -> Histogram:
            gc.collect()
            return Histogram()

        gc.disable()
        try:
            drop_in_a_cycle(request)
            scheduler.counters._queue_time.read = collected  # pyrefly: ignore[bad-assignment]
            look = threading.Thread(target=scheduler.statistics, daemon=True)
            look.start()
            look.join(10)
        finally:
            gc.enable()
        assert not look.is_alive() and request.finish_reason == "cancelled"
        assert scheduler.statistics().finished == {"cancelled": 1}


def drop_in_a_cycle(request: Request) -> None:
    def tokens() -> Iterator[int]:
        with request:
            yield from request

    reader = tokens()
    next(reader)
    cycle: list[object] = [reader]
    cycle.append(cycle)


def test_a_request_that_the_collector_ends_while_it_ends_is_counted_once() -> None:
    scheduler = scheduler_of()
    request = request_of(1, count=1)
    count = scheduler.counters.finished

    def collected(reason: str) -> None:
        request.cancel()
        count(reason)

    scheduler.counters.finished = collected  # pyrefly: ignore[bad-assignment]
    scheduler.submit(request)
    finish(scheduler)
    assert scheduler.statistics().finished == {"length": 1} and request.finish_reason == "length"
