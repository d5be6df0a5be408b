"""Program + cluster + pins + options -> ``Plan``: tries the device meshes and takes the cheapest plan.

Planning touches no device and is deterministic: the same input gives the same plan, bit for bit, unless the solver's
time limit strikes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Program, Value
from alpa_lite.core.rule import FactorKind
from alpa_lite.costs.counted import PER_READER, SINGLE_AXIS
from alpa_lite.costs.donated import transposed_arguments
from alpa_lite.costs.facts import Facts
from alpa_lite.costs.memory import Order, timeline
from alpa_lite.costs.roles import roles_of
from alpa_lite.errors import AlpaLiteError, MemoryBudgetError, PinError, SolverError
from alpa_lite.intraop.decisions import hands_on
from alpa_lite.intraop.strategies import KnownStrategies
from alpa_lite.plan.check import check_plan
from alpa_lite.plan.identity import fingerprint, op_text
from alpa_lite.plan.pins import ResolvedPins
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Leaf, LeafRole, MeshCandidate, OpDecision, PlanIdentity, SearchStep, StagePlan
from alpa_lite.planner.budget import MeshResult
from alpa_lite.planner.explain import explain_infeasible
from alpa_lite.planner.one_mesh import greedy_first, plan_on_mesh
from alpa_lite.planner.options import DEFAULT_AXIS_NAMES, PlanOptions
from alpa_lite.planner.posing import MeshTask
from alpa_lite.planner.shared import Shared
from alpa_lite.units import format_cost

BUDGET_SHARE = 0.9
LIMITED = "limited by the memory budget"
DEARER = "dearer than another mesh, and not written out"
NOT_WRITTEN = "not written out"
_MARGIN = 1.02  # a mesh that must cost more than this times the cheapest so far is not searched to the end
HANDED_ON = (
    "the lower bound is of plans in which a value that three or more ops read is handed to them in one layout "
    "(docs/design/0004-decisions-and-copies.md)"
)
LITERAL = Value(shape=(), dtype="float32", itemsize=4)  # a result that is a constant of the function


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """What made a plan."""

    jax: str
    alpa_lite: str


@dataclass(eq=False, slots=True)
class KnownTasks:
    """Programs that were planned: the same one is planned again, with other pins or meshes, from what is known of it.

    Without ``explains`` an error says that there is no plan, and not why, which may take many times as long as to find it out.
    Without ``compares`` plans on meshes that must be dearer than another one are not written out.
    """

    explains: bool = True
    compares: bool = True
    _found: dict[int, MeshTask] = field(default_factory=dict)
    _priced: dict[int, tuple[ResolvedPins, dict[DeviceMesh, MeshResult]]] = field(default_factory=dict)

    def task(self, program: Program, cluster: Cluster, pins: ResolvedPins, options: PlanOptions) -> MeshTask:
        """To be planned now; for one cluster and one set of rules and conventions only."""
        known = self._found.get(id(program))  # which the task holds, so that no other one gets its number
        if known is None:
            made = mesh_task(program, cluster, pins, options)
        else:
            made = replace(known, pins=pins, options=options, budget=budget_bytes(cluster, options))
        self._found[id(program)] = made
        return made

    def last(self, program: Program) -> MeshTask:
        """As the program was planned last."""
        return self._found[id(program)]

    def keep_priced(self, task: MeshTask, result: MeshResult) -> None:
        """For when the same is to be written out."""
        pins, results = self._priced.get(id(task.program), (None, {}))
        self._priced[id(task.program)] = task.pins, {**(results if pins == task.pins else {}), result.mesh: result}

    def priced(self, task: MeshTask, mesh: DeviceMesh) -> MeshResult | None:
        """What was found on a mesh with these pins, not written out and without a limit; not what ended as another mesh was
        cheaper, as long as nobody asked for its memory."""
        pins, results = self._priced.get(id(task.program), (None, {}))
        found = results.get(mesh) if pins == task.pins else None
        return None if found is None or (found.solution and found.solution.limit_used == "cutoff") else found


def plan_step(
    program: Program,
    cluster: Cluster,
    pins: ResolvedPins,
    options: PlanOptions,
    versions: Versions,
    *,
    notes: tuple[str, ...] = (),
    progress: Callable[[str], None] | None = None,
    known: KnownTasks | None = None,
    meshes: Sequence[DeviceMesh] | None = None,
) -> Plan:
    """The cheapest plan over the candidate meshes, or those given; ``known``: what was planned before with the same options but
    for meshes.

    Raises:
        PinError, PinClashError: pins that no mesh can hold, or that clash (with the smallest clashing set).
        MemoryBudgetError: nothing fits the budget, with the smallest possible peak.
        SolverError: no answer within the time limit.
    """
    known = KnownTasks() if known is None else known
    task = known.task(program, cluster, pins, options)
    meshes = list(mesh_candidates(cluster, pins, options)) if meshes is None else meshes
    results, tried, refused = search_meshes(known, task, cluster, meshes, progress)
    solved = [r for r in results if r.realised is not None]
    if not solved:
        if not results:
            raise refused[0]
        raise no_plan(task, results, cluster) if known.explains else _unexplained(results)
    best = min(solved, key=lambda r: (r.objective, meshes.index(r.mesh)))
    plan = _plan(task, cluster, best, versions, tuple(tried[mesh] for mesh in meshes), notes)
    bound = min(r.lower_bound for r in results if math.isfinite(r.objective))
    if bound < plan.lower_bound:  # of a mesh whose plan is dearer, and might not be the best one there
        plan = replace(plan, lower_bound=bound, status="feasible")
    check_plan(plan, program)
    return plan


def search_meshes(
    known: KnownTasks,
    task: MeshTask,
    cluster: Cluster,
    meshes: Sequence[DeviceMesh],
    progress: Callable[[str], None] | None,
    *,
    writes: bool = True,
) -> tuple[list[MeshResult], dict[DeviceMesh, MeshCandidate], list[PinError]]:
    """What was found on each mesh, the same as rows of a table, and the pins that ruled meshes out.

    Without ``writes`` no plan is written out, so that nobody looks whether one fits the memory; ``known`` keeps what was found.
    """
    tell = progress or (lambda text: None)
    results: list[MeshResult] = []
    tried: dict[DeviceMesh, MeshCandidate] = {}
    refused: list[PinError] = []
    for mesh in sorted(meshes, key=lambda mesh: sum(mesh.shape)):  # squarest first: mostly the best, so others end soon
        tell(f"planning {len(task.program.ops)} ops on mesh {mesh}")
        try:
            cheapest = min((r.objective for r in results), default=math.inf)
            dearest = -math.inf if not writes else math.inf if known.compares else cheapest
            result = plan_on_mesh(
                task, cluster, mesh, cutoff=_MARGIN * cheapest, dearest=dearest, priced=known.priced(task, mesh)
            )
        except PinError as error:
            refused.append(error)
            # A plan does not depend on where it was asked for.
            reason = str(error).replace(f" At {task.pins.source}.", "")
            tried[mesh] = MeshCandidate(mesh=mesh, status="ruled out", reason=reason)
            tell(f"mesh {mesh}: ruled out by a pin")
            continue
        if not writes:
            known.keep_priced(task, result)
        results.append(result)
        tried[mesh] = _candidate(result, DEARER if writes else NOT_WRITTEN)
        tell(_outcome(result, DEARER if writes else NOT_WRITTEN))
    return results, tried, refused


def _outcome(result: MeshResult, why: str) -> str:
    """One mesh in a line, for people who watch; ``why``: a plan that was found is not written out."""
    found = "no plan"
    if result.realised is not None:
        costs = (format_cost(cost, result.unit) for cost in (result.objective, result.lower_bound))
        found = "objective {}, lower bound {}".format(*costs)
    elif math.isfinite(result.objective):
        found = f"lower bound {format_cost(result.lower_bound, result.unit)}, {why}"
    return f"mesh {result.mesh}: {result.status}, {found}, after {result.seconds:.1f} s"


def mesh_task(
    program: Program,
    cluster: Cluster,
    pins: ResolvedPins,
    options: PlanOptions,
    strategies: KnownStrategies | None = None,
) -> MeshTask:
    """What is to be planned on every mesh; of the cluster it knows the device alone. ``strategies``: found for other programs."""
    budget = budget_bytes(cluster, options)
    facts, roles = Facts(program), roles_of(program)
    line = timeline(program, Order.BREADTH_FIRST if cluster.device.platform == "cpu" else Order.LATE, facts=facts)
    shared = Shared(facts, roles, strategies=KnownStrategies() if strategies is None else strategies)
    return MeshTask(program=program, line=line, roles=roles, pins=pins, options=options, budget=budget, shared=shared)


def budget_bytes(cluster: Cluster, options: PlanOptions) -> float:
    """What the plan's peak per device may be."""
    budget = options.memory_budget_bytes
    return BUDGET_SHARE * cluster.device.memory_bytes if budget is None else budget


