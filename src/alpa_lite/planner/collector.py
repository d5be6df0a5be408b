"""Planning without pauses of Python's garbage collector.

A plan makes some millions of objects and no cycles worth mentioning, on top of the many that JAX keeps of a traced program.
The collector looks at all of them again and again and finds nothing; that is a third of the time. When it is switched on again,
it would look at all that is left at once; so these count as old, and wait for its next full collection.
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
            if not gc.get_freeze_count():  # the caller's frozen objects would come back with ours
                gc.freeze()
                gc.unfreeze()
            gc.enable()
