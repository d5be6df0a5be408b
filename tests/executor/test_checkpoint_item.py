"""Items of checkpoints: exact round trips onto other meshes and other rows, saving beside the running program, damage."""

from __future__ import annotations

import errno
import hashlib
import itertools
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from alpa_lite.errors import CheckpointError
from alpa_lite.executor import checkpoint_item
from alpa_lite.executor.checkpoint_item import ItemWriter
from alpa_lite.executor.item_reader import read_leaves
from alpa_lite.plan.checkpoint_folder import CheckpointFolder
from tests.executor.checkpoint_states import assert_equal, leaves, mesh, placed, saved, structs
from tests.marks import slow_but

ROOT = Path(__file__).resolve().parents[2]
ocp = pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed: pip install 'alpa-lite[checkpoint]'")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One item with every kind of leaf."""
    folder = CheckpointFolder(tmp_path_factory.mktemp("whole"))
    saved(folder, 1, {"submesh_0": leaves(mesh())})
    return folder


@pytest.mark.medium
def test_every_kind_of_leaf_comes_back_exactly_in_another_layout(whole):
    arrays, other = leaves(mesh()), mesh(2, (4,), ("z",))
    got = read_leaves(
        whole.path(), whole.read(), structs(arrays, other, P("z")) | structs({"rbg": arrays["rbg"]}, other)
    )
    assert got.keys() == arrays.keys()
    for path, array in arrays.items():
        assert_equal(got[path], array)
        assert got[path].devices() == set(jax.devices()[2:6])
    assert got["w"].sharding.spec == P("z") and got["keys"].sharding.spec == P("z")


@pytest.mark.medium
def test_every_kind_of_leaf_as_an_array_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_item, "PACKED_BYTES", -1)
    folder, other = CheckpointFolder(tmp_path), mesh(2, (4,), ("z",))
    arrays = leaves(mesh())
    saved(folder, 1, {"submesh_0": arrays})
    for on, spec in ((None, P()), (other, P("z")), (other, P(None, "z"))):
        fitting = {path: a for path, a in arrays.items() if spec in (P(), P("z")) or a.ndim == 2}
        specs = {path: spec if path.startswith(("kinds", "w")) else P() for path in fitting}
        for path, array in fitting.items():
            got = read_leaves(folder.path(), folder.read(), structs({path: array}, on, specs[path]))
            assert_equal(got[path], array)


@pytest.mark.medium
def test_large_leaves_are_stored_in_chunks_and_read_with_little_beside_them(tmp_path):
    """A leaf that one device had: as one chunk, and with what was read copied, its size was needed twice."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process is read from Linux's /proc")
    shape = (12_288, 8192)  # 384 MiB
    value = np.random.default_rng(0).random(shape, np.float32)
    folder = CheckpointFolder(tmp_path)
    path = saved(folder, 1, {"submesh_0": {"w": jnp.asarray(value), "small": jnp.arange(3.0)}})
    script = PEAK_OF_READING.replace("SHAPE", str(shape))
    command = [sys.executable, "-c", script, str(path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    peak, digest = found.stdout.split()
    assert digest == hashlib.sha256(value).hexdigest()
    assert int(peak) <= value.nbytes + BUFFER, int(peak) / value.nbytes


PEAK_OF_READING = """
import gc, hashlib, sys
from pathlib import Path
import numpy as np, jax
from alpa_lite.executor import item_reader
from alpa_lite.plan.checkpoint import read_manifest

def rss(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) * 1024

