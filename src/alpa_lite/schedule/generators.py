"""Names of schedules to action tables of F, B, I and W.

All generators give every stage its microbatches in rising order, forward and backward, so that schedules which do not
split the backward sum gradients in the same order. ``p`` meshes, ``m`` microbatches, ``v`` chunks per mesh as in the papers:
GPipe (arXiv 1811.06965), 1F1B (PipeDream-Flush, arXiv 2006.09503), eager 1F1B (Alpa's overlap-friendly order, MLSys 2023,
arXiv 2211.05322), interleaved 1F1B (Megatron-LM, arXiv 2104.04473), ZB-H1 (arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from alpa_lite.errors import ScheduleError
from alpa_lite.schedule.actions import Action, ActionKind, Column

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W  # noqa: E741

Generator = Callable[[int, int, int], tuple[Column, ...]]
UserSchedule = Callable[[int, int], Sequence[Sequence[Action | str]]]


def gpipe(num_meshes: int, num_microbatches: int, num_chunks: int = 1) -> tuple[Column, ...]:
    """All forwards, then all backwards."""
    return tuple(
        tuple(Action(kind, stage, k) for kind in (F, B) for k in range(num_microbatches)) for stage in range(num_meshes)
    )


def one_f_one_b(num_meshes: int, num_microbatches: int, num_chunks: int = 1) -> tuple[Column, ...]:
    """As many forwards as there are later stages, then forward and backward in turn."""
    return tuple(tuple(_in_turn(stage, num_microbatches, num_meshes - 1 - stage, (B,))) for stage in range(num_meshes))


def eager_one_f_one_b(num_meshes: int, num_microbatches: int, num_chunks: int = 1) -> tuple[Column, ...]:
    """1F1B with twice the warm-up: one microbatch more per later stage, under which transfers hide."""
    return tuple(
        tuple(_in_turn(stage, num_microbatches, 2 * (num_meshes - 1 - stage), (B,))) for stage in range(num_meshes)
    )


def zb_h1(num_meshes: int, num_microbatches: int, num_chunks: int = 1) -> tuple[Column, ...]:
    """1F1B with split backward; stage s puts its weight halves off by s microbatches.

    A later stage has fewer microbatches in flight by warm-up; the delay fills that up to ``num_meshes`` everywhere.
    """
    columns = []
    for stage in range(num_meshes):
        column = []
        for action in _in_turn(stage, num_microbatches, num_meshes - 1 - stage, (I,)):
            column.append(action)
            if action.kind is I and action.microbatch is not None and action.microbatch >= stage:
                column.append(Action(W, stage, action.microbatch - stage))
        put_off = range(max(num_microbatches - stage, 0), num_microbatches)
        columns.append((*column, *(Action(W, stage, k) for k in put_off)))
    return tuple(columns)


def interleaved_one_f_one_b(num_meshes: int, num_microbatches: int, num_chunks: int = 1) -> tuple[Column, ...]:
    """1F1B on chunks: chunk c of mesh r is stage ``c * num_meshes + r``.

    Microbatches go through all chunks in rounds of about ``num_meshes``.

    Raises:
        ScheduleError: the microbatches are not a whole number of rounds.
    """
    rounds = max(1, num_microbatches // num_meshes)
    if num_microbatches % rounds:
        raise ScheduleError(
            f"the schedule 'interleaved-1f1b' was asked for {num_microbatches} microbatches on {num_meshes} meshes. The "
            f"microbatches are a whole number of rounds; here there are {rounds} rounds. Take "
            f"{num_microbatches // num_meshes * num_meshes} or {(num_microbatches // num_meshes + 1) * num_meshes} "
            "microbatches.",
            "microbatches",
        )
    per_round, total = num_microbatches // rounds, num_microbatches * num_chunks

    def at(kind: ActionKind, mesh: int, position: int) -> Action:
        """The ``position``-th forward or backward of a mesh."""
        round_, within = divmod(position, per_round * num_chunks)
        chunk, microbatch = divmod(within, per_round)
        chunk = chunk if kind is F else num_chunks - 1 - chunk
        return Action(kind, chunk * num_meshes + mesh, round_ * per_round + microbatch)

    columns = []
    for mesh in range(num_meshes):
        # As Megatron counts: the warm-up of the chunks before the last, and two per later mesh in the last one.
        warm_up = (num_chunks - 1) * per_round + 2 * (num_meshes - 1 - mesh)
        kinds = [kind for kind, _ in _turns(total, warm_up)]
        positions = {F: iter(range(total)), B: iter(range(total))}
        columns.append(tuple(at(kind, mesh, next(positions[kind])) for kind in kinds))
    return tuple(columns)


def inference(num_meshes: int, num_microbatches: int, num_chunks: int = 1) -> tuple[Column, ...]:
    """Forwards alone."""
    return tuple(tuple(Action(F, stage, k) for k in range(num_microbatches)) for stage in range(num_meshes))


def _turns(total: int, warm_up: int) -> Iterator[tuple[ActionKind, int]]:
    """``warm_up`` forwards, forward and backward in turn, the backwards that are left."""
    warm_up = min(warm_up, total)
    yield from ((F, k) for k in range(warm_up))
    for k in range(total - warm_up):
        yield F, warm_up + k
        yield B, k
    yield from ((B, k) for k in range(total - warm_up, total))


def _in_turn(stage: int, num_microbatches: int, warm_up: int, backward: tuple[ActionKind, ...]) -> Iterator[Action]:
    for kind, k in _turns(num_microbatches, warm_up):
        for one in (F,) if kind is F else backward:
            yield Action(one, stage, k)


GENERATORS: Mapping[str, Generator] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "eager-1f1b": eager_one_f_one_b,
        "interleaved-1f1b": interleaved_one_f_one_b,
        "zb-h1": zb_h1,
        "inference": inference,
    }
)