def plan_of_result(
    task: MeshTask, cluster: Cluster, result: MeshResult, versions: Versions, notes: tuple[str, ...]
) -> Plan:
    """The plan on one mesh, as ``plan_step`` gives it where no other mesh was tried; it raises the same errors."""
    if result.realised is None:
        raise no_plan(task, [result], cluster)
    plan = _plan(task, cluster, result, versions, (_candidate(result),), notes)
    check_plan(plan, task.program)
    return plan


def mesh_candidates(cluster: Cluster, pins: ResolvedPins, options: PlanOptions) -> Iterator[DeviceMesh]:
    """The meshes to try: the one asked for, or every factorisation of the cluster.

    With pins the axes are exactly those that the pins use (size 1 allowed); else up to ``max_axes`` axes of size > 1.
    A convention for one axis gets only meshes in which at most one is larger than 1.
    """
    single = options.costs in SINGLE_AXIS
    names = options.axis_names or pins.axis_names
    if options.mesh_shape is not None:
        mesh = DeviceMesh(shape=options.mesh_sizes, axis_names=axis_names_of(options, pins.axis_names))
        cluster.check_mesh(mesh)
        yield mesh
    elif names:
        for shape in cluster.mesh_candidates(len(names), min_axis_size=1):
            if single and sum(n > 1 for n in shape) > 1:
                continue
            yield DeviceMesh(shape=shape, axis_names=tuple(names))
    else:
        yield DeviceMesh(shape=(cluster.num_devices,), axis_names=DEFAULT_AXIS_NAMES[:1])
        for count in range(2, 1 if single else options.max_axes + 1):
            for shape in cluster.mesh_candidates(count, min_axis_size=2, up_to_symmetry=True):
                yield DeviceMesh(shape=shape, axis_names=DEFAULT_AXIS_NAMES[:count])


