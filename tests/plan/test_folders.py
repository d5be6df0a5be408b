"""Folders appear whole or not at all, and what is not ours stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from alpa_lite.plan.folders import folder_at_once
from alpa_lite.plan.manifest import MANIFEST


def names(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


def write(target, **files):
    with folder_at_once(target) as folder:
        for name, text in files.items():
            (folder / name).write_text(text)


def as_export(*listed):
    return json.dumps({"format": "alpa_lite.export", "files": {name: {} for name in listed}})


def test_the_folder_appears_at_the_end(tmp_path):
    target = tmp_path / "out"
    with folder_at_once(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists() and folder.parent == tmp_path
    assert names(tmp_path) == ["out", "out/a"]
    assert target.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("there", [False, True])
def test_an_error_or_ctrl_c_leaves_what_was_there(tmp_path, error, there):
    target = tmp_path / "out"
    if there:
        target.mkdir()
        (target / "old").write_text("0")
    before = names(tmp_path)
    with pytest.raises(error), folder_at_once(target) as folder:
        (folder / "a").write_text("1")
        raise error
    assert names(tmp_path) == before


def test_an_earlier_export_goes_and_other_files_stay(tmp_path):
    target = tmp_path / "out"
    write(target, **{"a": "1", "b": "1", MANIFEST: as_export("a", "b")})
    (target / "notes").write_text("mine")
    write(target, **{"a": "2", MANIFEST: as_export("a")})
    assert names(tmp_path) == ["out", "out/a", "out/manifest.json", "out/notes"]
    assert (target / "a").read_text() == "2" and (target / "notes").read_text() == "mine"


def killed_while_writing(target):
    """A process that is killed inside ``folder_at_once``; returns once it is dead."""
    code = (
        "import sys, time, pathlib; from alpa_lite.plan.folders import folder_at_once\n"
        "with folder_at_once(pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'a').write_text('half'); print('in', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"in\n"
    return process


def test_a_killed_process_leaves_a_partial_folder_that_the_next_removes(tmp_path):
    target = tmp_path / "out"
    process = killed_while_writing(target)
    write(tmp_path / "other", a="1")  # of another name: not touched
    write(target, b="1")  # in use: not touched
    left = [name for name in os.listdir(tmp_path) if name.endswith(".partial")]
    assert len(left) == 1 and left[0].startswith(".out.")
    process.kill()
    process.communicate()
    write(target, c="1")
    deadline = time.monotonic() + 5
    while any(name.startswith(".") for name in os.listdir(tmp_path)):
        assert time.monotonic() < deadline, os.listdir(tmp_path)
    assert names(target) == ["b", "c"]


@pytest.mark.parametrize("new_is_there", [False, True])
def test_a_swap_that_was_cut_short_is_finished_or_undone(tmp_path, new_is_there):
    """Between two renames the old folder has another name; nothing of the user's is lost."""
    target, old = tmp_path / "out", tmp_path / ".out.x.replaced"
    old.mkdir()
    (old / "notes").write_text("mine")
    (old / "a").write_text("old")
    (old / MANIFEST).write_text(as_export("a"))
    if new_is_there:
        target.mkdir()
        (target / "b").write_text("new")
    with pytest.raises(RuntimeError), folder_at_once(target):
        raise RuntimeError
    assert names(target) == (["b", "notes"] if new_is_there else ["a", MANIFEST, "notes"])
    assert names(tmp_path)[0] == "out"
