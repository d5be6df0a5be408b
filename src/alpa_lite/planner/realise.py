"""Choices of the decision graph -> what a plan holds: specs of every op and leaf, conversions, collectives.

A conversion of a value to a spec happens once per region, before the first op that needs it (a reduction of partial sums
right after the value is made, if no loop made it), and serves every later consumer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from alpa_lite.core.collective import Collective, CollectiveKind
from alpa_lite.core.conversion import Conversion, Step
from alpa_lite.core.program import Op, Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conversion import step_price, step_size_bytes
from alpa_lite.costs.facts import Facts, Located, located
from alpa_lite.intraop.decision_graph import DecisionGraph, Link, OpChoices
from alpa_lite.intraop.strategies import StrategySet
from alpa_lite.plan.records import OpDecision

if TYPE_CHECKING:
    from alpa_lite.costs.model import CostModel


_Layouts = tuple[tuple[ShardingSpec, ...], tuple[ShardingSpec, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Realised:
    """A choice written out; times in the cost model's unit for one step.

    Collectives of conversions come first, those inside ops (max, min) last. ``layouts``: per op without bodies, in the order of
    ``decisions``, the number of its layouts in the ``Decided`` of the facts.
    """

    in_specs: tuple[ShardingSpec, ...]
    out_specs: tuple[ShardingSpec, ...]
    decisions: tuple[OpDecision, ...]
    conversions: tuple[Conversion, ...]
    collectives: tuple[Collective, ...]
    layouts: np.ndarray = field(compare=False, repr=False)


def realise(
    program: Program, graph: DecisionGraph, choice: np.ndarray, costs: CostModel, facts: Facts | None = None
) -> Realised:
    """Write out ``choice`` (one number per node of ``graph``). ``facts``: of the program, if some are known."""
    facts = Facts(program) if facts is None else facts
    writer = _Writer(graph, choice, costs)
    decisions, layouts = writer.decisions(facts.of(located, program), facts.of(Decided, program))
    for number in graph.changed_links(choice):
        writer.convert(graph.links[number])
    collectives, conversions = writer.finish(program, facts)
    return Realised(
        in_specs=tuple(writer.port_spec(n) for n in graph.inputs),
        out_specs=tuple(writer.port_spec(n) for n in graph.outputs),
        decisions=tuple(decisions),
        conversions=conversions,
        collectives=collectives,
        layouts=layouts,
    )


class Decided:
    """Decisions of a program's ops, each made once: on other meshes most ops lie the same way.

    Attributes:
        ops: those without bodies, and ``places`` among all.
        kinds, divisors: what regimes find of ops and their layouts (``regime.py``).
    """

    def __init__(self, program: Program) -> None:
        every = list(enumerate(located(program)))
        self.ops = [row for _, row in every if not row[3].bodies]
        self.places = np.array([place for place, row in every if not row[3].bodies], dtype=np.int64)
        self.numbers: dict[_Layouts, int] = {}
        self.layouts: list[_Layouts] = []
        self.by_specs: dict[tuple[object, ...], int] = {}  # by axes that split anything, ranks, and numbers of specs
        self.made: dict[int, OpDecision] = {}
        self.known: dict[int, tuple[OpChoices, np.ndarray]] = {}
        self.kinds: np.ndarray | None = None
        self.divisors: dict[Hashable, dict[int, int]] = {}

    def numbers_of(self, choices: OpChoices) -> np.ndarray:
        """Per strategy of a graph, the number of its layouts; -1 until somebody enters it."""
        if id(choices) not in self.known:
            self.known[id(choices)] = choices, np.full(len(choices.inside), -1, dtype=np.int64)
        return self.known[id(choices)][1]

    def number(self, layouts: _Layouts) -> int:
        """Of the layouts of an op's operands and results."""
        number = self.numbers.setdefault(layouts, len(self.layouts))
        if number == len(self.layouts):
            self.layouts.append(layouts)
        return number

    def all(self, numbers: np.ndarray) -> list[OpDecision]:
        """The decisions of all ops without bodies, by the numbers of their layouts."""
        keys = (numbers * len(self.ops) + np.arange(len(self.ops))).tolist()
        for index, key in enumerate(keys):
            if key not in self.made:
                operands, results = self.layouts[numbers[index]]
                self.made[key] = OpDecision(path=self.ops[index][1], operands=operands, results=results)
        return [self.made[key] for key in keys]


