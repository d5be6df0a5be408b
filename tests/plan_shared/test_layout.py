"""What ``al.plan_shared`` returns: plans that agree and run on one copy, text and files."""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import PlanFileError
from tests.plan_shared.graphs import (
    ONE_AXIS,
    SLOW_LINKS,
    cost_with,
    keep,
    rows,
    shapes,
    three_graphs,
)


def test_plans_are_ordinary_agree_and_are_the_same_again() -> None:
    graphs = three_graphs()
    layout, again = (al.plan_shared(graphs, shared="0/*", cluster=SLOW_LINKS) for _ in range(2))
    assert list(layout.plans) == list(graphs)
    assert (layout, str(layout)) == (again, str(again))
    for plan in layout.plans.values():
        assert plan.mesh == layout.mesh
        for path, (stage, spec) in layout.parameter_layout.items():
            assert (stage, plan.specs_by_path[path]) == (0, spec)
    assert list(layout.parameter_layout) == ["0/0", "0/1"]


@pytest.mark.parametrize(
    ("pins", "shown"),
    [
        ({}, None),
        ({"0/w": P(None, "x")}, "0/w"),
        ({"b": {"0/w": P(None, "x")}}, "the shared pin '0/w' of the graph 'b'"),
        ({"0/w": P("x")}, "[x,_] when padded"),
    ],
)
def test_text_says_which_leaves_are_pinned(pins: dict[str, Any], shown: str | None) -> None:
    """Also that one of 10 rows over 4 devices is, which lies whole at the border; not that plans are held in the layout."""

    def times(params: Any, x: Any) -> Any:
        return x @ params["w"] + params["b"]

    params = dict(zip(("w", "b"), shapes((10, 64), (64,), dtype=jnp.float32), strict=True))
    graphs = {name: (times, (params, *shapes((size, 10), dtype=jnp.float32))) for name, size in (("a", 8), ("b", 4096))}
    layout = al.plan_shared(graphs, shared="0", cluster=al.Cluster.parse("1x4:h100-sxm"), pins=pins)
    table = str(layout).partition("Shared leaves\n")[2]
    rows = {line.split()[0]: line for line in table.splitlines()}
    assert ("pin" in rows["leaf"].split()) == (shown is not None)
    assert rows["0/b"].endswith("]")
    assert rows["0/w"].endswith(shown or "]")
    of_plan = next(line for line in str(layout.plans["a"]).splitlines() if line.split()[:1] == ["0/w"])
    assert shown is None or of_plan.endswith(shown)


def test_bound_of_an_optimum_is_no_larger_than_the_sum_of_three_costs(tmp_path: Path) -> None:
    """Sums in another order differ in their last digit, which made the file one that ``load`` refuses."""
    float32 = {"dtype": jnp.float32}
    params, gradient = (
        shapes((64, 32), (32, 64), **float32),
        jax.grad(lambda p, x: ((jnp.tanh(x @ p[0]) @ p[1]) ** 2).sum()),
    )
    graphs = {
        name: (fn, (params, *shapes((count, 64), **float32)))
        for name, fn, count in (("gradient", gradient, 4), ("kept", keep, 1024), ("rows", rows, 8192))
    }
    layout = al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS, options=ONE_AXIS)
    assert not list(layout.faults())
    layout.save(tmp_path / "layout.json")
    assert al.SharedLayout.load(tmp_path / "layout.json").lower_bound == layout.lower_bound


def test_saved_and_loaded(tmp_path: Path) -> None:
    graphs = three_graphs()
    layout = al.plan_shared(graphs, shared="0", weights={"product": 3}, cluster=SLOW_LINKS)
    layout.save(tmp_path / "layout.json")
    loaded = al.SharedLayout.load(tmp_path / "layout.json")
    assert loaded == layout
    assert str(loaded) == str(layout)
    fn, args = graphs["product"]
    assert loaded.plans["product"].bind(fn, *args).in_specs == layout.plans["product"].in_specs
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "layout.json").read_bytes()


