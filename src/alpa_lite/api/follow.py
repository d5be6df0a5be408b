"""``follow=``: parameters lie as another plan has them, so that they are used where they are and nothing is moved.

1. ``followed_plan``: what the user gave -> layouts by path, and the mesh (of each stage) that they are for. Parameters are what
   is trained; of a function that trains nothing all arguments are looked at, and those with one path, shape and dtype follow.
2. ``following_options``: these meshes are the only ones that are tried; the same axes on other sizes would be another layout.
3. ``stages_here``: where parameters lie on several stages, which leaf of this function lies on which: its layers are cut so,
   but for leaves that stages of a function without a gradient sent each other.
4. ``counterparts``: which leaf of this function is which parameter of the other.
5. ``fixed_pins``: those leaves are pinned; a pin of the user's that says something else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import PartitionSpec

from alpa_lite.api.bound import KEPT_LEAVES, Parallelized
from alpa_lite.api.shared_layout import SharedLayout
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Program, Value
from alpa_lite.errors import PinError
from alpa_lite.plan.leaf_rows import rows_path, split_path
from alpa_lite.plan.pins import Dims, ResolvedPins
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Leaf, LeafRole
from alpa_lite.planner.options import PlanOptions
from alpa_lite.schedule import planned_schedule
from alpa_lite.trace.pins import pinned_dims

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

    def loosened(self) -> LeafHomes:
        """Where layers cannot be cut so that all ``readers`` lie there."""
        readers = {path: stage for path, stage in self.readers.items() if path not in self.sometimes}
        return replace(self, readers=readers, sometimes=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """Where parameters lie.

    Attributes:
        specs: path -> what is fixed there, by the rank of the leaf.
        values: path -> shape and dtype; empty where only a layout was given.
        trained: whether all of them are parameters for sure.
        mesh: which the specs are for; None where only a layout was given, or there are several stages.
        cluster: the text of it; "" where only a layout was given.
        stages: path -> stage, where there are several.
        submeshes, meshes: of each of these; empty where only a layout was given.
        elsewhere: paths of what other stages read as well, or alone: they do not say where readers go.
        sometimes: those of them that are read at home alone by some of several graphs.
        kept: paths of what lies on one stage, whatever it is; None = all.
    """

    specs: Mapping[str, Callable[[int], Dims]]
    values: Mapping[str, Value]
    trained: bool = True
    mesh: DeviceMesh | None = None
    cluster: str = ""
    stages: Mapping[str, int] = field(default_factory=dict)
    submeshes: tuple[tuple[int, int], ...] = ()
    meshes: tuple[DeviceMesh, ...] = ()
    elsewhere: frozenset[str] = frozenset()
    sometimes: frozenset[str] = frozenset()
    kept: frozenset[str] | None = None


def followed_plan(given: Any, source: str) -> Followed:
    """Reads ``follow=``.

    Raises:
        PinError: it is none of what is allowed, a step without a plan yet, or a plan with several stages on one submesh.
    """
    if isinstance(given, SharedLayout):
        first = next(iter(given.plans))
        found = _followed_leaves(given.plans[first], given.shared_leaves, source)
        home, elsewhere = set[str](), set(found.elsewhere)
        for name, made in given.plans.items():
            names = dict(zip(given.shared[name], given.shared[first], strict=True))
            away = _read_elsewhere(made)
            elsewhere |= {names[path] for path in away if path in names}
            home |= {
                names[leaf.path] for stage in made.stages for leaf in stage.inputs if leaf.path in names.keys() - away
            }
        return replace(found, elsewhere=frozenset(elsewhere), sometimes=frozenset(elsewhere & home))
    plan = given.known_plan() if isinstance(given, Parallelized) else given
    if plan is None:
        raise PinError(
            f"follow={given!r:.60} was given, which has no plan yet. A step has one after its first call, step.plan(...), or "
            f"with parallelize(plan=...). At {source}. Call step.plan(*shapes) first."
        )
    if isinstance(plan, Plan):
        # State of a function in stages that trains nothing is a cache, or a batch that a result may replace.
        trained = not _is_forward(plan)
        parameters = [leaf for leaf in plan.inputs if trained and leaf.role is LeafRole.PARAMETER]
        return _followed_leaves(plan, parameters or plan.inputs, source, trained=bool(parameters))
    if isinstance(plan, Mapping) and not plan:
        raise PinError(
            "follow={} was given, which has no leaf. A parameter_layout is empty where a plan trains nothing and keeps no state: "
            f"nothing says which arguments are parameters. At {source}. Give follow=plan, of which all arguments are looked at, "
            "or path -> (stage, PartitionSpec)."
        )
    entries = plan.items() if isinstance(plan, Mapping) else ()
    if not entries or not all(isinstance(path, str) and _is_placed(entry) for path, entry in entries):
        raise PinError(
            f"follow={plan!r:.80} was given. Allowed are a parallelized step, a plan, a SharedLayout, or a parameter_layout: "
            "path -> (stage, PartitionSpec), with paths as in a plan ('0/w') and stages from 0. "
            f"At {source}. Write for example follow=train_step."
        )
    stages = {path: stage for path, (stage, _) in plan.items()}
    several = stages if any(stages.values()) else {}
    return Followed(specs={path: _by_rank(spec) for path, (_, spec) in plan.items()}, values={}, stages=several)


def _followed_leaves(plan: Plan, leaves: Sequence[Leaf], source: str, *, trained: bool = True) -> Followed:
    """Those leaves of a plan's arguments."""
    found = Followed(
        specs={leaf.path: _always(leaf.spec.dims) for leaf in leaves},
        values={leaf.path: leaf.value for leaf in leaves},
        trained=trained,
        mesh=plan.mesh,
        cluster=plan.identity.cluster,
    )
    if plan.pipeline is None:
        return found
    if len({stage.first_device for stage in plan.stages}) < len(plan.stages):
        raise PinError(
            f"follow was given a plan in which several of the {len(plan.stages)} stages share a submesh. A function without a "
            f"gradient has one stage on each. At {source}. Plan the followed step without chunks, or with "
            "PlanOptions(num_stages=1)."
        )
    kept: Any = dict(plan.options).get(KEPT_LEAVES, ())
    return replace(
        found,
        mesh=None,
        stages={leaf.path: leaf.stage for leaf in leaves},
        elsewhere=_read_elsewhere(plan),
        kept=None if trained else frozenset(kept),
        submeshes=tuple(stage.submesh for stage in plan.stages),
        meshes=tuple(stage.mesh for stage in plan.stages),
    )


