"""The house keeps its promises: versions agree, the light rooms stay light, the golden fixture can fail."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIGHT_ROOMS = ("core", "plan", "cluster", "costs", "interop", "schedule")


def test_light_rooms_import_without_jax_and_solver():
    imports = "; ".join(f"import alpa_lite.{room}" for room in LIGHT_ROOMS)
    check = "import sys; bad = {'jax', 'ortools', 'ray'} & set(sys.modules); assert not bad, bad"
    subprocess.run([sys.executable, "-c", f"{imports}; {check}"], check=True, timeout=60)


def test_python_and_jax_window_is_stated_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    window = next(d for d in project["dependencies"] if d.startswith("jax>"))
    for extra in ("cuda12", "cuda13"):
        assert project["optional-dependencies"][extra] == [window.replace("jax", f"jax[{extra}]", 1)]
    assert window.removeprefix("jax") in (ROOT / "README.md").read_text()


def test_golden_fixture_fails_on_missing_and_on_different_text(golden, tmp_path, monkeypatch, request):
    if request.config.getoption("--update-golden"):
        pytest.skip("files are being written")
    # The conftest module is reached through the fixture's own globals: it is not importable by name.
    monkeypatch.setitem(golden.__globals__, "GOLDEN", tmp_path)
    with pytest.raises(pytest.fail.Exception, match="missing; read the text"):
        golden("nothing", "text\n")
    (tmp_path / "something.txt").write_text("old\n")
    with pytest.raises(AssertionError, match="run with --update-golden"):
        golden("something", "new\n")
    golden("something", "old\n")
