"""Predicted against compiled memory and collectives: the examples on CPU, models on H100 through XLA:GPU's own compiler.

``python -m benchmarks.memory_table`` prints the tables of ``docs/memory.md``; it needs the extra
``aot`` and no GPU. Names given as arguments (e.g. ``gpt2-124m mlp``) restrict it; ``--output FILE`` writes the page.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import alpa_lite as al
from benchmarks import models
from examples.example import use_virtual_devices
from examples.registry import EXAMPLES

MESHES = ((8,), (2, 4), (2, 2, 2))
MODELS = (("gpt2-124m", "1x8", (2, 4)), ("gpt-350m", "1x8", (2, 4)), ("gpt-1.3b", "1x8", (2, 4)))
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


def gpu_row(name: str, hosts: str, mesh: tuple[int, ...]) -> Row:
    """A training step on H100s, its state donated; actual = XLA:GPU's peak."""
    if name in EXAMPLES:
        example = EXAMPLES[name]()
        fn, args = example.train_step, example.abstract_args()
    else:
        model = models.make(name)
        fn, args = model.fn, model.args
    cluster = al.Cluster.parse(f"{hosts}:h100-sxm")
    plan = al.plan(fn, *args, cluster=cluster, options=options(mesh), donate_argnums=0)
    report = plan.verify(fn, *args)
    return Row(
        name=name,
        mesh=str(plan.mesh),
        predicted_bytes=plan.memory.peak,
        actual_bytes=report.target.peak_bytes,
        unplanned=len(report.audit.unplanned),
        missing=len(report.audit.missing),
        planned=len(plan.collectives),
        compile_s=report.target.compile_s,
    )


def page(only: set[str], targets: set[str]) -> Iterator[str]:
    """Lines of the page, as they become known."""
    yield "# Memory: predicted against compiled\n"
    yield "Peak bytes per device of plans against what XLA's buffer assignment needs for the same program, and the audit"
    yield "of collectives beside it. The tables are what `python -m benchmarks.memory_table --target cpu` and `--target gpu`"
    yield "print.\n"
    if "cpu" in targets:
        yield "## XLA:CPU, 8 virtual devices, float32 gradient steps\n"
        yield "Compiled = arguments + results + temporaries - aliased.\n"
        yield HEAD
        yield from (str(cpu_row(name, mesh)) for name in EXAMPLES for mesh in MESHES if not only or name in only)
    if "gpu" in targets:
        yield "\n## XLA:GPU, H100 SXM, training steps with donated state\n"
        yield "Compiled without a GPU by XLA:GPU for that topology; compiled = its own peak figure.\n"
        yield HEAD
        steps = [*MODELS, *((name, "1x8", (2, 4)) for name in EXAMPLES)]
        yield from (str(gpu_row(*step)) for step in steps if not only or step[0] in only)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these models and examples")
    parser.add_argument("--target", choices=("cpu", "gpu"), help="only this half of the page")
    parser.add_argument("--output", type=Path, help="file to write")
    arguments = parser.parse_args()
    use_virtual_devices()
    lines = []
    targets = {arguments.target} if arguments.target else {"cpu", "gpu"}
    for line in page(set(arguments.names), targets):
        print(line, flush=True)
        lines.append(line)
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"wrote {arguments.output}", file=sys.stderr)


if __name__ == "__main__":
    main()