def _read_elsewhere(plan: Plan) -> frozenset[str]:
    """Paths of arguments that a function without a gradient also reads on other stages than theirs, or there alone."""
    if not _is_forward(plan):
        return frozenset()
    lies = {leaf.path: leaf.stage for leaf in plan.inputs}
    read = [(leaf.path, n) for n, stage in enumerate(plan.stages) for leaf in stage.inputs]
    return frozenset(path for path, stage in read if lies.get(path, stage) != stage)


def _is_forward(plan: Plan) -> bool:
    """Whether it is of a function in stages that takes no gradient."""
    return plan.pipeline is not None and not planned_schedule(plan.pipeline).is_training


def _is_placed(entry: Any) -> bool:
    if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], PartitionSpec)):
        return False
    return isinstance(entry[0], int) and not isinstance(entry[0], bool) and entry[0] >= 0


def _always(dims: Dims) -> Callable[[int], Dims]:
    return lambda rank: dims


def _by_rank(spec: PartitionSpec) -> Callable[[int], Dims]:
    return lambda rank: pinned_dims(spec, rank)


def following_options(options: PlanOptions, followed: Followed, cluster: Cluster, source: str) -> PlanOptions:
    """The options with the mesh of what is followed.

    Raises:
        PinError: the options or the cluster are for another mesh, or nothing says which one.
    """
    if followed.cluster and followed.cluster != str(cluster):
        raise PinError(
            f"follow was given a plan for {followed.cluster}, and this one is for {cluster}. Parameters stay where they are only "
            f"on the same devices. At {source}. Plan both for one cluster."
        )
    if followed.stages:
        return _on_same_stages(options, followed, source)
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
    shape, names = options.mesh_shape or mesh.shape, options.axis_names or mesh.axis_names
    if (shape, names) != (mesh.shape, mesh.axis_names):
        raise PinError(
            f"follow was given a plan on the mesh {mesh}, with PlanOptions(mesh_shape={options.mesh_shape}, "
            f"axis_names={options.axis_names}). Parameters stay where they are only on the same mesh. At {source}. Leave these "
            "options out."
        )
    return replace(options, mesh_shape=mesh.shape, axis_names=mesh.axis_names)


def on_mesh_of(followed: Followed, options: PlanOptions) -> Followed:
    """With the mesh of the options (``following_options``), or those of all stages, where only a layout was given."""
    names = options.axis_names
    if followed.mesh is not None or followed.meshes or names is None or options.symbol is not None:
        return followed
    shapes = options.stage_mesh_shapes or (options.mesh_shape,) * max(1, options.stage_count or 1)
    meshes = tuple(DeviceMesh(shape=tuple(map(int, s)), axis_names=names) for s in shapes if s is not None)
    if followed.stages:
        return replace(followed, meshes=meshes)
    return replace(followed, mesh=meshes[0]) if meshes else followed


def _on_same_stages(options: PlanOptions, followed: Followed, source: str) -> PlanOptions:
    """The options with the stages of what is followed."""
    if not followed.meshes:
        count = 1 + max(followed.stages.values())
        shapes = options.stage_mesh_shapes or (options.mesh_shape,)
        if options.stage_count != count or None in shapes or options.axis_names is None:
            raise PinError(
                f"follow was given a parameter_layout on {count} stages, which names axes and not their sizes. The same axes in "
                f"other sizes are another layout. At {source}. Give follow=plan instead, or PlanOptions(num_stages={count}, "
                "stage_mesh_shapes=..., axis_names=...) of the plan that it comes from, and its submeshes where they differ."
            )
        return options
    names = {mesh.axis_names for mesh in followed.meshes}
    wanted = {
        "num_stages": len(followed.meshes),
        "submeshes": followed.submeshes,
        "stage_mesh_shapes": tuple(mesh.shape for mesh in followed.meshes),
        "axis_names": next(iter(names)) if len(names) == 1 else None,
    }
    default, shapes = PlanOptions(), set(wanted["stage_mesh_shapes"])
    for name, value in {**wanted, "mesh_shape": shapes.pop() if len(shapes) == 1 else None}.items():
        own = getattr(options, name)
        if own not in (getattr(default, name), value):
            raise PinError(
                f"follow was given a plan on {len(followed.meshes)} stages, with PlanOptions({name}={own!r}). It has {value!r}; "
                f"parameters stay where they are only on the same stages. At {source}. Leave that option out."
            )
    return replace(options, mesh_shape=None, stage_layers=None, **wanted)


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
