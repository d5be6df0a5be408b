"""What a function does with its arguments before any matmul: a cache whose slots are put in another order, a table looked up.

Such ops belong to the layers that read what they make. Done for all layers at the beginning, the first stage would be sent the
caches of all, and send them back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

from alpa_lite._jax_compat import Jaxpr, JaxprEqn, Literal, scan_layout
from alpa_lite.trace.jaxprs import is_heavy, variables
from alpa_lite.trace.row_access import shape_of
from alpa_lite.trace.row_ops import is_slice_of_rows, rows_of_operands


def openings(jaxpr: Jaxpr, batch: Collection[int]) -> set[int]:
    """Numbers of the equations that light ops alone lead to, and that read what is in ``batch`` (positions of inputs) as well as
    what is not."""
    of_batch = {v: i in batch for i, v in enumerate(jaxpr.invars)} | dict.fromkeys(jaxpr.constvars, False)
    kinds: dict[Any, set[bool]] = {v: {own} for v, own in of_batch.items()}
    found = set()
    for i, eqn in enumerate(jaxpr.eqns):
        given = variables(eqn.invars)
        if is_heavy(eqn) or eqn.effects or not all(v in kinds for v in given):
            continue
        made = set().union(*(kinds[v] for v in given))
        kinds.update(dict.fromkeys(eqn.outvars, made))
        if len(made) == 2:
            found.add(i)
    return found


def row_openings(jaxpr: Jaxpr, over_layers: Callable[[JaxprEqn], bool]) -> set[int]:
    """Numbers of the equations that work row by row on stacked arguments, for what reads rows alone: layers, and results."""
    readers: defaultdict[Any, list[int]] = defaultdict(list)
    for i, eqn in enumerate(jaxpr.eqns):
        for v in variables(eqn.invars):
            readers[v].append(i)
    stacks = {v for v in jaxpr.invars if len(shape_of(v)) > 1}
    ahead: dict[int, list[Any]] = {}  # equation -> its operands that have the result's rows
    for i, eqn in enumerate(jaxpr.eqns):
        own = [eqn.invars[k] for k in _split(eqn)]
        if any(v in stacks for v in variables(own)) and len(eqn.outvars) == 1:
            ahead[i] = own
            stacks.add(eqn.outvars[0])
    found: set[int] = set()
    for i in reversed(ahead):
        made = jaxpr.eqns[i].outvars[0]
        if all(_reads_rows(jaxpr.eqns[r], made, r in found, ahead.get(r, ()), over_layers) for r in readers[made]):
            found.add(i)
    return {i for i in found if readers[jaxpr.eqns[i].outvars[0]]}


def _split(eqn: JaxprEqn) -> list[int]:
    shapes = [() if isinstance(v, Literal) else getattr(v.aval, "shape", ()) for v in eqn.invars]
    result = getattr(eqn.outvars[0].aval, "shape", ()) if eqn.outvars else ()
    return rows_of_operands(eqn.primitive.name, eqn.params, shapes, result)


def _reads_rows(
    eqn: JaxprEqn, stack: Any, opening: bool, rows: Collection[Any], over_layers: Callable[[JaxprEqn], bool]
) -> bool:
    """Whether an equation reads a stack by rows."""
    if over_layers(eqn):
        count = sum(scan_layout(eqn.params))
        return not any(v is stack for v in eqn.invars[:count])
    if opening:
        return sum(v is stack for v in eqn.invars) == sum(v is stack for v in rows)
    return is_slice_of_rows(eqn.primitive.name, eqn.params, shape_of(stack))
