"""What is known of a program is asked once per region, and by name of the function and its settings."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from alpa_lite.costs.facts import Facts, located
from alpa_lite.costs.fusion import fused_values
from alpa_lite.trace.program import trace


def looped(x):
    return jax.lax.scan(lambda c, row: (jnp.tanh(c + row), row), x[0], x)


PROGRAM = trace(looped, (jax.ShapeDtypeStruct((4, 8), jnp.float32),), {}).program


def test_a_fact_is_worked_out_once_per_region_and_setting():
    asked = []

    def fact(region, *, gpu=False):
        asked.append((region, gpu))
        return len(asked)

    facts, body = Facts(PROGRAM), next(op for _, _, op in PROGRAM.walk() if op.bodies).bodies[0]
    for _ in range(2):
        assert [facts.of(fact, region, gpu=gpu) for region in (PROGRAM, body) for gpu in (False, True)] == [1, 2, 3, 4]
    assert len(asked) == 4
    assert facts.of(fused_values, body, gpu=True) == fused_values(body, gpu=True)


def test_ops_are_located_as_they_are_walked():
    walked = [(path, owner, op) for path, owner, op in PROGRAM.walk()]
    assert [(path, owner, op) for _, path, owner, op in located(PROGRAM)] == walked
    for prefix, path, owner, op in located(PROGRAM):
        assert path.startswith(prefix)
        assert owner.ops[int(path[len(prefix) :])] is op
    assert {prefix for prefix, *_ in located(PROGRAM)} > {""}
