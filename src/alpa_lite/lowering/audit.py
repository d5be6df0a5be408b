"""The audit: what was compiled against what was planned, both ways.

In: the plan's collectives, the compiled HLO text, the mesh. Out: an ``AuditReport``.

Planned and compiled collectives agree when kind, mesh axes and bytes (1 %) agree; executions are counted, so a loop
body that XLA unrolled or peeled still adds up. Passes, strictest first, each taking from what the former left:

1. agreement with the scope name ``al_c<index>`` that lowering puts around planned collective ``index``;
2. agreement of kind, axes and bytes alone (XLA keeps one name when it merges collectives);
3. known legal forms (``audit_forms.py``): another element type, a reduce-scatter as all-reduce and slice, ...; the
   report says which form it saw;
4. consecutive all-reduces over several axes that XLA folded into one over all of these axes.

What is left of the compiled ones is *unplanned*. What is left of the planned ones is *merged* if an equal planned
collective was found (XLA joins equal collectives, and sums of all-reduces into the all-reduce of the sum), else
*missing*. Collectives over axes of size 1 or of nothing need no compiled counterpart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from alpa_lite.core.collective import Collective, CollectiveKind
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.lowering.audit_forms import form_of, same_size
from alpa_lite.lowering.device_groups import mesh_axes_of, permute_axes_of
from alpa_lite.lowering.hlo import HloCollective, collectives_in
from alpa_lite.lowering.hlo_text import bytes_of, dtypes_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """``count`` executions of one planned collective found as one compiled tensor.

    Attributes:
        planned: index into ``AuditReport.planned``.
        compiled: index into ``AuditReport.compiled``.
        form: "" if it is as planned, else what XLA made of it.
    """

    planned: int
    compiled: int
    count: int
    form: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """``count`` executions of a planned collective that an equal one (``partner``, an index too) stands for."""

    planned: int
    partner: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplanned:
    """A compiled collective that runs ``count`` times more than planned; ``axes`` None if no axes have its groups.

    ``source`` is the user's "file:line", from the text or from the planned collective whose scope name it carries.
    """

    collective: HloCollective
    axes: tuple[str, ...] | None
    count: int
    source: str

    def __str__(self) -> str:
        c = self.collective
        where = "over " + ("+".join(self.axes) if self.axes is not None else f"device groups {str(c.groups)[:60]}")
        what = f"{c.kind} {where}, {c.size_bytes} bytes, {self.count} x"
        return f"{what}, at {self.source or 'an unknown line'} ({c.op_name or c.instruction})"


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTotal:
    """Executions and bytes of one kind per step."""

    kind: str
    planned_count: int
    planned_bytes: int
    compiled_count: int
    compiled_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The outcome of an audit.

    Attributes:
        mesh: the device mesh.
        planned: as given; indices below point here.
        compiled: one record per moved tensor.
        matched, merged: how planned ones were found.
        free: indices of planned ones that need no communication (axes of size 1, no elements).
        unplanned: compiled, but not planned.
        missing: (index, executions) planned, but not found.
        totals: per kind.
    """

    mesh: DeviceMesh
    planned: tuple[Collective, ...]
    compiled: tuple[HloCollective, ...]
    matched: tuple[Match, ...]
    merged: tuple[Merged, ...]
    free: tuple[int, ...]
    unplanned: tuple[Unplanned, ...]
    missing: tuple[tuple[int, int], ...]
    totals: tuple[KindTotal, ...]

    @property
    def ok(self) -> bool:
        """Everything compiled was planned, and everything planned was found."""
        return not self.unplanned and not self.missing

    def __str__(self) -> str:
        from alpa_lite.lowering.audit_text import audit_text

        return audit_text(self)


def audit(planned: Iterable[Collective], hlo_text: str, mesh: DeviceMesh) -> AuditReport:
    """Compares planned collectives with compiled HLO.

    Args:
        planned: index ``i`` may carry the scope name ``al_c<i>`` in the program.
        hlo_text: ``compiled.as_text()`` of the step, of XLA:CPU or XLA:GPU.
        mesh: the mesh that the step was compiled for.

    Raises:
        ValueError: the text is not HLO.
    """
    return _Audit(tuple(planned), collectives_in(hlo_text), mesh, dtypes_in(hlo_text)).report()