def axis_names_of(options: PlanOptions, pinned: Sequence[str]) -> tuple[str, ...]:
    """Names of the axes of ``options.mesh_shape``: the user's, or those that pins use, then the default ones.

    Where pins use default names alone, each stays where it is without pins.
    """
    count = len(options.mesh_shape or ())
    names = options.axis_names or pinned
    if not options.axis_names and set(pinned) <= set(DEFAULT_AXIS_NAMES[:count]):
        names = ()
    extra = tuple(n for n in DEFAULT_AXIS_NAMES if n not in names)
    return (*names, *extra)[:count]


def _candidate(result: MeshResult, why: str = DEARER) -> MeshCandidate:
    """``why``: a plan that was found is not written out."""
    if result.realised is None and math.isfinite(result.objective):
        return MeshCandidate(mesh=result.mesh, lower_bound=result.lower_bound, status=result.status, reason=why)
    if result.realised is None or result.peak is None:
        reason = result.solution.message if result.solution else "the peak stays above the budget"
        return MeshCandidate(mesh=result.mesh, status=result.status, reason=reason)
    return MeshCandidate(
        mesh=result.mesh,
        objective=result.objective,
        lower_bound=result.lower_bound,
        peak_bytes=result.peak.profile.peak,
        status=result.status,
        reason=LIMITED if is_limited(result) else "",
    )


