"""Compiled programs kept in a folder for the next start, by JAX's persistent cache."""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path

import jax

from alpa_lite._jax_compat import COMPILED_SUFFIX, is_compiled_program

_WRITTEN_S = 60.0  # by then a file has been written


def keep_compiled(folder: str) -> None:
    """From here on, whatever takes however long to compile. Files that are damaged are deleted first.

    Raises:
        OSError: it is no folder that can be written to, of which JAX would only warn, program by program.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=place):
        pass
    delete_damaged(place)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def delete_damaged(place: Path) -> None:
    """Deletes files that are no programs: JAX writes in place, so that a process that is killed then leaves a half one, and never
    replaces what is there, so that each start would compile again. Those that another process may just be writing stay."""
    for file in place.glob(f"*{COMPILED_SUFFIX}"):
        with contextlib.suppress(OSError):  # another process may have deleted it
            if time.time() - file.stat().st_mtime > _WRITTEN_S and not is_compiled_program(file.read_bytes()):
                file.unlink()
