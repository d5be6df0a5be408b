"""Names of leaves: "/"-joined pytree paths, and the globs that select them.

An argument leaf starts with the argument's position or keyword ("0/params/kernel"), a result leaf with "out".
In a glob ``*`` stands for one segment (or part of one, "layers_*"), ``**`` for any number of segments, also none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def leaf_paths(tree: Any, prefix: str, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """(path, leaf) pairs in pytree order; a tree that is a single leaf has the path ``prefix``.

    Example:
        >>> leaf_paths({"w": 1, "b": (2, 3)}, "0")
        [('0/b/0', 2), ('0/b/1', 3), ('0/w', 1)]
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(_joined(prefix, jax.tree_util.keystr(path, simple=True, separator="/")), leaf) for path, leaf in flat]


def argument_paths(
    args: Sequence[Any], kwargs: Mapping[str, Any], is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """All leaves of a call; keywords in sorted order, as JAX flattens them."""
    trees = [(str(position), tree) for position, tree in enumerate(args)] + sorted(kwargs.items(), key=lambda kv: kv[0])
    return [pair for prefix, tree in trees for pair in leaf_paths(tree, prefix, is_leaf)]


def _joined(prefix: str, path: str) -> str:
    return "/".join(part for part in (prefix, path) if part)


def is_glob(key: str) -> bool:
    return "*" in key


def glob_pattern(key: str) -> re.Pattern[str]:
    """A pattern whose ``fullmatch`` takes ``"/" + path``."""
    return re.compile("".join("(?:/[^/]+)*" if segment == "**" else _segment(segment) for segment in key.split("/")))


def _segment(segment: str) -> str:
    if segment == "*":
        return "/[^/]+"
    return "/" + "[^/]*".join(map(re.escape, segment.split("*")))


def select(key: str, paths: Sequence[str]) -> list[int]:
    """Positions of the paths that a key names: the equal one, or all that the glob matches."""
    if not is_glob(key):
        return [position for position, path in enumerate(paths) if path == key]
    pattern = glob_pattern(key)
    return [position for position, path in enumerate(paths) if pattern.fullmatch("/" + path)]


def below(prefix: str, paths: Sequence[str]) -> list[int]:
    """Positions of the leaf ``prefix`` itself or of the leaves under it."""
    return [position for position, path in enumerate(paths) if path == prefix or path.startswith(prefix + "/")]
