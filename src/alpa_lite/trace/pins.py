"""What users write as pins -> ``ResolvedPins``: one record per leaf, or an error that says what to fix.

In order: ``read_keys`` (a dict of keys, or a pytree shaped like the arguments), ``_assign`` (which key counts for which
leaf), ``_apply_pin_like`` (leaves that follow others), and the check on the mesh, if it is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import PartitionSpec

from alpa_lite.core.mesh import DeviceMesh, is_axis_name
from alpa_lite.errors import PinError
from alpa_lite.plan.identity import close_matches
from alpa_lite.plan.pins import Dims, PinnedDims, ResolvedPins
from alpa_lite.trace.paths import below, is_glob, leaf_paths, select

SHOWN_PATHS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PinKey:
    """One pin as written.

    Attributes:
        text: the key, or the path within a pytree of pins.
        spec: its value; None for free.
        rank: how strongly it holds: an exact path or a pytree of pins over a glob over an annotation.
        subtree: whether it holds for all leaves under ``text`` (pytrees of pins may be prefixes, as in ``jax.jit``).
    """

    text: str
    spec: PartitionSpec | None
    rank: int
    subtree: bool = False


ANNOTATION, GLOB, EXACT = 0, 1, 2


@dataclass(slots=True)
class _Leaves:
    """The leaves under resolution: arguments first, then results."""

    paths: list[str]
    shapes: list[tuple[int, ...]]
    num_inputs: int
    source: str
    pinned: list[PinnedDims] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        pairs = zip(self.paths, self.shapes, strict=True)
        self.pinned = [PinnedDims(path=path, shape=shape, dims=(None,) * len(shape)) for path, shape in pairs]
        self.ranks = [-1] * len(self.paths)


def resolve_pins(
    pins: Any,
    pin_like: Mapping[str, str] | None,
    input_paths: Sequence[str],
    input_shapes: Sequence[tuple[int, ...]],
    output_paths: Sequence[str],
    output_shapes: Sequence[tuple[int, ...]],
    *,
    mesh: DeviceMesh | None,
    source: str,
    annotations: Mapping[str, PartitionSpec] | None = None,
) -> ResolvedPins:
    """Resolves pins against the leaves of one step.

    Args:
        pins: None, a dict of path or glob to ``PartitionSpec``/None, or a pytree of them shaped like the arguments (a
            tuple with one entry per positional argument; prefixes allowed).
        pin_like: {"0/opt_state": "0/params"}: leaves under the first follow their counterparts under the second.
        input_paths, input_shapes, output_paths, output_shapes: the leaves, in pytree order.
        mesh: to check axes and sizes; None while meshes are searched (then call ``ResolvedPins.check`` for each).
        source: where in the user's code the pins came in, for messages.
        annotations: path to spec, binding annotations found in the arguments; weaker than any pin.

    Raises:
        PinError: see the tests of this module for every case and its wording.

    Example:
        >>> pins = {"0/*/kernel": P(None, "model")}
        >>> str(resolve_pins(pins, None, ["0/a/kernel"], [(4, 8)], [], [], mesh=None, source="here").inputs[0])
        '[_,model]'
    """
    if not isinstance(pin_like, Mapping | None):
        raise PinError(
            f"pin_like={pin_like!r} was given. It is a dict of paths: leaves under the first follow those under the second. At "
            f"{source}. Write for example pin_like={{'0/opt_state': '0/params'}}."
        )
    for pair in (pin_like or {}).items():
        if not all(isinstance(side, str) for side in pair):
            raise PinError(
                f"pin_like has {pair[0]!r}: {pair[1]!r}. Both are paths of arguments, as text. At {source}. Write for example "
                "pin_like={'0/opt_state': '0/params'}."
            )
    leaves = _Leaves(
        paths=[*input_paths, *output_paths],
        shapes=[tuple(shape) for shape in (*input_shapes, *output_shapes)],
        num_inputs=len(input_paths),
        source=source,
    )
    keys = read_keys(pins, input_paths, source)
    weak = [PinKey(text=path, spec=spec, rank=ANNOTATION) for path, spec in (annotations or {}).items()]
    for key in weak + sorted(keys, key=lambda key: key.rank):
        _assign(key, leaves)
    ties = [tie for target, origin in (pin_like or {}).items() for tie in _apply_pin_like(target, origin, leaves)]
    resolved = ResolvedPins(
        inputs=tuple(leaves.pinned[: leaves.num_inputs]),
        outputs=tuple(leaves.pinned[leaves.num_inputs :]),
        ties=tuple(ties),
        axis_names=_axis_names(keys + weak),
        keys=tuple((key.text, spec_text(key.spec)) for key in keys if key.spec is not None or not key.subtree),
        notes=tuple(leaves.notes),
        source=source,
    )
    if mesh is not None:
        resolved.check(mesh)
    return resolved


def read_keys(pins: Any, input_paths: Sequence[str], source: str) -> list[PinKey]:
    """The pins as written, in order; refuses values that are no specs and pytrees that do not fit the arguments."""
    if pins is None:
        return []
    if _is_path_dict(pins):
        for text, spec in pins.items():
            _check_value(text, spec, source)
        return [PinKey(text=text, spec=spec, rank=GLOB if is_glob(text) else EXACT) for text, spec in pins.items()]
    found = leaf_paths(pins, "", is_leaf=lambda x: x is None or isinstance(x, PartitionSpec))
    for text, spec in found:
        _check_value(text, spec, source)
    _check_tree([text for text, _ in found], [text for text, spec in found if spec is not None], input_paths, source)
    return [PinKey(text=text, spec=spec, rank=EXACT, subtree=True) for text, spec in found]


def _is_path_dict(pins: Any) -> bool:
    """A dict with a "/" or "*" in a key, or with nothing but specs as values, is keyed by path."""
    if not isinstance(pins, Mapping) or not all(isinstance(key, str) for key in pins):
        return False
    specs = all(value is None or isinstance(value, PartitionSpec) for value in pins.values())
    return specs or any("/" in key or is_glob(key) for key in pins)


def _check_value(text: str, spec: Any, source: str) -> None:
    if spec is not None and not isinstance(spec, PartitionSpec):
        raise PinError(
            f"the pin {text!r} has the value {spec!r:.60} of type {type(spec).__name__}. A pin is a"
            f" jax.sharding.PartitionSpec, or None for free. At {source}. Write for example P(None, 'model')."
        )
    if spec is not None and (spec.unreduced or spec.reduced):
        raise PinError(
            f"the pin {text!r} asks for {spec_text(spec)}. A pin says how dims are split; whether a value is unreduced"
            f" is for the planner to choose. At {source}. Leave `unreduced` and `reduced` out."
        )
    if spec is not None:
        axes = [axis for entry in _entries(spec) for axis in entry or ()]
        twice = sorted({axis for axis in axes if axes.count(axis) > 1})
        if twice:
            raise PinError(
                f"the pin {text!r} uses the axis {twice[0]!r} twice in {spec_text(spec)}. An axis can split one dim of"
                f" a tensor. At {source}. Leave it on one dim."
            )
        if wrong := [axis for axis in axes if not is_axis_name(axis)]:
            raise PinError(
                f"the pin {text!r} names the axis {wrong[0]!r} in {spec_text(spec)}. Letters, digits and underscores are "
                f"allowed, no digit first, and no '_' alone. At {source}. Rename it, also in PlanOptions(axis_names=...)."
            )


def _check_tree(texts: list[str], pinned: list[str], input_paths: Sequence[str], source: str) -> None:
    covered = {position for text in texts for position in below(text, input_paths)}
    nowhere = [text for text in pinned if not below(text, input_paths)]
    missing = [path for position, path in enumerate(input_paths) if position not in covered]
    if nowhere or missing:
        facts = [f"it has a spec at {_some(nowhere)}, where the arguments have no leaf"] if nowhere else []
        facts += [f"it has nothing for {_some(missing)}"] if missing else []
        raise PinError(
            f"the pytree of pins does not fit the arguments: {'; '.join(facts)}. It is a tuple with one entry per"
            " argument, each shaped like the argument or a prefix of it, with PartitionSpec or None as leaves."
            f" At {source}. Put None where you want no pin, or use a dict of paths such as {{'0/**/kernel': P('x')}}."
        )


def _assign(key: PinKey, leaves: _Leaves) -> None:
    """Gives the key's spec to its leaves; keys come in order of strength, so a later one replaces a weaker one."""
    if key.subtree and key.spec is None:
        return
    found = below(key.text, leaves.paths[: leaves.num_inputs]) if key.subtree else select(key.text, leaves.paths)
    if not found and not key.subtree and key.rank != ANNOTATION:
        _refuse_no_match(key, leaves)
    length = len(key.spec.partitions) if key.spec is not None else 0
    exact = key.text in leaves.paths
    skipped = [position for position in found if len(leaves.shapes[position]) < length]
    if skipped and exact:
        path, shape = leaves.paths[skipped[0]], leaves.shapes[skipped[0]]
        raise PinError(
            f"the pin {key.text!r} has {length} dims, {spec_text(key.spec)}, but {path!r} has shape {shape}. A spec"
            f" has at most one entry per dim; missing ones mean replicated. At {leaves.source}. Shorten the spec."
        )
    if skipped and len(skipped) == len(found):
        raise PinError(
            f"the pin {key.text!r} with {spec_text(key.spec)} matches only leaves of lower rank:"
            f" {_shaped(found, leaves)}. A spec has at most one entry per dim. At {leaves.source}. Shorten the spec, or"
            " match other leaves."
        )
    if skipped:
        leaves.notes.append(
            f"pin {key.text!r}: {spec_text(key.spec)} has {length} dims, so leaves of lower rank stay free:"
            f" {_shaped(skipped, leaves)}"
        )
    for position in found:
        if position not in skipped:
            _set(key, position, leaves)


