"""Instruction lists: they compute what a plain loop computes, and obey the rules of transfers and buffers."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.errors import ScheduleError
from alpa_lite.schedule import (
    ActionKind,
    Buffer,
    Origin,
    Port,
    StageIO,
    StepIO,
    chain_step,
    check_instructions,
    emit_instructions,
    make_schedule,
    simulate,
)
from alpa_lite.schedule.instructions import Free, Recv, Run, Send, Zeros
from tests.schedule.tables import TRAINING, random_table, rich_step, table
from tests.schedule.values import execute, plain_loop

K = ActionKind
seeds = st.integers(0, 10**9)


def unit(action):
    return 1.0


@pytest.mark.parametrize("name", [*TRAINING, "inference"])
def test_generators_emit_what_a_plain_loop_computes(name):
    schedule = table(name, 3, 6)
    step = chain_step(schedule) if name == "inference" else rich_step(schedule, random.Random(name))
    check_values(schedule, step)


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_random_tables_and_steps_emit_what_a_plain_loop_computes(seed):
    rng = random.Random(seed)
    schedule = random_table(rng)
    check_values(schedule, rich_step(schedule, rng), random.Random(seed))


def check_values(schedule, step, rng=None):
    instructions = emit_instructions(schedule, step)
    check_instructions(instructions, schedule)
    times = {(p.stage, p.kind): rng.choice([0.0, 1.0, rng.random()]) if rng else 1.0 for p in step.programs}
    timeline = simulate(instructions, times, (lambda transfer: rng.random()) if rng else None)
    everything = [(m, k) for m, each in enumerate(instructions.meshes) for k in range(len(each.instructions))]
    assert sorted(timeline.order) == everything
    for mesh in range(schedule.num_meshes):
        places = [k for m, k in timeline.order if m == mesh]
        assert places == sorted(places)
    left = execute(instructions, step, timeline.order)
    expected = plain_loop(schedule, step)
    for mesh, values in zip(instructions.meshes, left, strict=True):
        assert set(values) == set(mesh.kept)
        for buffer, value in values.items():
            assert value == expected[buffer], buffer
    wanted = {b.name for b in step.buffers if b.kept}
    assert {buffer.name for values in left for buffer in values} == wanted


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_rules_of_transfers_and_buffers(seed):
    """The same rules as ``check_instructions``, counted in another way."""
    rng = random.Random(seed)
    schedule = random_table(rng)
    instructions = emit_instructions(schedule, rich_step(schedule, rng))
    sends, recvs = Counter(), Counter()
    orders: dict[tuple, list] = {}
    for mesh, each in enumerate(instructions.meshes):
        assert tuple(i.action for i in each.instructions if isinstance(i, Run)) == schedule.columns[mesh]
        born = Counter(each.arguments)
        freed = Counter(i.buffer for i in each.instructions if isinstance(i, Free))
        for i in each.instructions:
            if isinstance(i, Send):
                sends[i.transfer, i.buffer, mesh, i.destination] += 1
                orders.setdefault((mesh, i.destination, "send"), []).append(i.transfer)
            if isinstance(i, Recv):
                recvs[i.transfer, i.buffer, i.source, mesh] += 1
                orders.setdefault((i.source, mesh, "recv"), []).append(i.transfer)
            if isinstance(i, (Recv, Zeros)):
                born[i.buffer] += 1
            if isinstance(i, Run):
                born.update(set(i.writes) - set(i.reads))
        assert set(born.values()) <= {1} and set(freed.values()) <= {1}
        assert born - freed == Counter(each.kept)
    assert sends == recvs and set(sends.values()) <= {1}
    for (a, b, side), order in orders.items():
        assert order == orders[a, b, "send" if side == "recv" else "recv"] == sorted(order)
    assert sorted(t.id for t in instructions.transfers) == list(range(len(sends)))


def test_a_small_step_as_text(golden):
    schedule = make_schedule("1f1b", 2, 2, recompute=[0])
    golden("schedule_instructions", str(emit_instructions(schedule, chain_step(schedule))))


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(0, 3))
def test_a_receive_stands_before_the_runs_that_it_shall_go_on_beside(seed, prefetch):
    rng = random.Random(seed)
    schedule = random_table(rng)
    instructions = emit_instructions(schedule, rich_step(schedule, rng), prefetch=prefetch)
    check_instructions(instructions, schedule)
    for each in instructions.meshes:
        for place, recv in enumerate(each.instructions):
            if isinstance(recv, Recv):
                runs = [i for i in each.instructions[place:] if isinstance(i, Run)]
                before = len([i for i in each.instructions[:place] if isinstance(i, Run)])
                reader = next(k for k, run in enumerate(runs) if recv.buffer in run.reads)
                assert reader >= min(prefetch, before + reader)


def test_receives_that_are_posted_late_cost_time():
    """1F1B on two meshes: while mesh 1 works on microbatch k, microbatch k + 1 travels."""
    schedule = make_schedule("1f1b", 2, 8, gradsync=False, update=False)
    instructions, late = (emit_instructions(schedule, chain_step(schedule), prefetch=n) for n in (1, 0))
    spans = [simulate(lists, unit, lambda transfer: 0.5).makespan_s for lists in (instructions, late)]
    assert spans[0] < spans[1]


def replace_meshes(instructions, meshes):
    return replace(instructions, meshes=tuple(meshes))


def simple_step(**changes):
    """One stage, F and B, with a gradient sum; ``changes`` replaces parts."""
    parts = {
        "buffers": (
            Buffer(name="w", origin=Origin.ARGUMENT, per_microbatch=False, stages=(0,), kept=True),
            Buffer(name="g", origin=Origin.ZEROS, per_microbatch=False, kept=True),
            Buffer(name="r"),
        ),
        "f": StageIO(stage=0, kind=K.F, reads=(Port("w"),), writes=(Port("r"),)),
        "b": StageIO(stage=0, kind=K.B, reads=(Port("g"), Port("r")), writes=(Port("g"),)),
        "s": StageIO(stage=0, kind=K.GRADSYNC, reads=(Port("g"),), writes=(Port("g"),)),
        "u": StageIO(stage=0, kind=K.UPDATE, reads=(Port("g"), Port("w")), writes=(Port("w"),)),
    } | changes
    programs = tuple(parts[key] for key in "fbsu" if parts[key] is not None)
    return StepIO(buffers=parts["buffers"], programs=programs)


BUFFERS = simple_step().buffers
WRONG_STEPS = {
    "a program is missing": (simple_step(b=None), "0 programs for B of stage 0", "programs"),
    "two buffers of one name": (simple_step(buffers=(*BUFFERS, Buffer(name="r"))), "two buffers called 'r'", "buffers"),
    "no such buffer": (
        simple_step(f=StageIO(stage=0, kind=K.F, writes=(Port("r"), Port("y")))),
        "F of stage 0 with the buffer 'y'",
        "buffers",
    ),
    "an update of one microbatch": (
        simple_step(u=StageIO(stage=0, kind=K.UPDATE, reads=(Port("r"),))),
        "runs once per step, with 'r', of which there is one per microbatch",
        "buffers",
    ),
    "a sum that is read too early": (
        simple_step(f=StageIO(stage=0, kind=K.F, reads=(Port("g"),), writes=(Port("r"),))),
        "F of stage 0 that reads the sum 'g' before it is whole",
        "buffers",
    ),
    "zeros that are overwritten": (
        simple_step(b=StageIO(stage=0, kind=K.B, reads=(Port("r"),), writes=(Port("g"),))),
        "writes zeros 'g' unread",
        "buffers",
    ),
    "zeros without a sum": (
        simple_step(b=StageIO(stage=0, kind=K.B, reads=(Port("r"),))),
        "'g', zeros that no program adds to",
        "buffers",
    ),
    "a microbatch's value made once": (
        simple_step(buffers=(*BUFFERS[:2], Buffer(name="r", per_microbatch=False))),
        "writes 'r' anew for every microbatch",
        "buffers",
    ),
    "a microbatch's value in place": (
        simple_step(b=StageIO(stage=0, kind=K.B, reads=(Port("g"), Port("r")), writes=(Port("g"), Port("r")))),
        "changes 'r'@microbatch in place",
        "buffers",
    ),
    "a buffer that nobody makes": (
        simple_step(f=StageIO(stage=0, kind=K.F, reads=(Port("w"),))),
        "'r', written by nobody",
        "buffers",
    ),
}


@pytest.mark.parametrize("case", WRONG_STEPS)
def test_wrong_steps_are_refused(case):
    step, words, problem = WRONG_STEPS[case]
    schedule = make_schedule("gpipe", 1, 2)
    emit_instructions(schedule, simple_step())
    with pytest.raises(ScheduleError) as caught:
        emit_instructions(schedule, step)
    assert words in str(caught.value) and caught.value.problem == problem


def two_stages(extra: dict, buffers: tuple):
    """The chain of two stages with more reads and writes for some programs."""
    step = chain_step(make_schedule("1f1b", 2, 2))
    programs = []
    for program in step.programs:
        reads, writes = extra.get((program.stage, program.kind), ((), ()))
        more = {
            "reads": (*program.reads, *(Port(n) for n in reads)),
            "writes": (*program.writes, *(Port(n) for n in writes)),
        }
        programs.append(replace(program, **more))
    return StepIO(buffers=(*step.buffers, *buffers), programs=tuple(programs))


def test_values_that_flow_in_a_circle_are_a_deadlock():
    schedule = make_schedule("1f1b", 2, 2)
    # Stage 0's forward reads what stage 1's forward makes of the same microbatch.
    step = two_stages({(0, K.F): (("y",), ()), (1, K.F): ((), ("y",))}, (Buffer(name="y"),))
    with pytest.raises(ScheduleError, match=r"0F0 .* reads what 1F0 makes; 1F0 .* reads what 0F0 makes") as caught:
        emit_instructions(schedule, step)
    assert caught.value.problem == "deadlock"


def test_a_sum_on_two_meshes_is_refused():
    shared = Buffer(name="s", origin=Origin.ZEROS, per_microbatch=False)
    step = two_stages({(s, K.B): (("s",), ("s",)) for s in (0, 1)}, (shared,))
    with pytest.raises(ScheduleError, match=r"'s', which B of stage 1 changes on mesh 1, though it is on \[0, 1\]"):
        emit_instructions(make_schedule("1f1b", 2, 2), step)


def test_a_phase_changes_a_buffer_once():
    """Two stages of one mesh that both synchronise a tied gradient."""
    schedule = make_schedule(lambda s, m: [["0F0", "1F0", "1B0", "0B0"]], 2, 1, update=False)
    step = chain_step(schedule)
    both = [
        replace(p, reads=(*p.reads, Port("g0")), writes=(*p.writes, Port("g0")))
        if (p.stage, p.kind) == (1, K.GRADSYNC)
        else p
        for p in step.programs
    ]
    with pytest.raises(ScheduleError, match="'g0', changed by GRADSYNC of stage 0 and GRADSYNC of stage 1"):
        emit_instructions(schedule, replace(step, programs=tuple(both)))


def test_two_values_of_one_buffer_are_not_sent_to_one_mesh():
    """Stage 1 asks for the gradient of stage 0 before and after it is synchronised."""
    step = two_stages({(1, K.GRADSYNC): (("g0",), ()), (1, K.UPDATE): (("g0",), ())}, ())
    with pytest.raises(ScheduleError, match="'g0' after mesh 0 has changed it in place, and an earlier action"):
        emit_instructions(make_schedule("1f1b", 2, 2), step)


def test_a_value_has_one_maker_per_microbatch():
    """Both halves of stage 1 say that they make the value that stage 0 reads; or neither does for whole backwards."""
    schedule = make_schedule("zb-h1", 2, 2)
    step = chain_step(schedule)
    twice = tuple(
        replace(p, writes=(*p.writes, Port("dx1"))) if (p.stage, p.kind) == (1, K.W) else p for p in step.programs
    )
    with pytest.raises(ScheduleError, match="reads 'dx1@0', made by 1I0 and 1W0"):
        emit_instructions(schedule, replace(step, programs=twice))
    columns = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1I0", "1W0", "1F1", "1B1"]]
    mixed = make_schedule(lambda s, m: columns, 2, 2)
    step = chain_step(mixed)
    never = tuple(replace(p, writes=p.writes[:1]) if (p.stage, p.kind) == (1, K.B) else p for p in step.programs)
    with pytest.raises(ScheduleError, match="reads 'dx1@1', made by nobody"):
        emit_instructions(mixed, replace(step, programs=never))


def test_a_weight_is_not_updated_before_its_last_reader_on_the_mesh():
    columns = [["0F0", "1F0", "1B0", "0B0", "0UPDATE", "1UPDATE"]]
    schedule = make_schedule(lambda stages, microbatches: columns, 2, 1, gradsync=False)
    step = chain_step(schedule)
    late = replace(step.programs[-1], reads=(*step.programs[-1].reads, Port("w0")))
    with pytest.raises(ScheduleError, match="runs 0UPDATE before 1UPDATE on mesh 0, but 1UPDATE reads 'w0'") as caught:
        emit_instructions(schedule, replace(step, programs=(*step.programs[:-1], late)))
    assert caught.value.problem == "order"


def corrupt(instructions, mesh, change):
    """Instruction lists with one mesh's list changed."""
    listed = list(instructions.meshes[mesh].instructions)
    change(listed)
    changed = replace(instructions.meshes[mesh], instructions=tuple(listed))
    return replace_meshes(instructions, [changed if k == mesh else each for k, each in enumerate(instructions.meshes)])