def is_limited(result: MeshResult) -> bool:
    """Whether the cheapest plan on the mesh does not fit the memory budget."""
    return result.restricted or (result.budgeted == "peak" and result.limit is not None)


def _unexplained(results: Sequence[MeshResult]) -> AlpaLiteError:
    if any(result.limit is not None for result in results):
        return MemoryBudgetError("no plan was found within the memory budget.", proven=False)
    return PinError("no plan was found that keeps the pins.")


def no_plan(task: MeshTask, results: list[MeshResult], cluster: Cluster) -> AlpaLiteError:
    unsolved = [str(r.mesh) for r in results if r.status == "no-solution"]
    if unsolved:
        return SolverError(
            f"no plan was found within time_limit_s={task.options.time_limit_s} per mesh for {len(task.program.ops)} ops "
            f"on {', '.join(unsolved)}. Any positive time is allowed. At {task.pins.source}. Raise "
            "PlanOptions.time_limit_s, fix the mesh with PlanOptions.mesh_shape, or pin more parameters."
        )
    return explain_infeasible(task, results, cluster)


def _plan(
    task: MeshTask,
    cluster: Cluster,
    best: MeshResult,
    versions: Versions,
    candidates: tuple[MeshCandidate, ...],
    notes: tuple[str, ...],
) -> Plan:
    program, written = task.program, best.realised
    assert written is not None and best.peak is not None
    facts = task.shared.facts
    decisions = decisions_of(best, facts.of(op_texts, program))
    stage = StagePlan(
        mesh=best.mesh,
        submesh=(cluster.num_hosts, cluster.devices_per_host),
        memory=best.peak.profile,
        collectives=written.collectives,
        decisions=decisions,
        conversions=written.conversions,
        compute_s=best.compute,
        penalty=best.penalty,
    )
    role_of_output = {o: task.roles[i] for i, o in program.aliases}
    inputs = tuple(
        Leaf(path=path, value=program.values[v], spec=spec, role=role, pin=pin.origin)
        for path, v, spec, role, pin in zip(
            program.input_paths, program.inputs, written.in_specs, task.roles, task.pins.inputs, strict=True
        )
    )
    outputs = tuple(
        Leaf(
            path=path,
            value=program.values[v] if v >= 0 else LITERAL,
            spec=spec,
            role=role_of_output.get(i, LeafRole.OUTPUT),
            pin=pin.origin,
        )
        for i, (path, v, spec, pin) in enumerate(
            zip(program.output_paths, program.outputs, written.out_specs, task.pins.outputs, strict=True)
        )
    )
    return Plan(
        stages=(stage,),
        objective=best.objective,
        lower_bound=best.lower_bound,
        status=best.status,
        unit=best.unit,
        costs=task.options.costs,
        mesh_table=candidates,
        inputs=inputs,
        outputs=outputs,
        identity=identity_of(facts.of(fingerprint, program), cluster, versions),
        options=task.options.changed(),
        pins=task.pins.keys,
        search=_search(best, greedy_first(task, cluster, best)),
        notes=(
            *_idle(cluster, best.mesh),
            *notes,
            *task.pins.notes,
            *reports(program, [(program, best.mesh)], task.options),
        ),
    )


def _idle(cluster: Cluster, mesh: DeviceMesh) -> tuple[str, ...]:
    used, there = mesh.num_devices, cluster.num_devices
    return (f"the mesh {mesh} uses {used} of the cluster's {there} devices",) if used < there else ()


def decisions_of(result: MeshResult, texts: Sequence[str]) -> tuple[OpDecision, ...]:
    """The decisions of a result with the ops' texts and times, as a plan holds them."""
    assert result.realised is not None
    times = dict(result.op_times)
    return tuple(
        replace(d, op=text, time_s=times.get(d.path, 0.0))
        for d, text in zip(result.realised.decisions, texts, strict=True)
    )


