"""Meshes of one class have the same decision graph, so that it is built once for all of them."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.costs.conversion import Conversions
from alpa_lite.intraop.decisions import build_graph
from alpa_lite.intraop.slots import slots_of
from alpa_lite.intraop.strategies import mesh_class
from alpa_lite.planner.shared import sizes_of
from alpa_lite.trace.program import trace
from tests.harness import RandomCosts, device_mesh

W = jax.ShapeDtypeStruct((16, 12), jnp.float32)
X = jax.ShapeDtypeStruct((4, 8, 16), jnp.float32)
ONE_AXIS = [(n,) for n in range(1, 17)]
TWO_AXES = list(itertools.product((1, 2, 3, 4, 8), repeat=2))


def layers(x, w):
    """With a dim that joins 4 and 8: the 8 may be split once all of the 4 is."""
    y = jnp.tanh(x.reshape(32, 16) @ w)
    return y.sum(), jnp.max(y @ w.T, axis=1), jax.lax.scan(lambda c, row: (c + row, row * 2), jnp.zeros(12), y)


def described(program, mesh):
    """Everything that a decision graph and its slots say, less objects' identities."""
    graph = build_graph(program, Conversions(mesh=mesh, costs=RandomCosts(0)))
    slots = slots_of(program, graph)
    nodes = []
    for node in graph.nodes:
        made = node.strategies
        arrays = [node.specs, node.pairs]
        if made is not None:
            arrays += [made.assignment, *made.operands, *made.results]
            nodes.append((made.used, made.reduce_axes))
        nodes.append((node.kind, node.name, node.size, [None if a is None else np.asarray(a).tolist() for a in arrays]))
    links = [(k.value, k.producer.node, [c.node for c in k.consumers], k.copy) for k in graph.links]
    specs = [str(graph.conversions.space(rank).specs) for rank in range(4)]
    return nodes, links, graph.inputs, graph.outputs, specs, slots.nodes, slots.edges


@pytest.mark.parametrize("shapes", [ONE_AXIS, TWO_AXES], ids=["one axis", "two axes"])
def test_meshes_of_one_class_have_one_graph(shapes):
    program = trace(layers, (X, W), {}).program
    sizes, found = sizes_of(program), {}
    for shape in shapes:
        mesh = device_mesh(shape)
        graph = described(program, mesh)
        first, expected = found.setdefault(mesh_class(mesh, sizes), (shape, graph))
        assert graph == expected, (first, shape)
    assert len(found) < len(shapes)
