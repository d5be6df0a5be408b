"""The picture of the page on uneven dims shows what JAX would hold."""

from __future__ import annotations

import numpy as np

from alpa_lite.core.spec import ShardingSpec
from docs import uneven as page
from tests.costs.layout_oracle import owned
from tests.harness import device_mesh


def test_the_picture_shows_the_layouts_it_names():
    mesh = device_mesh((page.DEVICES,))
    for (_, devices), spec in zip(page.panels(), ("[_,x]", "[_,x]", "[x,_]"), strict=True):
        held = owned(ShardingSpec.parse(spec), devices.shape, mesh).reshape(page.DEVICES, *devices.shape)
        for device in range(page.DEVICES):
            np.testing.assert_array_equal(held[device], devices == device)
