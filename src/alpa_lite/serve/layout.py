"""One layout for all graphs of an engine, where the user gives none."""

from __future__ import annotations

from collections.abc import Mapping

from alpa_lite.api import plan as make_plan
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.executor.calibrate import local_cluster
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.plan.plan import Plan
from alpa_lite.planner.options import PlanOptions
from alpa_lite.serve.model_graphs import DECODE, Graph


def plan_graphs(graphs: Mapping[str, Graph], cluster: Cluster | None = None) -> dict[str, Plan]:
    """Plans of all graphs with parameters and cache where ``decode``, which runs most often, wants them.

    Args:
        cluster: None = the devices of this process.
    """
    cluster = cluster or local_cluster(False)
    fn, args = graphs[DECODE]
    first = make_plan(fn, *args, cluster=cluster, donate_argnums=1)
    pins = {leaf.path: partition_spec(leaf.spec) for leaf in first.inputs if leaf.path[0] in "01"}
    options = PlanOptions(mesh_shape=first.mesh.shape, axis_names=first.mesh.axis_names)
    made = {DECODE: first}
    for name, (fn, args) in graphs.items():
        if name != DECODE:
            made[name] = make_plan(fn, *args, cluster=cluster, donate_argnums=1, pins=pins, options=options)
    return made