def _set(key: PinKey, position: int, leaves: _Leaves) -> None:
    old, rank = leaves.pinned[position], leaves.ranks[position]
    new = replace(old, dims=pinned_dims(key.spec, len(old.shape)), origin=key.text)
    if rank == GLOB == key.rank and new.dims != old.dims:
        raise PinError(
            f"the pins {old.origin!r} and {key.text!r} disagree on {old.path!r}: {old} and {new} (? is free, _ whole)."
            f" Globs that match one leaf must agree; an exact path beats both. At {leaves.source}. Add the pin"
            f" {old.path!r} with the spec you want, or narrow one of the globs."
        )
    if rank == GLOB == key.rank:
        return
    leaves.pinned[position], leaves.ranks[position] = new, key.rank


def _refuse_no_match(key: PinKey, leaves: _Leaves) -> None:
    close = close_matches(key.text, leaves.paths) or f" There are {_some(leaves.paths)}."
    what = "glob" if is_glob(key.text) else "path"
    raise PinError(
        f"the pin {key.text!r} matches no argument or result leaf. A {what} starts with an argument's position or"
        f" keyword, or with 'out'; * is one segment, ** any number.{close} At {leaves.source}. Correct the key or"
        " remove it."
    )


def _apply_pin_like(target: str, origin: str, leaves: _Leaves) -> list[tuple[int, int]]:
    """Lays out leaves under ``target`` as their counterparts under ``origin``; the ties where those are free."""
    paths = leaves.paths[: leaves.num_inputs]
    targets, sources = below(target, paths), below(origin, paths)
    for name, found in ((target, targets), (origin, sources)):
        if not found:
            close = close_matches(name, _prefixes(paths)) or f" There are {_some(paths)}."
            raise PinError(
                f"pin_like {{{target!r}: {origin!r}}}: there is no argument leaf at or under {name!r}. Both sides are"
                f" paths of arguments, without globs.{close} At {leaves.source}. Correct the path."
            )
    ties, lonely = [], []
    by_suffix = {tuple(paths[s].split("/")[origin.count("/") + 1 :]): s for s in sources}
    for position in targets:
        match = _counterpart(position, by_suffix, leaves)
        if match is not None and match != position:
            ties += _follow(position, match, target, origin, leaves)
        elif match is None and math.prod(leaves.shapes[position]) > 1:  # step counts and placeholders need no layout
            lonely.append(position)
    if not any(_counterpart(position, by_suffix, leaves) is not None for position in targets):
        raise PinError(
            f"pin_like {{{target!r}: {origin!r}}}: no leaf under {target!r} has the trailing path and the shape of one"
            f" under {origin!r}, e.g. {_shaped(targets, leaves)} against {_shaped(sources, leaves)}. At"
            f" {leaves.source}. Check the paths, or pin the leaves directly."
        )
    if lonely:
        leaves.notes.append(f"pin_like {target!r} -> {origin!r}: no counterpart for {_shaped(lonely, leaves)}")
    return ties


