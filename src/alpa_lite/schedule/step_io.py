"""What the programs of a step read and write, in plain words: the second input of ``emit_instructions``.

A *program* is what runs for one (stage, kind), the same for all microbatches. A *buffer* is a value with a name that is
unique in the step. A buffer per microbatch exists once for each of them.

- Arguments (weights, state, slices of the batch) lie on the meshes of their home stages when the step starts.
- Sums start as zeros; a program that lists a buffer under reads and writes changes it in place. So gradients are
  accumulated, synchronised and weights updated.
- Made buffers are written by one stage: activations, residuals, cotangents. Who reads one on another mesh gets it sent,
  however many stages lie between.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from alpa_lite.schedule.actions import ActionKind, Schedule


class Origin(StrEnum):
    """Where a buffer comes from."""

    ARGUMENT = "argument"
    ZEROS = "zeros"
    MADE = "made"


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A value of the step.

    Attributes:
        name: unique in the step.
        origin: argument, zeros or made.
        per_microbatch: exists once per microbatch; sums and state exist once.
        stages: of an argument: the stages on whose meshes it lies from the start.
        kept: alive after the step, as a result or because the caller keeps it; others are freed after their last use.
    """

    name: str
    origin: Origin = Origin.MADE
    per_microbatch: bool = True
    stages: tuple[int, ...] = ()
    kept: bool = False

    def __post_init__(self) -> None:
        if (self.origin is Origin.ARGUMENT) != bool(self.stages):
            raise ValueError(
                f"arguments, and only they, have home stages; got {self.origin} {self.name!r}, {self.stages}"
            )


@dataclass(frozen=True, slots=True)
class Port:
    """A buffer as one program reads or writes it; ``size_bytes`` per device, in that program's layout."""

    name: str
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageIO:
    """What one program reads and writes.

    Attributes:
        stage, kind: which program.
        reads, writes: its buffers; one that is in both is changed in place.
        temporary_bytes: what it needs besides them while it runs, per device.
    """

    stage: int
    kind: ActionKind
    reads: tuple[Port, ...] = ()
    writes: tuple[Port, ...] = ()
    temporary_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepIO:
    """All buffers and programs of a step."""

    buffers: tuple[Buffer, ...]
    programs: tuple[StageIO, ...]


def chain_step(
    schedule: Schedule,
    *,
    boundary_bytes: int = 0,
    residual_bytes: int = 0,
    weight_bytes: int = 0,
    gradient_bytes: int = 0,
) -> StepIO:
    """The plainest step that fits a schedule: a chain of stages, each with one of everything.

    Per stage s: an activation ``x{s}`` to the next stage and its cotangent ``dx{s}`` back, a residual ``r{s}`` from F to the
    backward (from RECOMPUTE where there is one; then the input is kept instead), a weight ``w{s}``, a gradient sum ``g{s}``.

    Args:
        boundary_bytes, residual_bytes, weight_bytes, gradient_bytes: sizes per device, the same for all stages.
    """
    made = {(a.stage, a.kind) for column in schedule.columns for a in column}
    chain = _Chain(made, schedule.num_stages, boundary_bytes, residual_bytes, weight_bytes, gradient_bytes)
    programs = tuple(chain.program(stage, kind) for stage, kind in sorted(made))
    used = {port.name for program in programs for port in (*program.reads, *program.writes)}
    return StepIO(buffers=tuple(b for b in chain.buffers() if b.name in used), programs=programs)


@dataclass(frozen=True, slots=True)
class _Chain:
    made: set[tuple[int, ActionKind]]
    num_stages: int
    boundary: int
    residual: int
    weight: int
    gradient: int

    def buffers(self) -> Iterable[Buffer]:
        for s in range(self.num_stages):
            yield Buffer(name=f"w{s}", origin=Origin.ARGUMENT, per_microbatch=False, stages=(s,), kept=True)
            kept = (s, ActionKind.UPDATE) not in self.made
            yield Buffer(name=f"g{s}", origin=Origin.ZEROS, per_microbatch=False, kept=kept)
            result = s == self.num_stages - 1
            yield Buffer(name=f"x{s}", kept=result)
            yield from (Buffer(name=f"{letter}{s}") for letter in ("r", "dx", "dw"))

    def program(self, s: int, kind: ActionKind) -> StageIO:
        kinds = ActionKind
        weight, gradient = Port(f"w{s}", self.weight), Port(f"g{s}", self.gradient)
        residual, half = Port(f"r{s}", self.residual), Port(f"dw{s}", self.boundary)
        into = (Port(f"x{s - 1}", self.boundary),) if s else ()
        back = (Port(f"dx{s}", self.boundary),) if s else ()
        cotangent = (Port(f"dx{s + 1}", self.boundary),) if s + 1 < self.num_stages else ()
        again, training = (s, kinds.RECOMPUTE) in self.made, (s, kinds.F) in self.made and self._trains(s)
        first = (residual,) if training and not again else ()
        reads, writes = {
            kinds.F: ((weight, *into), (Port(f"x{s}", self.boundary), *first)),
            kinds.RECOMPUTE: ((weight, *into), (residual,)),
            kinds.B: ((weight, gradient, residual, *cotangent), (gradient, *back)),
            kinds.I: ((weight, residual, *cotangent), (*back, half)),
            kinds.W: ((gradient, residual, half), (gradient,)),
            kinds.GRADSYNC: ((gradient,), (gradient,)),
            kinds.UPDATE: ((*((gradient,) if self._trains(s) else ()), weight), (weight,)),
        }[kind]
        return StageIO(stage=s, kind=kind, reads=reads, writes=writes)

    def _trains(self, s: int) -> bool:
        return (s, ActionKind.B) in self.made or (s, ActionKind.I) in self.made
