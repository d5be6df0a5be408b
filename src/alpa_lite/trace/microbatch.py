"""``al.value_and_grad`` and ``al.grad``: mark the part of a step that repeats for every microbatch.

Outside of a plan, and with one microbatch, they are ``jax.value_and_grad`` and ``jax.grad``. While a step is traced for m
microbatches they trace the gradient of one microbatch and put it into a ``lax.scan`` over the m slices of the batch, which
adds up values and gradients; everything after it (the update) happens once. The scan is an ordinary loop for all that
follows: its carries may hold partial sums, so that gradients are summed over devices once per step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from alpa_lite.errors import MicrobatchError, user_line
from alpa_lite.trace.auto_layers import LayerCuts, with_layers
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp
from alpa_lite.trace.microbatch_loop import SCOPE, MicrobatchLoop, Repeated, struct_of, tree_with_paths


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a trace wants of ``value_and_grad``; ``layers`` chooses the cuts between layers, None for no layers."""

    count: int = 1
    layers: LayerCuts | None = None


# What the trace in progress asks for. JAX hands nothing of the caller's to the functions it traces.
_ASKED: ContextVar[_Asked] = ContextVar("microbatches", default=_Asked())  # noqa: B039 (frozen)


@contextmanager
def microbatches(count: int, layers: LayerCuts | None = None) -> Iterator[None]:
    """Within it, ``value_and_grad`` and ``grad`` split their batches in ``count``, and what they differentiate in layers."""
    token = _ASKED.set(_Asked(count, layers))
    try:
        yield
    finally:
        _ASKED.reset(token)


def value_and_grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: int | Sequence[int] = (1,),
    batch_axes: Any = 0,
    reduction: str = "mean",
    fold_keys: bool = True,
) -> Callable[..., Any]:
    """As ``jax.value_and_grad``, and marks what is repeated per microbatch under ``PlanOptions(num_microbatches=m)``.

    The result for m microbatches is that of a plain loop: for each slice of the batch the value and gradient of ``f``, added up,
    and under "mean" divided by m. (So it is the result for the whole batch if ``f`` is a mean, or a sum, of terms that each
    depend on one example.) Microbatch i holds the examples i, i + m, i + 2m, ...: so a batch that is split over devices is cut
    into microbatches without moving it.

    Auxiliary results: a leaf with a dim that grows with the batch is concatenated along it; of the others, floats are averaged
    over the microbatches, integers (counts) are summed, and what does not depend on the microbatch is handed on.

    Args:
        f: a scalar function, with ``has_aux`` a pair (scalar, pytree).
        argnums: as in JAX.
        batch_argnums: positions of the arguments that are split.
        batch_axes: the dim of the batch, for all leaves of these arguments; or a tuple with an entry per batch argument (for
            one such argument also the entry alone), each an int, None (not split) or a pytree of them, as in ``jax.vmap``.
        reduction: "mean" or "sum": how losses over the batch are put together.
        fold_keys: fold the microbatch's index into every PRNG key that ``f`` reads, so that microbatches draw different numbers.

    Raises:
        MicrobatchError: for arguments that are none of the above; while planning, for what cannot be split.

    Example:
        >>> loss, grads = al.value_and_grad(loss_fn)(state.params, batch)
    """
    marked = _Marked(f, argnums, has_aux, _positions(batch_argnums), batch_axes, reduction, fold_keys)

    @functools.wraps(f)
    def function(*args: Any, **kwargs: Any) -> Any:
        return marked.run(args, kwargs, _ASKED.get())

    return function


