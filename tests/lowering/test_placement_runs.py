"""Programs whose conversions were placed by ``al.analysis`` compute, tile by tile, what the unsharded program computes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.analysis import ShardingSpec, place_conversions
from alpa_lite.core.conversion import Conversion
from alpa_lite.core.program import Program
from alpa_lite.costs.conversion import Conversions
from alpa_lite.costs.placement import PlacedConversions
from alpa_lite.lowering.lower import Lowering, named_shardings
from alpa_lite.plan.records import OpDecision
from alpa_lite.trace.program import Traced, trace
from tests.harness import RandomCosts, device_mesh, difference, jax_mesh
from tests.marks import slow_but

MESH = device_mesh((2, 4))


def step(w: jax.Array, u: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A gradient with contractions, a softmax, reshapes that split and merge, a slice and a maximum."""

    def loss(w: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(x @ w) + x.sum(0)[:8].mean()
        scores = (hidden @ u).reshape(4, 2, 4, 4).transpose(0, 2, 1, 3).reshape(16, 8)
        return (jax.nn.log_softmax(scores) ** 2).sum() + hidden.max()

    value, grad = jax.value_and_grad(loss)(w)
    return w - 0.1 * grad, value


def random_specs(program: Program, seed: int) -> dict[int, ShardingSpec]:
    """Any spec without partial sums that divides, for every tensor; captured constants lie whole."""
    rng = np.random.default_rng(seed)
    engine = Conversions(mesh=MESH, costs=RandomCosts(seed))
    specs = {}
    for value, tensor in enumerate(program.values):
        space = engine.space(len(tensor.shape))
        fit = [s for s, ok in zip(space.specs, space.valid(tensor.shape), strict=True) if ok and not s.unreduced]
        whole = value in program.constants or not fit
        specs[value] = ShardingSpec.replicated(len(tensor.shape)) if whole else fit[rng.integers(len(fit))]
    return specs


def lowered(traced: Traced, specs: dict[int, ShardingSpec], placement: PlacedConversions) -> Any:
    """The placement as a plan's decisions and conversions."""
    program = traced.program
    decisions = []
    for index, op in enumerate(program.ops):
        path = str(index)
        reads = [placement.reads.get((path, i)) for i in range(len(op.inputs))]
        makes = [placement.makes.get((path, j)) for j in range(len(op.outputs))]
        operands = tuple(
            r.spec if r is not None else specs.get(v, ShardingSpec(())) for r, v in zip(reads, op.inputs, strict=True)
        )
        results = tuple(
            m.spec if m is not None else specs.get(v, ShardingSpec(())) for m, v in zip(makes, op.outputs, strict=True)
        )
        decisions.append(OpDecision(path=path, operands=operands, results=results))
    conversions = []
    for made in placement.conversions:
        following = int(made.op) + (made.side == "after")
        where = str(following) if following < len(program.ops) else "out"
        conversions.append(
            Conversion(op=where, value=made.value, steps=made.steps, collectives=(-1,) * len(made.steps))
        )
    lowering = Lowering.of(MESH, decisions, conversions, ())
    ins, outs = ([specs[v] for v in values] for values in (program.inputs, program.outputs))
    return lowering.sharded_function(traced.flat, ins, outs, jax_mesh(MESH)), named_shardings(ins, jax_mesh(MESH))


@pytest.mark.medium
@pytest.mark.parametrize("place", slow_but({"cheaper"}, ["cheaper", "before", "after"]))
def test_placed_programs_compute_the_same(place):
    rng = np.random.default_rng(0)
    args = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((16, 32), (32, 16), (8, 16)))
    traced = trace(step, args, {})
    expected = jax.tree.leaves(jax.jit(step)(*args))
    for seed in range(2):
        specs = random_specs(traced.program, seed)
        engine = Conversions(mesh=MESH, costs=RandomCosts(seed))
        placement = place_conversions(traced.program, specs, MESH, conversions=[engine], place=place)
        assert len(placement.conversions) > 20
        run, shardings = lowered(traced, specs, placement)
        got = jax.jit(run)(*jax.device_put(list(args), shardings))
        for path, a, b in zip(traced.program.output_paths, got, expected, strict=True):
            assert difference(a, b) <= 2e-5, f"{path} differs, seed {seed}"


def test_a_missing_conversion_is_noticed():
    """Without its conversions the same program does not even have the right shapes."""
    args = tuple(jnp.ones(shape, jnp.float32) for shape in ((16, 32), (32, 16), (8, 16)))
    traced = trace(step, args, {})
    specs = random_specs(traced.program, 0)
    placement = place_conversions(traced.program, specs, MESH)
    cut = PlacedConversions(conversions=placement.conversions[1:], reads=placement.reads, makes=placement.makes)
    run, shardings = lowered(traced, specs, cut)
    with pytest.raises(KeyError):
        jax.jit(run)(*jax.device_put(list(args), shardings))
