"""``alpa-lite serve TARGET``: an HTTP server for a model, on Ray Serve."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer

from alpa_lite.cli.paths import a_file, a_folder
from alpa_lite.errors import AlpaLiteError, ServeError

if TYPE_CHECKING:
    from alpa_lite.serve.settings import ServerSettings, ServeTarget

_BAD_INPUT, _INTERRUPTED = 2, 130
_LOOK_S = 0.05  # between two looks at whether a signal came: what waits for good may miss two that come at once
_WANTED = "al.serve.ServeTarget(model=..., params=...)"


def serve(
    target: Annotated[
        str, typer.Argument(help="path/to/file.py:callable; it returns al.serve.ServeTarget(model=, params=)")
    ],
    buckets: Annotated[
        str | None,
        typer.Option("--buckets", help="sizes to which prompts are padded, e.g. 128,512,2048; see alpa-lite buckets"),
    ] = None,
    slots: Annotated[int, typer.Option("--slots", help="requests that are served at once")] = 16,
    max_length: Annotated[
        int, typer.Option("--max-length", help="tokens of a request, prompt and answer together")
    ] = 2048,
    queue_limit: Annotated[
        int, typer.Option("--queue-limit", help="requests that may wait; 0 = 4 times the slots")
    ] = 0,
    host: Annotated[str, typer.Option("--host", help="where to listen; loopback unless told otherwise")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", parser=a_file, help="a file with the bearer token that requests must bring"),
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="seconds that a request may take at most")] = 300.0,
    body_bytes: Annotated[int, typer.Option("--body-bytes", help="of the largest body")] = 2**20,
    body_timeout_s: Annotated[
        float, typer.Option("--body-timeout", help="seconds within which all of a body must come")
    ] = 30.0,
    drain_s: Annotated[float, typer.Option("--drain", help="seconds that requests may go on for at the end")] = 30.0,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster", help="HOSTSxDEVICES:DEVICE; left out, the layout's, or all devices of the engine's process"
        ),
    ] = "",
    num_stages: Annotated[
        int,
        typer.Option("--num-stages", help="parts into which the model is cut, each on its part of devices or hosts"),
    ] = 1,
    layout: Annotated[
        Path | None,
        typer.Option(
            "--layout", parser=a_file, help="a file of al.SharedLayout.save; left out, the graphs are planned"
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint",
            parser=a_folder,
            help="a folder of checkpoints with the parameters, in place of the target's",
        ),
    ] = None,
    checkpoint_path: Annotated[
        str, typer.Option("--checkpoint-path", help="of the parameters in the state that was saved")
    ] = "params",
    gpus: Annotated[float, typer.Option("--gpus", help="that the server takes of the Ray cluster")] = 0.0,
    compile_cache: Annotated[
        Path | None,
        typer.Option(
            "--compile-cache",
            parser=a_folder,
            help="folder where compiled programs, and the layout without --layout, are kept for the next start",
        ),
    ] = None,
    address: Annotated[
        str, typer.Option("--address", help="of a Ray cluster; left out, RAY_ADDRESS or one of this machine's own")
    ] = "",
) -> None:
    """Serve a model until Ctrl-C or SIGTERM; then requests that run may finish."""
    ending = _Ending()
    try:
        ending.catch()
        from alpa_lite.executor.ray.cluster import connect
        from alpa_lite.plan.checkpoint_folder import CheckpointFolder
        from alpa_lite.serve.deployment import check_free, start, stop
        from alpa_lite.serve.settings import ServerSettings

        sizes = _sizes(buckets)
        _check_sizes(slots, max_length, queue_limit, num_stages, sizes)
        settings = ServerSettings(
            host=host,
            port=port,
            buckets=sizes,
            slots=slots,
            max_length=max_length,
            queue_limit=queue_limit or None,
            compile_cache=None if compile_cache is None else str(compile_cache.resolve()),
            token=_token(token_file),
            body_bytes=body_bytes,
            body_timeout_s=body_timeout_s,
            timeout_s=timeout_s,
            drain_s=drain_s,
            cluster=cluster,
            num_stages=num_stages,
            layout=None if layout is None else str(layout.resolve()),
            checkpoint=None if checkpoint is None else str(checkpoint.resolve()),
            checkpoint_path=checkpoint_path,
            num_gpus=gpus,
        )
        _check_target(target)
        if checkpoint is not None:
            CheckpointFolder(checkpoint.resolve()).path()  # there is one
        check_free(settings)
        import ray.serve  # noqa: F401 - it sets the level of its log

        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # it calls ready what has no engine yet
        ending.raises(False)
        connect(address or None, _cpus(settings))
        ending.catch()  # Ray has set its own, which does not end well
        ending.raises(True)
        start(partial(served, target, os.getcwd()), settings, started=ending.has_begun)
        try:
            typer.echo(f"serving {target} at http://{settings.address}: POST /generate, GET /health, GET /metrics")
            ending.wait()
            typer.echo(f"ending: requests that run have {drain_s:g} s")
        finally:
            stop(drain_s)
    except (KeyboardInterrupt, Exception) as error:
        if ending.asked and not ending.begun:  # whatever came of it
            typer.echo("ended while it was starting", err=True)
            raise typer.Exit(_INTERRUPTED) from None
        if isinstance(error, ImportError):
            typer.echo(
                f"error: serving needs Ray Serve, which cannot be imported: {error}. Install it: pip install 'alpa-lite[serve]'.",
                err=True,
            )
        elif isinstance(error, AlpaLiteError):
            typer.echo(f"error: {error}", err=True)
        else:
            raise
        raise typer.Exit(_BAD_INPUT) from None


class _Ending:
    """What SIGINT and SIGTERM do: they interrupt while the server starts, and then whoever waits ends it.

    While Ray starts, the first one waits: half started, it ends with a segmentation fault. It is kept in mind all the time, as
    interrupts are lost where their caller gets no exception, as in JAX's callback for the garbage collector. No lock is taken:
    a signal may come while another one is handled, in the same thread.
    """

    def __init__(self) -> None:
        self.asked, self.begun, self._raises = False, False, True

    def catch(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def raises(self, so: bool) -> None:
        """Whether signals interrupt from here on, and now, where one did not do so before."""
        self._raises = so
        if self.asked:
            raise KeyboardInterrupt

    def has_begun(self) -> None:
        self.raises(False)
        self.begun = True

    def wait(self) -> None:
        """Until a signal has come."""
        while not self.asked:
            time.sleep(_LOOK_S)

    def _on_signal(self, *_: object) -> None:
        again, self.asked = self.asked, True
        if not self.begun:
            typer.echo("ending: the server is still starting, and its engine has up to half a minute", err=True)
        if self._raises or (again and not self.begun):
            raise KeyboardInterrupt


def _cpus(settings: ServerSettings) -> int:
    """Of a Ray cluster that is started here: for the server, and for virtual devices in actors of their own."""
    from alpa_lite.api.shared_layout import SharedLayout

    layout = None if settings.layout is None else SharedLayout.load(settings.layout)
    cluster = settings.planned_for(layout)
    hosted = cluster is not None and cluster.num_hosts > 1 and cluster.device.platform == "cpu"
    return 2 + (cluster.num_devices if cluster is not None and hosted else 0)


def _check_target(target: str) -> None:
    """What can be said of it without making the model here.

    Raises:
        TargetError, ServeError: it names no callable, or one that says that it returns something else than a ``ServeTarget``.
    """
    from alpa_lite.cli.target import find_target
    from alpa_lite.serve.settings import ServeTarget

    make = find_target(target, _WANTED)
    try:
        said = get_type_hints(make).get("return", ServeTarget)
    except (NameError, AttributeError, TypeError):  # names that are there for type checkers alone
        return
    kind = get_origin(said) or said
    try:
        other = isinstance(kind, type) and not issubclass(ServeTarget, kind)
    except TypeError:  # protocols that say nothing of classes
        return
    if kind is not Any and (kind is type(None) or other):
        raise _other_target(target, f"says that it returns {getattr(said, '__name__', said)}")


def served(target: str, folder: str) -> ServeTarget:
    """The target, in the server's process, which runs in another folder than the user.

    Raises:
        TargetError, ServeError: it names no callable that returns a ``ServeTarget``.
    """
    from alpa_lite.cli.target import call_target
    from alpa_lite.serve.settings import ServeTarget

    os.chdir(folder)
    sys.path.insert(0, folder)
    made = call_target(target, _WANTED)
    if not isinstance(made, ServeTarget):
        raise _other_target(target, f"returned {type(made).__name__}")
    return made


def _other_target(target: str, did: str) -> ServeError:
    return ServeError(f"the target {target!r} {did}. It must return {_WANTED}. Correct its return statement.")


def _sizes(text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ServeError(
            f"--buckets {text!r} was given. It must be whole numbers with commas between them. Write --buckets 128,512,2048."
        ) from None


def _check_sizes(
    slots: int, max_length: int, queue_limit: int, num_stages: int, buckets: tuple[int, ...] | None
) -> None:
    """As ``ServerSettings`` does, by the names of options.

    Raises:
        ServeError: a value is not allowed.
    """
    for option, value, low, why in (
        ("--slots", slots, 1, ""),
        ("--max-length", max_length, 2, ", as prompt and answer have at least one token each"),
        ("--queue-limit", queue_limit, 0, " (4 times the slots)"),
        ("--num-stages", num_stages, 1, ""),
    ):
        if value < low:
            raise ServeError(f"{option} {value} was given. It must be a whole number from {low}{why}. Correct it.")
    if buckets is not None and not all(1 <= size <= max_length for size in buckets):
        raise ServeError(
            f"--buckets {','.join(map(str, buckets))} was given. They must be whole numbers from 1 to --max-length {max_length}. "
            f"Correct one of them, e.g. --buckets {max_length}; alpa-lite buckets finds good ones."
        )


def _token(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ServeError(
            f"the token cannot be read from {str(file)!r}: {error}. It must be a text file. Correct --token-file."
        ) from error
    if not token:
        raise ServeError(
            f"the file {str(file)!r} is empty. It must hold the token that requests bring. Write one into it."
        )
    return token
