"""Predicted against compiled memory and collectives: the examples on CPU, models on H100 through XLA:GPU's own compiler.

``python -m benchmarks.memory_table`` prints the tables of ``docs/memory.md``; it needs the extra ``aot`` and no GPU. Names
given as arguments (e.g. ``gpt2-124m mlp``) restrict it. ``--output docs/memory.md`` puts the rows into the page's tables,
which stand between comments; rows that were not measured and all other text of the page stay as they are.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import alpa_lite as al
from benchmarks import models
from examples.example import use_virtual_devices
from examples.registry import EXAMPLES

MESHES = ((8,), (2, 4), (2, 2, 2))
MODELS = (("gpt2-124m", "", (2, 4)), ("gpt-350m", "", (2, 4)), ("gpt-1.3b", "", (2, 4)))
GPU_SIZES = ("small", "base")  # of the examples: on H100 nothing is worth splitting in a small one
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One compiled plan; ``planned``, ``unplanned`` and ``missing`` count collectives."""

    name: str
    mesh: str
    predicted_bytes: int
    actual_bytes: int
    unplanned: int
    missing: int
    planned: int
    compile_s: float

    def __str__(self) -> str:
        ratio = self.predicted_bytes / max(1, self.actual_bytes)
        return (
            f"| {self.name} | {self.mesh} | {self.predicted_bytes / MIB:.2f} | {self.actual_bytes / MIB:.2f} | {ratio:.3f} "
            f"| {self.planned} | {self.unplanned} | {self.missing} | {self.compile_s:.1f} |"
        )


HEAD = """| step | mesh | predicted MiB | compiled MiB | ratio | planned | unplanned | missing | compile s |
|---|---|---|---|---|---|---|---|---|"""


def options(mesh: tuple[int, ...]) -> al.PlanOptions:
    return al.PlanOptions(mesh_shape=mesh)


def cpu_row(name: str, mesh: tuple[int, ...]) -> Row:
    """An example's gradient step on virtual CPU devices; actual = arguments + results + temporaries - aliased."""
    example = EXAMPLES[name](optimizer="sgd")
    args = example.abstract_args()
    step = al.parallelize(example.grads_step, cluster=al.Cluster.parse("1x8:cpu"), options=options(mesh))
    plan = step.plan(*args)
    begin = time.perf_counter()
    compiled = step.compile(*args)
    seconds = time.perf_counter() - begin
    report = compiled.audit()
    return Row(
        name=name,
        mesh=str(plan.mesh),
        predicted_bytes=plan.memory.peak,
        actual_bytes=compiled.peak_bytes(),
        unplanned=len(report.unplanned),
        missing=len(report.missing),
        planned=len(plan.collectives),
        compile_s=seconds,
    )


def gpu_row(name: str, size: str, mesh: tuple[int, ...]) -> Row:
    """A training step on H100s, its state donated; actual = XLA:GPU's peak. ``size``: of an example."""
    if name in EXAMPLES:
        example = EXAMPLES[name](size)
        fn, args = example.train_step, example.abstract_args()
    else:
        model = models.make(name)
        fn, args = model.fn, model.args
    cluster = al.Cluster.parse("1x8:h100-sxm")
    plan = al.plan(fn, *args, cluster=cluster, options=options(mesh), donate_argnums=0)
    report = plan.verify(fn, *args)
    return Row(
        name=f"{name} {size}".strip(),
        mesh=str(plan.mesh),
        predicted_bytes=plan.memory.peak,
        actual_bytes=report.target.peak_bytes,
        unplanned=len(report.audit.unplanned),
        missing=len(report.audit.missing),
        planned=len(plan.collectives),
        compile_s=report.target.compile_s,
    )


def rows(target: str, only: set[str]) -> Iterator[Row]:
    """Rows of one table, as they become known."""
    if target == "cpu":
        yield from (cpu_row(name, mesh) for name in EXAMPLES for mesh in MESHES if not only or name in only)
    else:
        steps = [*MODELS, *((name, size, mesh) for size in GPU_SIZES for name in EXAMPLES for mesh in MESHES)]
        yield from (gpu_row(*step) for step in steps if not only or step[0] in only)


def with_rows(page: str, target: str, measured: Sequence[str]) -> str:
    """The page with new rows in one table: a row replaces that of the same step and mesh, or comes last.

    Raises:
        ValueError: the page has no such table.
    """
    head, start, rest = page.partition(f"<!-- table: {target} -->\n")
    old, end, tail = rest.partition("<!-- end of table -->")
    if not start or not end:
        raise ValueError(
            f"the page has no table {target!r}. A table stands between the lines '<!-- table: {target} -->' and "
            "'<!-- end of table -->'. Add them where the table belongs."
        )
    kept = {_key(line): line for line in old.splitlines() if line.startswith("| ") and not HEAD.startswith(line)}
    kept |= {_key(line): line for line in measured}
    return "".join([head, start, "\n", HEAD, "\n", *(f"{line}\n" for line in kept.values()), "\n", end, tail])


def _key(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.split("|")[1:3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these models and examples")
    parser.add_argument("--target", choices=("cpu", "gpu"), help="only this table")
    parser.add_argument("--output", type=Path, help="page whose tables get the rows")
    arguments = parser.parse_args()
    use_virtual_devices()
    for target in [arguments.target] if arguments.target else ["cpu", "gpu"]:
        print(f"{target}\n\n{HEAD}", flush=True)
        measured = []
        for row in rows(target, set(arguments.names)):
            measured.append(str(row))
            print(row, flush=True)
        if arguments.output:
            page = with_rows(arguments.output.read_text(encoding="utf-8"), target, measured)
            arguments.output.write_text(page, encoding="utf-8")
            print(f"wrote {arguments.output}", file=sys.stderr)


if __name__ == "__main__":
    main()
