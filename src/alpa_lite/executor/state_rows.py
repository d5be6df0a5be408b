"""Leaves of a state whose rows lie on several stages, put apart and together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alpa_lite.executor.staged_array import StagedArray
from alpa_lite.plan.leaf_rows import split_path
from alpa_lite.plan.records import Leaf

Rows = tuple[int, int] | None


def whole_types(leaves: Sequence[Leaf]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Path -> (shape, type) of the leaves that these are, or are parts of."""
    found = {}
    for leaf in leaves:
        path, rows = split_path(leaf.path)
        shape = leaf.value.shape if rows is None else (rows[1], *leaf.value.shape[1:])
        found[path] = shape, leaf.value.dtype
    return found


def leaf_rows(leaves: Sequence[Leaf]) -> list[tuple[int, Rows]]:
    """Per leaf of a plan: which leaf of the whole it is, and which rows of it."""
    position = {path: i for i, path in enumerate(whole_types(leaves))}
    return [(position[path], rows) for path, rows in (split_path(leaf.path) for leaf in leaves)]


def rows_of(array: Any, rows: Rows) -> Any:
    return array if rows is None else array[slice(*rows)]


def whole_leaves(of_leaf: Sequence[tuple[int, Rows]], made: Mapping[int, Any]) -> list[Any]:
    """The leaves of the whole, of arrays by number of the plan's leaf."""
    parts: list[list[Any]] = [[] for _ in {leaf for leaf, _ in of_leaf}]
    for i, (leaf, _) in enumerate(of_leaf):
        parts[leaf].append(made[i])
    return [found[0] if len(found) == 1 else StagedArray(found) for found in parts]
