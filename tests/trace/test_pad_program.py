"""A function with all its uneven dims padded computes what it computed, whole and on random layouts."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from alpa_lite.lowering.user_body import run_flat
from alpa_lite.trace.pad_groups import pad_groups
from alpa_lite.trace.pad_program import pad_traced
from alpa_lite.trace.program import trace
from examples.registry import EXAMPLES
from tests.compiling import QUICK_COMPILE
from tests.harness import difference, draw, run
from tests.marks import slow_but
from tests.padding_steps import STEPS

QUICK = ("reductions", "indexing")  # the others are long to compile
HALF = tuple(STEPS)[::2]


def padded(name, multiple=8):
    fn, args = STEPS[name]()
    traced = trace(fn, args, {})
    uneven = pad_groups(traced.flat, traced.program, lambda size: size % multiple)
    return fn, args, traced, pad_traced(traced, [(g, -(-g.size // multiple) * multiple) for g in uneven]).traced


def agree(traced, expected, results):
    for path, got, want in zip(traced.program.output_paths, results, jax.tree.leaves(expected), strict=True):
        rounding = np.issubdtype(want.dtype, np.floating) and max(np.abs(got).max(), np.abs(want).max()) < 1e-8
        assert rounding or difference(got, want) <= 2e-5, path


@pytest.mark.parametrize("name", slow_but(HALF, STEPS))
@pytest.mark.medium
def test_the_padded_function_is_the_same_function(name):
    fn, args, traced, made = padded(name)
    assert "pad" in {op.primitive for _, _, op in made.program.walk()}
    assert [str(made.program.values[v]) for v in made.program.inputs] == [
        str(traced.program.values[v]) for v in traced.program.inputs
    ]
    assert made.program.aliases == traced.program.aliases
    results = jax.jit(lambda leaves: run_flat(made.flat, leaves), compiler_options=QUICK_COMPILE)(jax.tree.leaves(args))
    agree(made, jax.jit(fn, compiler_options=QUICK_COMPILE)(*args), results)


@pytest.mark.medium
@pytest.mark.parametrize("shape", slow_but({(2, 4)}, [(4,), (2, 4)]), ids=str)
@pytest.mark.parametrize("name", slow_but(QUICK[1:], STEPS))
def test_random_layouts_of_the_padded_function(name, shape):
    fn, args, _, made = padded(name)
    expected = jax.jit(fn, compiler_options=QUICK_COMPILE)(*args)
    drawn = draw(made, shape, seeds=(0, 1))
    for results in run(drawn, jax.tree.map(jax.numpy.asarray, args)):
        agree(made, expected, results)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_with_every_dim_padded(name):
    """No dim of the examples divides over 7, so everything that can run padded does, gradients and updates included."""
    example = EXAMPLES[name]("small", optimizer="sgd")
    args = (jax.jit(example.init)(jax.random.key(0)), example.batch(0))
    traced = trace(example.grads_step, args, {})
    uneven = pad_groups(traced.flat, traced.program, lambda size: size % 7)
    made = pad_traced(traced, [(g, -(-g.size // 7) * 7) for g in uneven]).traced
    results = jax.jit(lambda leaves: run_flat(made.flat, leaves), compiler_options=QUICK_COMPILE)(jax.tree.leaves(args))
    agree(made, jax.jit(example.grads_step, compiler_options=QUICK_COMPILE)(*args), results)
