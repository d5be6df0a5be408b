"""Costs of nodes and edges of which many are equal, as repeated layers have them: the different ones, and who has which."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_COPIED = 32  # entries that may be copied to read one


class Edge(NamedTuple):
    """Cost of a pair of choices. One array object may be shared by many edges, which makes presolve fast.

    Attributes:
        u, v: two different nodes; parallel edges are summed.
        costs: float64[k_u, k_v]; ``inf`` = forbidden.
    """

    u: int
    v: int
    costs: Array


@dataclass(frozen=True, slots=True, eq=False)
class Repeated(Sequence[Array]):
    """A sequence of arrays, of which ``numbers[i]`` of ``different`` is number i."""

    numbers: Array
    different: list[Array]
    _known: dict[int, tuple[Array, Array, Array | None]] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Array]:
        return map(self.different.__getitem__, self.numbers.tolist())

    @overload
    def __getitem__(self, place: int) -> Array: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Array]: ...
    def __getitem__(self, place: int | slice) -> Array | Sequence[Array]:
        if isinstance(place, slice):
            return Repeated(self.numbers[place], self.different)
        return self.different[self.numbers[place]]

    def changed(self, change: Callable[[Array], Array]) -> Repeated:
        """The same with other arrays."""
        return Repeated(self.numbers, list(map(change, self.different)))

    def shapes(self, dims: int) -> Array:
        """int64[arrays, dims]."""
        return self._laid_out(dims)[0][self.numbers]

    def _laid_out(self, dims: int) -> tuple[Array, Array, Array | None]:
        """Of the different arrays: shapes, where each begins with all behind one another, and these where they may be copied."""
        if dims not in self._known:
            shapes = np.array([a.shape for a in self.different], dtype=np.int64).reshape(-1, dims)
            sizes, kinds, flat = shapes.prod(axis=1), {a.dtype for a in self.different}, None
            if sizes.sum() <= _COPIED * len(self) and len(kinds) == 1:
                flat = np.frombuffer(b"".join([a.tobytes() for a in self.different]), kinds.pop())
            self._known[dims] = shapes, np.cumsum(sizes) - sizes, flat
        return self._known[dims]

    def entries(self, *picks: Array) -> list[Any]:
        """Of every array one entry, named by a number per dim that is not negative.

        Raises:
            IndexError: there is no such entry.
        """
        shapes, begin, flat = self._laid_out(len(picks))
        if flat is None:
            return [a.item(*at) for a, *at in zip(self, *(x.tolist() for x in picks), strict=True)]
        shapes, at = shapes[self.numbers], np.stack(picks, axis=1)
        if (at >= shapes).any():
            raise IndexError("an entry is out of range")
        place = at[:, 0] if len(picks) == 1 else at[:, 0] * shapes[:, 1] + at[:, 1]
        found: list[Any] = flat[begin[self.numbers] + place].tolist()
        return found


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedEdges(Sequence[Edge]):
    """Edges from ``u[i]`` to ``v[i]`` at the cost of ``costs[i]``."""

    u: Array
    v: Array
    costs: Repeated

    def __len__(self) -> int:
        return len(self.u)

    def __iter__(self) -> Iterator[Edge]:
        return map(Edge._make, zip(self.u.tolist(), self.v.tolist(), self.costs, strict=True))

    @overload
    def __getitem__(self, place: int) -> Edge: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Edge]: ...
    def __getitem__(self, place: int | slice) -> Edge | Sequence[Edge]:
        if isinstance(place, slice):
            return RepeatedEdges(
                self.u[place], self.v[place], Repeated(self.costs.numbers[place], self.costs.different)
            )
        return Edge(int(self.u[place]), int(self.v[place]), self.costs[place])

    def changed(self, change: Callable[[Array], Array]) -> RepeatedEdges:
        """The same with other costs."""
        return RepeatedEdges(self.u, self.v, self.costs.changed(change))


def repeated(arrays: Sequence[Array]) -> Repeated:
    """The same arrays, told by identity."""
    if isinstance(arrays, Repeated):
        return arrays
    known: dict[int, int] = {}
    different: list[Array] = []
    numbers = []
    for array in arrays:
        number = known.setdefault(id(array), len(different))
        if number == len(different):
            different.append(array)
        numbers.append(number)
    return Repeated(np.array(numbers, dtype=np.int64), different)


def repeated_edges(edges: Sequence[Edge]) -> RepeatedEdges:
    """The same edges, their matrices told by identity."""
    if isinstance(edges, RepeatedEdges):
        return edges
    u, v = (np.array([edge[end] for edge in edges], dtype=np.int64) for end in (0, 1))
    return RepeatedEdges(u, v, repeated([edge.costs for edge in edges]))
