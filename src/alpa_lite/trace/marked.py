"""What marks inside a function are given: arrays."""

from __future__ import annotations

from typing import Any

import jax

from alpa_lite.errors import AlpaLiteError, user_line
from alpa_lite.trace.paths import leaf_paths


def check_arrays(x: Any, call: str, error: type[AlpaLiteError], *, one: bool = False) -> None:
    """Refuses what JAX takes for no array.

    Args:
        x: a pytree.
        call: the mark as it should be written, e.g. "al.pin(x, spec)".
        error: that is raised.
        one: whether ``x`` must be one array.
    """
    name = call.partition("(")[0]
    leaves = leaf_paths(x, "x")
    if one and [path for path, _ in leaves] != ["x"]:
        raise error(
            f"{name} got a pytree: {type(x).__name__} of {len(leaves)} leaves. It takes one array. At {user_line()}. Give each "
            f"of its arrays by itself, e.g. jax.tree.map(lambda x: {call}, tree)."
        )
    for path, leaf in leaves:
        try:
            jax.typeof(leaf)
        except TypeError:
            where = "" if path == "x" else f" as {path!r}"
            raise error(
                f"{name} got {leaf!r:.60} of type {type(leaf).__name__}{where}, which is no array. At {user_line()}. Write "
                f"{call} for arrays."
            ) from None
