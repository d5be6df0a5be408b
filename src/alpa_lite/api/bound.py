"""A plan and the function it was made for: pytrees back, the checks that they belong together, exports."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from alpa_lite.core.rule_text import NamedRule
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.errors import AlpaLiteError, ArgumentsError, PlanFileError, TraceError, user_line
from alpa_lite.executor.export import check_target, write_export
from alpa_lite.executor.export_stages import write_stages
from alpa_lite.executor.verify_plan import VerifyReport, verify_plan
from alpa_lite.executor.verify_stages import StagesReport, verify_stages
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.plan.identity import op_text, verify_identity
from alpa_lite.plan.leaf_rows import split_path
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Leaf, Rematerialisation
from alpa_lite.planner.padded import padded_like
from alpa_lite.planner.stage_layers import layer_cuts, layers_to_recompute
from alpa_lite.schedule import planned_schedule
from alpa_lite.trace.auto_layers import LayerCuts, are_homes
from alpa_lite.trace.paths import leaf_paths
from alpa_lite.trace.program import Traced, trace
from alpa_lite.trace.remat import recomputable
from alpa_lite.trace.remat_step import RecomputedStages, rematerialised_step
from alpa_lite.trace.staged import StagedStep, layers_of, owners_of, staged_step
from alpa_lite.trace.unstack import unstacked

# In a plan's options: the ops that start layers, where parameters' stages said so; and what lies on one stage though it is no
# array of floats, as shared leaves do.
LAYER_STARTS, KEPT_LEAVES = "layer_starts", "kept_leaves"
JIT_SETTINGS = ("static_argnums", "static_argnames", "donate_argnums")


@dataclass(frozen=True, slots=True)
class Trees:
    """Joins a plan to JAX; see ``plan.plan.PlanTrees``.

    A leaf that lies on stages in parts has the spec of its first part in ``in_specs`` and ``out_specs``.
    """

    in_tree: Any = None
    out_tree: Any = None
    in_shapes: tuple[jax.ShapeDtypeStruct, ...] = ()

    @classmethod
    def of(cls, traced: Traced) -> Trees:
        if traced.parts is not None:
            return cls(traced.in_tree, traced.out_tree, traced.parts.argument_types())
        avals = [traced.flat.avals[v] for v in traced.flat.inputs]
        shapes = (jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals)
        return cls(traced.in_tree, traced.out_tree, tuple(shapes))

    def partition_spec(self, spec: ShardingSpec) -> Any:
        return partition_spec(spec)

    def in_specs(self, plan: Plan) -> Any:
        args, kwargs = jax.tree_util.tree_unflatten(self._known(self.in_tree), self._specs(plan.inputs))
        return (args, kwargs) if kwargs else args

    def out_specs(self, plan: Plan) -> Any:
        return jax.tree_util.tree_unflatten(self._known(self.out_tree), self._specs(plan.outputs))

    def _specs(self, leaves: Sequence[Leaf]) -> list[Any]:
        found: dict[str, Any] = {}
        for leaf in leaves:
            found.setdefault(split_path(leaf.path)[0], partition_spec(leaf.spec))
        return list(found.values())

    def _known(self, tree: Any) -> Any:
        if tree is None:
            raise AlpaLiteError(
                "this plan was read from a file, which holds paths but no pytrees. Its in_specs and out_specs, and an export "
                "without arguments, exist once it is bound. Use `plan.specs_by_path`, or `plan = plan.bind(fn, *args)` first."
            )
        return tree

    def bind(self, plan: Plan, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        traced = traced_for(plan, fn, args, kwargs)
        return replace(plan, trees=Trees.of(traced))

    def verify(self, plan: Plan, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> VerifyReport | StagesReport:
        return verified(plan, traced_for(plan, fn, args, kwargs))

    def export(
        self, plan: Plan, fn: Any, out_dir: Path, args: tuple[Any, ...], kwargs: dict[str, Any], overwrite: bool
    ) -> None:
        check_target(out_dir, overwrite=overwrite)
        settings = dict(plan.options)
        static: Any = settings.get("static_argnums", ())
        names: Any = settings.get("static_argnames", ())
        if not args and not kwargs and not static and not names:
            args, kwargs = jax.tree_util.tree_unflatten(self._known(self.in_tree), self.in_shapes)
        traced = traced_for(plan, fn, args, kwargs)
        dynamic = [a for i, a in enumerate(args) if i not in static]
        dynamic += [kwargs[k] for k in sorted(kwargs) if k not in names]
        leaves = jax.tree_util.tree_leaves(dynamic)
        if plan.pipeline is None:
            write_export(plan, traced, leaves, out_dir, overwrite=overwrite)
        else:
            write_stages(plan, traced, staged_for(plan, traced), leaves, out_dir, overwrite=overwrite)


def traced_for(
    plan: Plan, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Mapping[str, Any] | None = None
) -> Traced:
    """The traced function, checked to be the plan's; ``settings`` as in ``jax.jit``, by default those recorded with the plan."""
    if settings is None:
        settings = {name: value for name, value in plan.options if name in JIT_SETTINGS}
    rules = _rules_of(plan)
    try:
        count = _num_microbatches(plan)
        layers, starts = _planned_cuts(plan), _starts_of(plan)
        traced = trace(
            plain(fn),
            args,
            kwargs,
            rules=rules,
            num_microbatches=count,
            layers=layers,
            forward=plan.pipeline is not None,
            homes=dict(starts) if are_homes(starts) else None,
            **settings,
        )
    except TraceError as error:
        static = settings.get("static_argnums", ()), settings.get("static_argnames", ())
        raise _other_arguments(plan, args, kwargs, *static) or error from error
    if plan.pipeline is not None:
        traced = unstacked(traced, rules, [leaf.path for leaf in plan.inputs])
    else:
        if plan.remat is not None:
            traced = _recomputing(traced, plan.remat, rules)
        traced = padded_like(traced, plan.paddings, rules)
    _check_identity(plan, traced)
    return traced


