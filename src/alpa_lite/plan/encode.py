"""A plan to the bytes of its file; see ``document`` for the format."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from alpa_lite.core.conversion import Step
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.plan import document as doc
from alpa_lite.plan.json_text import check_floats, json_text
from alpa_lite.plan.records import Leaf, MeshCandidate, OpDecision, Pipeline, StagePlan

if TYPE_CHECKING:
    from alpa_lite.plan.plan import Plan

H = TypeVar("H", bound=Hashable)


class _Table(Generic[H]):
    """Distinct items in order of first use."""

    def __init__(self) -> None:
        self.items: dict[H, int] = {}

    def __call__(self, item: H) -> int:
        return self.items.setdefault(item, len(self.items))


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
    op_rows = [doc.OpRow(op, list(operands), list(results), time_s) for op, operands, results, time_s in ops.items]
    document = doc.Document(
        format=doc.FORMAT,
        format_version=doc.FORMAT_VERSION,
        identity=doc.Identity(**{name: getattr(plan.identity, name) for name in doc.Identity.__struct_fields__}),
        objective=float(plan.objective),
        lower_bound=float(plan.lower_bound),
        unit=plan.unit,
        status=plan.status,
        costs=plan.costs,
        options=dict(plan.options),
        pins=list(plan.pins),
        search=[
            doc.SearchRow(float(s.objective), s.lower_bound if math.isfinite(s.lower_bound) else None, s.found_by)
            for s in plan.search
        ],
        paddings=[
            doc.PaddingRow(p.dim, p.size, p.padded, p.shards, p.waste_bytes, float(p.waste_s), list(p.pins), p.without)
            for p in plan.paddings
        ],
        notes=list(plan.notes),
        pipeline=None if plan.pipeline is None else _encode_pipeline(plan.pipeline),
        stage_counts=[
            doc.StageCountRow(c.num_stages, c.objective, c.bubble_share, c.status) for c in plan.stage_counts
        ],
        remat=None if (r := plan.remat) is None else doc.Remat(r.num_layers, list(r.layers), list(r.saved)),
        mesh_table=[_encode_candidate(candidate) for candidate in plan.mesh_table],
        columns=doc.COLUMNS,
        inputs=inputs,
        outputs=outputs,
        specs=[str(spec) for spec in specs.items],
        strings=list(strings.items),
        axes=[list(names) for names in axes.items],
        ops=op_rows,
        steps=[doc.StepRow(*row) for row in steps.items],
        stages=stages,
    )
    check_floats(msgspec.to_builtins(document))
    return json_text(msgspec.to_builtins(document.with_digest())).encode()


def _encode_pipeline(p: Pipeline) -> doc.Pipeline:
    rows = [doc.TransferRow(t.tensor, t.source, t.target, t.when, t.size_bytes, float(t.time_s)) for t in p.transfers]
    return doc.Pipeline(
        num_microbatches=p.num_microbatches,
        schedule=p.schedule,
        stage_of_layer=list(p.stage_of_layer),
        bubble_share=float(p.bubble_share),
        transfers=rows,
        num_chunks=p.num_chunks,
        table=list(p.table),
        timeline=list(p.timeline),
    )


def _encode_mesh(mesh: DeviceMesh) -> doc.Mesh:
    return doc.Mesh(list(mesh.shape), list(mesh.axis_names))


def _encode_candidate(c: MeshCandidate) -> doc.Candidate:
    return doc.Candidate(_encode_mesh(c.mesh), c.objective, c.lower_bound, c.peak_bytes, c.status, c.reason)


def _leaf_row(leaf: Leaf, specs: _Table[ShardingSpec]) -> doc.LeafRow:
    v = leaf.value
    return doc.LeafRow(leaf.path, v.dtype, list(v.shape), v.itemsize, specs(leaf.spec), leaf.role, leaf.stage, leaf.pin)


def _encode_stage(
    stage: StagePlan,
    specs: _Table[ShardingSpec],
    strings: _Table[str],
    axes: _Table[tuple[str, ...]],
    ops: _Table[tuple[Any, ...]],
    steps: _Table[tuple[Any, ...]],
) -> doc.Stage:
    def op_row(d: OpDecision) -> int:
        return ops((strings(d.op), tuple(map(specs, d.operands)), tuple(map(specs, d.results)), float(d.time_s)))

    def step_row(s: Step) -> int:
        kind = str(s.kind) if s.kind else ""
        return steps((kind, axes(s.axes), s.source_dim, s.target_dim, specs(s.before), specs(s.after)))

    return doc.Stage(
        mesh=_encode_mesh(stage.mesh),
        submesh=stage.submesh,
        first_device=stage.first_device,
        layers=list(stage.layers),
        compute_s=float(stage.compute_s),
        penalty=float(stage.penalty),
        forward_s=float(stage.forward_s),
        backward_s=float(stage.backward_s),
        once_s=float(stage.once_s),
        weight_s=float(stage.weight_s),
        memory=dict(stage.memory.items()),
        collectives=[
            doc.CollectiveRow(
                c.kind, axes(c.axes), c.size_bytes, c.count, float(c.time_s), c.op, strings(c.source), c.tensor
            )
            for c in stage.collectives
        ],
        conversions=[
            doc.ConversionRow(
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
        inputs=[_leaf_row(leaf, specs) for leaf in stage.inputs],
        outputs=[_leaf_row(leaf, specs) for leaf in stage.outputs],
        decisions=doc.Decisions([d.path for d in stage.decisions], [op_row(d) for d in stage.decisions]),
    )
