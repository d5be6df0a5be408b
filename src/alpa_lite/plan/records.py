"""The parts of a plan: what was decided for a leaf, an op, a stage. Frozen records without behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum

from alpa_lite.core.collective import Collective
from alpa_lite.core.conversion import Conversion
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Value
from alpa_lite.core.spec import ShardingSpec


class LeafRole(StrEnum):
    """What an argument or result leaf is.

    State is an argument leaf with an aliased or same-path result; parameters are the state leaves that reach the
    differentiated function, optimizer state is the rest of the state.
    """

    PARAMETER = "parameter"
    OPTIMIZER_STATE = "optimizer_state"
    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One leaf of the arguments or results, and how it lies on its stage's mesh.

    Attributes:
        path: pytree path, e.g. "0/params/kernel" or "out/0/params/kernel".
        value: global shape and dtype.
        spec: the decided layout; never unreduced.
        role: what the leaf is; a result that is new state has the role of its argument.
        stage: index of the stage that holds it.
        pin: the pin as the user wrote it, "" where the planner was free.
    """

    path: str
    value: Value
    spec: ShardingSpec
    role: LeafRole = LeafRole.INPUT
    stage: int = 0
    pin: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpDecision:
    """The strategy chosen for one op.

    Attributes:
        path: path of the op as ``Program.walk`` names it.
        op: the op's text (``identity.op_text``), by which a plan knows its program again.
        operands: layout in which the op reads each operand (rank 0 for a literal).
        results: layout in which it leaves each result, before any conversion.
        time_s: predicted compute time of all its executions in one step, in the plan's unit.
    """

    path: str
    op: str = ""
    operands: tuple[ShardingSpec, ...]
    results: tuple[ShardingSpec, ...]
    time_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Bytes per device: totals of the state, and what else is alive when memory is fullest.

    Attributes:
        parameters, optimizer_state: state, alive for the whole step.
        inputs: argument leaves that are not state, e.g. the batch.
        gradients, activations, temporaries: alive at the peak.
        outputs: results that reuse no argument's buffer, alive at the peak.
        constants: captured arrays.
        peak: the largest sum over the step.
    """

    parameters: int = 0
    optimizer_state: int = 0
    inputs: int = 0
    gradients: int = 0
    activations: int = 0
    temporaries: int = 0
    outputs: int = 0
    constants: int = 0
    peak: int = 0

    def items(self) -> tuple[tuple[str, int], ...]:
        """All parts by name, the peak last."""
        return tuple((f.name, getattr(self, f.name)) for f in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage: contiguous layers on one submesh.

    Attributes:
        mesh: the logical device mesh that all specs of the stage refer to.
        submesh: (hosts, devices per host) of the part of the cluster it takes.
        first_device: of the cluster, host by host; the stage has as many from there as its mesh.
        layers: indices of its layers; empty while the whole program is one stage.
        memory: bytes per device; where several stages share a submesh, the peak is that of all of them together.
        collectives: everything that moves data between devices of the mesh.
        decisions: one per op, in the order of ``Program.walk``.
        conversions: changes of layout, each at its place; they name their ``collectives``.
        compute_s: predicted compute time of one step, in the plan's unit.
        penalty: what the cost convention charges for state that every device holds whole, in the plan's unit.
        inputs, outputs: of the stage's part of the step: leaves of the step, then what it receives or sends ("loop": once per
            microbatch, stacked here). Empty where the whole step is one stage.
        forward_s, backward_s: predicted time of one microbatch, collectives included; 0 without a pipeline.
        weight_s: the part of ``backward_s`` that is the weight half, where the schedule splits it.
        once_s: of what happens once per step: reducing gradients, the update.
    """

    mesh: DeviceMesh
    submesh: tuple[int, int] = (1, 1)
    first_device: int = 0
    layers: tuple[int, ...] = ()
    memory: MemoryProfile = field(default_factory=MemoryProfile)
    collectives: tuple[Collective, ...] = ()
    decisions: tuple[OpDecision, ...] = ()
    conversions: tuple[Conversion, ...] = ()
    compute_s: float = 0.0
    penalty: float = 0.0
    inputs: tuple[Leaf, ...] = ()
    outputs: tuple[Leaf, ...] = ()
    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0
    once_s: float = 0.0

    @property
    def communication_s(self) -> float:
        """Predicted time of all collectives of one step, in the plan's unit."""
        return sum(c.time_s * c.count for c in self.collectives)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTransfer:
    """A tensor that one stage sends to another.

    Attributes:
        tensor: its text, or the path of the leaf.
        source, target: stages.
        when: "start" and "end" once per step, "loop" for every microbatch.
        size_bytes: of the whole tensor, one microbatch of it.
        time_s: predicted, for one transfer.
    """

    tensor: str
    source: int
    target: int
    when: str
    size_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How stages work together.

    Attributes:
        num_microbatches: slices of the batch.
        schedule: name of the order of forward and backward passes.
        num_chunks: stages per submesh, under a schedule that interleaves them.
        timeline: the simulated step as text, a row per submesh.
        table: rows of CSV of a schedule that the user made, one per submesh; empty for a named one.
        stage_of_layer: rising.
        transfers: between stages.
        bubble_share: of the time of all devices, how much they wait, in the simulated step.
    """

    num_microbatches: int
    schedule: str
    stage_of_layer: tuple[int, ...]
    transfers: tuple[StageTransfer, ...] = ()
    bubble_share: float = 0.0
    num_chunks: int = 1
    table: tuple[str, ...] = ()
    timeline: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCount:
    """The best cut into so many stages that the search of stages found.

    Attributes:
        num_stages: 1 is no pipeline.
        objective: of one step, in the plan's unit; None where there is no cut.
        bubble_share: of the time of all devices, how much they wait; None where it is not known.
        status: "planned" (exactly, by the simulator), "estimated" (from the table of stage costs), "no less" (a bound by what was
            solved of that table), or why there is none.
    """

    num_stages: int
    objective: float | None = None
    bubble_share: float | None = None
    status: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStep:
    """One entry of a search trace: a choice that is better than all before it, or how the search ended.

    Attributes:
        objective: of the best choice so far.
        lower_bound: proven by then; ``-inf`` if nothing was.
        found_by: "greedy" (op by op, before any search), "search", or "proof": nothing better exists.
    """

    objective: float
    lower_bound: float
    found_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCandidate:
    """One device mesh that was considered.

    Attributes:
        mesh: shape and axis names.
        objective: what the best plan on it costs; None if none was found.
        lower_bound: proven bound; None if none was proven.
        peak_bytes: predicted peak memory per device; None without a plan.
        status: the solver's status, or "ruled out".
        reason: why it was not taken or could not be solved.
    """

    mesh: DeviceMesh
    objective: float | None = None
    lower_bound: float | None = None
    peak_bytes: int | None = None
    status: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Dims of one size that are padded inside the step, so that they can be split; arguments and results keep their sizes.

    Attributes:
        dim: an argument and its dim, e.g. "0/params/wte dim 0", which stands for all dims that are padded with it.
        size, padded: the true and the padded size.
        shards: the largest number of parts that a padded dim is split into.
        waste_bytes: what the padding takes on one device, over all padded tensors of the step (they do not all live at once).
        waste_s: predicted time spent on it, in the plan's unit: its share of the ops that run padded, and all pads, slices
            and masks.
        pins: (position among arguments and results, layout) of pins that hold for the padded form.
        without: what the best plan without any padding costs; None if there is none.
    """

    dim: str
    size: int
    padded: int
    shards: int = 1
    waste_bytes: int = 0
    waste_s: float = 0.0
    pins: tuple[tuple[int, str], ...] = ()
    without: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rematerialisation:
    """Layers whose backward pass recomputes what it reads of the forward pass; a plan with one belongs to that program.

    Attributes:
        num_layers: of the step.
        layers: those that are recomputed, rising.
        saved: names of values (``checkpoint_name``) that are kept all the same.
    """

    num_layers: int
    layers: tuple[int, ...]
    saved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanIdentity:
    """What a plan is for, and what made it.

    Attributes:
        fingerprint: ``identity.fingerprint`` of the program.
        cluster: the cluster's text, e.g. "8x8:h100-sxm".
        calibration: the measured record that replaced the hardware table, as text; "" if none.
        jax_version: JAX that traced the program.
        alpa_lite_version: the planner.
    """

    fingerprint: str = ""
    cluster: str = ""
    calibration: str = ""
    jax_version: str = ""
    alpa_lite_version: str = ""
