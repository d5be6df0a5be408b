"""``al.plan_shared`` with stages: the cut and the submeshes that are best for all graphs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.api import shared_stages
from alpa_lite.planner.joint_stages import best_cut
from tests.marks import slow_but
from tests.plan_shared.stages import (
    CLUSTER,
    KERNELS,
    NARROW,
    ONE_AXIS,
    SEARCHED,
    TWO,
    WIDE,
    chain,
    shape,
)


@pytest.mark.medium
@given(st.data())
def test_the_best_cut_is_that_of_brute_force(data):
    layers, kinds = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    stages = data.draw(st.integers(1, min(4, layers)))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=kinds, max_size=kinds))
    price = st.integers(0, 9) | st.just(np.inf)
    row = st.lists(price, min_size=layers, max_size=layers)
    prices = data.draw(st.lists(row, min_size=kinds, max_size=kinds))
    pinned = data.draw(st.dictionaries(st.integers(0, layers - 1), st.integers(0, stages - 1), max_size=2))
    holds = data.draw(st.lists(st.integers(0, 9), min_size=layers, max_size=layers))
    budget = data.draw(st.sampled_from([5, 15, np.inf]))
    known = data.draw(st.lists(st.integers(0, kinds - 1), min_size=stages, max_size=stages) | st.none())
    devices = data.draw(st.integers(1, 8)) if known is None else sum(sizes[m] for m in known)

    def cost(cut: Any, on: Any) -> tuple[float, float]:
        runs = [[k for k in range(layers) if cut[k] == s] for s in range(stages)]
        if any(sum(holds[k] for k in run) > budget * sizes[m] for run, m in zip(runs, on, strict=True)):
            return np.inf, np.inf
        sums = [sum(prices[m][k] for k in run) for run, m in zip(runs, on, strict=True)]
        return max(sums), sum(sums)

    best = np.inf, np.inf
    for ends in itertools.combinations(range(1, layers), stages - 1):
        edges = (0, *ends, layers)
        cut = tuple(s for s in range(stages) for _ in range(edges[s], edges[s + 1]))
        if all(cut[layer] == stage for layer, stage in pinned.items()):
            for on in itertools.product(range(kinds), repeat=stages) if known is None else [known]:
                if sum(sizes[m] for m in on) == devices:
                    best = min(best, cost(cut, on))
    found = best_cut(
        prices, sizes, devices, pinned, num_stages=stages, submeshes=known, holds=holds, budget=budget
    )  # fmt: skip
    assert (found is None) == (best[0] == np.inf)
    if found is not None:
        cut, on = found
        assert all(cut[layer] == stage for layer, stage in pinned.items())
        assert known is None or list(on) == known
        assert sum(sizes[m] for m in on) == devices and cost(cut, on) == best


@pytest.mark.medium
def test_the_cut_is_for_all_graphs(monkeypatch):
    """The last layers are dear in one graph alone, which is called most; with equal layers stages are halves."""
    monkeypatch.setattr(shared_stages._StagedSearch, "own_cuts", lambda self: ())

    def stages(weight: float) -> list[int]:
        graphs = {"even": (chain, WIDE), "late": (dear(1024), NARROW)}
        layout = al.plan_shared(graphs, shared="0", weights={"late": weight}, cluster=CLUSTER, options=TWO)
        return [layout.parameter_layout[f"0/{i}"][0] for i in range(4)]

    assert stages(1e-3) == [0, 0, 1, 1]
    assert stages(1e3) == [0, 0, 0, 1]


def dear(rows: int) -> Any:
    """A chain whose last layer has so many times the rows of the others."""
    return lambda params, x: chain(params[3:], jnp.tile(chain(params[:3], x), (rows, 1)))


NARROWING = [shape(a, b) for a, b in itertools.pairwise((4096, 4096, 64, 64, 4096))]


CUT_OTHERWISE = {
    "by what crosses": ({"big": (chain, (NARROWING, shape(8192, 4096))), "small": (chain, (NARROWING, shape(2, 4096)))},
                        {"small": 1000.0}),
    "by a dear layer": ({"even": (chain, WIDE), "late": (dear(1024), NARROW)}, {"late": 1e3}),
    "by the other": ({"even": (chain, WIDE), "late": (dear(1024), NARROW)}, {"late": 1e-3}),
}  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("options", [TWO, pytest.param(SEARCHED, marks=pytest.mark.slow)], ids=["equal", "searched"])
@pytest.mark.parametrize("case", CUT_OTHERWISE)
def test_never_dearer_than_with_the_stages_of_one_graph(case, options):
    """With the stages and layouts of any graph's own plan as pins, all together cost as much or more."""
    graphs, weights = CUT_OTHERWISE[case]
    settings = {"shared": "0", "weights": weights, "cluster": CLUSTER}
    layout = al.plan_shared(graphs, options=options, **settings)
    assert not list(layout.faults())
    for name, graph in graphs.items():
        own = al.plan_shared({name: graph}, shared="0", cluster=CLUSTER, options=options).plans[name]
        if options is TWO:
            own = min(own, al.plan(graph[0], *graph[1], cluster=CLUSTER, options=options), key=lambda p: p.objective)
        as_own = al.plan_shared(graphs, follow=own, **settings)
        assert layout.objective <= as_own.objective * (1 + 1e-9), name
    assert all(price >= 0 for price in layout.price.values())


