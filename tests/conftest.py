"""Shared set-up: 8 virtual CPU devices, one small Ray session, golden text files, and skips for what a machine lacks."""

from __future__ import annotations

import importlib.util
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, settings

# Times are measured by benchmarks; a property must not fail because the machine is busy.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

_RAY_CPUS = 8
GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden files instead of comparing with them")


def pytest_configure(config: pytest.Config) -> None:
    # Before the first use of a device: both settings are read when JAX starts its backends.
    jax.config.update("jax_num_cpu_devices", 8)
    if config.option.markexpr != "gpu":
        jax.config.update("jax_platforms", "cpu")
        _compile_less(config)


def _compile_less(config: pytest.Config) -> None:
    """Compiling takes a third of the tests' time, and much of it is for programs that were compiled before. So LLVM optimises
    little (nothing at all makes loops that some tests run too slow), and a folder keeps what was compiled, for this
    process and all that it starts, workers and actors among them."""
    flags = ["--xla_backend_optimization_level=1", "--xla_cpu_parallel_codegen_split_count=1"]
    # How loops of a fusion are written as code: the older way compiles in two thirds of the time. Later versions do not know it
    # (an unknown flag ends the process), and where all tests run they compile as users do.
    if jax.__version_info__ < (0, 11) and config.option.markexpr:
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="alpa-lite-compiled-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.02"  # less is faster to compile than to read
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    # JAX, imported before, has read them already.
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file is run by one worker, as with ``--dist loadfile``, and all files that use Ray by one: each worker would start a
    cluster of its own, whose processes cost time until the last test, whether anyone asks them or not."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    tests = Path(__file__).parent
    using = {
        f"tests/{p.relative_to(tests).as_posix()}" for p in tests.rglob("test_*.py") if "ray_session" in p.read_text()
    }

    class OneCluster(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "Ray" if file in using else file

    return OneCluster(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("ray") and importlib.util.find_spec("ray") is None:
            item.add_marker(pytest.mark.skip(reason="Ray is not installed: pip install 'alpa-lite[ray]'"))
        if item.get_closest_marker("gpu") and config.option.markexpr != "gpu":
            item.add_marker(pytest.mark.skip(reason="GPU tests run alone: pytest -m gpu"))


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local cluster with 8 CPUs, i.e. room for 8 virtual devices, started by the first test that asks and ended with the last.

    Its token is this session's own, in no file.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))  # read when Ray is imported
        patch.delenv("RAY_ADDRESS", raising=False)
        ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'alpa-lite[ray]'")
        from alpa_lite.executor.ray.cluster import connect

        connect(None, _RAY_CPUS)
        yield
        ray.shutdown()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)`` compares ``text`` with ``tests/golden/NAME.txt``; a missing file fails."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"golden file {path.name} is missing; read the text, then run with --update-golden:\n{text}")
        assert text == path.read_text(encoding="utf-8"), f"{path.name} differs; if intended, run with --update-golden"

    return compare
