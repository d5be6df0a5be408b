"""The picture of the page on conversions shows every spec and every kind of step."""

from __future__ import annotations

from alpa_lite.costs.conversion import SpecSpace
from docs import conversions as page


def test_the_picture_shows_every_step():
    space = SpecSpace(mesh=page.MESH, rank=2)
    assert {str(spec) for spec in space.specs} == set(page.PLACES)
    assert {str(step.kind or "slice") for step in space.steps} == set(page.COLOURS)
