"""Solves the contest's instances and says which are proven optimal in their time; the argument is a folder with them.

    python benchmarks/contest.py FOLDER [LETTER ...]

The files (github.com/google/iopddl, Apache-2.0) are no part of this repository. Seconds are wall time with reading.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from alpa_lite.intraop.contest import read_iopddl
from alpa_lite.intraop.problem import evaluate
from alpa_lite.intraop.solve import solve

# Best known objective (the contest's results table and published follow-ups) and the seconds allowed.
INSTANCES = {
    "example": (445, 1.0),
    "B": (532843, 60.0),
    "G": (217039, 60.0),
    "P": (651833115436, 120.0),
    "C": (84102392579, 120.0),
    "A": (6548553650, 120.0),
}


def find(folder: Path, letter: str) -> Path | None:
    names = (f"{letter}.json", f"asplos-2025-iopddl-{letter}.json", f"asplos-2025-iopddl-{letter}.json.gz")
    return next((folder / name for name in names if (folder / name).exists()), None)


def main(folder: Path, letters: list[str]) -> int:
    missed = 0
    print(
        f"{'instance':<10}{'seconds':>9}{'allowed':>9}  {'status':<12}{'objective':>16}{'best known':>16}"
        f"{'bound':>19}  gap"
    )
    for letter in letters or INSTANCES:
        path = find(folder, letter)
        if path is None:
            print(f"{letter:<10} not in {folder}")
            continue
        known, allowed_s = INSTANCES.get(letter, (None, 120.0))
        start = time.perf_counter()
        problem = read_iopddl(path)
        solution = solve(problem, time_limit_s=allowed_s - (time.perf_counter() - start))
        seconds = time.perf_counter() - start
        good = solution.status == "optimal" and seconds <= allowed_s and known in (None, solution.objective)
        if len(solution.choice):
            score = evaluate(problem, solution.choice)
            good &= score.objective == solution.objective
            good &= problem.usage_limit is None or score.peak_bytes <= problem.usage_limit
        missed += not good
        print(
            f"{letter:<10}{seconds:>9.2f}{allowed_s:>9.0f}  {solution.status:<12}{solution.objective:>16.0f}"
            f"{known or '-':>16}{solution.lower_bound:>19.2f}  {solution.gap:.1e}{'' if good else '  MISSED'}",
            flush=True,
        )
    return missed


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python benchmarks/contest.py FOLDER [LETTER ...]")
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2:]))
