"""Graphs that share stages: each in layers, its shared leaves (or rows of them) by keys that are the same in all graphs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from alpa_lite.api.bound import with_layers_said
from alpa_lite.api.follow import read_elsewhere
from alpa_lite.api.request import VERSIONS
from alpa_lite.api.shared_graph import SharedGraph, named
from alpa_lite.api.shared_layout import AS_SHARED, SharedLayout
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.errors import AlpaLiteError, LayerError
from alpa_lite.intraop.strategies import KnownStrategies
from alpa_lite.plan.leaf_rows import rows_path, split_path
from alpa_lite.plan.pins import ResolvedPins
from alpa_lite.plan.plan import Plan
from alpa_lite.planner.joint_stages import GraphStages, LeafKey, StageLayout
from alpa_lite.planner.pipeline import plan_pipeline
from alpa_lite.planner.stage_cut import StageCut
from alpa_lite.planner.stage_layers import layer_cuts
from alpa_lite.trace.auto_layers import LayerCuts, are_homes
from alpa_lite.trace.flatten import FlatJaxpr
from alpa_lite.trace.jaxprs import HEAVY
from alpa_lite.trace.layers import BOUNDARY, Layered
from alpa_lite.trace.program import Traced
from alpa_lite.trace.stage_pin import PIN_STAGE, StagePin
from alpa_lite.trace.staged import (
    StagedStep,
    layers_of,
    layers_reading,
    layers_writing,
    microbatch_loop,
    named_to_be_kept,
    owners_of,
    staged_step,
)


@dataclass(eq=False, slots=True)
class LayeredGraph:
    """A graph and its layers.

    Attributes:
        graph: as it was given; its request asks for the stages.
        starts: the ops that start layers, or leaves and their layers; () where the function has boundaries.
        traced, pins, notes, layered: the step as a function of parts of leaves.
        keys: position of a shared leaf, or part of one, among its arguments -> its key.
        strategies: of its ops, found so far.
    """

    graph: SharedGraph
    starts: tuple[Any, ...]
    traced: Traced
    pins: ResolvedPins
    notes: tuple[str, ...]
    layered: Layered
    keys: dict[int, LeafKey]
    strategies: KnownStrategies = field(default_factory=KnownStrategies)

    @classmethod
    def of(cls, graph: SharedGraph, layers: LayerCuts, homes: Mapping[str, int | None]) -> LayeredGraph:
        starts: list[Any] = []
        traced, pins, notes = graph.request.layered(graph.args, {}, layers, homes, starts)
        assert traced.layered is not None
        keys = leaf_keys(graph, traced.program.input_paths)
        layered = layers_of(traced.layered)
        if starts and layered.pins:
            pins_of_both = dict.fromkeys([*layered.pins, *_pins_of_makers(traced.layered, layered)])
            layered = replace(layered, pins=tuple(pins_of_both))
        return cls(graph, tuple(starts), traced, pins, notes, layered, keys)

    def filled_up_to(self, number: int) -> LayeredGraph:
        """With so many layers, where these are where leaves lie: nothing need be done in the last ones."""
        return replace(self, layered=replace(self.layered, num_layers=number)) if are_homes(self.starts) else self

    @property
    def paths(self) -> dict[LeafKey, str]:
        return {key: self.traced.program.input_paths[i] for i, key in self.keys.items()}

    @property
    def flat(self) -> FlatJaxpr:
        assert self.traced.layered is not None
        return self.traced.layered

    def told_apart(self, leaves: Set[int], elsewhere: Set[str] = frozenset()) -> dict[LeafKey, int]:
        """Of those of the leaves that one layer reads, which; not of those at paths that some graph reads ``elsewhere``."""
        single, paths = ((key, layers[0]) for key, layers in self.readers().items() if len(layers) == 1), self.paths
        return {key: layer for key, layer in single if key[0] in leaves and paths[key] not in elsewhere}

    def beginning(self, homes: Mapping[LeafKey, int]) -> tuple[int, ...]:
        """The first layer, unless it is one with the next: it has shared leaves, and none of those that tell layers apart."""
        reads = any(layers == (0,) for layers in self.readers().values())
        return () if reads and 0 not in homes.values() else (0,)

    def readers(self) -> dict[LeafKey, tuple[int, ...]]:
        """The layers that read each shared leaf; of state that none reads, the one that makes its next value."""
        read, written = layers_reading(self.flat, self.layered), layers_writing(self.flat, self.layered)
        return {key: read[i] or written[i] for i, key in self.keys.items()}

    def stage_pins(self, homes: Mapping[str, int]) -> list[StagePin]:
        """Of its layers, by ``al.pin_stage`` and by the stages of leaves, which ``homes`` has by path."""
        leaves = [(homes[p], p) if p in homes else None for p in self.traced.program.input_paths]
        return [*self.layered.pins, *(pin for pin in layers_of(self.flat, leaves).pins if pin.leaf)]

    def staged(
        self, stage_of_layer: Sequence[int], owner: Mapping[LeafKey, int], homes: Mapping[str, int] | None = None
    ) -> StagedStep:
        """Cut into stages; ``owner``: layer of each shared leaf, ``homes``: stages of leaves that are known, by path."""
        program, paths = self.traced.program, self.paths
        stages = {path: stage_of_layer[owner[key]] for key, path in paths.items() if key in owner} | dict(homes or {})
        owners = owners_of(program, self.flat, stages, paths.values())
        rules = self.graph.request.options.rules
        known = self.traced.known
        return staged_step(program, self.flat, self.layered, stage_of_layer, rules, known=known, owners=owners)

    def stages(self, step: StagedStep) -> GraphStages:
        options = replace(self.graph.request.options, submeshes=None, stage_mesh_shapes=None)
        return GraphStages(
            name=self.graph.name,
            step=step,
            pins=self.pins,
            options=options,
            weight=self.graph.weight,
            leaves=self.keys,
            strategies=self.strategies,
        )

    def layout_of(self, plan: Plan) -> list[StageLayout]:
        """How a plan of this graph has the shared leaves on each of its stages."""
        keys = leaf_keys(self.graph, [leaf.path for leaf in plan.inputs])
        made = []
        for number, stage in enumerate(plan.stages):
            specs = {key: plan.inputs[i].spec for i, key in keys.items() if plan.inputs[i].stage == number}
            made.append(StageLayout(mesh=stage.mesh, specs=specs, objective=math.nan, lower_bound=-math.inf))
        return made

    def plan(self, step: StagedStep, cut: StageCut, cluster: Cluster, layout: Sequence[StageLayout] = ()) -> Plan:
        """As a pipeline, the shared leaves where the layout has them."""
        pins = self.pins
        for stage in layout:
            found = {i: stage.specs[key] for i, key in self.keys.items() if key in stage.specs}
            pins = pins.with_fixed({i: (spec.dims, AS_SHARED) for i, spec in found.items() if spec.rank}, stage.mesh)
        if layout:
            cut = replace(cut, mesh_shapes=tuple(stage.mesh.shape for stage in layout))
        request = self.graph.request
        options = request.options
        if options.submeshes == "auto":
            options = replace(options, submeshes=cut.submeshes)
        if layout:
            options = replace(options, mesh_shape=None, stage_mesh_shapes=cut.mesh_shapes)
        with named(f"the graph {self.graph.name!r} in the stages that it would share"):
            made = plan_pipeline(
                step, cut, cluster, pins, options, VERSIONS, notes=self.notes,
                strategies=self.strategies,
            )  # fmt: skip
        kept = () if step.is_training else named_to_be_kept(self.traced.program, self.flat, self.paths.values())
        return request.finished(with_layers_said(made, self.starts, kept), self.traced)


def _pins_of_makers(flat: FlatJaxpr, layered: Layered) -> list[StagePin]:
    """Of pinned values, the layers of the ops that make them: a cut that nobody wrote may lie between an op and its pin."""
    made = {o: k for op, k in zip(layered.flat.ops, layered.layer, strict=True) for o in op.outputs}
    marks = [op for op in flat.ops[microbatch_loop(flat)].bodies[0].ops if op.name in (BOUNDARY, PIN_STAGE)]
    before = {op.all_outputs[0]: op.inputs[0] for op in marks}
    found = []
    for op in marks:
        value = op.inputs[0]
        while isinstance(value, int) and value in before:
            value = before[value]
        if op.name == PIN_STAGE and isinstance(value, int) and value in made:
            found.append(StagePin(place=made[value], stage=op.params["stage"], source=op.source))
    return found


def cuts_by_layers(number: int) -> LayerCuts:
    """Cuts a function into so many layers, where its leaves are pinned to layers, not stages.

    ``al.pin_stage`` speaks of stages, and no stage is known yet: a value that it pins, and the pin, are left in the layer whose
    leaves were read last, so that no cut lies between them.
    """

    def chosen(
        flops: Sequence[float], cut_bytes: Sequence[float], pins: Sequence[StagePin] = (), *, forward: bool = True
    ) -> Sequence[int]:
        leaves = [pin for pin in pins if pin.leaf]
        begun = {p.place: max((a.stage for a in leaves if a.place <= p.place), default=0) for p in pins if not p.leaf}
        values = [replace(pin, stage=begun[pin.place]) for pin in pins if not pin.leaf]
        return layer_cuts(number)(flops, cut_bytes, [*leaves, *values], forward=forward)

    return chosen


def every_cut(
    flops: Sequence[float], cut_bytes: Sequence[float], pins: Sequence[StagePin] = (), *, forward: bool = True
) -> list[int]:
    """Cuts a function wherever it can be cut, but not between what ``al.pin_stage`` puts on one stage."""
    places: dict[int, list[int]] = {}
    for pin in pins:
        places.setdefault(pin.stage, []).append(pin.place)
    possible = [cut for cut, size in enumerate(cut_bytes, 1) if math.isfinite(size)]
    return [cut for cut in possible if not any(min(own) < cut <= max(own) for own in places.values())]


def has_layers(graph: SharedGraph) -> bool:
    """Whether a graph has matmuls, or boundaries of its own."""
    if any(op.primitive in HEAVY for _, _, op in graph.traced.program.walk()):
        return True
    asked: list[Any] = []

    def cuts(*given: Any, **settings: Any) -> tuple[int, ...]:
        asked.append(given)
        return ()

    graph.request.trace(graph.args, {}, cuts, forward=True)
    return not asked


def check_given_stages(stage_layers: Sequence[int] | None, pins: Sequence[StagePin], source: str) -> None:
    """Refuse pins, of layers, that are not on the stages of ``stage_layers``, with a LayerError."""
    given = [stage for stage, count in enumerate(stage_layers or ()) for _ in range(count)]
    for pin in pins if given else ():
        if given[pin.place] != pin.stage:
            raise LayerError(
                f"stage_layers={stage_layers} puts layer {pin.place} on stage {given[pin.place]}, {pin.reason} on stage "
                f"{pin.stage}. Both must hold. At {source}. Change stage_layers, or drop the pin."
            )


def leaves_read(graph: SharedGraph) -> set[int]:
    """The shared leaves, by their numbers, that some op of a graph reads."""
    program = graph.traced.program
    read = {value for op in program.ops for value in op.inputs}
    return {number for number, leaf in enumerate(graph.leaves) if program.inputs[leaf] in read}


def leaf_keys(graph: SharedGraph, paths: Sequence[str]) -> dict[int, LeafKey]:
    """Position of a shared leaf, or part of one, among arguments with these paths -> its key."""
    number = {graph.paths[leaf]: i for i, leaf in enumerate(graph.leaves)}
    parts = [split_path(path) if path not in number else (path, None) for path in paths]
    return {i: (number[path], rows) for i, (path, rows) in enumerate(parts) if path in number}


def leaf_path(graph: SharedGraph, key: LeafKey) -> str:
    """The inverse of ``leaf_keys``."""
    leaf, rows = key
    path = graph.shared[leaf]
    return path if rows is None else rows_path(path, *rows)


def other_rows(first: LayeredGraph, own: LayeredGraph, source: str) -> str:
    """Why graphs cannot share a leaf on stages: layers of one read some rows of it, those of the other read others, or all."""
    leaf = next(key for key in (*own.paths, *first.paths) if (key in own.paths) != (key in first.paths))[0]
    here, there = (
        ", ".join(repr(path) for key, path in graph.paths.items() if key[0] == leaf) for graph in (own, first)
    )
    return (
        f"its layers have {here}, those of {first.graph.name!r} have {there}. On stages all graphs have the same rows of a "
        f"stacked leaf. At {source}. Read it by layers in all graphs, or make it a leaf per layer."
    )


Places = tuple[dict[LeafKey, int], frozenset[LeafKey], tuple[tuple[int, int], ...]]
"""The stage of each shared leaf, neighbouring rows on one stage together; which of them others read; the submeshes."""


def places_of(plans: Sequence[tuple[SharedGraph, Plan]]) -> Places:
    """Where plans of graphs, all of them with the same shared leaves on the same stages, have these."""
    homes, submeshes = _homes_of(*plans[0])
    away = [key for graph, plan in plans for key in leaf_keys(graph, sorted(read_elsewhere(plan))).values()]
    return homes, frozenset(home for home in homes if any(map(partial(_overlap, home), away))), submeshes


def _overlap(one: LeafKey, other: LeafKey) -> bool:
    """Whether they are of one leaf, and share rows of it."""
    (leaf, rows), (same, others) = one, other
    return leaf == same and (rows is None or others is None or (rows[0] < others[1] and others[0] < rows[1]))


def _homes_of(graph: SharedGraph, plan: Plan) -> tuple[dict[LeafKey, int], tuple[tuple[int, int], ...]]:
    keys = leaf_keys(graph, [leaf.path for leaf in plan.inputs])
    rows = sorted((key[0], key[1] or (0, 0), key[1] is None, plan.inputs[i].stage) for i, key in keys.items())
    found: list[tuple[LeafKey, int]] = []
    for leaf, (start, stop), whole, stage in rows:
        (last, before), its = found[-1] if found else ((-1, None), -1)
        if not whole and before is not None and (last, before[1], its) == (leaf, start, stage):
            found[-1] = (leaf, (before[0], stop)), stage
        else:
            found.append(((leaf, None if whole else (start, stop)), stage))
    return dict(found), tuple(stage.submesh for stage in plan.stages)


def planned_as_following(layout: SharedLayout, graph: SharedGraph, cluster: Cluster) -> Plan:
    """A graph's plan in a layout: cut as the others, or where it costs less between the same leaves."""
    plan, shared = layout.plans[graph.name], set(layout.shared[graph.name])

    def lie(plan: Plan) -> list[Any]:
        return [(leaf.path, leaf.stage, leaf.spec) for leaf in plan.inputs if leaf.path in shared]

    with suppress(AlpaLiteError):  # it may not be cut so
        request = replace(graph.request, follow=layout).following(cluster)
        other = request.plan(graph.args, {}, cluster)[1]
        if other.objective < plan.objective and lie(other) == lie(plan):
            return other
    return plan
