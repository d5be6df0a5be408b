"""The picture of the page on sameness shows what JAX does."""

from __future__ import annotations

import numpy as np

from alpa_lite.core.spec import ShardingSpec
from docs import sameness as page
from tests.costs.layout_oracle import owned
from tests.harness import device_mesh


def test_the_picture_shows_what_jax_and_the_oracle_say():
    mesh = device_mesh((2, 4))
    for text, spec, _ in page.PANELS:
        found = page.holders(spec)
        held = owned(ShardingSpec.parse(text), page.SHAPE, mesh).reshape(8, *page.SHAPE)
        assert set(found) == set(np.ndindex(page.SHAPE))
        for (row, column), devices in found.items():
            assert sorted(devices) == np.flatnonzero(held[:, row, column]).tolist()
