"""The manifest of an export: digests, other versions, and every kind of damage told in words."""

from __future__ import annotations

import json

import pytest

from alpa_lite.errors import ExportError
from alpa_lite.plan.manifest import MANIFEST, Manifest, check_file, digests, listed_files, read_manifest, write_manifest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0" / "0.npy").write_bytes(b"values")
    (tmp_path / "plan.json").write_bytes(b"{}")
    write_manifest(
        tmp_path,
        Manifest(
            num_ranks=1,
            platforms=("cpu",),
            donated=(0,),
            state=((0, 1),),
            jax_version="0.10.2",
            alpa_lite_version="0.1.0",
            files=digests(tmp_path),
        ),
    )
    return tmp_path


def test_round_trip(folder):
    manifest = read_manifest(folder)
    assert manifest.state == ((0, 1),) and manifest.platforms == ("cpu",)
    assert list(manifest.files) == ["plan.json", "rank_0/0.npy"]
    # Of the bytes b"{}", by sha256sum.
    digest = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert manifest.files["plan.json"].sha256 == digest and manifest.files["plan.json"].size_bytes == 2
    assert check_file(folder, manifest, "rank_0/0.npy").read_bytes() == b"values"
    assert listed_files(folder) == {MANIFEST, "plan.json", "rank_0"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.unlink(), r"damaged: 'rank_0/0.npy' cannot be read \(No such file"),
        (lambda p: p.write_bytes(b"value"), "'rank_0/0.npy' has 5 bytes, it was written with 6"),
        (lambda p: p.write_bytes(b"Values"), r"'rank_0/0.npy' was changed \(sha256:"),
    ],
)
def test_a_damaged_file_is_named(folder, damage, message):
    damage(folder / "rank_0" / "0.npy")
    with pytest.raises(ExportError, match=message) as error:
        check_file(folder, read_manifest(folder), "rank_0/0.npy")
    assert "must be as `plan.export` wrote" in str(error.value) and "export the plan again" in str(error.value)
    check_file(folder, read_manifest(folder), "plan.json")


def test_a_file_that_is_not_listed_is_refused(folder):
    (folder / "rank_1").mkdir()
    with pytest.raises(ExportError, match=r"manifest.json does not list 'rank_1/0.npy'"):
        check_file(folder, read_manifest(folder), "rank_1/0.npy")


def test_no_manifest(tmp_path):
    with pytest.raises(ExportError, match=r"holds no export: its manifest.json cannot be read .* Check the path"):
        read_manifest(tmp_path)
    assert listed_files(tmp_path) == frozenset()


def test_another_version_says_so(folder):
    document = json.loads((folder / MANIFEST).read_text()) | {"format_version": 7, "alpa_lite_version": "9.0"}
    (folder / MANIFEST).write_text(json.dumps(document))
    message = (
        r"has format version 7 \(written by alpa_lite 9.0\); this alpa_lite reads version 1. Export the plan again"
    )
    with pytest.raises(ExportError, match=message):
        read_manifest(folder)
    assert "plan.json" in listed_files(folder)


@pytest.mark.parametrize(
    "change", [lambda t: t[: len(t) // 2], lambda t: t.replace('"num_ranks": 1', '"num_ranks": "a"')]
)
def test_a_damaged_manifest(folder, change):
    text = (folder / MANIFEST).read_text()
    assert change(text) != text
    (folder / MANIFEST).write_text(change(text))
    with pytest.raises(ExportError, match=r"manifest.json' is damaged: .* Copy the folder again"):
        read_manifest(folder)
