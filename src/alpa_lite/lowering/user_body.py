"""Runs the body of a user's ``shard_map`` inside our own manual region, where its mesh axes are bound already.

The body was traced with JAX's bookkeeping of which values vary along which axes (``check_vma``). Our region does without,
so the primitives that exist only for it are replaced: ``pvary`` by nothing, ``psum_invariant`` by ``psum``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from alpa_lite._jax_compat import ClosedJaxpr, Jaxpr, Literal, scan_layout
from alpa_lite.trace.flatten import FlatJaxpr, FlatOp, flatten


def run_body(jaxpr: Jaxpr, inputs: Sequence[Any]) -> list[Any]:
    """Results of ``jaxpr`` on local tiles."""
    return run_flat(flatten(ClosedJaxpr(jaxpr, ())), inputs)


def run_flat(flat: FlatJaxpr, inputs: Sequence[Any]) -> list[Any]:
    """Results of a flat jaxpr, op by op as it stands."""
    env: dict[int, Any] = {**flat.constants, **dict(zip(flat.inputs, inputs, strict=True))}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for op in flat.ops:
        out = _REPLACED.get(op.name, _bind)(op, [read(i) for i in op.inputs])
        env.update(zip(op.all_outputs, out, strict=True))
    return [read(o) for o in flat.outputs]


def _bind(op: FlatOp, inputs: list[Any]) -> list[Any]:
    params = without_shardings(op.params)
    if op.name == "optimization_barrier":
        del params["group"]  # ours, see trace.flatten
    out = op.primitive.bind(*inputs, **params)
    return list(out) if op.primitive.multiple_results else [out]


def without_shardings(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters of an op as it stands in a manual region, where JAX's own shardings mean nothing."""
    return {k: None if k in ("sharding", "out_sharding") else v for k, v in params.items()}


def _scan(op: FlatOp, inputs: list[Any]) -> list[Any]:
    consts, carries = scan_layout(op.params)

    def step(carry: Any, xs: Any) -> tuple[list[Any], list[Any]]:
        outs = run_flat(op.bodies[0], [*inputs[:consts], *carry, *xs])
        return outs[:carries], outs[carries:]

    start, xs = inputs[consts : consts + carries], inputs[consts + carries :]
    carry, ys = lax.scan(step, start, xs, length=op.params["length"], reverse=op.params["reverse"])
    return [*carry, *ys]


def _while(op: FlatOp, inputs: list[Any]) -> list[Any]:
    first, second = op.params["cond_nconsts"], op.params["body_nconsts"]
    test, body = inputs[:first], inputs[first : first + second]
    return list(
        lax.while_loop(
            lambda carry: run_flat(op.bodies[0], [*test, *carry])[0],
            lambda carry: run_flat(op.bodies[1], [*body, *carry]),
            inputs[first + second :],
        )
    )


def _cond(op: FlatOp, inputs: list[Any]) -> list[Any]:
    branches = [lambda *args, body=body: run_flat(body, args) for body in op.bodies]
    return list(lax.switch(inputs[0], branches, *inputs[1:]))


_REPLACED: dict[str, Callable[[FlatOp, list[Any]], list[Any]]] = {
    "pvary": lambda op, inputs: inputs,
    "pcast": lambda op, inputs: inputs,
    "psum_invariant": lambda op, inputs: [lax.psum(x, op.params["axes"]) for x in inputs],
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
