"""Files that are whole or not there, and what is no file."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from alpa_lite.plan.files import whole_file, write_atomically


def test_a_crash_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "plan.json"
    write_atomically(target, b"old")

    def crash(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="No space"):
        write_atomically(target, b"new and longer")
    assert target.read_bytes() == b"old" and list(tmp_path.iterdir()) == [target]


def test_an_error_while_it_is_written_leaves_no_part(tmp_path: Path) -> None:
    def fail() -> None:
        with whole_file(tmp_path / "results.npz") as file:
            file.write(b"half")
            raise RuntimeError("the rest")

    with pytest.raises(RuntimeError, match="the rest"):
        fail()
    assert not list(tmp_path.iterdir())


def test_a_link_goes_on_to_link_to_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "plan.json").write_bytes(b"old")
    link = tmp_path / "link.json"
    link.symlink_to(folder / "plan.json")
    write_atomically(link, b"new")
    assert link.is_symlink() and (folder / "plan.json").read_bytes() == b"new"
    assert [f.name for f in folder.iterdir()] == ["plan.json"]


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_atomically(pipe, b"plan")
    reader.join(timeout=20)
    assert got == [b"plan"] and pipe.is_fifo()


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path, b"plan")
