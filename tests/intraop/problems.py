"""Random small intra-op problems and their answer by brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np

from alpa_lite.intraop.problem import Edge, IntraOpProblem, Usage, evaluate

SHAPES = ("tree", "cycle", "dense", "sparse", "parallel", "layers")


def random_problem(seed: int, *, limited: bool) -> IntraOpProblem:
    """At most 8 nodes, 4 states; some costs forbidden, whole or not; edges of several shapes; some have no solution."""
    rng = np.random.default_rng(seed)
    shape = SHAPES[seed % len(SHAPES)]
    n = int(rng.integers(1, 9))
    sizes = rng.integers(1, 5 if n < 7 else 4, n).tolist()
    if shape == "layers":
        sizes = [sizes[0]] * n
    whole, forbidden = bool(rng.integers(2)), float(rng.choice([0.0, 0.1, 0.35]))

    def costs(*dims: int) -> np.ndarray:
        values = rng.integers(0, 50, dims).astype(float) if whole else rng.random(dims) * 10
        style = rng.integers(4)
        if style == 0 and len(dims) == 2:  # separable
            values = values[:, :1] + values[:1]
        elif style == 1 and len(dims) == 2 and dims[0] == dims[1]:  # a follower
            values = np.where(np.eye(dims[0], dtype=bool), 0.0, np.inf)
        return np.where(rng.random(dims) < forbidden, np.inf, values)

    pairs = _pairs(shape, n, rng)
    shared = costs(sizes[0], sizes[0])
    edges = [
        Edge(u=u, v=v, costs=shared if shape == "layers" and sizes[u] == sizes[v] else costs(sizes[u], sizes[v]))
        for u, v in pairs
    ]
    node_costs = tuple(costs(k) for k in sizes)
    if not limited:
        return IntraOpProblem(node_costs=node_costs, edges=tuple(edges))
    num_times = int(rng.integers(1, 12))
    usages = []
    for node, k in enumerate(sizes):
        for _ in range(int(rng.integers(0, 3))):
            lo, hi = sorted(rng.integers(0, num_times + 1, 2).tolist())
            sizes_bytes = rng.integers(0, 100, k) if rng.random() < 0.8 else np.full(k, 7)
            usages.append(Usage(node=node, lo=lo, hi=hi, size_bytes=sizes_bytes.astype(np.int64)))
    base = rng.integers(0, 20, num_times) if rng.integers(2) else None
    return IntraOpProblem(
        node_costs=node_costs,
        edges=tuple(edges),
        usages=tuple(usages),
        usage_limit=int(rng.integers(20, 260)),
        base_usage=base,
        num_times=num_times,
        classes=np.array([sizes.index(k) for k in sizes]) if rng.integers(2) else None,
    )


def _pairs(shape: str, n: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    if n == 1:
        return []
    if shape == "tree":
        pairs = [(int(rng.integers(0, i)), i) for i in range(1, n)]
    elif shape == "cycle":
        pairs = [(i, (i + 1) % n) for i in range(n)] if n > 2 else [(0, 1)]
    elif shape == "layers":
        pairs = [(i, i + 1) for i in range(n - 1)] + [(i, i + 2) for i in range(n - 2)]
    else:
        everything = list(itertools.combinations(range(n), 2))
        density = {"dense": 0.9, "sparse": 0.3, "parallel": 0.5}[shape]
        pairs = [p for p in everything if rng.random() < density]
        if shape == "parallel":
            pairs = pairs + pairs[::2] + [(b, a) for a, b in pairs[::3]]
    return [(b, a) if rng.random() < 0.3 else (a, b) for a, b in pairs]


def brute_force(problem: IntraOpProblem) -> tuple[float, int]:
    """(optimum, smallest peak over the choices without forbidden entries); inf and -1 if there are none."""
    best, low = math.inf, -1
    for choice in itertools.product(*(range(len(c)) for c in problem.node_costs)):
        score = evaluate(problem, choice)
        if not math.isfinite(score.objective):
            continue
        low = score.peak_bytes if low < 0 else min(low, score.peak_bytes)
        if problem.usage_limit is None or score.peak_bytes <= problem.usage_limit:
            best = min(best, score.objective)
    return best, low
