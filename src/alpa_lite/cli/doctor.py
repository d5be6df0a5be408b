"""``alpa-lite doctor``: what this machine, and a Ray cluster, have and lack for planning and running; one line per check.

The checks that need devices or Ray run in processes of their own, which are ended after a time limit: a driver that hangs is a
finding too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Annotated, Literal

import typer

from alpa_lite.executor.ray.settings import DEFAULT_CACHE

_FAILED, _BAD_INPUT = 1, 2
_PROOF_LIMIT_S, _RAY_LIMIT_S = 60.0, 120.0
_PACKAGE = "alpa-lite"
# What each optional package is for; the extra that installs it is looked up in the metadata.
_OPTIONAL = {
    "ray": ("ray", "running on several hosts"),
    "orbax-checkpoint": ("checkpoint", "saving and restoring state"),
    "flatbuffers": ("export", "exporting plans and running them with Ray"),
    "matplotlib": ("plots", "plots"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line.

    Attributes:
        name: of what was looked at.
        status: "FAIL" if something that was asked for does not work, "warn" if something optional is not there.
        found: what there is.
        todo: what to do about it; "" if nothing.
    """

    name: str
    status: Literal["ok", "warn", "FAIL"]
    found: str
    todo: str = ""

    def __str__(self) -> str:
        return f"{self.status:<5} {self.name:<18} {self.found}" + (f". {self.todo}" if self.todo else "")


def doctor(
    executor: Annotated[str, typer.Option("--executor", help="ray: look at a Ray cluster too")] = "local",
    address: Annotated[
        str, typer.Option("--address", help="of the Ray cluster; left out, RAY_ADDRESS or one that is started here")
    ] = "",
    json_lines: Annotated[bool, typer.Option("--json", help="one JSON object per line")] = False,
) -> None:
    """Check the installation, the devices, that planned steps equal unplanned ones, and a Ray cluster; exit code 1 on a FAIL."""
    if executor not in ("local", "ray") or (address and executor != "ray"):
        typer.echo(
            f"error: --executor {executor!r} --address {address!r} were given. The executor must be local or ray, and an "
            "address is one of Ray. Write --executor ray --address HOST:PORT.",
            err=True,
        )
        raise typer.Exit(_BAD_INPUT)
    failed = False
    for check in _checks(executor == "ray", address):
        failed |= check.status == "FAIL"
        typer.echo(json.dumps(asdict(check)) if json_lines else str(check))
    if failed:
        raise typer.Exit(_FAILED)


def _checks(ray: bool, address: str) -> Iterator[Check]:
    yield python_version()
    requirements = metadata.requires(_PACKAGE) or []
    for requirement in requirements:
        if "extra ==" not in requirement:
            yield package(requirement)
    yield jaxlib_version()
    for name, (extra, purpose) in _OPTIONAL.items():
        requirement = next((r for r in requirements if r.startswith(name) and f"extra == '{extra}'" in r), name)
        found = package(requirement, extra, purpose, needed=ray and name in ("ray", "flatbuffers"))
        ray &= found.status != "FAIL"
        yield found
    yield cache_folder(os.path.expanduser(DEFAULT_CACHE))
    yield from in_process("alpa_lite.cli.doctor_proof", [], "serial = parallel", _PROOF_LIMIT_S)
    if ray:
        yield from in_process("alpa_lite.cli.doctor_ray", [address], "Ray", _RAY_LIMIT_S)


# -- what is installed ------------------------------------------------------------------------------------------------


def python_version() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    window = metadata.metadata(_PACKAGE)["Requires-Python"]
    if within(found, window):
        return Check(name="Python", status="ok", found=found)
    return Check(name="Python", status="FAIL", found=f"{found}, not {window}", todo=f"Install Python {window}")


def package(requirement: str, extra: str = "", purpose: str = "", *, needed: bool = True) -> Check:
    """A package against a line of our metadata, e.g. "jax<0.13,>=0.10.1"; an optional one is missed with a warning."""
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    window = re.sub(r"\[[^]]*\]", "", requirement.partition(";")[0]).removeprefix(name).strip()
    missing = "FAIL" if needed else "warn"
    install = f"pip install '{_PACKAGE}[{extra}]'" if extra else f"pip install '{name}{window}'"
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(
            name=name,
            status=missing,
            found="not installed" + (f"; it is for {purpose}" if purpose else ""),
            todo=install,
        )
    if not within(found, window):
        return Check(name=name, status=missing, found=f"{found}, not {window}", todo=install)
    return Check(name=name, status="ok", found=found)


def jaxlib_version() -> Check:
    """JAX refuses a jaxlib that is newer than itself, with a traceback at import."""
    try:
        jax, jaxlib = metadata.version("jax"), metadata.version("jaxlib")
    except metadata.PackageNotFoundError as error:
        return Check(name="jaxlib", status="FAIL", found=f"no {error.name}", todo="pip install jax")
    if numbers(jaxlib) > numbers(jax):
        return Check(
            name="jaxlib", status="FAIL", found=f"{jaxlib} is newer than JAX {jax}", todo=f"pip install jaxlib=={jax}"
        )
    return Check(name="jaxlib", status="ok", found=jaxlib)


def within(version: str, window: str) -> bool:
    """Whether a version lies in a window such as ">=0.10.1,<0.13"."""
    have = numbers(version)
    for bound in filter(None, (part.strip() for part in window.split(","))):
        limit = numbers(bound.lstrip("<>=!~ "))
        if (bound.startswith(">=") and have < limit) or (bound.startswith("<") and have >= limit):
            return False
    return True


def numbers(version: str) -> tuple[int, ...]:
    """The release, without what marks a build of it: "0.10.2.dev1" -> (0, 10, 2)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


def cache_folder(folder: str) -> Check:
    """Whether compiled programs can be kept: a warning, as everything runs without."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Check(
            name="compile cache",
            status="warn",
            found=f"{folder} cannot be written to: {error.strerror}",
            todo="Make it writable, or name another: al.RayExecutor(compile_cache=...); else every start compiles anew",
        )
    return Check(name="compile cache", status="ok", found=folder)


# -- checks in processes of their own ---------------------------------------------------------------------------------


def in_process(module: str, arguments: list[str], name: str, limit_s: float) -> Iterator[Check]:
    """The checks that ``python -m module`` prints as JSON lines, and one more if it did not come to its end."""
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-P", "-m", module, *arguments]
        started = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True, env=_environment()
        )
        with started as process, _ended_after(process, limit_s) as late:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):  # some of what Ray and XLA say goes to stdout
                    yield Check(**json.loads(line))
            process.wait()
        if process.returncode:
            errors.seek(0)
            said = [line.strip() for line in errors.read().splitlines() if line.strip()]
            reason = f"did not end within {limit_s:g} s" if late else f"ended with code {process.returncode}"
            last = f"; its last words: {said[-1][:300]}" if said else ""
            yield Check(
                name=name, status="FAIL", found=f"the check {reason}{last}", todo=f"Run python -m {module} to see more"
            )


def _environment() -> dict[str, str]:
    """JAX's and XLA's notes on what they do are no findings."""
    return {"TF_CPP_MIN_LOG_LEVEL": "2"} | dict(os.environ)


@contextlib.contextmanager
def _ended_after(process: subprocess.Popen[str], limit_s: float) -> Iterator[list[bool]]:
    """Ends a process and its group after a time, and in any case at the end; the list is empty unless it was late."""
    late: list[bool] = []

    def end(*, timer: bool = False) -> None:
        if process.poll() is None:
            if timer:
                late.append(True)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, end, kwargs={"timer": True})
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
        end()
        process.wait()
