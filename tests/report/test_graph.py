"""The program as table and Graphviz: grouping of ops, weights, control flow, quoting."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al


def tensor(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_without_scopes_a_line_of_code_is_a_step():
    def fn(params: Any, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ params["w"] + params["b"])
        return h * 2

    rows = al.graph(fn, {"w": tensor(4, 8), "b": tensor(8)}, tensor(2, 4)).rows
    assert [(r.op, r.name) for r in rows] == [
        ("argument", "1"),
        ("step", "dot_general"),
        ("weight", "0/w"),
        ("weight", "0/b"),
        ("step", "mul"),
        ("output", "out"),
    ]
    assert rows[1].target.split() == ["dot_general", "broadcast_in_dim", "add", "tanh"]
    assert rows[1].shape == (2, 8)


def test_a_weight_stands_once_and_every_reader_has_an_edge():
    def fn(table: jax.Array, x: jax.Array) -> jax.Array:
        with jax.named_scope("in"):
            h = x @ table
        with jax.named_scope("back"):
            return h @ table.T

    graph = al.graph(fn, tensor(4, 8), tensor(2, 4))
    names = [r.name for r in graph.rows]
    assert names == ["1", "in", "0", "back", "out"]
    assert {(names[e.source], names[e.target]) for e in graph.edges if names[e.source] == "0"} == {
        ("0", "in"),
        ("0", "back"),
    }


def test_control_flow_is_one_step():
    def fn(stack: jax.Array, x: jax.Array) -> jax.Array:
        with jax.named_scope("layers"):
            return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, stack)[0]

    rows = al.graph(fn, tensor(3, 4, 4), tensor(2, 4)).rows
    step = next(r for r in rows if r.op == "step")
    assert (step.name, step.target) == ("layers", "scan")


def test_a_result_that_is_an_argument_has_an_edge():
    graph = al.graph(lambda x: {"same": x, "new": x + 1}, tensor(4))
    names = [r.name for r in graph.rows]
    assert (names.index("0"), names.index("out/same")) in {(e.source, e.target) for e in graph.edges}


def test_names_are_quoted():
    dot = al.graph(lambda p: p['a"b'] + 1, {'a"b': tensor(4)}).dot()
    assert '\\"' in dot
    assert dot.replace('\\"', "").count('"') % 2 == 0


@pytest.mark.parametrize("planned", [False, True])
def test_edges_carry_types_or_layouts(planned):
    def fn(x: jax.Array) -> jax.Array:
        return jnp.tanh(x)

    plan = al.plan(fn, tensor(8, 4), cluster=al.Cluster.parse("1x2:cpu")) if planned else None
    labels = [edge.label for edge in al.graph(fn, tensor(8, 4), plan=plan).edges]
    assert len(labels) == 2
    assert all(("[" in text and "float32" not in text) if planned else text == "float32[8,4]" for text in labels)
