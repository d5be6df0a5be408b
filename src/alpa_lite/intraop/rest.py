"""What the gap leaves of a core without memory, eliminated where that has become narrow: a proof, long before the gap is closed.

Messages close a gap slowly in the end. Long before, they exclude half of all states, and what is left of a core that was
too wide for elimination (``narrow.py``) mostly is not any more. No choice need be known for that: how much dearer than the
bound the optimum is can be guessed, and the answer says whether the guess was large enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from alpa_lite.intraop.core import Core
from alpa_lite.intraop.messages import Messages
from alpa_lite.intraop.narrow import solve_narrow
from alpa_lite.intraop.problem import Array
from alpa_lite.intraop.state import Search

_SHRUNK = 0.45  # of the entries of all edges, below which elimination is tried
_AGAIN = 0.85  # the same, of those at the last try
_GAP = 1e-2  # from which on a gap excludes much
_CLOSER = 0.85  # of the gap when that was looked at last, from which on it is again
_ENTRIES = 1_000_000  # of all tables; to make so many takes as long as some thirty sweeps over a core of 150 nodes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rest:
    """A core of the states that are left; nodes with one state are decided, and part of the others' costs.

    Attributes:
        kept: per node of the core, the states that are left.
        nodes: of the core, those with several states; the fields below are about them.
        unary, left, right, costs: as in ``Core``.
    """

    kept: list[Array]
    nodes: list[int]
    unary: list[Array]
    left: list[int]
    right: list[int]
    costs: list[Array]


def prove_rest(search: Search, messages: Messages, guess: float = math.inf) -> bool:
    """Whether elimination of what the gap leaves decided the search; tried where much has been excluded since the last try.

    ``guess``: how much dearer than the bound the optimum may be; what is left by it is eliminated where the gap is larger. If
    its cheapest choice costs no more than that, it is the optimum, and a good choice otherwise.
    """
    core = search.core
    assert core.memory is None
    top = min(search.upper, search.bound + max(guess, 0.0))
    gap = (top - search.bound) / max(abs(top), 1e-300)
    if not gap <= min(_GAP, _CLOSER * search.rest_gap):  # nor where neither a choice nor a guess is known
        return False
    search.rest_gap = gap
    bound, over = messages.over(core)
    slack = top - (bound + core.constant)
    slack = max(slack, 0.0) * (1 + 1e-9) + 1e-12 * abs(top)  # of adding up the costs
    left = np.concatenate(over) <= slack
    ends = np.cumsum([0, *map(len, over)])
    sizes = np.add.reduceat(left, ends[:-1], dtype=np.int64)
    if not sizes.all():
        search.bound = top
        return top == search.upper
    pairs = int(sizes[list(core.left)] @ sizes[list(core.right)])
    if pairs > min(_SHRUNK * core.num_pairs, _AGAIN * search.rest_pairs):
        return False
    search.rest_pairs = pairs
    kept = [np.flatnonzero(left[a:b]) for a, b in pairwise(ends.tolist())]
    rest = rest_of(core, kept)
    picks = solve_narrow(rest.unary, rest.left, rest.right, rest.costs, max_entries=_ENTRIES) if rest.nodes else []
    if picks is None:
        return False
    chosen = [int(states[0]) for states in kept]
    for node, pick in zip(rest.nodes, picks, strict=True):
        chosen[node] = int(kept[node][pick])
    search.offer(chosen)
    if top < search.upper:
        search.bound, search.rest_gap, search.rest_pairs = top, math.inf, math.inf
        return False
    search.bound = search.upper  # what was excluded is not cheaper
    return True


def rest_of(core: Core, kept: Sequence[Array]) -> Rest:
    """The core with these states of its nodes; equal arrays stay shared."""
    several = [len(states) > 1 for states in kept]
    place: dict[int, int] = {}
    numbers: dict[bytes, int] = {}
    which = [numbers.setdefault(states.tobytes(), len(numbers)) for states in kept]
    rows: dict[tuple[int, int], Array] = {}
    unary: list[Array] = []
    for i, states in enumerate(kept):
        if several[i]:
            place[i] = len(place)
            key = id(core.unary[i]), which[i]
            if key not in rows:
                rows[key] = core.unary[i][states]
            unary.append(rows[key])
    left, right, costs = [], [], []
    made: dict[tuple[int, int, int], Array] = {}
    for a, b, matrix in zip(core.left, core.right, core.costs, strict=True):
        if several[a] and several[b]:
            key = id(matrix), which[a], which[b]
            found = made.get(key)
            if found is None:
                found = made[key] = matrix[kept[a][:, None], kept[b]]
            left.append(place[a])
            right.append(place[b])
            costs.append(found)
        elif several[a]:
            unary[place[a]] = unary[place[a]] + matrix[kept[a], kept[b]]
        elif several[b]:
            unary[place[b]] = unary[place[b]] + matrix[kept[a], kept[b]]
    return Rest(kept=list(kept), nodes=list(place), unary=unary, left=left, right=right, costs=costs)
