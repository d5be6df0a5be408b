"""Which values of a program ever lie in memory: XLA fuses elementwise producers into their consumers.

A value is *fused* (no buffer, no bytes moved) when its producer is cheap to repeat and all its consumers can take it in.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

from alpa_lite.core.program import Program

# Producers that XLA repeats inside consumers rather than store, and consumers that take producers in.
_SOURCES = frozenset("iota broadcast_in_dim".split())
_SHAPE_ONLY = frozenset("reshape squeeze expand_dims transpose slice pad concatenate rev dynamic_slice".split())
_SINKS = frozenset("reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod argmax argmin".split())
_OPAQUE = frozenset("optimization_barrier pin".split())


@lru_cache(maxsize=256)
def fused_values(program: Program) -> tuple[bool, ...]:
    """Per value of this program (not of its bodies): whether it never lies in memory."""
    consumers: dict[int, list[bool]] = defaultdict(list)
    for op in program.ops:
        takes = (op.elementwise or op.primitive in _SHAPE_ONLY | _SINKS | _SOURCES) and op.primitive not in _OPAQUE
        for value in set(op.inputs):
            consumers[value].append(takes)
    fused = [False] * len(program.values)
    outputs = set(program.outputs)
    for op in program.ops:
        makes = (op.elementwise or op.primitive in _SOURCES | _SHAPE_ONLY) and op.primitive not in _OPAQUE
        for value in op.outputs:
            if value >= 0 and makes and value not in outputs:
                uses = consumers[value]
                # A result with several readers is stored unless repeating it costs nothing but its own inputs.
                cheap = op.primitive in _SOURCES or len(uses) == 1
                fused[value] = bool(uses) and all(uses) and cheap
    return tuple(fused)
