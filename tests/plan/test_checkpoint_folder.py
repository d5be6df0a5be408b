"""Folders of checkpoints: only complete ones are seen, the last few stay, and every kind of damage is told in words."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from alpa_lite.errors import CheckpointError
from alpa_lite.plan import checkpoint_folder
from alpa_lite.plan.checkpoint import MANIFEST, PLAN, ItemLeaf, ItemRecord, Piece, check_state, joined_leaves
from alpa_lite.plan.checkpoint_folder import CheckpointFolder
from alpa_lite.plan.manifest import digests
from alpa_lite.plan.records import PlanIdentity

IDENTITY = PlanIdentity(fingerprint="sha256:1", cluster="1x4:cpu", jax_version="0.10.2", alpa_lite_version="0.1.0")


def item(folder: Path, name: str, text: str, **rows) -> ItemRecord:
    (folder / name).mkdir()
    (folder / name / "values").write_text(text)
    leaf = ItemLeaf(path="w", shape=(4, 2), dtype="float32", **rows)
    return ItemRecord(name=name, leaves=(leaf,), files=digests(folder / name))


def written(root: CheckpointFolder, step: int, text: str = "values", **given) -> Path:
    folder = root.begin(step)
    items = [item(folder, "submesh_0", text, rows=(0, 4)), item(folder, "submesh_1", text, rows=(4, 8))]
    return root.commit(step, items, plan_text='{"plan": 1}\n', identity=IDENTITY, **given)


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_round_trip(tmp_path):
    root = CheckpointFolder(tmp_path / "new" / "checkpoints")
    assert root.steps() == () and root.newest() is None
    path = written(root, 200, position=1600, extra={"epoch": 3, "seed": [1, 2]})
    assert path.name == "step_00000200" and names(path) == [MANIFEST, PLAN, "submesh_0", "submesh_1"]
    manifest = root.read(verify=True)
    assert (manifest.step, manifest.position, manifest.extra) == (200, 1600, {"epoch": 3, "seed": [1, 2]})
    assert manifest.identity == IDENTITY and manifest.jax_version and manifest.alpa_lite_version
    (leaf,) = manifest.leaves
    assert str(leaf) == "float32[8,2]" and leaf.pieces == (Piece("submesh_0", (0, 4)), Piece("submesh_1", (4, 8)))
    assert set(manifest.files) == {PLAN, "submesh_0/values", "submesh_1/values"}
    assert (path / PLAN).read_text() == '{"plan": 1}\n' and path.stat().st_mode & 0o777 == 0o755


def test_the_last_few_stay(tmp_path):
    root = CheckpointFolder(tmp_path, keep=2)
    for step in (1, 5, 3, 10):
        written(root, step)
    assert root.steps() == (5, 10) and names(tmp_path) == ["step_00000005", "step_00000010"]
    written(root, 2)  # older than what is there, as after restoring an older step: never the one that goes
    assert root.steps() == (2, 10)
    everything = CheckpointFolder(tmp_path)
    for step in range(20, 26):
        written(everything, step)
    assert len(everything.steps()) == 8


def test_older_ones_stay_until_the_new_one_is_complete(tmp_path):
    root = CheckpointFolder(tmp_path, keep=1)
    written(root, 1)
    item(root.begin(2), "submesh_0", "half")
    assert root.steps() == (1,) and root.newest() == 1
    root.abandon(2)
    assert names(tmp_path) == ["step_00000001"]


def test_a_step_that_is_saved_again_replaces_the_first(tmp_path):
    root = CheckpointFolder(tmp_path, keep=2)
    written(root, 1, "first")
    path = written(root, 1, "second")
    assert root.steps() == (1,) and names(tmp_path) == [path.name] == ["step_00000001.1"]
    assert (root.path(1) / "submesh_0" / "values").read_text() == "second"
    written(root, 1, "third")
    assert (root.path() / "submesh_0" / "values").read_text() == "third" and len(names(tmp_path)) == 1


def test_leftovers_go_and_folders_in_use_stay(tmp_path):
    root = CheckpointFolder(tmp_path)
    code = (
        "import sys, pathlib, os; from alpa_lite.plan.checkpoint_folder import CheckpointFolder\n"
        "print(CheckpointFolder(pathlib.Path(sys.argv[1])).begin(7), flush=True); sys.stdin.read()"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        theirs = Path(run.stdout.readline().strip())
        (theirs / "submesh_0").mkdir()
        ours = root.begin(7)
        assert theirs.is_dir() and ours != theirs and root.steps() == ()
    finally:
        run.kill()
        run.communicate()
    root.clean()
    assert ours.is_dir() and not theirs.exists()
    root.abandon(7)


def test_what_is_no_checkpoint_is_not_listed_and_not_touched(tmp_path):
    for name in ("step_00000003", "step_3", "step_00000004.x", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000009").write_text("a file")
    root = CheckpointFolder(tmp_path, keep=1)
    assert root.steps() == ()
    written(root, 2)
    assert written(root, 3).name == "step_00000003.1" and root.steps() == (3,)
    assert {"step_00000003", "step_3", "step_00000004.x", "notes", "step_00000009"} < set(names(tmp_path))


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(root: CheckpointFolder, *parts: str, verify: bool = False) -> None:
    with pytest.raises(CheckpointError) as error:
        root.read(verify=verify)
    missing = [part for part in parts if part not in str(error.value)]
    assert not missing, f"the message lacks {missing}:\n{error.value}"


def test_a_step_given_for_the_folder_of_all(tmp_path, monkeypatch):
    written(CheckpointFolder(tmp_path), 4)
    said = f"It is one itself: give the folder {str(tmp_path)!r}, and step=4."
    refused(CheckpointFolder(tmp_path / "step_00000004"), "no checkpoint in", said)
    monkeypatch.chdir(tmp_path / "step_00000004")
    refused(CheckpointFolder(Path()), said)


def test_a_step_that_is_not_there(tmp_path):
    root = CheckpointFolder(tmp_path)
    refused(root, f"no checkpoint in {str(tmp_path)!r}; complete ones: none", "step.save", "Check the folder")
    written(root, 4)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5 .* steps 4\. .*take a step that is there"):
        root.path(5)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda p: (p / "submesh_1" / "values").unlink(), ("'submesh_1/values' cannot be read", "No such file")),
        (lambda p: (p / PLAN).write_text("{}"), (f"'{PLAN}' has 2 bytes, it was written with 12",)),
        (lambda p: (p / MANIFEST).write_text(""), (f"its {MANIFEST} cannot be understood",)),
        (lambda p: (p / MANIFEST).write_bytes((p / MANIFEST).read_bytes()[:-40]), ("cannot be understood",)),
        (lambda p: edit(p, step=9), (f"its {MANIFEST} was changed",)),
        (lambda p: edit(p, unknown=1), ("unknown field `unknown`",)),
        (lambda p: edit(p, leaves="w"), ("cannot be understood",)),
    ],
)
def test_damage_is_named(tmp_path, damage, said):
    root = CheckpointFolder(tmp_path)
    path = written(root, 4)
    damage(path)
    refused(root, f"the checkpoint {str(path)!r} is damaged", *said, "as they were written", "restore an older step")


def test_a_changed_byte_is_found_by_reading_all(tmp_path):
    root = CheckpointFolder(tmp_path)
    path = written(root, 4)
    (path / "submesh_1" / "values").write_text("valueS")
    root.read()
    refused(root, "'submesh_1/values' was changed (sha256:", verify=True)


def edit(path: Path, **fields) -> None:
    tree = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(tree | fields))


def test_foreign_folders_and_other_versions(tmp_path):
    root = CheckpointFolder(tmp_path)
    path = written(root, 4)
    edit(path, format="alpa_lite.export")
    refused(root, "is no checkpoint", "'alpa_lite.export', not 'alpa_lite.checkpoint'", "Check the path")
    edit(path, format="alpa_lite.checkpoint", format_version=2, alpa_lite_version="3.1", unknown=1)
    refused(root, "format version 2 (written by alpa_lite 3.1)", "reads version 1", "Install the version")


@pytest.mark.parametrize("place", ["sync", "encode_manifest", "sync_tree"])
def test_no_space_at_the_end(tmp_path, monkeypatch, place):
    """The disk is full when the checkpoint is completed: older ones stay, nothing of the new one does."""
    root = CheckpointFolder(tmp_path, keep=1)
    written(root, 1)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_folder, place, full)
    with pytest.raises(
        CheckpointError, match=r"step 2 .*No space left.*older checkpoints are untouched. Free space there"
    ):
        written(root, 2)
    assert names(tmp_path) == ["step_00000001"] and root.steps() == (1,)
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    monkeypatch.undo()
    written(root, 2)
    assert root.steps() == (2,)


def test_a_root_that_is_a_file(tmp_path):
    (tmp_path / "root").write_text("")
    with pytest.raises(CheckpointError, match=r"step 0 could not be written .*File exists.*Correct the cause"):
        CheckpointFolder(tmp_path / "root").begin(0)


def test_items_that_make_up_no_state(tmp_path):
    def record(name, path="w", rows=None, shape=(4, 2)):
        return ItemRecord(name=name, leaves=(ItemLeaf(path=path, rows=rows, shape=shape, dtype="int8"),), files={})

    whole = joined_leaves([record("a"), record("b", "v")])
    assert [leaf.path for leaf in whole] == ["v", "w"]
    for bad in (
        [record("a"), record("b")],
        [record("a", rows=(0, 4)), record("b", rows=(5, 9))],
        [record("a", rows=(0, 4)), record("b", rows=(3, 7))],
        [record("a", rows=(0, 4)), record("b")],
        [record("a", rows=(1, 5))],
        [record("a", rows=(0, 4)), record("b", rows=(4, 8), shape=(4, 3))],
    ):
        with pytest.raises(CheckpointError, match=r"do not make up the leaf 'w': they hold w.* commit all items"):
            joined_leaves(bad)
    root = CheckpointFolder(tmp_path)
    folder = root.begin(1)
    with pytest.raises(CheckpointError, match="do not make up"):
        root.commit(1, [item(folder, "submesh_0", "x", rows=(1, 5))], plan_text="")
    assert names(tmp_path) == []


def test_a_state_that_is_another_one(tmp_path):
    root = CheckpointFolder(tmp_path)
    path, manifest = written(root, 1), root.read()
    check_state(manifest, path, {"w": ((8, 2), "float32")})
    for wanted, said in (
        ({"w": ((8, 2), "float32"), "v": ((1,), "int8")}, r"no leaf 'v'.*'w'"),
        ({"w": ((8, 2), "bfloat16")}, r"'w' of .* is float32\[8,2\], and bfloat16\[8,2\] is wanted"),
        ({"w": ((9, 2), "float32")}, r"'w' of .* is float32\[8,2\], and float32\[9,2\] is wanted"),
        ({}, "holds leaves that the state does not have: 'w'"),
    ):
        with pytest.raises(CheckpointError, match=said):
            check_state(manifest, path, wanted)


def test_a_copy_is_a_checkpoint(tmp_path):
    first = CheckpointFolder(tmp_path / "first")
    written(first, 3)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    assert CheckpointFolder(tmp_path / "second").read(3, verify=True) == first.read(3)
