"""Every test here runs on a GPU or not at all."""

from __future__ import annotations

import jax
import pytest


@pytest.fixture(autouse=True)
def needs_gpu() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("this machine has no GPU")
