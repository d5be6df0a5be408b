"""How the solve grows with the number of identical layers: the ILP alone, on a layered problem without tracing."""

from __future__ import annotations

import sys
import time
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make `benchmarks` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from alpa_lite.intraop.solve import solve
from benchmarks.layered import layered
from benchmarks.report import Row, finish

DEPTHS = (4, 32)
NUM_ROUNDS = 2  # interleaved; the fastest counts
TIME_LIMIT_S = 60.0


def main() -> None:
    problems = {depth: layered(depth) for depth in DEPTHS}
    seconds = dict.fromkeys(DEPTHS, float("inf"))
    status = {}
    for _ in range(NUM_ROUNDS):
        for depth, problem in problems.items():
            start_s = time.perf_counter()
            status[depth] = solve(problem, time_limit_s=TIME_LIMIT_S).status
            seconds[depth] = min(seconds[depth], time.perf_counter() - start_s)
    shallow = DEPTHS[0]
    rows = [
        Row(
            benchmark="solve_time",
            case=f"{depth} layers, mesh (8, 8), {status[depth]}",
            value=seconds[depth],
            unit="s",
            against=f"{shallow} layers",
            ratio=seconds[depth] / seconds[shallow],
            target="<= 1.3x",
        )
        for depth in DEPTHS
    ]
    finish(rows, sys.argv[1:])


if __name__ == "__main__":
    main()
