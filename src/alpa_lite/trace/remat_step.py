"""A traced step with some of its layers recomputed: what a plan with a ``Rematerialisation`` is for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jax import lax

from alpa_lite._jax_compat import Literal, scan_layout
from alpa_lite.core.rule_text import NamedRule
from alpa_lite.errors import LayerError
from alpa_lite.plan.records import Rematerialisation
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp, drop_dead
from alpa_lite.trace.layers import Layered
from alpa_lite.trace.program import Traced, build_program
from alpa_lite.trace.remat import recomputable, rematerialised, saved_names
from alpa_lite.trace.staged import StagedStep, layers_of, microbatch_loop, staged_step


def with_recomputed_layers(flat: FlatJaxpr, layered: Layered, remat: Rematerialisation) -> Layered:
    """The layers of a step, flattened with its boundaries, of which some are recomputed."""
    fixed, _ = scan_layout(flat.ops[microbatch_loop(flat)].params)
    return rematerialised(layered, remat.layers, fixed, remat.saved)


def all_recomputed(layered: Layered, saved: tuple[str, ...], source: str) -> Rematerialisation:
    """Every layer that can be.

    Raises:
        LayerError: one of the names to save names nothing.
    """
    known = saved_names(layered.flat)
    if unknown := [name for name in saved if name not in known]:
        listed = f"They are {', '.join(map(repr, known))}" if known else "There are none"
        raise LayerError(
            f"PlanOptions: remat={saved!r} keeps {unknown[0]!r}, which names no value of the loss. Names are given by "
            f"jax.ad_checkpoint.checkpoint_name, outside of loops. {listed}. At {source}. Give some of these, or remat='all'."
        )
    return Rematerialisation(num_layers=layered.num_layers, layers=recomputable(layered), saved=saved)


@dataclass(frozen=True)
class RecomputedStages:
    """A step whose layers are joined to stages, and the same with layers recomputed.

    Attributes:
        kept: the step as it is.
        traced_flat, layered: the step, flattened with its boundaries, and its layers.
        remat: every layer that may be recomputed.
        rules: the user's, by primitive.
        split: stages whose backward pass is cut in halves.
    """

    kept: StagedStep
    traced_flat: FlatJaxpr
    layered: Layered
    remat: Rematerialisation
    rules: tuple[NamedRule, ...] = ()
    split: Collection[int] = ()

    @cached_property
    def all(self) -> StagedStep:
        """All of them recomputed."""
        layered = with_recomputed_layers(self.traced_flat, self.layered, self.remat)
        kept = self.kept
        return staged_step(
            kept.whole, self.traced_flat, layered, kept.stage_of_layer, self.rules, self.split, known=kept.known
        )

    def only(self, layers: Collection[int]) -> tuple[StagedStep, Rematerialisation]:
        """The stages that hold ``layers`` recomputed, the others kept: what stages exchange is the same."""
        stages = {self.kept.stage_of_layer[k] for k in layers}
        chosen = tuple(k for k in self.remat.layers if self.kept.stage_of_layer[k] in stages)
        own = [self.all if n in stages else self.kept for n in range(self.kept.num_stages)]
        step = replace(
            self.all,
            stages=tuple(one.stages[n] for n, one in enumerate(own)),
            programs=tuple(one.programs[n] for n, one in enumerate(own)),
        )
        return step, replace(self.remat, layers=chosen)


def rematerialised_step(traced: Traced, remat: Rematerialisation, rules: tuple[NamedRule, ...] = ()) -> Traced:
    """The whole step as one program with some layers recomputed.

    Args:
        traced: with its layers.
        remat: which of them.
        rules: the user's, by primitive.
    """
    flat, program = traced.layered, traced.program
    assert flat is not None
    layered = with_recomputed_layers(flat, layers_of(flat), remat)
    number = microbatch_loop(flat)
    loop = _copy(flat.ops[number], bodies=[layered.flat])
    flat = replace(flat, ops=[*flat.ops[:number], loop, *flat.ops[number + 1 :]])
    if loop.params["length"] == 1:
        flat = _without_loop(flat, number)
    paths = list(program.input_paths), list(program.output_paths)
    made = build_program(flat, *paths, list(program.donated), rules, known=traced.known)
    return replace(traced, program=made, flat=flat)


def _without_loop(flat: FlatJaxpr, number: int) -> FlatJaxpr:
    """The same with the loop's body in place of a loop that runs once."""
    loop, body = flat.ops[number], flat.ops[number].bodies[0]
    avals, first = [*flat.avals, *body.avals], len(flat.avals)
    fixed = sum(scan_layout(loop.params))
    given: dict[int, Any] = dict(zip(body.inputs[:fixed], loop.inputs, strict=False))
    ops: list[FlatOp] = []
    for inner, outer in zip(body.inputs[fixed:], loop.inputs[fixed:], strict=True):
        ops.append(FlatOp(lax.squeeze_p, {"dimensions": (0,)}, [outer], [first + inner], loop.source, loop.scope))

    def read(value: Any) -> Any:
        return value if isinstance(value, Literal) else given.get(value, first + value)

    def made(value: int) -> int:
        return first + value if value >= 0 else -1

    for op in body.ops:
        params = dict(op.params)
        if "group" in params:
            params["group"] = tuple(map(made, params["group"]))
        fresh = _copy(op, inputs=list(map(read, op.inputs)), outputs=list(map(made, op.outputs)), params=params)
        fresh.all_outputs = tuple(map(made, op.all_outputs))
        ops.append(fresh)
    same: dict[int, Any] = {}  # results of the loop -> what they are now
    carries = scan_layout(loop.params)[1]
    for position, (result, inner) in enumerate(zip(loop.all_outputs, body.outputs, strict=True)):
        if position < carries:
            same[result] = read(inner)
            continue
        shape = avals[result].shape
        params = {"shape": shape, "broadcast_dimensions": tuple(range(1, len(shape))), "sharding": None}
        ops.append(FlatOp(lax.broadcast_in_dim_p, params, [read(inner)], [result], loop.source, loop.scope))

    def after(value: Any) -> Any:
        return value if isinstance(value, Literal) else same.get(value, value)

    later = [_copy(op, inputs=list(map(after, op.inputs))) for op in flat.ops[number + 1 :]]
    constants = flat.constants | {first + v: c for v, c in body.constants.items()}
    outputs = list(map(after, flat.outputs))
    found = FlatJaxpr(
        avals, [*map(_copy, flat.ops[:number]), *ops, *later], list(flat.inputs), outputs, dict(constants)
    )
    drop_dead(found)
    return found


def _copy(op: FlatOp, **changes: Any) -> FlatOp:
    fresh = replace(op, **changes)
    fresh.all_outputs = op.all_outputs
    return fresh
