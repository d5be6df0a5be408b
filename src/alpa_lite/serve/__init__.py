"""Serving: several graphs over one parameter layout. ``al.serve.Engine`` runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alpa_lite.serve.buckets import BucketAdvice as BucketAdvice
    from alpa_lite.serve.buckets import propose_buckets as propose_buckets
    from alpa_lite.serve.sampling import Sampling as Sampling

# Loaded on first use: advice about buckets needs no JAX.
_PUBLIC = {
    "BucketAdvice": "alpa_lite.serve.buckets",
    "Sampling": "alpa_lite.serve.sampling",
    "propose_buckets": "alpa_lite.serve.buckets",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'alpa_lite.serve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
