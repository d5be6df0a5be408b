"""``make bench``: runs every benchmark in a process of its own and prints one table.

Nothing is asserted: machines differ, so read the ratios. The rows are also left in ``out/bench/results.json``.
Arguments: names of benchmarks, all by default.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make `benchmarks` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Row, load_rows, machine, save_rows, table

BENCHMARKS = (
    "plan_time",
    "stage_time",
    "solve_time",
    "step_time",
    "call_overhead",
    "driver_overhead",
    "conversions",
    "sameness_time",
    "symbolic_sweep",
    "transfer_time",
    "plan_shared",
    "serve_engine",
    "serve_http",
    "serve_load",
    "serve_recovery",
    "ray_step",
    "ray_transport",
    "ray_recovery",
    "ray_save",
    "ray_soak",
)
HERE = Path(__file__).resolve().parent
OUT = Path("out/bench/results.json")


def run(name: str, folder: Path) -> list[Row]:
    """Runs one benchmark; its own table goes to the terminal as it comes."""
    result = folder / f"{name}.json"
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(result)]
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        print(f"{name} failed with exit code {code}; see above", file=sys.stderr)
        return []
    return load_rows(result)


def main() -> None:
    names = sys.argv[1:] or list(BENCHMARKS)
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        raise SystemExit(f"unknown benchmarks {unknown}; choose from {list(BENCHMARKS)}")
    with tempfile.TemporaryDirectory() as folder:
        results = {name: run(name, Path(folder)) for name in names}
    rows = [row for name in names for row in results[name]]
    print(f"\n{machine()}\n{table(rows)}")
    save_rows(rows, OUT)
    if not all(results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
