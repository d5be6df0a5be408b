"""The page ``docs/checkpoints.md``: its Python runs as it stands, and its table of files is what a checkpoint holds."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

from docs import pages

pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed: pip install 'alpa-lite[checkpoint]'")
TEXT = (pages.DOCS / "checkpoints.md").read_text(encoding="utf-8")


@pytest.mark.medium
def test_the_block_runs_and_the_table_lists_the_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    (block,) = pages.python_blocks(TEXT)
    exec(block, names)
    path = names["path"].relative_to("checkpoints")
    listed = re.findall(r"^\| `(.*?)` \|", TEXT, re.MULTILINE)
    held = {f"{path}/{entry.name}{'/' * entry.is_dir()}" for entry in names["path"].iterdir()}
    assert held == {*listed, f"{path}/submesh_1/"}
    restored, again = names["restored"], names["train"](names["init"](), names["x"])[0]
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert int(names["state"]["count"]) == 2
    assert restored["params"]["up"].devices() == set(jax.devices()[:8])
