"""Planning without pauses of Python's garbage collector.

A plan makes some millions of objects and no cycles worth mentioning, on top of the many that JAX keeps of a traced program.
The collector looks at all of them again and again and finds nothing; that is a third of the time. When it is switched on again,
it would look at all that is left at once; so these count as old, and wait for its next full collection.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_FROZEN_BY_PYTHON = 1000  # CPython 3.12 starts with some 400 frozen objects; a caller who freezes has many more


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection inside, unless the caller had it off anyway."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if gc.get_freeze_count() < _FROZEN_BY_PYTHON:  # the caller's frozen objects would come back with ours
                gc.freeze()
                gc.unfreeze()
            gc.enable()
