"""Prices of the decisions where memory counts: a loop keeps no layout of an argument that no usage sees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import alpa_lite as al
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.costs.conventions import cost_model
from alpa_lite.costs.conversion import Conversions
from alpa_lite.costs.facts import Facts
from alpa_lite.costs.memory import Order, timeline
from alpa_lite.intraop.decisions import build_graph
from alpa_lite.intraop.domains import gathers_to
from alpa_lite.intraop.pricing import Pricer
from alpa_lite.trace.program import trace


def loop(w: jax.Array, xs: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda total, x: (total + (x @ w).sum(), None), jnp.zeros(()), xs)[0]


def test_a_limit_forbids_layouts_that_a_loop_keeps_uncounted() -> None:
    args = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)
    program = trace(loop, args, {}).program
    mesh = DeviceMesh(shape=(2, 2), axis_names=("x", "y"))
    costs = cost_model("roofline", al.Cluster.parse("1x4:h100-sxm"), mesh)
    graph = build_graph(program, Conversions(mesh=mesh, costs=costs))
    pricer = Pricer.of(program, graph, costs)
    line = timeline(program, Order.LATE, facts=Facts(program))
    free, limited = pricer.problem(), pricer.problem(timeline=line, usage_limit=1 << 40)
    (copy,) = (node for node, n in enumerate(graph.nodes) if n.kind == "copy" and n.pairs is not None)
    (reader,) = graph.loop_reads
    specs = graph.conversions.space(2).specs
    pairs, read = graph.nodes[copy].pairs, graph.nodes[reader].specs
    assert pairs is not None and read is not None

    def between(problem) -> np.ndarray:
        (found,) = (e.costs for e in problem.edges if (e.u, e.v) == (copy, reader))
        return np.isfinite(found)

    slices = np.array([[gathers_to(specs[r], specs[handed]) for r in read] for _, handed in pairs])
    moved = between(free) & ~slices
    assert moved.any()  # such as an all-to-all, once before the loop
    assert (between(limited) == (between(free) & slices)).all()
    counted = {usage.node: usage.size_bytes for usage in limited.usages}
    assert all((counted[copy][row] > 0) == (made != handed) for row, (made, handed) in enumerate(pairs))
