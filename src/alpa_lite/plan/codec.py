"""Plan to bytes and back: strict, versioned JSON.

A plan of 14,000 ops repeats a few hundred layouts and strategies, so specs, strings, op strategies and steps are
interned and referred to by position; collectives and leaves are rows. The tables are filled in order of first use, so
the bytes are a function of the plan. Rows, not objects: ``columns`` in the file says what stands where.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from alpa_lite.core.collective import Collective, CollectiveKind
from alpa_lite.core.conversion import Conversion, Step
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Value
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.errors import PlanFileError
from alpa_lite.plan.json_text import json_text
from alpa_lite.plan.records import (
    Leaf,
    LeafRole,
    MemoryProfile,
    MeshCandidate,
    OpDecision,
    Padding,
    PlanIdentity,
    SearchStep,
    StagePlan,
)

if TYPE_CHECKING:
    from alpa_lite.plan.plan import Plan

FORMAT = "alpa_lite.plan"
FORMAT_VERSION = 1

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    """An object of the file."""


class _Row(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A row of the file."""


class _Header(msgspec.Struct):
    """Read first and leniently, so that a file of another version says so instead of naming some field."""

    format: str = ""
    format_version: int = 0


class _Mesh(_Strict):
    shape: list[int]
    axis_names: list[str]


class _LeafRow(_Row):
    path: str
    dtype: str
    shape: list[int]
    itemsize: int
    spec: int
    role: LeafRole
    stage: int
    pin: str


class _OpRow(_Row):
    op: int
    operands: list[int]
    results: list[int]
    time_s: float


class _CollectiveRow(_Row):
    kind: CollectiveKind
    axes: int
    size_bytes: int
    count: int
    time_s: float
    op: str
    source: int
    tensor: str


class _ConversionRow(_Row):
    """``steps`` are rows of the step table; ``collectives`` as in the record."""

    op: str
    value: int
    steps: list[int]
    collectives: list[int]
    made_by: str
    cost: float
    readers: int


class _StepRow(_Row):
    """``kind`` is "" for a slice."""

    kind: str
    axes: int
    source_dim: int
    target_dim: int
    before: int
    after: int


class _SearchRow(_Row):
    """``lower_bound`` is null where nothing was proven."""

    objective: float
    lower_bound: float | None
    found_by: str


class _PaddingRow(_Row):
    """``without`` is null where there is no plan without padding."""

    dim: str
    size: int
    padded: int
    shards: int
    waste_bytes: int
    waste_s: float
    pins: list[tuple[int, str]]
    without: float | None


class _Decisions(_Strict):
    """``paths[i]`` is decided by row ``ops[i]`` of the op table."""

    paths: list[str]
    ops: list[int]


class _Stage(_Strict):
    mesh: _Mesh
    submesh: tuple[int, int]
    layers: list[int]
    compute_s: float
    penalty: float
    memory: dict[str, int]
    collectives: list[_CollectiveRow]
    conversions: list[_ConversionRow]
    decisions: _Decisions


class _Candidate(_Strict):
    mesh: _Mesh
    objective: float | None
    lower_bound: float | None
    peak_bytes: int | None
    status: str
    reason: str


class _Identity(_Strict):
    fingerprint: str
    cluster: str
    calibration: str
    jax_version: str
    alpa_lite_version: str


class _Document(_Strict):
    """A plan file. Fields are in reading order: what matters to a reader first, the long tables last."""

    format: str
    format_version: int
    identity: _Identity
    objective: float
    lower_bound: float
    unit: str
    status: str
    costs: str
    options: dict[str, Any]
    pins: list[tuple[str, str]]
    search: list[_SearchRow]
    paddings: list[_PaddingRow]
    notes: list[str]
    mesh_table: list[_Candidate]
    columns: dict[str, list[str]]
    inputs: list[_LeafRow]
    outputs: list[_LeafRow]
    specs: list[str]
    strings: list[str]
    axes: list[list[str]]
    ops: list[_OpRow]
    steps: list[_StepRow]
    stages: list[_Stage]


