"""``alpa-lite doctor``: what it finds, what it says of what is missing, and that nothing of it is left running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata

import numpy as np
import pytest
from typer.testing import CliRunner

from alpa_lite.cli import doctor_proof, main
from alpa_lite.cli.doctor import Check, cache_folder, in_process, jaxlib_version, package, within
from benchmarks.ray_session import free_port
from tests.executor.ray_nodes import ROOT, own_environment, session_processes
from tests.serve.clients import wait_until


def versions(monkeypatch, **found):
    """Pretend that these packages, and no others, are installed."""

    def version(name):
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("version", "window", "fits"),
    [
        ("0.10.1", "<0.13,>=0.10.1", True),
        ("0.10.0", "<0.13,>=0.10.1", False),
        ("0.13", "<0.13,>=0.10.1", False),
        ("0.13.0.dev3", "<0.13,>=0.10.1", False),
        ("0.9.9", ">=0.10", False),
        ("9.15.6755", ">=9.14", True),
        ("3", "", True),
    ],
)
def test_versions_are_compared_as_numbers(version, window, fits):
    assert within(version, window) is fits


def test_packages_that_are_missing_or_too_old(monkeypatch):
    versions(monkeypatch, jax="0.9.0", ray="2.60.0")
    assert str(package("jax<0.13,>=0.10.1")) == (
        "FAIL  jax                0.9.0, not <0.13,>=0.10.1. pip install 'jax<0.13,>=0.10.1'"
    )
    optional = package("matplotlib>=3.9; extra == 'plots'", "plots", "plots", needed=False)
    assert str(optional) == ("warn  matplotlib         not installed; it is for plots. pip install 'alpa-lite[plots]'")
    assert package('ray[default]>=2.50; extra == "ray"', "ray", "hosts") == Check(
        name="ray", status="ok", found="2.60.0"
    )
    assert package("ortools>=9.14").status == "FAIL"
    assert jaxlib_version().found == "no jaxlib"
    versions(monkeypatch, jax="0.10.2", jaxlib="0.11.0")
    assert jaxlib_version().found == "0.11.0 is newer than JAX 0.10.2"


def test_a_cache_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    check = cache_folder(str(tmp_path / "file" / "compiled"))
    assert (check.status, "cannot be written to: Not a directory" in check.found) == ("warn", True)
    assert cache_folder(str(tmp_path / "new" / "compiled")).status == "ok"


@pytest.mark.medium
def test_a_check_that_hangs_or_dies_is_a_finding(tmp_path, monkeypatch):
    first = 'import sys, time\nprint("noise")\nprint(\'{"name": "a", "status": "ok", "found": "b"}\', flush=True)\n'
    (tmp_path / "hangs.py").write_text(
        f"{first}import os, subprocess\nopen('pid', 'w').write(str(os.getpid()))\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\ntime.sleep(99)"
    )
    (tmp_path / "dies.py").write_text(f"{first}sys.exit('no driver')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    good = Check(name="a", status="ok", found="b")
    found = list(in_process("hangs", [], "devices", 5.0))
    assert found[0] == good and found[1].status == "FAIL" and found[1].found == "the check did not end within 5 s"
    session = int((tmp_path / "pid").read_text())
    wait_until(lambda: not session_processes(session))
    found = list(in_process("dies", [], "devices", 30.0))
    assert found[0] == good and found[1].found == "the check ended with code 1; its last words: no driver"


def test_values_are_compared_bit_by_bit():
    one = {"a": np.float32([1, 2]), "b": np.float32(0)}
    assert doctor_proof.differences(one, one) == []
    assert doctor_proof.differences(one, {"a": np.float32([1, 2 + 2**-22]), "b": np.float32(-0.0)}) == [
        "['a']",
        "['b']",
    ]


def test_bad_input_and_a_failed_check(monkeypatch):
    result = CliRunner().invoke(main, ["doctor", "--address", "head:6379"])
    assert result.exit_code == 2 and "Write --executor ray --address HOST:PORT" in result.stderr
    checks = [Check(name="a", status="warn", found="b", todo="c"), Check(name="d", status="FAIL", found="e")]
    monkeypatch.setattr(sys.modules["alpa_lite.cli.doctor"], "_checks", lambda ray, address: iter(checks))
    result = CliRunner().invoke(main, ["doctor"])
    assert (result.exit_code, result.stdout) == (1, f"warn  a{' ' * 18}b. c\nFAIL  d{' ' * 18}e\n")
    monkeypatch.setattr(sys.modules["alpa_lite.cli.doctor"], "_checks", lambda ray, address: iter(checks[:1]))
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert (result.exit_code, json.loads(result.stdout)["todo"]) == (0, "c")


def run(*arguments, env):
    command = [sys.executable, "-m", "alpa_lite", "doctor", "--json", *arguments]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=200)
    return done.returncode, {c["name"]: c for c in map(json.loads, done.stdout.splitlines())}


@pytest.mark.medium
def test_this_machine():
    code, found = run(env=own_environment() | {"JAX_PLATFORMS": "cpu"})
    assert code == 0 and {"Python", "jax", "jaxlib", "ortools", "ray", "compile cache"} <= set(found)
    proof = found["serial = parallel"]
    assert proof["status"] == "ok"
    assert proof["found"] == "8 devices as mesh (data=2, model=4), 2 collectives: bit-equal to one device"


@pytest.mark.ray
@pytest.mark.slow
def test_ray_clusters():
    env = own_environment() | {"JAX_PLATFORMS": "cpu", "RAY_AUTH_TOKEN": "0123456789abcdef"}
    code, found = run("--executor", "ray", env=env)
    assert code == 0, found
    assert found["Ray node 0"]["found"].startswith("127.0.0.1: ")
    if (os.cpu_count() or 1) > 1:
        assert "bit-equal to one device" in found["Ray workers"]["found"]
    address = f"127.0.0.1:{free_port()}"
    code, found = run("--executor", "ray", "--address", address, env=env)
    assert code == 1 and found["Ray cluster"]["status"] == "FAIL"
    assert f"no Ray cluster answers at '{address}'" in found["Ray cluster"]["found"] and "Ray workers" not in found
