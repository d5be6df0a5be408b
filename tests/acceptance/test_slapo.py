"""awslabs/slapo 96: the rows of its table, each a test of that name; ``docs/conventions.md`` lists them."""

from __future__ import annotations

import itertools
import re
import time
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.plan.cost_table import CostTable
from benchmarks import encoders
from tests.acceptance.models import (
    bert_layer,
    chain,
    gpt_layer,
    layer_args,
    linear_shapes,
    mlp,
    mlp_args,
    random_like,
    tensor,
)

RR, RS, SR = "[_,_,_]", "[_,_,x]", "[_,x,_]"
WEIGHTS = {"RRxRS": P(None, "x"), "RSxSR": P("x", None), "SRxRR": P()}  # the weight's layout, per way of a Linear
# Ways of fc1 and fc2, then: into fc1, fc1 itself, gelu's edge, fc2 itself, out, total; as in the pull request.
ASSIGNMENTS = [
    ("SRxRR", "SRxRR", 0, 0, 0, 0, 131072, 131072),
    ("RRxRS", "SRxRR", 0, 0, 458752, 0, 131072, 589824),
    ("RRxRS", "RRxRS", 0, 0, 524288, 0, 131072, 655360),
    ("SRxRR", "RRxRS", 0, 0, 524288, 0, 131072, 655360),
    ("RRxRS", "RSxSR", 0, 0, 0, 1048576, 0, 1048576),
    ("SRxRR", "RSxSR", 0, 0, 458752, 1048576, 0, 1507328),
    ("RSxSR", "RRxRS", 0, 4194304, 0, 0, 131072, 4325376),
    ("RSxSR", "SRxRR", 0, 4194304, 0, 0, 131072, 4325376),
    ("RSxSR", "RSxSR", 0, 4194304, 0, 1048576, 0, 5242880),
]
IN_THE_PR = [0, 1, 2, 4, 5]  # the five tables that it prints
LAYOUTS = {"RRxRS": (RR, RS), "RSxSR": (RS, RR), "SRxRR": (SR, SR)}  # of a Linear's input and output


def plan_of(fn: Any, args: Any, costs: str, num_devices: int = 8, **options: Any) -> al.Plan:
    pins = options.pop("pins", None)
    options = al.PlanOptions(costs=costs, **options)
    return al.plan(fn, *args, cluster=al.Cluster.parse(f"1x{num_devices}:cpu"), pins=pins, options=options)


def hand_scheme(fc1: str, fc2: str, costs: str = "slapo-2023-05") -> al.Plan:
    """The plan in which the two Linears work in the given ways; the rest is the planner's."""
    pins = {"0/fc1/weight": WEIGHTS[fc1], "0/fc2/weight": WEIGHTS[fc2]}
    return plan_of(mlp, mlp_args(), costs, pins=pins)


def cells(table: CostTable) -> tuple[float, ...]:
    """The published columns: conversions before fc1, up to fc2 and after it, and the two Linears themselves."""
    first, second = (int(row.path) for row in table.rows if row.name == "dot_general")
    before = between = after = 0.0
    for row in table.rows:
        if row.kind != "conversion":
            continue
        place = int(row.path) if row.path.isdigit() else second + 1
        if place <= first:
            before += row.cost
        elif place <= second:
            between += row.cost
        else:
            after += row.cost
    ops = [row.cost for row in table.rows if row.name == "dot_general"]
    return before, ops[0], between, ops[1], after, table.total


def test_graph_table_before_solving():
    """x; fc1 with weight and bias; gelu; fc2 with weight and bias; output: nine rows."""
    graph = al.graph(mlp, *mlp_args())
    assert [(row.name, row.op, row.shape) for row in graph.rows] == [
        ("1", "argument", (8, 1024, 1024)),
        ("fc1", "step", (8, 1024, 4096)),
        ("0/fc1/weight", "weight", (1024, 4096)),
        ("0/fc1/bias", "weight", (4096,)),
        ("gelu", "step", (8, 1024, 4096)),
        ("fc2", "step", (8, 1024, 1024)),
        ("0/fc2/weight", "weight", (4096, 1024)),
        ("0/fc2/bias", "weight", (1024,)),
        ("out", "output", (8, 1024, 1024)),
    ]
    lines = str(graph).splitlines()
    assert lines[0].split() == ["name", "op", "target", "shape", "dtype"]
    assert len(lines) == 1 + 9
    assert [line.startswith("  ") for line in lines[1:]] == [row.op == "weight" for row in graph.rows]
    assert all(line.endswith("float32") for line in lines[1:])
    assert "dot_general" in lines[2]


