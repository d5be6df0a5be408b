"""Sharding annotations that arguments already carry: Flax boxes and metadata, and shardings of committed arrays.

By default they are only reported; with ``annotations="pin"`` they are pins, weaker than any that the user gives.
Nothing here imports Flax: its boxes are known by their methods, so a program without Flax never pays for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite.trace.paths import argument_paths, leaf_paths
from alpa_lite.trace.pins import spec_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """One annotated leaf.

    Attributes:
        path: path of the array leaf (inside its box).
        spec: the annotation; for Flax the names may be logical ones.
        origin: where it was found, e.g. "flax box Partitioned".
    """

    path: str
    spec: PartitionSpec
    origin: str


def annotations_from_args(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> tuple[Annotation, ...]:
    """All annotations of the arguments, in pytree order.

    Read are Flax linen boxes (``nn.Partitioned``, ``nn.LogicallyPartitioned``), Flax nnx variables with sharding
    metadata, and committed ``jax.Array``s with a ``NamedSharding`` on more than one device.
    """
    found: list[Annotation] = []
    for path, node in argument_paths(args, kwargs or {}, is_leaf=_is_box):
        if _is_box(node):
            found += _read_box(path, node)
        elif (spec := _committed_spec(node)) is not None:
            found.append(Annotation(path=path, spec=spec, origin="committed array"))
    return tuple(found)


def annotation_note(annotations: Sequence[Annotation], *, binding: bool) -> tuple[str, ...]:
    """One sentence for the plan's notes, or nothing."""
    if not annotations:
        return ()
    shown = ", ".join(f"{a.path} {spec_text(a.spec)} ({a.origin})" for a in annotations[:3])
    more = f" and {len(annotations) - 3} more" if len(annotations) > 3 else ""
    state = 'read as pins (annotations="pin")' if binding else 'not binding; annotations="pin" makes them pins'
    return (f"the arguments carry {len(annotations)} sharding annotations, {state}: {shown}{more}",)


def _is_box(node: Any) -> bool:
    """A Flax linen box or an nnx variable: a pytree node around one array that knows its own sharding."""
    return _is_linen_box(node) or _is_nnx_variable(node)


def _is_linen_box(node: Any) -> bool:
    return hasattr(node, "get_partition_spec") and hasattr(node, "unbox")


def _is_nnx_variable(node: Any) -> bool:
    return callable(getattr(node, "get_metadata", None)) and hasattr(node, "get_value")


def _read_box(path: str, box: Any) -> list[Annotation]:
    spec = box.get_partition_spec() if _is_linen_box(box) else _nnx_spec(box.get_metadata())
    if spec is None or not any(entry is not None for entry in spec.partitions):
        return []
    kind = "box" if _is_linen_box(box) else "variable"
    origin = f"flax {kind} {type(box).__name__}"
    return [Annotation(path=leaf, spec=spec, origin=origin) for leaf, _ in leaf_paths(box, path)]


def _nnx_spec(metadata: Mapping[str, Any]) -> PartitionSpec | None:
    # The metadata's name changed: "sharding" until Flax 0.10, "sharding_names" in 0.11, "out_sharding" since 0.12.
    for name in ("out_sharding", "sharding_names", "sharding"):
        value = metadata.get(name)
        if isinstance(value, PartitionSpec):
            return value
        if isinstance(value, NamedSharding):
            return value.spec
        if isinstance(value, (tuple, list)):
            return PartitionSpec(*value)
    return None


def _committed_spec(leaf: Any) -> PartitionSpec | None:
    try:
        committed = isinstance(leaf, jax.Array) and leaf.committed
    except jax.errors.ConcretizationTypeError:
        # Tracers are jax.Arrays too, but lie nowhere yet (JAX 0.10-0.12 raise when asked).
        return None
    if not committed:
        return None
    sharding = leaf.sharding
    many = isinstance(sharding, NamedSharding) and sharding.num_devices > 1
    return sharding.spec if many else None
