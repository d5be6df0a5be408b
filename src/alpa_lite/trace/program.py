"""A Python function and abstract arguments -> ``Traced``: the Program and the flat jaxpr that it mirrors op by op."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from alpa_lite._jax_compat import Literal
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import FixedLayout, Op, Program, Value, check_program
from alpa_lite.core.rule import OpShardingRule
from alpa_lite.core.rule_text import NamedRule
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.errors import AlpaLiteError, LayerError, TraceError, is_user_file, user_line
from alpa_lite.trace.aliases import argument_of, find_aliases, find_state
from alpa_lite.trace.auto_layers import LayerCuts
from alpa_lite.trace.elementwise import ELEMENTWISE
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp, flatten
from alpa_lite.trace.flops import loop_layout, op_flops
from alpa_lite.trace.forward import Forward, homes_of_leaves, is_forward
from alpa_lite.trace.microbatch import check_regions, microbatches
from alpa_lite.trace.paths import leaf_paths
from alpa_lite.trace.rule_check import check_user_ops
from alpa_lite.trace.rules import dtype_name, op_key, rules_for
from alpa_lite.trace.user_rules import named_rules, shown_name

if TYPE_CHECKING:
    from alpa_lite.trace.unstack import LayeredStep

Rules = dict[tuple[Any, ...], OpShardingRule]  # by ``op_key``
_KEY_ITEMSIZE = 8  # a threefry key holds two uint32
_MAX_LINES, _MAX_SAID = 6, 600  # lines and characters of an error of JAX that are shown after its first line
_NOT_ARRAYS = ("concrete value", "as an abstract array", "not a valid JAX", "Tracer'")  # as JAX or Python says it


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A traced function.

    Attributes:
        program: what the planner sees.
        flat: the jaxpr without calls; ``flat.ops[i]`` is ``program.ops[i]``, also inside bodies.
        in_tree, out_tree: pytree structures of the (dynamic) arguments and of the result.
        layered: if layers were asked for, the jaxpr with the boundaries between them; its values have numbers of their own.
        parts: if arguments and results of the program are parts of the leaves, how (``unstack.unstacked``).
        known: rules of the step's ops, under the rules it was traced with; programs made of the same ops need not ask again.
    """

    program: Program
    flat: FlatJaxpr
    in_tree: Any
    out_tree: Any
    layered: FlatJaxpr | None = None
    parts: LayeredStep | None = None
    known: Rules = field(default_factory=dict, repr=False, compare=False)


