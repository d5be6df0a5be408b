"""The plan: everything that was decided about one step, ready to be read, saved, compared and run.

A ``Plan`` is data. What joins it to pytrees and to JAX (``in_specs``, ``bind``, ``verify``) is a ``PlanTrees`` that the
public layer attaches; it is not saved, and two plans that differ only in it are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from alpa_lite.core.collective import Collective
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.errors import AlpaLiteError, ExportError, PlanFileError, user_line
from alpa_lite.plan.cost_table import CostTable, cost_table, layout_schedule
from alpa_lite.plan.encode import encode_plan
from alpa_lite.plan.files import as_path, saved_file
from alpa_lite.plan.records import (
    Leaf,
    LeafRole,
    MemoryProfile,
    MeshCandidate,
    Padding,
    Pipeline,
    PlanIdentity,
    Rematerialisation,
    SearchStep,
    StageCount,
    StagePlan,
)
from alpa_lite.plan.text import plan_text

_ROUNDING = 1e-12  # of an objective: sums in another order differ by less

OptionValue = str | int | float | bool | None | tuple[Any, ...]


class PlanTrees(Protocol):
    """What the public layer adds to a plan: pytrees, PartitionSpecs, and the way back to a function."""

    def partition_spec(self, spec: ShardingSpec) -> Any: ...

    def in_specs(self, plan: Plan) -> Any: ...

    def out_specs(self, plan: Plan) -> Any: ...

    def bind(self, plan: Plan, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan: ...

    def verify(self, plan: Plan, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def export(
        self, plan: Plan, fn: Any, out_dir: Path, args: tuple[Any, ...], kwargs: dict[str, Any], overwrite: bool
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A sharding plan for one step.

    Attributes:
        stages: the stages in pipeline order; one without pipelining.
        objective: cost of one step in ``unit``.
        lower_bound: proven bound on the objective of any plan with these options, same unit; where dims do not divide, of the
            program with the padding that was taken. Of meshes on which no plan was found it knows nothing (``mesh_table``).
        status: the solver's status, e.g. "optimal" or "time limit".
        unit: "s", or the cost convention's own unit.
        costs: name of the cost convention.
        mesh_table: what each device mesh that was considered would cost.
        inputs, outputs: argument and result leaves in pytree order.
        identity: which program, cluster and versions the plan is for.
        options: the options that were set, by name.
        pins: (key as the user wrote it, spec text) pairs.
        search: how the chosen mesh was searched: objectives in falling order, the last one with what was proven.
        pipeline: how the stages work together; None for a single stage.
        stage_counts: what each number of stages would cost, where it was searched.
        paddings: dims that are padded inside the step; a plan with any belongs to the padded program.
        remat: layers that are recomputed in the backward pass by the plan; None where only the user's own are.
        notes: warnings and reports: dims ruled out, replicated ops, forced choices, annotations seen.
        trees: see the module docstring.
    """

    stages: tuple[StagePlan, ...]
    objective: float
    lower_bound: float
    status: str
    unit: str = "s"
    costs: str = "roofline"
    mesh_table: tuple[MeshCandidate, ...] = ()
    inputs: tuple[Leaf, ...] = ()
    outputs: tuple[Leaf, ...] = ()
    identity: PlanIdentity = field(default_factory=PlanIdentity)
    options: tuple[tuple[str, OptionValue], ...] = ()
    pins: tuple[tuple[str, str], ...] = ()
    search: tuple[SearchStep, ...] = ()
    pipeline: Pipeline | None = None
    stage_counts: tuple[StageCount, ...] = ()
    paddings: tuple[Padding, ...] = ()
    remat: Rematerialisation | None = None
    notes: tuple[str, ...] = ()
    trees: PlanTrees | None = field(default=None, compare=False, repr=False)

    @property
    def gap(self) -> float:
        """(objective - lower bound) / objective; 0 when they meet but for rounding.

        The bound holds for plans in which conversions are shared as the ILP knows it (``docs/design/0004-*.md``).
        """
        difference = self.objective - self.lower_bound
        return difference / abs(self.objective) if difference > _ROUNDING * abs(self.objective) else 0.0

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh of the first stage."""
        return self.stages[0].mesh

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Collectives of all stages, in stage order."""
        return tuple(c for stage in self.stages for c in stage.collectives)

    @property
    def memory(self) -> MemoryProfile:
        """Bytes per device of the stage with the highest peak."""
        return max((stage.memory for stage in self.stages), key=lambda memory: memory.peak)

    @property
    def compute_s(self) -> float:
        """Predicted compute time of all stages together, in ``unit``."""
        return sum(stage.compute_s for stage in self.stages)

    @property
    def communication_s(self) -> float:
        """Predicted time of all collectives of all stages together, in ``unit``."""
        return sum(stage.communication_s for stage in self.stages)

    @property
    def input_paths(self) -> tuple[str, ...]:
        return tuple(leaf.path for leaf in self.inputs)

    @property
    def output_paths(self) -> tuple[str, ...]:
        return tuple(leaf.path for leaf in self.outputs)

    @property
    def input_specs(self) -> tuple[ShardingSpec, ...]:
        return tuple(leaf.spec for leaf in self.inputs)

    @property
    def output_specs(self) -> tuple[ShardingSpec, ...]:
        return tuple(leaf.spec for leaf in self.outputs)

    @property
    def specs_by_path(self) -> dict[str, Any]:
        """Path of every argument and result leaf to its PartitionSpec (ShardingSpec before ``trees`` is attached)."""
        return {leaf.path: self._public(leaf.spec) for leaf in self.inputs + self.outputs}

    @property
    def parameter_layout(self) -> dict[str, tuple[int, Any]]:
        """Path of every parameter to (stage, PartitionSpec) (ShardingSpec before ``trees`` is attached).

        Of a function without a gradient: of arguments with a next value (a cache) alone, as nothing tells parameters from others;
        ``inputs`` has all.
        """
        parameters = (leaf for leaf in self.inputs if leaf.role is LeafRole.PARAMETER)
        return {leaf.path: (leaf.stage, self._public(leaf.spec)) for leaf in parameters}

    @property
    def in_specs(self) -> Any:
        """Pytree of PartitionSpec shaped like the arguments."""
        return self._bound().in_specs(self)

    @property
    def out_specs(self) -> Any:
        """Pytree of PartitionSpec shaped like the results."""
        return self._bound().out_specs(self)

    def bind(self, fn: Any, *args: Any, **kwargs: Any) -> Plan:
        """The same plan with the pytrees of ``fn(*args)``, for a plan read from a file.

        Raises:
            PlanFileError: if the plan is for another program; the message says what differs.
        """
        return self._bound().bind(self, fn, args, kwargs)

    def verify(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Compiles the planned step for the plan's cluster, without its devices, and compares (an audit report)."""
        return self._bound().verify(self, fn, args, kwargs)

    def export(self, fn: Any, out_dir: str | PathLike[str], *args: Any, overwrite: bool = False, **kwargs: Any) -> None:
        """Writes the plan, the step as one SPMD program, and every rank's part into a folder, whole or not at all.

        Args:
            fn: the function that was planned.
            out_dir: a new or empty folder; see ``docs/export.md`` for what it will hold.
            args, kwargs: the function's arguments. The values of arrays are stored, sliced by rank; a
                ``jax.ShapeDtypeStruct`` leaves its value out. Without any, only shapes are known, from planning or binding.
            overwrite: whether ``out_dir`` may hold something; an earlier export is replaced, other files stay.

        Raises:
            ExportError: ``out_dir`` is not empty, or the step cannot be exported.
            PlanFileError: the plan is for another program.

        Example:
            >>> plan.export(train_step, "out", state, batch_shapes)
            >>> part = al.load_export("out", rank=0)
        """
        folder = as_path(out_dir, 'plan.export(fn, "folder", *args)', ExportError)
        if not callable(fn):
            raise ExportError(
                f"plan.export got {fn!r} for the function. Allowed is the function that was planned, then the folder. "
                f"At {user_line()}. Write plan.export(fn, {str(out_dir)!r}, *args)."
            )
        self._bound().export(self, fn, folder, args, kwargs, overwrite)

    def cost_table(self) -> CostTable:
        """What the objective is made of, op by op and conversion by conversion; ``print`` it.

        Example:
            >>> table = plan.cost_table()
            >>> assert table.total == plan.objective
        """
        return cost_table(self)

    def layout_schedule(self) -> str:
        """Which arguments to shard and where to convert, one line each."""
        return layout_schedule(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan as JSON, whole or not at all; equal plans give equal bytes.

        Raises:
            PlanFileError: the folder is missing or not writable, or the disk is full.
        """
        target = as_path(path, 'plan.save("plan.json")', PlanFileError)
        with saved_file("the plan", target, PlanFileError) as file:
            file.write(encode_plan(self))

    def _public(self, spec: ShardingSpec) -> Any:
        return spec if self.trees is None else self.trees.partition_spec(spec)

    def _bound(self) -> PlanTrees:
        if self.trees is None:
            raise AlpaLiteError(
                "this plan knows paths but no pytrees: it was read below the public layer. Pytrees come with plans"
                " from `al.plan` and `al.load_plan`. Use `plan.specs_by_path`, or load the file with `al.load_plan`."
            )
        return self.trees

    def __str__(self) -> str:
        return plan_text(self)