def floats(*sizes: int) -> jax.ShapeDtypeStruct:
    return shape(*sizes, dtype=jnp.float32)


def looked_up(p: Any, x: jax.Array) -> jax.Array:
    return x + p["emb"][(jnp.abs(x[:, 0]) * 3).astype(jnp.int32) % p["emb"].shape[0]]


def by_rows(x: jax.Array) -> jax.Array:
    return x / (1 + jnp.abs(x).sum(1, keepdims=True))


def forwards(p: Any, x: jax.Array, *names: str) -> jax.Array:
    for name in names:
        x = jnp.tanh(x @ p[name])
    return x


def tied_by(p: Any, x: jax.Array) -> Any:
    """The table is read at the beginning and at the end: on a stage that it does not lie on."""
    return {"p": {"k0": p["k0"]}, "y": forwards(p, looked_up(p, x), "k2", "k1", "k0") @ p["emb"].T}


def first_normed(p: Any, x: jax.Array) -> Any:
    x, normed = looked_up(p, x), by_rows(p["k0"])
    return {"n": normed, "y": forwards(p, x, "k2", "k1", "k0")}


def twice_normed(p: Any, x: jax.Array) -> Any:
    normed, x = by_rows(p["k1"]), forwards(p, looked_up(p, x), "k2", "k1")
    x = x / (1e-3 + jnp.abs(x).sum(-1, keepdims=True))
    return {"n": normed, "p": {"k0": p["k0"]}, "y": forwards(p, x, "k0")}


@pytest.mark.medium
def test_the_stages_of_a_plan_that_reads_a_leaf_on_two_are_looked_at():
    """Where it has the leaves where another plan has them, too, but not their readers: 14 % cheaper for all."""
    params = {name: floats(256, 256) for name in ("k0", "k1", "k2")} | {"emb": floats(384, 256)}
    graphs = {
        "first": (first_normed, (params, floats(1, 256))),
        "tied": (tied_by, (params, floats(256, 256))),
        "twice": (twice_normed, (params, floats(64, 256))),
    }
    settings = {"cluster": al.Cluster.parse("2x4:h100-sxm"), "options": TWO}
    layout = al.plan_shared(graphs, shared="0", **settings)
    own = al.plan(tied_by, *graphs["tied"][1], **settings)
    as_own = al.plan_shared(graphs, shared="0", follow=own, follow_like={"0": "0"}, **settings)
    assert layout.objective <= as_own.objective * (1 + 1e-9)


@pytest.mark.medium
def test_following_a_layout_is_not_cheaper_than_the_layout():
    """It was found with a parameter that one graph reads on another stage."""
    params = {"k0": floats(4, 4), "k1": floats(4, 4), "b0": floats(4), "emb": floats(8, 4)}

    def ratios(p: Any, x: jax.Array) -> jax.Array:
        x = forwards(p, looked_up(p, x), "k1", "k0")
        return x / x.sum(-1, keepdims=True) + p["b0"]

    def attended(p: Any, x: jax.Array) -> Any:
        x, normed = looked_up(p, x), by_rows(p["k1"])
        x = forwards(p, x, "k1", "k0") + p["b0"]
        return x + jax.nn.softmax(x @ p["emb"].T) @ p["emb"], normed

    graphs = {"ratios": (ratios, (params, floats(8, 4))), "attended": (attended, (params, floats(1, 4)))}
    settings = {"shared": "0", "cluster": al.Cluster.parse("1x2:cpu"), "weights": {"attended": 1e3}}
    layout = al.plan_shared(graphs, options=TWO, **settings)
    again = al.plan_shared(graphs, options=TWO, follow=layout, **settings)
    assert layout.parameter_layout == again.parameter_layout
    assert layout.objective <= again.objective * (1 + 1e-9)


