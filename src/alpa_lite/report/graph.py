"""A program as a graph of steps: a table before solving, and Graphviz dot before and after.

A step is a run of consecutive ops of one name scope (``jax.named_scope``, Flax modules), or without one of one line of the
user's code: a layer with its bias is one step, not three ops. Weights stand under the step that reads them first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from alpa_lite.core.program import Op, Program, Value
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.plan.plan import Plan

_COLUMN = re.compile(r"(:\d+):\d+")  # JAX's "file:line:column (function)"
_HEADINGS = ("name", "op", "target", "shape", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRow:
    """One line of the table.

    Attributes:
        name: of the step, argument or result; weights are indented under their step.
        op: "argument", "step", "weight" or "output".
        target: of a step its primitives, in order of first use.
        shape, dtype: of the tensor it stands for; of a step its last result that is read outside.
    """

    name: str
    op: str
    target: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphEdge:
    """A tensor that one row hands to another.

    Attributes:
        source, target: row numbers.
        tensor: its type.
        made, read: its layouts under the plan; None without one.
    """

    source: int
    target: int
    tensor: str
    made: ShardingSpec | None = None
    read: ShardingSpec | None = None

    @property
    def label(self) -> str:
        """The type before planning, then the layout, or "made -> read" where it is converted."""
        if self.made is None or self.read is None:
            return self.tensor
        return str(self.read) if self.made == self.read else f"{self.made} -> {self.read}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Rows and the tensors between them; ``str`` is the table, ``dot()`` the picture."""

    rows: tuple[GraphRow, ...]
    edges: tuple[GraphEdge, ...]

    def __str__(self) -> str:
        cells = [_HEADINGS]
        for row in self.rows:
            indent = "  " if row.op == "weight" else ""
            cells.append((indent + row.name, row.op, row.target, str(list(row.shape)), row.dtype))
        widths = [max(len(line[i]) for line in cells) for i in range(len(_HEADINGS))]
        lines = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)
        return "\n".join(lines) + "\n"

    def dot(self) -> str:
        """Graphviz text; ``dot -Tsvg`` draws it."""
        return "\n".join(self._dot_lines()) + "\n"

    def _dot_lines(self) -> Iterator[str]:
        shapes = {"step": "box", "weight": "plain"}
        yield "digraph program {"
        yield "  rankdir=TB;"
        for number, row in enumerate(self.rows):
            label = f"{row.name}\n{row.dtype}{list(row.shape)}"
            yield f"  n{number} [label={_quoted(label)}, shape={shapes.get(row.op, 'ellipse')}];"
        for edge in self.edges:
            converted = ", color=red" if edge.made != edge.read else ""
            yield f"  n{edge.source} -> n{edge.target} [label={_quoted(edge.label)}{converted}];"
        yield "}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def graph_of(program: Program, weights: frozenset[int], plan: Plan | None = None) -> Graph:
    """The graph of a program; control flow is one step.

    Args:
        program: what is shown.
        weights: positions of the arguments that are weights.
        plan: with it, edges carry layouts.
    """
    return _Builder(program, weights, plan).graph()


class _Builder:
    def __init__(self, program: Program, weights: frozenset[int], plan: Plan | None) -> None:
        self.program, self.weights, self.plan = program, weights, plan
        self.rows: list[GraphRow] = []
        self.edges: dict[tuple[int, int, int, str], GraphEdge] = {}
        self.row_of: dict[int, int] = {}  # value -> row that makes it
        self.made: dict[int, ShardingSpec] = {}
        self.decided = {d.path: d for stage in plan.stages for d in stage.decisions} if plan else {}

    def graph(self) -> Graph:
        for position, value in enumerate(self.program.inputs):
            if self.plan is not None:
                self.made[value] = self.plan.inputs[position].spec
            if position not in self.weights:
                self.argument(position, "argument")
        for name, members in _steps(self.program.ops):
            self.step(name, members)
        for position, value in enumerate(self.program.outputs):
            if value >= 0:
                path = self.program.output_paths[position]
                number = self.add(path, "output", "", self.program.values[value])
                self.edge(value, number, self.plan.outputs[position].spec if self.plan is not None else None)
        return Graph(rows=tuple(self.rows), edges=tuple(self.edges.values()))

    def add(self, name: str, op: str, target: str, value: Value) -> int:
        self.rows.append(GraphRow(name=name, op=op, target=target, shape=value.shape, dtype=value.dtype))
        return len(self.rows) - 1

    def argument(self, position: int, op: str) -> None:
        value = self.program.inputs[position]
        self.row_of[value] = self.add(self.program.input_paths[position], op, "", self.program.values[value])

    def step(self, name: str, members: list[int]) -> None:
        ops = [self.program.ops[i] for i in members]
        read_later = {v for op in self.program.ops[members[-1] + 1 :] for v in op.inputs} | set(self.program.outputs)
        results = [v for op in ops for v in op.outputs if v >= 0]
        shown = [v for v in results if v in read_later] or results
        target = " ".join(dict.fromkeys(op.primitive for op in ops))
        value = self.program.values[shown[-1]] if shown else Value(shape=(), dtype="", itemsize=0)
        number = self.add(name, "step", target, value)
        positions = {v: i for i, v in enumerate(self.program.inputs)}
        for value_read in dict.fromkeys(v for op in ops for v in op.inputs):
            if positions.get(value_read, -1) in self.weights and value_read not in self.row_of:
                self.argument(positions[value_read], "weight")
        own = set(results)
        for index, op in zip(members, ops, strict=True):
            decision = self.decided.get(str(index))
            for place, v in enumerate(op.inputs):
                if v >= 0 and v not in own:
                    self.edge(v, number, decision.operands[place] if decision else None)
            for place, v in enumerate(op.outputs):
                if v >= 0:
                    self.row_of[v] = number
                    if decision is not None:
                        self.made[v] = decision.results[place]

    def edge(self, value: int, target: int, read: ShardingSpec | None) -> None:
        if value in self.row_of:  # constants have no row
            key = (self.row_of[value], target, value, str(read))
            self.edges[key] = GraphEdge(
                source=key[0],
                target=target,
                tensor=str(self.program.values[value]),
                made=self.made.get(value),
                read=read,
            )


def _steps(ops: tuple[Op, ...]) -> Iterator[tuple[str, list[int]]]:
    """(name, indices) of every run of ops that belong together."""
    members: list[int] = []
    for index, op in enumerate(ops):
        if members and _place(op) != _place(ops[members[-1]]):
            yield _step_name(ops[members[0]]), members
            members = []
        members.append(index)
    if members:
        yield _step_name(ops[members[0]]), members


def _place(op: Op) -> tuple[str, str]:
    return (op.scope, "") if op.scope else ("", _COLUMN.sub(r"\1", op.source))


def _step_name(op: Op) -> str:
    return op.scope or op.primitive
