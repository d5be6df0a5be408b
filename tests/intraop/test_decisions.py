"""The decision graph: who decides, what is joined, and where copies stand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_lite.costs.conversion import Conversions
from alpa_lite.intraop.decision_graph import DecisionGraph
from alpa_lite.intraop.decisions import CONTRACTIONS, build_graph
from alpa_lite.trace.program import trace
from tests.harness import RandomCosts, device_mesh


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def graph_of(fn, *args, shape=(2, 4), **settings) -> DecisionGraph:
    costs = RandomCosts()
    conversions = Conversions(mesh=device_mesh(shape), costs=costs)
    return build_graph(trace(fn, args, {}).program, conversions, **settings)


def kinds(graph):
    return [n.kind for n in graph.nodes]


def specs(graph, node):
    n = graph.nodes[node]
    return [str(graph.conversions.space(n.rank).specs[s]) for s in n.specs]


def test_a_chain_needs_no_copies():
    graph = graph_of(lambda a, b: jnp.tanh(a @ b), struct(8, 8), struct(8, 4))
    assert kinds(graph).count("op") == 2
    assert kinds(graph).count("port") == 3
    assert "copy" not in kinds(graph)
    assert list(graph.op_nodes) == ["0", "1"]
    assert len(graph.links) == 4


def summed(*dims):
    return lambda x: [lax.cumsum(x, axis=dim) for dim in dims]


def carried(x):
    return lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0], lax.cumsum(x, axis=1)


def looped(x):
    return lax.scan(lambda c, _: (c + x.sum(), None), jnp.zeros(()), None, length=3)[0], lax.cumsum(x, axis=1)


@pytest.mark.parametrize("pair", [(summed(0, 1), summed(0, 0, 1)), (carried, looped)], ids=["counts", "loops"])
def test_what_a_copy_hands_on_does_not_depend_on_the_readers_of_other_values(pair):
    def pairs_of(*functions):
        values = [struct(8, 8)] * len(functions)
        graph = graph_of(lambda *given: [fn(x) for fn, x in zip(functions, given, strict=True)], *values, shape=(2, 2))
        links = [link for link in graph.links if link.made_at == "in" and not link.region]
        return [graph.nodes[link.copy].pairs.tolist() for link in links if link.copy >= 0]

    alone = {fn: pairs_of(fn)[0] for fn in pair}
    assert alone[pair[0]] != alone[pair[1]]
    for order in (pair, pair[::-1]):
        assert pairs_of(*order) == [alone[fn] for fn in order]


def test_a_value_with_several_readers_has_a_copy():
    def fn(a):
        s = jnp.sin(a)
        return s * 2, jnp.cos(s)

    graph = graph_of(fn, struct(8, 4))
    (link,) = [link for link in graph.links if link.copy >= 0]
    assert link.made_at == "0" and len({c.node for c in link.consumers}) == 2
    assert graph.nodes[link.copy].kind == "copy"
    assert set(link.producer.specs) <= set(graph.nodes[link.copy].specs)


def test_the_same_value_twice_in_one_op_is_one_reader():
    graph = graph_of(lambda a: jnp.sin(a) * jnp.sin(a), struct(8, 8))
    assert all(link.copy < 0 or len({c.node for c in link.consumers}) > 1 for link in graph.links)
    squares = graph_of(lambda a: a * a, struct(8, 8))
    assert "copy" not in kinds(squares)


def test_the_copy_of_an_argument_keeps_the_argument_as_it_is():
    graph = graph_of(lambda a: (jnp.sin(a), jnp.cos(a)), struct(8, 8))
    (link,) = [link for link in graph.links if link.copy >= 0]
    pairs = graph.nodes[link.copy].pairs
    passed = {int(s) for s in link.producer.specs}
    assert {int(p) for p in pairs[:, 0]} == passed
    assert all((s, s) in {(int(a), int(b)) for a, b in pairs} for s in passed)
    space = graph.conversions.space(2).specs
    assert {(str(space[a]), str(space[b])) for a, b in pairs} >= {("[x,_]", "[_,_]"), ("[x,_]", "[_,x]")}


def test_a_stack_with_many_readers_is_handed_on_as_it_is_or_gathered():
    graph = graph_of(lambda a: [jnp.sin(a[i]) for i in range(10)], struct(10, 8, 8))
    (link,) = [link for link in graph.links if link.copy >= 0]
    space = graph.conversions.space(3).specs
    for made, kept in graph.nodes[link.copy].pairs:
        assert all(m[: len(k)] == k for m, k in zip(space[made].dims, space[kept].dims, strict=True))


def test_arguments_and_results_are_never_partial_sums():
    graph = graph_of(lambda a, b: a @ b, struct(8, 8), struct(8, 8))
    for node in (*graph.inputs, *graph.outputs):
        assert not [s for s in specs(graph, node) if "+" in s]


def test_ports_offer_only_what_divides():
    graph = graph_of(lambda a: a * 2, struct(6, 8))
    assert sorted(specs(graph, graph.inputs[0])) == sorted(
        ["[_,_]", "[x,_]", "[_,x]", "[_,y]", "[x,y]", "[_,x.y]", "[_,y.x]"]
    )
    assert specs(graph, graph.inputs[0])[0] == "[_,_]"


def test_three_axes_may_share_a_dim():
    graph = graph_of(lambda a: a * 2, struct(8, 3), shape=(2, 2, 2))
    names = specs(graph, graph.inputs[0])
    assert len([s for s in names if s.count(".") == 2]) == 6
    assert len(names) == 1 + 3 + 6 + 6


def test_an_aliased_result_shares_its_arguments_decision():
    graph = graph_of(lambda p, x: ({"w": p["w"] - x.sum()}, x.max()), {"w": struct(8, 8)}, struct(8, 4))
    assert graph.outputs[0] == graph.inputs[0]
    assert graph.outputs[1] not in graph.inputs


def test_tied_arguments_share_a_decision():
    graph = graph_of(lambda a, b: a + b, struct(8, 8), struct(8, 8), input_ties=[(1, 0)])
    assert graph.inputs[0] == graph.inputs[1]


def test_contractions_can_be_told_to_use_every_axis():
    args = (lambda a, b: jnp.tanh(a @ b), struct(8, 8), struct(8, 8))
    free, strict = graph_of(*args), graph_of(*args, sharded_contractions=True)
    for graph, least in ((free, 1.0), (strict, 8.0)):
        (node,) = [n for n in graph.nodes if n.kind == "op" and n.op.primitive in CONTRACTIONS]
        assert node.strategies.split(graph.conversions.mesh).min() == least


def test_equal_ops_share_their_strategies():
    graph = graph_of(lambda x: jnp.tanh(jnp.tanh(x)), struct(8, 8))
    first, second = (graph.nodes[graph.op_nodes[p]].strategies for p in ("0", "1"))
    assert first is second


def test_constants_are_replicated():
    table = np.ones((8, 8), np.float32) * 2
    graph = graph_of(lambda x: x + jnp.asarray(table), struct(8, 8))
    constants = [i for i, n in enumerate(graph.nodes) if n.name == "constant"]
    assert [specs(graph, i) for i in constants] == [["[_,_]"]]


def test_a_loop_counts_its_trips_and_ties_its_carry():
    graph = graph_of(lambda c, xs: lax.scan(lambda h, x: (jnp.tanh(h + x), h), c, xs), struct(8, 8), struct(5, 8, 8))
    ports, outs = graph.body_ports["0"]
    assert ports[0] == outs[0]  # one decision for the carry before, inside of and after the loop
    assert [n.weight for n in graph.nodes if n.name.startswith("0.0.")][:2] == [5.0, 5.0]
    stacked = [link for link in graph.links if link.shape == (5, 8, 8)]
    for link in stacked:  # the scanned dim stays whole inside
        for consumer in link.consumers:
            if consumer.path == "0":
                space = graph.conversions.space(3).specs
                assert all(space[s].dims[0] == () for s in consumer.specs)


def test_a_loops_test_is_replicated():
    graph = graph_of(lambda x: lax.while_loop(lambda s: s.sum() < 10, lambda s: s * 2, x), struct(8, 8))
    (port,) = [i for i, n in enumerate(graph.nodes) if n.name.endswith("test")]
    assert specs(graph, port) == ["[]"]


def test_branches_share_their_results():
    graph = graph_of(lambda p, x: lax.cond(p[0] > 0, jnp.sin, jnp.cos, x), struct(8), struct(8, 8))
    ((_, (out,)),) = graph.body_ports.values()
    readers = [c for link in graph.links for c in link.consumers if c.node == out]
    assert len(readers) == 2
    assert {n.weight for n in graph.nodes if n.kind == "op" and "." in n.name} == {0.5}


def test_a_carry_that_becomes_a_literal_is_no_partial_sum():
    def fn(a, b):
        total = (a @ b).sum()
        kept, reset = lax.scan(lambda s, r: ((s[0] * 2, 1.0), s[1] * r), (total, total), a)[0]
        return kept + reset

    graph = graph_of(fn, struct(8, 8), struct(8, 8))
    ((ports, _),) = graph.body_ports.values()
    scalars = [p for p in ports if graph.nodes[p].rank == 0]
    assert ["[]+{x}" in specs(graph, p) for p in scalars] == [True, False]