def trace(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    static_argnums: tuple[int, ...] = (),
    static_argnames: tuple[str, ...] = (),
    donate_argnums: tuple[int, ...] = (),
    rules: tuple[NamedRule, ...] = (),
    num_microbatches: int = 1,
    layers: LayerCuts | None = None,
    forward: bool = False,
    homes: Mapping[str, int | None] | None = None,
    starts: list[Any] | None = None,
    known: Rules | None = None,
) -> Traced:
    """Trace ``fn``; arguments are arrays or ``jax.ShapeDtypeStruct`` pytrees. Touches no device.

    ``rules`` are the user's, by primitive; ops of ``al.register_rule`` bring their own. ``num_microbatches`` is for what
    ``al.value_and_grad`` marks. ``layers`` chooses where the function under it is cut into layers, if it has no boundaries of
    its own: (FLOPs per op, bytes per cut) -> the ops that start layers. ``forward``: it may be a function without gradients
    (see ``forward``). ``homes``: path of an argument leaf, or of rows of one, -> the stage on which its readers lie: layers are
    cut so that they can lie there too; None = anywhere, with these rows. ``starts`` is filled with the ops that start layers of
    such a function. ``known``: rules that were found for other functions under the same ``rules``; those that are found here
    join them.

    Raises:
        TraceError: the function cannot be traced, with the user's line.
        MicrobatchError: it cannot be repeated per microbatch as asked.
        RuleError: a user's rule does not fit.
    """

    def traced_of(fn: Callable[..., Any]) -> Any:
        # A function of its own for every trace: JAX remembers the trace of a function for shapes alone.
        @functools.wraps(fn)
        def traced_once(*given: Any, **named: Any) -> Any:
            return fn(*given, **named)

        with microbatches(num_microbatches, layers), _no_explicit_mesh():
            return jax.jit(traced_once, static_argnums=static_argnums, static_argnames=static_argnames).trace(
                *abstract, **keywords
            )

    if getattr(jax.config, "jax_disable_jit"):  # noqa: B009 - its attributes are made at run time
        raise TraceError(
            "compilation is off (jax.disable_jit, JAX_DISABLE_JIT), and what is planned is a whole traced program. At "
            f"{user_line()}. Turn it on again; to look into the function, call it as it is, without alpa_lite."
        )
    try:
        abstract = [a if i in static_argnums else jax.tree.map(_abstract, a) for i, a in enumerate(args)]
        keywords = {k: a if k in static_argnames else jax.tree.map(_abstract, a) for k, a in kwargs.items()}
        dynamic = {i: a for i, a in enumerate(args) if i not in static_argnums}
        named = {k: v for k, v in kwargs.items() if k not in static_argnames}
        in_paths, donated = _input_paths(dynamic, named, donate_argnums)
        traced = traced_of(fn)
        flat = flatten(traced.jaxpr)
        out_paths = [p for p, _ in leaf_paths(traced.out_info, "out")]
        aliases: tuple[tuple[int, int], ...] | None = None
        if forward and layers is not None and num_microbatches == 1 and is_forward(flat):
            leaves = tuple(map(value_of, flat.avals)), tuple(flat.inputs), _numbers(flat.outputs)
            kept, aliases = find_state(*leaves, in_paths, out_paths, donated)
            found = [] if starts is None else starts
            where = homes_of_leaves(in_paths, homes or {})

            def in_layers(kept: frozenset[int], aliases: tuple[tuple[int, int], ...]) -> Any:
                return traced_of(functools.wraps(fn)(Forward(layers, kept, dict(aliases), where, found).once(fn)))

            try:
                traced = in_layers(kept, aliases)
            except LayerError:
                # An activation may go in and come out under one name: as state it leaves nothing to cut.
                state = {i for i in kept if donated[i] or argument_of(in_paths[i]) == argument_of(in_paths[0])}
                if state == kept:
                    raise
                kept, aliases = frozenset(state), tuple((i, o) for i, o in aliases if i in state)
                traced = in_layers(kept, aliases)
            flat = flatten(traced.jaxpr)
    except AlpaLiteError:
        raise
    except Exception as error:
        raise TraceError(_trace_message(fn, error)) from error
    check_regions(flat, num_microbatches, required=layers is not None)
    out_tree = traced.out_info
    zero = [i for i, v in enumerate(flat.inputs) if 0 in flat.avals[v].shape]
    if zero:
        raise TraceError(
            f"argument {in_paths[zero[0]]!r} has a dim of size 0 (shape {flat.avals[flat.inputs[zero[0]]].shape}); "
            f"a plan needs sizes of at least 1 on every dim. At {user_line()}. Pass arguments with the shapes of a real step."
        )
    for what, paths in (("arguments", in_paths), ("results", out_paths)):
        if len(set(paths)) < len(paths):
            twice = next(path for number, path in enumerate(paths) if path in paths[:number])
            raise TraceError(
                f"two leaves of the {what} have the path {twice!r}: a key with a slash in it reads as two keys. Plans name "
                f"leaves by their paths. At {user_line()}. Rename one of the keys."
            )
    known = {} if known is None else known
    program = build_program(flat, in_paths, out_paths, donated, rules, aliases, known)
    in_tree = jax.tree_util.tree_structure((tuple(dynamic.values()), named))
    return Traced(
        program=program,
        flat=flat,
        in_tree=in_tree,
        out_tree=jax.tree_util.tree_structure(out_tree),
        layered=None if layers is None else flatten(traced.jaxpr, keep_boundaries=True),
        known=known,
    )


