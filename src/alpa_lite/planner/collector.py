"""Planning without pauses of Python's garbage collector.

A plan makes some millions of objects and no cycles worth mentioning, on top of the many that JAX keeps of a traced program.
The collector looks at all of them again and again and finds nothing; that is a third of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection inside, unless the caller had it off anyway."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
