"""One layout for what several programs share, on one mesh: their problems side by side, the shared leaves decided once.

Formulation, for graphs g with weights w_g and their own problems (``intraop/problem.py``)::

    minimise   sum_g w_g * cost_g(x_g)
    such that  x_g keeps to the pins and to the memory rows of g          for every g
               spec(x_g, leaf) = spec(x_0, leaf)                          for every shared leaf (``_ties``)

Graphs follow one another in time, so that one limit and one set of rows per graph make the memory rows of the whole. Ties are
edges that forbid two specs to differ: presolve merges the two decisions, and every solver knows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.intraop.decision_graph import DecisionGraph
from alpa_lite.intraop.problem import IntraOpProblem, check_problem
from alpa_lite.intraop.repeated import Repeated, RepeatedEdges, repeated, repeated_edges
from alpa_lite.intraop.repeats import node_classes
from alpa_lite.intraop.solve import solve
from alpa_lite.intraop.state import LARGE_GAP
from alpa_lite.planner.posing import MeshTask, pose
from alpa_lite.planner.ties import in_ties


@dataclass(frozen=True, slots=True)
class Region:
    """Layouts in which the first leaves lie as ``known``, in order, and the next one is none of ``ruled_out``."""

    known: tuple[ShardingSpec, ...] = ()
    ruled_out: frozenset[ShardingSpec] = frozenset()

    def without(self, specs: tuple[ShardingSpec, ...]) -> Iterator[Region]:
        """Regions that have each layout of this one once, but for ``specs``, which is one of them."""
        begin = len(self.known)
        for number in range(begin, len(specs)):
            before = self.ruled_out if number == begin else frozenset()
            yield Region(specs[:number], before | {specs[number]})

    def allows(self, number: int, spec: ShardingSpec) -> bool:
        """Whether a leaf may lie so."""
        if number < len(self.known):
            return spec == self.known[number]
        return number > len(self.known) or spec not in self.ruled_out


EVERYWHERE = Region()


@dataclass(frozen=True, slots=True, kw_only=True)
class JointAnswer:
    """What was found on one mesh.

    Attributes:
        status: the solver's.
        specs: of the shared leaves, in order; empty without an answer.
        objective, lower_bound: weighted sums, by the ILP's own prices.
    """

    status: str
    specs: tuple[ShardingSpec, ...] = ()
    objective: float = math.inf
    lower_bound: float = -math.inf


def solve_jointly(
    tasks: Sequence[MeshTask],
    weights: Sequence[float],
    leaves: Sequence[Sequence[int]],
    cluster: Cluster,
    mesh: DeviceMesh,
    limit: int | None = None,
    *,
    region: Region = EVERYWHERE,
    cutoff: float = math.inf,
    large_gap: float = LARGE_GAP,
) -> JointAnswer:
    """The cheapest layout of the shared leaves.

    Args:
        tasks: the graphs, with one set of options.
        weights: how much each counts, above 0.
        leaves: per graph the positions of the shared leaves among its arguments, in one order.
        cluster, mesh: the devices, and their logical grid.
        limit: bytes per device that each graph may use by the solver's own count; None = without memory.
        region: layouts to choose from.
        cutoff: the search on a large problem may end once no layout is known to cost less.
        large_gap: as for ``intraop.solve.solve``.
    """
    posed = [pose(task, cluster, mesh, own) for task, own in zip(tasks, leaves, strict=True)]
    graphs = [pricer.graph for _, pricer, _ in posed]
    ports = [[graph.inputs[i] for i in own] for graph, own in zip(graphs, leaves, strict=True)]
    problems = [within(limit) for _, _, within in posed]
    if region != EVERYWHERE:
        problems[0] = _inside(problems[0], region, graphs[0], ports[0])
    # Slices are free there: a price that only decides between equals would count once it is weighted.
    whole = in_ties(posed[0][0])
    problem = joint_problem(problems, weights, graphs, ports, whole=whole)
    check_problem(problem)
    options = tasks[0].options
    solution = solve(problem, time_limit_s=options.time_limit_s, seed=options.seed, cutoff=cutoff, large_gap=large_gap)
    if not math.isfinite(solution.objective):
        return JointAnswer(status=solution.status)
    return JointAnswer(
        status=solution.status,
        specs=tuple(specs_of(graphs[0], port)[solution.choice[port]] for port in ports[0]),
        objective=solution.objective,
        lower_bound=solution.lower_bound,
    )


def _inside(problem: IntraOpProblem, region: Region, graph: DecisionGraph, ports: Sequence[int]) -> IntraOpProblem:
    """The first graph's problem, where shared leaves lie in a region; ties do the same for the other graphs."""
    costs = list(problem.node_costs)
    for number, port in enumerate(ports):
        inside = [region.allows(number, spec) for spec in specs_of(graph, port)]
        if not all(inside):
            costs[port] = np.where(inside, costs[port], np.inf)
    return replace(problem, node_costs=costs)


