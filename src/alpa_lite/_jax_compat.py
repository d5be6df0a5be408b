"""The only file that touches JAX's non-public parts. Every gate names the JAX version it is for.

Checked with JAX 0.10.2 (the last for Python 3.11) and 0.12.0.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import compilation_cache, distributed, xla_bridge
from jax._src.core import ShapedArray, Tracer, new_jaxpr_eqn
from jax._src.interpreters import pxla
from jax._src.sharding_impls import ShardingContext
from jax.api_util import debug_info
from jax.extend import random as extend_random
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var, jaxpr_as_fun, jaxprs_in_params
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy

_PACKAGE = str(Path(__file__).parent) + "/"

# XLA:CPU dropped optimization barriers before it scheduled, up to jaxlib 0.10; from 0.11 on they hold.
CPU_KEEPS_BARRIERS = jax.__version_info__ >= (0, 11)

COMPILED_SUFFIX = "-cache"
"""Of files of the persistent compilation cache."""

__all__ = [
    "COMPILED_SUFFIX",
    "CPU_KEEPS_BARRIERS",
    "ClosedJaxpr",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "Primitive",
    "Var",
    "annotate_sharding_rules",
    "barrier_primitive",
    "boundary_primitive",
    "calling_primitive",
    "deleted_arrays_crash",
    "evaluate_jaxpr",
    "identity_primitive",
    "inner_jaxprs",
    "is_compiled_program",
    "is_tracer",
    "jaxpr_part",
    "name_scope_of",
    "partitionable_threefry",
    "resized_aval",
    "scan_layout",
    "shard_putter",
    "shardy_factors",
    "source_of",
    "stacked_aval",
    "threefry_2x32",
    "user_context",
]


@cache
def deleted_arrays_crash() -> bool:
    """Whether a program on several CPU devices that is given a deleted array ends the process: seen in 0.10.2, not in 0.12."""
    return jax.__version_info__ < (0, 12) and jax.default_backend() == "cpu" and jax.device_count() > 1


def source_of(eqn: JaxprEqn) -> str:
    """The user's ``file:line (function)`` of an equation; never a line of this package (``al.pin`` binds here)."""
    innermost = source_info_util.summarize(eqn.source_info)
    if not innermost.startswith(_PACKAGE):
        return innermost
    frames = source_info_util.summarize(eqn.source_info, num_frames=8).splitlines()  # outermost first
    return next((frame for frame in reversed(frames) if not frame.startswith(_PACKAGE)), innermost)


def user_context(op_traceback: Any) -> Any:
    """A context in which new equations carry the given traceback, so that compiled ops name the user's line."""
    return source_info_util.user_context(op_traceback)


def name_scope_of(eqn: JaxprEqn) -> str:
    """The name stack of an equation, e.g. ``transpose(jvp(layer0))``."""
    return str(eqn.source_info.name_stack)


def stacked_aval(aval: Any, length: int) -> Any:
    """The type of ``length`` values of a type, stacked."""
    return ShapedArray((length, *aval.shape), aval.dtype)


