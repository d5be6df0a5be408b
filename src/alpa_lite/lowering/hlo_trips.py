"""Trip counts of loops in compiled HLO.

XLA writes ``known_trip_count`` on loops it understands. Where it did not, the common form is derived: a counter that
starts at a constant, grows by a constant, and is compared with a constant.
"""

from __future__ import annotations

import math
import re

from alpa_lite.lowering.hlo_text import Computation, HloModule, Instruction

_KNOWN = re.compile(r'"known_trip_count":\{"n":"?(\d+)"?')
_ROLE = {role: re.compile(rf"\b{role}=%([\w.\-]+)") for role in ("condition", "body")}
_CONSTANT = re.compile(r"^\((-?\d+)\)")
_PASSED = frozenset({"copy", "bitcast", "convert"})


def trip_count(module: HloModule, computation: Computation, loop: Instruction) -> int | None:
    """Iterations of a ``while`` instruction of ``computation``; None if they cannot be read from the text."""
    known = _KNOWN.search(loop.attributes)
    if known:
        return int(known.group(1))
    condition, body = (_called(module, loop, role) for role in ("condition", "body"))
    if condition is None or body is None:
        return None
    bound = _bound(module, condition)
    if bound is None:
        return None
    index, limit, inclusive = bound
    start = _start(computation, loop, index)
    step = _step(module, body, index)
    if start is None or not step:
        return None
    return max(0, math.ceil((limit + inclusive - start) / step))


def _called(module: HloModule, loop: Instruction, role: str) -> Computation | None:
    match = _ROLE[role].search(loop.attributes)
    return module.computations.get(match.group(1)) if match else None


def _bound(module: HloModule, condition: Computation) -> tuple[int, int, int] | None:
    """(tuple index of the counter, limit, 1 if the limit itself is reached) of ``counter < limit``."""
    root = _inlined(module, condition, condition.root)
    if root is None or root[0].opcode != "compare":
        return None
    compare, arguments = root
    direction = re.search(r"direction=(\w+)", compare.attributes)
    if direction is None or direction.group(1) not in ("LT", "LE") or len(arguments) != 2:
        return None
    counter, limit = _tuple_index(condition, arguments[0]), _constant(condition, arguments[1])
    if counter is None or limit is None:
        return None
    return counter, limit, int(direction.group(1) == "LE")


def _step(module: HloModule, body: Computation, index: int) -> int | None:
    """The constant that the body adds to element ``index`` of its carry."""
    root = body.root
    if root is None or root.opcode != "tuple" or index >= len(root.operands):
        return None
    inlined = _inlined(module, body, _behind(body, root.operands[index]))
    if inlined is None or inlined[0].opcode != "add" or len(inlined[1]) != 2:
        return None
    left, right = inlined[1]
    if _tuple_index(body, left) == index:
        return _constant(body, right)
    return _constant(body, left) if _tuple_index(body, right) == index else None


def _start(computation: Computation, loop: Instruction, index: int) -> int | None:
    initial = computation.get(loop.operands[0]) if loop.operands else None
    if initial is None or initial.opcode != "tuple" or index >= len(initial.operands):
        return None
    return _constant(computation, initial.operands[index])


def _inlined(
    module: HloModule, computation: Computation, instruction: Instruction | None
) -> tuple[Instruction, tuple[str, ...]] | None:
    """An instruction with operand names of ``computation``, seen through a fusion that wraps just it."""
    if instruction is None or instruction.opcode != "fusion":
        return (instruction, instruction.operands) if instruction else None
    inner = module.computations.get(instruction.called[0]) if instruction.called else None
    if inner is None or inner.root is None:
        return None
    names = []
    for operand in inner.root.operands:
        source = _behind(inner, operand)
        number = _CONSTANT.match(source.rest) if source and source.opcode == "parameter" else None
        if number is None or int(number.group(1)) >= len(instruction.operands):
            return None
        names.append(instruction.operands[int(number.group(1))])
    return inner.root, tuple(names)


def _behind(computation: Computation, name: str) -> Instruction | None:
    """What ``name`` is a copy of."""
    instruction = computation.get(name)
    while instruction is not None and instruction.opcode in _PASSED and instruction.operands:
        instruction = computation.get(instruction.operands[0])
    return instruction


def _constant(computation: Computation, name: str) -> int | None:
    source = _behind(computation, name)
    match = _CONSTANT.match(source.rest) if source is not None and source.opcode == "constant" else None
    return int(match.group(1)) if match else None


def _tuple_index(computation: Computation, name: str) -> int | None:
    source = _behind(computation, name)
    if source is None or source.opcode != "get-tuple-element":
        return None
    match = re.search(r"\bindex=(\d+)", source.attributes)
    return int(match.group(1)) if match else None
