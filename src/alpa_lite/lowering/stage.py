"""One stage of a plan as jitted functions: what runs before the loop, its passes over a microbatch, the rounds of the update.

The functions are written for an ``AbstractMesh``: they run on any devices with that mesh's shape, on those where their first
argument lies. So stages that compute the same under the same decisions share them (``first_equal``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from alpa_lite._jax_compat import Literal
from alpa_lite.core.collective import Collective
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.cuts import Pair, Segment
from alpa_lite.costs.stage_cut import StageCut, passes_of
from alpa_lite.lowering.lower import Lowering, body_input_specs, body_output_specs
from alpa_lite.lowering.segments import CutRegion, results_in_order
from alpa_lite.plan.plan import Plan
from alpa_lite.schedule import ActionKind
from alpa_lite.trace.program import value_of
from alpa_lite.trace.same import same_flat
from alpa_lite.trace.staged import StagedStep
from alpa_lite.trace.stages import StageProgram


@dataclass(frozen=True, eq=False)
class StagePart:
    """A jitted function of a stage: first an index (the microbatch; 0 outside the loop), then ``segment.reads``; to ``results``.

    Attributes:
        name: "before", "forward", "backward" (or "backward, inputs" and "backward, weights") or "update k".
        region, number: the segment that it runs.
        mesh: abstract.
        trips: microbatches.
        sliced: what is given stacked over microbatches; in another layout it is what an earlier pass made of a slice.
        replaced: what it reads and nothing reads afterwards, with the result that takes the buffer.
    """

    name: str
    region: CutRegion
    number: int
    mesh: AbstractMesh
    trips: int
    sliced: frozenset[Pair] = frozenset()
    replaced: tuple[tuple[Pair, Pair], ...] = ()

    @property
    def donated(self) -> frozenset[Pair]:
        """What is gone afterwards."""
        return frozenset(old for old, _ in self.replaced)

    @cached_property
    def results(self) -> tuple[Pair, ...]:
        """What ``segment`` writes, in the order of the function's results."""
        return results_in_order(self.segment, self.replaced)

    @property
    def segment(self) -> Segment:
        return self.region.segments[self.number]

    @cached_property
    def function(self) -> Any:
        return self.region.function(self.number, self.mesh, sliced=self.sliced, replaced=self.replaced)

    @cached_property
    def marked(self) -> Any:
        """As ``function``, with one more result that tells when it is over."""
        return self.region.function(self.number, self.mesh, sliced=self.sliced, replaced=self.replaced, marked=True)

    def structs(self, mesh: Any) -> list[Any]:
        """The arguments of ``function`` as shapes, on a mesh of devices or the abstract one."""
        return self.region.structs(self.number, self.sliced, self.trips, mesh)

    def collectives(self, planned: Sequence[Collective]) -> tuple[Collective, ...]:
        """Those of the stage that it holds, counted for one run."""
        return self.region.collectives(self.number, planned, self.trips)