class _Audit:
    """Counts still to be matched, and the passes over them."""

    def __init__(
        self,
        planned: tuple[Collective, ...],
        compiled: tuple[HloCollective, ...],
        mesh: DeviceMesh,
        dtypes: frozenset[str],
    ) -> None:
        self.mesh = mesh
        self.dtypes = dtypes
        self.planned = planned
        self.axes_of_planned = [self._real(p.axes) for p in planned]
        self.free = tuple(
            i for i, p in enumerate(planned) if not self.axes_of_planned[i] or p.size_bytes == 0 or p.count == 0
        )
        self.compiled, self.axes_of_compiled = self._split(compiled)
        self.planned_left = [0 if i in self.free else p.count for i, p in enumerate(planned)]
        self.compiled_left = [c.count for c in self.compiled]
        self.matched: list[Match] = []

    def report(self) -> AuditReport:
        for keyed, forms in ((True, False), (False, False), (True, True), (False, True)):
            self._pass(keyed=keyed, forms=forms)
        self._fold()
        merged, missing = self._merge()
        unplanned = tuple(
            Unplanned(
                collective=self.compiled[j],
                axes=self.axes_of_compiled[j],
                count=left,
                source=self._source(self.compiled[j]),
            )
            for j, left in enumerate(self.compiled_left)
            if left
        )
        return AuditReport(
            mesh=self.mesh,
            planned=self.planned,
            compiled=self.compiled,
            matched=tuple(self.matched),
            merged=merged,
            free=self.free,
            unplanned=unplanned,
            missing=missing,
            totals=self._totals(),
        )

    def _source(self, collective: HloCollective) -> str:
        named = (self.planned[i].source for i in collective.keys if i < len(self.planned))
        return collective.source or next(filter(None, named), "")

    def _real(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """In mesh order, without axes of size 1."""
        return tuple(a for a in self.mesh.sort_axes(axes) if self.mesh.axis_size(a) > 1)

    def _axes(self, collective: HloCollective) -> tuple[str, ...] | None:
        of = permute_axes_of if collective.kind == CollectiveKind.COLLECTIVE_PERMUTE else mesh_axes_of
        return of(collective.groups, self.mesh)

    def _split(
        self, compiled: tuple[HloCollective, ...]
    ) -> tuple[tuple[HloCollective, ...], list[tuple[str, ...] | None]]:
        """Takes tensors apart that XLA laid end to end, unless the plan itself moves the joined one."""
        records: list[HloCollective] = []
        axes: list[tuple[str, ...] | None] = []
        for collective in compiled:
            along = self._axes(collective)
            parts = [
                replace(collective, elements=n, size_bytes=bytes_of(collective.dtype, n), joined=len(collective.parts))
                for n in collective.parts
            ]
            whole = self._is_planned(collective, along)
            apart = all(self._is_planned(part, along) for part in parts)
            if not parts or (whole and not apart):
                parts = [collective]
            records += parts
            axes += [along] * len(parts)
        return tuple(records), axes

    def _is_planned(self, collective: HloCollective, along: tuple[str, ...] | None) -> bool:
        """Whether something of this kind and size is planned over these axes, or (to be folded) over some of them."""
        return along is not None and any(
            p.kind == collective.kind and a and set(a) <= set(along) and same_size(p.size_bytes, collective.size_bytes)
            for p, a in zip(self.planned, self.axes_of_planned, strict=True)
        )

    def _pass(self, *, keyed: bool, forms: bool) -> None:
        """One pass over what is left; ``forms`` allows the known other forms."""
        buckets: dict[tuple[str, ...], list[int]] = {}
        for i, left in enumerate(self.planned_left):
            if left:
                buckets.setdefault(self.axes_of_planned[i], []).append(i)
        # Converted ones last: an equal tensor that was planned in the wider type is not converted, and comes first.
        for j in sorted(range(len(self.compiled)), key=lambda j: "convert" in self.compiled[j].near):
            collective, axes = self.compiled[j], self.axes_of_compiled[j]
            if axes is None or not self.compiled_left[j]:
                continue
            candidates = collective.keys if keyed else buckets.get(axes, ())
            for i in candidates:
                if not self.compiled_left[j]:
                    break
                if i < len(self.planned) and self.planned_left[i] and self.axes_of_planned[i] == axes:
                    self._try(i, j, keyed=keyed, forms=forms)

    def _try(self, i: int, j: int, *, keyed: bool, forms: bool) -> None:
        planned, collective = self.planned[i], self.compiled[j]
        if planned.kind == collective.kind and same_size(planned.size_bytes, collective.size_bytes):
            form = ""
        elif forms:
            found = form_of(planned, collective, named=keyed, dtypes=self.dtypes)
            if found is None:
                return
            form = found
        else:
            return
        count = min(self.planned_left[i], self.compiled_left[j])
        if not collective.count_is_known:  # XLA does not say how often it runs, the plan assumed a number
            self.planned_left[i], self.compiled_left[j] = 0, 0
            count = planned.count
        else:
            self.planned_left[i] -= count
            self.compiled_left[j] -= count
        self.matched.append(Match(planned=i, compiled=j, count=count, form=form))

    def _fold(self) -> None:
        """All-reduces over x, then over y, as one over both (XLA:GPU's all-reduce folder, which drops the names)."""
        for j, collective in enumerate(self.compiled):
            axes = self.axes_of_compiled[j]
            if collective.kind != CollectiveKind.ALL_REDUCE or axes is None or not self.compiled_left[j]:
                continue
            chain: list[int] = []
            for i, planned in enumerate(self.planned):
                taken = {a for other in chain for a in self.axes_of_planned[other]}
                fits = self.planned_left[i] and planned.kind == CollectiveKind.ALL_REDUCE
                inside = set(self.axes_of_planned[i]) <= set(axes) - taken
                if fits and inside and same_size(planned.size_bytes, collective.size_bytes):
                    chain.append(i)
            if self.mesh.sort_axes({a for i in chain for a in self.axes_of_planned[i]}) != axes:
                continue
            count = min(self.compiled_left[j], *(self.planned_left[i] for i in chain))
            form = f"one all-reduce over {'+'.join(axes)} for {', '.join(f'#{i}' for i in chain)}"
            self.compiled_left[j] -= count
            for i in chain:
                self.planned_left[i] -= count
                self.matched.append(Match(planned=i, compiled=j, count=count, form=form))

    def _merge(self) -> tuple[tuple[Merged, ...], tuple[tuple[int, int], ...]]:
        """Gives what is left of the planned ones an equal partner that was found."""
        found: dict[tuple[CollectiveKind, tuple[str, ...]], list[int]] = {}
        for i in dict.fromkeys(match.planned for match in self.matched):
            found.setdefault((self.planned[i].kind, self.axes_of_planned[i]), []).append(i)
        merged: list[Merged] = []
        missing: list[tuple[int, int]] = []
        for i, left in enumerate(self.planned_left):
            if not left:
                continue
            planned = self.planned[i]
            partners = found.get((planned.kind, self.axes_of_planned[i]), ())
            equal = [p for p in partners if same_size(self.planned[p].size_bytes, planned.size_bytes)]
            equal.sort(key=lambda p: abs(p - i))  # itself first (executed less often than planned), then the nearest
            if equal:
                merged.append(Merged(planned=i, partner=equal[0], count=left))
            else:
                missing.append((i, left))
        return tuple(merged), tuple(missing)

    def _totals(self) -> tuple[KindTotal, ...]:
        kinds = dict.fromkeys([*map(str, CollectiveKind), *(c.kind for c in self.compiled)])
        totals = []
        for kind in kinds:
            planned = [p for i, p in enumerate(self.planned) if p.kind == kind and i not in self.free]
            compiled = [c for c in self.compiled if c.kind == kind]
            if planned or compiled:
                totals.append(
                    KindTotal(
                        kind=kind,
                        planned_count=sum(p.count for p in planned),
                        planned_bytes=sum(p.count * p.size_bytes for p in planned),
                        compiled_count=sum(c.count for c in compiled),
                        compiled_bytes=sum(c.count * c.size_bytes for c in compiled),
                    )
                )
        return tuple(totals)