@pytest.mark.parametrize(("fc1", "fc2", "into", "op1", "edge", "op2", "out", "total"), ASSIGNMENTS)
def test_named_cost_conventions_nine_totals(fc1, fc2, into, op1, edge, op2, out, total):
    plan = hand_scheme(fc1, fc2)
    assert (plan.objective, plan.lower_bound, plan.gap) == (total, total, 0)
    assert plan.unit == "elements"


@pytest.mark.parametrize("name", ["slapo-2023-05", "slapo-head", "ring", "hidet"])
def test_named_cost_conventions_are_selectable(name):
    plan = plan_of(mlp, mlp_args(seq_len=64, width=64), name)
    assert (plan.costs, plan.unit) == (name, "elements" if name.startswith("slapo") else "bytes")


def test_named_cost_conventions_measured_asks_for_measurements():
    with pytest.raises(al.AlpaLiteError, match=r"costs='measured'.*no measurements.*calibrate=True"):
        plan_of(mlp, mlp_args(), "measured")


@pytest.mark.parametrize("scheme", [ASSIGNMENTS[i] for i in IN_THE_PR])
def test_cost_table_per_scheme_cell_by_cell(scheme):
    fc1, fc2, *numbers = scheme
    plan = hand_scheme(fc1, fc2)
    table = plan.cost_table()
    assert cells(table) == tuple(map(float, numbers))
    assert table.total == plan.objective == sum(row.cost for row in table.rows)
    linears = [row for row in table.rows if row.name == "dot_general"]
    for way, row in zip((fc1, fc2), linears, strict=True):
        assert (row.before.split(" x ")[0], row.after) == LAYOUTS[way]


def test_cost_table_per_scheme_prints():
    lines = str(hand_scheme("RRxRS", "RSxSR").cost_table()).splitlines()
    assert lines[0].split() == ["name", "in", "out", "cost"]
    fc2 = next(line for line in lines if line.startswith("9 dot_general"))
    assert re.split(r"\s{2,}", fc2) == ["9 dot_general", f"{RS} x [x,_]", RR, "1048576 elements"]
    assert any(line.split()[0] == "total" and line.endswith("1048576 elements") for line in lines)
    assert lines[-1] == "proof: nothing costs less than 1048576 elements"


@pytest.mark.parametrize("costs", ["roofline", "alpa", "slapo-head", "hidet", "ring"])
def test_cost_table_total_is_the_sum_of_its_rows_under_every_convention(costs):
    plan = plan_of(bert_layer, layer_args(64, 128), costs)
    table = plan.cost_table()
    assert table.total == plan.objective
    assert table.total == pytest.approx(sum(row.cost for row in table.rows))


@pytest.mark.parametrize(("num_devices", "optimum"), [(2, 524288), (4, 262144), (8, 131072), (16, 65536)])
def test_search_trace_and_certificate_optima(num_devices, optimum):
    plan = plan_of(mlp, mlp_args(), "slapo-2023-05", num_devices)
    assert (plan.objective, plan.lower_bound, plan.status) == (optimum, optimum, "optimal")
    falling = [step.objective for step in plan.search]
    assert len(falling) > 1
    assert all(a > b for a, b in itertools.pairwise(falling))
    assert plan.search[-1].found_by == "proof"
    assert plan.search[-1].objective == plan.search[-1].lower_bound == optimum


