"""The changes of layout between a producer and its consumer that the analysis knows, one record each.

``pattern_of`` looks a change up in the records, and the table that ``patterns()`` prints is made of the same records, so
that what is documented is what is done. What is not supported is listed by name as well; it raises ``UnsupportedPattern``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from alpa_lite.errors import UnsupportedPattern


class Side(StrEnum):
    """What one mesh axis does to the operand: as it is, or as the result needs it."""

    WHOLE = "whole"
    SPLIT = "split"
    SUMMED = "split on a dim that the op reduces"
    PARTIAL = "partial sums"
    UNMAPPED = "split on an unmapped dim"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How the operand lies along one axis, and how the result of the op needs it.

    Attributes:
        have, need: of the operand. ``need`` is ``UNMAPPED`` where the result is split on a dim that the op cannot split.
        result_split: the axis splits the result.
        same_dim: both split the same dims of the operand.
        swapped: another axis goes the opposite way.
        other_mesh: the two tensors lie on different devices; then the change is about all axes together.
        same_tiles: (other mesh) both cut the operand into the same tiles.
    """

    have: Side
    need: Side
    result_split: bool = False
    same_dim: bool = False
    swapped: bool = False
    other_mesh: bool = False
    same_tiles: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A pair that shows a pattern along axis x: an op, the specs of its operand and of its result (``patterns_example``)."""

    op: str
    operand: str
    result: str

    def __str__(self) -> str:
        return f"{self.op}: {self.operand} -> {self.result}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One supported pattern; a change is of it if all that is not None agrees.

    Attributes:
        name: its name in verdicts.
        have, need: the sides of the operand.
        conversion: what has to run.
        example: a pair of that pattern on a mesh (x=2, y=2); for another mesh, the result lies on a second one.
        result_split, same_dim, swapped, other_mesh, same_tiles: as in ``Change``.
    """

    name: str
    have: tuple[Side, ...]
    need: tuple[Side, ...]
    conversion: str
    example: Example
    result_split: bool | None = None
    same_dim: bool | None = None
    swapped: bool | None = None
    other_mesh: bool = False
    same_tiles: bool | None = None

    def applies(self, change: Change) -> bool:
        flags = ("result_split", "same_dim", "swapped", "other_mesh", "same_tiles")
        return (
            change.have in self.have
            and change.need in self.need
            and all(getattr(self, flag) in (None, getattr(change, flag)) for flag in flags)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A pattern that is not supported: its name in the error, what it is, and what to do instead."""

    name: str
    what: str
    instead: str


_REACHED = (Side.WHOLE, Side.SPLIT, Side.UNMAPPED)
_CUT = (Side.SPLIT, Side.UNMAPPED)

SUPPORTED: tuple[Pattern, ...] = (
    Pattern(
        name="slice",
        have=(Side.WHOLE,),
        need=_CUT,
        conversion="every device keeps its slice; nothing is sent",
        example=Example(op="identity", operand="[_,_]", result="[x,_]"),
    ),
    Pattern(
        name="all-gather",
        have=(Side.SPLIT,),
        need=(Side.WHOLE,),
        conversion="all-gather",
        example=Example(op="identity", operand="[x,_]", result="[_,_]"),
    ),
    Pattern(
        name="all-to-all",
        have=(Side.SPLIT,),
        need=(Side.SPLIT,),
        same_dim=False,
        swapped=False,
        conversion="all-to-all from dim to dim",
        example=Example(op="identity", operand="[x,_]", result="[_,x]"),
    ),
    Pattern(
        name="axis order",
        have=(Side.SPLIT,),
        need=(Side.SPLIT,),
        same_dim=True,
        conversion="collective-permute; with further changes a sequence",
        example=Example(op="identity", operand="[x.y,_]", result="[y.x,_]"),
    ),
    Pattern(
        name="axis swap",
        have=(Side.SPLIT,),
        need=(Side.SPLIT,),
        same_dim=False,
        swapped=True,
        conversion="collective-permute; a sequence where the axes differ in size",
        example=Example(op="identity", operand="[x,y]", result="[y,x]"),
    ),
    Pattern(
        name="all-reduce",
        have=(Side.PARTIAL,),
        need=_REACHED,
        result_split=False,
        conversion="all-reduce",
        example=Example(op="identity", operand="[_,_]+{x}", result="[_,_]"),
    ),
    Pattern(
        name="reduce-scatter",
        have=(Side.PARTIAL,),
        need=_REACHED,
        result_split=True,
        conversion="reduce-scatter",
        example=Example(op="identity", operand="[_,_]+{x}", result="[x,_]"),
    ),
    Pattern(
        name="reduction to whole",
        have=(Side.SUMMED,),
        need=_REACHED,
        result_split=False,
        conversion="the op on its tiles, then all-reduce (or all-gather before it)",
        example=Example(op="sum", operand="[x,_]", result="[_]"),
    ),
    Pattern(
        name="reduction to split",
        have=(Side.SUMMED,),
        need=_REACHED,
        result_split=True,
        conversion="the op on its tiles, then reduce-scatter (or all-to-all before it)",
        example=Example(op="sum", operand="[x,_]", result="[x]"),
    ),
    Pattern(
        name="unmapped dim",
        have=(Side.UNMAPPED,),
        need=_REACHED,
        conversion="all-gather before the op",
        example=Example(op="slice", operand="[x,_]", result="[_,_]"),
    ),
    Pattern(
        name="to an unmapped dim",
        have=(Side.SPLIT,),
        need=(Side.UNMAPPED,),
        conversion="all-gather before the op, slice after it",
        example=Example(op="slice", operand="[_,x]", result="[x,_]"),
    ),
    Pattern(
        name="broadcast to another mesh",
        have=(Side.WHOLE,),
        need=(Side.WHOLE,),
        other_mesh=True,
        conversion="one device sends to every device of the other mesh",
        example=Example(op="identity", operand="[_,_]", result="[_,_]"),
    ),
    Pattern(
        name="scatter to another mesh",
        have=(Side.WHOLE,),
        need=_CUT,
        other_mesh=True,
        conversion="every device of the other mesh gets its tile from a device that holds all",
        example=Example(op="identity", operand="[_,_]", result="[x,_]"),
    ),
    Pattern(
        name="gather to another mesh",
        have=_CUT,
        need=(Side.WHOLE,),
        other_mesh=True,
        conversion="every device of the other mesh gets all tiles",
        example=Example(op="identity", operand="[x,_]", result="[_,_]"),
    ),
    Pattern(
        name="send tile by tile",
        have=(Side.SPLIT,),
        need=(Side.SPLIT,),
        other_mesh=True,
        same_tiles=True,
        conversion="send and receive between the devices that hold the same tile",
        example=Example(op="identity", operand="[x,_]", result="[y,_]"),
    ),
    Pattern(
        name="retile to another mesh",
        have=_CUT,
        need=_CUT,
        other_mesh=True,
        same_tiles=False,
        conversion="send and receive the common parts of source and target tiles",
        example=Example(op="identity", operand="[x,_]", result="[_,x]"),
    ),
    Pattern(
        name="join, then another mesh",
        have=(Side.SUMMED, Side.PARTIAL),
        need=_REACHED,
        other_mesh=True,
        conversion="all-reduce or reduce-scatter on the producer's mesh, then as above",
        example=Example(op="sum", operand="[x,_]", result="[_]"),
    ),
)

REFUSED: tuple[Refused, ...] = (
    Refused(
        name="whole to partial sums",
        what="an op would have to make partial sums of an operand that holds none",
        instead="give the result a spec without '+{...}', or make all summands partial",
    ),
    Refused(
        name="partial sums through a non-linear op",
        what="the result of an op that is neither a sum over the axis nor linear holds partial sums",
        instead="give the result a spec without '+{...}'",
    ),
    Refused(
        name="partial sums on another mesh",
        what="a result holds partial sums along an axis of another mesh than its operand's",
        instead="join the sums on one mesh: give the result a spec without '+{...}'",
    ),
    Refused(
        name="tile across factors",
        what="an op splits or merges dims at a place where tiles do not begin",
        instead="split that dim over an axis whose size divides the outer part, or leave it whole",
    ),
    Refused(
        name="uneven tiles",
        what="a dim's size does not divide over its axes",
        instead="split another dim, or leave this one whole",
    ),
    Refused(
        name="control flow",
        what="an op runs programs of its own (scan, while, cond)",
        instead="analyse its `bodies`, each a program with specs of its own",
    ),
    Refused(
        name="shard_map of another mesh",
        what="a jax.shard_map was written for another mesh than the one its operand lies on",
        instead="give the specs on the mesh of the shard_map",
    ),
)


# The few patterns that a change can be of, by its sides: looking through all of them takes a third of the analysis.
_BY_SIDES = MappingProxyType(
    {
        (have, need): tuple(p for p in SUPPORTED if have in p.have and need in p.need)
        for have, need in itertools.product(Side, Side)
    }
)


def _needed(pattern: Pattern) -> str:
    """The side that the result needs, with the conditions that tell it from other patterns."""
    if pattern.result_split is not None:
        return "split" if pattern.result_split else "whole"
    if pattern.swapped:
        return "split on another dim, whose axis takes its place"
    if pattern.same_dim is not None:
        return "split on the same dim, in another order" if pattern.same_dim else "split on another dim"
    if pattern.same_tiles is not None:
        return "split into the same tiles" if pattern.same_tiles else "split into other tiles"
    return "any" if pattern.need == _REACHED else " or ".join(pattern.need)


def pattern_of(change: Change) -> Pattern:
    """The one pattern that a change is of (no change is of two)."""
    offers = _BY_SIDES.get((change.have, change.need), ())
    found = next((pattern for pattern in offers if pattern.applies(change)), None)
    assert found is not None, f"no pattern for {change}"
    return found


def unsupported(name: str, given: str, where: str) -> UnsupportedPattern:
    """The error for a pattern of ``REFUSED``.

    Args:
        name: of the pattern.
        given: what the user gave, a whole sentence without its full stop.
        where: op path, primitive and source line.
    """
    refused = next(r for r in REFUSED if r.name == name)
    return UnsupportedPattern(
        f"{given}. That is the pattern {name!r}: {refused.what}, which the sameness analysis does not support. "
        f"At {where}. {refused.instead[0].upper()}{refused.instead[1:]}; `al.analysis.patterns()` lists what is supported.",
        pattern=name,
    )


@dataclass(frozen=True, slots=True)
class Patterns:
    """What ``patterns()`` returns; prints as a table, ``markdown()`` for a page."""

    supported: tuple[Pattern, ...] = SUPPORTED
    refused: tuple[Refused, ...] = REFUSED

    def _tables(self, quote: str = "") -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        rows: list[tuple[str, ...]] = [("pattern", "operand is", "result needs it", "conversion", "example")]
        for p in self.supported:
            rows.append((p.name, " or ".join(p.have), _needed(p), p.conversion, f"{quote}{p.example}{quote}"))
        refused: list[tuple[str, ...]] = [("refused pattern", "what it is", "instead")]
        refused += [(r.name, r.what, r.instead) for r in self.refused]
        return rows, refused

    def markdown(self) -> str:
        """Both tables in Markdown."""
        parts = []
        for rows in self._tables(quote="`"):  # else underscores would be emphasis
            lines = ["| " + " | ".join(row) + " |" for row in rows]
            parts.append("\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]))
        return "\n\n".join(parts) + "\n"

    def __str__(self) -> str:
        parts = []
        for rows in self._tables():
            widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
            lines = ["  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)).rstrip() for row in rows]
            parts.append("\n".join(lines))
        return "\n\n".join(parts) + "\n"


def patterns() -> Patterns:
    """The patterns that the sameness analysis supports, and those that it refuses.

    Example:
        >>> print(al.analysis.patterns())
    """
    return Patterns()
