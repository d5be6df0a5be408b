"""Prices of runs of layers on submeshes, each solved once: what a table of stage costs is filled from.

A run's price is that of its sequence of layer classes (``LayerRuns.classes``): equal runs are one program and are solved once.
Runs of one layer, and of two equal ones, are *solved* by the planner for one mesh. Longer runs are *composed* of these,

    price(1..n) = sum of price(t) + sum over equal neighbours of price(t, t + 1) - price(t) - price(t + 1)

so that equal layers cost the same increment each. Steps with few runs have all of them solved. A price has no proof: the search
for the cheapest plan ends when bounds no longer rise, with a gap of some percent at most times.

A run has two kinds of plans: the cheapest, and, where that does not leave enough memory, the cheapest within a *share* of the
budget, that of the run's layers in a pipeline whose stages have equal parts of the layers and of the devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.errors import PinError
from alpa_lite.plan.pins import ResolvedPins
from alpa_lite.planner.one_mesh import MeshTask, plan_on_mesh
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.plan_step import mesh_candidates, mesh_task
from alpa_lite.planner.stage_costs import stage_costs
from alpa_lite.planner.stage_pins import stage_pins
from alpa_lite.schedule import InFlight
from alpa_lite.trace.stage_runs import LayerRuns, Run
from alpa_lite.trace.stages import StageProgram

Kind = tuple[int, ...]  # layer classes of a run, in order
Submesh = tuple[int, int]
MAX_SOLVED_RUNS = 12  # different runs of layers up to which all are solved, whatever their length
_ROUNDS = 3  # of solving within a share of the budget
_STEP = 0.02  # share of it by which a limit is lowered at least


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrice:
    """What a run of layers costs as a stage, under one plan.

    Attributes:
        time_s: forward and backward of one microbatch.
        once_s: per step.
        memory_bytes: peak per device with one microbatch in flight.
        residual_bytes: what each further one in flight adds.
        planned_bytes: peak of the run's program, in which stand the stacks of all microbatches that it exchanges.
    """

    time_s: float
    once_s: float
    memory_bytes: float
    residual_bytes: float
    planned_bytes: float

    def in_flight(self, microbatches: int) -> float:
        """Bytes per device with so many microbatches in flight."""
        return self.memory_bytes + (microbatches - 1) * self.residual_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a stage may be planned on a submesh: its logical mesh, and whether within a share of the memory budget."""

    mesh: DeviceMesh
    frugal: bool = False


class RunPrices:
    """Prices of one step's runs on a cluster; every question is answered once."""

    def __init__(
        self,
        runs: LayerRuns,
        cluster: Cluster,
        pins: ResolvedPins,
        options: PlanOptions,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.runs, self.cluster, self.pins, self.options = runs, cluster, pins, options
        self.tell = progress or (lambda text: None)
        self.parts: dict[Kind, tuple[StageProgram, MeshTask]] = {}
        self.solved: dict[tuple[Kind, Submesh, Choice], RunPrice | None] = {}
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
        """The cheapest plan on each logical mesh, then the cheapest within a share of the memory.

        On several hosts one axis has at most the devices of a host: what it splits is exchanged inside of hosts.
        """
        cluster = self.on(submesh)
        meshes = list(mesh_candidates(cluster, self.pins, self.options))
        if cluster.num_hosts > 1 and self.options.mesh_shape is None:
            inner = [m for m in meshes if len(m.shape) == 1 or min(m.shape[1:]) <= cluster.devices_per_host]
            meshes = [m for m in inner if len(m.shape) == 1 or math.prod(m.shape[1:]) <= cluster.devices_per_host]
        return tuple(Choice(mesh=mesh, frugal=frugal) for frugal in (False, True) for mesh in meshes)

    def on(self, submesh: Submesh) -> Cluster:
        hosts, devices = submesh
        return replace(self.cluster, num_hosts=hosts, devices_per_host=devices)

    def prepare(self, kinds: Iterable[Kind]) -> None:
        """Make the programs of kinds of runs, together, because each cut of the step costs time."""
        first: dict[Kind, Run] = {}
        for i in range(self.num_layers):
            for j in range(i, self.num_layers):
                first.setdefault(self.kind((i, j)), (i, j))
        wanted = {first[kind]: kind for kind in kinds if kind not in self.parts}
        for run, (part, program) in self.runs.programs(wanted).items():
            own = stage_pins(self.pins, part, program)
            self.parts[wanted[run]] = part, mesh_task(program, self.cluster, own, self.options)

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
        self.prepare([kind])
        part, task = self.parts[kind]
        cluster = self.on(submesh)
        if not choice.frugal:
            return self._plan(part, task, cluster, choice.mesh, math.inf)
        best = self.price(kind, submesh, replace(choice, frugal=False))
        if best is None:
            return None
        share, flying = self.share(kind, submesh, choice, task.budget)
        for _ in range(_ROUNDS):
            excess = best.in_flight(flying) - share
            limit = best.planned_bytes - math.ceil(max(excess, _STEP * share))
            if excess <= 0 or limit <= 0:
                break
            found = self._plan(part, task, cluster, choice.mesh, limit)
            if found is None:
                break
            best = found
        return best

    def share(self, kind: Kind, submesh: Submesh, choice: Choice, budget: float) -> tuple[float, int]:
        """The part of the budget for these layers, and the microbatches in flight, in a pipeline of such submeshes.

        What is no layer of the most common class gets what those beside it in its stage leave.
        """
        stages = max(1, self.cluster.num_devices // math.prod(submesh))
        per_stage = max(len(kind), math.ceil(self.num_layers / stages))
        flying = min(stages, self.num_microbatches)
        common = Counter(self.runs.classes).most_common(1)[0][0]
        if set(kind) != {common}:
            inner = self.price((common,), submesh, choice)
            if inner is not None:
                return budget - (per_stage - len(kind)) * inner.in_flight(flying), flying
        return budget * len(kind) / per_stage, flying

    @property
    def num_microbatches(self) -> int:
        count = self.options.num_microbatches
        return count if isinstance(count, int) else 1

    def _plan(
        self, part: StageProgram, task: MeshTask, cluster: Cluster, mesh: DeviceMesh, limit: float
    ) -> RunPrice | None:
        self.num_solves += 1
        self.tell(f"pricing layers {part.layers[0]}-{part.layers[-1]} on {cluster}, mesh {mesh}")
        try:
            result = plan_on_mesh(replace(task, budget=limit, proof=False), cluster, mesh)
        except PinError:
            return None
        if result.realised is None or result.peak is None:
            return None
        one, on_cpu = InFlight(stage=0, inputs=1, residuals=1), cluster.device.platform == "cpu"
        costs = stage_costs(part, task.program, result, one, on_cpu=on_cpu)
        return RunPrice(
            time_s=costs.forward_s + costs.backward_s,
            once_s=costs.once_s,
            memory_bytes=costs.memory.peak,
            residual_bytes=costs.residual_bytes,
            planned_bytes=result.peak.profile.peak,
        )
