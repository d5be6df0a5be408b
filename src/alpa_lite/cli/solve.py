"""``alpa-lite solve FILE``: solves a problem file of the IOPDDL contest and prints the answer with its bound."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from alpa_lite.cli.paths import a_file, a_new_file, write_out
from alpa_lite.errors import AlpaLiteError
from alpa_lite.intraop.contest import read_iopddl
from alpa_lite.intraop.problem import IntraOpProblem, Solution
from alpa_lite.intraop.solve import solve as solve_problem

_EXIT_BAD_INPUT = 2
_EXIT_NO_ANSWER = 1


def solve(
    file: Annotated[Path, typer.Argument(parser=a_file, help="problem in the contest's JSON format, plain or gzipped")],
    time_limit: Annotated[float, typer.Option(help="seconds in all, reading included", min=0.0)] = 60.0,
    seed: Annotated[int, typer.Option(help="seed of the solvers")] = 0,
    json_out: Annotated[
        Path | None, typer.Option("--json", parser=a_new_file, help="write the answer as JSON to this file; - = stdout")
    ] = None,
) -> None:
    """Solve a problem file; exit code 0 with an answer, 1 without one, 2 for a file that cannot be used."""
    start = time.monotonic()
    try:
        problem = read_iopddl(file)
    except AlpaLiteError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_EXIT_BAD_INPUT) from None
    read_s = time.monotonic() - start
    to_stdout = json_out == Path("-")
    solution = solve_problem(
        problem,
        time_limit_s=max(0.0, time_limit - read_s),
        seed=seed,
        progress=_progress if sys.stderr.isatty() else None,
    )
    record = solution_record(problem, solution, seconds=time.monotonic() - start)
    text = json.dumps(record, allow_nan=False)
    typer.echo(text if to_stdout else _text(record))
    if json_out is not None and not to_stdout:
        try:
            write_out(json_out, text + "\n")
        except AlpaLiteError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(_EXIT_BAD_INPUT) from None
    if solution.status in ("infeasible", "no-solution"):
        raise typer.Exit(_EXIT_NO_ANSWER)


def solution_record(problem: IntraOpProblem, solution: Solution, *, seconds: float) -> dict[str, Any]:
    """The answer as strict JSON values: whole numbers stay whole, what is infinite or unknown is null."""
    return {
        "status": solution.status,
        "objective": _number(solution.objective),
        "bound": _number(solution.lower_bound),
        "gap": _number(solution.gap),
        "seconds": round(seconds, 3),
        "limit_used": solution.limit_used,
        "peak_bytes": solution.peak_bytes,
        "usage_limit": problem.usage_limit,
        "rows_used": solution.rows_used,
        "core_nodes": solution.core_size[0],
        "core_edges": solution.core_size[1],
        "message": solution.message,
        "assignment": [int(x) for x in solution.choice],
    }


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() else float(value)


def _progress(text: str) -> None:
    typer.echo(text, err=True)


def _text(record: dict[str, Any]) -> str:
    def show(value: object) -> str:
        return "-" if value is None else str(value)

    names = ("objective", "bound", "status", "gap", "seconds", "limit_used", "peak_bytes", "usage_limit", "message")
    lines = [f"{name:<12} {show(record[name])}" for name in names if record[name] != ""]
    if record["assignment"]:
        lines.append(f"{'assignment':<12} {' '.join(map(str, record['assignment']))}")
    return "\n".join(lines)
