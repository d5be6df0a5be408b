"""What a checkpoint says of itself: ``manifest.json``, written when everything else is there, and the checks of it.

In: what the writers of its items report (``ItemRecord``). Out: a ``CheckpointManifest``, by which leaves are found whatever plan,
mesh or number of processes they were saved under. Knows neither JAX nor how arrays are stored.

A leaf has a path relative to the state ("params/w"), a global shape, and pieces: the whole leaf, or rows of it, each in one item.
An *item* is a folder that one group of processes wrote together.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from alpa_lite.errors import CheckpointError
from alpa_lite.plan.identity import close_matches
from alpa_lite.plan.json_text import json_text
from alpa_lite.plan.leaf_rows import rows_path
from alpa_lite.plan.manifest import FileDigest, digests_of
from alpa_lite.plan.records import PlanIdentity

MANIFEST = "manifest.json"
PLAN = "plan.json"
FORMAT = "alpa_lite.checkpoint"
FORMAT_VERSION = 1
ROOT_LEAF = "state"  # the path of a state that is one leaf

Rows = tuple[int, int]


class ItemLeaf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A leaf, or rows of one, in an item.

    Attributes:
        path: of the whole leaf.
        rows: (start, stop) of dim 0 of the whole leaf; None if the item has all of it.
        shape: of what the item has.
        dtype: JAX's name; typed keys have "key<fry>" and the like, and lie as their words.
        offset: its first byte among the item's packed leaves; None if it is an array of its own.
    """

    path: str
    rows: Rows | None = None
    shape: tuple[int, ...]
    dtype: str
    offset: int | None = None


class ItemRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a writer reports of an item that is complete.

    Attributes:
        name: of the item's folder in the checkpoint.
        leaves: what is in it.
        files: name relative to the item -> digest. Of several processes that write one item, only the first lists them.
    """

    name: str
    leaves: tuple[ItemLeaf, ...]
    files: dict[str, FileDigest]


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a leaf, or the rows of it, lie; ``offset`` as in ``ItemLeaf``."""

    item: str
    rows: Rows | None = None
    offset: int | None = None


class StoredLeaf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A leaf of the state with its global shape; pieces with rows follow each other without gaps."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The list of contents of a checkpoint.

    Attributes:
        step: number of steps that the state has seen.
        position: how far the data was read, e.g. a number of batches.
        leaves: of the state, by path.
        identity: of the plan that it was saved under, which lies beside it as ``plan.json``; restoring does not need it.
        extra: the user's own, any JSON.
        files: name -> digest, of every file but the manifest.
        jax_version, alpa_lite_version: what wrote it.
        digest: of this record with an empty digest, so that an edited manifest is found out.
    """

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    step: int
    position: int = 0
    leaves: tuple[StoredLeaf, ...]
    identity: PlanIdentity = msgspec.field(default_factory=PlanIdentity)
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    files: dict[str, FileDigest]
    jax_version: str
    alpa_lite_version: str
    digest: str = ""

    def leaf(self, path: str, folder: Path) -> StoredLeaf:
        """The leaf at ``path``.

        Raises:
            CheckpointError: there is none.
        """
        known = {leaf.path: leaf for leaf in self.leaves}
        if path not in known:
            raise CheckpointError(
                f"the checkpoint {str(folder)!r} has no leaf {path!r}. A state is restored from exactly the leaves that were "
                f"saved: {_some(known)}.{close_matches(path, list(known))} Restore it into a state of that structure."
            )
        return known[path]


class _Header(msgspec.Struct):
    """Read first and leniently, so that another version says so."""

    format: str = ""
    format_version: int = 0
    alpa_lite_version: str = "unknown"


# -- writing -----------------------------------------------------------------------------------------------------------


def joined_leaves(items: Iterable[ItemRecord]) -> tuple[StoredLeaf, ...]:
    """The leaves that items hold together, by path.

    Raises:
        CheckpointError: rows of a leaf are missing, or are in two items.
    """
    found: dict[str, list[tuple[str, ItemLeaf]]] = {}
    for item in items:
        for leaf in item.leaves:
            found.setdefault(leaf.path, []).append((item.name, leaf))
    return tuple(_joined(path, parts) for path, parts in sorted(found.items()))


def _joined(path: str, parts: list[tuple[str, ItemLeaf]]) -> StoredLeaf:
    first = parts[0][1]
    if first.rows is None and len(parts) == 1:
        return StoredLeaf(
            path=path, shape=first.shape, dtype=first.dtype, pieces=(Piece(parts[0][0], None, first.offset),)
        )
    parts = sorted(parts, key=lambda part: part[1].rows or (0, -1))
    stops = [0, *(leaf.rows[1] if leaf.rows else -1 for _, leaf in parts)]
    follows = all(leaf.rows is not None and leaf.rows[0] == stop for stop, (_, leaf) in zip(stops, parts, strict=False))
    alike = len({(leaf.shape[1:], leaf.dtype) for _, leaf in parts}) == 1
    if not follows or not alike:
        held = ", ".join(f"{rows_path(path, *leaf.rows) if leaf.rows else path} in {item!r}" for item, leaf in parts)
        raise CheckpointError(
            f"the items of a checkpoint do not make up the leaf {path!r}: they hold {held}. Each leaf must be in one item, or "
            "its rows in several, each row once. Let every writer save what its submesh owns, and commit all items."
        )
    shape = (stops[-1], *first.shape[1:])
    return StoredLeaf(
        path=path, shape=shape, dtype=first.dtype, pieces=tuple(Piece(n, x.rows, x.offset) for n, x in parts)
    )


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """The file's bytes, with the digest filled in."""
    return json_text(msgspec.to_builtins(msgspec.structs.replace(manifest, digest=_digest(manifest)))).encode()


