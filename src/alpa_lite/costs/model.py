"""What everything that needs a price asks: planner, conversions, reports.

A ``CostModel`` prices collectives, ops and replication on one device mesh, in one unit. ``linear`` is the price of
``collective`` taken apart, so that a caller can price thousands of tensors in one array expression.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from alpa_lite.core.collective import CollectiveKind

Size = TypeVar("Size", float, NDArray[Any])  # a price has the shape of the sizes that it was asked for


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

    def collective(self, kind: CollectiveKind, axes: tuple[str, ...], size_bytes: Size) -> Size:
        """One execution over ``axes``; ``size_bytes`` per device as ``core/collective.py`` defines it."""
        ...

    def linear(self, kind: CollectiveKind, axes: tuple[str, ...]) -> tuple[float, float]:
        """``(alpha, beta)`` with price = alpha + beta * size_bytes; alpha is inf for a kind that is not allowed."""
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


def linear_price(linear: tuple[float, float], size_bytes: Size) -> Size:
    """``alpha + beta * size_bytes``, of the shape of ``size_bytes``."""
    alpha, beta = linear
    return alpha + beta * size_bytes  # pyrefly: ignore[bad-return]
