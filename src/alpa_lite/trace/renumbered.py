"""Parts of a jaxpr: their values numbered anew, and what reads what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from alpa_lite._jax_compat import Literal
from alpa_lite.trace.flatten import FlatOp


class Renumbered:
    """Gives the values of a part of a jaxpr numbers of their own."""

    def __init__(self, avals: list[Any]) -> None:
        self.old, self.avals = avals, []
        self.number: dict[int, int] = {}

    def fresh(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def value(self, value: int) -> int:
        if value not in self.number:
            self.number[value] = self.fresh(self.old[value])
        return self.number[value]

    def read(self, value: Any) -> Any:
        return value if isinstance(value, Literal) else self.value(value)

    def op(self, op: FlatOp) -> FlatOp:
        params = op.params
        if op.name == "optimization_barrier" and "group" in params:
            params = {**params, "group": tuple(self.value(v) for v in params["group"])}
        inputs = [self.read(i) for i in op.inputs]
        return op.renumbered(params, inputs, [self.value(o) for o in op.all_outputs])


def readers_of(ops: Iterable[tuple[int, FlatOp]]) -> defaultdict[int, list[int]]:
    """Value -> the numbers of the ops that read it."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for i, op in ops:
        for value in values_of(op):
            found[value].append(i)
    return found


def values_of(op: FlatOp) -> list[int]:
    """What the op reads, literals aside."""
    return [i for i in op.inputs if not isinstance(i, Literal)]
