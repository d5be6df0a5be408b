"""Which leaves of a program are parameters, optimizer state and inputs, by what the program does with them."""

from __future__ import annotations

from alpa_lite.core.program import Program
from alpa_lite.plan.records import LeafRole


def roles_of(program: Program) -> tuple[LeafRole, ...]:
    """State = an argument leaf with an aliased or same-path result; parameters = state that the differentiated part reads."""
    state = {i for i, _ in program.aliases}
    reads_in_forward = _read_under_jvp(program)
    roles = []
    for position, value in enumerate(program.inputs):
        if position not in state:
            roles.append(LeafRole.INPUT)
        elif reads_in_forward is None or value in reads_in_forward:
            roles.append(LeafRole.PARAMETER)
        else:
            roles.append(LeafRole.OPTIMIZER_STATE)
    return tuple(roles)


def has_gradient(program: Program) -> bool:
    """Whether a part of it is differentiated."""
    return _read_under_jvp(program) is not None


def _read_under_jvp(program: Program) -> set[int] | None:
    """Values that the differentiated function reads, directly or through casts before it; None without any gradient.

    A loop over microbatches holds the function in its body.
    """
    wanted: set[int] = set()
    found = False
    for op in reversed(program.ops):
        if "jvp(" in op.scope:
            found = True
            if "transpose(" not in op.scope:
                wanted.update(i for i in op.inputs if i >= 0)
                continue
        for body in op.bodies:
            inner = _read_under_jvp(body)
            if inner is not None:
                found = True
                outer = op.inputs[len(op.inputs) - len(body.inputs) :]
                wanted.update(i for i, v in zip(outer, body.inputs, strict=True) if i >= 0 and v in inner)
        if not op.bodies and any(o in wanted for o in op.outputs):
            wanted.update(i for i in op.inputs if i >= 0)
    return wanted if found else None
