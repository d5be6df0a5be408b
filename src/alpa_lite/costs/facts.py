"""What follows from a program alone, whatever the mesh: each function of a region is asked once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from alpa_lite.core.program import Op, Program

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Facts:
    """Answers of functions about one program and its loop and branch bodies (its regions).

    Attributes:
        program: the whole.
    """

    program: Program
    _known: dict[tuple[Hashable, ...], Any] = field(default_factory=dict)

    def of(self, function: Callable[..., T], region: Program, **settings: Hashable) -> T:
        """``function(region, **settings)``, remembered by the region's identity: regions live as long as their program."""
        key = (function, id(region), *settings.items())
        if key not in self._known:
            self._known[key] = function(region, **settings)
        found: T = self._known[key]
        return found


Located = tuple[str, str, Program, Op]
"""Path prefix of an op's region, path of the op, its region, and the op."""


def located(program: Program) -> tuple[Located, ...]:
    """Every op, in the order of ``Program.walk`` and so of a plan's decisions."""
    return tuple((path[: path.rfind(".") + 1], path, owner, op) for path, owner, op in program.walk())


def numbers_of(program: Program) -> dict[str, int]:
    """Path of an op -> its number among ``located``."""
    return {path: number for number, (_, path, _, _) in enumerate(located(program))}


def region_of(path: str) -> str:
    prefix = path.rpartition(".")[0]
    return f"{prefix}." if prefix else ""
