"""What the sameness analysis says of producer-consumer pairs: records, and their text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What differs along some axes, mostly one.

    Attributes:
        axes: the axes.
        pattern: name of the pattern in ``patterns()``.
        text: both sides in words.
    """

    axes: tuple[str, ...]
    pattern: str
    text: str

    def __str__(self) -> str:
        return f"{', '.join(self.axes)}: {self.text} ({self.pattern})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of one pair.

    Attributes:
        op: path of the op between the two tensors (``Program.walk``).
        primitive: its name.
        operand, result: positions among the op's inputs and outputs.
        producer, consumer: value ids of that operand and that result.
        differences: none if the two are the same.
        source: the user's file and line.
    """

    op: str
    primitive: str
    operand: int
    result: int
    producer: int
    consumer: int
    differences: tuple[Difference, ...]
    source: str = ""

    @property
    def same(self) -> bool:
        return not self.differences

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes on which the two differ."""
        return tuple(dict.fromkeys(axis for difference in self.differences for axis in difference.axes))

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(difference.pattern for difference in self.differences)

    @property
    def reason(self) -> str:
        return "; ".join(map(str, self.differences)) or "proven from the op's sharding rule"

    def __str__(self) -> str:
        head = f"{self.op} {self.primitive} %{self.producer} -> %{self.consumer}"
        return f"{head}: {'same' if self.same else 'resharding'}: {self.reason}" + (
            f"  at {self.source}" if self.source else ""
        )


@dataclass(frozen=True, slots=True)
class Verdicts:
    """All verdicts of a program, in the order of its ops; prints those that are a resharding."""

    pairs: tuple[Verdict, ...]

    @property
    def resharding(self) -> tuple[Verdict, ...]:
        return tuple(pair for pair in self.pairs if not pair.same)

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.pairs)

    def __getitem__(self, index: int) -> Verdict:
        return self.pairs[index]

    def __str__(self) -> str:
        found = self.resharding
        return "\n".join([f"{len(found)} of {len(self.pairs)} pairs need resharding", *map(str, found)]) + "\n"
