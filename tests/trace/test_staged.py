"""Stages as programs: what crosses is nobody's state, and ops of one kind are asked for their rule once."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.core.program import Program
from alpa_lite.trace import rules as rules_module
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp
from alpa_lite.trace.flops import op_flops
from alpa_lite.trace.program import Traced, trace
from alpa_lite.trace.rules import op_key
from alpa_lite.trace.staged import StagedStep, layers_of, staged_step

NUM_LAYERS, MICROBATCHES, WIDTH = 6, 4, 16


def loss_fn(params: Any, batch: Any) -> Any:
    x = jnp.sort(batch)  # an op that one stage alone has
    for i, w in enumerate(params):
        x = jnp.tanh(x @ w)
        x = al.layer_boundary(x) if i < NUM_LAYERS - 1 else x
    return jnp.sum(x)


def step(params: Any, batch: Any) -> Any:
    loss, grads = al.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda w, g: w - g, params, grads), loss


@cache
def traced() -> Traced:
    shapes = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * NUM_LAYERS
    batch = jax.ShapeDtypeStruct((4 * MICROBATCHES, WIDTH), jnp.float32)
    return trace(step, (shapes, batch), {}, num_microbatches=MICROBATCHES, layers=lambda flops, cut: ())


def staged(stage_of_layer: tuple[int, ...], **more: Any) -> StagedStep:
    found = traced()
    assert found.layered is not None
    return staged_step(found.program, found.layered, layers_of(found.layered), stage_of_layer, **more)


def test_what_passes_through_a_stage_is_no_state():
    # A middle stage receives and sends tensors of one type; their names must not make state of them.
    for part, program in zip(staged((0, 0, 1, 1, 2, 2)).stages, staged((0, 0, 1, 1, 2, 2)).programs, strict=True):
        assert all(i < len(part.args) and o < len(part.results) for i, o in program.aliases)
        assert len(program.aliases) == 2  # the weights of two layers


def test_rules_are_asked_once_for_all_stages(monkeypatch):
    traced()  # which asks as well
    asked = []
    real = rules_module._ask_shardy
    monkeypatch.setattr(rules_module, "_ask_shardy", lambda ops: asked.append(len(ops)) or real(ops))
    staged(tuple(range(NUM_LAYERS)))
    # The first stage, a middle one and the last: further stages have no op that these do not have.
    assert sum(n > 0 for n in asked) <= 3


@pytest.mark.parametrize("primitive", ["sort", "tanh"])
def test_a_rule_by_name_may_be_for_ops_of_some_stages(primitive):
    rule = al.register_rule(primitive, "i j -> i j")
    programs = staged((0, 0, 1, 1, 2, 2), rules=(rule,)).programs
    having = [any(op.primitive == primitive and op.rule.origin == "user" for _, _, op in p.walk()) for p in programs]
    assert having == [True, primitive == "tanh", primitive == "tanh"]


def test_ops_of_stages_have_the_keys_and_flops_of_their_own_parameters():
    """Both are taken over from the ops of the step and from equal ops."""

    def check(flat: FlatJaxpr, program: Program) -> int:
        count = 0
        for op, mirrored in zip(flat.ops, program.ops, strict=True):
            alone = FlatOp(op.primitive, dict(op.params), op.inputs, op.outputs, "", "", op.bodies)
            alone.all_outputs = op.all_outputs
            assert op_key(op, flat) == op_key(alone, flat)
            assert mirrored.flops == op_flops(alone, flat)
            count += 1 + sum(map(check, op.bodies, mirrored.bodies))
        return count

    step = staged((0, 0, 1, 1, 2, 2))
    assert sum(check(part.flat, program) for part, program in zip(step.stages, step.programs, strict=True)) > 50
    settings = {op.settings for part in step.stages for op in part.flat.ops[part.loop].bodies[0].ops}
    assert len(settings) > 3
