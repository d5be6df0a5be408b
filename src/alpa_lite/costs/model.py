"""What everything that needs a price asks: planner, conversions, reports.

A ``CostModel`` prices collectives, ops and replication on one device mesh, in one unit. ``linear`` is the price of
``collective`` taken apart, so that a caller can price thousands of tensors in one array expression.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from numpy.typing import NDArray

from alpa_lite.core.collective import CollectiveKind

Size = TypeVar("Size", float, NDArray[Any])  # a price has the shape of the sizes that it was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRules:
    """What a convention lets the planner choose from, and what it counts. The defaults restrict nothing.

    Attributes:
        single_axis: it prices meshes with one axis of more than one device only.
        matrix_dims: matmuls are split over their row, column or contraction dim, never over a batch dim.
        reduced_at_once: partial sums are reduced where they are made and never travel through ops; an op reduces once,
            whoever reads the result.
        whole_reductions: only contractions may reduce over a split dim (softmax and norms may not).
        per_reader: every reader pays for its own conversion, also where two want the same layout.
        placed_weights: a weight lies as its op reads it: free in any layout, and never converted.
        replicated_ends: arguments that are no weights arrive replicated, results leave replicated; pins overrule it.
        sharded_contractions: no matmul or convolution may be repeated in full.
        budget: what the memory budget limits: the peak, or the bytes of the weights alone.
        whole: all prices are whole numbers, so that of equally dear plans the one with the fewest slices can be taken.
    """

    single_axis: bool = False
    matrix_dims: bool = False
    reduced_at_once: bool = False
    whole_reductions: bool = False
    per_reader: bool = False
    placed_weights: bool = False
    replicated_ends: bool = False
    sharded_contractions: bool = False
    budget: Literal["peak", "weights"] = "peak"
    whole: bool = False


class CostModel(Protocol):
    """Prices on one device mesh; all times and penalties are in ``unit``."""

    @property
    def name(self) -> str:
        """The convention, e.g. "roofline"."""
        ...

    @property
    def unit(self) -> str:
        """Of all prices; "s" for seconds."""
        ...

    @property
    def replication_penalty(self) -> float:
        """Added for each parameter, random draw or scalar broadcast that is kept whole on every device."""
        ...

    @property
    def slice_price(self) -> float:
        """Of cutting out a tile, which moves nothing; 0 in most conventions."""
        ...

    @property
    def writes_patches(self) -> bool:
        """Whether a convolution writes the patches that it multiplies by its kernel, and reads them again."""
        ...

    @property
    def across_passes(self) -> float:
        """How often a product's first operand passes memory besides if it is read across its rows (``dims_read_across``).

        Only where each device has whole rows to sum over: XLA brings partial products into the order that is quick.
        """
        ...

    @property
    def rules(self) -> SearchRules:
        """What may be chosen at all."""
        ...

    def volume(self, shape: tuple[int, ...], itemsize: int) -> float:
        """What the convention counts of a whole tensor: its bytes in most, its elements in some.

        Wherever a size in bytes is asked for below, such a convention means its own count.
        """
        ...

    def collective(self, kind: CollectiveKind, axes: tuple[str, ...], size_bytes: Size) -> Size:
        """One execution over ``axes``; ``size_bytes`` per device as ``core/collective.py`` defines it."""
        ...

    def linear(self, kind: CollectiveKind, axes: tuple[str, ...]) -> tuple[float, float]:
        """``(alpha, beta)`` with price = alpha + beta * size_bytes; alpha is inf for a kind that is not allowed."""
        ...

    def inner_extra(self, kind: CollectiveKind, axes: tuple[str, ...]) -> tuple[float, float]:
        """What ``linear`` does not count of a conversion along another dim than the first, of the same form.

        Where that was measured; 0 else.
        """
        ...

    def compute(self, flops: Size, size_bytes: Size, dtype: str, heavy: bool) -> Size:
        """One op on one device.

        Args:
            flops: of the device's share.
            size_bytes: that the device reads and writes.
            dtype: of the op's operands, NumPy-style.
            heavy: whether it is a contraction (matmul, convolution).
        """
        ...

    def heavy_replication(self, axes: tuple[str, ...], size_bytes: Size) -> Size:
        """Price, on top of ``compute``, of a contraction that every device along ``axes`` repeats in full.

        Args:
            axes: mesh axes over which the op is not split.
            size_bytes: of its operands on one device.
        """
        ...


class PricedInBytes:
    """What conventions share that count bytes and restrict nothing."""

    __slots__ = ()

    @property
    def slice_price(self) -> float:
        return 0.0

    @property
    def writes_patches(self) -> bool:
        return False

    @property
    def across_passes(self) -> float:
        return 0.0

    @property
    def rules(self) -> SearchRules:
        return SearchRules(sharded_contractions=getattr(self, "require_sharded_contractions", False))

    def volume(self, shape: tuple[int, ...], itemsize: int) -> float:
        return math.prod(shape) * itemsize

    def inner_extra(self, kind: CollectiveKind, axes: tuple[str, ...]) -> tuple[float, float]:
        return 0.0, 0.0


def linear_price(linear: tuple[float, float], size_bytes: Size) -> Size:
    """``alpha + beta * size_bytes``, of the shape of ``size_bytes``."""
    alpha, beta = linear
    return alpha + beta * size_bytes  # pyrefly: ignore[bad-return]
