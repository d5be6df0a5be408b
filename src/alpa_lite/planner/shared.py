"""What the plans of one program have in common, made once: rules as a convention leaves them, decision graphs, price slots.

A decision graph knows the axes of a mesh, and of their sizes only what they divide and what they are equal to. Meshes that
agree in that have the same graph and the same slots; a user's ``shard_map`` is checked against each mesh.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Program
from alpa_lite.costs.conversion import Conversions
from alpa_lite.costs.facts import Facts
from alpa_lite.costs.memory import Timeline, timeline, with_moves
from alpa_lite.costs.model import SearchRules
from alpa_lite.costs.overlap_order import Schedule
from alpa_lite.intraop.decision_graph import DecisionGraph
from alpa_lite.intraop.decisions import build_graph
from alpa_lite.intraop.derive import derive
from alpa_lite.intraop.known_shape import KnownShape
from alpa_lite.intraop.repeats import slot_classes
from alpa_lite.intraop.restrict import restricted, values_of, weight_positions
from alpa_lite.intraop.slots import Slots, slots_of
from alpa_lite.intraop.strategies import KnownStrategies, mesh_class
from alpa_lite.plan.records import LeafRole
from alpa_lite.planner.part_memory import KnownParts

_STATE = (LeafRole.PARAMETER, LeafRole.OPTIMIZER_STATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Posed:
    """What is to be decided.

    Attributes:
        program: with the rules that are left.
        weights: positions of its arguments that are weights.
        graph: the decisions.
        slots: what of them is priced once.
        classes: per node, which are copies of one another if no pin tells them apart.
    """

    program: Program
    weights: frozenset[int]
    graph: DecisionGraph
    slots: Slots
    classes: np.ndarray


@dataclass(eq=False, slots=True)
class Shared:
    """Of one program; ``parts`` where it is a stage. ``strategies`` may be shared with programs of the same ops."""

    facts: Facts
    roles: tuple[LeafRole, ...]
    parts: KnownParts = field(default_factory=KnownParts)
    strategies: KnownStrategies = field(default_factory=KnownStrategies)
    shape: KnownShape = field(default_factory=KnownShape)
    _line: tuple[tuple[bool, list[int]], Timeline] | None = None  # the last one; most plans run their ops alike
    _sizes: frozenset[int] | None = None
    _has_layouts: bool | None = None
    _restricted: dict[SearchRules, tuple[Program, frozenset[int]]] = field(default_factory=dict)
    _posed: dict[Hashable, Posed] = field(default_factory=dict)
    _built: dict[Hashable, Posed] = field(default_factory=dict)  # from which those of other meshes follow

    @property
    def program(self) -> Program:
        return self.facts.program

    @property
    def sizes(self) -> frozenset[int]:
        """Every size above 1 that an axis may split."""
        if self._sizes is None:
            self._sizes = sizes_of(self.program)
        return self._sizes

    def posed(self, conversions: Conversions, rules: SearchRules, ties: Sequence[tuple[int, int]]) -> Posed:
        """The decisions on one mesh.

        Args:
            conversions: on the mesh.
            rules: what the convention leaves.
            ties: pairs of arguments with one decision.
        """
        if rules not in self._restricted:
            program = restricted(self.program, rules)
            self._restricted[rules] = program, weight_positions(program, self.roles)
        program, weights = self._restricted[rules]
        penalty = conversions.costs.replication_penalty > 0
        alike = rules, tuple(ties), penalty
        key = *alike, self.mesh_class_of(conversions.mesh)
        if key not in self._posed:
            base = None if self._names_axes else self._built.get(alike)
            if base is None:
                base = self._built[alike] = self._pose(program, weights, conversions, rules, ties, penalty)
                self._posed[key] = base
            else:
                graph, slots = derive(base.graph, base.slots, conversions, self.strategies)
                self._posed[key] = replace(base, graph=graph, slots=slots)
        posed = self._posed[key]
        return replace(posed, graph=replace(posed.graph, conversions=conversions))

    def _pose(
        self,
        program: Program,
        weights: frozenset[int],
        conversions: Conversions,
        rules: SearchRules,
        ties: Sequence[tuple[int, int]],
        penalty: bool,
    ) -> Posed:
        graph = build_graph(
            program,
            conversions,
            input_ties=[(max(a, b), min(a, b)) for a, b in ties],
            sharded_contractions=rules.sharded_contractions,
            per_reader=rules.per_reader,
            known=self.strategies,
        )
        ports = zip(graph.inputs, self.roles, strict=True)
        state = frozenset(node for node, role in ports if role in _STATE) if penalty else frozenset()
        placed = values_of(program, weights) if rules.placed_weights else frozenset()
        slots = slots_of(program, graph, state, placed | _exchanged(program), self.facts)
        return Posed(program=program, weights=weights, graph=graph, slots=slots, classes=slot_classes(slots))

    def line(self, schedule: Schedule) -> Timeline:
        """When the program's ops and their conversions run."""
        key = schedule.overlaps, schedule.order
        if self._line is None or self._line[0] != key:
            self._line = key, timeline(self.program, schedule=schedule, facts=self.facts)
        return with_moves(self._line[1], schedule)

    @property
    def _names_axes(self) -> bool:
        """Whether some op is the user's ``shard_map``."""
        if self._has_layouts is None:
            self._has_layouts = any(op.layout is not None for _, _, op in self.program.walk())
        return self._has_layouts

    def mesh_class_of(self, mesh: DeviceMesh) -> Hashable:
        return mesh if self._names_axes else mesh_class(mesh, self.sizes)


def sizes_of(program: Program) -> frozenset[int]:
    """Every size above 1 that an axis may split: of tensors, loop and branch bodies included, and of the factors of rules."""
    owners = {id(program): program}
    found: set[int] = set()
    for _, owner, op in program.walk():
        owners.update((id(body), body) for body in (owner, *op.bodies))
        found.update(factor.size for factor in op.rule.factors)
    found.update(size for owner in owners.values() for value in owner.values for size in value.shape)
    return frozenset(found - {0, 1})


def _exchanged(program: Program) -> frozenset[tuple[str, int]]:
    """Stacks of what stages exchange in the microbatch loop: they stand for values that come and go one by one, so nothing
    can convert them before or after the loop."""
    received = {op.inputs[i] for op in program.ops for i in op.received}
    sent = {op.outputs[i] for op in program.ops for i in op.sent}
    return frozenset(("", value) for value in received | sent)