def specs_of(graph: DecisionGraph, port: int) -> list[ShardingSpec]:
    """What a port chooses from."""
    node = graph.nodes[port]
    assert node.specs is not None
    specs = graph.conversions.space(node.rank).specs
    return [specs[i] for i in node.specs.tolist()]


def joint_problem(
    problems: Sequence[IntraOpProblem],
    weights: Sequence[float],
    graphs: Sequence[DecisionGraph],
    ports: Sequence[Sequence[int]],
    *,
    whole: bool = False,
) -> IntraOpProblem:
    """The problems side by side, the first one's nodes first.

    Args:
        problems, weights, graphs: of each graph.
        ports: per graph the nodes of the shared leaves.
        whole: costs are rounded down to whole ones before they are weighted.
    """
    first = np.cumsum([0, *(p.num_nodes for p in problems)]).tolist()
    start = np.cumsum([0, *(p.num_times for p in problems)]).tolist()
    nodes = [repeated(p.node_costs).changed(_times(w, whole)) for p, w in zip(problems, weights, strict=True)]
    edges = [repeated_edges(p.edges).changed(_times(w, whole)) for p, w in zip(problems, weights, strict=True)]
    edges = [RepeatedEdges(e.u + n, e.v + n, e.costs) for e, n in zip(edges, first, strict=False)]
    edges.append(_ties(graphs, ports, first))
    usages = [
        replace(usage, node=usage.node + n, lo=usage.lo + t, hi=usage.hi + t)
        for p, n, t in zip(problems, first, start, strict=False)
        for usage in p.usages
    ]
    limits = [p.usage_limit for p in problems if p.usage_limit is not None]
    joined = IntraOpProblem(
        node_costs=side_by_side(nodes),
        edges=RepeatedEdges(
            np.concatenate([e.u for e in edges]),
            np.concatenate([e.v for e in edges]),
            side_by_side([e.costs for e in edges]),
        ),
        usages=tuple(usages),
        usage_limit=min(limits, default=None),
        base_usage=np.concatenate([_base(p) for p in problems]) if start[-1] else None,
        num_times=start[-1],
        names=tuple(f"{g}: {p.name(i)}" for g, p in enumerate(problems) for i in range(p.num_nodes)),
    )
    return replace(joined, classes=node_classes(joined))


def _base(problem: IntraOpProblem) -> np.ndarray:
    return np.zeros(problem.num_times, dtype=np.int64) if problem.base_usage is None else problem.base_usage


def _times(weight: float, whole: bool) -> Callable[[np.ndarray], np.ndarray]:
    """Costs, whole ones if asked for, times a weight; forbidden ones stay so."""
    return lambda costs: (np.floor(costs) if whole else costs) * weight


def side_by_side(parts: Sequence[Repeated]) -> Repeated:
    """One after the other. Equal arrays become one, so that layers whose prices are equal count as copies of one another."""
    known: dict[tuple[tuple[int, ...], str, bytes], int] = {}
    different: list[np.ndarray] = []
    numbers = []
    for part in parts:
        renumbered = []
        for array in part.different:
            number = known.setdefault((array.shape, array.dtype.str, array.tobytes()), len(known))
            if number == len(different):
                different.append(array)
            renumbered.append(number)
        numbers.append(np.array(renumbered, dtype=np.int64)[part.numbers])
    return Repeated(np.concatenate(numbers), different)


def _ties(graphs: Sequence[DecisionGraph], ports: Sequence[Sequence[int]], first: Sequence[int]) -> RepeatedEdges:
    """From each shared leaf of the first graph to the same leaf of the others: free where specs are equal, else forbidden."""
    made: dict[tuple[int, int], int] = {}
    different: list[np.ndarray] = []
    rows: dict[tuple[int, int], int] = {}
    for graph, own, offset in zip(graphs[1:], ports[1:], first[1:], strict=False):
        for a, b in zip(ports[0], own, strict=True):
            key = id(graphs[0].nodes[a].specs), id(graph.nodes[b].specs)
            if key not in made:
                made[key] = len(different)
                left, right = specs_of(graphs[0], a), specs_of(graph, b)
                different.append(np.array([[0.0 if s == t else np.inf for t in right] for s in left]))
            rows[a, b + offset] = made[key]
    u, v = (np.array([pair[end] for pair in rows], dtype=np.int64) for end in (0, 1))
    return RepeatedEdges(u, v, Repeated(np.array(list(rows.values()), dtype=np.int64), different))
