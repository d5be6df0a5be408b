"""What a user asked for: traces, resolves pins, plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from alpa_lite._version import __version__
from alpa_lite.api.asked import check_cluster, check_stages_asked, check_symbolic
from alpa_lite.api.bound import JIT_SETTINGS, Parallelized, Trees, plain, with_layers_said
from alpa_lite.api.follow import Followed, followed_plan, following_options, on_mesh_of
from alpa_lite.api.followers import LeafHomes, check_stages, counterparts, fixed_pins, stages_here
from alpa_lite.api.given import argnames, argnums, checked_options
from alpa_lite.api.progress import Progress, told
from alpa_lite.api.symbolic import SymbolicPlan
from alpa_lite.cluster.cluster import Cluster as ClusterData
from alpa_lite.cluster.symbolic import SymbolicCluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Program
from alpa_lite.errors import LayerError, MemoryBudgetError, MicrobatchError, PinError, layers_asked_at, user_line
from alpa_lite.plan.leaf_rows import split_path
from alpa_lite.plan.pins import Dims, ResolvedPins
from alpa_lite.plan.plan import Plan
from alpa_lite.planner.collector import collector_paused
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.padded import plan_with_padding, uneven_groups
from alpa_lite.planner.pipeline import plan_pipeline
from alpa_lite.planner.plan_step import KnownTasks, Versions, mesh_candidates, mesh_task, plan_step
from alpa_lite.planner.price_step import StepPrice, price_step
from alpa_lite.planner.remat import plan_recomputing
from alpa_lite.planner.searched import SearchTask, is_searched, plan_with_stages_searched
from alpa_lite.planner.stage_cut import StageCut, asked_schedule, given_cut, one_stage
from alpa_lite.planner.stage_layers import layers_asked, searched_layers
from alpa_lite.planner.stage_pins import pins_of_parts
from alpa_lite.planner.stage_remat import plan_with_remat
from alpa_lite.planner.symbolic import SymbolicTask
from alpa_lite.trace.annotations import annotation_note, annotations_from_args
from alpa_lite.trace.auto_layers import LayerCuts, are_homes
from alpa_lite.trace.pins import resolve_pins
from alpa_lite.trace.program import Rules, Traced, trace
from alpa_lite.trace.remat_step import RecomputedStages, all_recomputed
from alpa_lite.trace.staged import (
    StagedStep,
    layers_of,
    microbatch_loop,
    named_to_be_kept,
    owners_of,
    staged_step,
)
from alpa_lite.trace.unstack import unstacked

_MAX_DOUBLINGS = 12  # of the number of microbatches, where it is searched
ONE_MESH: dict[str, Any] = {"num_stages": "auto", "submeshes": None, "stage_layers": None, "stage_mesh_shapes": None}
VERSIONS = Versions(jax=jax.__version__, alpa_lite=__version__)


@dataclass(frozen=True, slots=True)
class _Planning:
    """What a step is planned with: its arguments, for which cluster, and who is told of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cluster: ClusterData
    progress: Progress


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asked for, whatever the arguments.

    ``source`` is the line where, for messages. ``follow`` is as given until planning, then a ``Followed``.
    ``fixed`` are layouts of argument leaves that come from neither: path -> dims, where they come from (all, or path -> where),
    and the mesh that they are for, if they are for one.
    """

    fn: Callable[..., Any]
    pins: Any
    pin_like: Mapping[str, str] | None
    options: PlanOptions
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    donate_argnums: tuple[int, ...]
    source: str
    follow: Any = None
    follow_like: Mapping[str, str] | None = None
    fixed: tuple[Mapping[str, Dims], str | Mapping[str, str], DeviceMesh | None] = field(
        default_factory=lambda: ({}, "", None)
    )

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        pins: Any,
        pin_like: Mapping[str, str] | None,
        options: PlanOptions | None,
        static_argnums: int | Sequence[int],
        static_argnames: str | Sequence[str],
        donate_argnums: int | Sequence[int],
        follow: Any = None,
        follow_like: Mapping[str, str] | None = None,
    ) -> Request:
        """What a user gave, checked; what is not given is as an already parallelized function has it."""
        own: Request | None = fn._request if isinstance(fn, Parallelized) else None
        given = cls(
            plain(fn),
            pins,
            pin_like,
            checked_options(options),
            argnums(plain(fn), "static_argnums", static_argnums),
            argnames(static_argnames),
            argnums(plain(fn), "donate_argnums", donate_argnums),
            user_line(),
            follow=follow,
            follow_like=follow_like,
        )
        if follow_like is not None and follow is None and (own is None or own.follow is None):
            raise PinError(
                f"follow_like={follow_like!r:.80} was given without follow, so there is nothing to be like. At {given.source}. "
                "Give follow=, or leave follow_like out."
            )
        if own is None:
            return given
        as_pinned = own.pins is not None and pins is None and pin_like is None and options is None
        return cls(
            given.fn,
            own.pins if pins is None else pins,
            own.pin_like if pin_like is None else pin_like,
            own.options if options is None else given.options,
            given.static_argnums or own.static_argnums,
            given.static_argnames or own.static_argnames,
            given.donate_argnums or own.donate_argnums,
            own.source if as_pinned else given.source,
            follow=own.follow if follow is None else follow,
            follow_like=own.follow_like if follow is None and follow_like is None else follow_like,
        )

    def trace(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        layers: LayerCuts | None = None,
        *,
        forward: bool = False,
        homes: Mapping[str, int | None] | None = None,
        starts: list[Any] | None = None,
        known: Rules | None = None,
    ) -> Traced:
        count = self.options.num_microbatches
        return trace(
            self.fn,
            args,
            kwargs,
            static_argnums=self.static_argnums,
            static_argnames=self.static_argnames,
            donate_argnums=self.donate_argnums,
            rules=self.options.rules,
            num_microbatches=1 if count == "auto" else count,
            layers=layers or layers_asked(self.options, self.source),
            forward=forward or layers is None,
            homes=homes,
            starts=starts,
            known=known,
        )

    @collector_paused()
    def plan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], cluster: ClusterData, *, search: bool = True
    ) -> tuple[Traced, Plan]:
        """The traced step and its plan; without ``search`` the number of stages is not searched."""
        check_cluster(self.options, cluster, self.source)
        check_stages_asked(self.options, cluster, self.source)
        if self.follow is not None and not isinstance(self.follow, Followed):
            return self.following(cluster).plan(args, kwargs, cluster, search=search)
        if self.options.num_microbatches == "auto":
            return self._with_fewest_microbatches(args, kwargs, cluster)
        with told(self.options.verbose) as progress:
            given = _Planning(args, kwargs, cluster, progress)
            if search and is_searched(self.options, cluster):
                return self._searched(given)
            traced, made = self._on_stages(given) if self.options.has_stages else self._on_one_mesh(given)
        return traced, self.finished(made, traced)

    def following(self, cluster: ClusterData) -> Request:
        """With the layouts of what is followed, and planned on its mesh."""
        if self.follow is None or isinstance(self.follow, Followed):
            return self
        followed = followed_plan(self.follow, self.source)
        options = following_options(self.options, followed, cluster, self.source)
        return replace(self, follow=on_mesh_of(followed, options), options=options)

    def _on_stages(self, given: _Planning) -> tuple[Traced, Plan]:
        homes = self.homes(given.args, given.kwargs)
        if homes.sometimes:
            with suppress(LayerError):
                return self._at_homes(given, homes)
        with layers_asked_at(self.source):
            return self._at_homes(given, homes.loosened())

    def _at_homes(self, given: _Planning, homes: LeafHomes) -> tuple[Traced, Plan]:
        """On the stages that were asked for, the leaves where they lie."""
        starts: list[Any] = []
        traced, pins, notes = self.layered(given.args, given.kwargs, None, homes.cuts, starts if homes.stages else None)
        assert traced.layered is not None
        cut, again = self._staged(traced, given.cluster, homes, are_homes(starts))

        def planned(step: StagedStep, recompute: RecomputedStages | None) -> Plan:
            return plan_pipeline(
                step,
                cut,
                given.cluster,
                pins,
                self.options,
                VERSIONS,
                recompute=recompute,
                notes=notes,
                progress=given.progress,
            )

        made = plan_with_remat(planned, again, self.options.remat)
        check_stages(made, homes.stages, self.source)
        # Where layers start, and what was not copied, followed from the stages of parameters; the plan must find the same again.
        training = again.kept.is_training
        kept = () if training else named_to_be_kept(traced.program, traced.layered, homes.kept)
        return traced, with_layers_said(made, starts, kept)

    def layered(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        layers: LayerCuts | None,
        homes: Mapping[str, int | None],
        starts: list[Any] | None = None,
    ) -> tuple[Traced, ResolvedPins, tuple[str, ...]]:
        """The step with layers, as a function of parts of leaves, its pins, and what there is to say about these.

        Args:
            args, kwargs: of the step.
            layers: chooses cuts where it has no boundaries; None = as the options ask.
            homes: path of a leaf, or of rows of it, -> the stage on which its readers lie; None = anywhere.
            starts: is filled with the ops that start layers of a function without boundaries.
        """
        traced = self.trace(args, kwargs, layers, forward=True, homes=homes, starts=starts)
        pins, notes = self._pins_and_notes(traced, args, kwargs, fixed=False)
        traced = unstacked(traced, self.options.rules, homes)
        assert traced.parts is not None
        return traced, self._with_fixed(pins_of_parts(pins, traced.parts), traced.program), notes

    def homes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LeafHomes:
        """Where argument leaves, or rows of them, lie on stages, as far as that is known before planning."""
        if not isinstance(self.follow, Followed) or not self.follow.stages:
            return LeafHomes()
        whole = replace(self, options=replace(self.options, **ONE_MESH))
        return stages_here(whole.trace(args, kwargs).program, self.follow, self.follow_like, self.source)

    def _on_one_mesh(
        self, given: _Planning, known: Traced | None = None, tasks: KnownTasks | None = None
    ) -> tuple[Traced, Plan]:
        """Without a pipeline; where dims were padded or layers are recomputed, that step with its plan.

        Args:
            given: with what it is planned.
            known: the step as it is, if it was traced.
            tasks: what was planned of it before.
        """
        cluster, options = given.cluster, one_stage(self.options, given.cluster, self.source)

        def plan_traced(traced: Traced) -> tuple[Traced, Plan]:
            pins, notes = self._pins_and_notes(traced, given.args, given.kwargs)
            settings: dict[str, Any] = {"notes": notes, "progress": given.progress, "known": tasks}

            def plan_program(program: Program, pins: ResolvedPins, meshes: Sequence[DeviceMesh] | None = None) -> Plan:
                return plan_step(program, cluster, pins, options, VERSIONS, meshes=meshes, **settings)

            if self.options.padding == "off":
                return traced, plan_program(traced.program, pins)
            meshes = tuple(mesh_candidates(cluster, pins, options))
            return plan_with_padding(traced, cluster, pins, meshes, plan_program, self.options.rules)

        def trace_with(layers: LayerCuts | None) -> Traced:
            return known if layers is None and known is not None else self.trace(given.args, given.kwargs, layers)

        return plan_recomputing(plan_traced, trace_with, self.options, self.source)

    @collector_paused()
    def plan_known(
        self, traced: Traced, args: tuple[Any, ...], cluster: ClusterData, tasks: KnownTasks
    ) -> tuple[Traced, Plan]:
        """The plan of a step on one mesh that was traced; ``tasks`` as of ``plan_step``."""
        check_cluster(self.options, cluster, self.source)
        with told(self.options.verbose) as progress:
            found, made = self._on_one_mesh(_Planning(args, {}, cluster, progress), traced, tasks)
        return found, self.finished(made, found)

    @collector_paused()
    def price_known(
        self, traced: Traced, args: tuple[Any, ...], cluster: ClusterData, tasks: KnownTasks
    ) -> StepPrice | None:
        """What ``plan_known`` comes to, if that is known without the plan; ``tasks`` keeps what was searched for it."""
        check_cluster(self.options, cluster, self.source)
        options = one_stage(self.options, cluster, self.source)
        # Where nothing limits memory, "auto" recomputes nothing.
        as_it_is = options.padding == "off" or not uneven_groups(traced, cluster.num_devices)
        if options.remat not in ("auto", "none") or not as_it_is:
            return None
        pins, _ = self._pins_and_notes(traced, args, {})
        meshes = tuple(mesh_candidates(cluster, pins, options))
        with told(self.options.verbose) as progress:
            return price_step(traced.program, cluster, pins, options, tasks, meshes, progress)

    def pins_of(self, traced: Traced, args: tuple[Any, ...]) -> ResolvedPins:
        """What the user pinned of a step, without what is followed and fixed beside it."""
        return self._pins_and_notes(traced, args, {}, fixed=False)[0]

    def _searched(self, given: _Planning) -> tuple[Traced, Plan]:
        """The best number of stages. A step that is one stage in the end is traced without the layers that were found."""
        chosen: list[object] = []
        cuts = searched_layers(given.cluster, self.options.stage_count or 1, self.source)

        def layers(*of: Any, **settings: Any) -> Sequence[int]:
            chosen.append(cuts)
            return cuts(*of, **settings)

        traced = self.trace(given.args, given.kwargs, layers)
        pins, notes = self._pins_and_notes(traced, given.args, given.kwargs)
        single: list[Traced] = []

        def one_mesh() -> Plan:
            found, made = self._on_one_mesh(given, None if chosen else traced)
            single.append(found)
            return made

        of_parts = unstacked(traced, self.options.rules)
        assert of_parts.parts is not None
        task = SearchTask(
            traced=of_parts,
            cluster=given.cluster,
            pins=pins_of_parts(pins, of_parts.parts),
            options=self.options,
            versions=VERSIONS,
            one_stage=one_mesh,
            notes=notes,
            progress=given.progress,
        )
        made = plan_with_stages_searched(task)
        traced = single[0] if made.pipeline is None else of_parts
        return traced, self.finished(made, traced)

    def _staged(
        self, traced: Traced, cluster: ClusterData, homes: LeafHomes, at_homes: bool
    ) -> tuple[StageCut, RecomputedStages]:
        """The step cut into the stages that were asked for, also with layers recomputed; ``homes``: where its leaves lie,
        ``at_homes``: whether its layers are the stages of these."""
        flat, options = traced.layered, self.options
        assert flat is not None
        paths = traced.program.input_paths
        readers = homes.readers
        layered = layers_of(flat, [(readers[p], p) if p in readers else None for p in paths] if readers else ())
        if at_homes:
            layered = replace(layered, num_layers=options.stage_count or 1)
        body = traced.program.ops[microbatch_loop(traced.flat)].bodies[0]
        cut = given_cut(options, cluster, layered, body, self.source)
        split = asked_schedule(options).split_stages
        owners = owners_of(traced.program, flat, homes.stages, homes.kept)
        step = staged_step(
            traced.program, flat, layered, cut.stage_of_layer, options.rules, split, known=traced.known, owners=owners
        )
        saved = options.remat if isinstance(options.remat, tuple) else ()
        remat = all_recomputed(layered, saved, self.source)
        return cut, RecomputedStages(step, flat, layered, remat, options.rules, split)

    def _with_fewest_microbatches(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], cluster: ClusterData
    ) -> tuple[Traced, Plan]:
        """The first power of two of microbatches with which the step fits: on one mesh more of them only cost time.

        Where it fits only with layers recomputed, more microbatches may cost less than that.
        """
        refused: MemoryBudgetError | None = None
        found: list[tuple[Traced, Plan]] = []
        for count in (2**k for k in range(_MAX_DOUBLINGS + 1)):
            request = replace(self, options=replace(self.options, num_microbatches=count))
            try:
                traced, made = request.plan(args, kwargs, cluster, search=False)
            except MemoryBudgetError as error:
                refused = refused or error
                continue
            except MicrobatchError as error:
                if found:
                    break
                raise refused or error from error
            which = "cheapest" if found else "smallest"
            note = f"num_microbatches='auto': {count} is the {which} power of two that fits the memory budget"
            found.append((traced, replace(made, notes=(*made.notes, note))))
            if made.remat is None or self.options.remat != "auto":
                break
        if not found:
            assert refused is not None
            raise refused
        return min(found, key=lambda pair: pair[1].objective)

    @collector_paused()
    def symbolic_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any], cluster: SymbolicCluster) -> SymbolicPlan:
        check_symbolic(self.options, self.follow, cluster, self.source)
        traced = self.trace(args, kwargs)
        pins, notes = self._pins_and_notes(traced, args, kwargs)
        task = SymbolicTask(
            task=mesh_task(traced.program, cluster.host, pins, replace(self.options, padding="off", remat="none")),
            cluster=cluster,
            versions=VERSIONS,
            notes=notes,
            finish=lambda made: self.finished(made, traced),
            source=self.source,
        )
        return SymbolicPlan(task)

    def _pins_and_notes(
        self, traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any], *, fixed: bool = True
    ) -> tuple[ResolvedPins, tuple[str, ...]]:
        """What the user pinned and, unless leaves are still to be taken apart, what is ``fixed`` beside it."""
        found = annotations_from_args(args, kwargs)
        binding = self.options.annotations == "pin"
        pins = self._resolve(traced, {a.path: a.spec for a in found} if binding else None, fixed=fixed)
        return pins, annotation_note(found, binding=binding)

    def finished(self, made: Plan, traced: Traced) -> Plan:
        settings = tuple((name, getattr(self, name)) for name in JIT_SETTINGS if getattr(self, name))
        made = replace(made, options=(*made.options, *settings))
        return replace(made, trees=Trees.of(traced))

    def _resolve(self, traced: Traced, annotations: Mapping[str, Any] | None, *, fixed: bool = True) -> ResolvedPins:
        program = traced.program
        pins = resolve_pins(
            self.pins,
            self.pin_like,
            program.input_paths,
            [program.values[v].shape for v in program.inputs],
            program.output_paths,
            [program.values[v].shape if v >= 0 else () for v in program.outputs],
            mesh=None,
            source=self.source,
            annotations=annotations,
        )
        return self._with_fixed(pins, program) if fixed else pins

    def _with_fixed(self, pins: ResolvedPins, program: Program) -> ResolvedPins:
        """The pins of a program, its leaves maybe in parts, with what is followed and fixed."""
        fixed, origin, mesh = self.fixed
        whole = [path if path in fixed else split_path(path)[0] for path in program.input_paths]
        origins = dict.fromkeys(fixed, origin) if isinstance(origin, str) else origin
        found = {i: (fixed[path], origins[path]) for i, path in enumerate(whole) if fixed.get(path)}
        pins = pins.with_fixed(found, mesh)  # first, as pins of other graphs are among it
        if self.follow is None:
            return pins
        return fixed_pins(pins, counterparts(program, self.follow, self.follow_like, self.source), self.follow)
