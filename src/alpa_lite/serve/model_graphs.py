"""The graphs of a served model: one per bucket that takes a prompt in, and one that makes the next token of all slots.

In: a model and the shapes of its parameters. Out: name -> (function, arguments), as ``al.plan_shared`` takes them. The parameters
are argument 0 of all graphs and the cache is argument 1, donated and given back: in one layout for all graphs, nothing moves when
the engine goes from one to another, and the memory of both is part of every plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite.errors import ServeError, user_line
from alpa_lite.numeric import positive, several
from alpa_lite.serve.stored import shapes_of
from alpa_lite.trace.paths import leaf_paths

Graph = tuple[Callable[..., Any], tuple[Any, ...]]
DECODE = "decode"
_NUMBERS = "biufcV"  # kinds of NumPy types; V are those of ml_dtypes, as bfloat16


class Model(Protocol):
    """What an engine serves. All functions are pure JAX; a cache is any pytree that keeps the length of each slot itself.

    Every leaf of a cache has one dim that is the slot (found from the shapes that ``init_cache`` makes).
    """

    def init_cache(self, slots: int, max_length: int) -> Any:
        """A cache in which no slot has any token."""
        ...

    def prefill(self, params: Any, cache: Any, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Any]:
        """Prompts int32 (slots, size), of which the first ``lengths`` (slots,) tokens count, into an empty cache.

        Returns:
            Logits (slots, vocabulary) of the token after each prompt, and the cache.
        """
        ...

    def decode(self, params: Any, cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        """One more token, int32 (slots,), for every slot; it may be nonsense for slots without a request.

        Returns:
            Logits (slots, vocabulary) of the token after it, and the cache.
        """
        ...


def prefill_name(bucket: int) -> str:
    return f"prefill_{bucket}"


def graphs(
    model: Model,
    params: Any,
    *,
    slots: int,
    max_length: int,
    buckets: Sequence[int],
    given: Mapping[str, Any] | None = None,
) -> dict[str, Graph]:
    """The graphs of an engine by name: ``prefill_<bucket>`` for each bucket, and ``decode``.

    Args:
        model: see ``Model``.
        params: as for ``Engine``, or ``jax.ShapeDtypeStruct``; only shapes are looked at.
        slots: requests that are served at once.
        max_length: tokens of a request, prompt and answer together.
        buckets: sizes to which prompts are padded, in any order, each counted once.
        given: for a stage of a pipeline: graph -> what it takes in place of tokens, as the stage before returns it.

    Raises:
        ServeError: a number is not allowed, something is no model or no parameter, or the model's cache has a leaf without a
            slot dim. When a graph is traced: the model returns other arrays than it must.

    Example:
        >>> graphs = al.serve.graphs(model, params, slots=16, max_length=2048, buckets=(128, 512, 2048))
        >>> layout = al.plan_shared(graphs, shared=("0", "1"), cluster=cluster, donate_argnums=1)
    """
    slots, max_length, buckets = checked_sizes(slots, max_length, buckets)
    check_instance(model)
    if lacks := [name for name in ("init_cache", "prefill", "decode") if not callable(getattr(model, name, None))]:
        raise ServeError(
            f"the model {model!r:.80} has no {', '.join(lacks)}. A model is an object with init_cache, prefill and decode. At "
            f"{user_line()}. See al.serve.Model, and examples/serving_models.py for a GPT and a Llama."
        )
    dims = slot_dims(model, max_length)

    def prefill(params: Any, cache: Any, slot: jax.Array, tokens: jax.Array, lengths: jax.Array) -> tuple[Any, Any]:
        empty = model.init_cache(tokens.shape[0], max_length)
        logits, own = _checked(model, "prefill", model.prefill(params, empty, tokens, lengths), empty, tokens.shape[0])

        def put(whole: jax.Array, rows: jax.Array, dim: int) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(whole, rows.astype(whole.dtype), slot, axis=dim)

        return logits, jax.tree.map(put, cache, own, dims)

    def decode(params: Any, cache: Any, tokens: jax.Array) -> tuple[Any, Any]:
        return _checked(model, "decode", model.decode(params, cache, tokens), cache, slots)

    for own in (prefill, decode):  # messages name it so
        own.__qualname__ = f"{type(model).__name__}.{own.__name__}"
    shapes = param_shapes(shapes_of(params))
    cache = jax.eval_shape(lambda: model.init_cache(slots, max_length))
    tokens = {prefill_name(bucket): _ints(1, bucket) for bucket in buckets} | {DECODE: _ints(slots)}
    x = tokens if given is None else given
    if not isinstance(x, Mapping) or any(not _is_array(x.get(name)) for name in tokens):
        raise ServeError(
            f"given={given!r:.80} was given; it must have an array, or its shape, for each of {', '.join(map(repr, tokens))}: "
            f"what the stage before returns there. At {user_line()}. Leave it out for a whole model."
        )
    made: dict[str, Graph] = {
        name: (prefill, (shapes, cache, _ints(), x[name], _ints(1))) for name in tokens if name != DECODE
    }
    return made | {DECODE: (decode, (shapes, cache, x[DECODE]))}


def _checked(model: Model, method: str, found: Any, cache: Any, slots: int) -> tuple[Any, Any]:
    """What a model's method returned: one array with a row per slot, and a cache like the one that it was given.

    Raises:
        ServeError: it is something else.
    """
    fault = ""
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        fault = f"{_kind(found)} was returned"
    elif not hasattr(found[0], "shape"):
        fault = f"a pair ({_kind(found[0])}, {_kind(found[1])}) was returned"
    elif jnp.ndim(found[0]) == 0 or jnp.shape(found[0])[0] != slots:
        fault = f"an array of shape {list(jnp.shape(found[0]))} was returned for {slots} slots"
    elif jax.tree.structure(found[1]) != jax.tree.structure(cache):
        had, has = _paths(cache), _paths(found[1])
        fault = f"the cache has the leaves {had} as given and {has} as returned"
        if had == has:
            had, has = (str(jax.tree.structure(tree)).removeprefix("PyTreeDef(")[:-1] for tree in (cache, found[1]))
            fault = f"the cache's containers are {had:.200} as given and {has:.200} as returned"
    else:
        for (path, had), (_, has) in zip(leaf_paths(cache, "cache"), leaf_paths(found[1], "cache"), strict=True):
            # A prompt's cache is brought to the type of the whole one when it is put there.
            same = _is_array(has) and had.shape == has.shape
            if not same or (method == "decode" and had.dtype != has.dtype):
                fault = f"the leaf {path!r} was {_kind(had)} as given and is {_kind(has)} as returned"
                break
    if fault:
        raise ServeError(
            f"{type(model).__name__}.{method}: {fault}. It must return a pair (logits, cache): an array with a row "
            f"for each slot, and the cache with the leaves that it was given. At {user_line()}. Correct the model; see "
            "al.serve.Model."
        )
    return found[0], found[1]


def _kind(x: Any) -> str:
    """What was returned: the type of an array, else how many there are."""
    if _is_array(x):
        return f"{x.dtype}{list(x.shape)}"
    return f"{type(x).__name__} of {len(x)}" if isinstance(x, (tuple, list)) else type(x).__name__


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def check_instance(model: Any) -> None:
    """Refuses a class whose methods want an instance.

    Raises:
        ServeError: it is one.
    """
    if isinstance(model, type) and any(
        inspect.isfunction(inspect.getattr_static(model, name, None)) for name in ("init_cache", "prefill", "decode")
    ):
        name = model.__name__
        raise ServeError(
            f"the model is the class {name}. A model is an object with init_cache, prefill and decode. At {user_line()}. Give "
            f"an instance, e.g. {name}(...)."
        )


def _paths(cache: Any) -> str:
    return ", ".join(repr(path) for path, _ in leaf_paths(cache, "cache")) or "(none)"


def param_shapes(params: Any) -> Any:
    """Of the parameters, in the types that JAX has for them: NumPy's numbers of 64 bits are of 32 there by default.

    Raises:
        ServeError: one is no array.
    """
    for path, leaf in leaf_paths(params, "params"):
        if not _is_array(leaf) or (isinstance(leaf.dtype, np.dtype) and leaf.dtype.kind not in _NUMBERS):
            raise ServeError(
                f"the parameter {path!r} is {leaf!r:.60}. Parameters are arrays, a function that makes them, or those of a "
                f"checkpoint. At {user_line()}. Give jnp.asarray(...) of a number; for a folder write al.serve.StoredParams(dir, "
                "shapes), with the shapes of what a function makes as jax.eval_shape(fn)."
            )
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), _type_of(x)), params)


def _type_of(x: Any) -> Any:
    return (
        jax.dtypes.canonicalize_dtype(x.dtype) if isinstance(x.dtype, np.dtype) else x.dtype
    )  # else keys of random numbers


def slot_dims(model: Model, max_length: int) -> Any:
    """Which dim of every leaf of the cache is the slot: the one that grows with the number of slots.

    Raises:
        ServeError: a leaf has none, or several.
    """

    def dim_of(path: Any, two: Any, three: Any) -> int:
        grown = [dim for dim, sizes in enumerate(zip(two.shape, three.shape, strict=True)) if sizes[0] != sizes[1]]
        if len(grown) == 1 and (two.shape[grown[0]], three.shape[grown[0]]) == (2, 3):
            return grown[0]
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        raise ServeError(
            f"{f'the leaf {name!r} of ' if name else ''}the model's cache has the shapes "
            f"{list(two.shape)} for 2 slots and {list(three.shape)} for 3. Each leaf must have exactly one dim of as many "
            f"entries as there are slots: there a prompt is put. At {user_line()}. Change init_cache(slots, max_length)."
        )

    try:
        sizes = [jax.eval_shape(lambda slots=slots: model.init_cache(slots, max_length)) for slots in (2, 3)]
    except Exception as error:  # of the user's function, whatever it raises
        raise ServeError(
            f"{type(model).__name__}.init_cache(slots, max_length={max_length}) failed: {type(error).__name__}: {error!s:.200}. "
            f"At {user_line()}. Correct it, or give a max_length that the model has (--max-length at the command line)."
        ) from error
    if jax.tree.structure(sizes[0]) != jax.tree.structure(sizes[1]):
        raise ServeError(
            f"the model's cache has the leaves {_paths(sizes[0])} for 2 slots and {_paths(sizes[1])} for 3. It must have the "
            f"same leaves for any number of slots, each with one dim of as many entries. At {user_line()}. Change "
            "init_cache(slots, max_length)."
        )
    return jax.tree_util.tree_map_with_path(dim_of, *sizes)


def checked_sizes(slots: Any, max_length: Any, buckets: Any) -> tuple[int, int, tuple[int, ...]]:
    """The sizes of an engine as numbers of Python, buckets in rising order.

    Raises:
        ServeError: a number is not allowed.
    """
    (slots,) = checked_counts(slots=slots)
    length = positive(max_length)
    if length is None or length == 1:
        raise ServeError(
            f"max_length={max_length!r:.60} was given; it must be a whole number from 2, as prompt and answer have at least one "
            f"token each. At {user_line()}. Correct it."
        )
    found = [positive(size) for size in several(buckets) or [None]]
    known = sorted({size for size in found if size is not None})
    if None in found or known[-1] > length:
        raise ServeError(
            f"buckets={buckets!r:.80} was given; they must be whole numbers from 1 to max_length={length}, at least one. At "
            f"{user_line()}. Correct them, e.g. buckets=({length},); al.serve.propose_buckets finds good ones."
        )
    return slots, length, tuple(known)


def checked_counts(**values: object) -> list[int]:
    """Whole numbers from 1, as numbers of Python in the order given.

    Raises:
        ServeError: one is none; the message has its name.
    """
    found = []
    for name, value in values.items():
        if (number := positive(value)) is None:
            raise ServeError(
                f"{name}={value!r:.60} was given; it must be a whole number from 1. At {user_line()}. Correct it."
            )
        found.append(number)
    return found


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