@dataclass(frozen=True, eq=False)
class LoweredStage:
    """A stage's program under its plan, cut into what a pipeline runs at different times.

    Attributes:
        program: the stage's part of the step.
        lowering: its plan.
        in_specs, out_specs: of the program's arguments and results.
        replaced: (position of an argument, position of the result that may take its buffer) of donated state.
    """

    program: StageProgram
    lowering: Lowering
    in_specs: tuple[ShardingSpec, ...]
    out_specs: tuple[ShardingSpec, ...]
    replaced: tuple[tuple[int, int], ...] = ()

    @property
    def loop(self) -> Any:
        return self.program.flat.ops[self.program.loop]

    @property
    def halves(self) -> tuple[int, ...]:
        """Where the backward pass is cut."""
        return () if self.program.weight_half is None else (self.program.weight_half,)

    @cached_property
    def outer(self) -> CutRegion:
        """Segment 0 is what comes before the loop, the others are the rounds of the update."""
        first = self.program.loop
        cuts = (first, *self.program.rounds)
        specs = self.in_specs, self.out_specs
        skipped, late = frozenset({first}), self.program.late
        return CutRegion(self.lowering, self.program.flat, "", cuts, *specs, skipped=skipped, late=late)

    @cached_property
    def body(self) -> CutRegion:
        """Segment 0 is the forward pass of a microbatch; then comes the backward pass, or its two halves."""
        op, path = self.loop, f"{self.program.loop}"
        decision = self.lowering.decisions[path]
        flat = op.bodies[0]
        return CutRegion(
            self.lowering,
            flat,
            f"{path}.0.",
            passes_of(self.program.num_forward, self.halves, len(flat.ops)),
            tuple(body_input_specs("scan", op.params, decision)[0]),
            tuple(body_output_specs("scan", op.params, decision)[0]),
        )

    @cached_property
    def parts(self) -> tuple[StagePart, ...]:
        """Everything that the stage runs: segments of the outer region, then the passes."""
        logical, trips = self.lowering.mesh, self.loop.params["length"]
        mesh = AbstractMesh(logical.shape, logical.axis_names, axis_types=(AxisType.Auto,) * len(logical.shape))
        cut, inputs = self.cut, self.cut.loop_inputs
        sliced = frozenset(inputs.slices)
        outer = [
            StagePart(name, self.outer, k, mesh, trips, replaced=cut.freed[k]) for k, name in enumerate(cut.outer_names)
        ]
        words = enumerate(cut.pass_names)
        return (*outer, *(StagePart(name, self.body, k, mesh, trips, sliced, cut.added[k]) for k, name in words))

    @property
    def passes(self) -> tuple[StagePart, ...]:
        """One part for the forward pass, one for the backward pass or one for each half of it."""
        return self.parts[len(self.outer.segments) :]

    def passes_of(self, kind: ActionKind) -> range:
        """Which of them an action of the schedule runs."""
        numbers = {ActionKind.F: range(1), ActionKind.I: range(1, 2), ActionKind.W: range(2, 3)}
        return numbers.get(kind, range(1, len(self.passes)))

    @cached_property
    def cut(self) -> StageCut:
        """Where values go, without JAX."""
        program, body = self.program, self.loop.bodies[0]
        return StageCut(
            mesh=self.lowering.mesh,
            outer=self.outer.cut,
            body=self.body.cut,
            outer_values=[value_of(a) for a in program.flat.avals],
            body_values=[value_of(a) for a in body.avals],
            loop=program.loop,
            num_consts=self.loop.params["num_consts"],
            num_carry=self.loop.params["num_carry"],
            num_args=len(program.args),
            received=tuple(c.when for c in program.received),
            num_sent=sum(c.when == "loop" for c in program.sent),
            replaced=self.replaced,
        )

    def operands(self, start: int, stop: int) -> tuple[Any, ...]:
        """Inputs of the loop in the region around it: (value, layout), or a ``Literal``."""
        specs = self.lowering.decisions[f"{self.program.loop}"].operands
        given = zip(self.loop.inputs[start:stop], specs[start:stop], strict=True)
        return tuple(v if isinstance(v, Literal) else (v, spec) for v, spec in given)


def lowered_stages(staged: StagedStep, plan: Plan) -> tuple[LoweredStage, ...]:
    """Every stage of ``plan``, lowered."""
    found = []
    for part, program, stage in zip(staged.stages, staged.programs, plan.stages, strict=True):
        lowering = Lowering.of(stage.mesh, stage.decisions, stage.conversions, stage.collectives)
        in_specs, out_specs = (tuple(leaf.spec for leaf in leaves) for leaves in (stage.inputs, stage.outputs))
        replaced = tuple((i, o) for i, o in program.aliases if program.donated[i])
        found.append(LoweredStage(part, lowering, in_specs, out_specs, replaced))
    return tuple(found)


def first_equal(stages: Sequence[LoweredStage]) -> tuple[int, ...]:
    """Per stage the number of the first one with the same functions."""
    found: list[int] = []
    for number, stage in enumerate(stages):
        found.append(next((k for k in sorted(set(found)) if same_stage(stages[k], stage)), number))
    return tuple(found)


def same_stage(one: LoweredStage, other: LoweredStage) -> bool:
    """Whether both compute the same in the same layouts, so that the parts of one serve the other."""
    a, b = one.program, other.program
    return (
        (a.loop, a.num_forward, a.weight_half, a.rounds) == (b.loop, b.num_forward, b.weight_half, b.rounds)
        and [c.when for c in a.received] == [c.when for c in b.received]
        and [c.when for c in a.sent] == [c.when for c in b.sent]
        and (one.in_specs, one.out_specs, one.replaced) == (other.in_specs, other.out_specs, other.replaced)
        and one.lowering == other.lowering
        and same_flat(a.flat, b.flat)
    )
