"""Lower bounds by message passing: sequential reweighted sweeps over the nodes (Kolmogorov's SRMP; on pairs, TRW-S).

A message m[e, i] moves cost from edge e to its end point i. For any messages

    bound = constant + sum_i min_x (c_i + sum_e m[e, i])(x) + sum_(i,j) min_xy (C - m[e, i] - m[e, j])(x, y)

is a lower bound (``exact_bound``); the sweeps only look for good messages. The gap between a known answer and the bound
then excludes states and pairs (``excluded``).

A sweep goes from group to group (``tie.py``): copies of one node are never neighbours, so all are done at once. Where that is
faster it goes by levels of many groups (``level_sweeps.py``); the first sweeps then add up in the order of the groups, so that
they give the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from alpa_lite.intraop.core import Core
from alpa_lite.intraop.level_sweeps import KnownLevels, LevelSweeps, level_sweeps, one_by_one_alike
from alpa_lite.intraop.problem import Array
from alpa_lite.intraop.tie import Tie
from alpa_lite.intraop.visits import Edges, End, Slots, Visit, end_of, least_of, slots_of, starts_of, visit_of

_IN_ORDER = 6  # from which sweep to either side on levels add up in the order that is quickest


# Of one group: (costs, own slots, other group, its slots) of edges there, and (own slots, messages) of edges there.
_Around = tuple[list[tuple[Array, Slots, int, Slots]], list[tuple[Slots, Array]]]


class Messages:
    """Messages of one core, changed in place by the sweeps.

    Attributes:
        tied: groups of the core's nodes and edges.
        unary: per group [copies, states], costs without messages (with memory prices, if any).
    """

    __slots__ = (
        "_alike",
        "_around",
        "_before",
        "_count",
        "_edges",
        "_known",
        "_levels",
        "_values",
        "_visits",
        "tied",
        "unary",
    )

    def __init__(
        self, tied: Tie, values: Array, unary: list[Array], edges: list[Edges], known: KnownLevels | None = None
    ) -> None:
        """``unary``, one behind the other, and all messages are parts of ``values``, whose last entry is 0.

        ``known``: levels of a core that may have the same shape.
        """
        self.tied = tied
        self.unary = unary
        self._values, self._edges = values, edges
        self._count = 0  # of sweeps
        self._before: Array | None = None  # all messages when they were hastened last
        self._alike = one_by_one_alike(unary, edges)
        self._levels: LevelSweeps | None = None
        self._known = known
        # By direction, each made when it is first needed.
        self._visits: dict[bool, list[Visit]] = {}
        self._around: dict[bool, list[_Around]] = {}

    def _visit_all(self) -> dict[bool, list[Visit]]:
        """What sweeps from group to group do; True is forward."""
        if not self._visits:
            unary = self.unary
            earlier: list[list[End]] = [[] for _ in unary]
            later: list[list[End]] = [[] for _ in unary]
            rooms: dict[tuple[int, ...], Array] = {}
            for e in self._edges:
                copies = len(unary[e.left]), len(unary[e.right])
                left, right = (e.to_left, e.left_at), (e.to_right, e.right_at)
                later[e.left].append(end_of(e.right, e.left_slots, copies[0], e.flipped, left, right, rooms))
                earlier[e.right].append(end_of(e.left, e.right_slots, copies[1], e.costs, right, left, rooms))
            starts = starts_of(unary)
            groups = range(len(unary))
            self._visits[True] = [visit_of(g, starts[g], unary[g], earlier[g], later[g]) for g in groups]
            self._visits[False] = [visit_of(g, starts[g], unary[g], later[g], earlier[g]) for g in reversed(groups)]
        return self._visits

    def _around_of(self, forward: bool) -> list[_Around]:
        """Per group, its edges to groups that are chosen before, and to those that come."""
        if forward not in self._around:
            found: list[_Around] = [([], []) for _ in self.unary]
            for e in self._edges:
                before = (
                    (e.costs, e.right_slots, e.left, e.left_slots),
                    (e.flipped, e.left_slots, e.right, e.right_slots),
                )
                ahead = (e.left_slots, e.to_left), (e.right_slots, e.to_right)
                own, other = (e.right, e.left) if forward else (e.left, e.right)
                found[own][0].append(before[0 if forward else 1])
                found[other][1].append(ahead[0 if forward else 1])
            self._around[forward] = found
        return self._around[forward]

    @classmethod
    def zero(
        cls,
        core: Core,
        unary: Sequence[Array],
        costs: Sequence[Array],
        tied: Tie,
        known: KnownLevels | None = None,
    ) -> Messages:
        """Messages that move nothing, on finite costs of the core's nodes and edges. ``known``: as of the class."""
        sizes = [len(members) * sum(costs[members[0]].shape) for members in tied.edge_members]
        values = np.zeros(sum(map(len, unary)) + sum(sizes) + 1)  # the last one stays 0
        used = 0

        def taken(rows: int, columns: int) -> Array:
            """The next part of the values."""
            nonlocal used
            used += rows * columns
            return values[used - rows * columns : used].reshape(rows, columns)

        stacked = [taken(len(members), len(unary[members[0]])) for members in tied.members]
        edges = []
        slot, alone = tied.slot, slice(0, 1)
        transposed: dict[int, Array] = {}
        for (left, right), flipped, members in zip(tied.ends, tied.flipped, tied.edge_members, strict=True):
            low, high = (core.right, core.left) if flipped else (core.left, core.right)
            matrix = np.ascontiguousarray(costs[members[0]])
            if id(matrix) not in transposed:
                transposed[id(matrix)] = np.ascontiguousarray(matrix.T)
            turned = transposed[id(matrix)]
            if flipped:
                matrix, turned = turned, matrix
            at, count = used, len(members)
            to_left, to_right = taken(count, matrix.shape[0]), taken(count, matrix.shape[1])
            left_slots = alone if tied.is_trivial else slots_of([slot[low[e]] for e in members])
            right_slots = alone if tied.is_trivial else slots_of([slot[high[e]] for e in members])
            right_at = at + to_left.size
            edges.append(Edges(left, right, left_slots, right_slots, matrix, turned, to_left, to_right, at, right_at))
        found = cls(tied, values, stacked, edges, known)
        found.set_unary(unary)
        return found

    def start_from(self, inner: Messages) -> None:
        """Gives every copy its share of the messages of the tied core, one edge of which stands for one group here."""
        for own, whole in zip(self._edges, inner._edges, strict=True):
            count = len(own.to_left)
            own.to_left[...] = whole.to_left / count
            own.to_right[...] = whole.to_right / count

    def set_unary(self, unary: Sequence[Array]) -> None:
        """Replaces the costs of the core's nodes; the messages stay."""
        costs = [unary[i] for members in self.tied.members for i in members]
        if costs:  # one behind the other, as they lie there
            np.concatenate(costs, out=self._values[: sum(map(len, costs))])

    def hasten(self, share: float) -> None:
        """Moves every message on by a share of what it has changed since this was last called (Polyak's heavy ball).

        Sweeps go on from any messages. From these they bring the bound of a thin core as far in half the number; it may fall
        now and then.
        """
        messages = self._values[sum(u.size for u in self.unary) : -1]
        now = messages.copy()
        if self._before is not None:
            messages += share * (now - self._before)
        self._before = now

    def sweep(self) -> float:
        """Forward and back; returns the bound (without constant)."""
        self._sweep(forward=True, bound=False)
        return self.backward()

    def forward(self) -> float:
        """Sweeps from first to last group; returns the bound."""
        return self._sweep(forward=True)

    def backward(self) -> float:
        """As ``forward``, from last to first group."""
        return self._sweep(forward=False)

    def _sweep(self, *, forward: bool, bound: bool = True) -> float:
        self._count += 1
        early = self._count < _IN_ORDER
        if (self._count == 1 and self._alike) or self._count == _IN_ORDER:
            self._levels = self._levels or level_sweeps(self._values, self.unary, self._edges, self._known)
        if self._levels is not None:
            return self._levels.sweep(forward=forward, in_order=early, bound=bound)
        visits = self._visit_all()[forward]
        total = 0.0
        for visit in visits:
            theta = self.unary[visit.group].copy()
            for end in visit.behind:
                if end.room is None:
                    end.heard[...] = least_of(end.costs, end.sent)
                else:
                    matrix, sent, scratch, heard = end.room
                    _subtract(matrix, sent, scratch)
                    _minimum(scratch, 0, None, heard)
                if end.slots is None:
                    _add(theta, end.heard, theta)
                else:
                    _add_rows(theta, end.slots, end.heard)
            for end in visit.ahead:
                if end.slots is None:
                    _add(theta, end.heard, theta)
                else:
                    _add_rows(theta, end.slots, end.heard)
            if visit.ahead:
                part = theta / visit.most
                for end in visit.ahead:
                    _subtract(end.heard, part if end.slots is None else part[end.slots], end.heard)
            if bound and visit.stays is not None:
                least = _minimum(theta, 1)
                total += float(least[0] * visit.stays[0] if len(least) == 1 else (least * visit.stays).sum())
        return total

    def pick(self, *, forward: bool = True) -> list[int]:
        """A choice, group by group: what the chosen nodes cost, and what the messages say of those to come.

        Messages are best against the direction of the last sweep.
        """
        if self._levels is not None and self._alike:
            found, first = self._levels.pick(forward=forward)
            chosen: list[int] = found[first[self.tied.group] + self.tied.slot].tolist()
            return chosen
        picks: list[Array] = [np.zeros(0)] * len(self.unary)
        around = self._around_of(forward)
        for group in range(len(around)) if forward else range(len(around) - 1, -1, -1):
            seen = self.unary[group].copy()
            before, ahead = around[group]
            for costs, slots, other, other_slots in before:
                _add_rows(seen, slots, costs[picks[other][other_slots]])
            for slots, heard in ahead:
                _add_rows(seen, slots, heard)
            picks[group] = seen.argmin(1)
        return [int(picks[g][s]) for g, s in zip(self.tied.group, self.tied.slot, strict=True)]

    def node_rests(self) -> list[Array]:
        """Costs of the core's nodes with all messages in."""
        rests = [u.copy() for u in self.unary]
        for e in self._edges:
            _add_rows(rests[e.left], e.left_slots, e.to_left)
            _add_rows(rests[e.right], e.right_slots, e.to_right)
        return [rests[g][s] for g, s in zip(self.tied.group, self.tied.slot, strict=True)]

    def edge_rests(self) -> list[Array]:
        """The matrices of the core's edges with their messages out."""
        groups = [e.costs - e.to_left[:, :, None] - e.to_right[:, None, :] for e in self._edges]
        turned = [g.transpose(0, 2, 1) if flip else g for g, flip in zip(groups, self.tied.flipped, strict=True)]
        return [turned[g][s] for g, s in zip(self.tied.edge_group, self.tied.edge_slot, strict=True)]

    def exact_bound(self) -> float:
        """The bound as the module docstring states it, without constant."""
        return sum(float(r.min()) for r in (*self.node_rests(), *self.edge_rests()))

    def over(self, core: Core) -> tuple[float, list[Array]]:
        """The bound, without constant, and per state of every node how much more any choice with it costs at least.

        A state costs at least its rest over the smallest rest of its node, plus on every edge the smallest rest in its
        row over the smallest of the edge.
        """
        if self._levels is not None:
            bound, flat = self._levels.over()
            starts = starts_of(self.unary)
            groups = [flat[s : s + u.size].reshape(u.shape) for s, u in zip(starts, self.unary, strict=True)]
            return bound, [groups[g][s] for g, s in zip(self.tied.group, self.tied.slot, strict=True)]
        nodes, edges = self.node_rests(), self.edge_rests()
        over = [rest - rest.min() for rest in nodes]
        bound = sum(float(rest.min()) for rest in (*nodes, *edges))
        for rest, a, b in zip(edges, core.left, core.right, strict=True):
            least = rest.min()
            over[a] += rest.min(1) - least
            over[b] += rest.min(0) - least
        return bound, over

    def excluded(self, core: Core, slack: float) -> tuple[list[Array], dict[int, Array]]:
        """What no choice within ``slack`` of the bound contains: per node a mask of states, per edge a mask of pairs.

        States as ``over`` says. Edges without such pairs are left out of the dictionary.
        """
        extra = [r - r.min() for r in self.node_rests()]
        edges = [rest - rest.min() for rest in self.edge_rests()]
        _, over = self.over(core)
        pairs = {}
        for e, (a, b) in enumerate(zip(core.left, core.right, strict=True)):
            mask = (edges[e] + extra[a][:, None] + extra[b] > slack) & np.isfinite(core.costs[e])
            if mask.any():
                pairs[e] = mask
        return [x > slack for x in over], pairs


# The arrays here are small, and there are thousands of them in every sweep: what counts is the number of calls of numpy, so
# reductions are called without the methods around them, and rows that stand alone are not indexed.
_minimum: Any = np.minimum.reduce  # numpy types its `out` as None
_add, _subtract = np.add, np.subtract


def _add_rows(target: Array, rows: Slots, values: Array) -> None:
    """``target[rows[n]] += values[n]``; a row may occur several times."""
    if len(target) == 1:
        target += values if len(values) == 1 else values.sum(0)
    elif isinstance(rows, slice):
        target[rows] += values
    else:
        np.add.at(target, rows, values)
