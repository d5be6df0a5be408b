"""Prices of runs of layers on submeshes, each solved once: what a table of stage costs is filled from.

A run's price is that of its sequence of layer classes (``LayerRuns.classes``): equal runs are one program and are solved once.
Runs of one layer, and of two equal ones, are *solved* by the planner for one mesh. Longer runs are *composed* of these,

    price(1..n) = sum of price(t) + sum over equal neighbours of price(t, t + 1) - price(t) - price(t + 1)

so that equal layers cost the same increment each. Steps with few runs have all of them solved. A price has no proof: the search
for the cheapest plan ends when bounds no longer rise, with a gap of some percent at most times.

A run has several plans: the cheapest, and leaner ones for where it does not fit, each the cheapest at a *rent* on what it holds
(``stage_rent``). Rents are the same for all runs of a step, so that plans of one rent belong together. They are given as shares:
at a share of 1 a device full of memory costs as much as all matmuls of the step, at full efficiency on all devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product

import numpy as np

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Program
from alpa_lite.errors import PinError
from alpa_lite.intraop.pricing import Pricer
from alpa_lite.intraop.problem import IntraOpProblem
from alpa_lite.intraop.strategies import KnownStrategies
from alpa_lite.plan.pins import ResolvedPins
from alpa_lite.planner.one_mesh import plan_on_mesh
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.plan_step import budget_bytes, mesh_candidates, mesh_task
from alpa_lite.planner.posing import MeshTask
from alpa_lite.planner.rent import with_rent
from alpa_lite.planner.stage_costs import stage_costs
from alpa_lite.planner.stage_pins import stage_pins
from alpa_lite.planner.stage_rent import held_bytes
from alpa_lite.schedule import InFlight
from alpa_lite.trace.stage_runs import LayerRuns, Run
from alpa_lite.trace.stages import StageProgram

Kind = tuple[int, ...]  # layer classes of a run, in order
Submesh = tuple[int, int]
MAX_SOLVED_RUNS = 12  # different runs of layers up to which all are solved, whatever their length
RENTS = (0.01, 3.0, 30.0)  # as shares, rising; the first decides between plans that are as fast


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrice:
    """What a run of layers costs as a stage, under one plan.

    Attributes:
        time_s: forward and backward of one microbatch.
        once_s: per step.
        held_bytes: per device at the peak with one microbatch in flight: state, sums of gradients, the microbatch.
        working_bytes: what the program that runs then needs beside them.
        residual_bytes: what each further microbatch in flight adds.
    """

    time_s: float
    once_s: float
    held_bytes: float
    working_bytes: float
    residual_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a stage may be planned on a submesh: its logical mesh, and which of ``RENTS`` is charged for memory.

    Where ``recomputed``, its layers' backward passes recompute what they read of the forward pass.
    """

    mesh: DeviceMesh
    rent: int = 0
    recomputed: bool = False