def brute_force(widths: list[int], seq_len: int, p: int) -> float:
    """Cheapest of all 3^k ways, by the published rules alone."""
    best = float("inf")
    for ways in itertools.product(LAYOUTS, repeat=len(widths) - 1):
        layout, cost = RR, 0.0
        for way, fan_in, fan_out in zip(ways, widths, widths[1:], strict=False):
            wanted, made = LAYOUTS[way]
            cost += conversion(layout, wanted, seq_len * fan_in, p)
            cost += seq_len * fan_out if way == "RSxSR" else 0
            layout = made
        best = min(best, cost + conversion(layout, RR, seq_len * widths[-1], p))
    return best


def conversion(before: str, after: str, volume: int, p: int) -> float:
    if before in (after, RR):
        return 0
    return volume // p if after == RR else volume // p - volume // (p * p)


@pytest.mark.parametrize("seed", range(6))
def test_search_trace_and_certificate_equals_brute_force(seed):
    """A random MLP of 1 to 6 Linears: the planner's optimum, its bound and all 3^k ways agree."""
    rng = np.random.default_rng(seed)
    p = int(rng.choice([2, 4, 8]))
    widths = [64 * int(n) for n in rng.integers(1, 9, size=seed + 2)]
    seq_len = 64 * int(rng.integers(1, 9))
    shapes = [linear_shapes(a, b) for a, b in itertools.pairwise(widths)]
    plan = plan_of(chain, (shapes, tensor(8, seq_len, widths[0])), "slapo-2023-05", p)
    assert plan.objective == plan.lower_bound == plan.search[-1].objective == brute_force(widths, seq_len, p)


def test_search_trace_survives_the_plan_file(tmp_path):
    plan = hand_scheme("RRxRS", "SRxRR")
    plan.save(tmp_path / "plan.json")
    loaded = al.load_plan(tmp_path / "plan.json")
    assert loaded.search == plan.search
    assert str(loaded.cost_table()) == str(plan.cost_table())


def test_search_trace_is_the_same_every_time():
    assert hand_scheme("RRxRS", "SRxRR").search == hand_scheme("RRxRS", "SRxRR").search


def test_schedule_out():
    """RR->SR before fc1, SR->RR after fc2, and nothing else; no weight is sharded."""
    plan = plan_of(mlp, mlp_args(), "slapo-2023-05")
    first, second = (d.path for d in plan.stages[0].decisions if d.op.startswith("dot_general"))
    into, out = plan.stages[0].conversions
    assert (into.op, into.made_by, str(into.source), str(into.target)) == (first, "in", RR, SR)
    assert (out.made_by, str(out.source), str(out.target)) == (second, SR, RR)
    lines = plan.layout_schedule().splitlines()
    assert lines[0] == "convert  %4 before 0 dot_general: [_,_,_] -> [_,x,_] by slice"
    assert len(lines) == 2 and "(made by 9 dot_general)" in lines[1] and lines[1].endswith("by all-gather")


def test_schedule_out_names_sharded_weights():
    lines = hand_scheme("RRxRS", "RSxSR").layout_schedule().splitlines()
    assert {"shard    0/fc1/weight: [_,x]", "shard    0/fc2/weight: [x,_]"} <= set(lines)


# What goes into fc1, comes out of it, goes into fc2 and comes out of that.
_N, _ROW, _COL = P(), P(None, "x", None), P(None, None, "x")
HAND_SCHEMES = {
    "naive": (_N, _N, _N, _N),
    "RS->SR": (_N, _COL, _ROW, _ROW),
    "SR->RS": (_ROW, _ROW, _COL, _N),
    "Megatron": (_N, _COL, _COL, _N),
    "RS->RR twice": (_N, _COL, _N, _COL),
    "RR->RS": (_N, _N, _COL, _N),
    "RR->SR": (_N, _N, _ROW, _ROW),
    "sequence": (_ROW, _ROW, _ROW, _ROW),
}