def _counterpart(position: int, by_suffix: dict[tuple[str, ...], int], leaves: _Leaves) -> int | None:
    """The leaf whose path below the origin is the longest trailing part of this leaf's path, if shapes agree."""
    segments = tuple(leaves.paths[position].split("/"))
    for start in range(len(segments) + 1):
        match = by_suffix.get(segments[start:])
        if match is not None and leaves.shapes[match] == leaves.shapes[position]:
            return match
    return None


def _follow(position: int, match: int, target: str, origin: str, leaves: _Leaves) -> list[tuple[int, int]]:
    """One leaf takes the pin of another; where dims stay free the two are tied: the planner decides for both."""
    own, other, rank = leaves.pinned[position], leaves.pinned[match], leaves.ranks[position]
    if rank == EXACT:
        return []
    if rank != GLOB:
        dims, origin = other.dims, f"{other.origin} by pin_like {target}"
        leaves.pinned[position] = replace(own, dims=dims, origin="" if other.is_free else origin)
    elif any(a is not None and b is not None and a != b for a, b in zip(own.dims, other.dims, strict=True)):
        raise PinError(
            f"the pin {own.origin!r} and pin_like {{{target!r}: {origin!r}}} disagree on {own.path!r}: {own} and"
            f" {other} as {other.path!r}. A leaf that follows another has its spec; an exact path beats both. At"
            f" {leaves.source}. Add the pin {own.path!r} with the spec you want, or narrow the glob."
        )
    both = (*leaves.pinned[position].dims, *other.dims)
    return [(match, position)] if any(axes is None for axes in both) else []


