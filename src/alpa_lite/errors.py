"""Errors that users see. Every message says what was given, what is allowed, where, and what to do."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator

_OTHERS = ("jax", "jaxlib", "typer", "click", "site-packages/ray")
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def is_user_file(name: str) -> bool:
    """Whether a source file belongs neither to this package and what starts its commands nor to Python, JAX or Ray.

    "<string>" is where a dataclass has its ``__init__``, and the text of ``python -c``.
    """
    ours = name.startswith((_PACKAGE, "<frozen ", "<string>")) or os.path.basename(name) == "alpa-lite"
    pythons = name.startswith(_PYTHON) and "-packages" not in name
    return not (ours or pythons) and not any(f"/{package}/" in name for package in _OTHERS)


def user_line() -> str:
    """``file:line (function)`` of the innermost frame that is the user's, for messages."""
    for frame in reversed(traceback.extract_stack()):
        if is_user_file(frame.filename):
            return f"{frame.filename}:{frame.lineno} ({frame.name})"
    return "the command line"


class AlpaLiteError(ValueError):
    """Base of all errors that alpa_lite raises for user input."""


class PinError(AlpaLiteError):
    """A pin is malformed, matches nothing, or disagrees with another pin."""


class UnevenPinError(PinError):
    """A pin splits a dim into parts that are not equal."""


class PinClashError(PinError):
    """A set of pins (and possibly the budget) cannot hold together, or no plan was found that keeps them; the message says which.

    ``members`` is a smallest such set, as far as that could be settled in the time for an explanation.
    """

    def __init__(self, message: str, members: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.members = members


class MemoryBudgetError(AlpaLiteError):
    """No plan fits the memory budget, or none was found: ``proven`` says which.

    Attributes:
        stage: number of the stage of a pipeline that does not fit, where one alone does not.
    """

    def __init__(self, message: str, proven: bool = True) -> None:
        super().__init__(message)
        self.proven = proven
        self.stage: int | None = None


class BudgetClashError(PinClashError, MemoryBudgetError):
    """A clash in which the budget has a part: with more memory the pins hold, or with less to keep in it, as by recomputing."""

    def __init__(self, message: str, members: tuple[str, ...] = (), proven: bool = True) -> None:
        super().__init__(message, members)
        self.proven = proven


class TraceError(AlpaLiteError):
    """The function cannot be traced into a Program."""


class MicrobatchError(AlpaLiteError):
    """A step cannot be repeated per microbatch as asked."""


class LayerError(AlpaLiteError):
    """The step cannot be cut into layers or stages as asked."""


@contextlib.contextmanager
def layers_asked_at(line: str) -> Iterator[None]:
    """A ``LayerError`` names this line of the user: where parameters say on which stages layers lie, nothing else does."""
    try:
        yield
    except LayerError as error:
        if line not in str(error):
            error.args = (f"{error} At {line}.",)
        raise


class PlanFileError(AlpaLiteError):
    """A plan file is damaged, of another version, or belongs to another program."""


class ClusterError(AlpaLiteError):
    """A cluster text is malformed or the devices are not there."""


class SolverError(AlpaLiteError):
    """No solution within the time limit."""


class ArgumentsError(AlpaLiteError):
    """The arguments do not fit the planned function."""


class UnsupportedPattern(AlpaLiteError):
    """The sameness analysis met a pattern that it does not support; ``pattern`` is its name."""

    def __init__(self, message: str, pattern: str = "") -> None:
        super().__init__(message)
        self.pattern = pattern


class SpecError(AlpaLiteError):
    """A sharding spec does not fit its tensor or its mesh, or cannot be reached from another."""


class RuleError(AlpaLiteError):
    """A sharding rule is malformed, does not fit the op, or gives other values than the op."""


class ExportError(AlpaLiteError):
    """A folder cannot be exported to, or is no whole export of this version."""


class CheckpointError(AlpaLiteError):
    """A checkpoint cannot be written, or what is there cannot be restored as asked."""


class LaunchError(AlpaLiteError):
    """The local ranks of an export did not start, or did not end well."""


class ScheduleError(AlpaLiteError):
    """A schedule cannot be run; ``problem`` says what it is, e.g. "deadlock", "missing", "double"."""

    def __init__(self, message: str, problem: str = "") -> None:
        super().__init__(message)
        self.problem = problem


class SlicingError(AlpaLiteError):
    """A table of stages or layers is malformed, its pins contradict each other, or nothing fits."""


class WorkerError(AlpaLiteError):
    """A worker cannot do what it was asked for: another version, a damaged parcel, no such device."""


class NotFiniteError(AlpaLiteError):
    """A metric is NaN or infinite; ``position`` is that of its batch."""

    def __init__(self, message: str, position: int = 0) -> None:
        super().__init__(message)
        self.position = position


class WorkerLost(AlpaLiteError):
    """A worker died, hangs or lost its host. ``position`` is the number of steps that had ended before, from where to resume."""

    def __init__(self, message: str, position: int = 0) -> None:
        super().__init__(message)
        self.position = position


class ServeError(AlpaLiteError):
    """An engine cannot be made or cannot go on; base of what serving raises."""


class RequestError(ServeError):
    """A request cannot be served as it was given: its prompt, its length, its sampling."""


class QueueFull(ServeError):
    """So many requests wait already that no more are taken; try again later."""


class DeadlineExceeded(ServeError):
    """A request was not finished by its deadline."""


class EngineLost(ServeError):
    """A process of the engine was lost; requests in a slot end with it, and others are served by new processes."""


class EngineClosed(ServeError):
    """The engine takes no more requests, and ended this one before it was finished."""
