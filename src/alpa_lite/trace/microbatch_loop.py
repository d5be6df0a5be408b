"""The scan over the microbatches of one gradient: what ``al.value_and_grad`` traces to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite._jax_compat import ClosedJaxpr, Jaxpr, Literal, evaluate_jaxpr, inner_jaxprs
from alpa_lite.errors import MicrobatchError, user_line

SCOPE = "al_microbatches"


@dataclass(frozen=True, slots=True)
class Repeated:
    """The function whose gradient is repeated, and how; see ``value_and_grad``."""

    name: str
    has_aux: bool
    reduction: str
    fold_keys: bool


@dataclass(frozen=True, slots=True)
class MicrobatchLoop:
    """The scan over microbatches of one call.

    Attributes:
        function: whose gradient is repeated.
        body: value and gradient of one microbatch, with what it closes over as constants.
        out_tree: of ((value, aux), grads) or (value, grads).
        leaves, axes: the array leaves, and along which dim they are split (None: read whole).
        folded: among constants and leaves of ``body``, those that are PRNG keys.
        ways: per result leaf, how microbatches are put together.
        count: of microbatches.
    """

    function: Repeated
    body: ClosedJaxpr
    out_tree: Any
    leaves: list[Any]
    axes: list[int | None]
    folded: frozenset[int]
    ways: list[str | int]
    count: int

    @classmethod
    def of(
        cls,
        function: Repeated,
        flat: Callable[..., Any],
        leaves: list[Any],
        axes: list[int | None],
        count: int,
        micro: list[jax.ShapeDtypeStruct],
    ) -> MicrobatchLoop:
        body, shape = jax.make_jaxpr(flat, return_shape=True)(*micro)
        out_tree = jax.tree_util.tree_structure(shape)
        folded = _keys(body) if function.fold_keys else frozenset()
        num_consts = len(body.jaxpr.constvars)
        vary = {i for i, axis in enumerate(axes, num_consts) if axis is not None} | folded
        ways = _ways(function, body, shape, vary, flat, leaves, count)
        return cls(function, body, out_tree, leaves, axes, folded, ways, count)

    def run(self) -> Any:
        xs = [self.stacked(leaf, axis) for leaf, axis in zip(self.leaves, self.axes, strict=True) if axis is not None]
        avals = self.body.out_avals
        # Scalars are stacked and added up after the loop: a carry that starts as a literal cannot hold partial sums.
        summed = [i for i, way in enumerate(self.ways) if way in ("mean", "sum") and avals[i].ndim]
        stacked = [i for i in range(len(self.ways)) if i not in summed]
        start = [jnp.zeros(avals[i].shape, _wide(avals[i].dtype)) for i in summed]
        index = jnp.arange(self.count, dtype=jnp.uint32) if self.folded else None

        def step(sums: list[Any], x: Any) -> tuple[list[Any], list[Any]]:
            number, parts = x
            results = self.one(number, parts)
            sums = [s + results[i].astype(s.dtype) for s, i in zip(sums, summed, strict=True)]
            return sums, [results[i] for i in stacked]

        with jax.named_scope(SCOPE):
            sums, rows = lax.scan(step, start, (index, xs), length=self.count)
        totals = dict(zip(summed, sums, strict=True)) | dict(zip(stacked, rows, strict=True))
        results = [self.joined(i, totals[i], avals[i].dtype) for i in range(len(self.ways))]
        return jax.tree_util.tree_unflatten(self.out_tree, results)

    def joined(self, i: int, made: Any, dtype: Any) -> Any:
        """Result ``i`` of the whole batch, from the sum over microbatches or from their stack."""
        way = self.ways[i]
        if isinstance(way, int):
            return _interleaved(made, way)
        if way == "same":
            return made[-1]
        total = made if self.body.out_avals[i].ndim else jnp.sum(made.astype(_wide(dtype)), axis=0)
        return (total / self.count if way == "mean" else total).astype(dtype)

    def one(self, number: Any, parts: list[Any]) -> list[Any]:
        """All result leaves of one microbatch."""
        rest = iter(parts)
        given = [leaf if axis is None else next(rest) for leaf, axis in zip(self.leaves, self.axes, strict=True)]
        inputs = [*self.body.consts, *given]
        inputs = [_fold(x, number) if i in self.folded else x for i, x in enumerate(inputs)]
        consts = len(self.body.consts)
        return evaluate_jaxpr(self.body.jaxpr, inputs[:consts], inputs[consts:])

    def stacked(self, leaf: Any, axis: int) -> Any:
        """(..., b, ...) -> (m, ..., b/m, ...)."""
        shape = jnp.shape(leaf)
        parts = jnp.reshape(leaf, (*shape[:axis], shape[axis] // self.count, self.count, *shape[axis + 1 :]))
        return jnp.moveaxis(parts, axis + 1, 0)


def _interleaved(rows: Any, axis: int) -> Any:
    """(m, ..., b, ...) -> (..., m*b, ...)."""
    parts = jnp.moveaxis(rows, 0, axis + 1)
    shape = parts.shape
    return jnp.reshape(parts, (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :]))


def _ways(
    function: Repeated,
    body: ClosedJaxpr,
    shape: Any,
    vary: set[int],
    flat: Callable[..., Any],
    leaves: list[Any],
    count: int,
) -> list[str | int]:
    """Per result leaf: "mean", "sum", "same", or the dim along which microbatches are concatenated."""
    value, grads = shape
    num_grads = len(jax.tree_util.tree_leaves(grads))
    if not function.has_aux:
        return [function.reduction] * (1 + num_grads)
    depends = _depends(body, vary)
    found = tree_with_paths(value[1])
    full: list[Any] = [leaf for _, leaf in found]
    if any(leaf.ndim for leaf in full):
        full = jax.tree_util.tree_leaves(jax.eval_shape(flat, *map(struct_of, leaves))[0][1])
    ways: list[str | int] = [function.reduction]
    for number, ((path, leaf), whole) in enumerate(zip(found, full, strict=True), 1):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        ways.append(_way(function, name, leaf, whole, depends[number], count))
    return [*ways, *[function.reduction] * num_grads]


def _way(function: Repeated, name: str, leaf: Any, whole: Any, depends: bool, count: int) -> str | int:
    differ = [d for d, (a, b) in enumerate(zip(leaf.shape, whole.shape, strict=False)) if a != b]
    if leaf.ndim == whole.ndim and not differ:
        if not depends:
            return "same"
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return "mean"
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return "sum"
        reason = f"is a {leaf.dtype} that differs from microbatch to microbatch: it has no sum and no mean"
    elif leaf.ndim == whole.ndim and len(differ) == 1 and leaf.shape[differ[0]] * count == whole.shape[differ[0]]:
        return differ[0]
    else:
        reason = f"has shape {leaf.shape} for one of {count} microbatches and {whole.shape} for the whole batch"
    raise MicrobatchError(
        f"auxiliary result {name!r} of {function.name} {reason}. Leaves with a dim that grows with the batch are concatenated, "
        f"floats averaged, integers summed. At {user_line()}. Return it in one of these forms, or not at all."
    )


def _depends(body: ClosedJaxpr, vary: set[int]) -> list[bool]:
    """Per result, whether it may differ between microbatches: any op that reads what does, does."""
    jaxpr = body.jaxpr
    seen = {v for i, v in enumerate((*jaxpr.constvars, *jaxpr.invars)) if i in vary}
    for eqn in jaxpr.eqns:
        if eqn.effects or any(not isinstance(a, Literal) and a in seen for a in eqn.invars):
            seen.update(eqn.outvars)
    return [not isinstance(a, Literal) and a in seen for a in jaxpr.outvars]


def _keys(body: ClosedJaxpr) -> frozenset[int]:
    """Constants and inputs that are PRNG keys: typed ones, and raw ones that the function makes typed ones of."""
    jaxpr = body.jaxpr
    wrapped = _wrapped(jaxpr)
    ends = enumerate((*jaxpr.constvars, *jaxpr.invars))
    return frozenset(i for i, v in ends if jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key) or v in wrapped)


def _wrapped(jaxpr: Jaxpr) -> set[Any]:
    """Variables that a ``random_wrap`` reads, here or in the function of a call or a loop that gets them as they are."""
    found: set[Any] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "random_wrap":
            found.update(a for a in eqn.invars if not isinstance(a, Literal))
        for inner in inner_jaxprs(eqn):
            inside = _wrapped(inner)
            outer = eqn.invars[len(eqn.invars) - len(inner.invars) :]  # a conditional reads its index first
            found.update(
                a for a, v in zip(outer, inner.invars, strict=True) if v in inside and not isinstance(a, Literal)
            )
    return found


def _fold(keys: Any, number: Any) -> Any:
    """Each of an array of keys, folded with the microbatch's index."""
    fold = jax.random.fold_in
    for _ in range(keys.ndim - (0 if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) else 1)):
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(keys, number)


def _wide(dtype: Any) -> Any:
    """Sums of half precision are kept in single."""
    return jnp.float32 if dtype in (jnp.bfloat16, jnp.float16) else dtype


def tree_with_paths(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def struct_of(leaf: Any, axis: int | None = None, count: int = 1) -> jax.ShapeDtypeStruct:
    """Of an array, or of one of ``count`` parts along ``axis``."""
    shape = tuple(n // count if d == axis else n for d, n in enumerate(leaf.shape))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))
