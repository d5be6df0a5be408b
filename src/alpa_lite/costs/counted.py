"""Conventions that count what moves instead of predicting seconds: slapo, hidet and plain ring bytes.

A price is a factor times what the convention counts of the tensor as the collective sees it (``core/collective.py``: the
larger side), in slapo and hidet cut to a whole number. There is no latency, and compute is free. With V the whole tensor
and n the devices along the axis:

==================  ===============  ==========  ================
                    slapo            hidet       ring
==================  ===============  ==========  ================
counts              elements         bytes       bytes per device
slice               0, head: 1       0           0
all-gather          V/n              V           V (n-1)/n
all-to-all          V (1/n - 1/n^2)  not known   V (n-1)/n^2
all-reduce          V                2V          2V (n-1)/n
reduce-scatter      not known        V           V (n-1)/n
collective-permute  not known        not known   V
==================  ===============  ==========  ================

**slapo** is the autoshard solver of slapo (pull request 96). ``slapo-2023-05`` is the state that its published tables come
from: V counts the last two dims only. ``slapo-head`` is its last state: V counts the whole tensor, and cutting a replicated
tensor costs 1, to prefer plans with fewer conversions. A matmul is always split, in one of three ways; it reduces at once;
nothing else reduces over a split dim; every reader of a tensor pays for its own conversion; weights lie where they are
read; arguments arrive and results leave replicated. One mesh axis.

**hidet** is hidet's RFC 0003 (issue 335): all-to-all is emulated by a gather and a slice, partial sums are reduced at once,
and the memory budget limits the bytes of the weights. One mesh axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.costs.model import SearchRules, Size, linear_price

COUNTED = ("slapo-2023-05", "slapo-head", "hidet", "ring")

_K = CollectiveKind
_SLAPO = SearchRules(
    single_axis=True,
    matrix_dims=True,
    reduced_at_once=True,
    whole_reductions=True,
    per_reader=True,
    placed_weights=True,
    replicated_ends=True,
    sharded_contractions=True,
    whole=True,
)
_RULES = {
    "slapo-2023-05": _SLAPO,
    "slapo-head": _SLAPO,
    "hidet": SearchRules(
        single_axis=True,
        reduced_at_once=True,
        per_reader=True,
        placed_weights=True,
        replicated_ends=True,
        budget="weights",
        whole=True,
    ),
    "ring": SearchRules(),
}
PER_READER = frozenset(name for name, rules in _RULES.items() if rules.per_reader)
SINGLE_AXIS = frozenset(name for name, rules in _RULES.items() if rules.single_axis)
ALWAYS_SHARDED = frozenset(name for name, rules in _RULES.items() if rules.sharded_contractions)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedCosts:
    """One of ``COUNTED`` on one mesh; see the module's table.

    Attributes:
        name: which.
        mesh: the device mesh.
        forbid: kinds that cost inf, besides those that the convention does not know.
        replication_penalty: see ``CostModel``.
        require_sharded_contractions: a contraction that is repeated in full costs inf; None = the convention's own.
    """

    name: str
    mesh: DeviceMesh
    forbid: tuple[CollectiveKind, ...] = ()
    replication_penalty: float = 0.0
    require_sharded_contractions: bool | None = None
    rules: SearchRules = field(init=False)

    def __post_init__(self) -> None:
        own = _RULES[self.name]
        asked = self.require_sharded_contractions
        strict = own.sharded_contractions if asked is None else asked
        object.__setattr__(self, "rules", replace(own, sharded_contractions=strict))

    @property
    def unit(self) -> str:
        return "elements" if self.name.startswith("slapo") else "bytes"

    @property
    def slice_price(self) -> float:
        return 1.0 if self.name == "slapo-head" else 0.0

    @property
    def writes_patches(self) -> bool:
        return False

    @property
    def across_passes(self) -> float:
        return 0.0

    def volume(self, shape: tuple[int, ...], itemsize: int) -> float:
        if self.name == "slapo-2023-05":
            return math.prod(shape[-2:])
        return math.prod(shape) * (1 if self.name == "slapo-head" else itemsize)

    def linear(self, kind: CollectiveKind, axes: tuple[str, ...]) -> tuple[float, float]:
        n = self.mesh.axes_size(axes)
        if n == 1:
            return 0.0, 0.0
        factor = None if kind in self.forbid else _factor(self.name, kind, n)
        return (math.inf, 0.0) if factor is None else (0.0, factor)

    def collective(self, kind: CollectiveKind, axes: tuple[str, ...], size_bytes: Size) -> Size:
        price = linear_price(self.linear(kind, axes), size_bytes)
        return np.floor(price) if self.rules.whole else price  # pyrefly: ignore[bad-return]

    def inner_extra(self, kind: CollectiveKind, axes: tuple[str, ...]) -> tuple[float, float]:
        return 0.0, 0.0

    def compute(self, flops: Size, size_bytes: Size, dtype: str, heavy: bool) -> Size:
        return linear_price((0.0, 0.0), flops)

    def heavy_replication(self, axes: tuple[str, ...], size_bytes: Size) -> Size:
        repeated = self.mesh.axes_size(axes) > 1
        price = math.inf if repeated and self.rules.sharded_contractions else 0.0
        return linear_price((price, 0.0), size_bytes)


def _factor(name: str, kind: CollectiveKind, n: int) -> float | None:
    """Price per counted unit of the collective's larger side per device; None for a kind that is not known."""
    if name == "hidet":
        return {_K.ALL_GATHER: 1.0, _K.ALL_REDUCE: 2.0, _K.REDUCE_SCATTER: 1.0}.get(kind)
    part = (n - 1) / n
    if name == "ring":
        whole = {_K.ALL_REDUCE: 2 * part, _K.COLLECTIVE_PERMUTE: 1.0}
        return whole.get(kind, part)
    # The size of an all-to-all is V/n.
    return {_K.ALL_GATHER: 1 / n, _K.ALL_TO_ALL: part, _K.ALL_REDUCE: 1.0}.get(kind)
