"""Program x mesh -> the decision graph: who decides what, and which tensors join the decisions.

Decisions (nodes):

- *op*: one of the op's strategies (``strategies.py``);
- *port*: the spec of an argument, a result, or an input or result of a loop or branch body;
- *copy*: for a value with several consumers, the spec in which it is handed to all of them. The conversion to it is paid
  once; a consumer that wants another spec pays from there. For arguments, which stay in memory as they are, the choice is
  the pair (spec as passed, spec handed on), so that the bytes of the second layout can be counted. Where a convention has
  partial sums reduced at once, copies exist for that alone: the pair (spec as made, spec after the reduction).

A value links its producer to its consumers; the price of a disagreement is the cheapest conversion. Inside loops
everything counts times the trip count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from alpa_lite.core.program import Op, Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conversion import Conversions
from alpa_lite.intraop.decision_graph import DecisionGraph, End, Link, Node
from alpa_lite.intraop.strategies import KnownStrategies, StrategySet, fixed_strategy

_EndKind = tuple[np.ndarray, tuple[int, int, int]]

CONTRACTIONS = frozenset({"dot_general", "conv_general_dilated"})


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
    builder = _Builder(conversions, sharded_contractions, per_reader, KnownStrategies() if known is None else known)
    builder.outer(program, input_ties)
    return builder.graph


class _Builder:
    """Makes nodes; equal strategy sets, port domains and copy domains are made once."""

    def __init__(
        self, conversions: Conversions, sharded_contractions: bool, per_reader: bool, known: KnownStrategies
    ) -> None:
        self.graph = DecisionGraph(conversions=conversions)
        self.conversions = conversions
        self.sharded_contractions = sharded_contractions
        self.per_reader = per_reader
        self.known = known
        self.by_rule: dict[tuple[object, ...], StrategySet] = {}
        self.partial: dict[tuple[object, ...], bool] = {}
        self.known_ends: dict[int, tuple[list[_EndKind], list[_EndKind]]] = {}
        self.port_specs: dict[tuple[object, ...], np.ndarray] = {}
        self.copy_domains: dict[tuple[object, ...], np.ndarray] = {}
        self.loop_reads = self.graph.loop_reads
        self.stack_maps: dict[int, np.ndarray] = {}
        self.stacked: dict[int, np.ndarray] = {}

    def add(self, node: Node) -> int:
        self.graph.nodes.append(node)
        return len(self.graph.nodes) - 1

    def port(self, name: str, shape: tuple[int, ...], weight: float, *, unreduced: bool, fixed: bool = False) -> int:
        """A node that chooses the spec of one tensor; ``fixed`` = replicated."""
        key = (shape, unreduced, fixed)
        if key not in self.port_specs:
            space = self.conversions.space(len(shape))
            valid = space.valid(shape)
            keep = [i for i, s in enumerate(space.specs) if valid[i] and (unreduced or not s.unreduced)]
            keep.sort(key=lambda i: (not space.specs[i].is_replicated, i))
            self.port_specs[key] = np.array(keep[:1] if fixed else keep, dtype=np.int64)
        specs = self.port_specs[key]
        return self.add(Node("port", name, len(specs), weight, specs=specs, rank=len(shape), shape=shape))

    def port_end(self, node: int, path: str = "", stacked: bool = False) -> End:
        """The tensor of a port; ``stacked`` adds the unsplit leading dim of a scan's stacked tensor."""
        n = self.graph.nodes[node]
        assert n.specs is not None
        if not stacked:
            return End(node, n.specs, ("port", id(n.specs)), path)
        if id(n.specs) not in self.stacked:
            self.stacked[id(n.specs)] = self.stack_map(n.rank)[n.specs]
        return End(node, self.stacked[id(n.specs)], ("stacked", id(n.specs)), path)

    def stack_map(self, rank: int) -> np.ndarray:
        """Spec number of a slice -> spec number of the stacked tensor."""
        if rank not in self.stack_maps:
            inner, outer = self.conversions.space(rank), self.conversions.space(rank + 1)
            self.stack_maps[rank] = np.array(
                [outer.index[ShardingSpec(((), *s.dims), s.unreduced)] for s in inner.specs], dtype=np.int64
            )
        return self.stack_maps[rank]

    def strategies(self, op: Op, unreduced: tuple[bool, ...]) -> StrategySet:
        if op.layout is not None:
            return fixed_strategy(op, self.conversions.mesh, self.conversions)
        strict = self.sharded_contractions and op.primitive in CONTRACTIONS
        quick = (id(op.rule), unreduced, strict)
        if quick not in self.by_rule:
            self.by_rule[quick] = self.known.of(
                op.rule,
                self.conversions.mesh,
                self.conversions,
                unreduced_inputs=unreduced,
                sharded_contractions=strict,
            )
        return self.by_rule[quick]

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
        n = self.b.graph.nodes[node]
        assert n.specs is not None
        space = self.b.conversions.space(n.rank)
        return any(space.specs[i].unreduced for i in n.specs)

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
            if self.b.per_reader:
                if link.consumers and self.unreduced[link.value]:
                    self.reduce_once(link)
            elif (len(link.consumers) > 1 and len({c.node for c in link.consumers}) > 1) or (
                link.made_at == "in" and not self.prefix and self.in_loops(link)
            ):
                name, rank = f"{self.prefix}%{link.value}", len(link.shape)
                if link.made_at == "in" and not self.prefix:
                    pairs = self.argument_pairs(link)
                    if len(pairs):
                        node = Node("copy", name, len(pairs), self.weight, rank=rank, pairs=pairs, shape=link.shape)
                        link.copy = self.b.add(node)
                elif rank:
                    specs = self.handed_on(link)
                    node = Node("copy", name, len(specs), self.weight, rank=rank, specs=specs, shape=link.shape)
                    link.copy = self.b.add(node)
            self.b.graph.links.append(link)

    def handed_on(self, link: Link) -> np.ndarray:
        """Specs in which a value may be handed to its consumers: as it is made, or as several of them want it."""
        key = (link.producer.key, link.shape, tuple(dict.fromkeys(c.key for c in link.consumers)))
        cache = self.b.copy_domains
        if key not in cache:
            made = {*link.producer.specs.tolist(), *self.wanted(link)}
            cache[key] = np.array(sorted(made), dtype=np.int64)
        return cache[key]

    def reduce_once(self, link: Link) -> None:
        """A copy node that reduces partial sums, for all consumers together."""
        key = ("reduced", link.producer.key, link.shape)
        cache, rank = self.b.copy_domains, len(link.shape)
        if key not in cache:
            space = self.b.conversions.space(rank)
            valid = space.valid(link.shape)
            rows = []
            for made in sorted(set(link.producer.specs.tolist())):
                before = space.specs[made]
                after = [i for i, s in enumerate(space.specs) if valid[i] and _reduces_to(before, s)]
                rows += [(made, i) for i in after] if before.unreduced else [(made, made)]
            pairs = np.array(rows, dtype=np.int64).reshape(-1, 2)
            cache[key], cache[(*key, "after")] = pairs, pairs[:, 1].copy()
        pairs, name = cache[key], f"{self.prefix}%{link.value}"
        node = Node("copy", name, len(pairs), self.weight, rank=rank, pairs=pairs, shape=link.shape)
        node.specs = cache[(*key, "after")]
        link.copy = self.b.add(node)

    def wanted(self, link: Link) -> list[int]:
        """Specs that at least two consumers can read."""
        valid = self.b.conversions.space(len(link.shape)).valid(link.shape)
        count: dict[int, int] = defaultdict(int)
        for consumer in link.consumers:
            for spec in set(consumer.specs.tolist()):
                count[spec] += 1
        return [s for s in sorted(count) if count[s] > 1 and valid[s]]

    def in_loops(self, link: Link) -> list[End]:
        """Consumers that read the value in every iteration: a second layout of it is kept while the loop runs."""
        return [c for c in link.consumers if c.node in self.b.loop_reads] if self.b.loop_reads else []

    def argument_pairs(self, link: Link) -> np.ndarray:
        """(passed, handed on) spec numbers; empty if no conversion can be shared or is kept for a loop."""
        key = ("pairs", link.producer.key, link.shape, tuple(dict.fromkeys(c.key for c in link.consumers)))
        cache = self.b.copy_domains
        if key not in cache:
            space = self.b.conversions.space(len(link.shape))
            looped = self.in_loops(link)
            valid = self.b.conversions.space(len(link.shape)).valid(link.shape)
            shared = sorted({*self.wanted(link), *(s for c in looped for s in c.specs.tolist() if valid[s])})
            rows = []
            for made in sorted(set(link.producer.specs.tolist())):
                rows.append((made, made))
                rows += [(made, k) for k in shared if k != made and gathers_to(space.specs[made], space.specs[k])]
            only_base = all(a == b for a, b in rows)
            cache[key] = np.array([] if only_base else rows, dtype=np.int64).reshape(-1, 2)
        return cache[key]


def _can_be_unreduced(op: Op, inputs: tuple[bool, ...]) -> bool:
    reduces = op.rule.reduce_op == "add" and any(op.rule.factors[i].size > 1 for i in op.rule.reduction_factors)
    return reduces or any(all(inputs[i] for i in group) for group in op.rule.linear)


def _reduces_to(made: ShardingSpec, spec: ShardingSpec) -> bool:
    """Whether reducing alone leads from ``made`` to ``spec``: no axis is left partial, none that split a dim is moved."""
    added = [s[len(m) :] for m, s in zip(made.dims, spec.dims, strict=True) if s[: len(m)] == m]
    scattered = {axis for dim in added for axis in dim}
    return len(added) == made.rank and not spec.unreduced and scattered <= set(made.unreduced)


def gathers_to(made: ShardingSpec, kept: ShardingSpec) -> bool:
    """Whether ``kept`` follows from ``made`` by all-gathers alone."""
    return not kept.unreduced and all(m[: len(k)] == k for m, k in zip(made.dims, kept.dims, strict=True))