def first(listed, kind, **fields):
    return next(
        i for i in listed if isinstance(i, kind) and all(str(getattr(i, name)) == v for name, v in fields.items())
    )


def swap(kind):
    def change(listed):
        places = [k for k, i in enumerate(listed) if isinstance(i, kind)][:2]
        listed[places[0]], listed[places[1]] = listed[places[1]], listed[places[0]]

    return change


def move_up(listed):
    free = first(listed, Free, buffer="r1@0")
    listed.remove(free)
    listed.insert(listed.index(first(listed, Run, action="1B0")), free)


CORRUPTIONS = {
    "a SEND less": (0, lambda x: x.remove(first(x, Send)), "unmatched transfer", "0 SENDs and 1 RECVs"),
    "a RECV less": (1, lambda x: x.remove(first(x, Recv)), "unmatched transfer", "1 SENDs and 0 RECVs"),
    "RECVs in another order": (1, swap(Recv), "unmatched transfer", "send #0 but receive #1"),
    "freed too early": (1, move_up, "use after free", "after the buffer was freed"),
    "freed twice": (1, lambda x: x.append(first(x, Free)), "double free", "a second time"),
    "never freed": (1, lambda x: x.remove(first(x, Free)), "leak", "still on mesh 1"),
    "no zeros": (0, lambda x: x.remove(first(x, Zeros)), "use before definition", "before the buffer is there"),
    "zeros twice": (0, lambda x: x.insert(-3, first(x, Zeros)), "double", "though the buffer was made before"),
    "made again after it was freed": (
        0,
        lambda x: x.append(first(x, Zeros)),
        "double",
        "though the buffer was made before",
    ),
    "a result freed": (0, lambda x: x.append(Free(first(x, Run).reads[0])), "missing", "not on mesh 0"),
}


