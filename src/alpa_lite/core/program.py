"""The Program: what the planner sees of a user's function. It mirrors a closed jaxpr but knows no JAX.

Ops are in execution order. Control flow (``scan``, ``while``, ``cond``) is an op with bodies, each a Program of its own.
Values are numbered per Program; an op is named by its path, e.g. ``"12"`` or ``"12.0.3"`` (op 3 of body 0 of op 12).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.rule import OpShardingRule
from alpa_lite.core.spec import ShardingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One tensor of the program (global shape)."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLayout:
    """The one layout of an op that the user wrote for a certain mesh (``jax.shard_map``)."""

    mesh: DeviceMesh
    operands: tuple[ShardingSpec, ...]
    results: tuple[ShardingSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation.

    Attributes:
        primitive: the JAX primitive's name, or "pin" for ``al.pin``.
        inputs: value ids; -1 for a literal.
        outputs: value ids; -1 for a dropped result.
        rule: how it may be split; operands and results are in the order of ``inputs`` and ``outputs``.
        key: equal keys mean equal computation on equal shapes (used to share work and to find repeated layers).
        flops: floating-point operations of the whole op (unsharded, one execution).
        source: the user's file and line.
        scope: the name stack (``jax.named_scope``), e.g. "transpose(jvp(layer0))".
        elementwise: each result element depends on the same element of the operands (fusable producer).
        bodies: for control flow.
        num_consts, num_carry, trip_count: layout of a ``scan``/``while`` op's inputs (consts, carries, xs) and iterations.
        pinned: for "pin" ops the pin's text; "" otherwise.
        sent: results of the microbatch loop that other stages read as soon as a microbatch has made them.
        received: operands of the microbatch loop that arrive from other stages, microbatch by microbatch.
        layout: of a user's ``shard_map``: its mesh and specs; None otherwise.
    """

    primitive: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    rule: OpShardingRule
    key: str
    flops: float = 0.0
    source: str = ""
    scope: str = ""
    elementwise: bool = False
    bodies: tuple[Program, ...] = ()
    num_consts: int = 0
    num_carry: int = 0
    trip_count: int = 1
    pinned: str = ""
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    layout: FixedLayout | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A traced function.

    Attributes:
        values: all tensors, by id.
        ops: in execution order.
        inputs, outputs: value ids (an output may be an input; -1 in outputs for a literal result).
        input_paths, output_paths: pytree paths, e.g. "0/params/kernel" and "out/0/params/kernel" ("" inside bodies).
        donated: per input, whether its buffer may be reused.
        aliases: (input position, output position) pairs that share a layout: donated or same-path state.
        constants: value ids that are captured constants (replicated, no input position).
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    input_paths: tuple[str, ...] = ()
    output_paths: tuple[str, ...] = ()
    donated: tuple[bool, ...] = ()
    aliases: tuple[tuple[int, int], ...] = ()
    constants: tuple[int, ...] = ()

    def walk(self, prefix: str = "") -> Iterator[tuple[str, Program, Op]]:
        """All ops with their paths, outer before inner, in order."""
        for index, op in enumerate(self.ops):
            path = f"{prefix}{index}"
            yield path, self, op
            for b, body in enumerate(op.bodies):
                yield from body.walk(f"{path}.{b}.")

    def __str__(self) -> str:
        return "\n".join(self._lines("", {})) + "\n"

    def _lines(self, indent: str, rules: dict[int, str]) -> Iterator[str]:
        """``rules`` holds the texts of the rules met so far, by identity: thousands of ops share a few hundred."""

        def name(i: int) -> str:
            return "_" if i < 0 else f"%{i}"

        for position, i in enumerate(self.inputs):
            path = f"  {self.input_paths[position]}" if self.input_paths else ""
            donated = "  donated" if self.donated and self.donated[position] else ""
            yield f"{indent}in  {name(i)}: {self.values[i]}{path}{donated}"
        for i in self.constants:
            yield f"{indent}const {name(i)}: {self.values[i]}"
        for op in self.ops:
            results = ", ".join(f"{name(o)}: {self.values[o]}" if o >= 0 else "_" for o in op.outputs)
            text = rules.get(id(op.rule)) or rules.setdefault(id(op.rule), str(op.rule))
            trips = f" x{op.trip_count}" if op.bodies and op.trip_count != 1 else ""
            yield f"{indent}{results} = {op.primitive}{trips}({', '.join(map(name, op.inputs))})  {text}"
            for b, body in enumerate(op.bodies):
                yield f"{indent}  body {b}:"
                yield from body._lines(indent + "    ", rules)
        for position, i in enumerate(self.outputs):
            path = f"  {self.output_paths[position]}" if self.output_paths else ""
            yield f"{indent}out {name(i)}{path}"


def check_program(program: Program) -> None:
    """Verifier: every value is defined once before use, ranks match rules, aliases have equal shapes.

    Raises:
        AssertionError: naming the op; a Program that fails is our mistake, not the user's.
    """
    defined = set(program.inputs) | set(program.constants)
    for index, op in enumerate(program.ops):
        where = f"op {index} ({op.primitive})"
        assert len(op.rule.operands) == len(op.inputs), f"{where}: rule has {len(op.rule.operands)} operands"
        assert len(op.rule.results) == len(op.outputs), f"{where}: rule has {len(op.rule.results)} results"
        for value, dims in zip(op.inputs, op.rule.operands, strict=True):
            assert value < 0 or value in defined, f"{where}: %{value} is used before it is defined"
            assert value < 0 or len(dims) == len(program.values[value].shape), f"{where}: rank of %{value}"
        for value, dims in zip(op.outputs, op.rule.results, strict=True):
            assert value < 0 or value not in defined, f"{where}: %{value} is defined twice"
            assert value < 0 or len(dims) == len(program.values[value].shape), f"{where}: rank of %{value}"
            defined.add(value)
        for body in op.bodies:
            check_program(body)
    for i in program.outputs:
        assert i < 0 or i in defined, f"result %{i} is never defined"
    for i, o in program.aliases:
        a, b = program.values[program.inputs[i]], program.values[program.outputs[o]]
        assert a.shape == b.shape, f"alias {i}->{o} joins {a} and {b}"