def test_a_plan_is_no_layout(tmp_path: Path) -> None:
    fn, args = three_graphs()["product"]
    al.plan(fn, *args, cluster=SLOW_LINKS).save(tmp_path / "plan.json")
    with pytest.raises(PlanFileError, match=r"plan\.json' is a plan, of one function.*test_layout.*al\.load_plan"):
        al.SharedLayout.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is no layout file"),
        (lambda text: text.replace('"format_version": 1', '"format_version": 9', 1), "format version 9"),
        (lambda text: text.replace('"format_version": 1', '"format_version": 9, "more": 0', 1), "format version 9"),
        (lambda text: text.replace('"alpa_lite shared layout"', '"else"', 1), "no layout file: its format is 'else'"),
        (lambda text: text.replace('"0/0"', '"0/7"', 1), "inconsistent: .*has not all the leaves"),
        (lambda text: text.replace('"product"', '"other"', 1), "inconsistent: .*is of the graphs"),
        (lambda text: text.replace('"product":3.0', '"product":-3.0', 1), "the weight of 'product' is -3"),
        (
            lambda text: re.sub(r'"own": \{"product":[^,]*', '"own": {"product":9', text),
            "own optimum of 'product' is 9",
        ),
        (
            lambda text: re.sub(r'"lower_bound": [^,]*', '"lower_bound": 99', text, count=1),
            "lower bound 99.0 is below 0 or above",
        ),
        (lambda text: text.replace('"0/1"', '"0/0"', 1), "shares no leaf, or one twice: 0/0, 0/0"),
        (lambda text: text.replace("1x4:h100-sxm", "2x2:h100-sxm", 1), "plan 'product'.* was changed after"),
    ],
)
def test_damaged_file(tmp_path: Path, change: Any, message: str) -> None:
    file = tmp_path / "layout.json"
    al.plan_shared(
        three_graphs(), shared="0", weights={"product": 3}, cluster=SLOW_LINKS, options=ONE_AXIS, donate_argnums=0
    ).save(file)
    changed = change(file.read_text())
    assert changed != file.read_text()
    file.write_text(changed)
    with pytest.raises(PlanFileError, match=message):
        al.SharedLayout.load(file)


def test_a_bound_below_0_and_plans_that_count_otherwise_are_faults() -> None:
    layout = al.plan_shared(three_graphs(), shared="0", cluster=SLOW_LINKS, options=ONE_AXIS)
    assert list(replace(layout, lower_bound=-5.0).faults()) == [
        f"the lower bound -5.0 is below 0 or above what the layout costs, {layout.objective}"
    ]
    other = dict(layout.plans) | {"rows": replace(layout.plans["rows"], costs="alpa", unit="bytes")}
    assert "the plans count costs in different ways: alpa in bytes, roofline in s" in list(
        replace(layout, plans=other).faults()
    )
    rows = layout.plans["rows"]
    other["rows"] = replace(rows, identity=replace(rows.identity, cluster="2x2:h100-sxm"))
    assert "the plan of 'rows' is for 2x2:h100-sxm, that of 'product' for 1x4:h100-sxm" in list(
        replace(layout, plans=other).faults()
    )


def test_text_shows_the_price_of_each_graph(golden: Any) -> None:
    """Its numbers are those of plans made with ``al.plan``."""
    graphs, weights = three_graphs(), {"product": 5.0, "rows": 9.0, "columns": 400.0}
    layout = al.plan_shared(graphs, shared="0", weights=weights, cluster=SLOW_LINKS, options=ONE_AXIS, donate_argnums=0)
    golden("layout_text", str(layout))
    costs = cost_with(graphs, [spec for _, spec in layout.parameter_layout.values()], ONE_AXIS)
    assert layout.costs == pytest.approx(costs)
    for name, (fn, args) in graphs.items():
        own = al.plan(fn, *args, cluster=SLOW_LINKS, options=ONE_AXIS, donate_argnums=0).objective
        assert layout.own[name] == pytest.approx(own)
        assert layout.price[name] == pytest.approx(costs[name] / own - 1)
    assert len({f"{price:.4f}" for price in layout.price.values()}) == 3


def test_leaves_used_often_of_several_types_and_uneven() -> None:
    """A tied embedding, a dim of 10 that 4 devices cannot split, and int8 beside float32."""

    def tied(params: Any, tokens: jax.Array) -> jax.Array:
        hidden = params["embed"][tokens] @ params["narrow"] * params["scale"].astype(jnp.float32)
        return hidden @ params["narrow"].T @ params["embed"].T

    params = {
        "embed": jax.ShapeDtypeStruct((4096, 512), jnp.float32),
        "narrow": jax.ShapeDtypeStruct((512, 10), jnp.float32),
        "scale": jax.ShapeDtypeStruct((10,), jnp.int8),
    }
    graphs = {f"b{n}": (tied, (params, jax.ShapeDtypeStruct((n,), jnp.int32))) for n in (4, 4096)}
    layout = al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS)
    assert set(layout.parameter_layout) == {"0/embed", "0/narrow", "0/scale"}
    assert not list(layout.faults())


def test_padded_graph_shares_too() -> None:
    """Ten rows of work pay for padding inside one graph; its shared leaves lie as in the other."""
    params = shapes((8192, 8192))
    graphs = {
        "uneven": (lambda params, x: jax.nn.relu(x @ params[0]) @ params[0], (params, *shapes((4097, 8192)))),
        "even": (lambda params, x: x @ params[0], (params, *shapes((4096, 8192)))),
    }
    layout = al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS, options=ONE_AXIS, donate_argnums=0)
    assert layout.plans["uneven"].paddings
    assert layout.plans["uneven"].inputs[0].spec == layout.plans["even"].inputs[0].spec


