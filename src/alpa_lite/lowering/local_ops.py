"""Evaluates one op on local tiles: the primitive itself with local sizes, plus what its split dims need.

``LocalOp`` tells where the tiles lie; the functions here return local results under the decided result specs. Most
primitives only need their shape parameters replaced. Indexing, counters and random bits also need the tile's offset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alpa_lite._jax_compat import threefry_2x32
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.lowering.collectives import keep_on_first, tile_index
from alpa_lite.lowering.user_body import run_body, without_shardings
from alpa_lite.trace.pad_mask import masked

_REDUCERS: dict[str, Callable[..., Any]] = {"reduce_max": lax.pmax, "reduce_min": lax.pmin}
_USER_REDUCERS: dict[str, Callable[..., Any]] = {"max": lax.pmax, "min": lax.pmin}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOp:
    """One op with its layouts.

    Attributes:
        name, primitive, params: of the jaxpr equation.
        operands, results: decided specs.
        result_shapes: global shapes of the results.
        operand_shapes: global shapes of the operands.
        mesh: the device mesh.
        label: scope name of the all-reduce inside the op, if it has one.
    """

    name: str
    primitive: Any
    params: dict[str, Any]
    operands: tuple[ShardingSpec, ...]
    results: tuple[ShardingSpec, ...]
    operand_shapes: tuple[tuple[int, ...], ...]
    result_shapes: tuple[tuple[int, ...], ...]
    mesh: DeviceMesh
    label: str = ""

    def local_result(self, position: int = 0) -> tuple[int, ...]:
        return self.results[position].local_shape(self.result_shapes[position], self.mesh)

    def offset(self, axes: tuple[str, ...], local_size: int) -> Any:
        return tile_index(axes, self.mesh) * local_size


def evaluate(op: LocalOp, inputs: list[Any]) -> list[Any]:
    """Local results of ``op`` on local ``inputs``. A max or min over a split dim is reduced over its axes here."""
    special = _SPECIAL.get(op.name)
    out = special(op, inputs) if special else op.primitive.bind(*inputs, **_local_params(op))
    results = list(out) if op.primitive.multiple_results else [out]
    reducer, axes = _joined_at_once(op)
    if reducer is not None and axes:
        with jax.named_scope(op.label):
            results = [reducer(results[0], axes)]
    return results


def _joined_at_once(op: LocalOp) -> tuple[Callable[..., Any] | None, tuple[str, ...]]:
    """How, and over which axes, partial results are joined inside the op: a max or min, also of a registered function."""
    if op.name == "user_op":
        split = {a for spec in op.operands for a in spec.sharded_axes}
        axes = split - {a for spec in op.results for a in (*spec.sharded_axes, *spec.unreduced)}
        return _USER_REDUCERS.get(op.params["op"].rule.reduce_op), op.mesh.sort_axes(axes)
    if op.name in _REDUCERS:
        return _REDUCERS[op.name], reduced_axes(op.operands[0], op.results[0], op.params["axes"])
    return None, ()


def reduced_axes(operand: ShardingSpec, result: ShardingSpec, dims: tuple[int, ...]) -> tuple[str, ...]:
    """Axes that split a reduced dim of the operand and are not left unreduced in the result."""
    return tuple(a for d in dims for a in operand.dims[d] if a not in result.unreduced)


def _local_params(op: LocalOp) -> dict[str, Any]:
    params = without_shardings(op.params)
    if op.name == "broadcast_in_dim":
        params["shape"] = op.local_result()
    elif op.name == "reshape":
        params["new_sizes"] = op.local_result()
    elif op.name == "tile":
        operand = op.operands[0].local_shape(op.operand_shapes[0], op.mesh)
        params["reps"] = tuple(made // size for made, size in zip(op.local_result(), operand, strict=True))
    elif op.name == "slice":
        local = op.operands[0].local_shape(op.operand_shapes[0], op.mesh)
        limits = op.params["limit_indices"]
        params["limit_indices"] = tuple(
            size if axes else limit for size, axes, limit in zip(local, op.operands[0].dims, limits, strict=True)
        )
    return params


def _iota(op: LocalOp, inputs: list[Any]) -> Any:
    shape, dim, dtype = op.local_result(), op.params["dimension"], op.params["dtype"]
    axes = op.results[0].dims[dim]
    local = lax.broadcasted_iota(dtype, shape, dim)
    return local + jnp.asarray(op.offset(axes, shape[dim]), dtype) if axes else local


def _random_bits(op: LocalOp, inputs: list[Any]) -> Any:
    """Element i of partitionable threefry bits depends on (key, i) only, so each tile draws just its own counters."""
    if not any(op.results[0].dims):
        return op.primitive.bind(*inputs, **op.params)
    shape, whole = op.local_result(), op.result_shapes[0]
    counter = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(len(whole))):
        start = jnp.asarray(op.offset(op.results[0].dims[dim], shape[dim]), jnp.uint32)
        counter = counter + (lax.broadcasted_iota(jnp.uint32, shape, dim) + start) * np.uint32(stride)
        stride *= whole[dim]
    high, low = threefry_2x32(jax.random.key_data(inputs[0]), jnp.zeros(shape, jnp.uint32), counter)
    width = op.params["bit_width"]
    if width == 64:
        return (high.astype(jnp.uint64) << 32) | low.astype(jnp.uint64)
    return (high ^ low).astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[width])


def _gather(op: LocalOp, inputs: list[Any]) -> Any:
    """Rows that lie on another device are looked up as zeros; the partial results add up."""
    operand, indices = inputs
    numbers, params = op.params["dimension_numbers"], dict(op.params)
    sizes = list(params["slice_sizes"])
    for dim in range(len(sizes)):
        if op.operands[0].dims[dim] and sizes[dim] != 1:
            sizes[dim] = operand.shape[dim]
    params["slice_sizes"] = tuple(sizes)
    split = [(c, d) for c, d in enumerate(numbers.start_index_map) if op.operands[0].dims[d]]
    mask: Any = None
    fill: Any = None
    for component, dim in split:
        axes, local, whole = op.operands[0].dims[dim], operand.shape[dim], op.operand_shapes[0][dim]
        index = indices[..., component]
        if params["mode"] == lax.GatherScatterMode.CLIP:
            index = jnp.clip(index, 0, whole - 1)
        shifted = index - jnp.asarray(op.offset(axes, local), index.dtype)
        inside = (shifted >= 0) & (shifted < local)
        outside = (index < 0) | (index >= whole)
        mask = inside if mask is None else mask & inside
        fill = outside if fill is None else fill | outside
        indices = indices.at[..., component].set(jnp.clip(shifted, 0, local - 1))
    found = op.primitive.bind(operand, indices, **params)
    if mask is None:
        return found
    batch = [d for d in range(found.ndim) if d not in numbers.offset_dims]
    result = jnp.where(lax.broadcast_in_dim(mask, found.shape, batch), found, jnp.zeros_like(found))
    if params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        axes = tuple(a for _, d in split for a in op.operands[0].dims[d])
        value = params["fill_value"]
        if value is None:
            value = np.nan if jnp.issubdtype(found.dtype, jnp.inexact) else jnp.iinfo(found.dtype).max
        filled = jnp.where(lax.broadcast_in_dim(fill, found.shape, batch), jnp.asarray(value, found.dtype), result)
        result = jnp.where(tile_index(axes, op.mesh) == 0, filled, result)
    return result


def _scatter(op: LocalOp, inputs: list[Any]) -> Any:
    """Each device adds nothing to rows of others; where updates are split, only one device keeps the operand."""
    operand, indices, updates = inputs
    numbers, params = op.params["dimension_numbers"], dict(op.params)
    mask: Any = None
    for component, dim in enumerate(numbers.scatter_dims_to_operand_dims):
        axes = op.operands[0].dims[dim]
        if axes:  # only of a scatter-add, see trace.blocked
            index = indices[..., component]
            if params["mode"] == lax.GatherScatterMode.CLIP:
                index = jnp.clip(index, 0, op.operand_shapes[0][dim] - 1)
            shifted = index - jnp.asarray(op.offset(axes, operand.shape[dim]), index.dtype)
            inside = (shifted >= 0) & (shifted < operand.shape[dim])
            mask = inside if mask is None else mask & inside
            indices = indices.at[..., component].set(jnp.clip(shifted, 0, operand.shape[dim] - 1))
            params |= {"indices_are_sorted": False, "unique_indices": False}
    if mask is not None:
        # Indices stay in bounds and updates become zero: with an index out of bounds, XLA:CPU (jaxlib 0.10.2 to 0.12)
        # writes wrong rows when the operand is itself a dynamic slice.
        rows = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
        updates = jnp.where(lax.broadcast_in_dim(mask, updates.shape, rows), updates, jnp.zeros_like(updates))
    made_here = tuple(a for a in op.results[0].unreduced if a not in op.operands[0].unreduced)
    if made_here:
        operand = keep_on_first(operand, made_here, op.mesh)
    return op.primitive.bind(operand, indices, updates, **params)


def _pad_mask(op: LocalOp, inputs: list[Any]) -> list[Any]:
    dim = op.params["dim"]
    axes = op.operands[0].dims[dim]
    offset = op.offset(axes, inputs[0].shape[dim]) if axes else 0
    return [masked(inputs[0], **op.params, offset=offset)]


def _once(op: LocalOp, inputs: list[Any]) -> Any:
    """Whole arrays lie on every device; one of them reports."""
    if op.params.get("ordered"):
        return op.primitive.bind(*inputs, **op.params)

    def report() -> list[Any]:
        return list(op.primitive.bind(*inputs, **op.params))

    return lax.cond(tile_index(op.mesh.axis_names, op.mesh) == 0, report, list)


def _dynamic_slice(op: LocalOp, inputs: list[Any]) -> Any:
    """Starts are clamped here: XLA adds up the starts of two slices in a row, and forgets that it clamps the first one's."""
    x, *starts = inputs
    sizes = op.local_result()
    starts = [
        lax.clamp(jnp.zeros_like(start), start, jnp.asarray(whole - size, jnp.result_type(start)))
        for start, whole, size in zip(starts, x.shape, sizes, strict=True)
    ]
    return lax.dynamic_slice_p.bind(x, *starts, slice_sizes=sizes)


def _fft(op: LocalOp, inputs: list[Any]) -> Any:
    """The result passes through a flat tensor, which has only one order in memory.

    Otherwise XLA:CPU (jaxlib 0.10.2 to 0.12) gives the FFT the order of dims that a collective along an inner dim wants,
    and then refuses to run it ("RET_CHECK failure ... fft_thunk.cc").
    """
    found = op.primitive.bind(*inputs, **op.params)
    return lax.optimization_barrier(found.reshape(-1)).reshape(found.shape)


_SPECIAL: dict[str, Callable[[LocalOp, list[Any]], Any]] = {
    "fft": _fft,
    "iota": _iota,
    "random_bits": _random_bits,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "pad_mask": _pad_mask,
    "pin": lambda op, inputs: inputs[0],
    "sharding_constraint": lambda op, inputs: inputs[0],
    "device_put": lambda op, inputs: inputs,
    "shard_map": lambda op, inputs: run_body(op.params["jaxpr"], inputs),
    "debug_callback": _once,
    "debug_print": _once,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter-mul": _scatter,
    "scatter-min": _scatter,
    "scatter-max": _scatter,
}
