"""``alpa-lite solve``: strict JSON, readable text, exit codes."""

from __future__ import annotations

import gzip
import json

import typer
from typer.testing import CliRunner

from alpa_lite.cli.solve import solve

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
            "costs": [[0, 7, 2, 1, 10**18, 3], [5, 6, 7, 1, 2, 3], [10, 20, 30, 40, 50, 60]],
        },
        "usage_limit": 9,
    }
}
APP = typer.Typer()
APP.command()(solve)


def run(*arguments):
    return CliRunner().invoke(APP, [str(a) for a in arguments])


def write(tmp_path, problem=TINY):
    path = tmp_path / "tiny.json.gz"
    path.write_bytes(gzip.compress(json.dumps(problem).encode()))
    return path


def reject(name):
    raise AssertionError(f"{name} is not strict JSON")


def test_json_to_stdout_is_strict_and_alone(tmp_path):
    result = run(write(tmp_path), "--time-limit", 10, "--json", "-")
    assert result.exit_code == 0
    record = json.loads(result.stdout, parse_constant=reject)
    assert record["status"] == "optimal"
    assert record["objective"] == record["bound"]
    assert len(record["assignment"]) == 3
    assert record["peak_bytes"] <= record["usage_limit"] == 9
    assert record["seconds"] >= 0


def test_json_to_a_file_and_text_to_stdout(tmp_path):
    out = tmp_path / "answer.json"
    result = run(write(tmp_path), "--json", out)
    assert result.exit_code == 0
    record = json.loads(out.read_text())
    for word in ("objective", "bound", "optimal", "seconds", "assignment"):
        assert word in result.stdout
    assert str(record["objective"]) in result.stdout


def test_a_bad_file_is_exit_code_2_and_says_why(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text('{"problem": {')
    result = run(path)
    assert result.exit_code == 2
    assert "bad.json" in result.stderr
    assert "Expected the IOPDDL contest's format" in result.stderr
    assert run(tmp_path / "absent.json").exit_code == 2


def test_infeasible_is_exit_code_1_with_json(tmp_path):
    problem = json.loads(json.dumps(TINY))
    problem["problem"]["usage_limit"] = 1
    result = run(write(tmp_path, problem), "--json", "-")
    assert result.exit_code == 1
    record = json.loads(result.stdout, parse_constant=reject)
    assert (record["status"], record["objective"], record["assignment"]) == ("infeasible", None, [])