def test_donated_state_is_one_leaf() -> None:
    """What is donated and given back lies in one place before and after, in all graphs."""

    def write(params: Any, cache: jax.Array, x: jax.Array) -> Any:
        return x @ params[0], jax.lax.dynamic_update_slice(cache, x @ params[0], (0, 0))

    def read(params: Any, cache: jax.Array) -> Any:
        return (cache @ params[0]).sum(), cache * 2

    params, cache_ = shapes((1024, 1024)), jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
    graphs = {"write": (write, (params, cache_, *shapes((64, 1024)))), "read": (read, (params, cache_))}
    layout = al.plan_shared(graphs, shared=("0", "1"), cluster=SLOW_LINKS, donate_argnums=1)
    assert list(layout.parameter_layout) == ["0/0", "1"]
    leaves = [leaf for plan in layout.plans.values() for leaf in (*plan.inputs, *plan.outputs)]
    specs = {leaf.spec for leaf in leaves if leaf.path in ("1", "out/1")}
    assert len(specs) == 1


def test_other_arguments_in_each_graph() -> None:
    params = shapes((512, 512))
    graphs = {
        "first": (lambda params, x: x @ params[0], (params, *shapes((64, 512)))),
        "last": (lambda x, state: x @ state["params"][0], (*shapes((64, 512)), {"params": params})),
    }
    layout = al.plan_shared(graphs, shared={"first": "0", "last": "1/params"}, cluster=SLOW_LINKS)
    assert layout.shared == {"first": ("0/0",), "last": ("1/params/0",)}
    assert layout.plans["first"].specs_by_path["0/0"] == layout.plans["last"].specs_by_path["1/params/0"]


@pytest.mark.medium
def test_buckets_run_on_one_copy_of_the_parameters() -> None:
    """Acceptance 1.3: buckets 1, 128, 512, 2048 report equal parameter shardings, hold 1x bytes, move nothing, and are right."""

    def model(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens]
        scores = jax.nn.softmax(jnp.where(jnp.tri(len(tokens), dtype=bool), x @ params["qk"] @ x.T, -1e9))
        return jax.nn.relu(scores @ x @ params["up"]) @ params["down"]

    others = {id(x): x for x in jax.live_arrays()}  # of other tests
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = {"embed": (256, 64), "qk": (64, 64), "up": (64, 256), "down": (256, 64)}
    params = {name: jax.random.normal(key, sizes[name]) / 16 for name, key in zip(sizes, keys, strict=True)}
    buckets = 1, 128, 512, 2048
    graphs = {f"b{n}": (model, (params, jax.ShapeDtypeStruct((n,), jnp.int32))) for n in buckets}
    layout = al.plan_shared(
        graphs, shared="0", cluster=al.Cluster.parse("1x8:cpu"), pins={"0/up": P(None, "x"), "0/down": P("x")}
    )
    first = layout.plans["b1"].in_specs[0]
    assert all(plan.in_specs[0] == first for plan in layout.plans.values())
    steps = {name: al.parallelize(fn, plan=layout.plans[name]) for name, (fn, _) in graphs.items()}
    mesh = jax.make_mesh(layout.mesh.shape, layout.mesh.axis_names)
    put = {name: jax.device_put(x, NamedSharding(mesh, first[name])) for name, x in params.items()}
    once = sum(device_bytes(x) for x in put.values())
    places = {name: pointers(x) for name, x in put.items()}
    for n in (*buckets, *reversed(buckets)):
        tokens = jax.random.randint(jax.random.key(n), (n,), 0, 256)
        spec = layout.plans[f"b{n}"].in_specs[1]
        lying = jax.device_put(tokens, NamedSharding(mesh, spec))
        steps[f"b{n}"].compile(put, lying)
        with jax.transfer_guard("disallow_explicit"):  # raises if as much as one byte of an argument has to move
            out = steps[f"b{n}"](put, lying)
        np.testing.assert_allclose(out, model(params, tokens), rtol=1e-4, atol=1e-5)
    assert {name: pointers(x) for name, x in put.items()} == places
    gc.collect()
    sizes_of = {x.shape for x in put.values()}
    made = [x for x in jax.live_arrays() if id(x) not in others]
    held = [x for x in made if x.shape in sizes_of and len(x.devices()) == mesh.size]
    assert sum(map(device_bytes, held)) == once


def device_bytes(x: jax.Array) -> int:
    """On all devices together."""
    return len(x.devices()) * int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize


def pointers(x: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


def test_what_is_being_planned_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    options = al.PlanOptions(mesh_shape=(4,), axis_names=("x",), verbose=True)
    al.plan_shared(three_graphs(), shared="0", cluster=al.Cluster.parse("1x4:h100-sxm"), options=options)
    lines = capsys.readouterr().err.splitlines()
    for name in three_graphs():
        assert f"alpa_lite: planning the graph {name!r} alone" in lines
    assert any(line.startswith("alpa_lite: planning one layout of all ") for line in lines)
