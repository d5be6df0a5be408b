"""Layouts that engines planned, kept beside their compiled programs, so that the next start plans nothing.

In: the graphs of an engine that was given no layout, a cluster, and a folder. Files there are named by a digest of all that their
plans depend on but for what the graphs compute: leaves, cluster, and the versions of whatever plans. What they compute is
compared when they are traced, as with any layout; so what is read is what would be planned. Parts of a model can have the same
leaves and compute something else: each has a file of its own then.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp

from alpa_lite.api.bound import Trees
from alpa_lite.api.shared_layout import SharedLayout
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.errors import AlpaLiteError
from alpa_lite.plan.plan import Plan
from alpa_lite.serve.model_graphs import Graph
from alpa_lite.serve.programs import traced_graphs
from alpa_lite.trace.paths import argument_paths
from alpa_lite.trace.program import Traced

_MOST = 8  # layouts with the same leaves; a folder of years must not fill up, nor be searched for long
_PACKAGES = ("jax", "jaxlib", "numpy", "ortools")  # that a plan depends on


def kept_files(folder: str, graphs: Mapping[str, Graph], cluster: Cluster) -> list[Path]:
    """Where layouts of graphs with these leaves are kept, by what the graphs compute: the first that is free is the next."""
    digest = hashlib.sha256(_planner().encode())
    digest.update(f"{cluster!r} {jnp.result_type(float)}\n".encode())
    for name, (_, args) in graphs.items():
        leaves = [(path, x.shape, str(x.dtype)) for path, x in argument_paths(args, {})]
        digest.update(f"{name} {leaves}\n".encode())
    name = f"layout-{digest.hexdigest()[:32]}"
    return [Path(folder) / f"{name}{f'-{number}' if number else ''}.json" for number in range(_MOST)]


def read_kept(
    files: Sequence[Path], graphs: Mapping[str, Graph]
) -> tuple[Mapping[str, Plan], Mapping[str, Traced]] | Path:
    """The plans, and the graphs as they are run; where there are none, the file in which to keep them."""
    for file in files:
        try:
            plans = SharedLayout.load(file).plans
        except AlpaLiteError:  # there is none, or it is damaged
            return file
        if plans.keys() != graphs.keys():  # somebody changed it
            return file
        with contextlib.suppress(AlpaLiteError):  # they are of other functions
            traced = traced_graphs(graphs, plans)
            return {name: replace(plan, trees=Trees.of(traced[name])) for name, plan in plans.items()}, traced
    return files[0]


def keep(layout: SharedLayout, file: Path) -> None:
    """For the next start, which otherwise plans again."""
    try:
        os.makedirs(file.parent, exist_ok=True)
        layout.save(file)
    except (OSError, AlpaLiteError) as error:
        warnings.warn(f"the engine's layout is not kept, so that the next start plans it again: {error}", stacklevel=2)


@functools.cache
def _planner() -> str:
    """What makes plans: this package, by its files, and those that it calls, by their versions."""
    digest = hashlib.sha256(repr([(name, importlib.metadata.version(name)) for name in _PACKAGES]).encode())
    root = Path(__file__).parents[1]
    for file in sorted(file for file in root.rglob("*") if file.suffix in (".py", ".toml")):
        digest.update(f"{file.relative_to(root)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()
