"""``alpa-lite VERB``: one verb per job. Bad input is told on stderr with exit code 2, a failed check is exit code 1."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from alpa_lite.cli.buckets import buckets
from alpa_lite.cli.doctor import doctor
from alpa_lite.cli.launch import launch
from alpa_lite.cli.paths import a_file, a_new_file, write_out
from alpa_lite.cli.run import run
from alpa_lite.cli.serve import serve
from alpa_lite.cli.solve import solve
from alpa_lite.errors import AlpaLiteError

if TYPE_CHECKING:
    from alpa_lite.api import PlanTarget
    from alpa_lite.plan.plan import Plan

_BAD_INPUT = 2
_NOT_AS_PLANNED = 1

Target = Annotated[str, typer.Argument(help="path/to/file.py:callable or pkg.module:callable")]
ClusterText = Annotated[str, typer.Option("--cluster", help="HOSTSxDEVICES:DEVICE, e.g. 8x8:h100-sxm")]
MeshText = Annotated[str, typer.Option("--mesh", help="mesh shape, e.g. 2x4; left out, every shape is tried")]
PlanFile = Annotated[Path, typer.Argument(parser=a_file, help="a file that plan.save or --out wrote")]

main = typer.Typer(
    name="alpa-lite",
    help="Plans how a JAX training step is split over devices, and proves that what runs is what was planned.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
main.command()(solve)
main.command()(launch)
main.command()(doctor)
main.command()(run)
main.command()(serve)
main.command()(buckets)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Errors for users become a message and an exit code; everything else keeps its traceback."""
    try:
        yield
    except AlpaLiteError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_BAD_INPUT) from None


@contextlib.contextmanager
def _without_gpu() -> Iterator[None]:
    """For commands that need no device: that JAX's GPU plugin finds none takes a line, not a traceback."""
    from alpa_lite._jax_compat import short_plugin_errors

    with short_plugin_errors():
        yield


@main.command()
def plan(
    target: Target,
    cluster: ClusterText,
    mesh: MeshText = "",
    out: Annotated[Path | None, typer.Option("--out", parser=a_new_file, help="write the plan here as JSON")] = None,
) -> None:
    """Plan a step for a cluster and print the plan; no device is touched."""
    with _told(), _without_gpu():
        from alpa_lite.cli.target import load_target

        made = _planned(load_target(target), cluster, mesh)
        if out is not None:
            made.save(out)
    _print(made)


@main.command()
def verify(target: Target, cluster: ClusterText, mesh: MeshText = "") -> None:
    """Plan a step, compile it with the cluster's own compiler (no device needed) and compare."""
    with _told(), _without_gpu():
        from alpa_lite.cli.target import load_target

        given = load_target(target)
        report = _planned(given, cluster, mesh).verify(given.fn, *given.args)
    typer.echo(str(report), nl=False)
    if not report.ok:
        raise typer.Exit(_NOT_AS_PLANNED)


@main.command()
def rules(target: Target) -> None:
    """Print which primitives a step uses, whose sharding rules they have, and what stays replicated and why."""
    with _told():
        from alpa_lite.api import ParallelStep
        from alpa_lite.cli.target import load_target
        from alpa_lite.trace.coverage import coverage

        given = load_target(target)
        fn = given.fn.__wrapped__ if isinstance(given.fn, ParallelStep) else given.fn
        table = coverage(fn, *given.args)
    typer.echo(str(table), nl=False)


@main.command()
def show(file: PlanFile) -> None:
    """Print a saved plan."""
    with _told():
        from alpa_lite.api import load_plan

        loaded = load_plan(file)
    _print(loaded)


@main.command()
def diff(before: PlanFile, after: PlanFile) -> None:
    """Print what differs between two saved plans."""
    with _told():
        from alpa_lite.api import load_plan
        from alpa_lite.plan.diff import diff as plan_diff

        text = plan_diff(load_plan(before), load_plan(after))
    typer.echo(text, nl=False)


@main.command()
def calibrate(
    out: Annotated[
        Path | None, typer.Option("--out", parser=a_new_file, help="write the measurements here as JSON")
    ] = None,
) -> None:
    """Measure the devices of this machine for some seconds and print what planning would assume of them."""
    with _told():
        from alpa_lite.executor.calibrate import local_cluster

        measured = local_cluster(calibrate=True)
        typer.echo(measured.describe(), nl=False)
        if out is not None and measured.calibration is not None:
            write_out(out, measured.calibration.to_text() + "\n")


def _planned(target: PlanTarget, cluster: str, mesh: str) -> Plan:
    from alpa_lite.api import Cluster
    from alpa_lite.api import plan as make_plan
    from alpa_lite.planner.options import PlanOptions

    return make_plan(
        target.fn,
        *target.args,
        cluster=Cluster.parse(cluster),
        pins=target.pins,
        pin_like=target.pin_like,
        donate_argnums=target.donate_argnums,
        options=PlanOptions(mesh_shape=_mesh_shape(mesh)) if mesh else None,
    )


def _mesh_shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split("x"))
    except ValueError:
        raise AlpaLiteError(
            f"--mesh {text!r} cannot be read. A mesh shape is sizes joined by x, as in 2x4. Correct it, or leave --mesh "
            "out to try every shape."
        ) from None


def _print(made: Plan) -> None:
    from alpa_lite.report.text import plan_table

    typer.echo(plan_table(made, width=shutil.get_terminal_size((120, 40)).columns), nl=False)


__all__ = ["main"]