class RunPrices:
    """Prices of one step's runs on a cluster; every question is answered once."""

    def __init__(
        self,
        runs: LayerRuns,
        cluster: Cluster,
        pins: ResolvedPins,
        options: PlanOptions,
        progress: Callable[[str], None] | None = None,
        recomputed: Callable[[], LayerRuns] | None = None,
    ) -> None:
        """``recomputed`` makes the same runs with layers recomputed, where stages may do so; it is asked once, if at all."""
        self.runs, self.cluster, self.pins, self.options = runs, cluster, pins, options
        self.tell = progress or (lambda text: None)
        self._recomputed = recomputed
        self.parts: dict[tuple[Kind, bool], tuple[StageProgram, MeshTask]] = {}
        self.strategies = KnownStrategies()
        self.solved: dict[tuple[Kind, Submesh, Choice], RunPrice | None] = {}
        self._least_s: dict[tuple[int, bool], float] = {}
        self.num_solves = 0

    @property
    def num_layers(self) -> int:
        return self.runs.num_layers

    def kind(self, run: Run) -> Kind:
        return self.runs.classes[run[0] : run[1] + 1]

    @cached_property
    def all_solved(self) -> bool:
        """Whether there are so few different runs that none is composed."""
        count = self.num_layers
        return len({self.kind((i, j)) for i in range(count) for j in range(i, count)}) <= MAX_SOLVED_RUNS

    def composed(self, kind: Kind) -> bool:
        return len(kind) > 2 and not self.all_solved

    def choices(self, submesh: Submesh) -> tuple[Choice, ...]:
        """The cheapest plan on each logical mesh, then those at higher rents; where stages may recompute, these again so.

        On several hosts one axis has at most the devices of a host: what it splits is exchanged inside of hosts.
        """
        cluster = self.on(submesh)
        meshes = list(mesh_candidates(cluster, self.pins, self.options))
        if cluster.num_hosts > 1 and self.options.mesh_shape is None:
            inner = [m for m in meshes if len(m.shape) == 1 or min(m.shape[1:]) <= cluster.devices_per_host]
            meshes = [m for m in inner if len(m.shape) == 1 or math.prod(m.shape[1:]) <= cluster.devices_per_host]
        kinds = product((False, True) if self.recomputes else (False,), range(len(RENTS)), meshes)
        return tuple(Choice(mesh=mesh, rent=rent, recomputed=again) for again, rent, mesh in kinds)

    @property
    def recomputes(self) -> bool:
        """Whether stages may recompute."""
        return self._recomputed is not None

    @cached_property
    def recomputed_runs(self) -> LayerRuns:
        """The runs with layers recomputed; those that are equal as they are are taken to be equal so too."""
        assert self._recomputed is not None
        return self._recomputed()

    def on(self, submesh: Submesh) -> Cluster:
        hosts, devices = submesh
        return replace(self.cluster, num_hosts=hosts, devices_per_host=devices)

    def prepare(self, kinds: Iterable[Kind], recomputed: bool = False) -> None:
        """Make the programs of kinds of runs, together, because each cut of the step costs time."""
        wanted = {self._first(kind): kind for kind in kinds if (kind, recomputed) not in self.parts}
        if not wanted:
            return
        runs = self.recomputed_runs if recomputed else self.runs
        for run, (part, program) in runs.programs(wanted).items():
            own = stage_pins(self.pins, part, program)
            task = mesh_task(program, self.cluster, own, self.options, self.strategies)
            self.parts[wanted[run], recomputed] = part, task

    def _first(self, kind: Kind) -> Run:
        """The first run of a kind."""
        classes, length = self.runs.classes, len(kind)
        starts = range(self.num_layers - length + 1)
        first = next(i for i in starts if classes[i : i + length] == kind)
        return first, first + length - 1

    def parts_of(self, kind: Kind) -> Counter[Kind]:
        """The solved prices that make up a run's, with how often each is added."""
        if not self.composed(kind):
            return Counter({kind: 1})
        found: Counter[Kind] = Counter((c,) for c in kind)
        for a, b in pairwise(kind):
            if a == b:
                found[a, a] += 1
                found[a,] -= 2
        return found

    def price(self, kind: Kind, submesh: Submesh, choice: Choice) -> RunPrice | None:
        """Of a run that is not composed; None where there is no such plan."""
        key = kind, submesh, choice
        if key not in self.solved:
            self.solved[key] = self._solve(kind, submesh, choice)
        return self.solved[key]

    def _solve(self, kind: Kind, submesh: Submesh, choice: Choice) -> RunPrice | None:
        self.prepare([kind], choice.recomputed)
        part, task = self.parts[kind, choice.recomputed]
        self.num_solves += 1
        cluster, mesh = self.on(submesh), choice.mesh
        again = ", recomputed" if choice.recomputed else ""
        self.tell(f"pricing layers {part.layers[0]}-{part.layers[-1]} on {cluster}, mesh {mesh}{again}")
        stages = max(1, min(self.num_layers, self.cluster.num_devices // math.prod(submesh)))
        flying, rent_s = min(stages, self.num_microbatches), RENTS[choice.rent] * self.rent_unit_s
        program = task.program  # a rent that knew the task, which knows the rent, would keep both

        def rent(pricer: Pricer, problem: IntraOpProblem) -> Sequence[np.ndarray]:
            return with_rent(problem, held_bytes(pricer, part, program, flying), rent_s)

        task = replace(task, budget=math.inf, proof=False, rent=rent if rent_s else None)
        try:
            result = plan_on_mesh(task, cluster, mesh)
        except PinError:
            return None
        if result.realised is None or result.peak is None:
            return None
        one, on_cpu = InFlight(stage=0, inputs=1, residuals=1), cluster.device.platform == "cpu"
        costs = stage_costs(part, program, result, one, on_cpu=on_cpu, known=task.shared.parts)
        working = min(costs.memory.temporaries, costs.memory.peak)
        return RunPrice(
            time_s=costs.forward_s + costs.backward_s,
            once_s=costs.once_s,
            held_bytes=costs.memory.peak - working,
            working_bytes=working,
            residual_bytes=costs.residual_bytes,
        )

    @cached_property
    def rent_unit_s(self) -> float:
        """Seconds per step and byte at a share of 1."""
        budget = budget_bytes(self.cluster, self.options)
        times = Counter(self.runs.classes)
        self.prepare((c,) for c in times)
        whole_s = sum(self.least_time_s(c) * count for c, count in times.items()) * self.num_microbatches
        return whole_s / self.cluster.num_devices / budget if budget > 0 else 0.0

    def least_time_s(self, layer_class: int, recomputed: bool = False) -> float:
        """Seconds that one microbatch of a layer takes one device at least; 0 for conventions that count no time."""
        key = layer_class, recomputed
        if key not in self._least_s:
            self.prepare([(layer_class,)], recomputed)
            part, task = self.parts[(layer_class,), recomputed]
            self._least_s[key] = _least_time_s(task.program, part.loop, self.cluster, self.options)
        return self._least_s[key]

    @property
    def num_microbatches(self) -> int:
        count = self.options.num_microbatches
        return count if isinstance(count, int) else 1


def _least_time_s(program: Program, loop: int, cluster: Cluster, options: PlanOptions) -> float:
    """Matmuls of a stage's loop on one device at full efficiency, for one microbatch."""
    if options.costs not in ("roofline", "measured") or options.compute is False:
        return 0.0
    device = cluster.device

    def flops_s(body: Program) -> float:
        total = 0.0
        for op in body.ops:
            total += op.trip_count * sum(map(flops_s, op.bodies))
            if op.primitive in ("dot_general", "conv_general_dilated") and op.inputs[0] >= 0:
                dtype = body.values[op.inputs[0]].dtype
                total += op.flops / (device.peak_flops_per_s(dtype, True) * device.matmul_efficiency)
        return total

    return sum(map(flops_s, program.ops[loop].bodies))
