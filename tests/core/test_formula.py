"""Formulas in n: arithmetic is exact, the text can be read, the upper hull is the largest everywhere."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.core.formula import Formula, total, upper_envelope

COEFFICIENTS = st.dictionaries(st.integers(-2, 1), st.fractions(-50, 50, max_denominator=6), max_size=4)


@pytest.mark.medium
@given(COEFFICIENTS, COEFFICIENTS, st.integers(1, 100))
def test_sums_and_products_are_exact(a, b, n):
    left, right = Formula.of(a), Formula.of(b)
    assert (left + right).exactly(n) == left.exactly(n) + right.exactly(n)
    assert (left * right).exactly(n) == left.exactly(n) * right.exactly(n)
    assert left.exactly(n) == sum((c * Fraction(n) ** e for e, c in a.items()), Fraction(0))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=9))
@pytest.mark.medium
def test_upper_envelope_is_the_largest_everywhere_and_has_no_idle_part(lines):
    hull = upper_envelope(lines)
    for n in range(1, 60):
        assert max(p.exactly(n) for p in hull.parts) == max(a + Fraction(b, n) for a, b in lines)
    for part in hull.parts:  # the largest at some real n >= 1: at an end, or where two others cross
        others = [p for p in hull.parts if p is not part]
        places = [Fraction(k, 900) for k in range(901)]
        values = {x: _at(part, x) for x in places}
        assert not others or any(values[x] >= max(_at(o, x) for o in others) for x in places)


def _at(formula, x):
    """The value at 1/n = x."""
    terms = dict(formula.terms)
    return terms.get(0, Fraction(0)) + terms.get(-1, Fraction(0)) * x


@pytest.mark.parametrize(
    ("terms", "text"),
    [
        ({}, "0"),
        ({0: 1500}, "1,500"),
        ({0: 4, -1: 12}, "4 + 12/n"),
        ({0: 8, -1: -8}, "8 - 8/n"),
        ({-1: 6, -2: -6}, "6/n - 6/n^2"),
        ({-1: Fraction(1, 2)}, "1/(2*n)"),
        ({1: 1, 0: Fraction(-3, 2)}, "n - 3/2"),
    ],
)
def test_text(terms, text):
    assert str(Formula.of(terms)) == text


def test_whole_numbers_only():
    size = Formula.term(12, -1)
    assert [size.at(n) for n in (1, 2, 3, 4, 6, 12)] == [12, 6, 4, 3, 2, 1]
    with pytest.raises(ValueError, match="12/n is 12/5 at n = 5, not a whole number"):
        size.at(5)


def test_total_keeps_the_name():
    assert str(total([Formula.term(1, -1, "p"), Formula.term(2, 0, "p")], "p")) == "2 + 1/p"
    assert str(Formula.term(1, -1, "p") + 2) == "2 + 1/p"
    assert str(upper_envelope([(1, 5), (4, 0)], "p")) == "max(4, 1 + 5/p)"
