"""Probing beside the registry: the rules of the primitives that the examples use, found again by running them."""

from __future__ import annotations

import jax
import pytest

import alpa_lite as al
from alpa_lite._jax_compat import Literal
from alpa_lite.trace.program import trace
from examples.registry import EXAMPLES

SHARDS = 2  # sizes in the small examples are small


def ops_of(flat, program):
    for op, planned in zip(flat.ops, program.ops, strict=True):
        if not op.bodies:
            yield op, flat, planned
        for body, inner in zip(op.bodies, planned.bodies, strict=True):
            yield from ops_of(body, inner)


def representatives(names):
    """Per primitive, the op with most layouts in its registered rule, the smallest of these."""
    found = {}
    for name in names:
        example = EXAMPLES[name]("small")
        traced = trace(example.train_step, example.abstract_args(), {})
        for op, flat, planned in ops_of(traced.flat, traced.program):
            values = [v for v in (*op.inputs, *op.all_outputs) if not isinstance(v, Literal)]
            rank = (-len(al.rules.enumerate_sharded(planned.rule, SHARDS)), sum(flat.avals[v].size for v in values))
            if op.name not in found or rank < found[op.name][0]:
                found[op.name] = (rank, op, flat, planned.rule)
    return {name: entry[1:] for name, entry in found.items()}


def layouts(rule, literals=()):
    """Layouts without the operands that are literals."""
    return {
        (tuple(d for p, d in enumerate(x.operands) if p not in literals), x.results, x.reduce, x.reduce_op)
        for x in al.rules.enumerate_sharded(rule, SHARDS)
    }


def rediscovered(op, flat, rule):
    """Whether probing finds every layout that the registered rule allows."""

    def run(*args):
        it = iter(args)
        return op.primitive.bind(*(i.val if isinstance(i, Literal) else next(it) for i in op.inputs), **op.params)

    values = [flat.avals[i] for i in op.inputs if not isinstance(i, Literal)]
    args = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
    literals = [p for p, i in enumerate(op.inputs) if isinstance(i, Literal)]
    found = al.rules.probe(run, *args, num_shards=SHARDS, same_code=False)
    return layouts(rule, literals) <= layouts(found)


def missed(names):
    chosen = representatives(names)
    return [name for name, entry in sorted(chosen.items()) if not rediscovered(*entry)], len(chosen)


@pytest.mark.slow
def test_primitives_of_one_example_are_rediscovered():
    """An iota reads nothing, so there is nothing to see: its own rule (a tile is an iota plus an offset) is the one miss."""
    names, total = missed(["moe"])
    assert total >= 25 and set(names) <= {"iota"}


@pytest.mark.slow
def test_95_percent_of_the_primitives_of_all_examples_are_rediscovered():
    names, total = missed(EXAMPLES)
    assert total >= 45
    assert (total - len(names)) / total >= 0.95, names
