"""What a user says about the tensors of a program -> one ``TensorLayout`` per value, checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Op, Program
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.patterns import unsupported
from alpa_lite.costs.priced import without_trivial_axes
from alpa_lite.errors import ArgumentsError

_NUM_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """Where one tensor lies.

    Attributes:
        spec: how it is split.
        mesh: over which axes.
        stage: which devices: layouts are on the same devices if stage and mesh are equal.
    """

    spec: ShardingSpec
    mesh: DeviceMesh
    stage: int = 0

    def same_devices(self, other: TensorLayout) -> bool:
        return self.stage == other.stage and self.mesh == other.mesh

    def __str__(self) -> str:
        return f"{self.spec} on mesh {self.mesh}" + (f" of stage {self.stage}" if self.stage else "")


def ends(op: Op) -> Iterator[int]:
    """Values of the op that take part in producer-consumer pairs."""
    ins, outs = [v for v in op.inputs if v >= 0], [v for v in op.outputs if v >= 0]
    if ins and outs:
        yield from ins
        yield from outs


def layouts_of(program: Program, specs: Mapping[int | str, Any], mesh: DeviceMesh | None) -> dict[int, TensorLayout]:
    """Layouts by value id, as given but without axes of size 1; scalars that are not mentioned are whole.

    Raises:
        ArgumentsError: a key or spec that does not fit the program or the mesh.
        UnsupportedPattern: a dim that does not divide.
    """
    by_path = {p: v for p, v in zip(program.output_paths, program.outputs, strict=False) if v >= 0}
    by_path |= dict(zip(program.input_paths, program.inputs, strict=False))
    found: dict[int, TensorLayout] = {}
    for key, given in specs.items():
        value = by_path.get(key, -1) if isinstance(key, str) else key
        if not 0 <= value < len(program.values):
            raise ArgumentsError(
                f"specs has the key {key!r}, which is no tensor of the program. A key is a value's number (0 to "
                f"{len(program.values) - 1}) or a path ({_some(by_path)}). In `specs`. `print(program)` shows both."
            )
        made = _layout(key, given, mesh, len(program.values[value].shape))
        _check(program, value, key, made)
        if 1 in made.mesh.shape:
            made = replace(made, spec=without_trivial_axes(made.spec, made.mesh))
        if found.setdefault(value, made) != made:
            raise ArgumentsError(
                f"specs gives %{value} twice, as {found[value]} and, by the key {key!r}, as {made}. A tensor has one "
                "layout. In `specs`. Take one of the two out."
            )
    for op in program.ops:
        beside = next((found[v] for v in ends(op) if v in found), None)
        for value in (v for v in ends(op) if v not in found and not program.values[v].shape):
            if beside is not None:
                found[value] = replace(beside, spec=ShardingSpec(()))
            elif mesh is not None:
                found[value] = TensorLayout(spec=ShardingSpec(()), mesh=mesh)
    return found


def require_layouts(program: Program, layouts: Mapping[int, TensorLayout]) -> None:
    """Every tensor of a pair needs a layout; ``ArgumentsError`` otherwise."""
    missing = {v: op for op in program.ops for v in ends(op) if v not in layouts}
    if missing:
        shown = [f"%{v}: {program.values[v]} of {op.primitive} at {op.source}" for v, op in missing.items()]
        raise ArgumentsError(
            f"specs says nothing of {len(missing)} tensors: {_some(shown)}. Every tensor of a pair needs a spec. In "
            "`specs`. Add them, or let `al.analysis.follow(program, specs, mesh)` derive them from those given."
        )


def _some(names: Iterable[Any]) -> str:
    shown = list(map(str, names))
    rest = f" and {len(shown) - _NUM_SHOWN} more" if len(shown) > _NUM_SHOWN else ""
    return ", ".join(shown[:_NUM_SHOWN]) + rest if shown else "it has none"


def _layout(key: int | str, given: Any, mesh: DeviceMesh | None, rank: int) -> TensorLayout:
    """One entry of ``specs``; a ``PartitionSpec`` may leave trailing dims out."""
    if isinstance(given, TensorLayout):
        return given
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], DeviceMesh):
        mesh, given = given
    if mesh is None:
        raise ArgumentsError(
            f"specs[{key!r}] is {given!r} and `mesh` is not given. A spec means something on a mesh only. In `specs`. Give "
            "mesh=DeviceMesh(...), or an al.analysis.TensorLayout, which has its own mesh."
        )
    try:
        if isinstance(given, ShardingSpec):
            spec = given
        elif isinstance(given, str):
            spec = ShardingSpec.parse(given)
        else:
            dims = tuple(() if d is None else (d,) if isinstance(d, str) else tuple(map(str, d)) for d in given)
            dims += ((),) * (rank - len(dims))
            spec = ShardingSpec(dims, tuple(getattr(given, "unreduced", ())))
    except (TypeError, ValueError) as error:
        raise ArgumentsError(
            f"specs[{key!r}] is {given!r}, which is no spec: {error}. Allowed are a ShardingSpec, its text such as "
            "'[x,_]', a PartitionSpec, (mesh, one of these) or an al.analysis.TensorLayout. In `specs`. Write one of these."
        ) from error
    return TensorLayout(spec=spec, mesh=mesh)


def _check(program: Program, value: int, key: int | str, layout: TensorLayout) -> None:
    """Rank, axes and divisibility."""
    shape, spec, mesh = program.values[value].shape, layout.spec, layout.mesh
    unknown = [a for a in (*spec.sharded_axes, *spec.unreduced) if a not in mesh.axis_names]
    if unknown:
        raise ArgumentsError(
            f"specs[{key!r}] is {spec}, which names the axis {unknown[0]!r}. The mesh has {mesh}. In `specs`. Use its "
            "axes only."
        )
    if spec.rank != len(shape):
        raise ArgumentsError(
            f"specs[{key!r}] is {spec} of rank {spec.rank}; %{value} is {program.values[value]} of rank {len(shape)}. A spec "
            "has one entry per dim. In `specs`. Add or take out entries."
        )
    for dim, (size, axes) in enumerate(zip(shape, spec.dims, strict=True)):
        if size % mesh.axes_size(axes):
            raise unsupported(
                "uneven tiles",
                f"specs[{key!r}] is {spec}, which splits dim {dim} of {program.values[value]} over "
                f"{mesh.axes_size(axes)} devices",
                f"%{value}",
            )
