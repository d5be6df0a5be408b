"""Exact formulas in the worker count: sums of ``c * n**e`` with rational ``c``, and the largest of several such sums.

Sizes on one device are of this form: a tensor of B bytes that the symbolic axis splits takes B/n, one that it does not
takes B, and a ring over n devices moves (n - 1)/n of what it carries.

Example:
    >>> size = Formula.term(12, -1) + 4
    >>> str(size), size.at(3)
    ('4 + 12/n', 8)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

Number = int | Fraction


@dataclass(frozen=True, slots=True)
class Formula:
    """``sum of coefficient * n**exponent``.

    Attributes:
        terms: (exponent, coefficient) pairs, largest exponent first; no coefficient is 0.
        name: of the variable, for the text.
    """

    terms: tuple[tuple[int, Fraction], ...] = ()
    name: str = "n"

    @classmethod
    def of(cls, coefficients: Mapping[int, Number], name: str = "n") -> Formula:
        """From exponent -> coefficient."""
        kept = sorted(((e, Fraction(c)) for e, c in coefficients.items() if c), reverse=True)
        return cls(tuple(kept), name)

    @classmethod
    def term(cls, coefficient: Number, exponent: int = 0, name: str = "n") -> Formula:
        return cls.of({exponent: coefficient}, name)

    @property
    def is_constant(self) -> bool:
        return all(e == 0 for e, _ in self.terms)

    def exactly(self, n: int) -> Fraction:
        """The value at ``n``."""
        return sum((c * Fraction(n) ** e for e, c in self.terms), Fraction(0))

    def at(self, n: int) -> int:
        """The value at ``n`` where it is whole; ``ValueError`` where it is not (a size does not divide there)."""
        value = self.exactly(n)
        if value.denominator != 1:
            raise ValueError(f"{self} is {value} at {self.name} = {n}, not a whole number")
        return value.numerator

    def __add__(self, other: Formula | Number) -> Formula:
        return total((self, other if isinstance(other, Formula) else Formula.term(other, 0, self.name)), self.name)

    def __mul__(self, other: Formula | Number) -> Formula:
        factor = other if isinstance(other, Formula) else Formula.term(other, 0, self.name)
        made: dict[int, Fraction] = {}
        for e, c in self.terms:
            for f, d in factor.terms:
                made[e + f] = made.get(e + f, Fraction(0)) + c * d
        return Formula.of(made, self.name)

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        text = ""
        for place, (e, c) in enumerate(self.terms):
            sign = "-" if c < 0 else ""
            text += f" {sign or '+'} " if place else sign
            text += _term_text(abs(c), e, self.name)
        return text


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest of some formulas, e.g. of the memory in use at several moments.

    Attributes:
        parts: none is above another one for every n >= 1.
    """

    parts: tuple[Formula, ...]

    def at(self, n: int) -> int:
        return max(part.at(n) for part in self.parts)

    def __str__(self) -> str:
        texts = [str(part) for part in self.parts]
        return texts[0] if len(texts) == 1 else f"max({', '.join(texts)})"


def total(parts: Iterable[Formula], name: str = "n") -> Formula:
    """The sum of formulas."""
    made: dict[int, Fraction] = {}
    for part in parts:
        for e, c in part.terms:
            made[e] = made.get(e, Fraction(0)) + c
    return Formula.of(made, name)


def upper_envelope(lines: Iterable[tuple[int, int]], name: str = "n") -> Largest:
    """``max of a + b/n`` over (a, b) pairs, without the pairs that are nowhere the largest for real n >= 1.

    In x = 1/n these are lines on 0 < x <= 1, and what is left is their upper hull.
    """
    steepest: dict[int, int] = {}
    for a, b in lines:
        steepest[b] = max(a, steepest.get(b, a))
    hull: list[tuple[int, int]] = []  # slopes b rise along the list
    for b, a in sorted(steepest.items()):
        while hull and (a >= hull[-1][0] or _hidden(hull, (a, b))):
            hull.pop()
        hull.append((a, b))
    while len(hull) > 1 and hull[-2][0] + hull[-2][1] >= hull[-1][0] + hull[-1][1]:
        hull.pop()  # only above for x > 1
    parts = [Formula.of({0: a, -1: b}, name) for a, b in hull] or [Formula((), name)]
    return Largest(tuple(parts))


def _hidden(hull: list[tuple[int, int]], line: tuple[int, int]) -> bool:
    """Whether the last line of the hull lies below its neighbours everywhere once ``line`` joins."""
    if len(hull) < 2:
        return False
    (a, b), (c, d), (e, f) = hull[-2], hull[-1], line
    # The crossing of the first and the new line is not right of the crossing of the first and the last one.
    return (a - e) * (d - b) <= (a - c) * (f - b)


def _term_text(c: Fraction, e: int, name: str) -> str:
    power = name if abs(e) == 1 else f"{name}^{abs(e)}"
    if e == 0:
        return _number(c)
    if e > 0:
        return power if c == 1 else f"{_number(c)}*{power}"
    below = power if c.denominator == 1 else f"({c.denominator}*{power})"
    return f"{c.numerator:,}/{below}"


def _number(c: Fraction) -> str:
    return f"{c.numerator:,}" if c.denominator == 1 else f"{c.numerator:,}/{c.denominator}"
