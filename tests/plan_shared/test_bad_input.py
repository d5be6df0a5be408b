"""``al.plan_shared``: bad input is named."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import MemoryBudgetError, PinError
from tests.plan_shared.graphs import (
    ONE_AXIS,
    SLOW_LINKS,
    columns,
    rows,
    shapes,
    three_graphs,
)


def with_params(*sizes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Any:
    return lambda params, x: x @ params[0], (shapes(*sizes, dtype=dtype), *shapes((8, 4096)))


NAMED = lambda params, x: x, ({"layers": [{"kernel": w} for w in shapes(*[(4, 4)] * 8)]}, *shapes((4, 4)))
SMALL = with_params((4096, 64))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"weights": {"fewer": 1}},
            al.AlpaLiteError,
            r"weights has 'fewer', which is no graph. There are 'product', 'rows'",
        ),
        ({"weights": {"prodct": 1}}, al.AlpaLiteError, r"'columns'\. Close: 'product'\. At "),
        ({"weights": {"product": 0}}, al.AlpaLiteError, r"weight of 'product' is 0. It must be a number above 0"),
        ({"weights": {"product": float("nan")}}, al.AlpaLiteError, r"weight of 'product' is nan"),
        ({"weights": {"product": 10**400}}, al.AlpaLiteError, r"weight of 'product' is 1000"),
        ({"weights": {"product": 1e-320}}, al.AlpaLiteError, r"weight of 'product' is 1e-320.* from 1e-30 to 1e\+30"),
        (
            {"weights": {"product": 1e12}},
            al.AlpaLiteError,
            r"weights of 'product' and 'rows' are 1e\+12 and 1\. They may be 1e\+09 times apart.*follow=",
        ),
        ({"weights": {"product": True}}, al.AlpaLiteError, r"weight of 'product' is True"),
        ({"weights": [1, 2]}, al.AlpaLiteError, r"weights=\[1, 2\] was given"),
        (
            {"shared": "3"},
            al.AlpaLiteError,
            r"shared='3' matches no argument leaf of 'product'.* any number\. There are '0/0', '0/1', '1'\.",
        ),
        (
            {"graphs": {"a": NAMED}, "shared": "0/layer/**"},
            al.AlpaLiteError,
            r"matches no argument leaf of 'a'.* any number\. Close: '0/layers', .*\. At ",
        ),
        (
            {"graphs": {"a": NAMED}, "shared": "params"},
            al.AlpaLiteError,
            r"There are '0/layers/0/kernel', '0/layers/1/kernel', '0/layers/2/kernel' and 6 more\.",
        ),
        ({"shared": 0}, al.AlpaLiteError, r"shared=0 was given"),
        (
            {"shared": {"product": "0"}},
            al.AlpaLiteError,
            r"shared is of the graphs 'product'. There are 'product', 'rows', 'columns'",
        ),
        ({"shared": {}}, al.AlpaLiteError, r"shared is of the graphs \(none\)\. There are 'product'"),
        ({"pins": {"0/7": P("x")}}, PinError, r"the graph 'product': .*'0/7' matches no"),
        ({"pins": {"fewer": {"0/0": P("x")}}}, PinError, r"pins has 'fewer', which is no graph"),
        (
            {"follow_like": {"rows": {"0": "0"}, "row": {"0": "0"}}},
            PinError,
            r"follow_like has 'row', which is no graph\. There are 'product', .*Close: 'rows'",
        ),
        (
            {"shared": dict.fromkeys(["product", "rows", "columns", "colums"], "0")},
            al.AlpaLiteError,
            r"shared has 'colums'",
        ),
        ({"pins": P("x")}, PinError, r"pins=.* was given"),
        ({"pins": {"product": {3: P()}}}, PinError, r"pins=.* was given. For several graphs pins are a dict of path"),
        (
            {"pins": {"product": {"0/0": P("x")}, "rows": {"0/0": P(None, "x")}}},
            PinError,
            r"the pin '0/0' of 'rows' fixes the shared leaf '0/0' as \[_,x\], and that of 'product' as \[x,_\]",
        ),
        (
            {"options": al.PlanOptions(num_stages=2, num_microbatches=2)},
            al.AlpaLiteError,
            r"was given stages with several microbatches",
        ),
        ({"options": 3}, al.AlpaLiteError, r"options=3 was given"),
        (
            {"options": al.PlanOptions(memory_budget_bytes=200e6), "graphs": dict(reversed(three_graphs().items()))},
            MemoryBudgetError,
            r"^the graph 'product': no plan fits",
        ),
        ({"graphs": {}}, al.AlpaLiteError, r"was given {}. Graphs are a dict"),
        ({"graphs": {"a": rows}}, al.AlpaLiteError, r"was given <function rows .* for 'a'"),
        (
            {"graphs": {"a": SMALL, "b": with_params((4096, 128))}},
            al.AlpaLiteError,
            r"the shared leaf '0/0' is bfloat16\[4096,128\] in 'b' and bfloat16\[4096,64\] in 'a'",
        ),
        (
            {"graphs": {"a": SMALL, "b": with_params((4096, 64), dtype=jnp.float32)}},
            al.AlpaLiteError,
            r"the shared leaf '0/0' is float32\[4096,64\] in 'b' and bfloat16",
        ),
        (
            {"graphs": {"a": SMALL, "b": with_params((4096, 64), (2, 2))}},
            al.AlpaLiteError,
            r"the leaf '0/1' of 'b' is shared, and 'a' has none at '0/1'",
        ),
        (
            {"graphs": {"a": SMALL, "b": with_params((4096, 64))}, "shared": {"a": "0/*", "b": "0/0"}},
            al.AlpaLiteError,
            r"the leaf '0/0' of 'a' is shared, and 'b' has none at '0/0/0'",
        ),
        (
            {"graphs": {"a": SMALL, "b": with_params((4096, 64))}, "shared": {"a": ["0", "1"], "b": "0"}},
            al.AlpaLiteError,
            r"the leaf '1' of 'a' is shared, and 'b' has none of its own: it has 1 of the globs",
        ),
    ],
)
def test_bad_input(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"graphs": three_graphs(), "shared": "0", "options": ONE_AXIS, "cluster": SLOW_LINKS, **settings}
    with pytest.raises(error, match=message) as raised:
        al.plan_shared(given.pop("graphs"), **given)
    assert __file__ in str(raised.value)


@pytest.mark.parametrize(
    ("graph", "settings", "message"),
    [
        ((lambda p, x: x @ p, shapes((4, 4))), {}, r"the graph 'other': .*cannot be traced"),
        ((lambda p, x: x @ p, shapes((4, 4), (4, 4))), {"donate_argnums": 7}, r"the graph 'one': .*donate_argnums"),
    ],
)
def test_whatever_is_wrong_with_a_graph_names_it(graph: Any, settings: dict[str, Any], message: str) -> None:
    graphs = {"one": (lambda p, x: x @ p, shapes((4, 4), (4, 4))), "other": graph}
    with pytest.raises(al.AlpaLiteError, match=message):
        al.plan_shared(graphs, shared="0", cluster=SLOW_LINKS, **settings)


def test_graphs_of_which_one_follows() -> None:
    """Before, the message spoke of options, which are the same."""
    graphs = three_graphs()
    own = al.plan(*graphs["rows"][:1], *graphs["rows"][1], cluster=SLOW_LINKS)
    follows = al.parallelize(rows, cluster=SLOW_LINKS, follow=own)
    given = {"rows": (follows, graphs["rows"][1]), "columns": (al.parallelize(columns), graphs["columns"][1])}
    with pytest.raises(al.AlpaLiteError, match=r"different follow= \(one has none\).*Give follow= for all"):
        al.plan_shared(given, shared="0", cluster=SLOW_LINKS)
