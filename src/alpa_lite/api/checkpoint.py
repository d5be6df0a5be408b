"""What users say of checkpoints, checked: ``Checkpoint``, and the arguments of ``step.save`` and ``step.restore``."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any

import jax

from alpa_lite.errors import ArgumentsError, CheckpointError, user_line
from alpa_lite.executor.save_restore import paths_of, state_leaves, type_of
from alpa_lite.executor.state_rows import whole_types
from alpa_lite.numeric import positive, whole
from alpa_lite.plan.checkpoint_folder import CheckpointFolder
from alpa_lite.plan.files import as_path
from alpa_lite.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a training loop writes its state, and how often.

    Attributes:
        dir: folder of all checkpoints; ``al.fit`` makes it before its first step.
        every: steps between two checkpoints.
        keep: how many of the last ones stay.

    Raises:
        CheckpointError: a value is not allowed.

    Example:
        >>> al.Checkpoint("checkpoints", every=200, keep=3)
    """

    dir: str | PathLike[str]
    every: int = 200
    keep: int = 3

    def __post_init__(self) -> None:
        as_path(self.dir, 'al.Checkpoint("checkpoints")', CheckpointError)
        for name in ("every", "keep"):
            value = positive(getattr(self, name))
            if value is None:
                raise CheckpointError(
                    f"al.Checkpoint got {name}={getattr(self, name)!r:.60}. It must be a whole number of at least 1. At "
                    f"{user_line()}. Correct it, e.g. al.Checkpoint(dir, every=200, keep=3)."
                )
            object.__setattr__(self, name, value)

    def open(self) -> CheckpointFolder:
        """The checkpoints in ``dir``, of which ``keep`` stay; the same object must begin and commit."""
        return CheckpointFolder(as_path(self.dir, 'al.Checkpoint("checkpoints")', CheckpointError), self.keep)


def checkpoint_folder(dir: object, call: str) -> CheckpointFolder:
    """All checkpoints in a folder, of which none is removed."""
    return CheckpointFolder(as_path(dir, call, CheckpointError))


def checked_step(step: object, call: str) -> int:
    """A number of steps; ``call``: how the user's begins, e.g. "step.save(dir, state"."""
    found = whole(step)
    if found is None or found < 0:
        raise CheckpointError(
            f"{call.partition('(')[0]} got step={step!r:.60}. It must be a whole number, how many steps the state has seen. At "
            f"{user_line()}. Correct it, e.g. {call}, step=200)."
        )
    return found


def check_saved(state: Any, plan: Plan, argnum: int) -> None:
    """Checks that a state is what the plan's step takes.

    Raises:
        CheckpointError: it has other leaves.
    """
    given = {path: type_of(leaf) for path, leaf in paths_of(state)}
    planned = whole_types(state_leaves(plan, argnum))
    if given != planned:
        path = next(p for p in (*planned, *given) if given.get(p) != planned.get(p))
        raise CheckpointError(
            f"step.save got a state of {len(given)} leaves, argument {argnum} of the plan has {len(planned)}; first difference "
            f"at {path!r}: given {_text(given.get(path))}, planned {_text(planned.get(path))}. It must be exactly what the step "
            f"takes there. At {user_line()}. Pass that argument alone, or set argnum."
        )


def _text(kind: tuple[tuple[int, ...], str] | None) -> str:
    return f"{kind[1]}[{','.join(map(str, kind[0]))}]" if kind else "no such leaf"


def argument_tree(plan: Plan, argnum: int) -> Any:
    """The pytree structure of an argument.

    Raises:
        ArgumentsError: the plan was read from a file, or has no such argument.
    """
    tree = getattr(plan.trees, "in_tree", None)
    if tree is None:
        raise ArgumentsError(
            "step.restore needs the structure of the arguments, and the plan was read from a file, which holds paths alone. It "
            f"is known after step.plan(*shapes) or a call. At {user_line()}. Call step.plan(*shapes) first."
        )
    chosen = list(whole_types(state_leaves(plan, argnum)))
    args, kwargs = jax.tree_util.tree_unflatten(tree, list(range(tree.num_leaves)))
    for part in (*args, *kwargs.values()):
        structure = jax.tree_util.tree_structure(part)
        if chosen and [path for path, _ in paths_of(part)] == chosen:
            return structure
    raise ArgumentsError(
        f"step.restore got argnum={argnum}. It must be the position of an argument that has leaves. At {user_line()}. Correct it."
    )
