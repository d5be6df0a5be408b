"""Inputs that may be overwritten."""

from __future__ import annotations

from dataclasses import replace

from alpa_lite.schedule import ActionKind, Port, chain_step, donated_inputs, emit_instructions, make_schedule

K = ActionKind


def test_what_dies_with_its_last_reader_is_donated():
    schedule = make_schedule("zb-h1", 2, 3)
    assert donated_inputs(emit_instructions(schedule, chain_step(schedule))) == {
        (0, K.F): (),  # the weight stays
        (1, K.F): ("x0",),  # received for this program alone
        (0, K.I): ("dx1",),  # the residual is read by W too
        (1, K.I): (),
        (0, K.W): ("dw0", "g0", "r0"),
        (1, K.W): ("dw1", "g1", "r1"),
        (0, K.GRADSYNC): ("g0",),
        (1, K.GRADSYNC): ("g1",),
        (0, K.UPDATE): ("g0", "w0"),
        (1, K.UPDATE): ("g1", "w1"),
    }


def test_what_is_sent_is_not_donated():
    """x0 is sent to mesh 1 and read last by the backward of stage 0."""
    schedule = make_schedule("1f1b", 2, 3)
    step = chain_step(schedule)
    backward = next(p for p in step.programs if (p.stage, p.kind) == (0, K.B))
    longer = replace(backward, reads=(*backward.reads, Port("x0")))
    step = replace(step, programs=tuple(longer if p is backward else p for p in step.programs))
    assert donated_inputs(emit_instructions(schedule, step))[0, K.B] == ("dx1", "g0", "r0")


def test_a_program_donates_what_every_microbatch_can_spare():
    """Two weight halves take turns in reading x0 last: neither may overwrite it."""
    head = ["0F0", "1F0", "0F1", "1F1", "1I0", "0I0", "1I1", "0I1"]
    donated = {}
    for tail in (["0W0", "1W0", "1W1", "0W1"], ["0W0", "1W0", "0W1", "1W1"]):
        columns = [[*head, *tail]]
        schedule = make_schedule(lambda s, m, columns=columns: columns, 2, 2, gradsync=False, update=False)
        step = chain_step(schedule)
        longer = [replace(p, reads=(*p.reads, Port("x0"))) if p.kind is K.W else p for p in step.programs]
        donated[tail[2]] = donated_inputs(emit_instructions(schedule, replace(step, programs=tuple(longer))))
    assert "x0" not in donated["1W1"][0, K.W] and "x0" not in donated["1W1"][1, K.W]
    assert "x0" not in donated["0W1"][0, K.W] and "x0" in donated["0W1"][1, K.W]