class _Table(Generic[H]):
    """Distinct items in order of first use."""

    def __init__(self) -> None:
        self.items: dict[H, int] = {}

    def __call__(self, item: H) -> int:
        return self.items.setdefault(item, len(self.items))


_ROWS: dict[str, type[_Row]] = {
    "search": _SearchRow,
    "paddings": _PaddingRow,
    "inputs": _LeafRow,
    "outputs": _LeafRow,
    "ops": _OpRow,
    "steps": _StepRow,
}
_STAGE_ROWS: dict[str, type[_Row]] = {"collectives": _CollectiveRow, "conversions": _ConversionRow}
_COLUMNS = {table: list(kind.__struct_fields__) for table, kind in (_ROWS | _STAGE_ROWS).items()}


def encode_plan(plan: Plan) -> bytes:
    """The plan as JSON; equal plans give equal bytes."""
    specs: _Table[ShardingSpec] = _Table()
    strings: _Table[str] = _Table()
    axes: _Table[tuple[str, ...]] = _Table()
    ops: _Table[tuple[Any, ...]] = _Table()
    steps: _Table[tuple[Any, ...]] = _Table()
    inputs = [_leaf_row(leaf, specs) for leaf in plan.inputs]
    outputs = [_leaf_row(leaf, specs) for leaf in plan.outputs]
    stages = [_encode_stage(stage, specs, strings, axes, ops, steps) for stage in plan.stages]
    op_rows = [_OpRow(op, list(operands), list(results), time_s) for op, operands, results, time_s in ops.items]
    document = _Document(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        identity=_Identity(**{name: getattr(plan.identity, name) for name in _Identity.__struct_fields__}),
        objective=float(plan.objective),
        lower_bound=float(plan.lower_bound),
        unit=plan.unit,
        status=plan.status,
        costs=plan.costs,
        options=dict(plan.options),
        pins=list(plan.pins),
        search=[
            _SearchRow(float(s.objective), s.lower_bound if math.isfinite(s.lower_bound) else None, s.found_by)
            for s in plan.search
        ],
        paddings=[
            _PaddingRow(p.dim, p.size, p.padded, p.shards, p.waste_bytes, float(p.waste_s), list(p.pins), p.without)
            for p in plan.paddings
        ],
        notes=list(plan.notes),
        mesh_table=[_encode_candidate(candidate) for candidate in plan.mesh_table],
        columns=_COLUMNS,
        inputs=inputs,
        outputs=outputs,
        specs=[str(spec) for spec in specs.items],
        strings=list(strings.items),
        axes=[list(names) for names in axes.items],
        ops=op_rows,
        steps=[_StepRow(*row) for row in steps.items],
        stages=stages,
    )
    return json_text(msgspec.to_builtins(document)).encode()


def _encode_mesh(mesh: DeviceMesh) -> _Mesh:
    return _Mesh(list(mesh.shape), list(mesh.axis_names))


def _encode_candidate(c: MeshCandidate) -> _Candidate:
    return _Candidate(_encode_mesh(c.mesh), c.objective, c.lower_bound, c.peak_bytes, c.status, c.reason)


def _leaf_row(leaf: Leaf, specs: _Table[ShardingSpec]) -> _LeafRow:
    v = leaf.value
    return _LeafRow(leaf.path, v.dtype, list(v.shape), v.itemsize, specs(leaf.spec), leaf.role, leaf.stage, leaf.pin)