def searched(graphs: dict[str, Any], budget: float | None = None, **weights: float) -> list[tuple[Any, int]]:
    """Of three stages the submesh and the number of layers."""
    options = al.PlanOptions(num_stages=3, submeshes="auto", memory_budget_bytes=budget)
    layout = al.plan_shared(graphs, shared="0", weights=weights, cluster=CLUSTER, options=options)
    assert not list(layout.faults()) and all(price >= 0 for price in layout.price.values())
    stages = [stage for stage, _ in layout.parameter_layout.values()]
    return [(s.submesh, stages.count(n)) for n, s in enumerate(next(iter(layout.plans.values())).stages)]


@pytest.mark.medium
def test_submeshes_are_searched_for_all_graphs(monkeypatch):
    monkeypatch.setattr(shared_stages._StagedSearch, "own_cuts", lambda self: ())
    graphs = {"even": (chain, WIDE), "late": (dear(2**16), NARROW)}
    assert sorted(searched(graphs, late=1e-3)) == [((1, 1), 1), ((1, 1), 1), ((1, 2), 2)]
    assert searched(graphs, late=1e3) == [((1, 1), 1), ((1, 1), 2), ((1, 2), 1)]


@pytest.mark.medium
def test_searched_submeshes_have_room_for_what_is_shared():
    """A table of 64 MiB that costs little, and a dear layer of 8 MiB: within 40 MiB the table has the two devices."""

    def looked_up(params: Any, x: jax.Array) -> jax.Array:
        x = al.layer_boundary(params[0][x])
        x = al.layer_boundary(jnp.tanh(x @ params[1]))
        return jnp.tanh(jnp.tile(x, (1024, 1)) @ params[2])

    params = shape(2**14, 2048), shape(2048, 2048), shape(2048, 2048)
    graphs = {"looked_up": (looked_up, (params, shape(2, dtype=jnp.int32)))}
    assert [submesh for submesh, _ in searched(graphs)] == [(1, 1), (1, 1), (1, 2)]
    assert [submesh for submesh, _ in searched(graphs, 40 * 2**20)] == [(1, 2), (1, 1), (1, 1)]


@pytest.mark.medium
def test_stacked_layers_scanned_and_written_out():
    """One graph scans over the layers, the other takes rows: the same rows lie on each stage."""

    def scanned(params: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, params)[0]

    params = shape(6, 256, 256)
    graphs = {
        "scanned": (scanned, (params, shape(512, 256))),
        "taken": (lambda p, x: chain(list(p), x), (params, shape(2, 256))),
    }
    for weights in ({"scanned": 1e3}, {"taken": 1e3}):  # either may lead
        layout = al.plan_shared(graphs, shared="0", weights=weights, cluster=CLUSTER, options=TWO)
        rows = {path: stage for path, (stage, _) in layout.parameter_layout.items()}
        assert sum(stage == 0 for stage in rows.values()) and set(rows.values()) == {0, 1}
        assert all(layout.shared[name] == tuple(rows) for name in graphs)


ROW_READS: dict[str, Any] = {
    "index": lambda stack, i: stack[i],
    "take": lambda stack, i: jnp.take(stack, i, axis=0),
    "dynamic_index_in_dim": lambda stack, i: jax.lax.dynamic_index_in_dim(stack, i, 0, keepdims=False),
    "an array's number": lambda stack, i: stack[jnp.int32(i)],
    "split": lambda stack, i: jnp.split(stack, len(stack))[i].squeeze(0),
}


