"""One layout for all graphs of an engine, where the user gives none."""

from __future__ import annotations

from collections.abc import Mapping

from alpa_lite.api.shared import plan_shared
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.executor.calibrate import local_cluster
from alpa_lite.plan.plan import Plan
from alpa_lite.serve.model_graphs import DECODE, Graph

# So many steps of all slots for each prompt; who knows better plans with weights of their own.
_TOKENS_PER_PROMPT = 64.0


def plan_graphs(graphs: Mapping[str, Graph], cluster: Cluster | None = None) -> dict[str, Plan]:
    """Plans of all graphs with one layout of parameters and cache, the best for a prompt now and then between many tokens.

    Args:
        cluster: None = the devices of this process.
    """
    prompts = {name: 1.0 / (len(graphs) - 1) for name in graphs if name != DECODE}
    weights = prompts | {DECODE: _TOKENS_PER_PROMPT}
    layout = plan_shared(
        graphs, shared=("0", "1"), cluster=cluster or local_cluster(False), weights=weights, donate_argnums=1
    )
    return dict(layout.plans)
