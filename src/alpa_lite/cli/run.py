"""``alpa-lite run TARGET``: train under a plan, here or on a Ray cluster; a table on a terminal, JSON lines elsewhere."""

from __future__ import annotations

import json
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from alpa_lite.cli.paths import a_folder
from alpa_lite.errors import AlpaLiteError, NotFiniteError, WorkerLost

if TYPE_CHECKING:
    from alpa_lite.api import ParallelStep, PlanTarget, StepReport

_BAD_INPUT = 2
_NOT_FINISHED = 1
_SHOWN_ROWS = 12
_TIMED_EVERY = 20  # one step in so many waits for every program, to tell how busy workers are


def run(
    target: Annotated[
        str, typer.Argument(help="path/to/file.py:callable; it returns al.PlanTarget(..., init=, data=)")
    ],
    steps: Annotated[
        int, typer.Option("--steps", help="batches to use, in all runs of the checkpoint folder together")
    ],
    executor: Annotated[str, typer.Option("--executor", help="local or ray")] = "local",
    cluster: Annotated[
        str, typer.Option("--cluster", help="HOSTSxDEVICES:DEVICE; left out, all devices here or of the Ray cluster")
    ] = "",
    address: Annotated[
        str, typer.Option("--address", help="of a Ray cluster; left out, RAY_ADDRESS or one of this machine's own")
    ] = "",
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", parser=a_folder, help="folder of checkpoints, to go on from")
    ] = None,
    every: Annotated[int, typer.Option("--every", help="steps between checkpoints")] = 200,
    keep: Annotated[int, typer.Option("--keep", help="how many checkpoints stay")] = 3,
    elastic: Annotated[bool, typer.Option("--elastic", help="plan again for what is left if hosts are gone")] = False,
    on_nan: Annotated[str, typer.Option("--on-nan", help="stop, skip or restore")] = "stop",
    seed: Annotated[int, typer.Option("--seed", help="of the key that init is given")] = 0,
) -> None:
    """Train a step under a plan until so many batches were used, through losses of workers."""
    try:
        _prepare(executor, cluster)
        import alpa_lite as al
        from alpa_lite.cli.target import load_target

        given = load_target(target)
        step = _step(given, executor, cluster, address)
        kept = None if checkpoint is None else al.Checkpoint(checkpoint, every=every, keep=keep)
        with step, _shown(_batch_tokens(given)) as tell:
            done = al.fit(
                step,
                init=_init(given, seed),
                data=_data(given, target),
                num_steps=steps,
                checkpoint=kept,
                elastic=elastic,
                on_nan=on_nan,  # pyrefly: ignore[bad-argument-type] - checked there
                on_step=tell,
            )
        if done.metrics is None:
            typer.echo(
                f"nothing to do: {done.checkpoint or 'the first state'} is of step {done.position}, --steps {steps}",
                err=True,
            )
    except (WorkerLost, NotFiniteError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_NOT_FINISHED) from None
    except AlpaLiteError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_BAD_INPUT) from None


def _prepare(executor: str, cluster: str) -> None:
    """Settings of JAX that must stand before the user's code runs."""
    import jax

    from alpa_lite.cluster.cluster import Cluster

    asked = Cluster.parse(cluster) if cluster else None
    if executor == "ray":
        jax.config.update("jax_platforms", "cpu")  # the devices belong to the workers
    elif asked is not None and asked.device.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", asked.num_devices)


def _step(target: PlanTarget, executor: str, cluster: str, address: str) -> ParallelStep:
    import alpa_lite as al

    step: ParallelStep = al.parallelize(
        target.fn,
        cluster=al.Cluster.parse(cluster) if cluster else None,
        pins=target.pins,
        pin_like=target.pin_like,
        donate_argnums=target.donate_argnums or 0,
        executor=executor,
        address=address or None,
    )
    step.timed_every = _TIMED_EVERY
    return step


def _init(target: PlanTarget, seed: int) -> Any:
    """The first state, or what makes it."""
    import jax

    if target.init is not None:
        return partial(_initial, target.init, seed)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(target.args[0])):
        raise AlpaLiteError(
            "the target has shapes for its first argument, and no init. A run needs a first state. Give "
            "al.PlanTarget(..., init=init), where init(key) returns it, or arrays in args."
        )
    return target.args[0]


def _initial(init: Callable[..., Any], seed: int) -> Any:
    import jax

    return init(jax.random.key(seed))


def _data(target: PlanTarget, text: str) -> Callable[[int], Any]:
    if target.data is None:
        raise AlpaLiteError(
            f"the target {text!r} has no data. A run needs batches. Give al.PlanTarget(..., data=data), where data(index) "
            "returns the batch of a step."
        )
    return target.data


def _batch_tokens(target: PlanTarget) -> tuple[str, int]:
    """What a batch has: tokens, if it has integers of two dims or more, else rows."""
    import jax
    import numpy as np

    leaves = [x for x in jax.tree.leaves(target.args[1:]) if hasattr(x, "shape") and x.shape]
    tokens = [math.prod(x.shape) for x in leaves if len(x.shape) > 1 and np.issubdtype(x.dtype, np.integer)]
    if tokens:
        return "tokens", max(tokens)
    return "rows", max((x.shape[0] for x in leaves), default=1)


@contextmanager
def _shown(batch: tuple[str, int]) -> Iterator[Callable[[StepReport], None]]:
    """How every step is told."""
    if not sys.stdout.isatty():
        yield lambda report: typer.echo(json.dumps(_record(report, batch)))
        return
    from rich.console import Console
    from rich.live import Live

    rows: deque[dict[str, Any]] = deque(maxlen=_SHOWN_ROWS)
    with Live(_table(rows, batch[0]), console=Console(), refresh_per_second=4) as live:

        def tell(report: StepReport) -> None:
            rows.append(_record(report, batch))
            live.update(_table(rows, batch[0]))

        yield tell


def _record(report: StepReport, batch: tuple[str, int]) -> dict[str, Any]:
    """One step as JSON."""
    kind, count = batch
    found: dict[str, Any] = {
        "step": report.position + 1,
        "loss": _loss(report.metrics),
        "step_s": round(report.step_s, 6),
        f"{kind}_per_s": round(count / report.step_s, 1),
        "restarts": report.restarts,
    }
    if report.busy:
        found["busy"] = [round(share, 3) for share in report.busy]
    return found


def _loss(metrics: Any) -> float | None:
    """The metric "loss", or the first that is one number."""
    import jax
    import numpy as np

    if isinstance(metrics, dict) and "loss" in metrics:
        return float(np.asarray(metrics["loss"]))
    scalars = [x for x in jax.tree.leaves(metrics) if not np.shape(x)]
    return float(np.asarray(scalars[0])) if scalars else None


def _table(rows: Iterable[dict[str, Any]], kind: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("step", "loss", "step time", f"{kind}/s", "busy per stage", "restarts"):
        table.add_column(name, justify="right")
    busy = ""
    for row in rows:
        busy = " ".join(f"{share:.0%}" for share in row.get("busy", ())) or busy
        loss = "" if row["loss"] is None else f"{row['loss']:.5f}"
        rate = f"{row[f'{kind}_per_s']:,.0f}"
        table.add_row(str(row["step"]), loss, f"{row['step_s'] * 1e3:.1f} ms", rate, busy, str(row["restarts"]))
    return table
