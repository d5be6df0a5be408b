"""The picture of a symbolic plan: it is drawn, and says what to do where it cannot be."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al

X = jax.ShapeDtypeStruct((512, 512), jnp.float32)
CLUSTER = al.Cluster.symbolic("n", device="h100-sxm", devices_per_host=8, values=(1, 2, 3, 4))


def plan(**options):
    return al.plan(lambda x: x @ x, X, cluster=CLUSTER, options=al.PlanOptions(mesh_shape=("n",), **options))


@pytest.mark.medium
def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "memory.png"
    plan().plot(picture, budget=2e6)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


@pytest.mark.medium
def test_an_error_while_it_is_drawn_leaves_the_old_picture(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    picture = tmp_path / "memory.png"
    picture.write_bytes(b"old")

    def fail(self, file, **_):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure, "savefig", fail)
    with pytest.raises(al.AlpaLiteError, match=r"the picture cannot be saved .* No space left"):
        plan().plot(picture)
    assert picture.read_bytes() == b"old" and list(tmp_path.iterdir()) == [picture]


def test_nothing_to_plot(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(al.AlpaLiteError, match=r"no n of .* has a plan.*memory_budget_bytes"):
        plan(memory_budget_bytes=1000).plot(tmp_path / "memory.png")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(al.AlpaLiteError, match=r"needs matplotlib.*alpa-lite\[plots\]"):
        plan().plot(tmp_path / "memory.png")