folder = Path(sys.argv[1])
manifest = read_manifest(folder)
wanted = {"w": jax.ShapeDtypeStruct(SHAPE, np.float32), "small": jax.ShapeDtypeStruct((3,), np.float32)}
item_reader.read_leaves(folder, manifest, {"small": wanted["small"]})  # brings the libraries
request = item_reader._Request.of("w", wanted["w"], manifest, folder)
gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = rss("VmRSS")
(tile,) = request.start(item_reader._Stores(folder)).values()
value = request._when_read(*tile)
print(rss("VmHWM") - before, hashlib.sha256(value).hexdigest())
"""
# 64 MiB of chunks as they are stored, as much decoded, one in the cache, and what the allocator keeps of them for each thread.
BUFFER = 256 * 2**20


@pytest.mark.parametrize(
    ("shape", "dtype", "chunked"),
    [
        ((8, 8), "float32", False),
        ((4096, 2048), "float32", False),  # 32 MiB
        ((4100, 2048), "float32", True),
        ((4097, 2048), "float32", False),  # 17 * 241: 1.9 MiB next
        ((128_256, 4096), "bfloat16", True),
        ((50_021, 4096), "float32", False),  # a prime: it would be stored row by row
        ((7_000_000_001,), "float32", False),  # another
        ((7_000_000_000,), "float32", True),
        ((32, 4096, 14_336), "bfloat16", True),
    ],
)
def test_leaves_are_stored_in_chunks_where_their_dims_can_be_divided(shape, dtype, chunked):
    subchunking = pytest.importorskip("orbax.checkpoint._src.arrays.subchunking")
    array = jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    asked = checkpoint_item.chunk_bytes(array)
    assert (asked is not None) == chunked
    chunk = subchunking.choose_chunk_shape(shape, shape, jnp.dtype(dtype), checkpoint_item.CHUNK_BYTES)
    size = np.prod(chunk) * jnp.dtype(dtype).itemsize
    assert size <= checkpoint_item.CHUNK_BYTES
    assert (size < checkpoint_item.CHUNK_BYTES / 16) <= (not chunked)


@pytest.mark.medium
def test_one_device_restores_all(whole):
    arrays = leaves(mesh())
    got = read_leaves(whole.path(), whole.read(), structs(arrays, None))
    for path, array in arrays.items():
        assert_equal(got[path], array)
        assert got[path].devices() == {jax.devices()[0]}


@pytest.mark.medium
def test_what_was_restored_can_be_donated(whole):
    arrays, on = {"w": leaves(mesh())["w"]}, mesh(4)
    got = read_leaves(whole.path(), whole.read(), structs(arrays, on))  # replicated: four devices want one tile
    replaced = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(got["w"])
    again = read_leaves(whole.path(), whole.read(), structs(arrays, on))
    assert_equal(again["w"], arrays["w"])
    assert (np.asarray(replaced) == -1).all()


def test_orbax_alone_reads_an_item(tmp_path, monkeypatch):
    """A large leaf is an array of its own, small ones are a file of bytes beside it, whose places are in the manifest."""
    monkeypatch.setattr(checkpoint_item, "PACKED_BYTES", 100)
    values = {
        "large": jnp.arange(64.0),
        "half": jnp.arange(8, dtype=jnp.bfloat16),
        "keys": jax.random.split(jax.random.key(3), 2),
    }
    folder = CheckpointFolder(tmp_path)
    writer = ItemWriter()
    writer.start(folder.begin(1) / "submesh_0", values)
    path = folder.commit(1, [writer.wait()], plan_text="{}")
    with ocp.PyTreeCheckpointer() as reader:
        types = {"large": ocp.RestoreArgs(restore_type=np.ndarray)}
        got = reader.restore(path / "submesh_0", restore_args=types)
    assert list(got) == ["large"]
    assert_equal(got["large"], np.arange(64, dtype=np.float32))
    places = {leaf.path: leaf.pieces[0].offset for leaf in folder.read(1).leaves}
    assert places["large"] is None
    packed = np.fromfile(path / "submesh_0" / checkpoint_item.PACKED, np.uint8)
    half = packed[places["half"] : places["half"] + 16].view(jnp.bfloat16)
    assert_equal(half, np.asarray(values["half"]))
    words = packed[places["keys"] : places["keys"] + 16].view(np.uint32).reshape(2, 2)
    assert_equal(words, np.asarray(jax.random.key_data(values["keys"])))


CUTS = {"whole": (), "thirds": (2, 6), "one row": (1,), "as stored": (4,), "beside": (3, 4, 5)}


@pytest.mark.medium
@pytest.mark.parametrize("packed_bytes", slow_but([2**20], [-1, 2**20]))
@pytest.mark.parametrize("stored", CUTS)
@pytest.mark.parametrize("wanted", CUTS)
def test_rows_are_stored_and_wanted_in_any_cuts(tmp_path, monkeypatch, stored, wanted, packed_bytes):
    monkeypatch.setattr(checkpoint_item, "PACKED_BYTES", packed_bytes)
    values = np.arange(8 * 4, dtype=np.float32).reshape(8, 4)
    keys = jax.random.split(jax.random.key(0), 8)

    def parts(cuts, whole):
        edges = [0, *CUTS[cuts], 8]
        names = ["w"] if not CUTS[cuts] else [f"w[{a}:{b}]" for a, b in itertools.pairwise(edges)]
        return {n: whole[a:b] for n, (a, b) in zip(names, itertools.pairwise(edges), strict=True)}

    folder = CheckpointFolder(tmp_path)
    items = {}
    for number, (name, rows) in enumerate(parts(stored, values).items()):
        key_rows = parts(stored, keys)[name]
        items[f"submesh_{number}"] = {
            name: placed(rows, mesh(number, (1, 2)), P(None, "y")),
            name.replace("w", "keys", 1): placed(key_rows, mesh(number, (1, 2)), P()),
        }
    saved(folder, 0, items)
    expected = parts(wanted, values) | {n.replace("w", "keys", 1): k for n, k in parts(wanted, keys).items()}
    got = read_leaves(folder.path(), folder.read(), structs(expected, mesh(4, (1, 4)), P(None, "y")))
    for name, array in expected.items():
        assert_equal(got[name], array)


def test_start_returns_while_it_writes_and_the_state_may_go(tmp_path, monkeypatch):
    looked = threading.Event()

    def slow_digests(folder, done=checkpoint_item.digests):
        assert looked.wait(60)
        return done(folder)

    monkeypatch.setattr(checkpoint_item, "digests", slow_digests)
    arrays = {"w": placed(np.arange(2**20, dtype=np.float32), mesh(), P("x")), "s": placed(jnp.int32(3), mesh(), P())}
    expected = {path: np.array(array) for path, array in arrays.items()}
    folder, writer = CheckpointFolder(tmp_path), ItemWriter()
    writer.start(folder.begin(0) / "submesh_0", arrays)
    assert writer.poll() is None
    after = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)(arrays)
    jax.block_until_ready(after)
    for array in arrays.values():
        array.delete()
    assert writer.poll() is None and folder.steps() == ()
    looked.set()
    folder.commit(0, [writer.wait()], plan_text="")
    assert writer.poll() == writer.wait()
    got = read_leaves(folder.path(), folder.read(), structs(after, mesh(1, (1, 4)), P("y")))
    for path, value in expected.items():
        assert_equal(got[path], value)


# -- damage ------------------------------------------------------------------------------------------------------------


def refused(folder, wanted, *parts):
    with pytest.raises(CheckpointError) as error:
        read_leaves(folder.path(), folder.read(), wanted)
    missing = [part for part in parts if part not in str(error.value)]
    assert not missing, f"the message lacks {missing}:\n{error.value}"


@pytest.mark.parametrize("damage", ["changed", "cut short", "gone"])
def test_a_damaged_file_is_named(tmp_path, damage):
    arrays = {"w": placed(np.random.default_rng(0).standard_normal((64, 64)), mesh(), P("x"))}
    folder = CheckpointFolder(tmp_path)
    path = saved(folder, 3, {"submesh_0": arrays})
    victim = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = victim.read_bytes()
    if damage == "changed":
        victim.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif damage == "cut short":
        victim.write_bytes(data[:-1])
    else:
        victim.unlink()
    said = {"changed": "was changed", "cut short": f"has {len(data) - 1} bytes", "gone": "No such file"}[damage]
    refused(folder, structs(arrays, None), str(path), victim.name, said, "restore an older step")


def test_a_missing_leaf_and_other_shapes_are_named(whole):
    arrays = leaves(mesh())
    refused(whole, {"wt": structs(arrays, None)["w"]}, "no leaf 'wt'", "'count'", "Restore it into")
    refused(
        whole, {"w": jax.ShapeDtypeStruct((8, 5), "float32")}, "'w'", "float32[8,4]", "float32[8, 5]", "convert then"
    )
    refused(whole, {"w": jax.ShapeDtypeStruct((8, 4), "bfloat16")}, "'w'", "float32[8,4]", "bfloat16[8, 4]")
    refused(whole, {"w[6:9]": jax.ShapeDtypeStruct((3, 4), "float32")}, "'w[6:9]'", "float32[8,4]", "float32[3, 4]")
    refused(whole, {"count[0:1]": jax.ShapeDtypeStruct((1,), "int32")}, "'count[0:1]'", "int32[]")


def test_64_bits_need_to_be_enabled(tmp_path):
    folder = CheckpointFolder(tmp_path)
    with jax.enable_x64(True):
        arrays = {"n": jnp.arange(4, dtype="int64")}
        saved(folder, 0, {"submesh_0": arrays})
        assert_equal(read_leaves(folder.path(), folder.read(), structs(arrays, None))["n"], arrays["n"])
    refused(folder, {"n": jax.ShapeDtypeStruct((4,), np.dtype("int64"))}, "'n'", "int64[4]", "jax_enable_x64")


def test_no_space_while_writing(tmp_path, monkeypatch):
    """Whatever fails in the background is told by ``poll``, and what is complete stays."""
    folder = CheckpointFolder(tmp_path)
    arrays = {"w": placed(np.ones(8, np.float32), mesh(), P("x"))}
    saved(folder, 1, {"submesh_0": arrays})

    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_item, "digests", full)
    writer = ItemWriter()
    writer.start(folder.begin(2) / "submesh_0", arrays)
    writer.end()
    for ask in (writer.poll, writer.wait):
        with pytest.raises(
            CheckpointError, match=r"'submesh_0'.*No space left on device.*older checkpoints are untouched"
        ):
            ask()
    folder.abandon(2)
    assert folder.steps() == (1,) and [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    assert_equal(read_leaves(folder.path(), folder.read(), structs(arrays, None))["w"], arrays["w"])


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"'submesh_0'.*could not be written"):
        ItemWriter().start(tmp_path / "file" / "submesh_0", {"w": jnp.ones(3)})


@pytest.mark.parametrize("shape", [(3,), (1024, 1024)])
def test_a_host_that_does_not_see_the_folder(tmp_path, shape, monkeypatch):
    """Orbax would write to a folder of its own there, of which the checkpoint knows nothing."""
    monkeypatch.setattr(checkpoint_item, "_SEEN_S", 0.2)
    with pytest.raises(CheckpointError, match=r"of host .* is not the one.*'gone' is not in it.*that they share"):
        ItemWriter().start(tmp_path / "gone" / "submesh_0", {"w": jnp.ones(shape)})
    assert not (tmp_path / "gone").exists()


def test_whoever_waits_is_told_how_much_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_item, "_TOLD_S", 0.01)
    more, told = threading.Event(), []

    def held(folder):
        assert more.wait(10)
        return {}

    def tell(size: int) -> None:
        told.append(size)
        if size:
            more.set()

    monkeypatch.setattr(checkpoint_item, "digests", held)
    writer = ItemWriter()
    arrays = {"w": placed(np.ones((1024, 512), np.float32), mesh(), P("x"))}
    writer.start(CheckpointFolder(tmp_path).begin(1) / "submesh_0", arrays | {"b": jnp.ones(3)})
    writer.wait(tell)
    assert 0 < told[-1] < 2**22 and told == sorted(told)
    writer.start(CheckpointFolder(tmp_path).begin(2) / "submesh_0", arrays)
    more.clear()
    writer.end(tell)
    assert more.is_set()


def test_folders_that_are_renamed_while_bytes_are_counted(tmp_path):
    """As Orbax does when an array is whole: a save failed of it, now and then."""
    writer = ItemWriter()
    writer._folder = tmp_path / "item"
    names = [writer._folder / "part.tmp", writer._folder / "part"]
    names[0].mkdir(parents=True)
    (names[0] / "bytes").write_bytes(b"1234")

    def rename() -> None:
        for _ in range(2000):
            names[0].rename(names[1])
            names[1].rename(names[0])

    renaming = threading.Thread(target=rename)
    renaming.start()
    counted = set()
    while renaming.is_alive():
        counted.add(writer._written_bytes())
    assert counted <= {0, 4, 8}  # it may be seen under both names
    assert writer._written_bytes() == 4


def test_orbax_is_an_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "orbax.checkpoint", None)
    with pytest.raises(CheckpointError, match=r"need Orbax.*pip install 'alpa-lite\[checkpoint\]'"):
        checkpoint_item.orbax()
