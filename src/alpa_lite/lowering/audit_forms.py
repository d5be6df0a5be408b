"""Legal forms: what XLA may compile a planned collective to, other than itself.

Each form needs evidence: either the compiled collective carries the planned one's scope name, or the operations next to
it show what happened (a conversion, a slice, a pad).
"""

from __future__ import annotations

from alpa_lite.core.collective import Collective, CollectiveKind
from alpa_lite.lowering.hlo import HloCollective
from alpa_lite.lowering.hlo_text import bits_of

_TOLERANCE = 0.01
_SLICES = frozenset({"dynamic-slice", "slice"})
_PADS = frozenset({"dynamic-update-slice", "pad"})

# (planned, compiled) -> (what happened, opcodes next to it that show it)
_KIND_FORMS: dict[tuple[str, str], tuple[str, frozenset[str] | None]] = {
    (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE): ("all-reduce and slice", _SLICES),
    (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER): ("reduce-scatter: only a slice is used", None),
    (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE): ("all-reduce of padded tiles", _PADS),
}


def same_size(left: int, right: int) -> bool:
    """Equal within 1 %."""
    return abs(left - right) <= _TOLERANCE * max(left, right)


def form_of(
    planned: Collective, collective: HloCollective, *, named: bool, dtypes: frozenset[str] = frozenset()
) -> str | None:
    """What XLA made of ``planned``, if ``collective`` can be it; axes are compared elsewhere.

    Args:
        planned: a planned collective.
        collective: a compiled one over the same axes.
        named: whether the compiled one carries the planned one's scope name.
        dtypes: all element types of the compiled program.

    Returns:
        A few words for the report ("" if it is exactly as planned), None if it cannot be.
    """
    words = []
    if planned.kind != collective.kind:
        form = _KIND_FORMS.get((planned.kind, collective.kind))
        if form is None or not (named or form[1] is None or form[1] & collective.near):
            return None
        words.append(form[0])
    if not same_size(planned.size_bytes, collective.size_bytes):
        converted = _conversion(planned, collective, dtypes if named else frozenset())
        if converted is None:
            return None
        words.append(converted)
    return ", ".join(words)


def _conversion(planned: Collective, collective: HloCollective, dtypes: frozenset[str]) -> str | None:
    """Whether the sizes differ exactly as two element types do: the number of elements is what must agree.

    Evidence is a conversion next to it, or, among ``dtypes``, a narrower float: XLA:CPU computes those in a wider type,
    and where it does so on both sides of the collective no conversion is left to be seen.
    """
    here = bits_of(collective.dtype)
    if not here or not collective.elements:
        return None
    nearby = {item.removeprefix("convert:") for item in collective.near if item.startswith("convert:")}
    for dtype in sorted(nearby):
        if bits_of(dtype) != here and same_size(planned.size_bytes, collective.size_as(dtype)):
            return f"moved as {collective.dtype}, planned as {dtype}"
    if here < 8 and planned.size_bytes == collective.elements:
        return f"moved as packed {collective.dtype}, planned one byte each"
    for dtype in sorted(dtypes) if collective.dtype in ("f32", "f16") else ():
        narrower = dtype.startswith(("bf", "f")) and bits_of(dtype) < here
        if narrower and same_size(planned.size_bytes, collective.size_as(dtype)):
            return f"moved as {collective.dtype}, planned as {dtype}"
    return None
