"""The page ``docs/export.md``: its Python runs as it stands, and its table of files is what an export holds."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

from docs import export as page
from docs import pages

pytest.importorskip("flatbuffers", reason="flatbuffers is not installed: pip install 'alpa-lite[export]'")
pytest.importorskip("flax", reason="Flax is not installed: pip install 'alpa-lite[examples]'")

TEXT = page.PAGE.read_text(encoding="utf-8")


@pytest.mark.medium
def test_the_blocks_run_and_say_what_their_comments_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for block in pages.python_blocks(TEXT):
        exec(block, names)
    part, plan, last = names["part"], names["plan"], names["last"]
    assert last.stages == (1,) and list(last.parameters) == ["0/down"]
    assert last.programs("cuda")[1, "forward"].nr_devices == 2
    value, (x, y) = jax.jit(names["two_stages"]), np.ones((2, 64, 256), np.float32)
    results = names["train"](names["params"]["down"], names["params"]["up"], x, y)
    np.testing.assert_allclose(results[2], value(names["params"], x, y)[1], rtol=1e-5)
    assert part.slices["1"] == ((0, 32), (0, 256))
    assert part.specs["0/up"] == jax.sharding.PartitionSpec(None, "model")
    for path, leaf in {"0/up": names["placed"]["up"], "0/down": names["placed"]["down"]}.items():
        assert leaf.sharding.spec == part.specs[path]
        np.testing.assert_array_equal(leaf.addressable_shards[1].data, part.parameters[path])
    layout = names["nn"].logical_to_mesh_axes(names["names"]["logical_axes"]["0/up"], names["rules"])
    sharding = jax.sharding.NamedSharding(names["mesh"], layout)
    assert sharding.is_equivalent_to(jax.sharding.NamedSharding(names["mesh"], part.specs["0/up"]), 2)
    assert plan.mesh.shape == (2, 2)


@pytest.mark.medium
def test_the_table_lists_the_files(tmp_path):
    out = page.export(tmp_path)
    rows = re.findall(r"^\| (`.*?) \|", TEXT.partition("## Read a part")[0], re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    held = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    assert listed == {n for n in held if not n.startswith("rank_")} | {"rank_0/slices.json", "rank_0/0.npy"}
    assert {n for n in held if n.startswith("rank_3")} == {"rank_3/slices.json", "rank_3/0.npy", "rank_3/1.npy"}