def _abstract(leaf: Any) -> Any:
    """Shape and type alone: where an array lies now must not show in the program."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, np.ndarray | np.generic):
        weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)
    return leaf


def _trace_message(fn: Callable[..., Any], error: Exception) -> str:
    name = getattr(fn, "__qualname__", repr(fn))
    first, more = _said(error)
    static = ""
    ours = str(getattr(fn, "__module__", "")).startswith("alpa_lite.")  # whose arguments the user does not choose
    if not ours and _wants_static(error):
        static = "; mark Python-valued arguments with static_argnums"
    return (
        f"{name} cannot be traced by JAX: {type(error).__name__}: {first}\n{more}"
        f"  where: {_user_line(error)}\n"
        "  allowed: a function of arrays that jax.jit can trace (no Python branch on traced values).\n"
        f"  next: make jax.jit({'fn' if '<' in name else name}) work on these arguments first{static}."
    )


def _said(error: Exception) -> tuple[str, str]:
    """The first line of an error, and those after it that say what differs, as lines of their own."""
    lines = [line.strip() for line in str(error).splitlines()]
    first, *rest = [line for line in lines if line and not line.startswith("See https://")] or [""]
    shown, left = "", _MAX_SAID
    for line in rest[:_MAX_LINES]:
        if left <= 0:
            break
        shown += f"    {line if len(line) <= left else line[:left] + '...'}\n"
        left -= len(line)
    return first, shown


def _wants_static(error: Exception) -> bool:
    """Whether an argument was used as a value of Python, or is none of JAX."""
    kinds = (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    )
    return isinstance(error, kinds) or any(part in str(error) for part in _NOT_ARRAYS)


def _user_line(error: BaseException) -> str:
    """Innermost frame of the traceback that is outside of JAX and this package."""
    best, tb = "", error.__traceback__
    while tb is not None:
        file = tb.tb_frame.f_code.co_filename
        if is_user_file(file):
            best = f"{file}:{tb.tb_lineno} ({tb.tb_frame.f_code.co_name})"
        tb = tb.tb_next
    return best or user_line()  # where the call stands, if the function was not entered


def _input_paths(
    dynamic: dict[int, Any], named: dict[str, Any], donate_argnums: tuple[int, ...]
) -> tuple[list[str], list[bool]]:
    paths, donated = [], []
    for number, tree in [*dynamic.items(), *sorted(named.items())]:
        found = leaf_paths(tree, str(number))
        paths += [p for p, _ in found]
        donated += [number in donate_argnums] * len(found)
    return paths, donated


def _no_explicit_mesh() -> AbstractContextManager[Any]:
    """Under a mesh with Explicit axes (``jax.set_mesh``) JAX gives values shardings of that mesh, and a plan brings its own."""
    explicit = jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return jax.set_mesh(None) if explicit else nullcontext()


def build_program(
    flat: FlatJaxpr,
    in_paths: list[str],
    out_paths: list[str],
    donated: list[bool],
    rules: tuple[NamedRule, ...] = (),
    aliases: tuple[tuple[int, int], ...] | None = None,
    known: Rules | None = None,
) -> Program:
    """Mirror a flat jaxpr as a Program with rules.

    Args:
        flat: the jaxpr.
        in_paths, out_paths, donated: per argument and result leaf.
        rules: the user's, by primitive.
        aliases: (argument, result) positions of state; None finds them by paths and types.
        known: rules found before, under the same ``rules``; those found here join it.
    """
    distinct: dict[tuple[Any, ...], tuple[FlatOp, FlatJaxpr]] = {}
    keys: dict[int, tuple[Any, ...]] = {}
    _collect(flat, distinct, keys)
    known = {} if known is None else known
    new = {key: op for key, op in distinct.items() if key not in known}
    found = rules_for(new, named_rules(rules, [op for op, _ in distinct.values()]))
    known |= {key: rule for key, rule in found.items() if not new[key][0].bodies}  # control flow is never the same op
    found |= {key: known[key] for key in distinct if key not in new}
    check_user_ops(flat)
    names = {key: f"{key[0]}#{i}" for i, key in enumerate(distinct)}
    flops = {key: op_flops(op, part) for key, (op, part) in distinct.items()}
    about = {key: (found[key], names[key], flops[key]) for key in distinct}
    program = _mirror(flat, keys, about, in_paths, out_paths, donated)
    if aliases is not None:
        program = replace(program, aliases=aliases)
    check_program(program)
    return program


def _collect(flat: FlatJaxpr, distinct: dict[Any, Any], keys: dict[int, Any]) -> None:
    for op in flat.ops:
        key = op_key(op, flat) if not op.bodies else (op.name, id(op))
        keys[id(op)] = key
        distinct.setdefault(key, (op, flat))
        for body in op.bodies:
            _collect(body, distinct, keys)


def _mirror(
    flat: FlatJaxpr,
    keys: dict[int, tuple[Any, ...]],
    about: dict[tuple[Any, ...], tuple[OpShardingRule, str, float]],
    in_paths: list[str],
    out_paths: list[str],
    donated: list[bool],
) -> Program:
    """``about``: rule, name and FLOPs of ops by key."""
    known = {id(aval): aval for aval in flat.avals}  # a function that is called many times has the same types
    made = {number: value_of(aval) for number, aval in known.items()}
    values = tuple([made[id(aval)] for aval in flat.avals])
    ops = []
    for op in flat.ops:
        rule, name, flops = about[keys[id(op)]]
        bodies = tuple(_mirror(b, keys, about, [], [], []) for b in op.bodies)
        consts, carry, trips = loop_layout(op)
        ops.append(
            Op(
                primitive=shown_name(op),
                inputs=tuple(-1 if isinstance(i, Literal) else i for i in op.inputs),
                outputs=tuple(op.outputs),
                rule=rule,
                key=name,
                flops=flops,
                source=op.source,
                scope=op.scope,
                elementwise=op.name in ELEMENTWISE,
                bodies=bodies,
                num_consts=consts,
                num_carry=carry,
                trip_count=trips,
                sent=op.params.get("sent", ()),
                received=op.params.get("received", ()),
                pinned=op.params["pinned"] if op.name == "pin" else "",
                layout=_fixed_layout(op, flat) if op.name == "shard_map" else None,
            )
        )
    outputs = _numbers(flat.outputs)
    aliases = find_aliases(values, tuple(flat.inputs), outputs, in_paths, out_paths, donated)
    return Program(
        values=values,
        ops=tuple(ops),
        inputs=tuple(flat.inputs),
        outputs=outputs,
        input_paths=tuple(in_paths),
        output_paths=tuple(out_paths),
        donated=tuple(donated),
        aliases=aliases,
        constants=tuple(flat.constants),
    )


def _numbers(outputs: Sequence[Any]) -> tuple[int, ...]:
    """Of results; -1 of literals."""
    return tuple(-1 if isinstance(o, Literal) else o for o in outputs)


def value_of(aval: Any) -> Value:
    """Shape and type of an abstract value."""
    dtype = getattr(aval, "dtype", np.dtype("uint32"))
    itemsize = getattr(dtype, "itemsize", _KEY_ITEMSIZE)
    return Value(shape=tuple(getattr(aval, "shape", ())), dtype=dtype_name(dtype), itemsize=itemsize)


def _fixed_layout(op: FlatOp, flat: FlatJaxpr) -> FixedLayout:
    """Mesh and specs of a user's ``shard_map``."""
    sizes = dict(op.params["mesh"].shape)

    def spec(partition: Any, rank: int) -> ShardingSpec:
        entries = (*partition, *(None,) * (rank - len(partition)))
        return ShardingSpec(tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries))

    ranks = [np.ndim(i.val) if isinstance(i, Literal) else len(flat.avals[i].shape) for i in op.inputs]
    return FixedLayout(
        mesh=DeviceMesh(shape=tuple(sizes.values()), axis_names=tuple(sizes)),
        operands=tuple(map(spec, op.params["in_specs"], ranks)),
        results=tuple(map(spec, op.params["out_specs"], [len(flat.avals[o].shape) for o in op.all_outputs])),
    )
