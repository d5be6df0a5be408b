"""``al.analysis``: which neighbouring tensors of a program disagree in their layouts, and where to convert.

In: a program (``trace`` makes one of a JAX function) and the spec of each tensor. Out: verdicts, placed conversions, and the
table of supported patterns. The work is done in ``costs/sameness.py`` and ``costs/placement.py``, which know no JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from alpa_lite.core.mesh import DeviceMesh as DeviceMesh
from alpa_lite.core.program import Program as Program
from alpa_lite.core.spec import ShardingSpec as ShardingSpec
from alpa_lite.costs.layouts import TensorLayout as TensorLayout
from alpa_lite.costs.patterns import Patterns as Patterns
from alpa_lite.costs.patterns import patterns as patterns
from alpa_lite.costs.placement import PlacedConversion as PlacedConversion
from alpa_lite.costs.placement import PlacedConversions as PlacedConversions
from alpa_lite.costs.placement import place_conversions as place_conversions
from alpa_lite.costs.sameness import Judge as Judge
from alpa_lite.costs.sameness import needs_resharding as needs_resharding
from alpa_lite.costs.verdicts import Difference as Difference
from alpa_lite.costs.verdicts import Verdict as Verdict
from alpa_lite.costs.verdicts import Verdicts as Verdicts
from alpa_lite.costs.ways import follow as follow
from alpa_lite.errors import UnsupportedPattern as UnsupportedPattern


def trace(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
    """The program of ``fn(*args, **kwargs)``; touches no device.

    Args:
        fn: a function that ``jax.jit`` can trace.
        args, kwargs: arrays or ``jax.ShapeDtypeStruct`` pytrees.

    Returns:
        The program. Printed, it shows the number of every value and the path of every argument and result.

    Raises:
        TraceError: the function cannot be traced.
    """
    from alpa_lite.trace.program import trace as trace_program  # loads JAX

    return trace_program(fn, args, kwargs).program
