"""One small Ray session for all tests of a process: started by the first that asks, ended with the last."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

NUM_CPUS = 8


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local cluster with 8 CPUs, i.e. room for 8 virtual devices. Its token is this session's own, in no file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))  # read when Ray is imported
        patch.delenv("RAY_ADDRESS", raising=False)
        ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'alpa-lite[ray]'")
        from alpa_lite.executor.ray.cluster import connect

        connect(None, NUM_CPUS)
        yield
        ray.shutdown()
