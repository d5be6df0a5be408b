"""Meshes of one class have the same decision graph, so that it is built once for all of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.costs.conversion import Conversions
from alpa_lite.intraop.decisions import build_graph
from alpa_lite.intraop.derive import derive
from alpa_lite.intraop.slots import slots_of
from alpa_lite.intraop.strategies import KnownStrategies, mesh_class
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


def built(program, mesh, **settings):
    graph = build_graph(program, Conversions(mesh=mesh, costs=RandomCosts(0)), **settings)
    return graph, slots_of(program, graph)


def lists(*arrays):
    return [None if a is None else np.asarray(a).tolist() for a in arrays]


def chosen(node):
    made = node.strategies
    own = () if made is None else (made.assignment, *made.operands, *made.results)
    used = () if made is None else (made.used, made.reduce_axes)
    return node.kind, node.name, node.size, used, lists(node.specs, node.pairs, *own)


def described(graph, slots):
    """Everything that a decision graph and its slots say, less objects' identities."""
    nodes = [chosen(node) for node in graph.nodes]
    links = [
        (k.value, k.copy, [(e.node, e.path, lists(e.specs)) for e in (k.producer, *k.consumers)]) for k in graph.links
    ]
    specs = [str(graph.conversions.space(rank).specs) for rank in range(4)]
    priced = [chosen(slot.node) for slot in slots.node_slots]
    priced += [
        (lists(slot.pairs), [(e.node, lists(e.specs)) for e in (slot.producer, *slot.ends)], slot.looped)
        for slot in slots.edge_slots
    ]
    choice = np.array([node.size - 1 for node in graph.nodes])
    written = graph.changed_links(choice), graph.op_choices.entries(choice).tolist(), graph.names
    return nodes, links, graph.inputs, graph.outputs, specs, slots.nodes, slots.edges, priced, written


@pytest.mark.parametrize("shapes", [ONE_AXIS, TWO_AXES], ids=["one axis", "two axes"])
def test_meshes_of_one_class_have_one_graph(shapes):
    program = trace(layers, (X, W), {}).program
    sizes, found = sizes_of(program), {}
    for shape in shapes:
        mesh = device_mesh(shape)
        graph = described(*built(program, mesh))
        first, expected = found.setdefault(mesh_class(mesh, sizes), (shape, graph))
        assert graph == expected, (first, shape)
    assert len(found) < len(shapes)


@pytest.mark.medium
@pytest.mark.parametrize("shapes", [ONE_AXIS, TWO_AXES], ids=["one axis", "two axes"])
def test_a_graph_that_follows_from_another_is_the_one_that_is_built(shapes):
    program = trace(layers, (X, W), {}).program
    graphs = []
    for shape in shapes:
        mesh = device_mesh(shape)
        own = built(program, mesh)
        expected = described(*own)
        for graph, slots in (*graphs[:1], *graphs[-2:]):
            derived = derive(graph, slots, Conversions(mesh=mesh, costs=RandomCosts(0)), KnownStrategies())
            assert described(*derived) == expected, shape
        graphs.append(own)


def test_a_matmul_that_must_be_split_does_not_lend_its_choices_to_a_like_op():
    """On a mesh that divides nothing both have the same one; on another the matmul's are fewer than those of the user's op."""
    args = jax.ShapeDtypeStruct((6, 2), jnp.float32), jax.ShapeDtypeStruct((2, 6), jnp.float32)
    program = trace(lambda x, y: (x @ y, jnp.tanh(x) @ y), args, {}).program
    last = max(i for i, op in enumerate(program.ops) if op.primitive == "dot_general")
    ops = [replace(op, primitive="user_op") if i == last else op for i, op in enumerate(program.ops)]
    program = replace(program, ops=tuple(ops))
    base = built(program, device_mesh((1, 4)), sharded_contractions=True)
    mesh = device_mesh((2, 2))
    derived = derive(*base, Conversions(mesh=mesh, costs=RandomCosts(0)), KnownStrategies())
    assert described(*derived) == described(*built(program, mesh, sharded_contractions=True))
