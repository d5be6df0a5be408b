"""A gate for tests of asynchronous dispatch: values that are there when an event is set, not before.

A Python callback would not do: XLA:CPU runs programs with one in the caller's thread. So the event is waited for in a handler
of XLA's foreign function interface (``xla/ffi/api/c_api.h``), written with ctypes, which runs where programs run.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np

_gate = threading.Event()


class _Extension(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.c_void_p),
    )


class _CallFrame(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(_Extension)),
        ("api", ctypes.c_void_p),
    )


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))
def _handler(frame: Any) -> None:
    """Waits. Its result is its argument's buffer. Before it is first run, XLA asks for the version of the interface."""
    given = frame.contents
    if given.extension:  # both structures have the version behind their first words
        ctypes.memmove(given.extension.contents.metadata + 8, given.api + 16, 24)
    else:
        _gate.wait()


@cache
def _register() -> None:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target("test_gate", make(ctypes.cast(_handler, ctypes.c_void_p), None, None), platform="cpu")


def closed_gate() -> tuple[threading.Event, Callable[[Any], Any]]:
    """An event, and a function that copies a tree of arrays to values that are not there before the event is set."""
    _register()
    _gate.clear()

    @jax.jit
    def hold(tree: Any) -> Any:
        # Matrices, because programs of few FLOPs run in the caller's thread as well.
        ones = jax.numpy.eye(64)
        ones = jax.ffi.ffi_call("test_gate", jax.ShapeDtypeStruct(ones.shape, np.float32), input_output_aliases={0: 0})(
            ones
        )
        one = (ones @ ones @ ones)[0, 0]
        return jax.tree.map(lambda x: x * one.astype(x.dtype), tree)

    return _gate, hold
