"""``plan.export`` and ``al.load_export``: what is written is what was planned, and damage is told in words."""

from __future__ import annotations

import builtins
import importlib.util
import json
import re
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import ArgumentsError, ExportError, PlanFileError
from alpa_lite.executor.export import raw_array
from alpa_lite.executor.verify import compile_for_target
from alpa_lite.lowering.audit import audit
from alpa_lite.plan.manifest import MANIFEST, digest_of
from tests.executor.exported_steps import batch, plan, shapes, state, step

pytest.importorskip("flatbuffers", reason="flatbuffers is not installed: pip install 'alpa-lite[export]'")

NO_COMPILER = importlib.util.find_spec("jax_cuda12_plugin") is None
needs_compiler = pytest.mark.skipif(NO_COMPILER, reason="XLA:GPU is not installed: pip install 'alpa-lite[aot]'")
COMMON = {
    "logical_axis_rules.json",
    "manifest.json",
    "partition_specs.json",
    "plan.json",
    "program.txt",
    "scheme.txt",
    "shardings.mlir",
    "step_cpu.jax_export",
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    out = tmp_path_factory.mktemp("export") / "out"
    plan(4).export(step, out, state(), shapes(batch()))
    return out


@pytest.fixture
def copy(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "copy")


@pytest.mark.medium
def test_the_files(exported):
    ranks = {f"rank_{r}/{name}" for r in range(4) for name in ("slices.json", "0.npy", "1.npy", "2.npy")}
    assert {p.relative_to(exported).as_posix() for p in exported.rglob("*") if p.is_file()} == COMMON | ranks
    assert al.load_plan(exported / "plan.json") == plan(4)
    assert (exported / "scheme.txt").read_text().startswith(str(plan(4)))
    assert "dot_general" in (exported / "program.txt").read_text()
    names = set(json.loads((exported / MANIFEST).read_text())["files"])
    assert names == (COMMON | ranks) - {MANIFEST}


def test_slices_of_all_ranks_are_the_arguments(exported):
    parts = [al.load_export(exported, rank) for rank in range(4)]
    given = state()
    assert set(parts[0].parameters) == {"0/key", "0/params/w1", "0/params/w2"}
    for part in parts:
        assert part.plan == plan(4) and part.specs["0/params/w1"] == P(None, "x")
        assert part.slices["1/x"] == ((2 * part.rank, 2 * part.rank + 2), (0, 16))
        np.testing.assert_array_equal(part.parameters["0/key"], jax.random.key_data(given["key"]))
    w1 = np.concatenate([part.parameters["0/params/w1"] for part in parts], axis=1)
    assert w1.dtype == jnp.bfloat16 and parts[0].parameters["0/params/w1"].shape == (16, 8)
    np.testing.assert_array_equal(w1, given["params"]["w1"])
    w2 = parts[0].plan.inputs[2]
    rebuilt = np.zeros((32, 8), "float32")
    for part in parts:
        rebuilt[tuple(slice(*bounds) for bounds in part.slices[w2.path])] = part.parameters[w2.path]
    np.testing.assert_array_equal(rebuilt, given["params"]["w2"])


def test_ranks_that_hold_the_same_slice_share_a_file(exported):
    assert len({(exported / f"rank_{r}" / "0.npy").stat().st_ino for r in range(4)}) == 1
    assert len({(exported / f"rank_{r}" / "1.npy").stat().st_ino for r in range(4)}) == 4


@pytest.mark.medium
def test_the_step_gives_what_the_function_gives(exported):
    part = al.load_export(exported, 0)
    assert list(part.programs) == ["cpu"] and part.programs["cpu"].nr_devices == 4
    mesh = part.mesh()
    shardings = [jax.sharding.NamedSharding(mesh, part.specs[path]) for path in part.plan.input_paths]
    leaves = [jax.device_put(x, s) for x, s in zip(jax.tree.leaves((state(), batch())), shardings, strict=True)]
    results = part.step(mesh)(*leaves)
    expected = jax.tree.leaves(jax.jit(step)(state(), batch()))
    assert part.manifest.donated == (0, 1, 2) and leaves[1].is_deleted() and not leaves[3].is_deleted()
    for path, ours, theirs in zip(part.plan.output_paths, results, expected, strict=True):
        assert ours.sharding.spec == part.specs[path] or ours.sharding.is_fully_replicated
        if path != "out/0/key":
            np.testing.assert_allclose(
                np.asarray(ours, "float32"),
                np.asarray(theirs, "float32"),
                rtol=1e-2 if "w1" in path else 1e-5,
                atol=1e-6,
            )
    np.testing.assert_array_equal(jax.random.key_data(results[0]), jax.random.key_data(expected[0]))


def test_without_arguments_the_shapes_of_planning_are_known(tmp_path):
    plan(2).export(step, tmp_path / "a")
    part = al.load_export(tmp_path / "a", 1)
    assert part.parameters == {} and part.slices["0/params/w1"] == ((0, 16), (16, 32))
    saved = tmp_path / "plan.json"
    plan(2).save(saved)
    loaded = al.load_plan(saved)
    with pytest.raises(al.AlpaLiteError, match="an export without arguments"):
        loaded.export(step, tmp_path / "b")
    assert not (tmp_path / "b").exists()
    loaded.bind(step, state(), batch()).export(step, tmp_path / "b")
    assert al.load_export(tmp_path / "b", 0).manifest.files["plan.json"] == part.manifest.files["plan.json"]


def test_weak_types_and_static_arguments(tmp_path):
    def scaled(mode, x, rate, *, flag):
        return x * rate if mode == "up" and flag else x

    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    cluster = al.Cluster.parse("1x2:cpu")
    made = al.plan(scaled, "up", x, 0.5, flag=True, cluster=cluster, static_argnums=0, static_argnames="flag")
    with pytest.raises(ArgumentsError):  # static values are not part of a plan
        made.export(scaled, tmp_path / "a")
    made.export(scaled, tmp_path / "a", "up", x, 0.5, flag=True)
    part = al.load_export(tmp_path / "a", 0)
    assert list(part.parameters) == ["2"] and part.parameters["2"] == np.float32(0.5)

    plain = al.plan(lambda x, rate: x * rate, x, 0.5, cluster=cluster)
    plain.export(lambda x, rate: x * rate, tmp_path / "b")
    assert al.load_export(tmp_path / "b", 0).parameters == {}


@pytest.mark.medium
def test_dims_that_are_padded_inside_keep_their_size_outside(tmp_path):
    def function(w, x):
        return jnp.tanh(x @ w)

    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(shape, dtype="float32") for shape in ((8, 101), (16, 8)))
    pins = {"0": P(None, "x"), "1": P()}
    made = al.plan(function, w, x, cluster=al.Cluster.parse("1x4:cpu"), pins=pins)
    assert made.paddings
    made.export(function, tmp_path / "out", w, x)
    part = al.load_export(tmp_path / "out", 2)
    result = part.step(part.mesh())(w, x)[0]
    assert result.shape == (16, 101)
    np.testing.assert_allclose(result, np.tanh(x @ w), rtol=1e-5, atol=1e-5)


