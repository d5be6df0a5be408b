"""Whether the parts of a model have all of its parameters: a layer that no part has is missed by nothing but the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from alpa_lite.errors import ServeError, user_line
from alpa_lite.serve.model_graphs import param_shapes
from alpa_lite.serve.stored import shapes_of
from alpa_lite.trace.paths import leaf_paths
from alpa_lite.units import numbers_text


def check_all_picked(name: str, params: Any, picks: Sequence[Callable[[Any], Any]]) -> None:
    """Refuses a cut that leaves parameters out, or rows of them.

    Args:
        name: of the model's class.
        params: of the whole model, as for ``Engine``.
        picks: per part, what picks its parameters out of all. Of what cannot be traced, or picks in other ways than leaves and
            rows of leaves, nothing is known.

    Raises:
        ServeError: something is in no part.
    """
    leaves = leaf_paths(shapes_of(params), "params")
    try:
        shapes = param_shapes(shapes_of(params))
        traced = [jax.make_jaxpr(pick)(shapes).jaxpr for pick in picks]
    except Exception:  # of the user's function; what it picks of arrays is looked at later
        return
    for number, (path, leaf) in enumerate(leaves):
        count = jnp.shape(leaf)[0] if jnp.ndim(leaf) else 1
        runs = [run for jaxpr in traced for run in _runs_picked(jaxpr, number, jnp.shape(leaf), count)]
        if missing := _gaps(runs, count):
            rows = f"{numbers_text(missing)} of the {count} rows of " if runs else ""
            raise ServeError(
                f"{name}.split({len(picks)}) leaves parameters out: {rows}{path!r} is in no part. Whatever reads it would be "
                f"missing from every answer. At {user_line()}. Correct what the parts pick, e.g. where the number of stages does "
                "not divide that of layers; leave out of the parameters what the model does not read."
            )


def _gaps(runs: Sequence[tuple[int, int]], count: int) -> list[int]:
    """What of ``range(count)`` is in no run."""
    missing: list[int] = []
    end = 0
    for start, stop in [*sorted(runs), (count, count)]:
        missing += range(end, start)
        end = max(end, stop)
    return missing


def _runs_picked(jaxpr: Any, number: int, shape: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Rows of an argument: those that are sliced off its first dim, else all, if it is read at all."""
    var = jaxpr.invars[number]
    found = [(0, count)] if any(out is var for out in jaxpr.outvars) else []
    for eqn in jaxpr.eqns:
        if not any(operand is var for operand in eqn.invars):
            continue
        start, stop = eqn.params.get("start_indices", ()), eqn.params.get("limit_indices", ())
        sliced = eqn.primitive.name == "slice" and not any(start[1:]) and set(eqn.params["strides"] or (1,)) == {1}
        found.append((start[0], stop[0]) if sliced and tuple(stop[1:]) == tuple(shape[1:]) else (0, count))
    return found