def grad(f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **settings: Any) -> Any:
    """As ``jax.grad``, marked for microbatches; keyword arguments as for ``value_and_grad``.

    Example:
        >>> grads = al.grad(loss_fn)(state.params, batch)
    """
    both = value_and_grad(f, argnums, has_aux, **settings)

    @functools.wraps(f)
    def function(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return function


def _positions(numbers: int | Sequence[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


@dataclass(frozen=True, slots=True)
class _Marked:
    """A function whose gradient is repeated per microbatch."""

    f: Callable[..., Any]
    argnums: int | Sequence[int]
    has_aux: bool
    batch_argnums: tuple[int, ...]
    batch_axes: Any
    reduction: str
    fold_keys: bool

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise MicrobatchError(
                f"al.value_and_grad(reduction={self.reduction!r}): allowed are 'mean' and 'sum'. It says how the loss of the "
                f"batch is made from those of its parts. At {user_line()}. Give the one that your loss function takes over "
                "the batch."
            )

    @property
    def name(self) -> str:
        return getattr(self.f, "__name__", repr(self.f))

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], asked: _Asked) -> Any:
        count = asked.count
        if count == 1 and asked.layers is None:
            return self.gradient(self.f)(*args, **kwargs)
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        axes = self.leaf_axes(args, kwargs)
        paths = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in tree_with_paths((args, kwargs))]
        arrays = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
        split = {i: self.batch_axis(paths[i], leaves[i], axes[i], count) for i in arrays if axes[i] is not None}

        def full(given: Sequence[Any]) -> Any:
            """(args, kwargs) of the array leaves; all others are Python values that the function may branch on."""
            values = dict(enumerate(leaves)) | dict(zip(arrays, given, strict=True))
            return jax.tree_util.tree_unflatten(tree, list(values.values()))

        def flat(*given: Any) -> Any:
            positional, named = full(given)
            f = self.f if asked.layers is None else self.layered(full, given, arrays, frozenset(split), asked.layers)
            return self.gradient(f)(*positional, **named)

        def one_of(i: int) -> jax.ShapeDtypeStruct:
            return struct_of(leaves[i], split.get(i), count)

        function = Repeated(self.name, self.has_aux, self.reduction, self.fold_keys and count > 1)
        loop = MicrobatchLoop.of(
            function,
            flat,
            [leaves[i] for i in arrays],
            [split.get(i) for i in arrays],
            count,
            list(map(one_of, arrays)),
        )
        return loop.run()

    def gradient(self, f: Callable[..., Any]) -> Callable[..., Any]:
        return jax.value_and_grad(f, argnums=self.argnums, has_aux=self.has_aux)

    def layered(
        self,
        full: Callable[[Sequence[Any]], Any],
        given: Sequence[Any],
        arrays: list[int],
        split: frozenset[int],
        layers: LayerCuts,
    ) -> Callable[..., Any]:
        """The function with layer boundaries. ``full`` makes its arguments of the array leaves ``given``, which are the leaves
        ``arrays`` of all; ``split`` are those of the batch."""

        def of_arrays(*values: Any) -> Any:
            positional, named = full(values)
            return self.f(*positional, **named)

        positional, _ = full(given)
        ends = list(accumulate((len(jax.tree_util.tree_leaves(a)) for a in positional), initial=0))
        numbers = [n % len(positional) for n in _positions(self.argnums)]
        leaves = {leaf for n in numbers for leaf in range(ends[n], ends[n + 1])}
        batch = frozenset(i for i, leaf in enumerate(arrays) if leaf in split)
        differentiated = frozenset(i for i, leaf in enumerate(arrays) if leaf in leaves)
        cut = with_layers(of_arrays, given, batch, differentiated, layers)

        def f(*args: Any, **kwargs: Any) -> Any:
            values = jax.tree_util.tree_leaves((args, kwargs))
            return cut(*(values[i] for i in arrays))

        return f

    def leaf_axes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int | None]:
        """Per leaf of (args, kwargs) the dim of the batch, None where it has none."""
        for number in self.batch_argnums:
            if not 0 <= number < len(args):
                raise MicrobatchError(
                    f"al.value_and_grad(batch_argnums={self.batch_argnums}) of {self.name}, which was called with {len(args)} "
                    f"positional arguments; there is no argument {number}. At {user_line()}. Name the positions of "
                    "those that hold the batch, and pass them by position."
                )
        given = self.batch_axes
        if given is None or isinstance(given, int):
            per_argument = (given,) * len(self.batch_argnums)
        elif isinstance(given, tuple | list) and len(given) == len(self.batch_argnums):
            per_argument = tuple(given)
        elif len(self.batch_argnums) == 1:
            per_argument = (given,)
        else:
            raise MicrobatchError(
                f"al.value_and_grad(batch_axes={given!r}) of {self.name}: there are {len(self.batch_argnums)} batch arguments. "
                f"At {user_line()}. Give one int for all, or a tuple with one entry per batch argument, each an int, None or a "
                "pytree of them."
            )
        chosen = dict(zip(self.batch_argnums, per_argument, strict=True))
        found: list[int | None] = []
        for number, argument in enumerate(args):
            size = len(jax.tree_util.tree_leaves(argument))
            if number not in chosen:
                found += [None] * size
                continue
            try:
                prefix = jax.tree_util.tree_broadcast(chosen[number], argument, is_leaf=lambda x: x is None)
            except ValueError as error:
                raise MicrobatchError(
                    f"al.value_and_grad(batch_axes={given!r}) of {self.name} does not fit argument {number}: {error}. It must be "
                    f"an int, None, or a pytree of them with the structure of that argument (or of its upper part). At "
                    f"{user_line()}."
                ) from error
            found += jax.tree_util.tree_leaves(prefix, is_leaf=lambda x: x is None)
        return found + [None] * len(jax.tree_util.tree_leaves(kwargs))

    def batch_axis(self, path: str, leaf: Any, axis: int | None, count: int) -> int:
        """The dim to split, checked."""
        shape = jnp.shape(leaf)
        assert axis is not None
        if not -len(shape) <= axis < len(shape):
            raise MicrobatchError(
                f"batch leaf {_shown(path)} of {self.name} has shape {shape}, and no dim {axis} to split in {count} microbatches."
                f" Every leaf of a batch argument is split along its batch axis. At {user_line()}. Give batch_axes=None for "
                "leaves without one."
            )
        axis %= len(shape)
        if shape[axis] % count:
            divisors = [d for d in range(1, shape[axis] + 1) if shape[axis] % d == 0]
            raise MicrobatchError(
                f"num_microbatches={count} does not divide the batch: leaf {_shown(path)} of {self.name} has shape {shape} and "
                f"is split along dim {axis}. Allowed are the divisors of {shape[axis]}: {', '.join(map(str, divisors[:12]))}"
                f"{', ...' if len(divisors) > 12 else ''}. At {user_line()}. Change num_microbatches or the batch size, or give "
                "batch_axes=None for a leaf that every microbatch reads whole."
            )
        return axis