def shard_putter(
    shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.NamedSharding
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """A function that makes an array of the given type from one single-device array per shard, wherever that lies now.

    The shards stand in the order of the mesh's devices; one that lies on its device already is not copied. One call into
    the runtime copies them all: about 5 microseconds per shard where ``jax.device_put`` takes 45 (JAX 0.10.2, CPU).
    """
    aval, devices = ShapedArray(shape, jnp.dtype(dtype)), list(sharding.mesh.devices.flat)
    return lambda shards: pxla.batched_device_put(aval, sharding, shards, devices)


class JobStore:
    """The key-value store of this process's ``jax.distributed`` job, which JAX keeps private (0.10.2).

    Values are texts; no key is written twice.
    """

    def __init__(self) -> None:
        self._client: Any = distributed.global_state.client

    def increment(self, key: str) -> int:
        """Add 1 to a number that starts with 0."""
        return self._client.key_value_increment(key, 1)

    def set(self, key: str, value: str) -> None:
        self._client.key_value_set(key, value)

    def delete(self, prefix: str) -> None:
        """All keys that begin with ``prefix`` and a slash; who waits for one of them waits on."""
        self._client.key_value_delete(prefix)

    def found(self, key: str) -> str | None:
        """What is there now; None if nothing is."""
        try:
            return self._client.key_value_try_get(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return None

    def get(self, key: str, timeout_s: float) -> str | None:
        """Waits until the key is there; None if it is not in time."""
        try:
            return self._client.blocking_key_value_get(key, int(timeout_s * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None


def resized_aval(aval: Any, rows: int | None) -> Any:
    """The same type with another first dim; None for a scalar."""
    return ShapedArray(() if rows is None else (rows, *aval.shape[1:]), aval.dtype)


def evaluate_jaxpr(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Runs a jaxpr on arrays or tracers; source lines and name scopes stay those of its equations."""
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, list(consts)))(*args)


def jaxpr_part(jaxpr: Jaxpr, start: int, stop: int) -> Jaxpr:
    """The equations ``start`` to ``stop`` as a jaxpr of what they read; it returns all that they make."""
    eqns = jaxpr.eqns[start:stop]
    made = [v for e in eqns for v in e.outvars if type(v).__name__ != "DropVar"]
    inside = set(made)
    given = (a for e in eqns for a in e.invars if not isinstance(a, Literal))
    given = dict.fromkeys(v for v in given if v not in inside)
    debug_info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    return jaxpr.replace(constvars=[], invars=list(given), outvars=made, eqns=list(eqns), debug_info=debug_info)


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Functions of a call, loop or branch that take the equation's (last) operands."""
    found = [j.jaxpr if isinstance(j, ClosedJaxpr) else j for j in jaxprs_in_params(eqn.params)]
    return [jaxpr for jaxpr in found if len(jaxpr.invars) <= len(eqn.invars)]


def is_compiled_program(data: bytes) -> bool:
    """Whether this is all of a file of the persistent compilation cache, as far as its compression tells."""
    try:
        compilation_cache.decompress_executable(data)
    except Exception:  # each compressor has errors of its own
        return False
    return True


def is_tracer(value: Any) -> bool:
    """Whether a value stands for one that is not known while JAX traces."""
    return isinstance(value, Tracer)


def scan_layout(params: dict[str, Any]) -> tuple[int, int]:
    """(number of constants, number of carries) of a ``scan`` equation."""
    if "num_consts" in params:  # 0.10
        return params["num_consts"], params["num_carry"]
    tree = params["ft_in"]  # 0.12: one tree of (consts, carry, xs), in several forms; unpacked as JAX itself does
    consts, carry, _ = (list(part) for part in tree.update(tuple(range(len(tree)))).unpack())
    return len(consts), len(carry)


def identity_primitive(name: str, *, batched: bool = False) -> Primitive:
    """A primitive that is the identity on one operand, linear for autodiff (the cotangent passes unchanged).

    ``batched``: whether it means the same for a tensor with one dim more; else it is dropped under ``vmap``.
    """
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, lambda ctx, x, **_: [x])

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        return primitive.bind(*primals, **params), tangents[0]

    def batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        # Under vmap the tensor gains a dim: a spec no longer fits, so such a pin is dropped rather than misapplied.
        return primitive.bind(*args, **params) if batched else args[0], dims[0]

    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    return primitive


def boundary_primitive(name: str) -> Primitive:
    """An identity on any number of operands whose transpose is the same identity on the cotangents, marked ``backward``.

    Cotangents that are zero by structure do not pass it.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs, **_: list(xs))
    primitive.def_abstract_eval(lambda *xs, **_: list(xs))
    mlir.register_lowering(primitive, lambda ctx, *xs, **_: list(xs))

    def passed(xs: Sequence[Any], backward: bool) -> list[Any]:
        real = [x for x in xs if not isinstance(x, ad.Zero)]
        made = iter(primitive.bind(*real, backward=backward) if real else [])
        return [x if isinstance(x, ad.Zero) else next(made) for x in xs]

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, backward: bool) -> tuple[Any, Any]:
        return primitive.bind(*primals, backward=backward), passed(tangents, backward)

    def transpose(cotangents: Sequence[Any], *args: Any, backward: bool) -> list[Any]:
        return passed(cotangents, not backward)

    def batch(args: Sequence[Any], dims: Sequence[Any], *, backward: bool) -> tuple[Any, Any]:
        return primitive.bind(*args, backward=backward), list(dims)

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch
    return primitive


def barrier_primitive(name: str, on_cpu: Callable[..., list[Any]]) -> Primitive:
    """``lax.optimization_barrier`` on any number of arrays; on CPUs that drop it, ``on_cpu`` takes its place.

    ``on_cpu`` takes the arrays and the primitive's parameters.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *xs, **_: list(xs))
    barrier = mlir.lower_fun(lambda *xs, **_: list(jax.lax.optimization_barrier(xs)), multiple_results=True)
    mlir.register_lowering(primitive, barrier)
    if not CPU_KEEPS_BARRIERS:
        mlir.register_lowering(primitive, mlir.lower_fun(on_cpu, multiple_results=True), platform="cpu")
    return primitive


def calling_primitive(name: str, function: Callable[..., Any], batched: Callable[..., dict[str, Any]]) -> Primitive:
    """A primitive with several results that runs a Python function, traced anew at the shapes of every use.

    Args:
        name: of the primitive.
        function: ``function(**params)`` is the Python function: arrays in, list of arrays out.
        batched: ``batched(mapped, **params)`` gives the parameters under ``vmap``; ``mapped`` says which operands have the
            new dim (in front), as all results then have.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def abstract(*avals: Any, **params: Any) -> list[Any]:
        args = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals]
        out = jax.eval_shape(function(**params), *args)
        return [ShapedArray(o.shape, o.dtype, weak_type=bool(getattr(o, "weak_type", False))) for o in out]

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        # The result stays one op; its tangent is that of the function itself, whose primal part is dead code.
        results = primitive.bind(*primals, **params)
        dots = [ad.instantiate_zeros(t) for t in tangents]
        made = jax.jvp(function(**params), tuple(primals), tuple(dots))[1]
        float0 = jax.dtypes.float0
        return results, [ad.Zero(ShapedArray(m.shape, float0)) if m.dtype == float0 else m for m in made]

    def batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        mapped = tuple(d is not None for d in dims)
        front = [jnp.moveaxis(x, d, 0) if m else x for x, d, m in zip(args, dims, mapped, strict=True)]
        results = primitive.bind(*front, **batched(mapped, **params))
        return results, [0] * len(results)

    primitive.def_abstract_eval(abstract)
    primitive.def_impl(lambda *args, **params: jax.jit(function(**params))(*args))
    mlir.register_lowering(
        primitive,
        mlir.lower_fun(lambda *args, **params: function(**params)(*args), multiple_results=True),
    )
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    return primitive


def partitionable_threefry() -> bool:
    """Whether element i of threefry bits depends on counter i alone (the default of JAX)."""
    return bool(jax.config.jax_threefry_partitionable)  # pyrefly: ignore[missing-attribute]


UNSTACK = "unstack"


def unstack_by_slices(eqn: JaxprEqn) -> ClosedJaxpr:
    """What JAX 0.12's ``unstack`` does, by one slice per row, as JAX 0.10 does it: each row may then lie elsewhere."""
    aval: Any = eqn.invars[0].aval
    axis, count = eqn.params["axis"], len(eqn.outvars)

    def rows(x: Any) -> list[Any]:
        return [jax.lax.index_in_dim(x, i, axis, keepdims=False) for i in range(count)]

    return jax.make_jaxpr(rows)(jax.ShapeDtypeStruct(aval.shape, aval.dtype))


def threefry_2x32(key: Any, high: Any, low: Any) -> tuple[Any, Any]:
    """The threefry block cipher on explicit 64-bit counters (two uint32 arrays), as JAX's partitionable RNG calls it."""
    counts = jnp.concatenate([high.ravel(), low.ravel()])
    first, second = jnp.split(extend_random.threefry_2x32(key, counts), 2)
    return first.reshape(high.shape), second.reshape(high.shape)


def annotate_sharding_rules(module: ir.Module) -> ir.Module:
    """A copy of the StableHLO module in which Shardy has put an ``sdy.sharding_rule`` on every op that has one.

    A copy, because leftover rule attributes break compilation (jaxlib 0.10.2: "Failed to get shape").
    """
    with module.context:
        bytecode: Any = module.operation.get_asm(binary=True)
        copy = ir.Module.parse(bytecode)
        pipeline = "builtin.module(func.func(sdy-populate-op-sharding-rules{conservative-propagation=false}))"
        passmanager.PassManager.parse(pipeline).run(copy.operation)
    return copy


def function_bodies(module: ir.Module) -> dict[str, Any]:
    """Name -> entry block of every function of the module."""
    return {
        ir.StringAttr(op.attributes["sym_name"]).value: op.regions[0].blocks[0]
        for op in module.body.operations
        if "sym_name" in op.attributes and len(op.regions) and len(op.regions[0].blocks)
    }


def callee_of(op: Any) -> str:
    """Name of the function that a ``func.call`` calls."""
    return ir.FlatSymbolRefAttr(op.attributes["callee"]).value


def shape_of(value: Any) -> tuple[int, ...]:
    """Static shape of an MLIR value; () for tokens and such."""
    try:
        return tuple(ir.RankedTensorType(value.type).shape)
    except (ValueError, TypeError):
        return ()


def shardy_factors(op: Any) -> dict[str, Any] | None:
    """The rule that Shardy gives one StableHLO op, as plain data, or None.

    Keys: ``sizes``, ``operands`` and ``results`` (per tensor, per dim, factor indices), ``reduction``,
    ``need_replication``, ``permutation`` (factor index sets).
    """
    if "sdy.sharding_rule" not in op.attributes:
        return None
    rule = sdy.OpShardingRuleAttr(op.attributes["sdy.sharding_rule"])

    def mappings(items: Any) -> list[list[list[int]]]:
        return [
            [list(sdy.DimMappingAttr(dim).factor_indices) for dim in sdy.TensorMappingAttr(item).dim_mappings]
            for item in items
        ]

    return {
        "sizes": list(rule.factor_sizes),
        "operands": mappings(rule.operand_mappings),
        "results": mappings(rule.result_mappings),
        "reduction": set(rule.reduction_factors),
        "need_replication": set(rule.need_replication_factors),
        "permutation": set(rule.permutation_factors),
    }


def iter_operations(block: Any) -> Iterator[Any]:
    """Top-level operations of an MLIR block (regions of ops are not entered)."""
    yield from block.operations


def lower_many(equations: Sequence[tuple[Primitive, dict[str, Any], Sequence[Any], Sequence[Any]]]) -> ir.Module:
    """Lower several equations in one module, each as a private function called once, in order, from ``main``.

    The jaxpr is put together by hand, which takes half the time of tracing it. It is lowered by the function that
    ``jax.jit(...).lower`` ends in: ``lower`` itself starts the backends of this process, even for abstract meshes, and planning
    must not touch a device (JAX 0.10 to 0.12).

    Args:
        equations: (primitive, parameters, operands: ``Literal`` or type, types of results).
    """
    given: list[Var] = []
    made: list[Var] = []
    calls = []
    (template,) = jax.make_jaxpr(jax.jit(lambda x: x))(0.0).eqns  # of a call with one operand and one result
    origin = debug_info("rules", lower_many, (equations,), {})._replace(arg_names=None, result_paths=None)
    for primitive, params, operands, results in equations:
        atoms = [o if isinstance(o, Literal) else Var(o) for o in operands]
        inputs = [a for a in atoms if isinstance(a, Var)]
        outputs = [Var(aval) for aval in results]
        inner = Jaxpr([], inputs, outputs, [new_jaxpr_eqn(atoms, outputs, primitive, params, set())], debug_info=origin)
        outer_inputs, outer_outputs = [Var(v.aval) for v in inputs], [Var(v.aval) for v in outputs]
        each = {"in_": len(inputs), "donated_": len(inputs), "out_": len(outputs)}
        called = {
            key: next((value * n for start, n in each.items() if key.startswith(start)), value)
            for key, value in template.params.items()
        }
        called["jaxpr"] = ClosedJaxpr(inner, [])
        calls.append(new_jaxpr_eqn(outer_inputs, outer_outputs, template.primitive, called, set()))
        given += outer_inputs
        made += outer_outputs
    jaxpr: Any = ClosedJaxpr(Jaxpr([], given, made, calls, debug_info=origin), [])
    avals: dict[str, Any] = {"in_avals": [v.aval for v in given]}
    if "out_avals" in inspect.signature(mlir.lower_jaxpr_to_module).parameters:  # 0.12
        avals["out_avals"] = [v.aval for v in made]
    result = mlir.lower_jaxpr_to_module(
        "rules",
        jaxpr,
        num_const_args=0,
        ordered_effects=[],
        platforms=("cpu",),
        backend=None,
        axis_context=ShardingContext(1, None, None),
        donated_args=[False] * len(given),
        lowering_parameters=mlir.LoweringParameters(),
        **avals,
    )
    return result.module


@contextlib.contextmanager
def short_plugin_errors() -> Iterator[None]:
    """JAX reports a GPU plugin that finds no GPU in one line, without its traceback: planning needs none."""

    def shorten(record: logging.LogRecord) -> bool:
        record.exc_info = record.exc_text = None
        return True

    log = logging.getLogger(xla_bridge.__name__)
    log.addFilter(shorten)
    try:
        yield
    finally:
        log.removeFilter(shorten)


def start_transfer_server(address: str, transport_addresses: Sequence[str]) -> Any:
    """JAX's transfer server over all local devices; experimental in JAX 0.10 to 0.12.

    Args:
        address: "host:port" of control messages; port 0 = any.
        transport_addresses: of data, a socket each.
    """
    from jax.experimental import transfer

    return transfer.start_transfer_server(jax.local_devices()[0].client, address, list(transport_addresses))
