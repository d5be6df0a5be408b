"""A traced step whose layers are joined to stages: one Program per stage, made anew whenever a plan is made or read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from alpa_lite._jax_compat import scan_layout
from alpa_lite.core.program import Program, Value
from alpa_lite.core.rule_text import NamedRule
from alpa_lite.errors import LayerError
from alpa_lite.trace.commute import commute_sums
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp
from alpa_lite.trace.halves import split_backward
from alpa_lite.trace.layers import Layered, assign_layers
from alpa_lite.trace.leaf_stages import LeafReads, pins_of_leaves
from alpa_lite.trace.microbatch import is_microbatch_loop
from alpa_lite.trace.program import Rules, build_program, value_of
from alpa_lite.trace.renumbered import values_of
from alpa_lite.trace.stage_homes import is_kept
from alpa_lite.trace.stage_pin import PIN_STAGE, StagePin
from alpa_lite.trace.stages import Crossing, StageProgram, split_step


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedStep:
    """A step cut into stages.

    Attributes:
        whole: the step's own program.
        stage_of_layer: rising.
        num_microbatches: trips of its loop.
        stages, programs: per stage its part, and the Program that mirrors it.
        flat, layered: the step and its loop's body that the parts were taken from; crossings number their values.
        known: rules of its ops.
    """

    whole: Program
    stage_of_layer: tuple[int, ...]
    num_microbatches: int
    stages: tuple[StageProgram, ...]
    programs: tuple[Program, ...]
    flat: FlatJaxpr
    layered: Layered
    known: Rules = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def is_training(self) -> bool:
        """Whether it has a backward pass."""
        return any(self.layered.backward)

    def value_of(self, crossing: Crossing) -> Value:
        """Shape and type of what crosses, for one microbatch."""
        flat = self.layered.flat if crossing.when == "loop" else self.flat
        return value_of(flat.avals[crossing.value])


def microbatch_loop(flat: FlatJaxpr) -> int:
    """Number of the op that repeats per microbatch; there is exactly one (``check_regions``)."""
    return next(i for i, op in enumerate(flat.ops) if is_microbatch_loop(op))


def layers_of(flat: FlatJaxpr, homes: Sequence[tuple[int, str] | None] = ()) -> Layered:
    """The layers of a step that was flattened with its boundaries.

    Args:
        flat: the step.
        homes: per argument the stage on which it lies, with its path; None where it does not matter.

    Raises:
        LayerError: a boundary or a pin to a stage stands where it cannot.
    """
    outside = next((op for op in flat.ops if op.name == PIN_STAGE), None)
    if outside is not None:
        raise LayerError(
            f"al.pin_stage at {outside.source} stands outside of what al.value_and_grad repeats per microbatch. The update "
            "follows the parameters that it writes. Pin values of the loss function instead."
        )
    layered = assign_layers(flat.ops[microbatch_loop(flat)].bodies[0])
    found = _home_pins(flat, layered, homes)
    return replace(layered, pins=(*layered.pins, *found)) if found else layered


def _home_pins(flat: FlatJaxpr, layered: Layered, homes: Sequence[tuple[int, str] | None]) -> list[StagePin]:
    """Of the layers that read arguments which lie on stages."""
    pairs = zip(homes, layers_reading(flat, layered) if homes else (), strict=False)
    reads = [LeafReads(path=home[1], stage=home[0], places=layers) for home, layers in pairs if home and layers]
    return pins_of_leaves(reads)


def layers_reading(flat: FlatJaxpr, layered: Layered) -> list[tuple[int, ...]]:
    """Per argument of a step the layers that read it, rising."""
    loop = flat.ops[microbatch_loop(flat)]
    inner = dict(zip(loop.inputs, layered.flat.inputs, strict=True))
    readers: dict[Any, set[int]] = {}
    for op, layer in zip(layered.flat.ops, layered.layer, strict=True):
        for value in values_of(op):
            readers.setdefault(value, set()).add(layer)
    return [tuple(sorted(readers.get(inner.get(value), ()))) for value in flat.inputs]


def layers_writing(flat: FlatJaxpr, layered: Layered) -> list[tuple[int, ...]]:
    """Per argument of a step the layer that makes its next value, where the loop carries it; else ()."""
    loop, body = flat.ops[microbatch_loop(flat)], layered.flat
    made = {o: (layer,) for op, layer in zip(body.ops, layered.layer, strict=True) for o in op.outputs}
    num_consts, num_carry = scan_layout(loop.params)
    after = {
        v: o for v, o in zip(loop.inputs[num_consts:], body.outputs[:num_carry], strict=False) if isinstance(v, int)
    }
    return [made.get(o, ()) if isinstance(o := after.get(value), int) else () for value in flat.inputs]


def named_to_be_kept(whole: Program, flat: FlatJaxpr, paths: Iterable[str]) -> tuple[str, ...]:
    """Those of the arguments with these paths that lie on one stage only if the caller says so."""
    asked, state = set(paths), {argument for argument, _ in whole.aliases}
    leaves = enumerate(zip(whole.input_paths, flat.inputs, strict=True))
    return tuple(p for i, (p, v) in leaves if p in asked and i not in state and not is_kept(flat.avals[v]))


def owners_of(whole: Program, flat: FlatJaxpr, stages: Mapping[str, int], kept: Iterable[str] = ()) -> dict[int, int]:
    """Position of an argument -> the stage on which it lies.

    Args:
        whole, flat: the step.
        stages: by path. What may be of the batch (whole numbers, scalars) is left out: stages that read it get copies.
        kept: paths of what is not copied, whatever it is.
    """
    copied = set(named_to_be_kept(whole, flat, stages)).difference(kept)
    return {i: stages[p] for i, p in enumerate(whole.input_paths) if p in stages and p not in copied}


def staged_step(
    whole: Program,
    flat: FlatJaxpr,
    layered: Layered,
    stage_of_layer: Sequence[int],
    rules: tuple[NamedRule, ...] = (),
    split: Collection[int] = (),
    known: Rules | None = None,
    owners: Mapping[int, int] | None = None,
) -> StagedStep:
    """Join layers to stages.

    Args:
        whole: the step's program.
        flat: the step, flattened with its boundaries.
        layered: its layers.
        stage_of_layer: one number per layer, rising by 0 or 1 from 0.
        rules: the user's, by primitive.
        split: stages whose backward pass is cut in halves.
        known: rules of ops found before, under the same ``rules``; those found here join it.
        owners: position of an argument of a function without a gradient -> the stage on which it lies (``owners_of``).

    Raises:
        LayerError: the numbers are no such list.
    """
    given = tuple(stage_of_layer)
    steps = [b - a for a, b in zip((0, *given), given, strict=False)]
    if len(given) != layered.num_layers or any(s not in (0, 1) for s in steps) or not given or given[0]:
        raise LayerError(
            f"stage_of_layer={given} for {layered.num_layers} layers. It must have one stage per layer, starting with 0 and "
            "rising by 0 or 1. Stages are contiguous layers; count al.layer_boundary calls, plus one."
        )
    loop = microbatch_loop(flat)
    count = flat.ops[loop].params["length"]
    flat, layered = commute_sums(flat, loop, layered, given)
    stages = split_step(flat, loop, layered, given, whole.aliases, owners or {})
    stages = tuple(split_backward(stage) if n in split else stage for n, stage in enumerate(stages))
    known = {} if known is None else known
    programs = tuple(stage_program(whole, stage, rules, known) for stage in stages)
    return StagedStep(
        whole=whole,
        stage_of_layer=given,
        num_microbatches=count,
        stages=stages,
        programs=programs,
        flat=flat,
        layered=layered,
        known=known,
    )


def stage_program(whole: Program, stage: StageProgram, rules: tuple[NamedRule, ...], known: Rules) -> Program:
    """Received state keeps its path; everything else that crosses is numbered. State is what it is in the whole step."""
    inputs = [whole.input_paths[a] for a in stage.args]
    for i, c in enumerate(stage.received):
        inputs.append(whole.input_paths[c.argument] if c.when == "start" else f"received/{i}")
    outputs = [whole.output_paths[r] for r in stage.results] + [f"sent/{i}" for i in range(len(stage.sent))]
    donated = [whole.donated[a] for a in stage.args] + [False] * len(stage.received)
    arguments, results = ({leaf: i for i, leaf in enumerate(leaves)} for leaves in (stage.args, stage.results))
    aliases = tuple((arguments[a], results[r]) for a, r in whole.aliases if a in arguments and r in results)
    names = {op.name for op in _walk(stage.flat)}
    own = tuple(rule for rule in rules if rule.primitive in names)  # those of other stages do not occur here
    return build_program(stage.flat, inputs, outputs, donated, own, aliases, known)


def _walk(flat: FlatJaxpr) -> Iterator[FlatOp]:
    for op in flat.ops:
        yield op
        for body in op.bodies:
            yield from _walk(body)
