"""What an exported folder holds, and that it still does: ``manifest.json`` with the digest of every other file.

In: a folder that is being written, or one that is read. Out: a ``Manifest``, and the bytes of files that agree with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from alpa_lite.errors import ExportError
from alpa_lite.plan.json_text import json_text

MANIFEST = "manifest.json"
FORMAT = "alpa_lite.export"
FORMAT_VERSION = 1
PIPELINE = "instructions.csv"  # a file that exports of several stages have
_CHUNK_BYTES = 2**20
_THREADS = 8


class _Contents(msgspec.Struct):
    """Read leniently too: what an export of whatever version consists of."""

    format: str
    files: dict[str, msgspec.Raw]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """One file: its size and "sha256:" with 64 hex digits."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The list of contents of an export.

    Attributes:
        num_ranks: devices of the plan's mesh; rank r is its device r, row-major.
        platforms: what the step was lowered for.
        donated: positions of argument leaves whose buffers their next values may take.
        state: (position of an argument leaf, position of the result leaf that is its next value).
        jax_version, alpa_lite_version: what wrote it.
        files: relative name -> digest, of every file but the manifest.
        format, format_version: of the folder.
    """

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    num_ranks: int
    platforms: tuple[str, ...]
    donated: tuple[int, ...]
    state: tuple[tuple[int, int], ...]
    jax_version: str
    alpa_lite_version: str
    files: Mapping[str, FileDigest]


class _Header(msgspec.Struct):
    """Read first and leniently, so that another version says so."""

    format: str = ""
    format_version: int = 0
    alpa_lite_version: str = "unknown"


def digest_of(path: Path) -> FileDigest:
    """Size and digest of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            digest.update(piece)
    return FileDigest(size_bytes=path.stat().st_size, sha256=f"sha256:{digest.hexdigest()}")


def digests(folder: Path) -> dict[str, FileDigest]:
    """All files below ``folder`` by relative name, sorted; one that has several names is read once."""
    inodes = {path: path.stat().st_ino for path in sorted(p for p in folder.rglob("*") if p.is_file())}
    some = {inode: path for path, inode in inodes.items()}
    read = dict(zip(some, digests_of(some.values()), strict=True))
    return {path.relative_to(folder).as_posix(): read[inode] for path, inode in inodes.items()}


def digests_of(paths: Iterable[Path]) -> list[FileDigest]:
    """Of several files, some at a time: digests are made outside of Python's lock."""
    paths = list(paths)
    if len(paths) < 2:
        return [digest_of(path) for path in paths]
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(digest_of, paths))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_text(json_text(msgspec.to_builtins(manifest)), encoding="utf-8")


def listed_files(folder: Path) -> frozenset[str]:
    """The top-level names that belong to the export in ``folder``, of any version; none if it holds no export."""
    try:
        found = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=_Contents)
    except (OSError, msgspec.MsgspecError):
        return frozenset()
    return frozenset({MANIFEST, *(name.partition("/")[0] for name in found.files)} if found.format == FORMAT else ())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an exported folder.

    Raises:
        ExportError: there is none, it is damaged, or of another version.
    """
    try:
        data = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise ExportError(
            f"{str(folder)!r} holds no export: its {MANIFEST} cannot be read ({error.strerror}). An export is a folder that "
            "`plan.export(fn, out_dir)` wrote. Check the path."
        ) from error
    try:
        header = msgspec.json.decode(data, type=_Header)
        if header.format == FORMAT and header.format_version != FORMAT_VERSION:
            raise ExportError(
                f"the export {str(folder)!r} has format version {header.format_version} (written by alpa_lite "
                f"{header.alpa_lite_version}); this alpa_lite reads version {FORMAT_VERSION}. Export the plan again, or "
                "install the version that wrote it."
            )
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise ExportError(
            f"{str(folder / MANIFEST)!r} is damaged: {error}. It must be as `plan.export` wrote it. Copy the folder again, "
            "or export the plan again."
        ) from error


def check_file(folder: Path, manifest: Manifest, name: str) -> Path:
    """The path of a file of the export, whose content is what was written.

    Raises:
        ExportError: the file is missing, cut short or changed.
    """
    expected = manifest.files.get(name)
    if expected is None:
        raise _damaged(folder, f"its {MANIFEST} does not list {name!r}")
    try:
        found = digest_of(folder / name)
    except OSError as error:
        raise _damaged(folder, f"{name!r} cannot be read ({error.strerror})") from error
    if found.size_bytes != expected.size_bytes:
        raise _damaged(folder, f"{name!r} has {found.size_bytes} bytes, it was written with {expected.size_bytes}")
    if found != expected:
        raise _damaged(folder, f"{name!r} was changed ({found.sha256[:15]}..., written as {expected.sha256[:15]}...)")
    return folder / name


def _damaged(folder: Path, fact: str) -> ExportError:
    return ExportError(
        f"the export {str(folder)!r} is damaged: {fact}. All files must be as `plan.export` wrote them. Copy the folder "
        "again, or export the plan again."
    )
