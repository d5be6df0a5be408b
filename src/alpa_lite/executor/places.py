"""Where leaves of a state, or rows of them, lie: each on the devices of its stage alone; and state that is computed there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from alpa_lite.executor.processes import replicated
from alpa_lite.executor.state_rows import Rows, leaf_rows, rows_of, whole_leaves
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.plan.records import Leaf

Place = tuple[int, Rows, NamedSharding]
"""A leaf of the whole, its rows or None for all of it, and where they lie."""


def places_of(leaves: Sequence[Leaf], meshes: Sequence[Mesh] | Mapping[int, Mesh]) -> list[Place]:
    """Where leaves of a plan lie, which may be rows of leaves; ``meshes``: of its stages, or of those that matter here."""
    here = meshes if isinstance(meshes, Mapping) else dict(enumerate(meshes))
    return [
        (number, rows, NamedSharding(here[leaf.stage], partition_spec(leaf.spec)))
        for (number, rows), leaf in zip(leaf_rows(leaves), leaves, strict=True)
        if leaf.stage in here
    ]


def whole_tree(tree: Any, places: Sequence[Place], made: Sequence[Any]) -> Any:
    """The pytree whose leaves, or rows of leaves, were made in order of ``places``."""
    of_leaf = [(number, rows) for number, rows, _ in places]
    return jax.tree_util.tree_unflatten(tree, whole_leaves(of_leaf, dict(enumerate(made))))


def creator(init_fn: Callable[..., Any], places: Sequence[Place]) -> Callable[..., Any]:
    """``init_fn`` as a function that makes its result in these places; it is compiled by the first call, per mesh."""
    make = part_creator(init_fn, places)

    def create(*args: Any) -> Any:
        tree = jax.tree_util.tree_structure(jax.eval_shape(init_fn, *args))
        return whole_tree(tree, places, make(*args))

    return create


def part_creator(init_fn: Callable[..., Any], places: Sequence[Place]) -> Callable[..., list[jax.Array]]:
    """The same where places may be those of some leaves alone: they come in order of ``places``."""
    parts: list[tuple[list[int], Any, Any]] = []
    for mesh in dict.fromkeys(sharding.mesh for _, _, sharding in places):
        own = [i for i, (_, _, sharding) in enumerate(places) if sharding.mesh == mesh]

        def part(*args: Any, own: list[int] = own) -> list[Any]:
            found = jax.tree_util.tree_leaves(init_fn(*args))
            return [rows_of(found[places[i][0]], places[i][1]) for i in own]

        parts.append((own, mesh, jax.jit(part, out_shardings=[places[i][2] for i in own])))

    def create(*args: Any) -> list[jax.Array]:
        made: dict[int, Any] = {}
        for own, mesh, run in parts:
            given = replicated(args, mesh) if jax.process_count() > 1 else args
            made.update(zip(own, run(*given), strict=True))
        return [made[i] for i in range(len(places))]

    return create
