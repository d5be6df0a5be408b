"""Requests as their readers see them, in threads and event loops: tokens as they come, ends, errors."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from alpa_lite.errors import DeadlineExceeded
from alpa_lite.serve.request import Request
from alpa_lite.serve.scheduler import Scheduler
from tests.serve.fake_runner import FakeRunner, answer, finish, request_of, running, scheduler_of


def test_tokens_come_one_by_one_to_many_readers() -> None:
    with running(scheduler_of(FakeRunner(delay_s=0.002))) as scheduler:
        request = request_of(5, count=40)
        scheduler.submit(request)
        lags = []
        for index, token in enumerate(request):
            assert token == request.tokens[index]
            lags.append(len(request.tokens) - index)
        assert min(lags[:-1]) == 1, "no token was read before the next one came"
        assert list(request) == list(request.result()) == answer([5], 40), "a second reader begins with the first token"


def test_event_loops_read_tokens_too() -> None:
    async def read(request: Request) -> list[int]:
        return [token async for token in request]

    async def read_all(scheduler: Scheduler) -> list[list[int]]:
        requests = [request_of(n, count=20) for n in range(6)]
        for request in requests:
            scheduler.submit(request)
        slow = request_of(9, count=100_000, timeout_s=0.1)
        scheduler.submit(slow)
        with pytest.raises(DeadlineExceeded):
            await read(slow)
        return await asyncio.gather(*(read(request) for request in requests))

    with running(scheduler_of(FakeRunner(delay_s=0.001))) as scheduler:
        assert asyncio.run(read_all(scheduler)) == [answer([n], 20) for n in range(6)]


@pytest.mark.parametrize("turns", range(8))
def test_a_reader_that_is_cancelled_as_a_token_comes_ends(turns: int) -> None:
    """At whichever turn of its event loop: else what it reads runs on, for nobody."""

    async def read(request: Request) -> list[int]:
        with request:
            return [token async for token in request]

    async def cancelled() -> None:
        request = request_of(1, count=10, timeout_s=60)
        reader = asyncio.create_task(read(request))
        for _ in range(10):
            await asyncio.sleep(0)
        request._append(2)
        for _ in range(turns):
            await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(reader, 2)
        assert request.finish_reason == "cancelled"

    asyncio.run(cancelled())


def test_a_reader_that_stops_reading_harms_nobody_and_its_block_cancels() -> None:
    with running(scheduler_of(FakeRunner(1, delay_s=0.001))) as scheduler:
        with request_of(1, count=10_000) as request:
            scheduler.submit(request)
            next(iter(request))
        assert request.finish_reason == "cancelled"
        other = request_of(2, count=3)
        scheduler.submit(other)
        assert list(other.result(10)) == answer([2], 3)


def test_many_threads_at_once() -> None:
    failures = []

    def use(scheduler: Scheduler, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(15):
            request = request_of(*rng.integers(0, 100, rng.integers(1, 10)).tolist(), count=int(rng.integers(1, 6)))
            scheduler.submit(request, wait=True)
            if rng.random() < 0.2:
                request.cancel()
            elif list(request.result(20)) != answer(request.prompt.tolist(), request.max_tokens):
                failures.append(request)

    with running(scheduler_of(FakeRunner(2), queue_limit=2)) as scheduler:
        threads = [threading.Thread(target=use, args=(scheduler, seed)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures and not any(thread.is_alive() for thread in threads)
        assert sum(scheduler.statistics().finished.values()) == 8 * 15


@pytest.mark.parametrize("reason", ["length", "cancelled"])
def test_who_sees_that_a_request_is_finished_finds_it_counted(reason: str) -> None:
    scheduler = scheduler_of()
    request, seen, count = request_of(1, count=2), [], scheduler.counters.finished

    def counted(found: str) -> None:
        seen.append((found, request.done))
        count(found)

    scheduler.counters.finished = counted
    scheduler.submit(request)
    if reason == "cancelled":
        request.cancel()
    finish(scheduler)
    assert seen == [(reason, False)] and scheduler.statistics().finished == {reason: 1}


def test_the_last_token_comes_with_the_end() -> None:
    """Who reads all tokens and leaves the block at once does not cancel what is finished, however slow its end is."""
    scheduler = scheduler_of()
    count = scheduler.counters.finished

    def slowly(reason: str) -> None:
        time.sleep(0.02)
        count(reason)

    scheduler.counters.finished = slowly

    async def read(request: Request) -> list[int]:
        with request:
            return [token async for token in request]

    with running(scheduler):
        for _ in range(5):
            first, second = request_of(1, count=2), request_of(1, count=2)
            scheduler.submit(first)
            scheduler.submit(second)
            with first:
                assert len(list(first)) == 2
            assert len(asyncio.run(read(second))) == 2
            assert first.finish_reason == second.finish_reason == "length"
    assert scheduler.statistics().finished == {"length": 10}


def test_an_error_does_not_grow_with_its_readers() -> None:
    scheduler = scheduler_of()
    request = request_of(1, timeout_s=0.001)
    scheduler.submit(request)
    time.sleep(0.01)
    depths = []
    for _ in range(3):
        with pytest.raises(DeadlineExceeded) as raised:
            request.result()
        depths.append(len(raised.traceback))
    assert len(set(depths)) == 1


def test_a_request_that_waits_too_long_for_its_result_goes_on() -> None:
    scheduler = scheduler_of()
    request = request_of(1, count=2)
    scheduler.submit(request)
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        request.result(0.01)
    assert "0 of 2 came, running" in repr(request)
    finish(scheduler)
    assert list(request.result()) == answer([1], 2)


def test_a_deadline_ends_a_request_while_the_model_is_busy() -> None:
    """For readers of all kinds; the step goes on."""

    async def read(request: Request) -> list[int]:
        return [token async for token in request]

    ways = (Request.result, list, lambda request: asyncio.run(read(request)))
    with running(scheduler_of(FakeRunner(delay_s=5.0))) as scheduler:
        for way in ways:
            request = request_of(1, timeout_s=0.05)
            scheduler.submit(request)
            start_s = time.monotonic()
            with pytest.raises(DeadlineExceeded, match="0 of 3 tokens"):
                way(request)
            assert time.monotonic() - start_s < 1.8
        whole = request_of(7, count=1)
        scheduler.submit(whole)
        with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
            whole.result(0.05)
        assert list(whole.result(20)) == answer([7], 1)
