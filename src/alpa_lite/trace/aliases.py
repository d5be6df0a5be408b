"""Which results of a function are the next values of which arguments, by their paths and types."""

from __future__ import annotations

from typing import Any

from alpa_lite.core.program import Value

_Types = list[tuple[Any, ...] | None]  # per leaf; None of literals


def find_aliases(
    values: tuple[Value, ...],
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    in_paths: list[str],
    out_paths: list[str],
    donated: list[bool],
) -> tuple[tuple[int, int], ...]:
    """Which result leaf is the next step's value of which argument leaf.

    A result and an argument belong together when their paths agree after the leading position and their types are equal;
    among several such arguments the one whose position equals the result's, else the first still free. Donated arguments
    that found no partner this way take the first free result of their type, as XLA's donation does.
    """
    in_types, out_types = _types(values, inputs), _types(values, outputs)
    taken = _of_one_path(in_types, out_types, in_paths, out_paths)
    used = set(taken.values())
    for i in range(len(in_paths)):
        if donated[i] and i not in used:
            for o, kind in enumerate(out_types):
                if o not in taken and kind == in_types[i]:
                    taken[o] = i
                    used.add(i)
                    break
    return tuple(sorted((i, o) for o, i in taken.items()))


def _types(values: tuple[Value, ...], numbers: tuple[int, ...]) -> _Types:
    """Of arguments or results; None of literals."""
    return [None if v < 0 else (values[v].shape, values[v].dtype) for v in numbers]


def _of_one_path(in_types: _Types, out_types: _Types, in_paths: list[str], out_paths: list[str]) -> dict[int, int]:
    """Result -> the argument of its path and type."""
    by_tail: dict[tuple[str, Any], list[int]] = {}
    for i, path in enumerate(in_paths):
        for tail in (_tail(path), path):
            by_tail.setdefault((tail, in_types[i]), []).append(i)
    places = _places_of_numbers(in_types, out_types, in_paths, out_paths)
    taken: dict[int, int] = {}
    used: set[int] = set()
    for o, path in enumerate(out_paths):
        if out_types[o] is None:
            continue
        rest = _below(path)
        tail = _tail(rest)
        # A bare array argument has no path of its own. It may be a member of a tuple of results; the only result of all
        # is taken for the next value of the first argument, of no other.
        tails = (tail, rest) if tail or not rest or rest.isdigit() else (rest,)
        candidates = [i for t in tails for i in by_tail.get((t, out_types[o]), []) if i not in used]
        if not rest:
            candidates = [i for i in candidates if i == 0]
        candidates = [i for i in candidates if o in places.get(i, (o,))]
        if candidates:
            best = min(candidates, key=lambda i: (in_paths[i] != rest, i))
            taken[o] = best
            used.add(best)
    return taken


def _places_of_numbers(
    in_types: _Types, out_types: _Types, in_paths: list[str], out_paths: list[str]
) -> dict[int, set[int]]:
    """Arguments whose paths are of numbers alone, as in a list of layers -> results that may be their next values.

    Every list and every tuple has such paths: of ``f([h0, h1], x) -> (y, [new_h0, new_h1])`` the first result is no next value
    of ``h0``. They are those of one list: every leaf of the argument is there, among all results or within one of them.
    """
    found: dict[int, set[int]] = {}
    below: dict[str, dict[str, int]] = {"": {_below(path): o for o, path in enumerate(out_paths)}}
    for o, path in enumerate(out_paths):
        below.setdefault(argument_of(_below(path)), {})[_tail(_below(path))] = o
    members: dict[str, list[int]] = {}
    for i, path in enumerate(in_paths):
        members.setdefault(argument_of(path), []).append(i)
    for leaves in members.values():
        tails = {i: _tail(in_paths[i]) for i in leaves}
        numbered = [i for i, tail in tails.items() if tail and all(part.isdigit() for part in tail.split("/"))]
        if not numbered:
            continue
        places = [
            place
            for place, results in below.items()
            if all(tails[i] in results and out_types[results[tails[i]]] in (in_types[i], None) for i in leaves)
        ]
        inner = [place for place in places if place] or places  # of two ways to see it, the narrower one
        for i in numbered:
            found[i] = {below[place][tails[i]] for place in inner}
    return found


def _below(path: str) -> str:
    """Of a result, without ``out``."""
    return path.removeprefix("out").removeprefix("/")


def _tail(path: str) -> str:
    return path.partition("/")[2]


def find_state(
    values: tuple[Value, ...],
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    in_paths: list[str],
    out_paths: list[str],
    donated: list[bool],
) -> tuple[frozenset[int], tuple[tuple[int, int], ...]]:
    """Of a function without a gradient: positions of the argument leaves that stay from call to call, those of the first
    argument and those with a next value; and pairs of the latter with its position among the results.

    Of other arguments than the first, types alone say nothing: an activation that goes in, donated or not, has the type of one
    that comes out.
    """
    found = find_aliases(values, inputs, outputs, in_paths, out_paths, donated)
    by_path = find_aliases(values, inputs, outputs, in_paths, out_paths, [False] * len(donated))
    kept = {i for i, p in enumerate(in_paths) if argument_of(p) == argument_of(in_paths[0])}
    state = [
        (i, o)
        for i, o in found
        if (i in kept and donated[i]) or ((i, o) in by_path and _agree(in_paths[i], out_paths[o]))
    ]
    return frozenset(kept) | {i for i, _ in state}, tuple(state)


def argument_of(path: str) -> str:
    """The position or name of the argument that a leaf is of."""
    return path.partition("/")[0]


def _agree(before: str, after: str) -> bool:
    """Whether paths of an argument and a result are those of one leaf of a state, wherever the state is passed."""
    rest, tail = _below(after), _tail(before)
    return before == rest or (tail != "" and tail in (rest, _tail(rest)))
