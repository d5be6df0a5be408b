"""``follow=``: parameters lie as another plan has them, so that they are used where they are and nothing is moved.

1. ``followed_plan``: what the user gave -> layouts by path, and the mesh that they are for. Parameters are what is trained; of a
   function that trains nothing all arguments are looked at, and those with one path, shape and dtype follow.
2. ``following_options``: that mesh is the only one that is tried; the same axes on other sizes would be another layout.
3. ``counterparts``: which leaf of this function is which parameter of the other.
4. ``fixed_pins``: those leaves are pinned; a pin of the user's that says something else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import PartitionSpec

from alpa_lite.api.bound import Parallelized
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Program, Value
from alpa_lite.errors import PinError
from alpa_lite.plan.pins import Dims, PinnedDims, ResolvedPins
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import LeafRole
from alpa_lite.planner.options import PlanOptions
from alpa_lite.trace.pins import pinned_dims

ORIGIN = "follow"  # of pins that come from here


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """Where parameters lie.

    Attributes:
        specs: path -> what is fixed there, by the rank of the leaf.
        values: path -> shape and dtype; empty where only a layout was given.
        trained: whether all of them are parameters for sure.
        mesh: which the specs are for; None where only a layout was given.
        cluster: the text of it; "" where only a layout was given.
    """

    specs: Mapping[str, Callable[[int], Dims]]
    values: Mapping[str, Value]
    trained: bool = True
    mesh: DeviceMesh | None = None
    cluster: str = ""


def followed_plan(given: Any, source: str) -> Followed:
    """Reads ``follow=``.

    Raises:
        PinError: it is none of what is allowed, a step without a plan yet, or a plan of several stages.
    """
    plan = given.known_plan() if isinstance(given, Parallelized) else given
    if plan is None:
        raise PinError(
            f"follow={given!r} was given, which has no plan yet. A step has one after its first call, step.plan(...), or with "
            f"parallelize(plan=...). At {source}. Call step.plan(*shapes) first."
        )
    if isinstance(plan, Plan):
        if plan.pipeline is not None:
            raise PinError(
                f"follow was given a plan of {len(plan.stages)} stages. Parameters of one mesh can be followed. At {source}. "
                "Plan the followed step with PlanOptions(num_stages=1), or pin parameters and stages (pins=, al.pin_stage)."
            )
        parameters = [leaf for leaf in plan.inputs if leaf.role is LeafRole.PARAMETER] or plan.inputs
        return Followed(
            specs={leaf.path: _always(leaf.spec.dims) for leaf in parameters},
            values={leaf.path: leaf.value for leaf in parameters},
            trained=any(leaf.role is LeafRole.PARAMETER for leaf in parameters),
            mesh=plan.mesh,
            cluster=plan.identity.cluster,
        )
    entries = plan.values() if isinstance(plan, Mapping) else ()
    if not entries or not all(_is_placed(entry) for entry in entries):
        raise PinError(
            f"follow={plan!r:.80} was given. Allowed are a parallelized step, a plan, or a plan's parameter_layout: path -> "
            f"(stage, PartitionSpec). At {source}. Write for example follow=train_step."
        )
    if stages := sorted({stage for stage, _ in entries} - {0}):
        raise PinError(
            f"follow was given a layout with parameters on stage {stages[0]}. Parameters of one mesh can be followed. At "
            f"{source}. Plan the followed step with PlanOptions(num_stages=1)."
        )
    return Followed(specs={path: _by_rank(spec) for path, (_, spec) in plan.items()}, values={})


def _is_placed(entry: Any) -> bool:
    pair = isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], int)
    return pair and isinstance(entry[1], PartitionSpec)


def _always(dims: Dims) -> Callable[[int], Dims]:
    return lambda rank: dims


def _by_rank(spec: PartitionSpec) -> Callable[[int], Dims]:
    return lambda rank: pinned_dims(spec, rank)


def following_options(options: PlanOptions, followed: Followed, cluster: Cluster, source: str) -> PlanOptions:
    """The options with the mesh of what is followed.

    Raises:
        PinError: the options or the cluster are for another mesh, or nothing says which one.
    """
    mesh = followed.mesh
    if options.has_stages:
        raise PinError(
            f"follow was given with num_stages={options.num_stages}. What is followed lies on one mesh. At {source}. Leave "
            "num_stages out."
        )
    if mesh is None:
        if options.mesh_shape is None or options.axis_names is None:
            raise PinError(
                "follow was given a parameter_layout, which names axes and not their sizes. The same axes in other sizes are "
                f"another layout. At {source}. Give follow=plan instead, or PlanOptions(mesh_shape=..., axis_names=...) of the "
                "plan that it comes from."
            )
        return options
    if followed.cluster != str(cluster):
        raise PinError(
            f"follow was given a plan for {followed.cluster}, and this one is for {cluster}. Parameters stay where they are only "
            f"on the same devices. At {source}. Plan both for one cluster."
        )
    shape, names = options.mesh_shape or mesh.shape, options.axis_names or mesh.axis_names
    if (shape, names) != (mesh.shape, mesh.axis_names):
        raise PinError(
            f"follow was given a plan on the mesh {mesh}, with PlanOptions(mesh_shape={options.mesh_shape}, "
            f"axis_names={options.axis_names}). Parameters stay where they are only on the same mesh. At {source}. Leave these "
            "options out."
        )
    return replace(options, mesh_shape=mesh.shape, axis_names=mesh.axis_names)


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


def fixed_pins(pins: ResolvedPins, found: Mapping[int, tuple[str, Dims]], source: str) -> ResolvedPins:
    """The pins with the layouts that are followed.

    Raises:
        PinError: a pin says something else.
    """
    inputs = list(pins.inputs)
    for position, (other, dims) in found.items():
        own = inputs[position]
        fixed = PinnedDims(path=own.path, shape=own.shape, dims=dims, origin=own.origin or f"{ORIGIN} {other}")
        if any(a is not None and a != b for a, b in zip(own.dims, dims, strict=True)):
            raise PinError(
                f"the pin {own.origin!r} has {own.path!r} as {own}, and it follows {other!r}, which is {fixed} (? is free, _ "
                f"whole). It would have to be moved. At {source}. Take the pin away, or do not let this leaf follow."
            )
        inputs[position] = fixed
    others = [pinned.path for n, pinned in enumerate(inputs) if n not in found]
    free = f"; others are planned: {', '.join(others[:3])}" + (f" and {len(others) - 3} more" if others[3:] else "")
    note = f"follow: {len(found)} parameters lie as they are" + (free if others else "")
    return replace(pins, inputs=tuple(inputs), notes=(*pins.notes, note))