@pytest.mark.medium
def test_eight_hand_schemes():
    """The same output whichever scheme; the predicted ranking is printed, the measured one needs an accelerator."""
    shapes, x = mlp_args(seq_len=64, width=32, batch_size=1)
    params, value = random_like(shapes), random_like(x, seed=1)
    expected = np.asarray(mlp(params, value))
    predicted = {}
    for name, (a, b, c, d) in HAND_SCHEMES.items():

        def scheme(params: Any, x: jax.Array, layouts: Any = (a, b, c, d)) -> jax.Array:
            h = al.pin(x, layouts[0]) @ params["fc1"]["weight"] + params["fc1"]["bias"]
            h = jax.nn.gelu(al.pin(h, layouts[1]), approximate=False)
            y = al.pin(h, layouts[2]) @ params["fc2"]["weight"] + params["fc2"]["bias"]
            return al.pin(y, layouts[3])

        step = al.parallelize(
            scheme,
            cluster=al.Cluster.parse("1x4:cpu"),
            pins={"1": P(), "out": P()},
            options=al.PlanOptions(mesh_shape=(4,), axis_names=("x",)),
        )
        np.testing.assert_allclose(np.asarray(step(params, value)), expected, rtol=2e-4, atol=2e-5)
        predicted[name] = step.plan(params, value).objective
    print(*(f"{name}: {cost:.3g} s" for name, cost in sorted(predicted.items(), key=lambda item: item[1])), sep="\n")
    assert len(set(predicted.values())) > 4


@pytest.mark.parametrize("costs", ["slapo-2023-05", "slapo-head"])
@pytest.mark.parametrize(("layer", "shape"), [(bert_layer, (512, 1024)), (gpt_layer, (1024, 2048))])
def test_attention_support_never_reduces_over_a_sharded_dim(costs, layer, shape):
    """Softmax and layer norm: the last dim of what a reduction outside a matmul reads is whole."""
    plan = plan_of(layer, layer_args(*shape), costs, memory_budget_bytes=float("inf"))
    reductions = [d for d in plan.stages[0].decisions if d.op.startswith("reduce_")]
    assert len(reductions) >= 6
    for decision in reductions:
        assert decision.operands[0].dims[-1] == ()
        assert decision.results[0].unreduced == ()


def test_attention_support_head_split_keeps_only_the_outer_factor():
    """A sharded last dim passes the head split as sharded heads, or not at all."""
    plan = plan_of(bert_layer, layer_args(512, 1024), "slapo-head", memory_budget_bytes=float("inf"))
    reshapes = [d for d in plan.stages[0].decisions if d.op.startswith("reshape")]
    splits = [d for d in reshapes if "8,512,16,64]" in d.op.partition("->")[2]]
    assert len(splits) == 3  # queries, keys, values
    for decision in splits:
        assert decision.results[0].dims[3] == ()
        assert decision.operands[0].dims[2] == decision.results[0].dims[2]


@pytest.mark.parametrize(("seq_len", "optimum"), [(512, 524289), (1024, 1048577)])
def test_attention_support_asserted_optimum_of_the_mlp(seq_len, optimum):
    plan = plan_of(mlp, mlp_args(seq_len=seq_len), "slapo-head")
    assert plan.objective == plan.lower_bound == optimum


ROW_WISE = {"0/key/weight": P(), "0/value/weight": P()}


