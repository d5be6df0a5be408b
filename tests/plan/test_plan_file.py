"""Saving and loading: equal bytes, strictness, wording, size and speed."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.core.spec import ShardingSpec
from alpa_lite.errors import PlanFileError
from alpa_lite.plan.json_text import json_text
from alpa_lite.plan.load import load_plan
from alpa_lite.plan.records import OpDecision


def test_round_trip_is_equal_and_bit_for_bit(plan, tmp_path, golden):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    plan.save(first)
    loaded = load_plan(first)
    assert loaded == plan
    loaded.save(second)
    assert first.read_bytes() == second.read_bytes()
    golden("plan_file", first.read_text())


def test_int_and_float_times_give_the_same_bytes(plan, tmp_path):
    whole = replace(plan, objective=1, lower_bound=1)
    whole.save(tmp_path / "a.json")
    replace(plan, objective=1.0, lower_bound=1.0).save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_replaces_atomically_and_leaves_nothing_behind(plan, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(0o600)
    plan.save(path)
    assert load_plan(path) == plan
    assert path.stat().st_mode & 0o777 == 0o600
    broken = replace(plan, objective=float("inf"))
    with pytest.raises(ValueError, match="inf cannot be written as JSON"):
        broken.save(path)
    assert load_plan(path) == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_every_cut_is_noticed(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    data = path.read_bytes()
    for length in {0, 1, 30, len(data) // 2, len(data) - 3}:
        path.write_bytes(data[:length])
        with pytest.raises(PlanFileError, match=r"plan\.json' is cut short .*Copy it again, or make the plan again"):
            load_plan(path)


def damaged(plan, path, change):
    plan.save(path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format_version=4), r"has plan-format version 4; this alpa_lite reads version 3\. Make the"),
        (lambda d: d.update(format_version=4, objective="?"), r"has plan-format version 4"),
        (lambda d: d.update(format="other"), r"is JSON but no plan: it does not start with \"format\": \"alpa_lite"),
        (lambda d: d.update(colour=1), r"breaks the plan format: .*unknown field `colour`"),
        (lambda d: d.pop("costs"), r"missing required field `costs`"),
        (lambda d: d.update(objective="1"), r"Expected `float`, got `str` - at `\$\.objective`"),
        (
            lambda d: d["stages"][0]["collectives"][1].__setitem__(2, "x"),
            r"at `\$\.stages\[0\]\.collectives\[1\]\[2\]`",
        ),
        (lambda d: d["inputs"][0].append(1), r"Expected `array` of at most length 8 - at `\$\.inputs\[0\]`"),
        (lambda d: d["stages"][0]["conversions"][0].pop(), r"length 7, got 6 - at `\$\.stages\[0\]\.conversions\[0\]`"),
        (lambda d: d.update(stages=3), r"Expected `array`, got `int` - at `\$\.stages`"),
        (lambda d: d["inputs"][0].__setitem__(4, 99), r"is damaged: entry 99 of table 'specs'"),
        (lambda d: d["specs"].__setitem__(0, "[x,x]"), r"is damaged: a mesh axis may be used once per tensor"),
        (lambda d: d["specs"].__setitem__(0, "[_,rows]"), r"is inconsistent: .*uses \('rows',\), the mesh is \(data=2"),
        (lambda d: d["stages"][0]["decisions"]["ops"].pop(), r"is damaged"),
        (lambda d: d["stages"][0]["memory"].update(magic=1), r"is damaged: .*magic"),
        (lambda d: d.update(lower_bound=9.0), r"is inconsistent: the lower bound 9\.0 is above the objective"),
        (
            lambda d: d.update(objective=d["objective"] + 1),
            r"was changed after `plan\.save` wrote it.*Make the plan again, with pins",
        ),
        (lambda d: d["inputs"][0].__setitem__(1, "int8"), r"was changed after"),
        (lambda d: d["stages"][0]["decisions"]["paths"].__setitem__(0, "zz"), r"was changed after"),
    ],
)
def test_bad_files_say_what_is_wrong(plan, tmp_path, change, message):
    path = damaged(plan, tmp_path / "plan.json", change)
    with pytest.raises(PlanFileError, match=message):
        load_plan(path)


def test_a_file_without_a_digest_is_read(plan, tmp_path):
    """As it was written before there was one."""
    assert load_plan(damaged(plan, tmp_path / "plan.json", lambda d: d.pop("digest"))) == plan


def test_not_a_plan(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(PlanFileError, match=r"cannot read the plan file .*No such file.* Check the path"):
        load_plan(path)
    path.write_text("hello")
    with pytest.raises(PlanFileError, match=r"is not JSON .* another file, or it was damaged .* Check the path"):
        load_plan(path)
    path.write_text("[1]")
    with pytest.raises(PlanFileError, match="is JSON but no plan"):
        load_plan(path)
    for text in ("[1,", '"""A file of Python."""'):
        path.write_text(text)
        with pytest.raises(PlanFileError, match=r"x\.json.* Check the path"):
            load_plan(path)


@pytest.mark.medium
def test_a_large_plan_is_a_small_file(plan, tmp_path):
    layouts = [ShardingSpec.parse(text) for text in ("[_,_]", "[data,_]", "[_,model]", "[data,_]+{model}")]
    choose = random.Random(0).choice
    decisions = tuple(
        OpDecision(
            path=str(i),
            op=f"dot_general(bfloat16[16,{i % 200}], bfloat16[{i % 200},8]) -> bfloat16[16,8]",
            operands=(choose(layouts), choose(layouts)),
            results=(choose(layouts),),
            time_s=1e-5 * (i % 7),
        )
        for i in range(14_000)
    )
    collectives = plan.collectives * 1000
    large = replace(plan, stages=(replace(plan.stages[0], decisions=decisions, collectives=collectives),))
    path = tmp_path / "large.json"
    large.save(path)
    assert path.stat().st_size < 2_000_000
    assert load_plan(path) == large


@pytest.mark.medium
@settings(max_examples=50)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**53), 2**53)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=60),
        lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=5), inner, max_size=8),
        max_leaves=60,
    )
)
def test_json_text_is_json(value):
    assert json.loads(json_text(value)) == value
