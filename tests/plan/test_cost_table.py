"""Cost tables and schedules from plan records alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.conversion import Conversion, Step
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.plan.cost_table import SHOWN_ROWS, CostRow, CostTable, cost_table, layout_schedule
from alpa_lite.plan.records import OpDecision, SearchStep


def row(cost: float, path: str = "0", kind: str = "op") -> CostRow:
    return CostRow(kind=kind, path=path, name="tanh", before="[_]", after="[_]", cost=cost)


def test_total_is_exact():
    table = CostTable(rows=tuple(row(0.1) for _ in range(10)), unit="s", costs="roofline")
    assert table.total == math.fsum([0.1] * 10) == 1.0


def test_a_long_table_shows_its_dearest_rows_and_sums_the_rest():
    rows = tuple(row(float(i), str(i)) for i in range(SHOWN_ROWS + 40))
    lines = str(CostTable(rows=rows, unit="bytes", costs="hidet")).splitlines()
    assert len(lines) == 1 + SHOWN_ROWS + 2
    assert lines[1].startswith("40 tanh") and lines[SHOWN_ROWS].startswith("99 tanh")
    assert lines[-2].split() == ["and", "40", "further", "rows", "780", "bytes"]
    assert lines[-1].split() == ["total", "4950", "bytes"]


@pytest.mark.parametrize(
    ("last", "text"),
    [
        (SearchStep(objective=7.0, lower_bound=7.0, found_by="proof"), "proof: nothing costs less than 7 bytes"),
        (
            SearchStep(objective=7.0, lower_bound=5.0, found_by="search"),
            "search: 7 bytes, proven to be at least 5 bytes",
        ),
    ],
)
def test_how_the_search_ended(last, text):
    first = SearchStep(objective=9.0, lower_bound=-math.inf, found_by="greedy")
    table = CostTable(rows=(row(7.0),), unit="bytes", costs="hidet", search=(first, last))
    assert str(table).splitlines()[-2:] == ["greedy: 9 bytes", text]


def test_rows_of_a_plan(plan):
    """A conversion stands before the op that reads it; the penalty on state has a row of its own."""
    stage = replace(plan.stages[0], penalty=3e-6)
    table = cost_table(replace(plan, stages=(stage,)))
    assert [r.path for r in table.rows if r.kind == "op"] == [d.path for d in stage.decisions]
    assert (table.rows[0].kind, table.rows[0].path, table.rows[0].cost) == ("conversion", "0", 4e-5)
    assert table.rows[-1].kind == "state"
    assert table.total == pytest.approx(sum(d.time_s for d in stage.decisions) + 4e-5 + 3e-6)


def test_a_single_reduction_belongs_to_its_op(plan):
    partial, whole = ShardingSpec(((),), ("data",)), ShardingSpec(((),))
    reduce = Step(kind=CollectiveKind.ALL_REDUCE, axes=("data",), before=partial, after=whole)
    decision = OpDecision(path="0", op="dot_general(...) -> ...", operands=(), results=(partial,), time_s=2.0)
    conversion = Conversion(op="1", value=3, steps=(reduce,), collectives=(0,), made_by="0", cost=5.0)
    stage = replace(plan.stages[0], decisions=(decision,), conversions=(conversion,))
    (only,) = cost_table(replace(plan, stages=(stage,))).rows
    assert (only.name, only.after, only.cost) == ("dot_general", "[_]", 7.0)
    twice = replace(stage, conversions=(conversion, replace(conversion, cost=1.0)))
    assert [r.kind for r in cost_table(replace(plan, stages=(twice,))).rows] == ["op", "conversion", "conversion"]


def test_schedule_of_a_plan_without_any(plan):
    stage = replace(plan.stages[0], conversions=())
    assert layout_schedule(replace(plan, stages=(stage,), inputs=())) == "nothing is sharded and nothing converted\n"