@pytest.mark.parametrize("case", CORRUPTIONS)
def test_corrupted_instructions_are_reported_as_what_they_are(case):
    mesh, change, problem, words = CORRUPTIONS[case]
    schedule = make_schedule("1f1b", 2, 3)
    instructions = emit_instructions(schedule, chain_step(schedule))
    check_instructions(instructions, schedule)
    with pytest.raises(ScheduleError) as caught:
        simulate(corrupt(instructions, mesh, change), unit)
    assert caught.value.problem == problem and words in str(caught.value)
    assert f"mesh {mesh}" in str(caught.value)


def test_runs_are_compared_with_the_schedule():
    schedule, shorter = (make_schedule("inference", 2, m) for m in (3, 2))
    instructions = emit_instructions(shorter, chain_step(shorter))
    check_instructions(instructions, shorter)
    with pytest.raises(ScheduleError, match="run nothing where the schedule has 0F2") as caught:
        check_instructions(instructions, schedule)
    assert caught.value.problem == "missing"


def test_lists_that_wait_for_each_other_are_a_deadlock():
    schedule = make_schedule("1f1b", 2, 2, gradsync=False, update=False)
    instructions = emit_instructions(schedule, chain_step(schedule))

    def backward_first(listed):
        # Mesh 0 wants the cotangent of microbatch 0 before it has sent microbatch 0's activation.
        send = first(listed, Send, transfer="0")
        free = first(listed, Free, buffer="x0@0")
        for one in (send, free):
            listed.remove(one)
        backward = listed.index(first(listed, Run, action="0B0"))
        listed[backward + 1 : backward + 1] = [send, free]

    def same_order(listed):
        # SEND #1 goes behind SEND #0, as pairs keep their order.
        send, free = first(listed, Send, transfer="1"), first(listed, Free, buffer="x0@1")
        for one in (send, free):
            listed.remove(one)
        listed += [send, free]

    wrong = corrupt(corrupt(instructions, 0, backward_first), 0, same_order)
    with pytest.raises(ScheduleError) as caught:
        simulate(wrong, unit)
    assert caught.value.problem == "deadlock"
    assert "mesh 0 waits at RUN 0B0" in str(caught.value) and "mesh 1 waits at RUN 1F0" in str(caught.value)
