"""The intra-op problem: pick one strategy per node; what comes in, what goes out, and how an answer is scored.

Formulation (x_i is the choice of node i)::

    minimise   sum_i c_i[x_i]  +  sum_(u,v) C_uv[x_u, x_v]                 (``node_costs``, ``edges``)
    such that  base[t] + sum_{usages covering t} size[x_node] <= limit     for every time t (``usages``)
               no infinite entry is chosen

Everything a solver claims is scored again by ``evaluate`` on this record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from alpa_lite.intraop.repeated import Array, Edge, Repeated, RepeatedEdges, repeated, repeated_edges
from alpa_lite.plan.records import SearchStep

FORBIDDEN = 10**18
"""Integer costs at or above this are forbidden choices, like ``inf`` in float costs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Usage:
    """Bytes that a node's choice keeps live over ops [lo, hi).

    Attributes:
        node: index of the node.
        lo, hi: half-open interval of times; empty if lo >= hi.
        size_bytes: int64[k_node].
    """

    node: int
    lo: int
    hi: int
    size_bytes: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntraOpProblem:
    """One choice per node under a memory limit; see the module docstring.

    Costs are float64 with ``inf`` for forbidden choices, or int64 with ``FORBIDDEN`` for them. Where many are equal, nodes and
    edges may be ``Repeated`` and ``RepeatedEdges``, which are quicker to go through.

    Attributes:
        node_costs: per node float64[k_node].
        edges: pairwise costs.
        usages: live intervals.
        usage_limit: bytes; None = no limit.
        base_usage: int64[num_times], bytes that no choice changes; None = 0.
        num_times: number of times; intervals lie in [0, num_times).
        names: per node, for messages; may be empty.
        classes: int per node; nodes of one class are copies of one another (repeated layers) and have equal domains.
    """

    node_costs: Sequence[Array]
    edges: Sequence[Edge] = ()
    usages: tuple[Usage, ...] = ()
    usage_limit: int | None = None
    base_usage: Array | None = None
    num_times: int = 0
    names: tuple[str, ...] = ()
    classes: Array | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.node_costs)

    def name(self, node: int) -> str:
        """The node's name for messages."""
        return self.names[node] if self.names else f"node {node}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """An answer and what is known about it.

    Attributes:
        choice: int64 per node; empty if there is none.
        objective: cost of ``choice`` on the original problem; ``inf`` if there is none.
        lower_bound: no choice costs less (always of the problem as given, never of a tied one).
        gap: (objective - lower_bound) / |objective|.
        status: "optimal" (gap within the solver's tolerance), "feasible", "infeasible" or "no-solution".
        limit_used: what ended the search: "none", "gap" (close enough), "cutoff" (too dear to matter) or "time".
        time_s: wall seconds.
        peak_bytes, peak_time: peak usage of ``choice``.
        rows_used: memory rows that the solver needed.
        tied: the answer comes from a problem in which copies were forced to be equal.
        message: for "infeasible" and "no-solution": why.
        conflict: for "infeasible": names of the nodes involved, as far as known.
        core_size: (nodes, edges) that were left after presolve.
        trace: choices of strictly falling objective, then what the search ended with; no times, so that it is the same
            for every run that a limit did not cut short.
    """

    choice: Array
    objective: float
    lower_bound: float
    gap: float
    status: str
    limit_used: str = "none"
    time_s: float = 0.0
    peak_bytes: int = 0
    peak_time: int = -1
    rows_used: int = 0
    tied: bool = False
    message: str = ""
    conflict: tuple[str, ...] = field(default=())
    core_size: tuple[int, int] = (0, 0)
    trace: tuple[SearchStep, ...] = ()


class Score(NamedTuple):
    """What ``evaluate`` returns."""

    objective: float
    peak_bytes: int
    peak_time: int


def as_float(costs: Array) -> Array:
    """Costs as float64 with ``inf`` for forbidden entries; float arrays are returned as they are."""
    if costs.dtype == np.float64:
        return costs
    return np.where(costs >= FORBIDDEN, np.inf, costs.astype(np.float64))


def evaluate(problem: IntraOpProblem, choice: Array) -> Score:
    """Scores a choice on the problem as given.

    Sums are exact: ``math.fsum`` for floats, and Python integers where the total of integers passes 2**53.

    Args:
        problem: what to score on.
        choice: int per node, each in range.

    Returns:
        (objective, peak_bytes, peak_time); objective is ``inf`` if a forbidden entry is chosen.

    Raises:
        ValueError: the choice has a wrong length or an index out of range.
    """
    picks: list[int] = np.asarray(choice).tolist()
    if len(picks) != problem.num_nodes:
        raise ValueError(f"a choice needs {problem.num_nodes} entries, got {len(picks)}")
    if min(picks, default=0) < 0:
        raise _out_of_range(problem, picks)
    try:
        parts = _parts(problem, picks)
    except IndexError:
        raise _out_of_range(problem, picks) from None
    peak, time = _peak(usage_profile(problem, picks))
    return Score(_exact_sum(parts), peak, time)


def _parts(problem: IntraOpProblem, picks: list[int]) -> list[Any]:
    """What a choice costs at every node and at every edge."""
    nodes, edges, chosen = problem.node_costs, problem.edges, np.array(picks, dtype=np.int64)
    if isinstance(nodes, Repeated):
        parts = nodes.entries(chosen)
    else:
        parts = [costs.item(x) for costs, x in zip(nodes, picks, strict=True)]
    if isinstance(edges, RepeatedEdges):
        return parts + edges.costs.entries(chosen[edges.u], chosen[edges.v])
    return parts + [costs.item(picks[u], picks[v]) for u, v, costs in edges]


def _out_of_range(problem: IntraOpProblem, picks: list[int]) -> ValueError:
    found = zip(picks, map(len, problem.node_costs), strict=True)
    node, x, size = next((node, x, size) for node, (x, size) in enumerate(found) if not 0 <= x < size)
    return ValueError(f"{problem.name(node)} has {size} strategies, the choice names number {x}")


def scaled(problem: IntraOpProblem, factor: float) -> IntraOpProblem:
    """The same problem with all costs times ``factor``; arrays that were shared stay shared."""
    if factor == 1.0:
        return problem
    made: dict[int, Array] = {}

    def times(costs: Array) -> Array:
        if id(costs) not in made:
            made[id(costs)] = as_float(costs) * factor
        return made[id(costs)]

    nodes, edges = problem.node_costs, problem.edges
    return replace(
        problem,
        node_costs=nodes.changed(times) if isinstance(nodes, Repeated) else tuple(map(times, nodes)),
        edges=edges.changed(times)
        if isinstance(edges, RepeatedEdges)
        else tuple(e._replace(costs=times(e.costs)) for e in edges),
    )


def greedy_choice(problem: IntraOpProblem) -> Array:
    """Every node in turn takes what is cheapest given the nodes before it: what planning op by op would give."""
    before: list[list[tuple[int, Array, bool]]] = [[] for _ in problem.node_costs]
    for edge in problem.edges:
        before[max(edge.u, edge.v)].append((min(edge.u, edge.v), edge.costs, edge.u < edge.v))
    made: dict[tuple[object, ...], int] = {}  # copies of a layer share their arrays, so most nodes are known
    picks: list[int] = []
    for costs, edges in zip(problem.node_costs, before, strict=True):
        key = (id(costs), *((id(matrix), picks[other], is_row) for other, matrix, is_row in edges))
        if key not in made:
            total = as_float(costs)
            for other, matrix, is_row in edges:
                total = total + as_float(matrix[picks[other]] if is_row else matrix[:, picks[other]])
            made[key] = int(np.argmin(total))
        picks.append(made[key])
    return np.array(picks, dtype=np.int64)


def usage_profile(problem: IntraOpProblem, picks: list[int]) -> Array:
    """Bytes live at every time, int64[num_times]."""
    steps = np.zeros(problem.num_times + 1, dtype=np.int64)
    live = [u for u in problem.usages if u.lo < u.hi]
    if live:
        size = np.array([u.size_bytes[picks[u.node]] for u in live], dtype=np.int64)
        np.add.at(steps, [u.lo for u in live], size)
        np.subtract.at(steps, [u.hi for u in live], size)
    profile = np.cumsum(steps[:-1])
    return profile if problem.base_usage is None else profile + problem.base_usage


def _peak(profile: Array) -> tuple[int, int]:
    if not profile.size:
        return 0, -1
    time = int(profile.argmax())
    return int(profile[time]), time


def _exact_sum(parts: list[Any]) -> float:
    if int in set(map(type, parts)):
        if any(p >= FORBIDDEN for p in parts):
            return math.inf
        if all(float(p).is_integer() for p in parts):
            total = sum(int(p) for p in parts)
            return total if abs(total) > 2**53 else float(total)
    total = math.fsum(parts)
    if abs(total) > 2**53 and math.isfinite(total) and all(float(p).is_integer() for p in parts):
        return sum(int(p) for p in parts)
    return total


def check_problem(problem: IntraOpProblem) -> None:
    """Verifier.

    Raises:
        AssertionError: naming the node, edge or usage; such a problem is our mistake, not the user's.
    """
    nodes, edges = repeated(problem.node_costs), repeated_edges(problem.edges)
    for number, costs in enumerate(nodes.different):
        node = int(np.argmax(nodes.numbers == number)) if costs.ndim != 1 or not costs.size else 0
        assert costs.ndim == 1 and costs.size, f"{problem.name(node)} has no strategies"
    sizes = np.array([len(costs) for costs in nodes.different], dtype=np.int64)[nodes.numbers]
    expected = np.stack([sizes[edges.u], sizes[edges.v]], axis=1)
    wrong = (edges.u == edges.v) | (edges.costs.shapes(2) != expected).any(axis=1)
    for number in np.flatnonzero(wrong).tolist():
        u, v, costs = edges[number]
        assert u != v, f"an edge joins {problem.name(u)} to itself"
        assert costs.shape == (sizes[u], sizes[v]), f"edge {u}-{v}: shape {costs.shape}, expected {sizes[u], sizes[v]}"
    for usage in problem.usages:
        assert 0 <= usage.lo <= problem.num_times and usage.hi <= problem.num_times, f"usage of {usage.node}: interval"
        assert len(usage.size_bytes) == sizes[usage.node], f"usage of {problem.name(usage.node)}: size"
    if problem.classes is not None:
        _, first, classes = np.unique(problem.classes, return_index=True, return_inverse=True)
        for node in np.flatnonzero(sizes[first][classes] != sizes)[:1].tolist():
            raise AssertionError(f"class {problem.classes[node]} has unequal domains")
