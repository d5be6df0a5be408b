"""Conversions as data: which tensor changes its sharding spec, where and by which steps; lowering runs what the plan holds."""

from __future__ import annotations

from dataclasses import dataclass

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.spec import ShardingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a conversion.

    Attributes:
        kind: the collective; None for a slice, which moves nothing between devices.
        axes: the axes it runs over, in the order in which they stand in the dim.
        source_dim, target_dim: the dims that lose or gain the axes (-1 where it does not apply).
        before, after: the specs around it.
    """

    kind: CollectiveKind | None
    axes: tuple[str, ...]
    source_dim: int = -1
    target_dim: int = -1
    before: ShardingSpec
    after: ShardingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """One conversion of the plan.

    Attributes:
        op: path of the op before which it runs (``Program.walk``); "out" or "12.0.out" for results of a program or body.
        value: id of the tensor in the program that holds the op.
        steps: at least one; the first ``before`` is a layout that the tensor already has.
        collectives: per step the index in ``StagePlan.collectives``, -1 for a slice.
        made_by: path of the op that makes the tensor; "in" for an argument, a constant or an input of a body.
        cost: what it adds to the plan's objective, over all executions and readers.
        readers: how many readers pay for it; 1 unless the cost convention charges each reader.
    """

    op: str
    value: int
    steps: tuple[Step, ...]
    collectives: tuple[int, ...]
    made_by: str = ""
    cost: float = 0.0
    readers: int = 1

    @property
    def source(self) -> ShardingSpec:
        return self.steps[0].before

    @property
    def target(self) -> ShardingSpec:
        return self.steps[-1].after