def _digest(manifest: CheckpointManifest) -> str:
    content = msgspec.json.encode(msgspec.structs.replace(manifest, digest=""))
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


# -- reading -----------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of a checkpoint whose files are all there with the sizes they were written with; contents are not read.

    Raises:
        CheckpointError: the folder is no checkpoint, one of another version, or is damaged.
    """
    try:
        data = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{str(folder)!r} is no checkpoint: its {MANIFEST} cannot be read ({error.strerror}). A checkpoint is a folder that "
            "was written whole, its manifest last. Check the path, or take another step."
        ) from error
    try:
        header = msgspec.json.decode(data, type=_Header)
        if header.format != FORMAT:
            raise CheckpointError(
                f"{str(folder)!r} is no checkpoint: its {MANIFEST} is of the format {header.format!r}, not {FORMAT!r}. "
                "Checkpoints are written by `step.save` and `al.fit`. Check the path."
            )
        if header.format_version != FORMAT_VERSION:
            raise CheckpointError(
                f"the checkpoint {str(folder)!r} has format version {header.format_version} (written by alpa_lite "
                f"{header.alpa_lite_version}); this alpa_lite reads version {FORMAT_VERSION}. Install the version that wrote it "
                "to restore it."
            )
        manifest = msgspec.json.decode(data, type=CheckpointManifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _damaged(folder, f"its {MANIFEST} cannot be understood: {error}") from error
    if manifest.digest != _digest(manifest):
        raise _damaged(folder, f"its {MANIFEST} was changed")
    for name, expected in manifest.files.items():
        _check_size(folder, name, expected)
    return manifest


def check_files(folder: Path, manifest: CheckpointManifest, items: Iterable[str] | None = None) -> None:
    """Reads files of a checkpoint and compares their digests.

    Args:
        items: those whose files are read; None for every file.

    Raises:
        CheckpointError: a file is missing, cut short or changed.
    """
    wanted = None if items is None else tuple(f"{item}/" for item in items)
    files = {name: file for name, file in manifest.files.items() if wanted is None or name.startswith(wanted)}
    for name, expected in files.items():
        _check_size(folder, name, expected)
    found = digests_of(folder / name for name in files)
    for (name, expected), digest in zip(files.items(), found, strict=True):
        if digest != expected:
            raise _damaged(
                folder, f"{name!r} was changed ({digest.sha256[:15]}..., written as {expected.sha256[:15]}...)"
            )


def _check_size(folder: Path, name: str, expected: FileDigest) -> None:
    try:
        size = (folder / name).stat().st_size
    except OSError as error:
        raise _damaged(folder, f"{name!r} cannot be read ({error.strerror})") from error
    if size != expected.size_bytes:
        raise _damaged(folder, f"{name!r} has {size} bytes, it was written with {expected.size_bytes}")


def _damaged(folder: Path, fact: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {str(folder)!r} is damaged: {fact}. All files must be as they were written. Copy the folder again, or "
        "restore an older step."
    )


def check_state(manifest: CheckpointManifest, folder: Path, wanted: Mapping[str, tuple[Sequence[int], str]]) -> None:
    """Checks that a state is the one that was saved.

    Args:
        wanted: path of every leaf -> (global shape, dtype).

    Raises:
        CheckpointError: a leaf is missing, or has another shape or dtype, on either side.
    """
    for path, (shape, dtype) in wanted.items():
        stored = manifest.leaf(path, folder)
        if (stored.shape, stored.dtype) != (tuple(shape), dtype):
            raise CheckpointError(
                f"the leaf {path!r} of the checkpoint {str(folder)!r} is {stored}, and {dtype}[{','.join(map(str, shape))}] is "
                "wanted. Leaves are restored as they were saved, on any mesh. Restore into the shapes and types of the step "
                "that saved it, and convert then."
            )
    more = [leaf.path for leaf in manifest.leaves if leaf.path not in wanted]
    if more:
        raise CheckpointError(
            f"the checkpoint {str(folder)!r} holds leaves that the state does not have: {_some(more)}. A state is restored from "
            "exactly the leaves that were saved. Restore it with the step that it was saved for."
        )


def _some(names: Iterable[str], shown: int = 4) -> str:
    names = list(names)
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(repr(name) for name in itertools.islice(names, shown)) + rest
