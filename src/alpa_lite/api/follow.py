"""``follow=``: parameters lie as another plan has them, so that they are used where they are and nothing is moved.

1. ``followed_plan``: what the user gave -> layouts by path, and the mesh (of each stage) that they are for. Parameters are what
   is trained; of a function that trains nothing all arguments are looked at, and those with one path, shape and dtype follow.
2. ``following_options``: these meshes are the only ones that are tried; the same axes on other sizes would be another layout.

Which leaves of a function then follow is in ``followers.py``.
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
from alpa_lite.core.program import Value
from alpa_lite.errors import PinError
from alpa_lite.numeric import whole
from alpa_lite.plan.pins import Dims
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Leaf, LeafRole
from alpa_lite.planner.options import PlanOptions
from alpa_lite.schedule import planned_schedule
from alpa_lite.trace.pins import pinned_dims, spec_text


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
            away = read_elsewhere(made)
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
    for path, (_, spec) in plan.items():
        if spec.unreduced or spec.reduced:
            raise PinError(
                f"follow has {path!r} as {spec_text(spec)}. A leaf that is followed lies as it is, not as a sum that is still to "
                f"be made. At {source}. Leave `unreduced` and `reduced` out."
            )
        axes = [axis for dim in pinned_dims(spec, len(spec.partitions)) for axis in dim or ()]
        if twice := [axis for axis in axes if axes.count(axis) > 1]:
            raise PinError(
                f"follow has {path!r} as {spec_text(spec)}, with the axis {twice[0]!r} twice. An axis can split one dim of a "
                f"leaf. At {source}. Give the layout of a plan."
            )
    stages = {path: int(stage) for path, (stage, _) in plan.items()}
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
        elsewhere=read_elsewhere(plan),
        kept=None if trained else frozenset(kept),
        submeshes=tuple(stage.submesh for stage in plan.stages),
        meshes=tuple(stage.mesh for stage in plan.stages),
    )


def read_elsewhere(plan: Plan) -> frozenset[str]:
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
    stage = whole(entry[0])
    return stage is not None and stage >= 0


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
        if own not in (getattr(default, name), value, "auto"):  # the best ones are the same ones
            raise PinError(
                f"follow was given a plan on {len(followed.meshes)} stages, with PlanOptions({name}={own!r}). It has {value!r}; "
                f"parameters stay where they are only on the same stages. At {source}. Leave that option out."
            )
    return replace(options, mesh_shape=None, stage_layers=None, **wanted)