@pytest.mark.parametrize(
    ("layer", "shape", "pins", "slices"),
    [
        (bert_layer, (512, 1024), None, 2),
        (bert_layer, (512, 1024), ROW_WISE, 4),  # 1572868, as published
        (gpt_layer, (1024, 2048), None, 2),
        (gpt_layer, (1024, 2048), ROW_WISE, 2),
    ],
)
def test_attention_support_asserted_optima_of_layers(layer, shape, pins, slices):
    """Three gathers (keys, values, result) as published, and fewer slices than its 4 (BERT) and 3 (GPT-Neo).

    - slapo charges a gather for passing a sharded last dim through the head split, so its keys and values are computed
      row-wise, from slices of the input. Here the split keeps the outer factor (heads) for free: they are computed
      column-wise from the whole input. With row-wise keys and values demanded, BERT costs what was published.
    - The causal mask of GPT-Neo is a replicated tensor there, and ``where`` takes the layout of its first operand, so that
      softmax pays a slice although the scores are split already. Here all operands of ``where`` have one layout, and the
      mask is computed in it. What is left is one slice in the norm and one for the residual sum.
    """
    seq_len, width = shape
    plan = plan_of(layer, layer_args(*shape), "slapo-head", pins=pins, memory_budget_bytes=float("inf"))
    assert plan.objective == plan.lower_bound == 3 * (8 * seq_len * width // 8) + slices
    gathers = [c for c in plan.collectives if c.kind == "all-gather"]
    assert len(gathers) == len(plan.collectives) == 3


NODE = re.compile(r'^  (n\d+) \[label="((?:[^"\\]|\\.)*)", shape=\w+\];$')
EDGE = re.compile(r'^  (n\d+) -> (n\d+) \[label="((?:[^"\\]|\\.)*)"(?:, color=red)?\];$')


def parse_dot(text: str) -> tuple[dict[str, str], list[tuple[str, str, str]]]:
    """Nodes and edges of a dot file; every line must be one that the grammar knows."""
    first, second, *body, last = text.splitlines()
    assert (first, second, last) == ("digraph program {", "  rankdir=TB;", "}")
    nodes, edges = {}, []
    for line in body:
        node, edge = NODE.match(line), EDGE.match(line)
        assert node or edge, line
        if node:
            nodes[node[1]] = node[2]
        elif edge:
            edges.append((edge[1], edge[2], edge[3]))
    assert {end for a, b, _ in edges for end in (a, b)} <= set(nodes)
    return nodes, edges


def test_dot_dump():
    """Parses before and after; edge labels are types, then the plan's layouts."""
    args = mlp_args()
    plan = plan_of(mlp, args, "slapo-2023-05")
    nodes, before = parse_dot(al.graph(mlp, *args).dot())
    planned_nodes, after = parse_dot(al.graph(mlp, *args, plan=plan).dot())
    assert nodes == planned_nodes and len(nodes) == 9
    assert [edge[:2] for edge in before] == [edge[:2] for edge in after]
    assert before[0][2] == "float32[8,1024,1024]"
    label = {(nodes[a].split("\\n")[0], nodes[b].split("\\n")[0]): text for a, b, text in after}
    assert label == {
        ("1", "fc1"): f"{RR} -> {SR}",
        ("0/fc1/weight", "fc1"): "[_,_]",
        ("0/fc1/bias", "fc1"): "[_]",
        ("fc1", "gelu"): SR,
        ("gelu", "fc2"): SR,
        ("0/fc2/weight", "fc2"): "[_,_]",
        ("0/fc2/bias", "fc2"): "[_]",
        ("fc2", "out"): RR,
    }


def test_dot_dump_of_another_program_is_refused():
    plan = plan_of(mlp, mlp_args(), "slapo-2023-05")
    with pytest.raises(al.AlpaLiteError, match="belongs to another program"):
        al.graph(mlp, *mlp_args(seq_len=512), plan=plan)


@pytest.mark.medium
@pytest.mark.parametrize("costs", ["slapo-head", "roofline"])
@pytest.mark.parametrize("name", ["bert-large", "gpt-neo-1.3b"])
def test_whole_hf_models(name, costs):
    """All 24 layers plan in less than a minute, proven, and equal layers are decided equally."""
    fn, args = encoders.make(name)
    begin = time.process_time()
    plan = plan_of(fn, args, costs, mesh_shape=(8,), memory_budget_bytes=float("inf"))
    assert time.process_time() - begin < 60  # an idle machine takes 1 to 3 s
    assert plan.status == "optimal" and plan.gap <= 1e-6
    decided: dict[str, set[tuple[str, ...]]] = {}
    for leaf in plan.inputs:
        layer = re.fullmatch(r"0/layers/(\d+)/(.*)", leaf.path)
        if layer:
            decided.setdefault(layer[1], set()).add((layer[2], str(leaf.spec)))
    assert len(decided) == 24
    inner = [decided[str(i)] for i in range(1, 23)]  # the first and the last one have other neighbours
    assert all(one == inner[0] for one in inner)
