"""Repeated layers read as one row: paths that differ only in numbers and share everything else are joined."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PathGroup(Generic[K]):
    """Paths with equal keys.

    Attributes:
        label: "0/params/layers_*/kernel" if the numbers cover all leaves of that form, "layers_{0-2,7}" otherwise.
        key: what they share.
        members: positions in the sequence that was grouped.
    """

    label: str
    key: K
    members: tuple[int, ...]


def group_paths(paths: Sequence[str], keys: Iterable[K]) -> tuple[PathGroup[K], ...]:
    """Groups paths by form (the path without its numbers) and key, in order of first member."""
    groups: dict[tuple[str, K], list[int]] = defaultdict(list)
    totals: dict[str, int] = defaultdict(int)
    for position, (path, key) in enumerate(zip(paths, keys, strict=True)):
        form = _form(path)
        groups[form, key].append(position)
        totals[form] += 1
    return tuple(
        PathGroup(label=_label([paths[m] for m in members], totals[form]), key=key, members=tuple(members))
        for (form, key), members in groups.items()
    )


def _form(path: str) -> str:
    # The first segment is the argument: 0/w and 1/w are never one row.
    first, slash, rest = path.partition("/")
    return first + slash + _NUMBER.sub("*", rest)


def _label(members: list[str], total: int) -> str:
    first, slash, _ = members[0].partition("/")
    rests = [path.partition("/")[2] for path in members]
    numbers = list(zip(*(map(int, _NUMBER.findall(rest)) for rest in rests), strict=True))
    distinct = [sorted(set(column)) for column in numbers]
    complete = len(members) == total
    # Braces name exactly the members only if the members are all combinations of the numbers.
    exact = prod(map(len, distinct)) == len(members)

    def text(column: list[int]) -> str:
        if len(column) == 1:
            return str(column[0])
        return "*" if complete or not exact else "{" + _ranges(column) + "}"

    columns = iter(distinct)
    label = first + slash + _NUMBER.sub(lambda _: text(next(columns)), rests[0])
    return label if complete or exact else f"{label} ({len(members)} of {total})"


def _ranges(numbers: list[int]) -> str:
    """``[0, 1, 2, 7]`` is "0-2,7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
