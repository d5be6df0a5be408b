"""Errors that users see. Every message says what was given, what is allowed, where, and what to do."""

from __future__ import annotations


class AlpaLiteError(ValueError):
    """Base of all errors that alpa_lite raises for user input."""


class PinError(AlpaLiteError):
    """A pin is malformed, matches nothing, or disagrees with another pin."""


class PinClashError(PinError):
    """A set of pins (and possibly the budget) cannot hold together; ``members`` is a smallest such set."""

    def __init__(self, message: str, members: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.members = members


class MemoryBudgetError(AlpaLiteError):
    """No plan fits the memory budget."""


class TraceError(AlpaLiteError):
    """The function cannot be traced into a Program."""


class PlanFileError(AlpaLiteError):
    """A plan file is damaged, of another version, or belongs to another program."""


class ClusterError(AlpaLiteError):
    """A cluster text is malformed or the devices are not there."""


class SolverError(AlpaLiteError):
    """No solution within the time limit."""


class ArgumentsError(AlpaLiteError):
    """The arguments do not fit the planned function."""
