"""The GPT that ``make demo`` trains, behind HTTP: ``alpa-lite serve examples/served.py:target --buckets 16,32 --max-length 64``.

``examples/client.py`` asks it.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # loaded as a file: make the package `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax

import alpa_lite as al
from examples.serving_models import GPT

CHECKPOINTS = Path("out/demo/checkpoints")


def target() -> al.serve.ServeTarget:
    """Bytes are its tokens; the parameters come from the training run's newest checkpoint, into a layout for serving."""
    model = GPT.of("demo")
    shapes = jax.eval_shape(model.init_params, jax.random.key(0))
    return al.serve.ServeTarget(
        model=model,
        params=al.serve.StoredParams(CHECKPOINTS, shapes),
        encode=lambda text: list(text.encode()),
        decode=lambda tokens: bytes(tokens).decode(errors="replace"),
    )
