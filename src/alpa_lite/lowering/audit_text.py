"""The audit report as plain text: totals per kind, other forms, and what does not agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from alpa_lite.core.collective import Collective

if TYPE_CHECKING:
    from alpa_lite.lowering.audit import AuditReport

_LISTED = 20  # entries per list; the report's fields have all of them


def audit_text(report: AuditReport) -> str:
    """A table and lists, as ``str(report)`` shows them."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: AuditReport) -> Iterator[str]:
    planned = sum(report.planned[i].count for i in range(len(report.planned)) if i not in set(report.free))
    found = sum(match.count for match in report.matched) + sum(merged.count for merged in report.merged)
    verdict = "ok" if report.ok else "NOT AS PLANNED"
    yield f"Audit on mesh {report.mesh}: {verdict}. {found} of {planned} planned collectives found, per step."
    yield ""
    yield f"{'kind':<20}{'planned':>9}{'bytes':>18}{'compiled':>10}{'bytes':>18}"
    for total in report.totals:
        yield (
            f"{total.kind:<20}{total.planned_count:>9}{total.planned_bytes:>18,}"
            f"{total.compiled_count:>10}{total.compiled_bytes:>18,}"
        )
    if not report.totals:
        yield "no collectives"
    forms = Counter[str]()
    for match in report.matched:
        forms[match.form] += match.count if match.form else 0
    yield from _listing("In another form", (f"{n} x {form}" for form, n in sorted((+forms).items())))
    yield from _listing(
        "Merged with an equal one", (_merged(report, m.planned, m.partner, m.count) for m in report.merged)
    )
    yield from _listing("Compiled, but not planned", map(str, report.unplanned))
    yield from _listing("Planned, but missing", (_planned(i, report.planned[i], n) for i, n in report.missing))


def _listing(title: str, entries: Iterable[str]) -> Iterator[str]:
    all_entries = tuple(entries)
    if all_entries:
        yield ""
        yield f"{title}:"
        yield from (f"  {entry}" for entry in all_entries[:_LISTED])
        if len(all_entries) > _LISTED:
            yield f"  and {len(all_entries) - _LISTED} more"


def _merged(report: AuditReport, planned: int, partner: int, count: int) -> str:
    into = "fewer executions of itself" if partner == planned else f"#{partner}"
    return f"{_planned(planned, report.planned[planned], count)}, into {into}"


def _planned(index: int, collective: Collective, count: int) -> str:
    about = " ".join(part for part in (collective.op, collective.tensor) if part)
    where = f" at {collective.source}" if collective.source else ""
    return (
        f"#{index} {collective.kind} over {'+'.join(collective.axes)}, {collective.size_bytes} bytes, {count} x{where}"
        + (f" ({about})" if about else "")
    )