def _shown(path: str) -> str:
    """A path of (args, kwargs) as the user knows it."""
    return repr(path.partition("/")[2])


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def check_regions(flat: FlatJaxpr, count: int, *, required: bool = False) -> None:
    """Verifier of a traced step: it repeats exactly one gradient ``count`` times, and no other. A single microbatch needs none
    unless it is ``required``.

    Raises:
        MicrobatchError: there is none, more than one, one inside a loop or branch, or one that was traced for another number.
    """
    if count == 1 and not required and not any(is_microbatch_loop(op) for op in flat.ops):
        return
    regions = [op for op in flat.ops if is_microbatch_loop(op)]
    lengths = {op.params["length"] for op in regions}
    if lengths - {count}:
        raise MicrobatchError(
            f"the gradient at {regions[0].source} was traced for {max(lengths)} microbatches and num_microbatches={count} is "
            "asked for. A function under your own jax.jit keeps what it was first traced for. Take jax.jit off the function that "
            "calls al.value_and_grad: the step is compiled as a whole anyway."
        )
    if len(regions) == 1:
        return
    if regions:
        raise MicrobatchError(
            f"num_microbatches={count} and {len(regions)} gradients, at {' and '.join(op.source for op in regions)}. One "
            "gradient per step can be repeated per microbatch. Take one gradient of the sum of the losses, or use "
            "jax.value_and_grad for those that see the whole batch."
        )
    nested = next((op.source for op in _inner_ops(flat) if is_microbatch_loop(op)), "")
    place = (
        f"al.value_and_grad stands inside a loop or branch at {nested}" if nested else "no al.value_and_grad or al.grad"
    )
    if required and count == 1:
        raise MicrobatchError(
            "stages are asked for or searched, or layers are recomputed (num_stages, remat), and "
            f"the step has {place}. Stages and layers are parts of the passes of one gradient. At {user_line()}. Write "
            "al.value_and_grad for jax.value_and_grad, once, in the step itself, or leave these options out."
        )
    raise MicrobatchError(
        f"num_microbatches={count}, and the step has {place}. What repeats per microbatch is marked by one of them, once, in the "
        f"step itself. At {user_line()}. Write al.value_and_grad for jax.value_and_grad, or leave num_microbatches at 1."
    )


def is_microbatch_loop(op: FlatOp) -> bool:
    """Whether an op is the loop that ``value_and_grad`` traced to."""
    return op.name == "scan" and SCOPE in op.scope


def _inner_ops(flat: FlatJaxpr) -> Iterator[FlatOp]:
    for op in flat.ops:
        for body in op.bodies:
            yield from body.ops
            yield from _inner_ops(body)
