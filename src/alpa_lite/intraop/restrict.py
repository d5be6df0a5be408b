"""What a convention's ``SearchRules`` take away: a Program with narrower rules, and which arguments are weights.

The narrowed Program is the same one with the same ops and values, so a choice found on it holds on the original.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from alpa_lite.core.program import Op, Program
from alpa_lite.core.rule import FactorKind, OpShardingRule
from alpa_lite.costs.model import SearchRules
from alpa_lite.intraop.decisions import CONTRACTIONS
from alpa_lite.plan.records import LeafRole

_LAYOUT_ONLY = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "reshape", "squeeze", "transpose"}
)


def restricted(program: Program, rules: SearchRules) -> Program:
    """The program with the op sharding rules that ``rules`` leave."""
    if not (rules.matrix_dims or rules.reduced_at_once or rules.whole_reductions):
        return program
    made: dict[tuple[int, str], OpShardingRule] = {}

    def visit(owner: Program) -> Program:
        return replace(owner, ops=tuple(op_with(op) for op in owner.ops))

    def op_with(op: Op) -> Op:
        key = (id(op.rule), op.primitive)
        if key not in made:
            made[key] = _narrowed(op, rules)
        return replace(op, rule=made[key], bodies=tuple(map(visit, op.bodies)))

    return visit(program)


def _narrowed(op: Op, rules: SearchRules) -> OpShardingRule:
    rule = op.rule
    fixed: set[int] = set()
    if rules.whole_reductions and op.primitive not in CONTRACTIONS:
        fixed |= set(rule.reduction_factors)
    if rules.matrix_dims and op.primitive == "dot_general":
        fixed |= _batch_factors(rule)
    factors = tuple(replace(f, kind=FactorKind.REPLICATED) if i in fixed else f for i, f in enumerate(rule.factors))
    return replace(rule, factors=factors, linear=() if rules.reduced_at_once else rule.linear)


def _batch_factors(rule: OpShardingRule) -> set[int]:
    """Factors of a matmul that are not its row, column or contraction dim.

    That is: what both operands and the result share, every free dim but an operand's last one, and the part of a
    contraction that is the leading dim of a stack of matrices (the batch, in the gradient of a weight).
    """
    left, right = ([f for dim in tensor for f in dim] for tensor in rule.operands)
    result = {f for dim in rule.results[0] for f in dim}
    found = set(left) & set(right) & result
    for own, other in ((left, right), (right, left)):
        free = [f for f in own if f in result and f not in other]
        found |= set(free[:-1])
    for tensor in rule.operands:
        if len(tensor) > 2:
            found |= {f for f in tensor[0] if f not in result}
    return found


def weight_positions(program: Program, roles: Sequence[LeafRole]) -> frozenset[int]:
    """Positions of the arguments that are weights.

    The state of a step that differentiates. Otherwise what a contraction reads on its right or a gather as its table, vectors
    of floats, and all other leaves of an argument that holds such weights and nothing that a contraction reads on its left.
    """
    state = {i for i, role in enumerate(roles) if role in (LeafRole.PARAMETER, LeafRole.OPTIMIZER_STATE)}
    if state and any("jvp(" in op.scope for _, _, op in program.walk()):
        return frozenset(state)
    left, right = _contracted(program)
    weights = right - left
    vectors = {
        i
        for i, v in enumerate(program.inputs)
        if len(program.values[v].shape) == 1 and "float" in program.values[v].dtype
    }
    arguments: dict[str, list[int]] = defaultdict(list)
    for i, path in enumerate(program.input_paths):
        arguments[path.partition("/")[0]].append(i)
    siblings = {
        i for members in arguments.values() if weights & set(members) and not left & set(members) for i in members
    }
    return frozenset(weights | (vectors - left) | siblings)


def values_of(program: Program, positions: frozenset[int]) -> frozenset[tuple[str, int]]:
    """The arguments at these positions as (region, value), also where a scan hands them or their slices to its body."""
    found: set[tuple[str, int]] = set()

    def visit(owner: Program, region: str, values: set[int]) -> None:
        found.update((region, v) for v in values)
        for index, op in enumerate(owner.ops):
            if op.primitive == "scan" and values & set(op.inputs):
                carried = range(op.num_consts, op.num_consts + op.num_carry)
                handed = {op.bodies[0].inputs[i] for i, v in enumerate(op.inputs) if v in values and i not in carried}
                visit(op.bodies[0], f"{region}{index}.0.", handed)

    visit(program, "", {program.inputs[i] for i in positions})
    return frozenset(found)


def _contracted(program: Program) -> tuple[set[int], set[int]]:
    """Positions of arguments that reach a contraction's left side, and its right side or a gather's table."""
    origin = {v: i for i, v in enumerate(program.inputs)}
    left: set[int] = set()
    right: set[int] = set()
    for op in program.ops:
        came = [origin.get(v, -1) for v in op.inputs]
        if op.primitive in CONTRACTIONS:
            left.add(came[0])
            right.add(came[1])
        elif op.primitive == "gather":
            right.add(came[0])
        elif op.primitive in _LAYOUT_ONLY and came[0] >= 0:
            origin[op.outputs[0]] = came[0]
        elif op.primitive == "scan":
            inner_left, inner_right = _contracted(op.bodies[0])
            left |= {came[i] for i in inner_left if i < len(came)}
            right |= {came[i] for i in inner_right if i < len(came)}
    return left - {-1}, right - {-1}
