"""Parameters that lie on stages -> pins of the layers, or ops, that read them.

A layer lies where its parameters lie. A parameter that several layers read (a table of embeddings that is also the head) lies
with one of them and is sent to the others: it pins those of them that may be on its stage, given what all others say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alpa_lite.trace.stage_pin import StagePin


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafReads:
    """A parameter, the stage on which it lies, and the places (layers, or ops) that read it, rising."""

    path: str
    stage: int
    places: tuple[int, ...]


def pins_of_leaves(reads: Sequence[LeafReads]) -> list[StagePin]:
    """The pins; those of parameters with one reader hold whatever the others say."""
    found = [_pin(leaf, leaf.places[0]) for leaf in reads if len(leaf.places) == 1]
    several = sorted(
        (leaf for leaf in reads if len(leaf.places) > 1), key=lambda leaf: leaf.places[-1] - leaf.places[0]
    )
    for leaf in several:
        found += [_pin(leaf, place) for place in leaf.places if _fits(found, place, leaf.stage)]
    return list(dict.fromkeys(found))


def _pin(leaf: LeafReads, place: int) -> StagePin:
    return StagePin(place=place, stage=leaf.stage, source="", leaf=leaf.path)


def _fits(pins: Sequence[StagePin], place: int, stage: int) -> bool:
    """Whether stages still rise with places."""
    before = max((pin.stage for pin in pins if pin.place <= place), default=stage)
    behind = min((pin.stage for pin in pins if pin.place >= place), default=stage)
    return before <= stage <= behind