@pytest.mark.medium
def test_what_is_compiled_is_what_was_planned(exported):
    part = al.load_export(exported, 0)
    mesh = part.mesh()
    avals = part.programs["cpu"].in_avals
    compiled = part.step(mesh).lower(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)).compile()
    report = audit(part.plan.collectives, compiled.as_text(), part.plan.mesh)
    assert report.ok and part.plan.collectives, report


@pytest.fixture(scope="module")
def for_gpus(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpus") / "out"
    pins = {"0/params/w1": P(None, "x"), "1/x": P("x", None)}
    made = al.plan(
        step, state(), shapes(batch()), cluster=al.Cluster.parse("1x4:h100-sxm"), pins=pins, donate_argnums=0
    )
    made.export(step, out)
    return out


def test_a_gpu_plan_is_lowered_for_its_own_platform_and_for_cpu(for_gpus):
    part = al.load_export(for_gpus, 0)
    assert {name: program.platforms for name, program in part.programs.items()} == {"cuda": ("cuda",), "cpu": ("cpu",)}


@needs_compiler
@pytest.mark.slow
def test_what_the_gpu_compiler_makes_is_what_was_planned(for_gpus):
    part = al.load_export(for_gpus, 0)
    data = (for_gpus / "step_cuda.jax_export").read_bytes()
    donated = part.manifest.donated
    made = compile_for_target(data, device="h100-sxm", mesh=part.plan.mesh, devices_per_host=4, donated=donated)
    report = audit(part.plan.collectives, made.hlo_text, part.plan.mesh)
    assert report.ok and part.plan.collectives, report


def test_devices_for_which_the_step_was_not_lowered(exported):
    part = al.load_export(exported, 0)
    other = replace(part, programs={"tpu": part.programs["cpu"]})
    message = r"devices of platform 'cpu', the export was lowered for tpu: .*given to step\(mesh\)\. .*export again"
    with pytest.raises(ExportError, match=message):
        other.step(other.mesh())


# -- where an export may go --------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_empty_is_refused_unless_asked(exported, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    plan(2).export(step, out)  # an empty one is taken
    before = (out / "manifest.json").read_bytes()
    message = (
        r"the folder '.*out' is not empty \(logical_axis_rules.json, .*, \.\.\.\)\. A plan is exported to a new or an empty "
        r"folder.*given as out_dir\. Give another folder, or plan\.export\(\.\.\., overwrite=True\)"
    )
    with pytest.raises(ExportError, match=message):
        plan(4).export(step, out)
    assert (out / "manifest.json").read_bytes() == before
    (out / "mine.txt").write_text("notes")
    plan(4).export(step, out, overwrite=True)
    assert al.load_export(out, 3).rank == 3
    plan(2).export(step, out, overwrite=True)  # no rank 2 is left
    assert sorted(p.name for p in out.glob("rank_*")) == ["rank_0", "rank_1"]
    assert (out / "mine.txt").read_text() == "notes"


def test_what_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ExportError, match=r"file' is not a folder\..*Give another name"):
        plan(2).export(step, tmp_path / "file", overwrite=True)
    with pytest.raises(ExportError, match=r"No such file or directory\. It must be .* Nothing was written"):
        plan(2).export(step, tmp_path / "no" / "where")


