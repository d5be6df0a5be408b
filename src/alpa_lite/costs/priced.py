"""One conversion with its bytes and prices, as a record for people, tests and execution; the checks of a user's spec.

In: two specs, a tensor, a mesh and a cost model. Out: a ``PricedConversion``. It holds the steps that the planner would
choose, so what it says is what a plan would do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from alpa_lite.core.collective import Collective, CollectiveKind
from alpa_lite.core.conversion import Step
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conversion import Conversions, step_price, step_size_bytes
from alpa_lite.errors import SpecError
from alpa_lite.units import format_bytes, format_cost, next_multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedStep:
    """One step of a conversion with what it costs.

    Attributes:
        step: what is done.
        size_bytes: of its collective, per device, as ``core/collective.py`` defines it; 0 for a slice.
        sent_bytes: what one device sends, see ``sent_bytes``; 0 for a slice.
        cost: in the cost model's unit.
    """

    step: Step
    size_bytes: int
    sent_bytes: int
    cost: float

    @property
    def name(self) -> str:
        return str(self.step.kind or "slice")


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedConversion:
    """The cheapest way from one spec to another.

    Attributes:
        before, after: the specs; axes of size 1 are left out.
        shape, dtype: of the whole tensor.
        mesh: the mesh.
        steps: in order; none if nothing is to be done.
        unit: of the costs, "s" for seconds.
    """

    before: ShardingSpec
    after: ShardingSpec
    shape: tuple[int, ...]
    dtype: str
    mesh: DeviceMesh
    steps: tuple[PricedStep, ...]
    unit: str

    @property
    def cost(self) -> float:
        """Of all steps, in ``unit``."""
        return sum(s.cost for s in self.steps)

    @property
    def sent_bytes(self) -> int:
        """Of all steps, per device."""
        return sum(s.sent_bytes for s in self.steps)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The steps that communicate, as the audit takes them."""
        return tuple(
            Collective(kind=s.step.kind, axes=self.mesh.sort_axes(s.step.axes), size_bytes=s.size_bytes, time_s=s.cost)
            for s in self.steps
            if s.step.kind is not None
        )

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        title = f"{self.dtype}[{shape}] on {self.mesh}: {self.before} -> {self.after}"
        if not self.steps:
            return f"{title}\nnothing to do\n"
        rows = [("step", "over", "then", "size", "sent", "cost")]
        rows += [
            (
                s.name,
                ",".join(s.step.axes),
                str(s.step.after),
                format_bytes(s.size_bytes) if s.size_bytes else "-",
                format_bytes(s.sent_bytes) if s.size_bytes else "-",
                format_cost(s.cost, self.unit),
            )
            for s in self.steps
        ]
        rows.append(("total", "", "", "", format_bytes(self.sent_bytes), format_cost(self.cost, self.unit)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([title, *lines]) + "\n"


def price_conversion(
    conversions: Conversions,
    before: ShardingSpec,
    after: ShardingSpec,
    shape: tuple[int, ...],
    dtype: str,
    itemsize: int,
) -> PricedConversion:
    """The steps that ``conversions`` chooses, each with its bytes and its price.

    Args:
        conversions: the engine of one mesh and cost model.
        before, after: checked specs (``read_spec``).
        shape, dtype, itemsize: of the whole tensor.

    Raises:
        SpecError: ``after`` holds partial sums that ``before`` does not have, or the way needs forbidden collectives.
    """
    mesh, costs = conversions.mesh, conversions.costs
    before, after = (without_trivial_axes(spec, mesh) for spec in (before, after))
    try:
        steps = conversions.steps(before, after, shape, itemsize)
    except ValueError:
        raise SpecError(
            f"no sequence of collectives turns {before} into {after} for a tensor of shape {shape} on the mesh {mesh}. "
            f"A tensor becomes unreduced only where partial sums are made, so the target may be unreduced over axes of "
            f"the source alone, and not every kind of collective may be forbidden. The two specs were given to a "
            f"conversion; ask for a target without {', '.join(after.unreduced) or 'this split'}."
        ) from None
    priced = [
        PricedStep(
            step=step,
            size_bytes=step_size_bytes(step, shape, itemsize, mesh) if step.kind else 0,
            sent_bytes=sent_bytes(step, shape, itemsize, mesh),
            cost=step_price(step, shape, itemsize, mesh, costs),
        )
        for step in steps
    ]
    return PricedConversion(
        before=before, after=after, shape=shape, dtype=dtype, mesh=mesh, steps=tuple(priced), unit=costs.unit
    )


def sent_bytes(step: Step, shape: tuple[int, ...], itemsize: int, mesh: DeviceMesh) -> int:
    """What one device sends (and receives) in a step.

    With V for the whole tensor and n devices along the axes of the step: all-gather and reduce-scatter V(n-1)/n,
    all-reduce twice that, all-to-all V(n-1)/n^2, collective-permute one tile, slice nothing.
    """
    if step.kind is None:
        return 0
    size = step_size_bytes(step, shape, itemsize, mesh)
    if step.kind is CollectiveKind.COLLECTIVE_PERMUTE:
        return size
    n = mesh.axes_size(step.axes)
    return (2 if step.kind is CollectiveKind.ALL_REDUCE else 1) * size * (n - 1) // n


def without_trivial_axes(spec: ShardingSpec, mesh: DeviceMesh) -> ShardingSpec:
    """The same layout without axes of size 1."""
    dims = tuple(tuple(a for a in dim if mesh.axis_size(a) > 1) for dim in spec.dims)
    return ShardingSpec(dims, tuple(a for a in spec.unreduced if mesh.axis_size(a) > 1))


def read_spec(
    dims: Sequence[Sequence[str]],
    unreduced: Sequence[str],
    shape: tuple[int, ...],
    mesh: DeviceMesh,
    tensor: str,
    where: str,
) -> ShardingSpec:
    """The spec that a user wrote, checked against the tensor and the mesh.

    Args:
        dims: per dim its axes; missing trailing dims are whole.
        unreduced: axes with partial sums.
        shape: of the whole tensor.
        tensor: its name in messages, e.g. "the tensor" or "0/params/kernel".
        where: where the spec was given, e.g. "al.conversion (after)".

    Raises:
        SpecError: too many dims, an axis that the mesh does not have or that is used twice, a dim that does not divide.
    """
    text = _text(dims, unreduced)
    given = f"{tensor} of shape {shape} was given the spec {text}"
    if len(dims) > len(shape):
        raise SpecError(
            f"{given}, which has {len(dims)} dims; the tensor has {len(shape)}. A spec has at most one entry per dim. "
            f"It was given to {where}; drop {len(dims) - len(shape)} of its entries."
        )
    used: dict[str, str] = {}
    places = [(f"dim {d}", axis) for d, axes in enumerate(dims) for axis in axes] + [
        ("unreduced", a) for a in unreduced
    ]
    for place, axis in places:
        if axis not in mesh.axis_names:
            raise SpecError(
                f"{given}, whose {place} names the axis {axis!r}. The mesh {mesh} has the axes "
                f"{', '.join(map(repr, mesh.axis_names))}. It was given to {where}; correct the name there."
            )
        if axis in used:
            raise SpecError(
                f"{given}, which names the axis {axis!r} twice: {used[axis]} and {place}. A mesh axis may be used once "
                f"per tensor. It was given to {where}; keep one of the two."
            )
        used[axis] = place
    full = (*map(tuple, dims), *((),) * (len(shape) - len(dims)))
    for d, (size, axes) in enumerate(zip(shape, full, strict=True)):
        parts = mesh.axes_size(axes)
        if size % parts or (parts > 1 and size == 0):
            over = " and ".join(f"axis {a!r} (n={mesh.axis_size(a)})" for a in axes)
            raise SpecError(
                f"{given}: dim {d} of size {size} does not divide over {over}, {parts} parts. Only even splits are "
                f"carried out. It was given to {where}; pad the dim to {next_multiple(max(size, 1), parts)}, split another "
                f"dim, or leave this one whole."
            )
    return ShardingSpec(full, tuple(unreduced))


def read_mesh(mesh: Mapping[str, int], where: str) -> DeviceMesh:
    """Axis names with their sizes as a mesh (``SpecError`` for a size below 1, no axis, or no such mapping)."""
    readable = isinstance(mesh, Mapping) and all(isinstance(n, int) for n in mesh.values())
    if not readable or not mesh or any(size < 1 for size in mesh.values()):
        raise SpecError(
            f"the mesh {dict(mesh) if readable else mesh!r} was given. It is a jax.sharding.Mesh, or axis names with their "
            f"sizes: at least one axis, each of size 1 or more, like {{'x': 2, 'y': 4}}. It was given to {where}; "
            f"correct it there."
        )
    return DeviceMesh(shape=tuple(mesh.values()), axis_names=tuple(mesh))


def _text(dims: Sequence[Sequence[str]], unreduced: Sequence[str]) -> str:
    """As ``str(ShardingSpec)``, for dims that may not make a valid one."""
    body = "[" + ",".join(".".join(axes) or "_" for axes in dims) + "]"
    return body + (f"+{{{','.join(unreduced)}}}" if unreduced else "")
