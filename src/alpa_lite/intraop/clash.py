"""Which of a user's demands cannot hold together: an irreducible infeasible subset, by QuickXplain (Junker 2004).

Pins, the memory budget and forbidden collectives are members; a member that is no cause must not be named. The result
needs about k log(n / k) + k feasibility tests for k culprits among n members, far fewer than dropping one by one (n).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def minimal_clash(members: Sequence[T], feasible: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """An infeasible subset from which no member can be left out.

    Args:
        members: demands; where several subsets clash, one that needs the earlier members is preferred.
        feasible: whether a subset can hold. Must be monotone: fewer demands are never harder.

    Returns:
        Members in the given order: infeasible together, feasible if any one is dropped. () if nothing can ever hold.

    Raises:
        ValueError: if all members together are feasible.

    Example:
        >>> minimal_clash((5, 1, 7, 2), lambda chosen: sum(chosen) < 10)
        (5, 7)
    """
    everything = tuple(members)
    if feasible(everything):
        raise ValueError(f"there is no clash to explain: all {len(everything)} demands hold together")
    if not feasible(()):
        return ()
    positions = _explain((), (), tuple(range(len(everything))), lambda p: feasible(tuple(everything[i] for i in p)))
    return tuple(everything[i] for i in sorted(positions))


def _explain(
    background: tuple[int, ...],
    added: tuple[int, ...],
    candidates: tuple[int, ...],
    feasible: Callable[[list[int]], bool],
) -> tuple[int, ...]:
    """Culprits among ``candidates``, given that ``background`` stays and that both together are infeasible.

    ``added`` is what the caller last put into the background; without it the background is known to be feasible.
    """
    if added and not feasible(sorted(background)):
        return ()
    if len(candidates) == 1:
        return candidates
    half = len(candidates) // 2
    first, second = candidates[:half], candidates[half:]
    late = _explain(background + first, first, second, feasible)
    early = _explain(background + late, late, first, feasible)
    return early + late