def with_layers_said(plan: Plan, starts: Sequence[Any], kept: Sequence[str]) -> Plan:
    """A plan on stages that says what started its layers, and which leaves were not copied (``traced_for``, ``staged_for``)."""
    said = ((name, tuple(value)) for name, value in ((LAYER_STARTS, starts), (KEPT_LEAVES, kept)) if value)
    return replace(plan, options=(*plan.options, *said))


def _starts_of(plan: Plan) -> tuple[Any, ...]:
    """What was said of its layers by leaves that lie on stages."""
    found: Any = dict(plan.options).get(LAYER_STARTS, ())
    return found


def _planned_cuts(plan: Plan) -> LayerCuts | None:
    """How a function without boundaries of its own is cut as for the plan; None if it was not cut."""
    if starts := _starts_of(plan):
        return lambda flops, cut_bytes, pins=(), **_: starts
    if plan.pipeline is not None:
        counts = Counter(plan.pipeline.stage_of_layer)
        return layer_cuts(len(plan.pipeline.stage_of_layer), [counts[stage] for stage in sorted(counts)])
    return None if plan.remat is None else layers_to_recompute(plan.remat.num_layers)


def staged_for(plan: Plan, traced: Traced) -> StagedStep:
    """The traced step cut into the plan's stages.

    Raises:
        PlanFileError: its layers are not those of the plan.
    """
    assert plan.pipeline is not None and traced.layered is not None
    layered, given = layers_of(traced.layered), plan.pipeline.stage_of_layer
    if are_homes(_starts_of(plan)):
        layered = replace(layered, num_layers=len(given))
    split = planned_schedule(plan.pipeline).split_stages
    other = f"{layered.num_layers} layers, {len(given)} were planned"
    if layered.num_layers == len(given):
        stages = {leaf.path: leaf.stage for leaf in plan.inputs}
        kept: Any = dict(plan.options).get(KEPT_LEAVES, ())
        owners = owners_of(traced.program, traced.layered, stages, kept)
        staged = staged_step(traced.program, traced.layered, layered, given, _rules_of(plan), split, owners=owners)
        if plan.remat is not None:
            whole = replace(plan.remat, layers=recomputable(layered))
            again = RecomputedStages(staged, traced.layered, layered, whole, _rules_of(plan), split)
            staged, _ = again.only(plan.remat.layers)
        texts = [[op_text(owner, op) for _, owner, op in program.walk()] for program in staged.programs]
        moved = [n for n, stage in enumerate(plan.stages) if [d.op for d in stage.decisions] != texts[n]]
        if not moved:
            return staged
        other = f"other ops in stage {moved[0]}, so that a boundary has moved"
    raise PlanFileError(
        f"this plan belongs to a step with other layers: {other}. A plan holds for the boundaries that it was made with. At "
        f"{user_line()}. Put al.layer_boundary where it was, or make a new plan with al.plan."
    )


