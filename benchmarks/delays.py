"""An op that takes a fixed time on a CPU device and needs no core: for timelines that do not depend on how busy a machine is.

``jax.pure_callback`` does not do: XLA:CPU runs a program with a Python callback in the thread that dispatches it, so nothing
overlaps. A custom call of XLA's foreign function interface runs on the device's own thread. Its handler is made with ctypes; the
structs are those of ``xla/ffi/api/c_api.h``, which is read for the version.
"""

from __future__ import annotations

import ctypes as c
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import alpa_lite as al

METADATA = 1  # XLA_FFI_Extension_Metadata


class Extension(c.Structure):
    _fields_ = (("size", c.c_size_t), ("type", c.c_int), ("next", c.c_void_p))


class Metadata(c.Structure):
    """Up to the version; what follows stays as it is."""

    _fields_ = (
        ("size", c.c_size_t),
        ("version_size", c.c_size_t),
        ("version_extension", c.c_void_p),
        ("version", c.c_int * 2),
    )


class MetadataExtension(c.Structure):
    _fields_ = (("base", Extension), ("metadata", c.POINTER(Metadata)))


class Buffer(c.Structure):
    _fields_ = (("size", c.c_size_t), ("extension", c.c_void_p), ("dtype", c.c_int), ("data", c.c_void_p))


class Ends(c.Structure):
    """Arguments or results."""

    _fields_ = (
        ("struct_size", c.c_size_t),
        ("extension", c.c_void_p),
        ("count", c.c_int64),
        ("types", c.c_void_p),
        ("buffers", c.POINTER(c.POINTER(Buffer))),
    )


class Frame(c.Structure):
    _fields_ = (
        ("size", c.c_size_t),
        ("extension", c.POINTER(Extension)),
        ("api", c.c_void_p),
        ("context", c.c_void_p),
        ("stage", c.c_int),
        ("args", Ends),
        ("rets", Ends),
    )


HANDLER = c.CFUNCTYPE(c.c_void_p, c.POINTER(Frame))


@cache
def registered(seconds: float) -> tuple[str, Any]:
    """The name of a custom call that sleeps and then gives 0.0; the handler stays alive as long as this cache."""
    text = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    version = [int(re.search(rf"define XLA_FFI_API_{word} (\d+)", text)[1]) for word in ("MAJOR", "MINOR")]

    def handler(frame: Any) -> None:
        extension = frame.contents.extension
        if extension and extension.contents.type == METADATA:
            c.cast(extension, c.POINTER(MetadataExtension)).contents.metadata.contents.version[:] = version
            return
        time.sleep(seconds)
        c.memset(frame.contents.rets.buffers[0].contents.data, 0, 4)

    name, function = f"sleep_{seconds}", HANDLER(handler)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu", api_version=1)
    return name, function


def sleep(x: Any, seconds: float) -> Any:
    """``x``, ``seconds`` later."""
    zero = jax.ffi.ffi_call(registered(seconds)[0], jax.ShapeDtypeStruct((), jnp.float32))(
        x.ravel()[0].astype(jnp.float32)
    )
    return x + zero.astype(x.dtype)


def delayed_matmul(forward_s: float, input_s: float, weight_s: float) -> Any:
    """A matmul that takes so long in the forward pass and in both halves of the backward pass."""

    @jax.custom_vjp
    def matmul(x: Any, w: Any) -> Any:
        return sleep(x @ w, forward_s)

    def backward(kept: tuple[Any, Any], g: Any) -> tuple[Any, Any]:
        x, w = kept
        return sleep(g @ w.T, input_s), sleep(x.T @ g, weight_s)

    matmul.defvjp(lambda x, w: (sleep(x @ w, forward_s), (x, w)), backward)
    return matmul


def delayed_step(num_layers: int, forward_s: float, input_s: float, weight_s: float) -> tuple[Any, tuple[Any, Any]]:
    """A training step with a delayed matmul per layer, and its arguments for 8 microbatches.

    Every layer scales its input too, so that the first stage needs a cotangent as the others do.
    """
    matmul = delayed_matmul(forward_s, input_s, weight_s)

    def loss_fn(params: Any, x: Any) -> Any:
        for i, (scale, w) in enumerate(params):
            x = jnp.tanh(matmul(x * scale, w))
            x = al.layer_boundary(x) if i < num_layers - 1 else x
        return jnp.mean(x**2)

    def step(params: Any, x: Any) -> Any:
        loss, grads = al.value_and_grad(loss_fn)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = [(jnp.ones(64), 0.5 * jnp.eye(64)) for _ in range(num_layers)]
    return step, (params, jnp.ones((64, 64)))


def simulated(compiled: Any, forward_s: float, input_s: float, weight_s: float) -> al.schedule.Timeline:
    """The timeline of a compiled ``delayed_step`` with one layer per stage, where nothing but its delays takes time."""
    seconds = {"F": forward_s, "B": input_s + weight_s, "I": input_s, "W": weight_s}

    def duration(action: al.schedule.Action) -> float:
        if action.stage == 0 and action.kind in ("I", "W"):  # which sends no cotangent: all is in the second half
            return input_s + weight_s if action.kind == "W" else 0.0
        return seconds.get(action.kind, 0.0)

    return al.schedule.simulate(compiled.instructions, duration)
