"""Going on with fewer hosts: which plan, at what price.

In: a step whose hosts are gone for good. Out: the same step under a plan for the hosts that are left. Of several such plans, it
is the one with the smallest time over a stated number of steps, moving the state included.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from alpa_lite.api.step import ParallelStep
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.errors import AlpaLiteError, ClusterError
from alpa_lite.executor.sites import sites_of
from alpa_lite.executor.state_bytes import state_bytes
from alpa_lite.numeric import real
from alpa_lite.plan.plan import Plan
from alpa_lite.planner.options import PlanOptions
from alpa_lite.units import format_bytes, format_time

_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """How a plan for fewer hosts is chosen.

    Attributes:
        horizon_steps: over which a plan must pay: moving the state is worth a faster step only if there are many of them.
        move_bytes_per_s: at which all workers together read the state.
    """

    horizon_steps: int = 1000
    move_bytes_per_s: float = 1e9

    def __post_init__(self) -> None:
        for name in ("horizon_steps", "move_bytes_per_s"):
            if not 0 < real(getattr(self, name)) < math.inf:
                raise AlpaLiteError(
                    f"al.Elastic got {name}={getattr(self, name)!r:.60}. It must be a positive number. Correct it, or leave it "
                    "out."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan for the hosts that are left: predicted seconds of a step, bytes to move, and seconds over the horizon."""

    plan: Plan
    options: PlanOptions
    moved_bytes: int
    total_s: float

    def __str__(self) -> str:
        stages = len(self.plan.stages)
        return (
            f"{stages} stage{'s' * (stages > 1)}: {format_time(self.plan.objective)} a step, {format_bytes(self.moved_bytes)} to "
            f"move, {format_time(self.total_s)} over the horizon"
        )


def candidates(
    step: ParallelStep, args: tuple[Any, ...], cluster: Cluster, old: Plan, elastic: Elastic
) -> list[Candidate]:
    """Plans for ``cluster``, the cheapest over the horizon first; equal ones in the order of fewer bytes, then fewer stages.

    Args:
        args: of the step, arrays or shapes.
        old: the plan until now.

    Raises:
        AlpaLiteError: the step cannot be planned for the cluster; what the last try said.
    """
    found: list[Candidate] = []
    refused: AlpaLiteError | None = None
    for options in _variants(step.options, cluster, len(old.stages)):
        try:
            plan = step.planned_for(args, cluster, options)
        except AlpaLiteError as error:
            refused = error
            continue
        process_of = {device: site.number for site in sites_of(plan) for device in site.devices}
        moved = state_bytes(plan, process_of)
        total = elastic.horizon_steps * plan.objective + moved / elastic.move_bytes_per_s
        found.append(Candidate(plan=plan, options=options, moved_bytes=moved, total_s=total))
    if not found:
        assert refused is not None
        raise refused
    return sorted(found, key=lambda c: (c.total_s, c.moved_bytes, len(c.plan.stages)))


def _variants(options: PlanOptions, cluster: Cluster, stages: int) -> Iterator[PlanOptions]:
    """The user's options, without what fixes the number of devices; every number of stages up to the one until now."""
    free = replace(options, mesh_shape=None, submeshes=None, stage_layers=None, stage_mesh_shapes=None)
    yield replace(free, num_stages=1)
    if options.num_microbatches == "auto" or options.num_microbatches < 2:
        return
    for count in range(2, max(stages, 2) + 1):
        if cluster.num_devices % count == 0:
            yield replace(free, num_stages=count)


def replanned(
    step: ParallelStep, args: tuple[Any, ...], elastic: Elastic, tell: Callable[[str], object]
) -> ParallelStep:
    """The step under the best plan for what is left of its Ray cluster; ``restart`` starts its workers.

    Raises:
        ClusterError: nothing is left.
    """
    from alpa_lite.executor.ray.cluster import ray_cluster

    old = step.plan(*args)
    before = Cluster.parse(old.identity.cluster)
    assert step.ray is not None
    end = time.monotonic() + step.ray.start_timeout_s
    while True:  # Ray takes a while to miss a node
        left = ray_cluster(step.ray.address, before.devices_per_host, before.device.name)
        if left.num_devices < before.num_devices or time.monotonic() > end:
            break
        time.sleep(_POLL_S)
    if left.num_devices >= before.num_devices:
        raise ClusterError(
            f"the workers of a plan for {before} could not be started again, though the Ray cluster has {left}. Others may use "
            "its devices. Wait for them, or give a plan for fewer."
        )
    found = candidates(step, args, left, old, elastic)
    tell(f"{before} has become {left}; plans over {elastic.horizon_steps} steps:")
    for number, one in enumerate(found):
        tell(f"  {'* ' if number == 0 else '  '}{one}")
    made = step.with_plan(found[0].plan, left, found[0].options)
    made.plan(*args)
    return made