def verified(plan: Plan, traced: Traced) -> VerifyReport | StagesReport:
    """Compile a plan for its own cluster; a report per stage where there are several."""
    return verify_plan(plan, traced) if plan.pipeline is None else verify_stages(plan, staged_for(plan, traced))


def _recomputing(traced: Traced, remat: Rematerialisation, rules: tuple[NamedRule, ...]) -> Traced:
    """The traced step with the plan's layers recomputed."""
    assert traced.layered is not None
    count = layers_of(traced.layered).num_layers
    if count != remat.num_layers:
        raise PlanFileError(
            f"this plan belongs to a step with other layers: {count} layers, {remat.num_layers} were planned. A plan holds for "
            f"the boundaries that it was made with. At {user_line()}. Put al.layer_boundary where it was, or make a new plan "
            "with al.plan."
        )
    return rematerialised_step(traced, remat, rules)


def _rules_of(plan: Plan) -> tuple[NamedRule, ...]:
    """The user's rules by primitive that a plan was made with."""
    texts: Any = dict(plan.options).get("rules", ())
    return tuple(map(NamedRule.read, texts))


def _num_microbatches(plan: Plan) -> int:
    """In how many slices the plan's step takes its batch."""
    count: Any = dict(plan.options).get("num_microbatches", 1)
    return count


def _other_arguments(
    plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], static_argnums: Any, static_argnames: Any
) -> ArgumentsError | None:
    """If the arguments have other leaves than the plan's, that is why the function cannot be traced with them."""
    trees = {str(i): a for i, a in enumerate(args) if i not in static_argnums}
    trees |= {name: a for name, a in kwargs.items() if name not in static_argnames}
    given = [path for name, tree in trees.items() for path, _ in leaf_paths(tree, name)]
    planned = list(dict.fromkeys(split_path(path)[0] for path in plan.input_paths))
    missing = [path for path in planned if path not in given]
    new = [path for path in given if path not in planned]
    if not missing and not new:
        return None
    facts = [f"they lack {', '.join(map(repr, missing[:3]))}"] if missing else []
    facts += [f"the plan does not know {', '.join(map(repr, new[:3]))}"] if new else []
    return ArgumentsError(
        f"the arguments do not fit the plan: {'; '.join(facts)} ({len(given)} leaves given, {len(planned)} planned). "
        f"A plan holds for exactly the argument tree it was made for. At {user_line()}. Pass such arguments, or make a "
        "new plan for these with al.plan."
    )


class Parallelized(ABC):
    """What ``parallelize`` makes of the user's function, ``__wrapped__``, as ``_request`` asks."""

    __wrapped__: Callable[..., Any]
    _request: Any

    @abstractmethod
    def known_plan(self) -> Plan | None:
        """The plan that was made first, or given."""


def plain(fn: Any) -> Callable[..., Any]:
    """The user's function, also of an already parallelized one."""
    return fn.__wrapped__ if isinstance(fn, Parallelized) else fn


def _check_identity(plan: Plan, traced: Traced) -> None:
    """Refuse a plan of another program; warn about another JAX version."""
    for text in verify_identity(plan, traced.program, jax_version=jax.__version__):
        warnings.warn(text, stacklevel=3)
