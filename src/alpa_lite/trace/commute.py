"""Gradients of a weight that several stages use are added up on each of them, and joined once after the loop.

Autodiff adds the terms of such a gradient where they meet, which is inside the microbatch loop: every microbatch would send a
whole gradient from stage to stage. Addition commutes with the loop's own: each stage gets a sum of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax import lax

from alpa_lite._jax_compat import Literal, scan_layout
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp
from alpa_lite.trace.layers import Layered


def commute_sums(
    flat: FlatJaxpr, loop: int, layered: Layered, stage_of_layer: Sequence[int]
) -> tuple[FlatJaxpr, Layered]:
    """The step and its loop's body with a sum per stage. New ops follow the loop; its number stays."""
    return _Commuted(flat, loop, layered, tuple(stage_of_layer)).run()


class _Commuted:
    def __init__(self, flat: FlatJaxpr, loop: int, layered: Layered, stage_of_layer: tuple[int, ...]) -> None:
        self.flat, self.loop, self.layered, self.stage_of_layer = flat, loop, layered, stage_of_layer
        self.op, body = flat.ops[loop], layered.flat
        self.num_consts, self.num_carry = scan_layout(self.op.params)
        self.avals, self.body_avals = list(flat.avals), list(body.avals)
        self.ops, self.backward, self.layer = list(body.ops), list(layered.backward), list(layered.layer)
        self.maker = {o: i for i, op in enumerate(body.ops) for o in op.outputs if o >= 0}
        self.num_readers = Counter(v for op in body.ops for v in op.inputs if not isinstance(v, Literal))
        self.num_readers.update(o for o in body.outputs if not isinstance(o, Literal))
        self.more: list[tuple[Any, int, int, int]] = []  # start, body input, body output, result of the new carries
        self.after: list[FlatOp] = []
        self.renamed: dict[int, int] = {}

    def run(self) -> tuple[FlatJaxpr, Layered]:
        for j in range(self.num_carry):
            self.carry(j)
        if not self.more:
            return self.flat, self.layered
        first = self.num_consts + self.num_carry
        body, op = self.layered.flat, self.op
        starts, ins, outs, results = (list(part) for part in zip(*self.more, strict=True))
        body = replace(
            body,
            avals=self.body_avals,
            ops=self.ops,
            inputs=[*body.inputs[:first], *ins, *body.inputs[first:]],
            outputs=[*body.outputs[: self.num_carry], *outs, *body.outputs[self.num_carry :]],
        )
        params = {k: op.params[k] for k in ("length", "reverse", "unroll")}
        params |= {"num_consts": self.num_consts, "num_carry": self.num_carry + len(ins)}
        fresh = replace(op, params=params, inputs=[*op.inputs[:first], *starts, *op.inputs[first:]], bodies=[body])
        fresh.outputs = [*op.outputs[: self.num_carry], *results, *op.outputs[self.num_carry :]]
        fresh.all_outputs = (*op.all_outputs[: self.num_carry], *results, *op.all_outputs[self.num_carry :])
        later = [self.rename(o) for o in self.flat.ops[self.loop + 1 :]]
        outputs = [o if isinstance(o, Literal) else self.renamed.get(o, o) for o in self.flat.outputs]
        ops = [*self.flat.ops[: self.loop], fresh, *self.after, *later]
        layered = replace(self.layered, flat=body, backward=tuple(self.backward), layer=tuple(self.layer))
        return replace(self.flat, avals=self.avals, ops=ops, outputs=outputs), layered

    def carry(self, j: int) -> None:
        """Give the carry a sum per stage if its terms come from several."""
        result, output = self.op.outputs[j], self.layered.flat.outputs[j]
        if result < 0 or isinstance(output, Literal) or output not in self.maker:
            return
        add = self.ops[self.maker[output]]
        mine = self.layered.flat.inputs[self.num_consts + j]
        if add.name != "add" or add.inputs[0] != mine or isinstance(add.inputs[1], Literal):
            return
        terms = self.terms(add.inputs[1])
        by_stage: dict[int, list[int]] = {}
        for term in terms:
            by_stage.setdefault(self.stage(term), []).append(term)
        if len(by_stage) < 2:
            return
        first, *others = (by_stage[stage] for stage in sorted(by_stage))
        self.rewrite(add, output, mine, first)
        self.drop(add.inputs[1], set(terms))
        joined = result
        for of_stage in others:
            joined = self.join(joined, self.new_carry(j, add, of_stage))
        self.renamed[result] = joined

    def terms(self, value: int) -> list[int]:
        """What a value is the sum of, through sums that nothing else reads."""
        made = self.maker.get(value)
        if made is None or self.ops[made].name != "add_any" or self.num_readers[value] > 1:
            return [value]
        return [t for i in self.ops[made].inputs for t in ([] if isinstance(i, Literal) else self.terms(i))]

    def stage(self, value: int) -> int:
        made = self.maker.get(value)
        return self.stage_of_layer[0 if made is None else self.layer[made]]

    def new(self, like: int) -> int:
        self.body_avals.append(self.body_avals[like])
        return len(self.body_avals) - 1

    def append(self, op: FlatOp, near: int) -> None:
        """Put an op at the end of the body, in the layer of the op that makes ``near``."""
        made = self.maker[near]
        self.maker.update((o, len(self.ops)) for o in op.outputs)
        self.ops.append(op)
        self.backward.append(True)
        self.layer.append(self.layer[made])

    def sum_of(self, terms: list[int], like: FlatOp) -> int:
        total = terms[0]
        for term in terms[1:]:
            result = self.new(total)
            self.append(FlatOp(lax.add_p, {}, [total, term], [result], like.source, like.scope), term)
            total = result
        return total

    def rewrite(self, add: FlatOp, output: int, mine: int, terms: list[int]) -> None:
        """The carry's own addition takes the terms of one stage."""
        total = self.sum_of(terms, add)
        index = self.maker[output]
        self.ops[index] = FlatOp(lax.add_p, dict(add.params), [mine, total], [output], add.source, add.scope)
        self.layer[index] = self.layer[self.maker[terms[0]]]
        self.ops.append(self.ops.pop(index))  # behind the terms
        self.backward.append(self.backward.pop(index))
        self.layer.append(self.layer.pop(index))
        self.remake()

    def drop(self, value: int, kept: set[int]) -> None:
        """Remove the sums that nothing reads any more."""
        if value in kept or value not in self.maker:
            return
        index = self.maker[value]
        inputs = [i for i in self.ops[index].inputs if not isinstance(i, Literal)]
        for part in (self.ops, self.backward, self.layer):
            del part[index]
        self.remake()
        for i in inputs:
            self.drop(i, kept)

    def remake(self) -> None:
        self.maker = {o: i for i, op in enumerate(self.ops) for o in op.outputs if o >= 0}

    def new_carry(self, j: int, add: FlatOp, terms: list[int]) -> int:
        """A carry of its own for the terms of one stage; returns the loop's result for it."""
        total = self.sum_of(terms, add)
        start, result = self.new(total), self.new(total)
        self.append(FlatOp(lax.add_p, {}, [start, total], [result], add.source, add.scope), terms[0])
        self.avals.append(self.avals[self.op.all_outputs[j]])
        made = len(self.avals) - 1
        self.more.append((self.op.inputs[self.num_consts + j], start, result, made))
        return made

    def join(self, first: int, second: int) -> int:
        self.avals.append(self.avals[first])
        result = len(self.avals) - 1
        self.after.append(FlatOp(lax.add_p, {}, [first, second], [result], self.op.source, self.op.scope))
        return result

    def rename(self, op: FlatOp) -> FlatOp:
        inputs = [i if isinstance(i, Literal) else self.renamed.get(i, i) for i in op.inputs]
        fresh = replace(op, inputs=inputs)
        fresh.all_outputs = op.all_outputs
        return fresh
