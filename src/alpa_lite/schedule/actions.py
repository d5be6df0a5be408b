"""The action table: which mesh does what in which order. The first of the two levels of a schedule; no transfers yet."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from alpa_lite.errors import ScheduleError


class ActionKind(StrEnum):
    """What is done to a stage.

    Per microbatch: F forward; B whole backward; I and W its halves, for the inputs and for the weights; RECOMPUTE makes
    again what the backward reads. Once per step: GRADSYNC adds the gradients of the replicas, UPDATE makes the new state.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 (the letter that the papers use)
    W = "W"
    RECOMPUTE = "RECOMPUTE"
    GRADSYNC = "GRADSYNC"
    UPDATE = "UPDATE"

    # Actions are dictionary keys by the ten thousand; the hash of an enum is a call in Python.
    __hash__ = str.__hash__

    @property
    def per_microbatch(self) -> bool:
        return self not in PER_STEP

    @property
    def letter(self) -> str:
        """One letter for pictures of text."""
        return self.value[0]


PER_STEP = (ActionKind.GRADSYNC, ActionKind.UPDATE)

_TEXT = re.compile(r"(\d+)(F|B|I|W|RECOMPUTE|GRADSYNC|UPDATE)(\d*)")


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work on one stage.

    Attributes:
        kind: what is done.
        stage: index of the stage; under an interleaved schedule every chunk is a stage and a mesh holds several.
        microbatch: index of the microbatch; None for what is done once per step.

    Example:
        >>> str(Action(ActionKind.F, 2, 5))
        '2F5'
    """

    kind: ActionKind
    stage: int
    microbatch: int | None = None

    def __post_init__(self) -> None:
        if self.stage < 0 or (self.microbatch or 0) < 0:
            raise ValueError(f"stages and microbatches are counted from 0, got {self.stage} and {self.microbatch}")
        if (self.microbatch is None) != (self.kind in PER_STEP):
            raise ValueError(f"{self.kind} is done once per {'microbatch' if self.kind.per_microbatch else 'step'}")

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads ``str(action)``, which is also how PyTorch's tables write F, B, I and W.

        Raises:
            ValueError: another form.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no action")
        stage, kind, microbatch = match.groups()
        return cls(ActionKind(kind), int(stage), int(microbatch) if microbatch else None)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


Column = tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """An action table.

    Attributes:
        name: of the generator, e.g. "1f1b".
        num_stages: stages of all meshes together.
        num_microbatches: microbatches of one step.
        columns: one ordered list of actions per mesh.
    """

    name: str
    num_stages: int
    num_microbatches: int
    columns: tuple[Column, ...]

    @property
    def num_meshes(self) -> int:
        return len(self.columns)

    @property
    def is_training(self) -> bool:
        """Whether anything is differentiated."""
        backward = (ActionKind.B, ActionKind.I, ActionKind.W)
        return any(action.kind in backward for column in self.columns for action in column)

    @property
    def split_stages(self) -> frozenset[int]:
        """The stages that have a backward in halves."""
        return frozenset(action.stage for column in self.columns for action in column if action.kind is ActionKind.I)

    def mesh_of_stage(self) -> tuple[int, ...]:
        """The mesh of every stage.

        Raises:
            ScheduleError: a stage is on no mesh or on two.
        """
        found: dict[int, int] = {}
        for mesh, column in enumerate(self.columns):
            for action in column:
                if found.setdefault(action.stage, mesh) != mesh:
                    raise ScheduleError(
                        f"the schedule {self.name!r} has actions of stage {action.stage} on mesh {found[action.stage]} and on "
                        f"mesh {mesh} ({action}). All actions of a stage are on one mesh, where its weights are. Move them "
                        "to one column, or give the second part a stage index of its own.",
                        "placement",
                    )
        for stage in range(self.num_stages):
            if stage not in found:
                raise ScheduleError(
                    f"the schedule {self.name!r} has no action of stage {stage}. All {self.num_stages} stages, counted from "
                    f"0, are on one of its {self.num_meshes} meshes. Add the stage's actions to a column, or make the "
                    "schedule for fewer stages.",
                    "missing",
                )
        return tuple(found[stage] for stage in range(self.num_stages))

    def __str__(self) -> str:
        from alpa_lite.schedule.text import schedule_text

        return schedule_text(self)


def mesh_words(schedule: Schedule) -> str:
    """``"4 stages on 2 meshes, 8 microbatches"``."""
    counts = ((schedule.num_stages, "stage"), (schedule.num_meshes, "mesh"), (schedule.num_microbatches, "microbatch"))
    stages, meshes, microbatches = (f"{n} {word}{'' if n == 1 else _plural(word)}" for n, word in counts)
    return f"{stages} on {meshes}, {microbatches}"


def _plural(word: str) -> str:
    return "es" if word.endswith(("sh", "ch")) else "s"