def _encode_stage(
    stage: StagePlan,
    specs: _Table[ShardingSpec],
    strings: _Table[str],
    axes: _Table[tuple[str, ...]],
    ops: _Table[tuple[Any, ...]],
    steps: _Table[tuple[Any, ...]],
) -> _Stage:
    def op_row(d: OpDecision) -> int:
        return ops((strings(d.op), tuple(map(specs, d.operands)), tuple(map(specs, d.results)), float(d.time_s)))

    def step_row(s: Step) -> int:
        kind = str(s.kind) if s.kind else ""
        return steps((kind, axes(s.axes), s.source_dim, s.target_dim, specs(s.before), specs(s.after)))

    return _Stage(
        mesh=_encode_mesh(stage.mesh),
        submesh=stage.submesh,
        layers=list(stage.layers),
        compute_s=float(stage.compute_s),
        penalty=float(stage.penalty),
        memory=dict(stage.memory.items()),
        collectives=[
            _CollectiveRow(
                c.kind, axes(c.axes), c.size_bytes, c.count, float(c.time_s), c.op, strings(c.source), c.tensor
            )
            for c in stage.collectives
        ],
        conversions=[
            _ConversionRow(
                c.op,
                c.value,
                [step_row(step) for step in c.steps],
                list(c.collectives),
                c.made_by,
                float(c.cost),
                c.readers,
            )
            for c in stage.conversions
        ],
        decisions=_Decisions([d.path for d in stage.decisions], [op_row(d) for d in stage.decisions]),
    )


def decode_fields(data: bytes, name: str) -> dict[str, Any]:
    """The fields of a ``Plan``, from the bytes of the file ``name``.

    Raises:
        PlanFileError: if the file is cut short, not a plan, of another version, or breaks the format; with the place.
    """
    _check_header(data, name)
    document = _decode(data, _Document, name)
    try:
        return _Decoder(document).fields()
    except (IndexError, ValueError, TypeError) as error:
        raise PlanFileError(f"plan file {name!r} is damaged: {error}. Save the plan again.") from error


