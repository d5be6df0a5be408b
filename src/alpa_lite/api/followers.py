"""Which leaves of a function follow those of another plan (``follow.py``), and how that fixes them.

1. ``stages_here``: where parameters lie on several stages, which leaf of this function lies on which: its layers are cut so,
   but for leaves that stages of a function without a gradient sent each other.
2. ``counterparts``: which leaf of this function is which parameter of the other.
3. ``fixed_pins``: those leaves are pinned; a pin of the user's that says something else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from alpa_lite.api.follow import Followed
from alpa_lite.core.program import Program, Value
from alpa_lite.errors import PinError
from alpa_lite.plan.leaf_rows import rows_path, split_path
from alpa_lite.plan.pins import Dims, ResolvedPins
from alpa_lite.plan.plan import Plan

ORIGIN = "follow"  # of pins that come from here


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafHomes:
    """Where leaves of a function must lie on stages; paths are of its argument leaves, or of rows of them.

    Attributes:
        stages: path -> stage.
        readers: of those whose readers lie there, too.
        sometimes: paths of readers that lie there in some of the graphs that are followed, and elsewhere in others.
        kept: paths of what is not copied to other stages, whatever it is.
    """

    stages: Mapping[str, int] = field(default_factory=dict)
    readers: Mapping[str, int] = field(default_factory=dict)
    sometimes: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()

    @property
    def cuts(self) -> dict[str, int | None]:
        """What layers must be cut at: path -> the stage of its readers; None = anywhere, as only its rows are said."""
        return {path: self.readers.get(path) for path in self.stages}

    @property
    def elsewhere(self) -> frozenset[str]:
        """Paths of what other stages read as well, or alone, as far as that is known."""
        return frozenset(self.stages.keys() - self.readers.keys())

    def loosened(self) -> LeafHomes:
        """Where layers cannot be cut so that all ``readers`` lie there."""
        readers = {path: stage for path, stage in self.readers.items() if path not in self.sometimes}
        return replace(self, readers=readers, sometimes=frozenset())


def stages_here(program: Program, followed: Any, like: Mapping[str, str] | None, source: str) -> LeafHomes:
    """Where the argument leaves of this function, or rows of them, lie on stages.

    Args:
        program: of the function as it is, its layers not cut.
        followed, like, source: as of ``counterparts``, which raises what this does.
    """
    if not isinstance(followed, Followed) or not followed.stages:
        return LeafHomes()
    rows: dict[str, list[tuple[tuple[int, int] | None, str]]] = {}
    for path in followed.stages:
        whole, part = split_path(path)
        rows.setdefault(whole, []).append((part, path))
    whole = replace(
        followed, specs={path: lambda rank: (None,) * rank for path in rows}, values=_whole_values(followed.values)
    )
    found = {}
    for position, (other, _) in counterparts(program, whole, like, source).items():
        path = program.input_paths[position]
        found |= {path if part is None else rows_path(path, *part): there for part, there in rows[other]}
    stages = {path: followed.stages[there] for path, there in found.items()}
    return LeafHomes(
        stages=stages,
        readers={
            path: stage for path, stage in stages.items() if found[path] not in followed.elsewhere - followed.sometimes
        },
        sometimes=frozenset(path for path in stages if found[path] in followed.sometimes),
        kept=frozenset(path for path in found if followed.kept is None or found[path] in followed.kept),
    )


def _whole_values(values: Mapping[str, Value]) -> dict[str, Value]:
    """Of leaves that lie in parts, the last of which ends the leaf."""
    found: dict[str, Value] = {}
    for path, value in values.items():
        whole, part = split_path(path)
        size = max(part[1], found[whole].shape[0] if whole in found else 0) if part else 0
        found[whole] = replace(value, shape=(size, *value.shape[1:])) if part else value
    return found


def check_stages(plan: Plan, homes: Mapping[str, int], source: str) -> None:
    """That leaves lie on the stages on which they must.

    Raises:
        PinError: one does not, or lies in other rows.
    """
    stages = {leaf.path: leaf.stage for leaf in plan.inputs}
    for path, stage in homes.items():
        if stages.get(path) != stage:
            found = f"lies on stage {stages[path]}" if path in stages else "is cut in other rows, or in none"
            raise PinError(
                f"the leaf {path!r} is followed to stage {stage}, and here it {found}. It would have to be moved. At {source}. "
                "Mark the layers of both functions alike with al.layer_boundary, or do not let this leaf follow (follow_like)."
            )


def counterparts(
    program: Program, followed: Any, like: Mapping[str, str] | None, source: str
) -> dict[int, tuple[str, Dims]]:
    """Position of an argument leaf -> the parameter that it is, and how that lies.

    Without ``like``, paths are equal; or else, for one argument, what follows the argument's own segment is how the paths of
    parameters end ("0/dense/kernel" is "0/params/dense/kernel").

    Raises:
        PinError: nothing matches, several do, shape or dtype differ, or ``followed`` was not read by ``followed_plan``.
    """
    # Not read yet where plans are made in another way than by Request.plan, which also fixes the mesh.
    if not isinstance(followed, Followed):
        raise PinError(
            f"a step with follow=... was given where layouts are chosen for several functions. At {source}. Give the plain "
            "function, and pins for what must lie as it is."
        )
    paths = program.input_paths
    found = _by_like(paths, followed, like, source) if like is not None else _by_path(paths, followed, source)
    made = {}
    for position, other in found.items():
        value = program.values[program.inputs[position]]
        wanted = followed.values.get(other)
        if wanted is not None and (wanted.shape, wanted.dtype) != (value.shape, value.dtype):
            if not followed.trained and like is None:  # a batch of another size
                continue
            raise PinError(
                f"the leaf {paths[position]!r} is {value}, and {other!r}, which it would follow, is {wanted}. A parameter that "
                f"stays where it is has one shape and dtype. At {source}. Give this function the same arrays, or say with "
                "follow_like={'path here': 'path there'} which leaves follow."
            )
        dims = followed.specs[other](len(value.shape))
        if len(dims) != len(value.shape):
            raise PinError(
                f"the leaf {paths[position]!r} is {value}, and the layout of {other!r} has {len(dims)} dims. At {source}. Give "
                "the layout of these parameters."
            )
        made[position] = other, dims
    if not found:
        raise PinError(
            f"follow_like={dict(like or {})!r} names no leaf, so that nothing can follow. A path of this function and one of the "
            f"parameters that are followed is allowed, at least one pair. At {source}. Leave follow_like out where the paths are "
            "the same, or leave out follow."
        )
    if not made:
        position, other = next(iter(found.items()))
        raise PinError(
            f"nothing can follow: {paths[position]!r} is {program.values[program.inputs[position]]}, and {other!r} is "
            f"{followed.values[other]}, as with all leaves of one path. At {source}. Give this function the same arrays, or say "
            "with follow_like={'path here': 'path there'} which leaves follow."
        )
    return made


def _by_path(paths: Sequence[str], followed: Followed, source: str) -> dict[int, str]:
    if equal := {position: path for position, path in enumerate(paths) if path in followed.specs}:
        return equal
    ends: dict[str, list[str]] = {}
    for path in followed.specs:
        segments = path.split("/")
        for start in range(1, len(segments)):
            ends.setdefault("/".join(segments[start:]), []).append(path)
    by_argument: dict[str, dict[int, str]] = {}
    for position, path in enumerate(paths):
        argument, _, rest = path.partition("/")
        matches = ends.get(rest, [])
        if len(matches) > 1:
            raise PinError(
                f"the leaf {path!r} could follow {matches[0]!r} or {matches[1]!r}. At {source}. Say which with "
                "follow_like={'path here': 'path there'}, e.g. {'0': '0/params'}."
            )
        if matches:
            by_argument.setdefault(argument, {})[position] = matches[0]
    if len(by_argument) != 1:
        what = f"arguments {', '.join(by_argument)} have" if by_argument else "no argument has"
        raise PinError(
            f"follow: {what} leaves with the paths of parameters that are followed, e.g. {next(iter(followed.specs), 'none')!r}. "
            f"One argument holds them, e.g. {paths[0] if paths else 'none'!r}. At {source}. Say which leaves follow with "
            "follow_like={'path here': 'path there'}, e.g. {'0': '0/params'}."
        )
    return next(iter(by_argument.values()))


def _by_like(paths: Sequence[str], followed: Followed, like: Any, source: str) -> dict[int, str]:
    if not isinstance(like, Mapping) or not all(isinstance(x, str) for pair in like.items() for x in pair):
        raise PinError(
            f"follow_like={like!r} was given. It is a dict of paths: leaves under the first follow those under the second, of "
            f"the plan that is followed. At {source}. Write for example follow_like={{'0': '0/params'}}."
        )
    found: dict[int, str] = {}
    for here, there in like.items():
        own = {
            position: there + path[len(here) :]
            for position, path in enumerate(paths)
            if path == here or path.startswith(here + "/")
        }
        matched = {position: other for position, other in own.items() if other in followed.specs}
        if not matched:
            raise PinError(
                f"follow_like {{{here!r}: {there!r}}} matches no leaf. The first is a path of this function's arguments, e.g. "
                f"{paths[0] if paths else 'none'!r}, the second one of the parameters that are followed, e.g. "
                f"{next(iter(followed.specs), 'none')!r}. At {source}. Correct the paths."
            )
        found |= matched
    return found


def fixed_pins(pins: ResolvedPins, found: Mapping[int, tuple[str, Dims]], followed: Followed) -> ResolvedPins:
    """The pins with the layouts that are followed; ``found`` as of ``counterparts``.

    Raises:
        PinError: a pin says something else.
    """
    fixed = pins
    for i, (other, dims) in found.items():
        mesh = followed.meshes[followed.stages[other]] if followed.meshes else followed.mesh
        fixed = fixed.with_fixed({i: (dims, f"{ORIGIN} {other}")}, mesh)
    inputs = fixed.inputs
    others = [pinned.path for n, pinned in enumerate(inputs) if n not in found]
    free = f"; others are planned: {', '.join(others[:3])}" + (f" and {len(others) - 3} more" if others[3:] else "")
    note = f"follow: {len(found)} parameters lie as they are" + (free if others else "")
    return replace(pins, inputs=inputs, notes=(*pins.notes, note))