def op_texts(program: Program) -> list[str]:
    """Of all ops, in the order of ``Program.walk``."""
    return [op_text(owner, op) for _, owner, op in program.walk()]


def identity_of(fingerprint: str, cluster: Cluster, versions: Versions) -> PlanIdentity:
    """Which program, cluster and versions a plan is for."""
    return PlanIdentity(
        fingerprint=fingerprint,
        cluster=str(cluster),
        calibration=cluster.calibration.to_text() if cluster.calibration else "",
        jax_version=versions.jax,
        alpa_lite_version=versions.alpa_lite,
    )


def _search(best: MeshResult, greedy: SearchStep | None) -> tuple[SearchStep, ...]:
    """The greedy choice and the solver's trace, ending in what the written-out plan costs (a copy that nobody reads is not
    made)."""
    if best.solution is None:
        return ()
    *earlier, end = best.solution.trace
    falling: list[SearchStep] = []
    for step in earlier if greedy is None else (greedy, *earlier):  # two that differ in slices alone may cost the same
        if step.objective > best.objective and (not falling or step.objective < falling[-1].objective):
            falling.append(step)
    return (*falling, replace(end, objective=best.objective, lower_bound=best.lower_bound))


def reports(program: Program, parts: Sequence[tuple[Program, DeviceMesh]], options: PlanOptions) -> tuple[str, ...]:
    """What a reader should know: dims and ops that could not be split, loops of unknown length, what a bound leaves out.

    Args:
        program: the whole step.
        parts: what is planned of it, each on its mesh.
        options: of the plan.
    """
    notes = []
    indivisible = list(dict.fromkeys(text for part, mesh in parts for text in _indivisible(part, mesh)))
    if indivisible:
        shown = "; ".join(indivisible[:4])
        more = f"; and {len(indivisible) - 4} more" if len(indivisible) > 4 else ""
        notes.append(f"not split because sizes do not divide: {shown}{more}")
    unknown: dict[str, tuple[int, str]] = {}
    loops = []
    for _, _, op in program.walk():
        if op.primitive == "while":
            loops.append(op.source)
        whole = all(f.kind is FactorKind.REPLICATED for f in op.rule.factors)
        if op.rule.origin == "none" or (op.rule.reason and whole and op.rule.factors and not op.bodies):
            count, _ = unknown.get(op.primitive, (0, ""))
            unknown[op.primitive] = (count + 1, op.rule.reason)
    for primitive, (count, reason) in sorted(unknown.items()):
        notes.append(f"replicated: {count} {primitive} ({reason})")
    if transposed := [program.input_paths[a.position] for a in transposed_arguments(program)]:
        more = f" and {len(transposed) - 1} more" if len(transposed) > 1 else ""
        notes.append(
            f"copied twice per call on GPUs: {transposed[0]}{more}, as a matmul's batch dims lie behind others there. Put them "
            "first: in a cache, heads before tokens"
        )
    if loops:
        notes.append(f"{len(loops)} while loops count as one iteration: {', '.join(dict.fromkeys(loops))}")
    if options.costs not in PER_READER and any(hands_on(part) for part, _ in parts):
        notes.append(HANDED_ON)
    return tuple(notes)


def _indivisible(program: Program, mesh: DeviceMesh) -> Iterator[str]:
    """Large dims of arguments that axes of the mesh do not divide, unless they are padded."""
    pads = [(op.inputs[0], program.values[op.outputs[0]].shape) for op in program.ops if op.primitive == "pad"]
    padded = {
        (v, dim) for v, shape in pads if v >= 0 for dim, n in enumerate(shape) if n > program.values[v].shape[dim]
    }
    for path, value in zip(program.input_paths, program.inputs, strict=True):
        for dim, size in enumerate(program.values[value].shape):
            if (value, dim) in padded:
                continue
            bad = [a for a, n in zip(mesh.axis_names, mesh.shape, strict=True) if n > 1 and size > 1 and size % n]
            if bad and size > mesh.num_devices:
                yield f"{path} dim {dim} of size {size} over {', '.join(bad)}"