def stacked_layout(read: Any) -> al.SharedLayout:
    """Of a prompt that scans over layers, and of a token for which they are written out, each on its row of both stacks."""

    def layer(x: Any, row: Any) -> Any:
        kernel, old = row
        new = old + x
        return jnp.tanh(new @ kernel), new

    def prompt(params: Any, cache: Any, x: Any) -> Any:
        return jax.lax.scan(layer, x, (params, cache))

    def token(params: Any, cache: Any, x: Any) -> Any:
        rows = []
        for i in range(4):
            x, new = layer(x, (read(params, i), read(cache, i)))
            rows.append(new)
        return x, jnp.stack(rows)

    state = shape(4, 256, 256), shape(4, 8, 256)
    graphs = {name: (f, (*state, shape(8, 256))) for name, f in (("prompt", prompt), ("token", token))}
    return al.plan_shared(graphs, shared=("0", "1"), cluster=CLUSTER, options=TWO, donate_argnums=1)


@pytest.mark.medium
def test_a_row_is_cut_alike_however_it_is_read():
    layouts = {name: stacked_layout(read) for name, read in ROW_READS.items()}
    want = layouts.pop("index")
    assert {stage for stage, _ in want.parameter_layout.values()} == {0, 1}
    for found in layouts.values():
        assert found.parameter_layout == want.parameter_layout
        assert found.costs == pytest.approx(want.costs, rel=1e-9)


@pytest.mark.medium
@pytest.mark.parametrize("weight", [1e-3, 1e3])
def test_leaves_that_a_graph_does_not_read(weight):
    """The other graph tells no layers apart by them, whichever leads."""
    for unread in (slice(1, None), slice(2, None), slice(0, None, 2)):
        part = lambda params, x, unread=unread: chain(params[unread], x)  # noqa: E731
        graphs = {"all": (chain, WIDE), "part": (part, NARROW)}
        layout = al.plan_shared(graphs, shared="0", weights={"part": weight}, cluster=CLUSTER, options=TWO)
        assert not list(layout.faults())
        stages = [stage for stage, _ in layout.parameter_layout.values()]
        assert stages == sorted(stages) and set(stages) == {0, 1}


@pytest.mark.medium
@pytest.mark.parametrize("weight", [1e-3, 1e3])
def test_a_stack_that_a_graph_does_not_read_has_the_rows_of_the_others(weight):
    def with_bias(params: Any, x: Any) -> Any:
        kernels, bias = params
        for kernel, row in zip(kernels, bias, strict=True):
            x = jnp.tanh(x @ kernel + row)
        return x

    args = [shape(256, 256)] * 4, shape(4, 256)
    graphs = {"read": (with_bias, (args, WIDE[1])), "unread": (lambda p, x: chain(p[0], x), (args, NARROW[1]))}
    layout = al.plan_shared(graphs, shared="0", weights={"unread": weight}, cluster=CLUSTER, options=TWO)
    rows = {path: stage for path, (stage, _) in layout.parameter_layout.items() if path.startswith("0/1")}
    assert rows == {f"0/1[{i}:{i + 1}]": stage for i, stage in enumerate((0, 0, 1, 1))}
    for name, (fn, shapes) in graphs.items():
        assert [p.path for p in layout.plans[name].inputs if p.path in rows] == list(rows)
        layout.plans[name].bind(fn, *shapes)  # is checked to be of this plan, parts and all


def updated(params: Any, x: Any) -> Any:
    """Reads every matrix twice."""
    return [kernel * 2 for kernel in params], chain(params, x)


def tied(params: Any, x: Any) -> Any:
    return chain(params["kernels"], x @ params["table"]) @ params["table"].T


UPDATED = [shape(64, 1024), shape(1024, 256)]


TIED = {"table": shape(64, 256), "kernels": KERNELS}


READ_TWICE = {
    "alone": ({"one": (updated, (UPDATED, shape(2, 64)))}, "0"),
    "leads": ({"one": (updated, (UPDATED, shape(64, 64))), "other": (chain, (UPDATED, shape(2, 64)))}, "0"),
    "follows": ({"one": (updated, (UPDATED, shape(2, 64))), "other": (chain, (UPDATED, shape(64, 64)))}, "0"),
    "both": ({"one": (updated, (UPDATED, shape(2, 64))), "other": (updated, (UPDATED, shape(64, 64)))}, "0"),
    "table": ({"one": (tied, (TIED, shape(64, 64)))}, "0/table"),
    "tables": ({"one": (tied, (TIED, shape(64, 64))), "other": (tied, (TIED, shape(2, 64)))}, "0/table"),
}