def test_an_interrupted_export_leaves_nothing(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(KeyboardInterrupt):
        plan(2).export(step, tmp_path / "out", state(), batch())
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_is_told(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(ExportError, match=r"No space left on device\. .*on a disk with room"):
        plan(2).export(step, tmp_path / "out", state(), batch())
    assert list(tmp_path.iterdir()) == []


def test_another_function_and_other_arguments_are_refused(tmp_path):
    with pytest.raises(PlanFileError, match="another program"):
        plan(2).export(lambda s, b: (s, b["x"].sum()), tmp_path / "out")
    with pytest.raises(ArgumentsError, match="'overwite'"):
        plan(2).export(step, tmp_path / "out", state(), batch(), overwite=True)
    assert not (tmp_path / "out").exists()


def test_an_array_of_several_processes_is_refused():
    far = SimpleNamespace(is_fully_addressable=False)
    with pytest.raises(ExportError, match=r"'1/x' is spread over several processes.*must hold all values.*gather it"):
        raw_array(far, plan(2).inputs[3])


def test_an_array_that_is_gone_is_refused(tmp_path):
    gone = jax.tree.map(jnp.array, batch())
    gone["x"].delete()
    with pytest.raises(ExportError, match=r"'1/x' was deleted, or donated.*ShapeDtypeStruct"):
        plan(2).export(step, tmp_path / "out", state(), gone)
    assert not (tmp_path / "out").exists()


def test_a_step_that_jax_cannot_export(tmp_path):
    def printing(x):
        jax.debug.print("{}", x.sum())
        return x + 1

    made = al.plan(printing, jnp.ones((4, 4)), cluster=al.Cluster.parse("1x2:cpu"))
    with pytest.raises(ExportError, match=r"(?s)cannot be exported: .*no host callbacks.*Leave them out"):
        made.export(printing, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_flatbuffers_is_named_when_it_is_missing(exported, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("flatbuffers"):
            raise ImportError("No module named 'flatbuffers'")
        return real(name, *args, **kwargs)

    for name in [n for n in sys.modules if n.startswith(("flatbuffers", "jax._src.export.serialization"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    for action in (lambda: plan(2).export(step, tmp_path / "out"), lambda: al.load_export(exported, 0)):
        with pytest.raises(ExportError, match=re.escape("pip install 'alpa-lite[export]'")):
            action()


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plan.json", "step_cpu.jax_export", "rank_1/slices.json", "rank_1/1.npy"])
@pytest.mark.parametrize("damage", ["gone", "short", "changed"])
def test_damage_is_found_by_the_rank_that_needs_the_file(copy, name, damage):
    path = copy / name
    data = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(data[:-1] if damage == "short" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ExportError, match=f"is damaged: '{name}'.*export the plan again"):
        al.load_export(copy, 1)
    if name.startswith("rank_1"):
        assert al.load_export(copy, 0).rank == 0


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_does_not_exist(exported, rank):
    with pytest.raises(ExportError, match=rf"rank {rank} was asked .* which has 4 \(0 to 3\).*Give one of those"):
        al.load_export(exported, rank)


def test_a_step_of_another_jax(copy):
    manifest = json.loads((copy / MANIFEST).read_text())
    (copy / "step_cpu.jax_export").write_bytes(b"\x10\x00\x00\x00" + bytes(60))
    digest = digest_of(copy / "step_cpu.jax_export")
    manifest["files"]["step_cpu.jax_export"] = {"size_bytes": digest.size_bytes, "sha256": digest.sha256}
    manifest["jax_version"] = "0.99"
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ExportError, match=r"cannot be read by JAX .* written by JAX 0\.99.*Export the plan again"):
        al.load_export(copy, 0)
