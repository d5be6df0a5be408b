"""The simulator against two others that are written differently, against bounds, and its memory by hand."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.errors import ScheduleError
from alpa_lite.schedule import (
    Action,
    ActionKind,
    chain_step,
    emit_instructions,
    in_flight,
    make_schedule,
    mesh_residuals,
    simulate,
    simulate_schedule,
)
from alpa_lite.schedule.instructions import Free, Recv, Run, Send, Zeros
from tests.schedule.tables import TRAINING, random_table, rich_step, table

K = ActionKind
seeds = st.integers(0, 10**9)


def drawn(rng, schedule):
    """Random seconds for every stage and kind."""
    return {(s, kind): rng.uniform(0.1, 3) for s in range(schedule.num_stages) for kind in K}


FROM = {
    K.F: (("F", -1),),
    K.RECOMPUTE: (("F", 0),),
    K.B: (("F", 0), ("RECOMPUTE", 0), ("B", 1), ("I", 1)),
    K.I: (("F", 0), ("RECOMPUTE", 0), ("B", 1), ("I", 1)),
    K.W: (("I", 0),),
}
"""What an action reads from: kind, and how many stages further."""


def longest_path(schedule, seconds, *, in_column=True):
    """Ends of all actions: the longest path through what each reads (and, with ``in_column``, what is before it)."""
    before = {b: a for column in schedule.columns for a, b in itertools.pairwise(column)}
    there = {a for column in schedule.columns for a in column}

    @cache
    def end(action):
        s, k = action.stage, action.microbatch
        if action.kind in (K.GRADSYNC, K.UPDATE):
            kinds = (K.B, K.W, K.GRADSYNC) if action.kind is K.UPDATE else (K.B, K.W)
            reads = [a for a in there if a.stage == s and a.kind in kinds]
        else:
            reads = [Action(K(kind), s + step, k) for kind, step in FROM[action.kind] if s + step >= 0]
        if in_column and action in before:
            reads.append(before[action])
        return max((end(a) for a in reads if a in there), default=0.0) + seconds[s, action.kind]

    # From the front, so that the recursion stays shallow.
    for place in range(max(map(len, schedule.columns))):
        for column in schedule.columns:
            if place < len(column) and not in_column:
                end(column[place])
    return {action: end(action) for action in there}


@settings(max_examples=80, deadline=None)
@given(seeds)
def test_random_tables_take_the_longest_path(seed):
    rng = random.Random(seed)
    schedule = random_table(rng)
    seconds = drawn(rng, schedule)
    timeline = simulate_schedule(schedule, seconds)
    ends = longest_path(schedule, seconds)
    assert {event.label: event.end_s for event in timeline.events} == pytest.approx(
        {str(a): t for a, t in ends.items()}
    )
    assert timeline.makespan_s == pytest.approx(max(ends.values()))


@pytest.mark.parametrize("name", [*TRAINING, "inference"])
@pytest.mark.parametrize("seed", range(3))
def test_generators_with_unequal_times(name, seed):
    rng = random.Random(seed)
    schedule = table(name, 4, 8, recompute=[1] if seed == 2 else ())
    seconds = drawn(rng, schedule)
    timeline = simulate_schedule(schedule, seconds)
    assert timeline.makespan_s == pytest.approx(max(longest_path(schedule, seconds).values()))


@settings(max_examples=50, deadline=None)
@given(seeds)
def test_no_timeline_beats_the_critical_path_or_the_work_of_a_mesh(seed):
    rng = random.Random(seed)
    schedule = random_table(rng)
    seconds = drawn(rng, schedule)
    timeline = simulate_schedule(schedule, seconds, lambda transfer: rng.random())
    critical = max(longest_path(schedule, seconds, in_column=False).values())
    work = [sum(seconds[a.stage, a.kind] for a in column) for column in schedule.columns]
    assert timeline.makespan_s >= max(critical, *work) - 1e-9
    assert timeline.busy_s == pytest.approx(work)
    assert timeline.makespan_s >= simulate_schedule(schedule, seconds).makespan_s - 1e-9


class ByEvents:
    """The same model as a queue of events, with memory counted as time goes by."""

    def __init__(self, instructions, seconds, transfer_s):
        self.lists = [each.instructions for each in instructions.meshes]
        self.sizes = [dict(each.sizes) for each in instructions.meshes]
        self.temporaries = [dict(each.temporaries) for each in instructions.meshes]
        self.seconds, self.transfer_s = seconds, transfer_s
        self.transfers = {t.id: t for t in instructions.transfers}
        self.at = [0] * len(self.lists)
        self.running = [None] * len(self.lists)
        self.queue, self.count, self.end = [], itertools.count(), 0.0
        self.posted, self.received, self.arrived, self.busy = defaultdict(list), {}, set(), set()
        self.pending, self.dying = defaultdict(int), set()
        self.held = [sum(s[b.name] for b in m.arguments) for s, m in zip(self.sizes, instructions.meshes, strict=True)]
        self.peak = list(self.held)

    def add(self, mesh, size):
        self.held[mesh] += size
        self.peak[mesh] = max(self.peak[mesh], self.held[mesh])

    def later(self, now, what, which):
        heapq.heappush(self.queue, (now, next(self.count), what, which))

    def play(self):
        for mesh in range(len(self.lists)):
            self.step(mesh, 0.0)
        while self.queue:
            now, _, what, which = heapq.heappop(self.queue)
            if what == "done":
                run, self.running[which] = self.running[which], None
                self.add(which, -self.temporaries[which].get(f"{run.action.stage}{run.action.kind}", 0))
                self.end = now
                self.step(which, now)
            else:
                transfer = self.transfers[which]
                self.arrived.add(which)
                key = transfer.source, transfer.buffer
                self.pending[key] -= 1
                if key in self.dying and not self.pending[key]:
                    self.add(transfer.source, -self.sizes[transfer.source][transfer.buffer.name])
                self.busy.remove((transfer.source, transfer.destination))
                self.start(transfer.source, transfer.destination, now)
                self.step(transfer.destination, now)
        assert self.at == [len(listed) for listed in self.lists]
        return self

    def step(self, mesh, now):
        while self.running[mesh] is None and self.at[mesh] < len(self.lists[mesh]):
            i = self.lists[mesh][self.at[mesh]]
            if isinstance(i, Run):
                if any((mesh, b) in self.received and self.received[mesh, b] not in self.arrived for b in i.reads):
                    return
                size = sum(self.sizes[mesh][b.name] for b in set(i.writes) - set(i.reads))
                self.add(mesh, size + self.temporaries[mesh].get(f"{i.action.stage}{i.action.kind}", 0))
                self.running[mesh] = i
                self.later(now + self.seconds[i.action.stage, i.action.kind], "done", mesh)
            elif isinstance(i, Send):
                self.posted[mesh, i.destination].append(i.transfer)
                self.pending[mesh, i.buffer] += 1
                self.start(mesh, i.destination, now)
            elif isinstance(i, Recv):
                self.received[mesh, i.buffer] = i.transfer
                self.add(mesh, self.sizes[mesh][i.buffer.name])
                self.start(i.source, mesh, now)
            elif isinstance(i, Zeros):
                self.add(mesh, self.sizes[mesh][i.buffer.name])
            elif isinstance(i, Free):
                if self.pending[mesh, i.buffer]:
                    self.dying.add((mesh, i.buffer))
                else:
                    self.add(mesh, -self.sizes[mesh][i.buffer.name])
            self.at[mesh] += 1

    def start(self, source, destination, now):
        pair = source, destination
        posted = self.posted[pair]
        if posted and pair not in self.busy and posted[0] in self.received.values():
            self.busy.add(pair)
            self.later(now + self.transfer_s[posted[0]], "arrived", posted.pop(0))


@pytest.mark.medium
@settings(max_examples=80, deadline=None)
@given(seeds)
def test_times_and_memory_are_those_of_a_queue_of_events(seed):
    rng = random.Random(seed)
    schedule = random_table(rng)
    instructions = emit_instructions(schedule, rich_step(schedule, rng))
    seconds = drawn(rng, schedule)
    transfer_s = {t.id: rng.uniform(0.01, 2) for t in instructions.transfers}
    timeline = simulate(instructions, seconds, lambda transfer: transfer_s[transfer.id])
    other = ByEvents(instructions, seconds, transfer_s).play()
    assert timeline.makespan_s == pytest.approx(other.end)
    assert timeline.peak_bytes == tuple(other.peak)


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_lanes_do_one_thing_at_a_time(seed):
    rng = random.Random(seed)
    schedule = random_table(rng)
    timeline = simulate_schedule(schedule, drawn(rng, schedule), lambda t: rng.random(), rich_step(schedule, rng))
    for before, after in itertools.pairwise(timeline.events):
        if (before.mesh, before.lane) == (after.mesh, after.lane):
            assert before.end_s <= after.start_s + 1e-12
    assert 0 <= timeline.bubble_share < 1


@pytest.mark.parametrize("name", TRAINING)
def test_peak_bytes_are_the_residuals_in_flight(name):
    schedule = table(name, 4, 8)
    step = chain_step(schedule, residual_bytes=1000)
    timeline = simulate_schedule(schedule, lambda action: 1.0, step=step)
    assert timeline.peak_bytes == tuple(1000 * n for n in mesh_residuals(schedule))


def test_peak_bytes_of_everything_by_hand():
    """1F1B of 2 stages x 3: mesh 0 holds w, g, 2 residuals, and at most one activation or cotangent."""
    schedule = make_schedule("1f1b", 2, 3)
    step = chain_step(schedule, boundary_bytes=1, residual_bytes=10, weight_bytes=100, gradient_bytes=1000)
    timeline = simulate_schedule(schedule, lambda action: 1.0, step=step)
    # Mesh 0 while F2 runs: w, g, residuals 1 and 2, the activation, room for cotangent 1. Mesh 1 while B2 runs: w, g, one
    # residual, dx, and three results x1, which the step keeps.
    assert timeline.peak_bytes == (100 + 1000 + 2 * 10 + 1 + 1, 100 + 1000 + 10 + 1 + 3)


def test_a_sent_buffer_is_held_until_the_transfer_is_over():
    schedule = make_schedule("inference", 2, 4)
    step = chain_step(schedule, boundary_bytes=7)
    at_once = simulate_schedule(schedule, lambda action: 1.0, lambda transfer: 0.0, step)
    slow = simulate_schedule(schedule, lambda action: 1.0, lambda transfer: 10.0, step)
    assert at_once.peak_bytes[0] == 7 and slow.peak_bytes[0] == 4 * 7


def test_transfers_of_one_pair_queue_and_pairs_do_not_disturb_each_other():
    schedule = make_schedule("inference", 3, 2)
    timeline = simulate_schedule(schedule, lambda action: 1.0, lambda transfer: 3.0)
    moves = [(e.mesh, e.lane, e.label, e.start_s, e.end_s) for e in timeline.events if e.lane]
    assert moves == [
        (0, "to mesh 1", "x0@0", 1.0, 4.0),
        (0, "to mesh 1", "x0@1", 4.0, 7.0),
        (1, "to mesh 2", "x1@0", 5.0, 8.0),
        (1, "to mesh 2", "x1@1", 8.0, 11.0),
    ]
    assert timeline.makespan_s == 12.0
    one = simulate_schedule(schedule, lambda action: 1.0, lambda t: 3.0 if t.source == 0 else 0.0)
    assert one.makespan_s == 9.0


def test_eager_hides_transfers_that_1f1b_waits_for():
    seconds = {K.F: 1.0, K.B: 2.0}
    spans = {
        name: simulate_schedule(table(name, 4, 32), lambda a: seconds.get(a.kind, 0.0), lambda t: 0.5).makespan_s
        for name in ("1f1b", "eager-1f1b")
    }
    assert spans["eager-1f1b"] < 0.9 * spans["1f1b"]


def test_recompute_fills_the_wait_for_the_cotangent():
    """The last mesh is slow: the first recomputes while it waits, and the step is no longer."""
    schedule, plain = (table("1f1b", 2, 4, recompute=r) for r in ([0], ()))
    seconds = {(s, kind): (1.0, 3.0)[s] for s in (0, 1) for kind in K}
    assert simulate_schedule(schedule, seconds).makespan_s == simulate_schedule(plain, seconds).makespan_s
    assert in_flight(schedule)[0].residuals < in_flight(plain)[0].residuals


@pytest.mark.parametrize("seconds", [{}, {(0, K.F): -1.0}, {(0, K.F): float("nan")}, {(0, K.F): float("inf")}])
def test_times_that_are_none(seconds):
    with pytest.raises(ScheduleError, match=r"no time for 0F0.*add \(0, ActionKind.F\)") as caught:
        simulate_schedule(make_schedule("inference", 1, 1), seconds)
    assert caught.value.problem == "durations"
