"""What a benchmark measured: rows of one table, with the machine they come from. Ratios are the result, not seconds."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement.

    Attributes:
        benchmark: the script, e.g. "plan_time".
        case: what was measured.
        value: the figure, in ``unit``.
        against: what it is compared with, "" for nothing.
        ratio: value over the other's, None for nothing.
        target: the figure to reach, in words.
    """

    benchmark: str
    case: str
    value: float
    unit: str
    against: str = ""
    ratio: float | None = None
    target: str = ""


def machine() -> str:
    """The class of this machine, without its name."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores of {model}, Python {platform.python_version()}, JAX {jax.__version__}"


def peak_rss_gb() -> float:
    """Largest resident set of this process so far, GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def interleaved_medians_s(
    runs: Mapping[str, Callable[[], object]], *, num_rounds: int = 15, num_warmup: int = 2
) -> dict[str, float]:
    """Median seconds of each function. Every round runs all of them in turn, so that a slow phase hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(num_warmup + num_rounds):
        for name, run in runs.items():
            start_s = time.perf_counter()
            jax.block_until_ready(run())
            if index >= num_warmup:
                times[name].append(time.perf_counter() - start_s)
    return {name: statistics.median(values) for name, values in times.items()}


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    cells = [("benchmark", "case", "value", "ratio", "against", "target")]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
        cells.append((row.benchmark, row.case, f"{row.value:.4g} {row.unit}", ratio, row.against, row.target))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells)


def save_rows(rows: Sequence[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1), encoding="utf-8")


def load_rows(path: Path) -> list[Row]:
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def kept(kind: type[T], path: Path | None) -> list[T]:
    """Rows of a run that was ended: a file of JSON lines, each a dataclass of this kind; none without a file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
    return [kind(**json.loads(line)) for line in lines]


def keep(row: Any, path: Path | None) -> None:
    """Prints a row, and adds it to that file."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
    print(row, flush=True)


def finish(rows: Sequence[Row], argv: Sequence[str]) -> None:
    """What every benchmark script does with its rows: a table, and with ``--json FILE`` a file for ``bench.py``."""
    print(machine())
    print(table(rows))
    if "--json" in argv:
        save_rows(rows, Path(argv[list(argv).index("--json") + 1]))
