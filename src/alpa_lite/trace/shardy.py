"""Asks Shardy for the sharding rules of jaxpr equations.

All distinct equations are lowered in one module (singly they cost 6 ms each). One equation may lower to several StableHLO
ops; their rules are composed by joining the factors of equal dims (union-find over *atoms*, the pieces of dims).
What Shardy calls need-replication or permutation (halo exchange) becomes a factor that may not be split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from alpa_lite import _jax_compat as compat
from alpa_lite.core.rule import Factor, FactorKind, OpShardingRule

# Elementwise ops of the chlo dialect, which carry no Shardy rule before they are legalised.
_CHLO_ELEMENTWISE = "chlo."
_CHLO_OTHER = ("chlo.top_k", "chlo.ragged_dot")


@dataclass(slots=True)
class _Atoms:
    """Pieces of dims with union-find; a piece may be split into several smaller ones."""

    parent: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    kind: list[FactorKind] = field(default_factory=list)
    pieces: dict[int, list[int]] = field(default_factory=dict)

    def new(self, size: int, kind: FactorKind = FactorKind.PASS_THROUGH) -> int:
        self.parent.append(len(self.parent))
        self.size.append(size)
        self.kind.append(kind)
        return len(self.parent) - 1

    def find(self, atom: int) -> int:
        while self.parent[atom] != atom:
            self.parent[atom] = self.parent[self.parent[atom]]
            atom = self.parent[atom]
        return atom

    def expand(self, atoms: list[int]) -> list[int]:
        """Current representatives of a dim's atoms; splits followed, size-1 atoms dropped."""
        out: list[int] = []
        for atom in map(self.find, atoms):
            if atom in self.pieces:
                out += self.expand(self.pieces[atom])
            elif self.size[atom] != 1:
                out.append(atom)
        return out

    def join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[b] = a
            self.kind[a] = _stricter(self.kind[a], self.kind[b])

    def unify(self, left: list[int], right: list[int]) -> None:
        """Make two factorisations of one dim equal; what cannot be aligned may not be split."""
        left, right = self.expand(left), self.expand(right)
        while left and right:
            a, b = left[0], right[0]
            if a == b:
                left, right = left[1:], right[1:]
            elif self.size[a] == self.size[b]:
                self.join(a, b)
                left, right = self.expand(left[1:]), self.expand(right[1:])
            else:
                big, small = (a, b) if self.size[a] > self.size[b] else (b, a)
                if self.size[big] % self.size[small]:
                    break
                self.pieces[big] = [
                    self.new(self.size[small], self.kind[big]),
                    self.new(self.size[big] // self.size[small], self.kind[big]),
                ]
                left, right = self.expand(left), self.expand(right)
        for atom in left + right:
            self.kind[atom] = FactorKind.REPLICATED


def _stricter(a: FactorKind, b: FactorKind) -> FactorKind:
    order = (FactorKind.REPLICATED, FactorKind.REDUCTION, FactorKind.PASS_THROUGH)
    return min(a, b, key=order.index)


def compose_rules(module: Any, names: list[str]) -> list[OpShardingRule]:
    """One rule per named function of an annotated module, between its arguments and its results."""
    bodies = compat.function_bodies(module)
    return [_function_rule(bodies, bodies[name]) for name in names]


def called_functions(module: Any) -> list[str]:
    """Names of the functions that ``main`` calls, in order."""
    main = compat.function_bodies(module)["main"]
    return [compat.callee_of(op) for op in compat.iter_operations(main) if op.operation.name == "func.call"]


def _function_rule(bodies: dict[str, Any], block: Any) -> OpShardingRule:
    atoms = _Atoms()
    inputs = [[[atoms.new(size)] for size in compat.shape_of(a)] for a in block.arguments]
    results = _run(bodies, block, inputs, atoms)
    return _to_rule(inputs, results, atoms)


def _run(bodies: dict[str, Any], block: Any, inputs: list[Any], atoms: _Atoms) -> list[Any]:
    """Walk one function; returns the dims (lists of atoms) of its results."""
    env: dict[Any, list[list[int]]] = dict(zip(block.arguments, inputs, strict=True))
    for op in compat.iter_operations(block):
        name = op.operation.name
        operands = [env[o] for o in op.operands]
        if name == "func.return":
            return operands
        if name == "func.call":
            results = _run(bodies, bodies[compat.callee_of(op)], operands, atoms)
        else:
            results = [[[atoms.new(size)] for size in compat.shape_of(r)] for r in op.results]
            _apply(op, name, operands, results, atoms)
        env.update(zip(op.results, results, strict=True))
    return []


def _apply(op: Any, name: str, operands: list[Any], results: list[Any], atoms: _Atoms) -> None:
    """Join the atoms of one op's tensors as its rule says."""
    rule = compat.shardy_factors(op)
    if rule is not None:
        locals_ = [atoms.new(size) for size in rule["sizes"]]
        for tensors, mappings in ((operands, rule["operands"]), (results, rule["results"])):
            for dims, mapping in zip(tensors, mappings, strict=True):
                for dim, factor_indices in zip(dims, mapping, strict=True):
                    atoms.unify(dim, [locals_[i] for i in factor_indices])
        for i, atom in enumerate(locals_):
            blocked = i in rule["need_replication"] or i in rule["permutation"]
            reduced = FactorKind.REDUCTION if i in rule["reduction"] else FactorKind.PASS_THROUGH
            kind = FactorKind.REPLICATED if blocked else reduced
            for piece in atoms.expand([atom]):
                atoms.kind[piece] = _stricter(atoms.kind[piece], kind)
    elif name == "stablehlo.constant":
        return  # a splat is the same at every local shape; a non-splat constant becomes a captured constant instead
    elif (
        name.startswith(_CHLO_ELEMENTWISE)
        and name not in _CHLO_OTHER
        and len({len(t) for t in operands + results}) == 1
    ):
        for tensor in operands[1:] + results:
            for left, right in zip(operands[0], tensor, strict=True):
                atoms.unify(left, right)
    else:
        for tensor in operands + results:
            for dim in tensor:
                for piece in atoms.expand(dim):
                    atoms.kind[piece] = FactorKind.REPLICATED


def _to_rule(inputs: list[Any], results: list[Any], atoms: _Atoms) -> OpShardingRule:
    """Number the atoms that tensors use as factors, in order of appearance."""
    numbers: dict[int, int] = {}

    def dims_of(tensor: list[list[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(numbers.setdefault(a, len(numbers)) for a in atoms.expand(dim)) for dim in tensor)

    operands = tuple(dims_of(t) for t in inputs)
    outputs = tuple(dims_of(t) for t in results)
    factors = tuple(Factor(size=atoms.size[a], kind=atoms.kind[a]) for a in numbers)
    return OpShardingRule(operands=operands, results=outputs, factors=factors)


def check_composed(rule: OpShardingRule, shapes: list[tuple[int, ...]]) -> bool:
    """Whether every dim's factor sizes multiply to the dim."""
    for dims, shape in zip(rule.operands + rule.results, shapes, strict=True):
        for dim, size in zip(dims, shape, strict=True):
            if math.prod(rule.factors[i].size for i in dim) != size:
                return False
    return True
