"""The contest's file format: reading, writing, what it refuses; its rules of scoring on a small instance of our own."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alpa_lite.intraop.contest import ProblemFileError, read_iopddl, write_iopddl
from alpa_lite.intraop.problem import FORBIDDEN, IntraOpProblem, evaluate
from alpa_lite.intraop.solve import solve
from tests.intraop.problems import brute_force, random_problem


def body(**changes: Any) -> dict[str, Any]:
    """Three nodes: 2, 3 and 1 strategies; the edges are listed from the higher node and twice between one pair."""
    problem: dict[str, Any] = {
        "name": "tiny",
        "nodes": {
            "intervals": [[0, 3], [2, 5], [4, 4]],
            "costs": [[10, 20], [1, 2, 3], [7]],
            "usages": [[6, 2], [5, 5, 1], [100]],
        },
        "edges": {
            "nodes": [[1, 0], [0, 1], [2, 0]],
            "costs": [[0, 100, 200, FORBIDDEN, 400, 500], [1, 2, 3, 4, 5, 6], [70, 80]],
        },
        "usage_limit": 8,
    }
    problem.update(changes)
    return {"problem": problem}


def text(**changes: Any) -> str:
    return json.dumps(body(**changes))


def test_scoring_follows_the_contest() -> None:
    problem = read_iopddl(text())
    # 20 + 2 + 7, edge (1, 0) entry 1 * 2 + 1, which is forbidden
    assert evaluate(problem, np.array([1, 1, 0])).objective == math.inf
    # 10 + 3 + 7, (1, 0): 2 * 2 + 0 -> 400, (0, 1): 0 * 3 + 2 -> 3, (2, 0): 0 -> 70; live at 2: 6 + 1
    assert tuple(evaluate(problem, np.array([0, 2, 0]))) == (493.0, 7, 2)
    # [4, 4) is empty: 100 bytes of node 2 never count. [0, 3) and [2, 5) overlap at 2 only.
    assert tuple(evaluate(problem, np.array([0, 0, 0]))) == (10 + 1 + 7 + 0 + 1 + 70, 11, 2)
    with pytest.raises(ValueError, match="3 entries"):
        evaluate(problem, np.array([0, 0]))
    with pytest.raises(ValueError, match="3 strategies"):
        evaluate(problem, np.array([0, 3, 0]))


def test_the_optimum_keeps_the_limit() -> None:
    problem = read_iopddl(text())
    solution = solve(problem)
    assert (solution.status, solution.objective) == ("optimal", brute_force(problem)[0])
    assert solution.choice.tolist() == [1, 0, 0]  # [0, 0, 0] is cheaper and needs 11 bytes
    free = solve(read_iopddl(text(usage_limit=11)))
    assert free.choice.tolist() == [0, 0, 0]


def test_no_limit_is_no_limit() -> None:
    data = body()
    del data["problem"]["usage_limit"]
    assert read_iopddl(json.dumps(data)).usage_limit is None


def test_large_integers_stay_exact() -> None:
    high = 2**58
    problem = read_iopddl(
        text(
            nodes={"intervals": [[0, 1]] * 2, "costs": [[high + 1, high], [3]], "usages": [[1, 1], [1]]},
            edges={"nodes": [], "costs": []},
        )
    )
    assert problem.node_costs[0].dtype == np.int64
    assert evaluate(problem, np.array([0, 0])).objective == high + 4


@pytest.mark.parametrize("packed", [False, True])
def test_files_plain_and_packed(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("p.json.gz" if packed else "p.json")
    path.write_bytes(gzip.compress(text().encode()) if packed else text().encode())
    assert read_iopddl(path).num_nodes == 3


@pytest.mark.medium
def test_written_problems_read_back_with_the_same_optimum() -> None:
    for seed in range(30):
        problem = random_problem(seed, limited=True)
        whole = IntraOpProblem(
            node_costs=tuple(np.rint(c * 10) for c in problem.node_costs),
            edges=tuple(type(e)(u=e.u, v=e.v, costs=np.rint(e.costs * 10)) for e in problem.edges),
            usages=problem.usages,
            usage_limit=problem.usage_limit,
            num_times=problem.num_times,
        )
        again = read_iopddl(write_iopddl(whole))
        best, _ = brute_force(whole)
        solution = solve(again)
        assert solution.objective == best, seed
        if len(solution.choice):
            first = solution.choice[: whole.num_nodes]  # followers for further usages come after them
            assert evaluate(whole, first).objective == best
            assert evaluate(whole, first).peak_bytes == evaluate(again, solution.choice).peak_bytes


def test_writing_refuses_what_the_format_cannot_say() -> None:
    with pytest.raises(ProblemFileError, match="non-negative whole costs"):
        write_iopddl(IntraOpProblem(node_costs=(np.array([0.5]),)))
    with pytest.raises(ProblemFileError, match="non-negative whole costs"):
        write_iopddl(IntraOpProblem(node_costs=(np.array([-1.0]),)))
    with pytest.raises(ProblemFileError, match="no base usage"):
        write_iopddl(IntraOpProblem(node_costs=(np.array([1.0]),), base_usage=np.array([3]), num_times=1))


NODES = body()["problem"]["nodes"]
BAD = {
    "cut short": (text()[:40], "not complete JSON"),
    "no problem": ('{"nodes": 1}', "missing"),
    "no edges": (json.dumps({"problem": {"nodes": NODES}}), "missing"),
    "lists of unequal length": (text(nodes=NODES | {"intervals": [[0, 1]]}), "differ in length"),
    "usages of another length": (
        text(nodes=NODES | {"usages": [[6], [5, 5, 1], [1]]}),
        "node 0 has 2 costs and 1 usages",
    ),
    "edge to itself": (text(edges={"nodes": [[1, 1]], "costs": [[0] * 9]}), "two different nodes"),
    "edge to nowhere": (text(edges={"nodes": [[0, 9]], "costs": [[0] * 9]}), "two different nodes"),
    "edge of another size": (text(edges={"nodes": [[0, 1]], "costs": [[0] * 5]}), "has 5 costs"),
    "negative cost": (text(nodes=NODES | {"costs": [[-1, 2], [1, 2, 3], [7]]}), "negative"),
    "words for numbers": (text(nodes=NODES | {"costs": [["a", 2], [1, 2, 3], [7]]}), "a"),
    "a list": ("{}", "missing"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_with_what_is_wrong(name: str) -> None:
    given, message = BAD[name]
    with pytest.raises(ProblemFileError, match=message) as caught:
        read_iopddl(given)
    assert "the given text" in str(caught.value)
    assert "IOPDDL" in str(caught.value)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ProblemFileError, match=r"nowhere\.json"):
        read_iopddl(tmp_path / "nowhere.json")
    broken = tmp_path / "broken.json.gz"
    broken.write_bytes(gzip.compress(text().encode())[:50])
    with pytest.raises(ProblemFileError, match=r"broken\.json\.gz"):
        read_iopddl(broken)
