"""What it takes to bring a state to the processes of a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping

from alpa_lite.executor.host_tiles import Tiling
from alpa_lite.executor.save_restore import state_leaves
from alpa_lite.plan.answers import KEY_TYPES
from alpa_lite.plan.plan import Plan

_WORD_BYTES = 4  # of keys


def state_bytes(plan: Plan, process_of: Mapping[int, int], argnum: int = 0) -> int:
    """Bytes of an argument that processes hold under a plan, each distinct tile once per process: what they read to restore it.

    Args:
        process_of: device -> process.
    """
    total = 0
    for leaf in state_leaves(plan, argnum):
        value, stage = leaf.value, plan.stages[leaf.stage]
        devices = tuple(range(stage.first_device, stage.first_device + stage.mesh.num_devices))
        tiling = Tiling(value.shape, value.dtype, leaf.spec, stage.mesh, devices, process_of)
        itemsize = _WORD_BYTES if value.dtype in KEY_TYPES else value.itemsize
        total += (
            sum(math.prod(hi - lo for lo, hi in box) for boxes in tiling.boxes.values() for box in boxes) * itemsize
        )
    return total