def pinned_dims(spec: PartitionSpec | None, rank: int) -> Dims:
    """Per dim: axes, () for whole, None for free; missing trailing dims are whole."""
    if spec is None:
        return (None,) * rank
    entries = _entries(spec)
    return tuple(entries) + ((),) * (rank - len(entries))


def _entries(spec: PartitionSpec) -> list[tuple[str, ...] | None]:
    def entry(axes: Any) -> tuple[str, ...] | None:
        if axes is PartitionSpec.UNCONSTRAINED:
            return None
        return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)

    return [entry(axes) for axes in spec.partitions]


def spec_text(spec: PartitionSpec | None) -> str:
    """As users write it, ``P(None, 'model')``; not ``str``, whose form depends on the version of JAX."""
    if spec is None:
        return "None"
    parts = ["P.UNCONSTRAINED" if entry is PartitionSpec.UNCONSTRAINED else repr(entry) for entry in spec.partitions]
    parts += [f"{name}={set(axes)}" for name in ("unreduced", "reduced") if (axes := getattr(spec, name))]
    return f"P({', '.join(parts)})"


def _axis_names(keys: Sequence[PinKey]) -> tuple[str, ...]:
    axes = (axis for key in keys if key.spec is not None for entry in _entries(key.spec) for axis in entry or ())
    return tuple(dict.fromkeys(axes))


def _prefixes(paths: Sequence[str]) -> list[str]:
    cuts = (path.split("/") for path in paths)
    return list(dict.fromkeys("/".join(cut[: n + 1]) for cut in cuts for n in range(len(cut))))


def _some(paths: Sequence[str]) -> str:
    rest = len(paths) - SHOWN_PATHS
    return ", ".join(map(repr, paths[:SHOWN_PATHS])) + (f" and {rest} more" if rest > 0 else "")


def _shaped(positions: Sequence[int], leaves: _Leaves) -> str:
    shown = [f"{leaves.paths[p]} {leaves.shapes[p]}" for p in positions[:SHOWN_PATHS]]
    rest = len(positions) - SHOWN_PATHS
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")