@pytest.mark.medium
@pytest.mark.parametrize("options", slow_but([TWO], [TWO, SEARCHED]), ids=["equal", "searched"])
@pytest.mark.parametrize("case", READ_TWICE)
def test_leaves_that_two_layers_read(case, options):
    """They tell no layers apart, and layers are needed all the same."""
    graphs, shared = READ_TWICE[case]
    layout = al.plan_shared(graphs, shared=shared, cluster=CLUSTER, options=options)
    assert not list(layout.faults())
    assert all(
        len(plan.stages) == 2 and all(stage.decisions for stage in plan.stages) for plan in layout.plans.values()
    )
    assert all(price >= 0 for price in layout.price.values())


def test_results_of_parameters_alone():
    """Nobody reads them, and what they are made of comes first."""
    graph = lambda p, x: (jnp.tanh(p[0] @ p[1]), chain(p, x)[:, :8])  # noqa: E731
    layout = al.plan_shared({"one": (graph, WIDE)}, shared="0", cluster=CLUSTER, options=TWO)
    assert {stage for stage, _ in layout.parameter_layout.values()} == {0, 1}


def reads_two_layers(params: Any, x: Any) -> Any:
    return al.layer_boundary(x @ params[0] + params[1].sum()) @ params[1]


def reads_the_last(params: Any, x: Any) -> Any:
    return jnp.tanh(al.layer_boundary(x @ params[0]) @ params[1])


@pytest.mark.medium
@pytest.mark.parametrize(
    "options", [TWO, SEARCHED, replace(TWO, stage_layers=(1, 1))], ids=["equal", "searched", "given"]
)
def test_leaves_that_one_graph_reads_earlier_whatever_the_order(options):
    """They lie as suits the graph that counts, or it would have to be sent what it reads last."""
    args = (shape(1024, 2048), shape(2048, 512)), shape(4, 1024)
    graphs = {"rare": (reads_two_layers, args), "often": (reads_the_last, args)}
    for ordered in (graphs, dict(reversed(graphs.items()))):
        layout = al.plan_shared(ordered, shared="0", weights={"often": 1e3}, cluster=CLUSTER, options=options)
        assert [stage for stage, _ in layout.parameter_layout.values()] == [0, 1]
        assert layout.price["often"] < 1e-9


@pytest.mark.medium
@pytest.mark.parametrize("shared", ["0", "0/l"])
def test_followed_leaves_stay_on_their_stages(shared):
    """Also those that no graph reads, reads in an earlier layer, or shares."""

    def chained(params: Any, x: Any) -> Any:
        for kernel in params["l"]:
            x = jnp.tanh(x @ kernel)
        return x

    params = {"l": [shape(16, 32), shape(32, 32), shape(32, 32), shape(32, 8)], "aux": shape(8, 8)}
    layout = {f"0/l/{i}": (i // 2, P(None, None)) for i in range(4)} | {"0/aux": (1, P(None, None))}
    graphs = {name: (chained, (params, shape(rows, 16))) for name, rows in (("big", 64), ("one", 2))}
    found = al.plan_shared(graphs, shared=shared, cluster=CLUSTER, options=ONE_AXIS, follow=layout)
    for plan in found.plans.values():
        assert {leaf.path: leaf.stage for leaf in plan.inputs if leaf.path in layout} == {
            path: stage for path, (stage, _) in layout.items()
        }


@pytest.mark.medium
@pytest.mark.parametrize("submeshes", [None, "auto"])
def test_layers_without_ops_go_with_others(submeshes):
    """A boundary after the last layer, or two in a row, mark layers that compute nothing."""

    def marked(params, x):
        for w in params:
            x = al.layer_boundary(al.layer_boundary(jnp.tanh(x @ w)))
        return x

    params = [np.full((16, 16), 0.1 * k, np.float32) for k in range(1, 5)]
    x = np.ones((8, 16), np.float32)
    options = al.PlanOptions(num_stages=2, submeshes=submeshes)
    layout = al.plan_shared(
        {"a": (marked, (params, x))}, shared="0", cluster=al.Cluster.parse("1x8:cpu"), options=options
    )
    assert len(layout.plans["a"].stages) == 2
    found = al.parallelize(marked, plan=layout.plans["a"])(params, x)
    np.testing.assert_allclose(found, marked(params, x), rtol=1e-5)
