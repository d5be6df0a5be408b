"""Program x mesh -> the decision graph: who decides what, and which tensors join the decisions.

Decisions (nodes):

- *op*: one of the op's strategies (``strategies.py``);
- *port*: the spec of an argument, a result, or an input or result of a loop or branch body;
- *copy*: for a value with several consumers, the spec in which it is handed to all of them. The conversion to it is paid
  once; a consumer that wants another spec pays from there. For arguments, which stay in memory as they are, the choice is
  the pair (spec as passed, spec handed on), so that the bytes of the second layout can be counted, and a consumer pays from
  the nearer of the two; so it is in small programs for other values with three and more readers, but that under a memory
  limit readers pay from the copy alone, as what was made is gone. Where a convention has partial sums reduced at once, copies
  exist for that alone: the pair (spec as made, spec after the reduction).

A value links its producer to its consumers; the price of a disagreement is the cheapest conversion. Inside loops
everything counts times the trip count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from alpa_lite.core.program import Op, Program
from alpa_lite.costs.conversion import Conversions
from alpa_lite.intraop.decision_graph import DecisionGraph, End, Link, Node
from alpa_lite.intraop.domains import DomainMaker
from alpa_lite.intraop.strategies import KnownStrategies, StrategySet, fixed_strategy

_EndKind = tuple[np.ndarray, tuple[int, int, int]]

CONTRACTIONS = frozenset({"dot_general", "conv_general_dilated"})
# Up to how many ops copies of intermediate values are (made, handed on) pairs, too. With them an LSTM of 357 ops took 60 s on
# three axes in place of 3, and an MLP's training step of 90 got a dearer plan with a wider gap.
_EXACT_OPS = 64
# Of a stack of which so many readers take rows, these are converted: all pairs made joint problems 1.15 times as long.
_MANY_ROWS, _TAKES_ROWS = 9, frozenset({"slice", "dynamic_slice"})


def build_graph(
    program: Program,
    conversions: Conversions,
    *,
    input_ties: Sequence[tuple[int, int]] = (),
    sharded_contractions: bool = False,
    per_reader: bool = False,
    known: KnownStrategies | None = None,
) -> DecisionGraph:
    """Build the graph, before pins and prices.

    Args:
        input_ties: (argument position, earlier argument position) pairs that share one decision (``pin_like``).
        sharded_contractions: matmuls and convolutions must use every mesh axis.
        per_reader: every consumer pays its own conversion, and partial sums are reduced once before they are read.
        known: strategies found on meshes with the same axes, and where those found here go.
    """
    known = KnownStrategies() if known is None else known
    exact = not _is_large(program)
    builder = _Builder(conversions, sharded_contractions, per_reader, exact, known)
    builder.outer(program, input_ties)
    return builder.graph


def hands_on(program: Program) -> bool:
    """Whether values inside are handed to three and more readers in one layout, though one of these may want them as made."""
    if not _is_large(program):
        return False
    regions = [program, *(body for _, _, op in program.walk() for body in op.bodies)]
    return any(_has_many_readers(region) for region in regions)


def _is_large(program: Program) -> bool:
    return sum(1 for _ in program.walk()) > _EXACT_OPS


def _has_many_readers(region: Program) -> bool:
    made = {v for op in region.ops for v in op.outputs if v >= 0 and region.values[v].shape}
    readers = Counter(v for op in region.ops for v in set(op.inputs))
    readers.update(region.outputs)
    return any(readers[v] > 2 for v in made)


class _Builder(DomainMaker):
    """Makes nodes."""

    def __init__(
        self,
        conversions: Conversions,
        sharded_contractions: bool,
        per_reader: bool,
        exact: bool,
        known: KnownStrategies,
    ) -> None:
        self.nodes: list[Node] = []
        self.links: list[Link] = []
        super().__init__(DecisionGraph(conversions=conversions, nodes=self.nodes, links=self.links), known)
        self.sharded_contractions = sharded_contractions
        self.per_reader = per_reader
        self.exact = exact  # whether copies of all values know what they were made as
        self.partial: dict[tuple[object, ...], bool] = {}
        self.partial_ports: set[int] = set()  # that may hold partial sums where an axis has more than one device
        self.known_ends: dict[int, tuple[list[_EndKind], list[_EndKind]]] = {}

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def port(self, name: str, shape: tuple[int, ...], weight: float, *, unreduced: bool, fixed: bool = False) -> int:
        """A node that chooses the spec of one tensor; ``fixed`` = replicated."""
        specs = self.port_domain(shape, unreduced, fixed)
        node = self.add(Node("port", name, len(specs), weight, specs=specs, rank=len(shape), shape=shape))
        if unreduced and not fixed:
            self.partial_ports.add(node)
        return node

    def port_end(self, node: int, path: str = "", stacked: bool = False) -> End:
        """The tensor of a port; ``stacked`` adds the unsplit leading dim of a scan's stacked tensor."""
        n = self.graph.nodes[node]
        assert n.specs is not None
        if not stacked:
            return End(node, n.specs, ("port", id(n.specs)), path)
        if id(n.specs) not in self.made.stacked:
            self.made.stacked[id(n.specs)] = n.rank, self.stack_map(n.rank)[n.specs]
        return End(node, self.made.stacked[id(n.specs)][1], ("stacked", id(n.specs)), path)

    def strategies(self, op: Op, unreduced: tuple[bool, ...]) -> StrategySet:
        if op.layout is not None:
            return fixed_strategy(op, self.conversions.mesh, self.conversions)
        strict = self.sharded_contractions and op.primitive in CONTRACTIONS
        quick = (id(op.rule), unreduced, strict)
        if quick not in self.made.sets:
            self.made.sets[quick] = op.rule, self.strategies_of(op.rule, unreduced, strict)
        return self.made.sets[quick][1]

    def ends(self, strategies: StrategySet) -> tuple[list[_EndKind], list[_EndKind]]:
        """Spec numbers of all operands and all results, and what identifies them."""
        found = self.known_ends.get(id(strategies))
        if found is None:
            number = id(strategies)
            found = self.known_ends[number] = (
                [(specs, (number, 0, position)) for position, specs in enumerate(strategies.operands)],
                [(specs, (number, 1, position)) for position, specs in enumerate(strategies.results)],
            )
        return found

    def may_leave_partial_sums(self, op: Op, unreduced: tuple[bool, ...]) -> bool:
        key = (id(op.rule), unreduced)
        if key not in self.partial:
            self.partial[key] = _can_be_unreduced(op, unreduced)
        return self.partial[key]

    def outer(self, program: Program, ties: Sequence[tuple[int, int]]) -> None:
        region = _Region(self, program, "", 1.0)
        tied = dict(ties)
        for position, value in enumerate(program.inputs):
            if position in tied:
                node = self.graph.inputs[tied[position]]
            else:
                node = self.port(f"in {position}", program.values[value].shape, 1.0, unreduced=False)
            self.graph.inputs.append(node)
            region.produce(value, self.port_end(node), False, "in")
        region.constants()
        region.ops()
        aliased = {o: i for i, o in program.aliases}
        for position, value in enumerate(program.outputs):
            if position in aliased:
                node = self.graph.inputs[aliased[position]]
            else:
                shape = program.values[value].shape if value >= 0 else ()
                node = self.port(f"out {position}", shape, 1.0, unreduced=False)
            self.graph.outputs.append(node)
            if value >= 0:
                region.consume(value, self.port_end(node, "out"))
        region.close()


