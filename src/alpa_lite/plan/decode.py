"""The bytes of a plan file back to records, and what is said of a file that is damaged; see ``document``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from alpa_lite.core.collective import Collective, CollectiveKind
from alpa_lite.core.conversion import Conversion, Step
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Value
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.errors import PlanFileError
from alpa_lite.plan import document as doc
from alpa_lite.plan.records import (
    Leaf,
    MemoryProfile,
    MeshCandidate,
    OpDecision,
    Padding,
    Pipeline,
    PlanIdentity,
    Rematerialisation,
    SearchStep,
    StageCount,
    StagePlan,
    StageTransfer,
)

T = TypeVar("T")


def decode_document(data: bytes, name: str) -> doc.Document:
    """The document of the file ``name``.

    Raises:
        PlanFileError: if the file is cut short, not a plan, of another version, or breaks the format; with the place.
    """
    _check_header(data, name)
    return _decode(data, doc.Document, name)


def decode_fields(document: doc.Document, name: str) -> dict[str, Any]:
    """The fields of a ``Plan``.

    Raises:
        PlanFileError: the document contradicts itself; with the place.
    """
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
            f"plan file {name!r} {cut} ({len(data)} bytes; {error}). `plan.save` writes whole files only:"
            " this is another file, or it was damaged on the way. Check the path. Copy it again, or make the plan again."
        ) from error


def _long_row(data: bytes) -> str:
    """The place of the first row that is too long, for which msgspec (0.22) gives no place."""
    try:
        document = msgspec.json.decode(data)
    except msgspec.DecodeError:  # it is damaged behind what was found first
        return ""
    if not isinstance(document, dict):
        return ""
    tables = [(f"$.{table}", document.get(table), kind) for table, kind in doc.ROWS.items()]
    stages = document.get("stages")
    for number, stage in enumerate(stages if isinstance(stages, list) else ()):
        tables += [(f"$.stages[{number}].{table}", stage.get(table), kind) for table, kind in doc.STAGE_ROWS.items()]
    pipeline = document.get("pipeline")
    if isinstance(pipeline, dict):
        tables += [(f"$.pipeline.{table}", pipeline.get(table), kind) for table, kind in doc.PIPELINE_ROWS.items()]
    for place, rows, kind in tables:
        for number, row in enumerate(rows or ()):
            if isinstance(row, list) and len(row) > len(kind.__struct_fields__):
                return f" - at `{place}[{number}]`"
    return ""


def _check_header(data: bytes, name: str) -> None:
    try:
        header = _decode(data, doc.Header, name)
    except PlanFileError as error:
        if isinstance(error.__cause__, msgspec.ValidationError):
            header = doc.Header()
        else:
            raise
    if header.format == doc.LAYOUT_FORMAT:
        raise PlanFileError(
            f"{name!r} is a shared layout, which has a plan for each of its graphs; a plan file has one. Layouts are written by"
            " `layout.save`. Read it with al.SharedLayout.load(path), and take one of its `plans`."
        )
    if header.format != doc.FORMAT:
        raise PlanFileError(
            f'{name!r} is JSON but no plan: it does not start with "format": "{doc.FORMAT}".'
            " Plan files are written by `plan.save`. Check the path."
        )
    if header.format_version != doc.FORMAT_VERSION:
        raise PlanFileError(
            f"plan file {name!r} has plan-format version {header.format_version}; this alpa_lite reads version"
            f" {doc.FORMAT_VERSION}. Make the plan again, or install the alpa_lite that wrote it."
        )


class _Decoder:
    """Tables back to records; the records' own checks run, so a spec that uses an axis twice is refused here."""

    def __init__(self, document: doc.Document) -> None:
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
            "pipeline": None if d.pipeline is None else _pipeline(d.pipeline),
            "stage_counts": tuple(StageCount(**msgspec.structs.asdict(row)) for row in d.stage_counts),
            "remat": None if d.remat is None else _remat(d.remat),
            "mesh_table": tuple(self._candidate(candidate) for candidate in d.mesh_table),
            "inputs": tuple(map(self._leaf, d.inputs)),
            "outputs": tuple(map(self._leaf, d.outputs)),
            "stages": tuple(map(self._stage, d.stages)),
        }

    def _step(self, row: doc.StepRow) -> Step:
        return Step(
            kind=CollectiveKind(row.kind) if row.kind else None,
            axes=self.axes(row.axes),
            source_dim=row.source_dim,
            target_dim=row.target_dim,
            before=self.spec(row.before),
            after=self.spec(row.after),
        )

    def _op_fields(self, row: doc.OpRow) -> dict[str, Any]:
        specs = (tuple(map(self.spec, row.operands)), tuple(map(self.spec, row.results)))
        return {"op": self.string(row.op), "operands": specs[0], "results": specs[1], "time_s": row.time_s}

    def _candidate(self, c: doc.Candidate) -> MeshCandidate:
        return MeshCandidate(
            mesh=_decode_mesh(c.mesh),
            objective=c.objective,
            lower_bound=c.lower_bound,
            peak_bytes=c.peak_bytes,
            status=c.status,
            reason=c.reason,
        )

    def _leaf(self, row: doc.LeafRow) -> Leaf:
        value = Value(shape=tuple(row.shape), dtype=row.dtype, itemsize=row.itemsize)
        return Leaf(path=row.path, value=value, spec=self.spec(row.spec), role=row.role, stage=row.stage, pin=row.pin)

    def _stage(self, s: doc.Stage) -> StagePlan:
        return StagePlan(
            mesh=_decode_mesh(s.mesh),
            submesh=s.submesh,
            first_device=s.first_device,
            layers=tuple(s.layers),
            compute_s=s.compute_s,
            penalty=s.penalty,
            forward_s=s.forward_s,
            backward_s=s.backward_s,
            once_s=s.once_s,
            weight_s=s.weight_s,
            inputs=tuple(map(self._leaf, s.inputs)),
            outputs=tuple(map(self._leaf, s.outputs)),
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

    def _collective(self, row: doc.CollectiveRow) -> Collective:
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


def _pipeline(p: doc.Pipeline) -> Pipeline:
    return Pipeline(
        num_microbatches=p.num_microbatches,
        schedule=p.schedule,
        stage_of_layer=tuple(p.stage_of_layer),
        transfers=tuple(StageTransfer(**msgspec.structs.asdict(row)) for row in p.transfers),
        bubble_share=p.bubble_share,
        num_chunks=p.num_chunks,
        table=tuple(p.table),
        timeline=tuple(p.timeline),
    )


def _remat(r: doc.Remat) -> Rematerialisation:
    return Rematerialisation(num_layers=r.num_layers, layers=tuple(r.layers), saved=tuple(r.saved))


def _padding(row: doc.PaddingRow) -> Padding:
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


def _decode_mesh(mesh: doc.Mesh) -> DeviceMesh:
    return DeviceMesh(shape=tuple(mesh.shape), axis_names=tuple(mesh.axis_names))


def _lookup(table: str, items: list[T]) -> Callable[[int], T]:
    def item(index: int) -> T:
        if not 0 <= index < len(items):
            raise IndexError(f"entry {index} of table {table!r}, which has {len(items)}")
        return items[index]

    return item


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
