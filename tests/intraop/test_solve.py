"""The solver against brute force; what it promises about bounds, status, time, memory and repeatability."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from alpa_lite.intraop import proof, state
from alpa_lite.intraop.core import extract_core
from alpa_lite.intraop.graph import CostGraph
from alpa_lite.intraop.milp import Encoding
from alpa_lite.intraop.problem import Edge, IntraOpProblem, Usage, check_problem, evaluate
from alpa_lite.intraop.solve import minimum_peak, solve
from benchmarks.layered import layered
from tests.intraop.problems import brute_force, random_problem

NUM_PROBLEMS = 240


@pytest.mark.medium
@pytest.mark.parametrize("block", range(8))
def test_optimum_equals_brute_force(block: int) -> None:
    for seed in range(block, NUM_PROBLEMS, 8):
        problem = random_problem(seed, limited=seed % 3 > 0)
        check_problem(problem)
        best, _ = brute_force(problem)
        solution = solve(problem)
        if math.isinf(best):
            assert (solution.status, len(solution.choice)) == ("infeasible", 0), seed
            continue
        assert (solution.status, solution.limit_used) == ("optimal", "none"), seed
        assert solution.objective == pytest.approx(best, rel=1e-6, abs=1e-9), seed
        assert solution.lower_bound <= best + 1e-9 * abs(best), seed
        score = evaluate(problem, solution.choice)
        assert tuple(score) == (solution.objective, solution.peak_bytes, solution.peak_time), seed
        assert problem.usage_limit is None or score.peak_bytes <= problem.usage_limit, seed


def test_a_limit_below_what_every_choice_takes_is_refused_without_a_search() -> None:
    seeds = [seed for seed in range(NUM_PROBLEMS) if minimum_peak(random_problem(seed, limited=True)) > 0]
    assert len(seeds) > 20
    for seed in seeds:
        problem = random_problem(seed, limited=True)
        least = minimum_peak(problem)
        assert solve(replace(problem, usage_limit=least - 1), time_limit_s=0.0).status == "infeasible", seed


def test_the_random_problems_are_of_all_kinds() -> None:
    kinds = set()
    for seed in range(0, NUM_PROBLEMS, 3):
        problem = random_problem(seed, limited=seed % 2 > 0)
        best, _ = brute_force(problem)
        kinds.add((math.isinf(best), problem.usage_limit is not None, problem.classes is not None))
    assert {(False, False, False), (True, False, False), (False, True, True), (True, True, False)} <= kinds


@pytest.mark.parametrize("seed", range(40))
def test_bounds_hold_and_answers_fit_when_time_is_up_at_once(seed: int) -> None:
    problem = random_problem(seed, limited=seed % 2 > 0)
    best, _ = brute_force(problem)
    solution = solve(problem, time_limit_s=0.0)
    assert solution.lower_bound <= best + 1e-9 * abs(best) if math.isfinite(best) else True
    if solution.status == "infeasible":
        assert math.isinf(best)
    elif solution.status == "no-solution":
        assert (solution.limit_used, solution.objective) == ("time", math.inf)
        assert solution.message
    else:
        score = evaluate(problem, solution.choice)
        assert score.objective == solution.objective >= best - 1e-9
        assert problem.usage_limit is None or score.peak_bytes <= problem.usage_limit
        assert solution.gap == pytest.approx(
            (solution.objective - solution.lower_bound) / max(abs(solution.objective), 1e-300)
        )
        assert solution.status == "optimal" or solution.limit_used == "time"


def test_time_limit_returns_the_best_so_far() -> None:
    problem = layered(6)
    start = time.process_time()
    solution = solve(problem, time_limit_s=1e-3)  # over before a first answer is there, on any machine
    assert time.process_time() - start < 5
    assert (solution.status, solution.limit_used) == ("feasible", "time")
    assert 0 < solution.lower_bound < solution.objective < math.inf
    assert evaluate(problem, solution.choice).objective == solution.objective


@pytest.mark.medium
def test_same_answer_again_and_in_another_process() -> None:
    problems = [random_problem(7, limited=True), layered(2)]
    first = [solve(p) for p in problems]
    again = [solve(p) for p in problems]
    script = (
        "from tests.intraop.problems import random_problem\n"
        "from benchmarks.layered import layered\n"
        "from alpa_lite.intraop.solve import solve\n"
        "for p in (random_problem(7, limited=True), layered(2)):\n"
        "    s = solve(p); print(s.choice.tolist(), repr(s.objective), repr(s.lower_bound))\n"
    )
    root = Path(__file__).resolve().parents[2]
    paths = f"import sys; sys.path[:0] = {[str(root), str(root / 'src')]!r}\n"
    run = subprocess.run([sys.executable, "-c", paths + script], capture_output=True, text=True, check=True, cwd=root)
    expected = [f"{s.choice.tolist()} {s.objective!r} {s.lower_bound!r}" for s in first]
    assert [f"{s.choice.tolist()} {s.objective!r} {s.lower_bound!r}" for s in again] == expected
    assert run.stdout.splitlines() == expected


@pytest.mark.medium
def test_a_given_incumbent_is_taken_if_it_is_better() -> None:
    problem = layered(3)
    best = solve(problem)
    assert best.status == "optimal"
    cut = solve(problem, time_limit_s=0.0, incumbent=best.choice)
    assert cut.objective == best.objective
    assert cut.choice.tolist() == best.choice.tolist()
    assert not cut.tied
    assert cut.gap == pytest.approx((cut.objective - cut.lower_bound) / cut.objective)
    assert cut.lower_bound < best.objective


def test_an_incumbent_that_does_not_fit_is_refused() -> None:
    sizes = np.array([10, 1])
    problem = IntraOpProblem(
        node_costs=(np.array([0.0, 5.0]),),
        usages=(Usage(node=0, lo=0, hi=1, size_bytes=sizes),),
        usage_limit=4,
        num_times=1,
    )
    assert solve(problem, incumbent=np.array([0])).choice.tolist() == [1]
    assert solve(replace(problem, usage_limit=0), incumbent=np.array([1])).status == "infeasible"


def test_infeasible_says_why() -> None:
    wall = np.array([[np.inf, np.inf], [np.inf, np.inf]])
    problem = IntraOpProblem(
        node_costs=(np.zeros(2), np.zeros(2), np.zeros(1)), edges=(Edge(u=0, v=1, costs=wall),), names=("a", "b", "c")
    )
    solution = solve(problem)
    assert (solution.status, set(solution.conflict)) == ("infeasible", {"a", "b"})
    # Three nodes, two colours: no domain is emptied by arc consistency, so the MILP must see it.
    differ = np.where(np.eye(2, dtype=bool), np.inf, 0.0)
    triangle = IntraOpProblem(
        node_costs=(np.zeros(2),) * 3, edges=tuple(Edge(u=u, v=v, costs=differ) for u, v in ((0, 1), (1, 2), (2, 0)))
    )
    assert solve(triangle).status == "infeasible"
    assert "memory" not in solve(triangle).message


def test_whole_costs_are_proven_to_the_unit() -> None:
    rng = np.random.default_rng(3)
    scale = 10**11  # one unit is far below any relative tolerance
    nodes = tuple(scale + rng.integers(0, 40, 3).astype(float) for _ in range(7))
    edges = tuple(
        Edge(u=u, v=v, costs=rng.integers(0, 40, (3, 3)).astype(float)) for u in range(7) for v in range(u + 1, 7)
    )
    problem = IntraOpProblem(node_costs=nodes, edges=edges)
    solution = solve(problem)
    assert solution.status == "optimal"
    assert solution.objective == brute_force(problem)[0]
    assert solution.lower_bound > solution.objective - 1


@pytest.mark.parametrize("seed", range(4))
def test_whole_costs_under_a_limit_are_proven_to_the_unit(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def costs(*shape: int) -> np.ndarray:
        return rng.integers(0, 10**11, shape).astype(float)

    edges = tuple(Edge(u=u, v=v, costs=costs(3, 3)) for u in range(7) for v in range(u + 1, 7))
    usages = tuple(Usage(node=i, lo=0, hi=1, size_bytes=rng.integers(1, 1000, 3)) for i in range(7))
    nodes = tuple(costs(3) for _ in range(7))
    low = sum(int(u.size_bytes.min()) for u in usages)
    problem = IntraOpProblem(node_costs=nodes, edges=edges, usages=usages, usage_limit=int(1.2 * low), num_times=1)
    solution = solve(problem)
    assert (solution.status, solution.objective) == ("optimal", brute_force(problem)[0])
    assert solution.rows_used == 1
    assert solution.lower_bound == solution.objective


def test_the_bound_of_the_milp_is_less_than_its_answer() -> None:
    """HiGHS may be a unit too high at numbers like these; what is handed on must not be."""
    rng = np.random.default_rng(1)
    edges = tuple(
        Edge(u=u, v=v, costs=rng.integers(0, 10**11, (3, 3)).astype(float)) for u in range(5) for v in range(u + 1, 5)
    )
    problem = IntraOpProblem(node_costs=(np.zeros(3),) * 5, edges=edges)
    core = extract_core(CostGraph(problem, memory=False))
    result = Encoding(core).solve(time_limit_s=20)
    best, _ = brute_force(problem)
    assert result.optimal
    assert best * (1 - 1e-8) < result.bound < best


def test_negative_costs() -> None:
    for seed in range(30):
        problem = random_problem(seed, limited=False)
        shifted = replace(problem, node_costs=tuple(c - 60.0 for c in problem.node_costs))
        best, _ = brute_force(shifted)
        solution = solve(shifted)
        assert solution.objective == pytest.approx(best, rel=1e-6) if math.isfinite(best) else not len(solution.choice)
        assert solution.lower_bound <= solution.objective


@pytest.mark.medium
def test_minimum_peak_is_sound() -> None:
    exact = 0
    for seed in range(60):
        problem = random_problem(seed, limited=True)
        _, low = brute_force(problem)
        if low >= 0:
            assert minimum_peak(problem) <= low, seed
            exact += minimum_peak(problem) == low
    assert exact > 10  # a bound that is merely 0 would not reach this


def test_minimum_peak_on_a_chain() -> None:
    usages = tuple(Usage(node=i, lo=i, hi=i + 2, size_bytes=np.array([8, 4 + i])) for i in range(3))
    problem = IntraOpProblem(
        node_costs=(np.zeros(2), np.zeros(2), np.array([0.0, np.inf])),
        usages=usages,
        num_times=5,
        base_usage=np.array([0, 0, 1, 0, 100]),
    )
    assert minimum_peak(problem) == 100  # the last time, where only the base is live
    assert minimum_peak(replace(problem, base_usage=None)) == 5 + 8  # node 2 must take its first strategy


@pytest.mark.medium
def test_memory_prices_come_near_the_exact_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layered(2, limit_fraction=0.95)
    exact = solve(problem)
    free = solve(replace(problem, usage_limit=None))
    assert exact.status == "optimal"
    assert free.peak_bytes > problem.usage_limit  # else the limit would be idle
    monkeypatch.setattr(state, "_MILP_PAIRS", 0)  # every core counts as large
    priced = solve(problem)
    assert priced.status == "feasible"
    assert priced.peak_bytes <= problem.usage_limit
    assert priced.lower_bound <= exact.objective * (1 + 1e-9)
    assert exact.objective <= priced.objective <= 1.05 * exact.objective


@pytest.mark.medium
def test_bounds_without_a_proof_hold_within_a_limit() -> None:
    for seed in range(60):
        problem = random_problem(seed, limited=True)
        best, _ = brute_force(problem)
        found = solve(problem, proof=False)
        assert math.isfinite(found.objective) == math.isfinite(best), seed
        if math.isfinite(best):
            assert found.lower_bound <= best * (1 + 1e-9) and best * (1 - 1e-9) <= found.objective, seed
            assert found.status == "feasible" or found.objective == pytest.approx(best, rel=1e-6), seed


def test_large_cores_never_reach_the_milp(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuse:
        def __init__(self, *args: object, **kwargs: object) -> None:
            raise AssertionError("a model was built")

    monkeypatch.setattr(proof, "Encoding", Refuse)
    monkeypatch.setattr(state, "_MILP_PAIRS", 100)
    solution = solve(layered(2))
    assert (solution.status, solution.limit_used) == ("feasible", "gap")
    assert 0 < solution.gap < 0.1


@pytest.mark.medium
def test_a_large_problem_that_is_too_dear_ends_early_and_a_small_one_is_solved() -> None:
    problem = layered(32)
    full = solve(problem)
    cut = solve(problem, cutoff=0.5 * full.objective)
    assert (cut.status, cut.limit_used) == ("feasible", "cutoff")
    assert 0.5 * full.objective < cut.lower_bound <= full.objective <= cut.objective
    assert evaluate(problem, cut.choice).objective == cut.objective
    assert solve(problem, cutoff=2 * full.objective).objective == full.objective
    small = layered(2)
    assert solve(small, cutoff=1e-9).status == "optimal"


@pytest.mark.medium
def test_memory_on_a_deep_core_is_close_to_its_bound() -> None:
    problem = layered(32, limit_fraction=0.95)
    free = solve(replace(problem, usage_limit=None))
    assert free.peak_bytes > problem.usage_limit
    solution = solve(problem)
    assert solution.status == "feasible"
    assert solution.peak_bytes <= problem.usage_limit
    assert free.lower_bound < solution.lower_bound < solution.objective
    assert solution.gap < 0.02


@pytest.mark.medium
def test_depth_changes_the_work_little() -> None:
    def work(depth: int) -> float:
        start = time.process_time()
        solve(problems[depth])
        return time.process_time() - start

    problems = {depth: layered(depth) for depth in (4, 32)}
    seconds = {depth: min(work(depth) for _ in range(3)) for depth in problems}
    assert seconds[32] < 2 * seconds[4], seconds  # the target is 1.3, measured in benchmarks/solve_time.py
