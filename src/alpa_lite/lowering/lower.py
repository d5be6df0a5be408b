"""Plan + flat jaxpr -> one function of local tiles, run inside a single fully manual ``shard_map``.

Every op is evaluated on the tiles that its decision names; every change of layout is a ``Conversion`` of the plan, carried
out by explicit collectives. Nothing is left to a partitioner, so the compiled program has the plan's collectives and no
others (``docs/design/0002-lowering.md`` has the alternatives that were tried).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite._jax_compat import Literal, scan_layout, user_context
from alpa_lite.core.collective import Collective
from alpa_lite.core.conversion import Conversion
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.lowering.collectives import run_steps
from alpa_lite.lowering.local_ops import LocalOp, evaluate
from alpa_lite.lowering.remat_barrier import remat_barrier_p
from alpa_lite.plan.records import OpDecision
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp


def partition_spec(spec: ShardingSpec) -> PartitionSpec:
    """The public form of a spec without unreduced axes."""
    assert not spec.unreduced, f"{spec} has no PartitionSpec"
    return PartitionSpec(*(None if not d else d[0] if len(d) == 1 else d for d in spec.dims))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """What lowering reads: the mesh, the decisions and the conversions of one stage; ``inside``: op path -> collective."""

    mesh: DeviceMesh
    decisions: dict[str, OpDecision]
    conversions: dict[str, list[Conversion]]
    inside: dict[str, int]

    @classmethod
    def of(
        cls,
        mesh: DeviceMesh,
        decisions: Sequence[OpDecision],
        conversions: Sequence[Conversion],
        collectives: Sequence[Collective],
    ) -> Lowering:
        """``collectives`` that no conversion names stand inside ops (a max over a split dim)."""
        by_op: dict[str, list[Conversion]] = defaultdict(list)
        for conversion in conversions:
            by_op[conversion.op].append(conversion)
        named = {number for conversion in conversions for number in conversion.collectives}
        inside = {c.op: number for number, c in enumerate(collectives) if number not in named}
        return cls(mesh=mesh, decisions={d.path: d for d in decisions}, conversions=dict(by_op), inside=inside)

    def local_function(
        self, flat: FlatJaxpr, in_specs: Sequence[ShardingSpec], out_specs: Sequence[ShardingSpec]
    ) -> Callable[..., list[Any]]:
        """A function of local input tiles that returns local result tiles."""

        def run(*inputs: Any) -> list[Any]:
            return Region(self, flat, "").run(inputs, in_specs, out_specs)

        return run

    def sharded_function(
        self,
        flat: FlatJaxpr,
        in_specs: Sequence[ShardingSpec],
        out_specs: Sequence[ShardingSpec],
        mesh: Any,
    ) -> Callable[..., list[Any]]:
        """The whole step over global arrays on a ``jax.sharding.Mesh`` (or ``AbstractMesh``)."""
        return jax.shard_map(
            self.local_function(flat, in_specs, out_specs),
            mesh=mesh,
            in_specs=tuple(partition_spec(s) for s in in_specs),
            out_specs=[partition_spec(s) for s in out_specs],
            check_vma=False,
        )


def named_shardings(specs: Sequence[ShardingSpec], mesh: Any) -> list[NamedSharding]:
    return [NamedSharding(mesh, partition_spec(s)) for s in specs]


class Region:
    """One program or body under evaluation: which tiles of which values exist, by layout."""

    def __init__(self, lowering: Lowering, flat: FlatJaxpr, prefix: str) -> None:
        self.lowering, self.flat, self.prefix = lowering, flat, prefix
        self.tiles: dict[int, dict[ShardingSpec, Any]] = {}
        # Gradients made since the last barrier -> what they are a widening cast of, or -1 (see costs/late_order.py).
        self.pending: dict[int, int] = {}
        self.last_reads = self.read_positions()

    def read_positions(self) -> dict[tuple[int, ShardingSpec], int]:
        """Position of the last op that reads a value in a layout, or converts it from that layout."""
        last: dict[tuple[int, ShardingSpec], int] = {}
        for index, op in enumerate(self.flat.ops):
            path = f"{self.prefix}{index}"
            for conversion in self.lowering.conversions.get(path, ()):
                last[(conversion.value, conversion.source)] = index
            for value, spec in zip(op.inputs, self.lowering.decisions[path].operands, strict=True):
                if not isinstance(value, Literal):
                    last[(value, spec)] = index
        return last

    def run(
        self, inputs: Sequence[Any], in_specs: Sequence[ShardingSpec], out_specs: Sequence[ShardingSpec]
    ) -> list[Any]:
        for value, tile, spec in zip(self.flat.inputs, inputs, in_specs, strict=True):
            self.tiles[value] = {spec: tile}
        self.run_segment({}, 0, len(self.flat.ops), frozenset(), self.lowering.conversions.get(f"{self.prefix}out", ()))
        return [
            out.val if isinstance(out, Literal) else self.tiles[out][spec]
            for out, spec in zip(self.flat.outputs, out_specs, strict=True)
        ]

    def run_segment(
        self,
        tiles: Mapping[int, dict[ShardingSpec, Any]],
        start: int,
        stop: int,
        skipped: frozenset[int],
        out: Sequence[Conversion],
    ) -> None:
        """Evaluate ops ``start`` to ``stop`` but the skipped ones, then the conversions ``out``, on what exists and ``tiles``."""
        for value, const in self.flat.constants.items():
            self.tiles[value] = {ShardingSpec.replicated(len(getattr(const, "shape", ()))): const}
        self.tiles.update(tiles)
        index = start
        while index < stop:
            index = index + 1 if index in skipped else self.evaluate(index)
        self.convert(out)

    def evaluate(self, index: int) -> int:
        """Evaluate op ``index``; returns the next index (a barrier group counts as one)."""
        op = self.flat.ops[index]
        if op.name == "optimization_barrier":
            return self.barrier(index)
        path = f"{self.prefix}{index}"
        decision = self.lowering.decisions[path]
        with user_context(op.traceback):
            self.convert_before(path)
            inputs = self.read(op, decision)
            with jax.named_scope(op.scope) if op.scope else nullcontext():
                results = self.results(op, path, decision, inputs)
        self.write(op, decision, results)
        return index + 1

    def barrier(self, index: int) -> int:
        """All tensors of one remat barrier pass it together, as in JAX's own lowering.

        The gradients that were made since the last barrier and are read later pass it too. Without that nothing hinders XLA's
        scheduler from leaving every weight gradient for the end of the step, with all that they are made from in memory
        (XLA:GPU's latency hiding scheduler does, while it stays below the device's memory).
        """
        group = self.flat.ops[index].params["group"]
        members, after = [], []
        while index < len(self.flat.ops):
            op = self.flat.ops[index]
            if op.name != "optimization_barrier" or op.params["group"] != group:
                break
            path = f"{self.prefix}{index}"
            placed = self.lowering.conversions.get(path, ())
            self.convert([c for c in placed if c.value not in group])
            after += [c for c in placed if c.value in group]  # of what an earlier member makes
            members.append((op, self.lowering.decisions[path]))
            index += 1
        inputs = [self.read(op, decision)[0] for op, decision in members]
        held = self.finished(index, {op.inputs[0] for op, _ in members})
        tiles = remat_barrier_p.bind(*inputs, *(tile for *_, tile in held), waiting=len(inputs))
        passed, kept = tiles[: len(inputs)], tiles[len(inputs) :]
        for (op, decision), tile in zip(members, passed, strict=True):
            self.write(op, decision, [tile])
        self.convert(after)
        for (value, spec, _), tile in zip(held, kept, strict=True):
            dtype = self.flat.avals[value].dtype
            self.tiles[value][spec] = tile if tile.dtype == dtype else tile.astype(dtype)
        self.pending = {}
        return index

    def finished(self, index: int, passing: set[Any]) -> list[tuple[int, ShardingSpec, Any]]:
        """(value, layout, tile) of what is pending and read after op ``index``; the tile before a widening cast, which the
        reader can repeat."""
        results = {out for out in self.flat.outputs if not isinstance(out, Literal)}
        found = []
        for value, narrow in self.pending.items():
            for spec, tile in self.tiles[value].items() if value not in passing else ():
                if value in results or self.last_reads.get((value, spec), -1) >= index:
                    found.append((value, spec, self.tiles[narrow].get(spec, tile) if narrow >= 0 else tile))
        return found

    def read(self, op: FlatOp, decision: OpDecision) -> list[Any]:
        return [
            i.val if isinstance(i, Literal) else self.tiles[i][spec]
            for i, spec in zip(op.inputs, decision.operands, strict=True)
        ]

    def write(self, op: FlatOp, decision: OpDecision, results: Sequence[Any]) -> None:
        for value, spec, result in zip(op.outputs, decision.results, results, strict=True):
            if value >= 0:
                self.tiles[value] = {spec: result}
                if "transpose(" in op.scope or not spec.dims:
                    self.pending[value] = self.widened(op)

    def widened(self, op: FlatOp) -> int:
        if op.name != "convert_element_type" or isinstance(op.inputs[0], Literal):
            return -1
        before, after = (self.flat.avals[v].dtype for v in (op.inputs[0], op.all_outputs[0]))
        return op.inputs[0] if before.itemsize < after.itemsize else -1

    def convert_before(self, path: str) -> None:
        """Run the conversions that the plan places before ``path``."""
        self.convert(self.lowering.conversions.get(path, ()))

    def convert(self, conversions: Sequence[Conversion]) -> None:
        for conversion in conversions:
            tile = self.tiles[conversion.value][conversion.source]
            tile = run_steps(tile, conversion.steps, conversion.collectives, self.lowering.mesh)
            self.tiles[conversion.value][conversion.target] = tile

    def results(self, op: FlatOp, path: str, decision: OpDecision, inputs: list[Any]) -> list[Any]:
        match op.name:
            case "scan":
                return self.scan(op, path, decision, inputs)
            case "while":
                return self.while_(op, path, decision, inputs)
            case "cond":
                return self.cond(op, path, decision, inputs)
        local = LocalOp(
            name=op.name,
            primitive=op.primitive,
            params=op.params,
            operands=decision.operands,
            results=decision.results,
            operand_shapes=tuple(
                () if isinstance(i, Literal) else getattr(self.flat.avals[i], "shape", ()) for i in op.inputs
            ),
            result_shapes=tuple(getattr(self.flat.avals[o], "shape", ()) for o in op.all_outputs),
            mesh=self.lowering.mesh,
            label=f"al_c{self.lowering.inside[path]}" if path in self.lowering.inside else "",
        )
        return evaluate(local, inputs)

    def body(self, op: FlatOp, path: str, number: int) -> Region:
        return Region(self.lowering, op.bodies[number], f"{path}.{number}.")

    def scan(self, op: FlatOp, path: str, decision: OpDecision, inputs: list[Any]) -> list[Any]:
        consts, carries = scan_layout(op.params)
        in_specs = body_input_specs("scan", op.params, decision)[0]
        out_specs = body_output_specs("scan", op.params, decision)[0]

        def step(carry: Any, xs: Any) -> tuple[list[Any], list[Any]]:
            outs = self.body(op, path, 0).run([*inputs[:consts], *carry, *xs], in_specs, out_specs)
            return outs[:carries], outs[carries:]

        carry, ys = lax.scan(
            step,
            inputs[consts : consts + carries],
            inputs[consts + carries :],
            length=op.params["length"],
            reverse=op.params["reverse"],
            unroll=op.params["unroll"],
        )
        return [*carry, *ys]

    def while_(self, op: FlatOp, path: str, decision: OpDecision, inputs: list[Any]) -> list[Any]:
        first, second = op.params["cond_nconsts"], op.params["body_nconsts"]
        cond_consts, body_consts = inputs[:first], inputs[first : first + second]
        in_specs = body_input_specs("while", op.params, decision)
        out_specs = body_output_specs("while", op.params, decision)

        def test(carry: list[Any]) -> Any:
            return self.body(op, path, 0).run([*cond_consts, *carry], in_specs[0], out_specs[0])[0]

        def step(carry: list[Any]) -> list[Any]:
            return self.body(op, path, 1).run([*body_consts, *carry], in_specs[1], out_specs[1])

        return list(lax.while_loop(test, step, inputs[first + second :]))

    def cond(self, op: FlatOp, path: str, decision: OpDecision, inputs: list[Any]) -> list[Any]:
        in_specs = body_input_specs("cond", op.params, decision)
        out_specs = body_output_specs("cond", op.params, decision)

        def branch(number: int) -> Callable[..., list[Any]]:
            return lambda *args: self.body(op, path, number).run(args, in_specs[number], out_specs[number])

        return list(lax.switch(inputs[0], [branch(b) for b in range(len(op.bodies))], *inputs[1:]))


def body_input_specs(name: str, params: Any, decision: OpDecision) -> list[list[ShardingSpec]]:
    """Per body, the specs of its inputs, from the decision of the control-flow op."""
    operands = list(decision.operands)
    if name == "scan":
        stacked = sum(scan_layout(params))
        return [operands[:stacked] + [drop_leading(s) for s in operands[stacked:]]]
    if name == "while":
        first, second = params["cond_nconsts"], params["body_nconsts"]
        carry = operands[first + second :]
        return [operands[:first] + carry, operands[first : first + second] + carry]
    return [operands[1:]] * len(params["branches"])


def body_output_specs(name: str, params: Any, decision: OpDecision) -> list[list[ShardingSpec]]:
    """Per body, the specs of its results."""
    results = list(decision.results)
    if name == "scan":
        _, carries = scan_layout(params)
        return [results[:carries] + [drop_leading(s) for s in results[carries:]]]
    if name == "while":
        return [[ShardingSpec.replicated(0)], results]
    return [results] * len(params["branches"])


def drop_leading(spec: ShardingSpec) -> ShardingSpec:
    """Spec of one slice of a stacked tensor."""
    assert not spec.dims[0], f"the scanned dim of {spec} is split"
    return ShardingSpec(spec.dims[1:], spec.unreduced)
