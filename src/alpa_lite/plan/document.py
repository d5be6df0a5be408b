"""The plan file as msgspec objects: strict, versioned JSON; ``encode`` writes it, ``decode`` reads it.

A plan of 14,000 ops repeats a few hundred layouts and strategies, so specs, strings, op strategies and steps are
interned and referred to by position; collectives and leaves are rows. The tables are filled in order of first use, so
the bytes are a function of the plan. Rows, not objects: ``columns`` in the file says what stands where.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.plan.records import LeafRole

FORMAT = "alpa_lite.plan"
FORMAT_VERSION = 3
LAYOUT_FORMAT = "alpa_lite shared layout"  # of files with several plans, which `al.SharedLayout` reads


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    """An object of the file."""


class _Row(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A row of the file."""


class Header(msgspec.Struct):
    """Read first and leniently, so that a file of another version says so instead of naming some field."""

    format: str = ""
    format_version: int = 0


class Mesh(_Strict):
    shape: list[int]
    axis_names: list[str]


class LeafRow(_Row):
    path: str
    dtype: str
    shape: list[int]
    itemsize: int
    spec: int
    role: LeafRole
    stage: int
    pin: str


class OpRow(_Row):
    op: int
    operands: list[int]
    results: list[int]
    time_s: float


class CollectiveRow(_Row):
    kind: CollectiveKind
    axes: int
    size_bytes: int
    count: int
    time_s: float
    op: str
    source: int
    tensor: str


class ConversionRow(_Row):
    """``steps`` are rows of the step table; ``collectives`` as in the record."""

    op: str
    value: int
    steps: list[int]
    collectives: list[int]
    made_by: str
    cost: float
    readers: int


class StepRow(_Row):
    """``kind`` is "" for a slice."""

    kind: str
    axes: int
    source_dim: int
    target_dim: int
    before: int
    after: int


class SearchRow(_Row):
    """``lower_bound`` is null where nothing was proven."""

    objective: float
    lower_bound: float | None
    found_by: str


class StageCountRow(_Row):
    """``objective`` and ``bubble_share`` are null where there is no cut into so many stages."""

    num_stages: int
    objective: float | None
    bubble_share: float | None
    status: str


class PaddingRow(_Row):
    """``without`` is null where there is no plan without padding."""

    dim: str
    size: int
    padded: int
    shards: int
    waste_bytes: int
    waste_s: float
    pins: list[tuple[int, str]]
    without: float | None


class TransferRow(_Row):
    tensor: str
    source: int
    target: int
    when: str
    size_bytes: int
    time_s: float


class Pipeline(_Strict):
    num_microbatches: int
    schedule: str
    stage_of_layer: list[int]
    bubble_share: float
    transfers: list[TransferRow]
    num_chunks: int = 1
    table: list[str] = []
    timeline: list[str] = []


class Remat(_Strict):
    num_layers: int
    layers: list[int]
    saved: list[str]


class Decisions(_Strict):
    """``paths[i]`` is decided by row ``ops[i]`` of the op table."""

    paths: list[str]
    ops: list[int]


class Stage(_Strict):
    mesh: Mesh
    submesh: tuple[int, int]
    first_device: int
    layers: list[int]
    compute_s: float
    penalty: float
    forward_s: float
    backward_s: float
    once_s: float
    memory: dict[str, int]
    collectives: list[CollectiveRow]
    conversions: list[ConversionRow]
    inputs: list[LeafRow]
    outputs: list[LeafRow]
    decisions: Decisions
    weight_s: float = 0.0


class Candidate(_Strict):
    mesh: Mesh
    objective: float | None
    lower_bound: float | None
    peak_bytes: int | None
    status: str
    reason: str


class Identity(_Strict):
    fingerprint: str
    cluster: str
    calibration: str
    jax_version: str
    alpa_lite_version: str


class Document(_Strict):
    """A plan file. Fields are in reading order: what matters to a reader first, the long tables last."""

    format: str
    format_version: int
    identity: Identity
    objective: float
    lower_bound: float
    unit: str
    status: str
    costs: str
    options: dict[str, Any]
    pins: list[tuple[str, str]]
    search: list[SearchRow]
    paddings: list[PaddingRow]
    notes: list[str]
    pipeline: Pipeline | None
    stage_counts: list[StageCountRow]
    remat: Remat | None
    mesh_table: list[Candidate]
    columns: dict[str, list[str]]
    inputs: list[LeafRow]
    outputs: list[LeafRow]
    specs: list[str]
    strings: list[str]
    axes: list[list[str]]
    ops: list[OpRow]
    steps: list[StepRow]
    stages: list[Stage]
    digest: str = ""

    def with_digest(self) -> Document:
        """With a digest of everything else, by which a reader sees that a file was changed."""
        bare = msgspec.json.encode(msgspec.structs.replace(self, digest=""))
        # Read back, as an integer in place of a float becomes one there.
        read = msgspec.json.encode(msgspec.json.decode(bare, type=Document))
        return msgspec.structs.replace(self, digest=f"sha256:{hashlib.sha256(read).hexdigest()}")


ROWS: dict[str, type[_Row]] = {
    "search": SearchRow,
    "paddings": PaddingRow,
    "stage_counts": StageCountRow,
    "inputs": LeafRow,
    "outputs": LeafRow,
    "ops": OpRow,
    "steps": StepRow,
}
STAGE_ROWS: dict[str, type[_Row]] = {
    "collectives": CollectiveRow,
    "conversions": ConversionRow,
    "inputs": LeafRow,
    "outputs": LeafRow,
}
PIPELINE_ROWS: dict[str, type[_Row]] = {"transfers": TransferRow}
COLUMNS = {table: list(kind.__struct_fields__) for table, kind in (ROWS | STAGE_ROWS | PIPELINE_ROWS).items()}
