"""A function without a gradient as a step of one microbatch, so that it can be cut into stages as a training step is.

The whole function becomes the body of a loop that runs once. What comes after it takes the results out of their stacks. Of its
arguments some stay from call to call: those under the first argument (parameters), and those whose next value is among the
results (a cache). The latter are carried by the loop: so the next value has the form of the last one, of which layers have rows,
and takes its buffer where it is donated. All others are the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax

from alpa_lite._jax_compat import is_tracer
from alpa_lite.plan.leaf_rows import split_path
from alpa_lite.trace.auto_layers import LayerCuts, with_layers
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp
from alpa_lite.trace.forward_ops import Homes
from alpa_lite.trace.microbatch import is_microbatch_loop
from alpa_lite.trace.microbatch_loop import SCOPE


def is_forward(flat: FlatJaxpr) -> bool:
    """Whether a function takes no gradient, neither by ``al.value_and_grad`` nor by JAX's own functions."""
    return not any(is_microbatch_loop(op) or "transpose(" in op.scope for op in _walk(flat))


def _walk(flat: FlatJaxpr) -> Iterator[FlatOp]:
    for op in flat.ops:
        yield op
        for body in op.bodies:
            yield from _walk(body)


def homes_of_leaves(paths: Sequence[str], homes: Mapping[str, int | None]) -> Homes:
    """Stages by path, which may be of rows of a leaf, -> by the leaf's position and rows; other paths are left out."""
    position = {path: i for i, path in enumerate(paths)}
    found = {}
    for path, stage in homes.items():
        whole, rows = (path, None) if path in position else split_path(path)
        if whole in position:
            found[position[whole], rows] = stage, path
    return found


@dataclass(frozen=True, slots=True)
class Forward:
    """What is to be cut.

    Attributes:
        layers: chooses the cuts, where the function has no boundaries of its own.
        kept: positions, among the array leaves of the arguments, of what stays from call to call.
        state: position of such a leaf -> position of the result that is its next value, if it has one.
        homes: position of such a leaf, or of rows of it (from, to), -> the stage of its readers, and its path for messages;
            None = readers may be anywhere.
        starts: is filled with the cuts.
    """

    layers: LayerCuts
    kept: Collection[int]
    state: Mapping[int, int]
    homes: Homes
    starts: list[Any] = field(default_factory=list)

    def once(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function, run by a loop of one trip."""

        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
            arrays = [i for i, leaf in enumerate(leaves) if is_tracer(leaf)]
            given = [leaves[i] for i in arrays]
            trees: list[tuple[Any, dict[int, Any]]] = []  # of the result, and the leaves of it that nothing computes

            def flat(*values: Any) -> list[Any]:
                full = dict(enumerate(leaves)) | dict(zip(arrays, values, strict=True))
                positional, named = jax.tree_util.tree_unflatten(tree, list(full.values()))
                results, out_tree = jax.tree_util.tree_flatten(fn(*positional, **named))
                number = {id(value): i for i, value in enumerate(values)}
                ready = {k: r for k, r in enumerate(results) if not is_tracer(r)}
                ready |= {k: given[number[id(r)]] for k, r in enumerate(results) if id(r) in number}
                trees.append((out_tree, ready))
                return [r for k, r in enumerate(results) if k not in ready]

            batch = frozenset(range(len(arrays))) - frozenset(self.kept)
            cut = with_layers(
                flat, given, batch, frozenset(self.kept), self.layers, self.homes, forward=True, starts=self.starts
            )
            out_tree, ready = trees[-1]
            computed = [k for k in range(out_tree.num_leaves) if k not in ready]
            carried = {i: k for i, k in self.state.items() if k not in ready}
            stacked = [k for k in computed if k not in carried.values()]

            def one(state: list[Any], _: None) -> tuple[list[Any], list[Any]]:
                values = dict(enumerate(given)) | dict(zip(carried, state, strict=True))
                made = dict(zip(computed, cut(*values.values()), strict=True))
                return [made[k] for k in carried.values()], [made[k] for k in stacked]

            with jax.named_scope(SCOPE):
                last, rows = lax.scan(one, [given[i] for i in carried], None, length=1)
            found = ready | dict(zip(carried.values(), last, strict=True))
            found |= zip(stacked, (row[0] for row in rows), strict=True)
            return jax.tree_util.tree_unflatten(out_tree, [found[k] for k in range(out_tree.num_leaves)])

        return run
