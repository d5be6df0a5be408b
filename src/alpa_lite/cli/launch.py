"""``alpa-lite launch DIR``: run an exported step on local CPU processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from alpa_lite.cli.paths import a_file, a_folder
from alpa_lite.errors import AlpaLiteError

_BAD_INPUT = 2


def launch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", parser=a_folder, help="a folder that plan.export wrote")],
    ranks: Annotated[int | None, typer.Option("--ranks", help="processes; as many as the export has ranks")] = None,
    steps: Annotated[int, typer.Option("--steps", help="how often to run the step")] = 1,
    inputs: Annotated[
        Path | None, typer.Option("--inputs", parser=a_file, help=".npz of arguments by path; others are seeded")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", parser=a_file, help="write all results here as .npz")] = None,
    seed: Annotated[int, typer.Option("--seed", help="of seeded arguments")] = 0,
    single_process: Annotated[bool, typer.Option("--single-process", help="all ranks in one process")] = False,
    timeout: Annotated[float, typer.Option("--timeout", help="seconds after which all ranks are stopped")] = 300.0,
) -> None:
    """Run an exported step on this machine, one CPU process per rank, and print its results."""
    from alpa_lite.executor.launch import LaunchRequest
    from alpa_lite.executor.launch import launch as start

    request = LaunchRequest(
        folder=str(folder),
        num_steps=steps,
        seed=seed,
        inputs=None if inputs is None else str(inputs),
        out=None if out is None else str(out),
        single_process=single_process,
        timeout_s=timeout,
    )
    try:
        text = start(request, ranks)
    except AlpaLiteError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_BAD_INPUT) from None
    typer.echo(text, nl=False)