class _Region:
    """Builds one program or body: values, their producers and consumers."""

    def __init__(self, builder: _Builder, program: Program, prefix: str, weight: float) -> None:
        self.b, self.program, self.prefix, self.weight = builder, program, prefix, weight
        self.links: dict[int, Link] = {}
        self.unreduced: dict[int, bool] = {}

    def produce(self, value: int, end: End, unreduced: bool, made_at: str) -> None:
        v = self.program.values[value]
        self.links[value] = Link(self.prefix, value, v.shape, v.itemsize, self.weight, end, made_at=made_at)
        self.unreduced[value] = unreduced

    def consume(self, value: int, end: End) -> None:
        self.links[value].consumers.append(end)

    def constants(self) -> None:
        for value in self.program.constants:
            node = self.b.port("constant", self.program.values[value].shape, self.weight, unreduced=False, fixed=True)
            self.produce(value, self.b.port_end(node), False, "in")

    def ops(self) -> None:
        for index, op in enumerate(self.program.ops):
            path = f"{self.prefix}{index}"
            if not op.bodies:
                self.op(op, path)
            elif op.primitive == "scan":
                self.scan(op, path)
            elif op.primitive == "while":
                self.while_(op, path)
            else:
                self.cond(op, path)

    def op(self, op: Op, path: str) -> None:
        unreduced = tuple(i >= 0 and self.unreduced[i] for i in op.inputs)
        strategies = self.b.strategies(op, unreduced)
        node = self.b.add(Node("op", path, len(strategies.used), self.weight, op, self.program, strategies))
        self.b.graph.op_nodes[path] = node
        reads, makes = self.b.ends(strategies)
        for value, (specs, key) in zip(op.inputs, reads, strict=True):
            if value >= 0:
                self.links[value].consumers.append(End(node, specs, key, path))
        can = self.b.may_leave_partial_sums(op, unreduced)
        for value, (specs, key) in zip(op.outputs, makes, strict=True):
            if value >= 0:
                self.produce(value, End(node, specs, key), can, path)

    def enter(
        self, op: Op, position: int, path: str, weight: float, *, stacked: bool = False, whole: bool = False
    ) -> int:
        """Port for operand ``position`` of a control-flow op, joined to the outer value.

        ``whole``: a carry that the body sets to a literal, which no device may count as its part of a sum.
        """
        value = op.inputs[position]
        shape = self.program.values[value].shape if value >= 0 else ()
        can = value >= 0 and self.unreduced[value] and op.primitive != "cond" and not whole
        node = self.b.port(f"{path} in {position}", shape[1:] if stacked else shape, weight, unreduced=can)
        if value >= 0:
            self.consume(value, self.b.port_end(node, path, stacked))
        return node

    def body(self, op: Op, number: int, path: str, weight: float, ports: list[int]) -> _Region:
        inner = _Region(self.b, op.bodies[number], f"{path}.{number}.", weight)
        for node, value in zip(ports, inner.program.inputs, strict=True):
            inner.produce(value, self.b.port_end(node), self.may_be_unreduced(node), "in")
        inner.constants()
        inner.ops()
        return inner

    def may_be_unreduced(self, node: int) -> bool:
        return node in self.b.partial_ports

    def end_body(self, inner: _Region, path: str, number: int, ports: list[int]) -> None:
        for value, node in zip(inner.program.outputs, ports, strict=True):
            if value >= 0:
                inner.consume(value, self.b.port_end(node, f"{path}.{number}.out"))
        inner.close()

    def scan(self, op: Op, path: str) -> None:
        weight = self.weight * op.trip_count
        first, last = op.num_consts, op.num_consts + op.num_carry
        literal = {first + i for i, o in enumerate(op.bodies[0].outputs[: op.num_carry]) if o < 0}
        ports = [self.enter(op, i, path, weight, stacked=i >= last, whole=i in literal) for i in range(len(op.inputs))]
        self.b.loop_reads.update(ports[:first])
        inner = self.body(op, 0, path, weight, ports)
        outs = list(ports[first:last])
        for position, value in enumerate(inner.program.outputs[op.num_carry :], op.num_carry):
            shape = inner.program.values[value].shape if value >= 0 else ()
            can = value >= 0 and inner.unreduced[value] and position not in op.sent
            outs.append(self.b.port(f"{path} out {position}", shape, weight, unreduced=can))
        self.end_body(inner, path, 0, outs)
        self.leave(op, path, ports, outs, op.num_carry)

    def while_(self, op: Op, path: str) -> None:
        # The number of iterations is unknown; a while loop counts as one (the report says so).
        carries = len(op.bodies[1].outputs)
        first = len(op.inputs) - carries
        literal = {first + i for i, o in enumerate(op.bodies[1].outputs) if o < 0}
        ports = [self.enter(op, i, path, self.weight, whole=i in literal) for i in range(len(op.inputs))]
        carry = ports[len(ports) - carries :]
        tests = len(op.bodies[0].inputs) - carries
        inner = self.body(op, 0, path, self.weight, ports[:tests] + carry)
        self.end_body(inner, path, 0, [self.b.port(f"{path} test", (), self.weight, unreduced=False, fixed=True)])
        inner = self.body(op, 1, path, self.weight, ports[tests : len(ports) - carries] + carry)
        self.end_body(inner, path, 1, carry)
        self.leave(op, path, ports, carry, carries)

    def cond(self, op: Op, path: str) -> None:
        # One branch is taken at a time; without knowledge each counts as equally likely.
        weight = self.weight / len(op.bodies)
        ports = [self.enter(op, i, path, weight) for i in range(len(op.inputs))]
        shapes = [self.result_shape(op, i) for i in range(len(op.outputs))]
        outs = [self.b.port(f"{path} out {i}", s, weight, unreduced=False) for i, s in enumerate(shapes)]
        for number in range(len(op.bodies)):
            inner = self.body(op, number, path, weight, ports[1:])
            self.end_body(inner, path, number, outs)
        self.leave(op, path, ports, outs, len(outs))

    def result_shape(self, op: Op, position: int) -> tuple[int, ...]:
        """Shape of a conditional's result, from the first branch that computes it."""
        for body in op.bodies:
            if body.outputs[position] >= 0:
                return body.values[body.outputs[position]].shape
        return ()

    def leave(self, op: Op, path: str, ports: list[int], outs: list[int], unstacked: int) -> None:
        """The results of a control-flow op lie as the ports ``outs`` say."""
        self.b.graph.body_ports[path] = (ports, outs)
        for position, node in enumerate(outs):
            value = op.outputs[position]
            if value >= 0:
                stacked = op.primitive == "scan" and position >= unstacked
                self.produce(value, self.b.port_end(node, "", stacked), self.may_be_unreduced(node), path)

    def close(self) -> None:
        """Add copy nodes where several consumers may share a conversion; hand the links to the graph."""
        for link in self.links.values():
            kind = self.copied(link)
            if kind:
                domain, name, rank = self.b.copy_domain(kind, link), f"{self.prefix}%{link.value}", len(link.shape)
                pairs, specs = (domain, None) if domain.ndim == 2 else (None, domain)
                if kind == "reduced":
                    specs = self.b.graph.handed(domain)
                node = Node(
                    "copy", name, len(domain), self.weight, specs=specs, rank=rank, pairs=pairs, shape=link.shape
                )
                link.copy = self.b.add(node)
            self.b.links.append(link)

    def copied(self, link: Link) -> str:
        """The kind of domain (``DomainMaker.copy_domain``) of a value's copy node; "" if it has none."""
        if self.b.per_reader:
            return "reduced" if link.consumers and self.unreduced[link.value] else ""
        readers = {c.node for c in link.consumers}
        if link.is_argument and (len(readers) > 1 or self.b.in_loops(link)):
            return "rows" if self.takes_rows(link) else "pairs"
        if link.is_argument or len(readers) < 2 or not link.shape:
            return ""
        # Of two readers, one that wants what was made leaves the other to be converted for: one spec says it all.
        return "pairs" if len(readers) > 2 and self.b.exact else "handed on"

    def takes_rows(self, link: Link) -> bool:
        """Whether it is a stack of which many readers take a part each."""
        ops = [self.b.nodes[c.node].op for c in link.consumers]
        return len(ops) >= _MANY_ROWS and all(op is not None and op.primitive in _TAKES_ROWS for op in ops)


def _can_be_unreduced(op: Op, inputs: tuple[bool, ...]) -> bool:
    reduces = op.rule.reduce_op == "add" and any(op.rule.factors[i].size > 1 for i in op.rule.reduction_factors)
    return reduces or any(all(inputs[i] for i in group) for group in op.rule.linear)
