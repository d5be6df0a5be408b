"""The contest's file format, on a tiny instance of our own."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from alpa_lite.intraop.contest import ProblemFileError, read_iopddl, write_iopddl
from alpa_lite.intraop.problem import FORBIDDEN, IntraOpProblem, Usage, evaluate
from alpa_lite.intraop.solve import solve
from tests.intraop.problems import brute_force

TINY = {
    "problem": {
        "name": "tiny",
        "nodes": {
            "intervals": [[0, 2], [1, 3], [2, 2]],
            "costs": [[4, 1], [2, 3, 9], [0, 5]],
            "usages": [[3, 8], [4, 6, 1], [100, 100]],
        },
        "edges": {
            "nodes": [[0, 1], [2, 1], [1, 0]],
            "costs": [[0, 7, 2, 1, FORBIDDEN, 3], [5, 6, 7, 1, 2, 3], [10, 20, 30, 40, 50, 60]],
        },
        "usage_limit": 9,
    }
}


def test_costs_are_row_major_and_parallel_edges_add_up():
    problem = read_iopddl(json.dumps(TINY))
    # nodes 1 + 9 + 0; edge 0-1 at [1, 2] = 3; edge 2-1 at [0, 2] = 7; edge 1-0 at [2, 1] = 60
    score = evaluate(problem, [1, 2, 0])
    assert score == (80.0, 9, 1)
    assert evaluate(problem, [1, 1, 0]).objective == np.inf
    assert problem.usage_limit == 9


def test_half_open_intervals_and_empty_ones():
    problem = read_iopddl(json.dumps(TINY))
    assert evaluate(problem, [0, 0, 0]).peak_bytes == 7  # node 2 lives nowhere, nodes 0 and 1 meet at time 1
    assert solve(problem).objective == brute_force(problem)[0]


def test_round_trip(tmp_path):
    problem = read_iopddl(json.dumps(TINY))
    path = tmp_path / "tiny.json.gz"
    path.write_bytes(gzip.compress(write_iopddl(problem).encode()))
    again = read_iopddl(path)
    for choice in ([0, 0, 0], [1, 2, 1], [0, 1, 1], [1, 1, 0]):
        assert evaluate(again, choice) == evaluate(problem, choice)


def test_several_usages_of_a_node_survive_writing():
    usages = tuple(Usage(node=0, lo=lo, hi=lo + 1, size_bytes=np.array([lo, 5])) for lo in (0, 2, 4))
    problem = IntraOpProblem(node_costs=(np.array([2.0, 1.0]),), usages=usages, num_times=5, usage_limit=4)
    again = read_iopddl(write_iopddl(problem))
    assert brute_force(again) == brute_force(problem)


def test_digits_beyond_floats_survive():
    text = json.loads(json.dumps(TINY))
    text["problem"]["nodes"]["costs"][0] = [2**53 + 1, 2**60 + 3]
    problem = read_iopddl(json.dumps(text))
    assert evaluate(problem, [0, 0, 0]).objective == 2**53 + 1 + 2 + 0 + 0 + 5 + 10


def broken(change):
    text = json.loads(json.dumps(TINY))
    change(text["problem"])
    return json.dumps(text)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"problem": {"nodes"', "not complete JSON"),
        ('{"other": 1}', "a part is missing"),
        (broken(lambda p: p["nodes"]["costs"].pop()), "differ in length"),
        (broken(lambda p: p["nodes"]["usages"][1].pop()), "node 1 has 3 costs and 2 usages"),
        (broken(lambda p: p["edges"]["costs"][0].pop()), "edge 0 has 5 costs"),
        (broken(lambda p: p["edges"]["nodes"][1].__setitem__(0, 7)), r"edge 1 joins \[7, 1\]"),
        (broken(lambda p: p["nodes"]["costs"][0].__setitem__(0, -1)), "negative cost"),
    ],
)
def test_bad_files_say_what_is_wrong(text, what):
    with pytest.raises(ProblemFileError, match=what) as error:
        read_iopddl(text)
    assert "Expected the IOPDDL contest's format" in str(error.value)


def test_a_cut_gzip_file_is_named(tmp_path):
    path = tmp_path / "cut.json.gz"
    path.write_bytes(gzip.compress(json.dumps(TINY).encode())[:-20])
    with pytest.raises(ProblemFileError, match=r"cut\.json\.gz"):
        read_iopddl(path)
    with pytest.raises(ProblemFileError, match="cannot be read"):
        read_iopddl(tmp_path / "absent.json")


def test_writing_refuses_fractions():
    with pytest.raises(ProblemFileError, match="whole costs"):
        write_iopddl(IntraOpProblem(node_costs=(np.array([0.5]),)))
