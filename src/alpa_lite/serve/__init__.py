"""Serving: several graphs over one parameter layout. ``al.serve.Engine`` runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alpa_lite.serve.buckets import BucketAdvice as BucketAdvice
    from alpa_lite.serve.buckets import propose_buckets as propose_buckets
    from alpa_lite.serve.engine import Engine as Engine
    from alpa_lite.serve.model_graphs import Model as Model
    from alpa_lite.serve.model_graphs import graphs as graphs
    from alpa_lite.serve.pipeline import StagedModel as StagedModel
    from alpa_lite.serve.request import Request as Request
    from alpa_lite.serve.sampling import Sampling as Sampling
    from alpa_lite.serve.settings import ServerSettings as ServerSettings
    from alpa_lite.serve.settings import ServeTarget as ServeTarget
    from alpa_lite.serve.statistics import Histogram as Histogram
    from alpa_lite.serve.statistics import Statistics as Statistics
    from alpa_lite.serve.stored import StoredParams as StoredParams

# Loaded on first use: advice about buckets needs no JAX.
_PUBLIC = {
    "BucketAdvice": "alpa_lite.serve.buckets",
    "DeadlineExceeded": "alpa_lite.errors",
    "Engine": "alpa_lite.serve.engine",
    "EngineClosed": "alpa_lite.errors",
    "EngineLost": "alpa_lite.errors",
    "Histogram": "alpa_lite.serve.statistics",
    "Model": "alpa_lite.serve.model_graphs",
    "QueueFull": "alpa_lite.errors",
    "Request": "alpa_lite.serve.request",
    "RequestError": "alpa_lite.errors",
    "Sampling": "alpa_lite.serve.sampling",
    "ServeError": "alpa_lite.errors",
    "StagedModel": "alpa_lite.serve.pipeline",
    "ServeTarget": "alpa_lite.serve.settings",
    "ServerSettings": "alpa_lite.serve.settings",
    "Statistics": "alpa_lite.serve.statistics",
    "StoredParams": "alpa_lite.serve.stored",
    "graphs": "alpa_lite.serve.model_graphs",
    "propose_buckets": "alpa_lite.serve.buckets",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'alpa_lite.serve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
