"""The command line: every verb, and bad input told in words with exit code 2."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import jax
import pytest
import typer
from typer.testing import CliRunner

import alpa_lite as al
from alpa_lite._jax_compat import short_plugin_errors
from alpa_lite.cli import main
from alpa_lite.cluster.calibration import Calibration
from alpa_lite.executor import calibrate as calibration

TARGETS = """
import jax
import jax.numpy as jnp
import alpa_lite as al
from jax.sharding import PartitionSpec as P

X = jax.ShapeDtypeStruct((64, 32), jnp.float32)
W = jax.ShapeDtypeStruct((32, 64), jnp.float32)

def step(w, x):
    return w * 0.5, jnp.tanh(x @ w).sum()

def pair():
    return step, (W, X)

def target():
    return al.PlanTarget(step, (W, X), pins={"0": P(None, "model")}, donate_argnums=(0,))

def parallel():
    return al.parallelize(step, pins={"0": P(None, "mp")}), (W, X)

def nothing():
    return None

number = 3
"""


@pytest.fixture
def targets(tmp_path, monkeypatch):
    path = tmp_path / "cli_targets.py"
    path.write_text(TARGETS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield path
    sys.modules.pop("cli_targets", None)


def run(*arguments, code=0):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, f"exit code {result.exit_code}\n{result.output}\n{result.exception!r}"
    return result


def empty_paths():
    """(verb, arguments, name) of each argument and option that is a path, an empty one among good arguments."""
    found = []
    for info in main.registered_commands:
        verb = info.name or info.callback.__name__
        hints = get_type_hints(info.callback)
        parameters = typer.main.get_command(main).commands[verb].params
        for empty in parameters:
            if Path not in (hints.get(empty.name), *get_args(hints.get(empty.name))):
                continue
            arguments = []
            for other in (p for p in parameters if p is empty or p.required):
                value = "" if other is empty else "1x8:cpu" if other.name == "cluster" else "1"
                arguments += [other.opts[0], value] if other.param_type_name == "option" else [value]
            found.append((verb, arguments, empty.opts[0]))
    return found


@pytest.mark.parametrize(("verb", "arguments", "name"), empty_paths())
def test_an_empty_path_is_not_the_current_folder(tmp_path, monkeypatch, verb, arguments, name):
    monkeypatch.chdir(tmp_path)
    told = " ".join(run(verb, *arguments, code=2).stderr.replace("│", " ").split())
    assert "an empty path was given. It must be the path of a f" in told and "can also be left out" in told
    assert not name.startswith("-") or name in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "cli_targets.py:pair", "--cluster", "1x8:cpu", "--out"],
        ["calibrate", "--out"],
        ["solve", "cli_targets.py", "--json"],
    ],
)
def test_where_a_result_is_to_lie_is_looked_at_before_the_work(targets, arguments, monkeypatch):
    monkeypatch.setattr("alpa_lite.executor.calibrate.local_cluster", None)  # nothing has begun when it is refused

    def told(path):
        return " ".join(run(*arguments, path, code=2).stderr.replace("│", " ").split())

    assert f"Invalid value for '{arguments[-1]}': there is no folder 'no'. It must be a file" in told("no/where.json")
    assert f"Invalid value for '{arguments[-1]}': '.' is a folder. It must be a file" in told(".")


def test_what_cannot_be_written_is_told_in_one_line_and_still_shown(tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("alpa_lite.cli.paths.write_atomically", full)
    problem, out = tmp_path / "problem.json", tmp_path / "answer.json"
    problem.write_text(
        json.dumps(
            {
                "problem": {
                    "name": "one",
                    "nodes": {"intervals": [[0, 1]], "costs": [[3, 2]], "usages": [[0, 0]]},
                    "edges": {"nodes": [], "costs": []},
                }
            }
        )
    )
    result = run("solve", problem, "--json", out, code=2)
    assert "optimal" in result.stdout and not out.exists()
    assert f"error: '{out}' cannot be written: No space left on device. It must be a file" in result.stderr


@pytest.mark.parametrize("form", ["cli_targets.py:target", "cli_targets:target"])
def test_plan_prints_the_table_and_writes_the_file(targets, tmp_path, form):
    out = tmp_path / "plan.json"
    result = run("plan", form, "--cluster", "1x8:h100-sxm", "--out", out)
    assert "1x8:h100-sxm" in result.stdout and "Arguments" in result.stdout and "[_,model]" in result.stdout
    plan = al.load_plan(out)
    assert plan.pins == (("0", "P(None, 'model')"),)
    assert dict(plan.options)["donate_argnums"] == (0,)
    assert run("show", out).stdout == result.stdout


def test_plan_on_one_mesh_shape_and_of_a_pair(targets):
    result = run("plan", "cli_targets.py:pair", "--cluster", "1x8:cpu", "--mesh", "2x4")
    assert "(x=2, y=4)" in result.stdout


def test_a_parallelized_step_keeps_its_pins(targets):
    assert "[_,mp]" in run("plan", "cli_targets.py:parallel", "--cluster", "1x8:cpu").stdout


def test_rules_lists_the_primitives(targets):
    for name in ("pair", "parallel"):
        output = run("rules", f"cli_targets.py:{name}").stdout
        assert "dot_general" in output and "shardy" in output and "reduction={" in output


def test_diff_says_what_differs(targets, tmp_path):
    for mesh in ("2x4", "8"):
        run("plan", "cli_targets.py:pair", "--cluster", "1x8:cpu", "--mesh", mesh, "--out", tmp_path / f"{mesh}.json")
    assert run("diff", tmp_path / "8.json", tmp_path / "8.json").stdout == "the plans are equal\n"
    assert "mesh: (x=2, y=4) -> (x=8)" in run("diff", tmp_path / "2x4.json", tmp_path / "8.json").stdout


@pytest.mark.medium
def test_calibrate_prints_and_writes_what_was_measured(tmp_path, monkeypatch):
    tiny = calibration.Sizes(matmul=(16, 64), copy_bytes=2**14, collective_bytes=(2**10, 2**16), run_s=1e-3, repeats=2)
    monkeypatch.setattr(calibration, "CPU_SIZES", tiny)
    out = tmp_path / "calibration.json"
    assert "measured" in run("calibrate", "--out", out).stdout
    assert Calibration.from_text(out.read_text()).num_devices == 8


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["plan", "cli_targets.py", "--cluster", "1x8:cpu"], ["cannot be read", "path/to/file.py:callable"]),
        (["plan", "cli_targets.py", "--cluster", "1x8:cpu"], ["Write for example cli_targets.py:target."]),
        (["plan", "gone.py:target", "--cluster", "1x8:cpu"], ["no file 'gone.py'", "Correct the path"]),
        (["plan", "no.such.module:target", "--cluster", "1x8:cpu"], ["No module named 'no'", "project's folder"]),
        (
            ["plan", "cli_targets.py:tarte", "--cluster", "1x8:cpu"],
            ["no callable 'tarte'", "Functions that take nothing there: pair, target", "Correct the name"],
        ),
        (["plan", "cli_targets.py:number", "--cluster", "1x8:cpu"], ["no callable 'number'"]),
        (["plan", "cli_targets.py:nothing", "--cluster", "1x8:cpu"], ["returned NoneType", "al.PlanTarget"]),
        (["plan", "cli_targets.py:pair", "--cluster", "eight"], ["'eight' cannot be read", "8x8:h100-sxm"]),
        (["plan", "cli_targets.py:pair", "--cluster", "1x8:cpu", "--mesh", "a"], ["--mesh 'a'", "2x4"]),
        (["plan", "cli_targets.py:pair", "--cluster", "1x8:cpu", "--mesh", "4x4"], ["16 devices", "has 8"]),
        (["verify", "cli_targets.py:gone", "--cluster", "1x8:h100-sxm"], ["no callable 'gone'"]),
        (["show", "gone.json"], ["cannot read the plan file 'gone.json'"]),
        (["diff", "gone.json", "gone.json"], ["cannot read the plan file 'gone.json'"]),
    ],
)
def test_bad_input_is_told_without_a_traceback(targets, arguments, parts):
    result = run(*arguments, code=2)
    assert result.stderr.startswith("error: ") and not result.stdout
    assert all(part in result.stderr for part in parts), result.stderr
    assert "Traceback" not in result.output


def test_a_shared_layout_is_no_plan_and_the_message_says_how_to_read_it(tmp_path):
    w, x = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((4, 8), "float32")
    layout = al.plan_shared({"only": (lambda w, x: x @ w, (w, x))}, shared="0", cluster=al.Cluster.parse("1x2:cpu"))
    layout.save(tmp_path / "layout.json")
    assert "layout.json' is a shared layout" in (told := run("show", tmp_path / "layout.json", code=2).stderr)
    assert "Read it with al.SharedLayout.load(path)" in told


def test_errors_inside_the_users_own_callable_keep_their_traceback(targets):
    targets.write_text("def target():\n    raise RuntimeError('mine')\n")
    result = CliRunner().invoke(main, ["plan", "cli_targets.py:target", "--cluster", "1x8:cpu"])
    assert isinstance(result.exception, RuntimeError)


@pytest.mark.medium
def test_it_runs_as_a_module_and_lists_its_verbs():
    result = subprocess.run([sys.executable, "-m", "alpa_lite", "--help"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    for verb in ("plan", "verify", "solve", "rules", "diff", "show", "calibrate", "launch"):
        assert verb in result.stdout


def test_a_gpu_plugin_without_gpu_takes_a_line(caplog):
    log = logging.getLogger("jax._src.xla_bridge")

    def fail() -> None:
        try:
            raise RuntimeError("no CUDA")
        except RuntimeError:
            log.exception("Jax plugin configuration error")

    with short_plugin_errors():
        fail()
    fail()
    assert [bool(record.exc_info) for record in caplog.records] == [False, True]