class _Writer:
    def __init__(self, graph: DecisionGraph, choice: np.ndarray, costs: CostModel) -> None:
        self.graph, self.choice, self.costs = graph, choice.tolist(), costs
        self.conversions = graph.conversions
        self.mesh = graph.conversions.mesh
        self.axes = tuple(a for a, n in zip(self.mesh.axis_names, self.mesh.shape, strict=True) if n > 1)
        self.raw: list[tuple[str, Link, tuple[Step, ...], int]] = []
        self.inside: list[tuple[str, Collective]] = []
        self.prices: dict[tuple[int, tuple[int, ...], int], tuple[int, float, tuple[str, ...]]] = {}

    def spec(self, rank: int, number: int) -> ShardingSpec:
        return self.conversions.space(rank).specs[number]

    def port_spec(self, node: int) -> ShardingSpec:
        n = self.graph.nodes[node]
        assert n.specs is not None
        return self.spec(n.rank, int(n.specs[self.choice[node]]))

    def decisions(self, ops: Sequence[Located], decided: Decided) -> tuple[list[OpDecision], np.ndarray]:
        """Of all ops; and of those without bodies the numbers of their layouts."""
        choices = self.graph.op_choices
        entries = choices.entries(np.array(self.choice))
        plain = decided.ops
        numbers = decided.numbers_of(choices)
        for entry, index in zip(*(a.tolist() for a in np.unique(entries, return_index=True)), strict=True):
            if numbers[entry] < 0:
                numbers[entry] = self.layouts_of(plain[index][3], *choices.strategy(entry), decided)
        layouts = numbers[entries]
        found = decided.all(layouts)
        for index in np.flatnonzero(choices.inside[entries]).tolist():
            strategies, c = choices.strategy(int(entries[index]))
            _, path, program, op = plain[index]
            self.reduce_inside(path, program, op, found[index].results[0], strategies.reduce_axes[c])
        if len(plain) == len(ops):
            return found, layouts
        rest = iter(found)
        return [self.control_flow(path, op) if op.bodies else next(rest) for _, path, _, op in ops], layouts

    def layouts_of(self, op: Op, strategies: StrategySet, c: int, decided: Decided) -> int:
        """The number of the layouts of an op."""
        ranks = (*map(len, op.rule.operands), -1, *map(len, op.rule.results))
        key = self.axes, ranks, *[specs.item(c) for specs in (*strategies.operands, *strategies.results)]
        found = decided.by_specs.get(key)
        if found is None:
            found = decided.by_specs[key] = decided.number(self.specs(op, strategies, c))
        return found

    def specs(self, op: Op, strategies: StrategySet, c: int) -> _Layouts:
        """Of an op's operands and of its results; ops of one strategy share them."""
        operands, results = (
            tuple(self.spec(len(dims), int(numbers[c])) for dims, numbers in zip(tensors, chosen, strict=True))
            for tensors, chosen in ((op.rule.operands, strategies.operands), (op.rule.results, strategies.results))
        )
        return operands, results

    def reduce_inside(self, path: str, program: Program, op: Op, result: ShardingSpec, axes: tuple[str, ...]) -> None:
        value = program.values[op.outputs[0]]
        size = result.local_size_bytes(value.shape, value.itemsize, self.mesh)
        axes = self.mesh.sort_axes(axes)
        volume = self.costs.volume(value.shape, value.itemsize) / result.num_shards(self.mesh)
        self.inside.append(
            (
                path,
                Collective(
                    kind=CollectiveKind.ALL_REDUCE,
                    axes=axes,
                    size_bytes=size,
                    count=round(self.graph.nodes[self.graph.op_nodes[path]].weight) or 1,
                    time_s=float(self.costs.collective(CollectiveKind.ALL_REDUCE, axes, volume)),
                    op=path,
                    source=op.source,
                    tensor=f"%{op.outputs[0]}",
                ),
            )
        )

    def control_flow(self, path: str, op: Op) -> OpDecision:
        ports, outs = self.graph.body_ports[path]
        stacked_in = op.num_consts + op.num_carry if op.primitive == "scan" else len(ports)
        stacked_out = op.num_carry if op.primitive == "scan" else len(outs)

        def outer(node: int, stacked: bool) -> ShardingSpec:
            spec = self.port_spec(node)
            return ShardingSpec(((), *spec.dims), spec.unreduced) if stacked else spec

        return OpDecision(
            path=path,
            operands=tuple(outer(n, i >= stacked_in) for i, n in enumerate(ports)),
            results=tuple(outer(n, i >= stacked_out) for i, n in enumerate(outs)),
        )

    def convert(self, link: Link) -> None:
        """Record the conversions of one value."""
        made = int(link.producer.specs[self.choice[link.producer.node]])
        have = [made]
        if link.copy >= 0:
            kept = self.handed_on(link)
            if kept != made and self.is_read(link, made, kept):
                self.record(link, made, kept, self.first_path(link, made))
                have.append(kept)
        done = set(have)
        readers: Counter[int] | None = None  # most values need no conversion
        for consumer in link.consumers:
            want = int(consumer.specs[self.choice[consumer.node]])
            if want not in done:
                readers = self.readers(link) if readers is None else readers
                table = self.conversions.table(link.shape, link.itemsize)
                source = min(have, key=lambda s: (table[s, want], s != made))
                place = link if not self.spec(len(link.shape), source).unreduced else None
                path = consumer.path if place else self.first_path(link, source)
                self.record(link, source, want, path, readers[want])
                done.add(want)

    def readers(self, link: Link) -> Counter[int]:
        """Per spec, how many consumers pay for being given it: each op that reads it, or just the first."""
        wants = {(c.node, int(c.specs[self.choice[c.node]])) for c in link.consumers if c.node != link.producer.node}
        counted = Counter(want for _, want in wants)
        return counted if self.costs.rules.per_reader else Counter(counted.keys())

    def handed_on(self, link: Link) -> int:
        """Number of the spec that the copy node hands to the consumers."""
        return int(self.graph.handed_on(link.copy)[self.choice[link.copy]])

    def is_read(self, link: Link, made: int, kept: int) -> bool:
        """Whether any consumer is better off with the kept spec (else keeping it would only cost)."""
        table = self.conversions.table(link.shape, link.itemsize)
        wants = [int(c.specs[self.choice[c.node]]) for c in link.consumers]
        return any(table[kept, w] < table[made, w] for w in wants)

    def first_path(self, link: Link, source: int) -> str:
        """Partial sums are reduced as soon as they are made; other conversions wait for the first reader.

        So do the sums that a loop leaves: where a pipeline updates in rounds, each is reduced in the one that reads it.
        """
        if not self.spec(len(link.shape), source).unreduced or link.made_at in self.graph.body_ports:
            return link.consumers[0].path
        return next_path(link.made_at, link.region) or link.consumers[0].path

    def record(self, link: Link, source: int, target: int, path: str, readers: int = 1) -> None:
        rank = len(link.shape)
        steps = self.conversions.steps(self.spec(rank, source), self.spec(rank, target), link.shape, link.itemsize)
        self.raw.append((path, link, steps, readers))

    def finish(self, program: Program, facts: Facts) -> tuple[tuple[Collective, ...], tuple[Conversion, ...]]:
        """Number the collectives in program order."""
        ops, inputs = facts.of(_by_path, program), facts.of(_input_names, program)
        order = facts.of(_place_order, program)
        self.raw.sort(key=lambda item: order[_existing(item[0], order)])
        collectives: list[Collective] = []
        conversions = []
        for path, link, steps, readers in self.raw:
            path = _existing(path, order)
            numbers = []
            for step in steps:
                if step.kind is None:
                    numbers.append(-1)
                    continue
                numbers.append(len(collectives))
                collectives.append(self.collective(step, link, path, inputs, ops))
            price = sum(self.priced(step, link)[1] for step in steps)
            conversions.append(
                Conversion(
                    op=path,
                    value=link.value,
                    steps=steps,
                    collectives=tuple(numbers),
                    made_by=link.made_at,
                    cost=price * max(1, round(link.weight)) * readers,
                    readers=readers,
                )
            )
        collectives += [c for _, c in self.inside]
        return tuple(collectives), tuple(conversions)

    def priced(self, step: Step, link: Link) -> tuple[int, float, tuple[str, ...]]:
        """Bytes, price and axes of one step; layers repeat."""
        key = id(step), link.shape, link.itemsize
        found = self.prices.get(key)
        if found is None:
            size = step_size_bytes(step, link.shape, link.itemsize, self.mesh) if step.kind is not None else 0
            price = step_price(step, link.shape, link.itemsize, self.mesh, self.costs)
            found = self.prices[key] = size, price, self.mesh.sort_axes(step.axes)
        return found

    def collective(self, step: Step, link: Link, path: str, inputs: dict[int, str], ops: dict[str, Op]) -> Collective:
        assert step.kind is not None
        size, price, axes = self.priced(step, link)
        source = ops[link.made_at].source if link.made_at in ops else ""
        if not source and path in ops:
            source = ops[path].source
        tensor = f"%{link.value}"
        if not link.region:
            tensor = inputs.get(link.value, tensor)
        return Collective(
            kind=step.kind,
            axes=axes,
            size_bytes=size,
            count=max(1, round(link.weight)),
            time_s=price,
            op=path,
            source=source,
            tensor=tensor,
        )


def next_path(made_at: str, region: str) -> str:
    """Path of the op after the one that made a value ("" when it was an input)."""
    if made_at == "in":
        return ""
    return f"{region}{int(made_at[len(region) :]) + 1}"


def _existing(path: str, order: dict[str, int]) -> str:
    """A path past the last op of its region means the region's end."""
    if path in order:
        return path
    return f"{path.rpartition('.')[0]}.out" if "." in path else "out"


def _by_path(program: Program) -> dict[str, Op]:
    return {path: op for path, _, op in program.walk()}


def _input_names(program: Program) -> dict[int, str]:
    """Value -> path of the argument that it is."""
    return dict(reversed(list(zip(program.inputs, program.input_paths, strict=False))))


def _place_order(program: Program) -> dict[str, int]:
    """Position of every place where a conversion may stand."""
    places: list[str] = []

    def visit(p: Program, prefix: str) -> None:
        for index, op in enumerate(p.ops):
            places.append(f"{prefix}{index}")
            for b, body in enumerate(op.bodies):
                visit(body, f"{prefix}{index}.{b}.")
        places.append(f"{prefix}out")

    visit(program, "")
    return {path: i for i, path in enumerate(places)}
