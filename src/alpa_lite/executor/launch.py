"""Starts the ranks of an export as processes of this machine, one virtual CPU device each, and runs the step.

In: an exported folder. Out: rank 0's report; with ``out`` also every result as ``.npz``. The ranks are one
``jax.distributed`` job with gloo collectives: the same program, and the same collectives, that a cluster would run. This
process knows no JAX; ``launch_worker.py`` is what it starts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from alpa_lite.errors import ExportError, LaunchError
from alpa_lite.executor.ports import kept_port
from alpa_lite.plan.manifest import PIPELINE, read_manifest

_WORKER = "alpa_lite.executor.launch_worker"
_REPORT = "report.txt"
_POLL_S = 0.02
_SHOWN_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What to run.

    Attributes:
        folder: an export.
        num_steps: how often; results that are new state are the next step's arguments.
        seed: of arguments that were neither exported nor given: floats from a normal distribution, integers 0 or 1.
        inputs: ``.npz`` of arguments by path, e.g. "1/x"; they win over exported values.
        out: ``.npz`` to write all results of the last step to, by path.
        single_process: all ranks as devices of one process, to compare with.
        timeout_s: after which all ranks are ended.
    """

    folder: str
    num_steps: int = 1
    seed: int = 0
    inputs: str | None = None
    out: str | None = None
    single_process: bool = False
    timeout_s: float = 300.0


def launch(request: LaunchRequest, num_ranks: int | None = None) -> str:
    """Runs the step on ``num_ranks`` processes (None: as many as the export has) and returns rank 0's report.

    Raises:
        ExportError: the folder is no whole export, or has another number of ranks.
        LaunchError: a rank failed, or the time was up; no process is left behind in any case.

    Example:
        >>> print(launch(LaunchRequest(folder="out", num_steps=3), num_ranks=4))
    """
    _check(request, num_ranks)
    count = 1 if request.single_process else read_manifest(Path(request.folder)).num_ranks
    with tempfile.TemporaryDirectory(prefix="alpa-lite-launch-") as name, kept_port("127.0.0.1") as kept:
        logs, address = Path(name), f"127.0.0.1:{kept.getsockname()[1]}"
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(count):
                ranks.append(_start(request, rank, count, address, logs))
            _wait(ranks, request, logs)
            return (logs / _REPORT).read_text(encoding="utf-8")
        finally:  # also on Ctrl-C
            for process in ranks:
                process.kill()
            for process in ranks:
                process.communicate()


def _check(request: LaunchRequest, num_ranks: int | None) -> None:
    manifest = read_manifest(Path(request.folder))
    if num_ranks is not None and num_ranks != manifest.num_ranks:
        others = f", or plan for 1x{num_ranks} and export again" if num_ranks >= 1 else ""
        raise ExportError(
            f"{num_ranks} ranks were asked of the export {request.folder!r}, which has {manifest.num_ranks}. Its step is one "
            f"program for exactly that many devices. Leave the number out{others}."
        )
    if PIPELINE in manifest.files:
        raise ExportError(
            f"the export {request.folder!r} is a pipeline, whose stages are programs of their own. The launcher starts ranks "
            f"that run one program together. Run it in one process on {manifest.num_ranks} devices, "
            "al.load_export(folder, 0).step(), or plan with num_stages=1 and export again."
        )
    if "cpu" not in manifest.platforms:
        raise ExportError(
            f"the export {request.folder!r} was lowered for {', '.join(manifest.platforms)} alone, because the step holds ops "
            "that CPUs do not have. The launcher starts CPU ranks. Use al.load_export on the devices themselves."
        )
    if request.num_steps < 1 or request.timeout_s <= 0:
        raise LaunchError(
            f"num_steps={request.num_steps} and timeout_s={request.timeout_s:g} were given. There must be at least one step "
            "and a positive time. Correct them."
        )
    if request.inputs is not None and not Path(request.inputs).is_file():
        raise LaunchError(
            f"there is no file {request.inputs!r} to read arguments from. It must be an .npz whose names are argument paths, "
            "e.g. np.savez('inputs.npz', **{'1/x': x}). Correct the path, or leave it out for seeded values."
        )
    if request.out is not None and not Path(request.out).parent.is_dir():
        raise LaunchError(
            f"the results cannot be written to {request.out!r}. It must be a file in an existing folder that you may write to. "
            "Correct the path (--out)."
        )


def _start(request: LaunchRequest, rank: int, count: int, address: str, logs: Path) -> subprocess.Popen[bytes]:
    # -P: the current folder must not shadow packages. The pipe is never written to: its end tells the rank, even if
    # this process is killed, that nobody waits any more.
    place = {"process": rank, "num_processes": count, "address": address, "report": str(logs / _REPORT)}
    command = [sys.executable, "-P", "-m", _WORKER, json.dumps(asdict(request) | place)]
    with _log(logs, rank).open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)


def _log(logs: Path, rank: int) -> Path:
    """What a rank says on stdout and stderr; gloo prints to both."""
    return logs / f"{rank}.log"


def _wait(ranks: list[subprocess.Popen[bytes]], request: LaunchRequest, logs: Path) -> None:
    """Until all have ended well; the first that fails, or the time, ends the wait."""
    end = time.monotonic() + request.timeout_s
    while True:
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            raise _failure(failed[0], len(ranks), codes[failed[0]], logs)
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > end:
            running = [rank for rank, code in enumerate(codes) if code is None]
            raise LaunchError(
                f"ranks {running} of {len(ranks)} had not ended after {request.timeout_s:g} s and were stopped. A "
                f"launch may take its time limit. Raise it (--timeout), or run fewer steps. Rank {running[0]} said last:\n"
                f"{_tail(_log(logs, running[0]))}"
            )
        time.sleep(_POLL_S)


def _failure(rank: int, count: int, code: int | None, logs: Path) -> LaunchError:
    return LaunchError(
        f"rank {rank} of {count} ended with code {code}; the others were stopped. Every rank must end with 0. Correct what it "
        f"says here, or report it:\n{_tail(_log(logs, rank))}"
    )


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-_SHOWN_LINES:])
