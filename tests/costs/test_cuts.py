"""Segments of a region: what is converted where."""

from __future__ import annotations

import pytest

from alpa_lite.core.conversion import Conversion, Step
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.cuts import Cut
from alpa_lite.plan.records import OpDecision

WHOLE, SPLIT = ShardingSpec(((),)), ShardingSpec((("x",),))


@pytest.mark.parametrize("late", [False, True])
def test_a_result_is_converted_when_it_is_there(late: bool) -> None:
    """A result that another stage sends, after the loop or before it; op 0 is the loop."""
    slice_ = Step(kind=None, axes=("x",), source_dim=-1, target_dim=0, before=WHOLE, after=SPLIT)
    conversion = Conversion(op="out", value=1, steps=(slice_,), collectives=(-1,))
    cut = Cut(
        inputs=(0, 1),
        outputs=(2, 1),
        ops=[((0,), (2,))],
        constants=frozenset(),
        decisions={"0": OpDecision(path="0", operands=(WHOLE,), results=(WHOLE,))},
        conversions={"out": [conversion]},
        prefix="",
        cuts=(0, 1),
        in_specs=(WHOLE, WHOLE),
        out_specs=(WHOLE, SPLIT),
        skipped=frozenset({0}),
        late=frozenset({1} if late else ()),
    )
    assert [segment.out for segment in cut.segments] == ([(), (conversion,)] if late else [(conversion,), ()])
    assert [segment.reads for segment in cut.segments][late] == ((1, WHOLE),)
    assert [segment.writes for segment in cut.segments][late] == ((1, SPLIT),)
