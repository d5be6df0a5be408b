"""The Plan record: properties and the hooks of the public layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alpa_lite.core.spec import ShardingSpec
from alpa_lite.errors import AlpaLiteError
from alpa_lite.plan.records import MemoryProfile


class FakeTrees:
    def partition_spec(self, spec):
        return str(spec)

    def in_specs(self, plan):
        return ("in", plan.objective)

    def out_specs(self, plan):
        return ("out", plan.objective)

    def bind(self, plan, fn, args, kwargs):
        return (plan, fn, args, kwargs)

    def verify(self, plan, fn, args, kwargs):
        return (plan, fn, args, kwargs)


def test_gap(plan):
    assert plan.gap == pytest.approx(1 / 44)
    assert replace(plan, lower_bound=plan.objective).gap == 0.0
    assert replace(plan, lower_bound=plan.objective * (1 - 1e-15)).gap == 0.0
    assert replace(plan, objective=0.0, lower_bound=0.0).gap == 0.0


def test_time_parts_count_executions(plan):
    assert plan.compute_s == pytest.approx(3.4e-5)
    assert plan.communication_s == pytest.approx(3 * 2e-6 + 4e-6)


def test_memory_is_the_fullest_stage(plan):
    stage = plan.stages[0]
    fuller = replace(stage, memory=MemoryProfile(peak=999))
    assert replace(plan, stages=(stage, fuller)).memory.peak == 999


def test_specs_by_path_and_parameter_layout(plan):
    spec = ShardingSpec.parse("[_,model]")
    assert plan.specs_by_path["0/params/layers_2/kernel"] == spec
    assert plan.specs_by_path["out/1"] == ShardingSpec.parse("[data,_]")
    assert plan.parameter_layout == {f"0/params/layers_{k}/kernel": (0, spec) for k in range(4)}


def test_trees_convert_but_do_not_matter_for_equality(plan, tmp_path):
    bound = replace(plan, trees=FakeTrees())
    assert bound == plan
    assert bound.specs_by_path["1/x"] == "[data,_]"
    assert bound.parameter_layout["0/params/layers_0/kernel"] == (0, "[_,model]")
    assert bound.in_specs == ("in", plan.objective)
    assert bound.out_specs == ("out", plan.objective)
    assert bound.bind(len, 1, k=2) == (plan, len, (1,), {"k": 2})
    assert bound.verify(len, 1) == (plan, len, (1,), {})
    bound.save(tmp_path / "a.json")


@pytest.mark.parametrize(
    "use", [lambda p: p.in_specs, lambda p: p.out_specs, lambda p: p.bind(len), lambda p: p.verify(len)]
)
def test_pytrees_need_the_public_layer(plan, use):
    with pytest.raises(AlpaLiteError, match=r"knows paths but no pytrees.*load the file with `al\.load_plan`"):
        use(plan)
