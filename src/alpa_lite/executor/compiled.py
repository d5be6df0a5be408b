"""Compiled programs kept in a folder for the next start, by JAX's persistent cache."""

from __future__ import annotations

import contextlib
from pathlib import Path

import jax

from alpa_lite._jax_compat import COMPILED_SUFFIX, is_compiled_program


def keep_compiled(folder: str) -> None:
    """From here on, whatever takes however long to compile.

    Files that are damaged are deleted first: JAX writes them in place, so that a process that is killed then leaves a half one,
    and never replaces what is there, so that each start would compile again.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    for file in place.glob(f"*{COMPILED_SUFFIX}"):
        with contextlib.suppress(OSError):  # another process may have deleted it
            if not is_compiled_program(file.read_bytes()):
                file.unlink()
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