def _decode(data: bytes, kind: type[Any], name: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        place = "" if " - at `" in str(error) else _long_row(data)
        raise PlanFileError(
            f"plan file {name!r} breaks the plan format: {error}{place}. The format is strict: every field"
            " known, none missing. Save the plan again instead of editing the file."
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        cut = "is cut short" if "truncated" in str(error) or not data.strip() else "is not JSON"
        raise PlanFileError(
            f"plan file {name!r} {cut} ({len(data)} bytes; {error}). `plan.save` writes whole files only,"
            " so it was damaged on the way. Copy it again, or make the plan again."
        ) from error


def _long_row(data: bytes) -> str:
    """The place of the first row that is too long, for which msgspec (0.22) gives no place."""
    document = msgspec.json.decode(data)
    if not isinstance(document, dict):
        return ""
    tables = [(f"$.{table}", document.get(table), kind) for table, kind in _ROWS.items()]
    stages = document.get("stages")
    for number, stage in enumerate(stages if isinstance(stages, list) else ()):
        tables += [(f"$.stages[{number}].{table}", stage.get(table), kind) for table, kind in _STAGE_ROWS.items()]
    for place, rows, kind in tables:
        for number, row in enumerate(rows or ()):
            if isinstance(row, list) and len(row) > len(kind.__struct_fields__):
                return f" - at `{place}[{number}]`"
    return ""


def _check_header(data: bytes, name: str) -> None:
    try:
        header = _decode(data, _Header, name)
    except PlanFileError as error:
        if isinstance(error.__cause__, msgspec.ValidationError):
            header = _Header()
        else:
            raise
    if header.format != FORMAT:
        raise PlanFileError(
            f'{name!r} is JSON but no plan: it does not start with "format": "{FORMAT}".'
            " Plan files are written by `plan.save`. Check the path."
        )
    if header.format_version != FORMAT_VERSION:
        raise PlanFileError(
            f"plan file {name!r} has plan-format version {header.format_version}; this alpa_lite reads version"
            f" {FORMAT_VERSION}. Make the plan again, or install the alpa_lite that wrote it."
        )


class _Decoder:
    """Tables back to records; the records' own checks run, so a spec that uses an axis twice is refused here."""

    def __init__(self, document: _Document) -> None:
        self.document = document
        self.spec = _lookup("specs", [ShardingSpec.parse(text) for text in document.specs])
        self.string = _lookup("strings", document.strings)
        self.axes = _lookup("axes", [tuple(names) for names in document.axes])
        self.step = _lookup("steps", [self._step(row) for row in document.steps])
        self.op = _lookup("ops", [self._op_fields(row) for row in document.ops])

    def fields(self) -> dict[str, Any]:
        d = self.document
        names = ("objective", "lower_bound", "unit", "status", "costs")
        return {
            **{name: getattr(d, name) for name in names},
            "identity": PlanIdentity(**msgspec.structs.asdict(d.identity)),
            "options": tuple((name, _as_tuples(value)) for name, value in d.options.items()),
            "pins": tuple(d.pins),
            "search": tuple(
                SearchStep(
                    objective=row.objective,
                    lower_bound=-math.inf if row.lower_bound is None else row.lower_bound,
                    found_by=row.found_by,
                )
                for row in d.search
            ),
            "paddings": tuple(map(_padding, d.paddings)),
            "notes": tuple(d.notes),
            "mesh_table": tuple(self._candidate(candidate) for candidate in d.mesh_table),
            "inputs": tuple(map(self._leaf, d.inputs)),
            "outputs": tuple(map(self._leaf, d.outputs)),
            "stages": tuple(map(self._stage, d.stages)),
        }

    def _step(self, row: _StepRow) -> Step:
        return Step(
            kind=CollectiveKind(row.kind) if row.kind else None,
            axes=self.axes(row.axes),
            source_dim=row.source_dim,
            target_dim=row.target_dim,
            before=self.spec(row.before),
            after=self.spec(row.after),
        )

    def _op_fields(self, row: _OpRow) -> dict[str, Any]:
        specs = (tuple(map(self.spec, row.operands)), tuple(map(self.spec, row.results)))
        return {"op": self.string(row.op), "operands": specs[0], "results": specs[1], "time_s": row.time_s}

    def _candidate(self, c: _Candidate) -> MeshCandidate:
        return MeshCandidate(
            mesh=_decode_mesh(c.mesh),
            objective=c.objective,
            lower_bound=c.lower_bound,
            peak_bytes=c.peak_bytes,
            status=c.status,
            reason=c.reason,
        )

    def _leaf(self, row: _LeafRow) -> Leaf:
        value = Value(shape=tuple(row.shape), dtype=row.dtype, itemsize=row.itemsize)
        return Leaf(path=row.path, value=value, spec=self.spec(row.spec), role=row.role, stage=row.stage, pin=row.pin)

    def _stage(self, s: _Stage) -> StagePlan:
        return StagePlan(
            mesh=_decode_mesh(s.mesh),
            submesh=s.submesh,
            layers=tuple(s.layers),
            compute_s=s.compute_s,
            penalty=s.penalty,
            memory=MemoryProfile(**s.memory),
            collectives=tuple(map(self._collective, s.collectives)),
            conversions=tuple(
                Conversion(
                    op=row.op,
                    value=row.value,
                    steps=tuple(map(self.step, row.steps)),
                    collectives=tuple(row.collectives),
                    made_by=row.made_by,
                    cost=row.cost,
                    readers=row.readers,
                )
                for row in s.conversions
            ),
            decisions=tuple(
                OpDecision(path=path, **self.op(op))
                for path, op in zip(s.decisions.paths, s.decisions.ops, strict=True)
            ),
        )

    def _collective(self, row: _CollectiveRow) -> Collective:
        return Collective(
            kind=row.kind,
            axes=self.axes(row.axes),
            size_bytes=row.size_bytes,
            count=row.count,
            time_s=row.time_s,
            op=row.op,
            source=self.string(row.source),
            tensor=row.tensor,
        )


def _padding(row: _PaddingRow) -> Padding:
    return Padding(
        dim=row.dim,
        size=row.size,
        padded=row.padded,
        shards=row.shards,
        waste_bytes=row.waste_bytes,
        waste_s=row.waste_s,
        pins=tuple(row.pins),
        without=row.without,
    )


def _decode_mesh(mesh: _Mesh) -> DeviceMesh:
    return DeviceMesh(shape=tuple(mesh.shape), axis_names=tuple(mesh.axis_names))


def _lookup(table: str, items: list[T]) -> Callable[[int], T]:
    def item(index: int) -> T:
        if not 0 <= index < len(items):
            raise IndexError(f"entry {index} of table {table!r}, which has {len(items)}")
        return items[index]

    return item


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
