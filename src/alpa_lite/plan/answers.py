"""The layouts of a plan in the forms of others, for people who only want the answer: no part of alpa_lite reads them.

``partition_specs`` is JSON for ``jax.sharding.PartitionSpec``, ``shardy_text`` a module in the Shardy dialect, and
``logical_axis_rules`` what MaxText and Flax call logical axes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from alpa_lite.core.mesh import DeviceMesh
from alpa_lite.core.program import Value
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.plan.json_text import json_text

if TYPE_CHECKING:
    from alpa_lite.plan.plan import Plan
    from alpa_lite.plan.records import Leaf

_MLIR_NAMES = {"bool": "i1", "bfloat16": "bf16", "complex64": "complex<f32>", "complex128": "complex<f64>"}
_MLIR_FORMS = {"uint": "ui", "int": "i", "float": "f"}
# dtype of typed keys -> name of the generator, and uint32 words per key: a last dim of its own
KEY_TYPES = {"key<fry>": ("threefry2x32", 2), "key<rbg>": ("rbg", 4), "key<urbg>": ("unsafe_rbg", 4)}
_DTYPE = re.compile(r"(uint|int|float)(\d+)(?:_(\w+))?")


def partition_specs(plan: Plan) -> str:
    """Mesh, and per path of an argument or result the entries of its ``PartitionSpec``; of several stages, the mesh and first
    device of each, and per path the stage."""
    tree: dict[str, Any] = {
        "arguments": {leaf.path: _entries(leaf.spec) for leaf in plan.inputs},
        "results": {leaf.path: _entries(leaf.spec) for leaf in plan.outputs},
    }
    if plan.pipeline is None:
        return json_text({"mesh": _mesh(plan.mesh)} | tree)
    stages = [{"mesh": _mesh(stage.mesh), "first_device": stage.first_device} for stage in plan.stages]
    homes = {leaf.path: leaf.stage for leaf in (*plan.inputs, *plan.outputs)}
    return json_text({"stages": stages, "stage_of": homes} | tree)


def _mesh(mesh: DeviceMesh) -> dict[str, Any]:
    return {"shape": list(mesh.shape), "axis_names": list(mesh.axis_names)}


def _entries(spec: ShardingSpec) -> list[Any]:
    return [None if not axes else axes[0] if len(axes) == 1 else list(axes) for axes in spec.dims]


def shardy_text(plan: Plan) -> str:
    """An MLIR module: the mesh, and the step as a declaration with ``sdy.sharding`` on every argument and result."""
    axes = ", ".join(f'"{n}"={s}' for n, s in zip(plan.mesh.axis_names, plan.mesh.shape, strict=True))
    arguments = ",\n".join(f"    {_shardy(leaf)}" for leaf in plan.inputs)
    results = ",\n".join(f"    {_shardy(leaf)}" for leaf in plan.outputs)
    names = [f"// argument {i}: {leaf.path}" for i, leaf in enumerate(plan.inputs)]
    names += [f"// result {i}: {leaf.path}" for i, leaf in enumerate(plan.outputs)]
    return (
        "\n".join(names)
        + f"\nmodule @step {{\n  sdy.mesh @mesh = <[{axes}]>\n  func.func private @main(\n{arguments}) -> (\n{results})\n}}\n"
    )


def _shardy(leaf: Leaf) -> str:
    dims = [", ".join(f'"{axis}"' for axis in axes) for axes in leaf.spec.dims]
    dims += [""] * (leaf.value.dtype in KEY_TYPES)
    entries = ", ".join(f"{{{dim}}}" for dim in dims)
    return f"{mlir_type(leaf.value)} {{sdy.sharding = #sdy.sharding<@mesh, [{entries}]>}}"


def mlir_type(value: Value) -> str:
    """E.g. ``tensor<8x4xbf16>``."""
    shape, dtype = value.shape, value.dtype
    if dtype in KEY_TYPES:
        shape, dtype = (*shape, KEY_TYPES[dtype][1]), "uint32"
    name = _MLIR_NAMES.get(dtype)
    if name is None and (match := _DTYPE.fullmatch(dtype)):
        kind, bits, form = match.groups()
        name = f"{_MLIR_FORMS[kind]}{bits}{(form or '').upper()}"
    return f"tensor<{''.join(f'{size}x' for size in shape)}{name or dtype}>"


def logical_axis_rules(plan: Plan) -> str:
    """Names for dims, and which mesh axes each name goes to; JSON, which is YAML too.

    Dims of one size that are split alike share a name ("d4096_model" is of size 4096, split over "model"), so that
    the rules give every leaf exactly its layout, in any order.
    """
    leaves = (*plan.inputs, *plan.outputs)
    names = {leaf.path: _logical_names(leaf) for leaf in leaves}
    rules = {n: a for leaf in leaves for n, a in zip(names[leaf.path], leaf.spec.dims, strict=True)}
    return json_text(
        {
            "mesh_axes": list(plan.mesh.axis_names),
            "logical_axis_rules": [[name, list(axes)] for name, axes in sorted(rules.items())],
            "logical_axes": {path: list(dims) for path, dims in names.items()},
        }
    )


def _logical_names(leaf: Leaf) -> Sequence[str]:
    return ["_".join((f"d{size}", *axes)) for size, axes in zip(leaf.value.shape, leaf.spec.dims, strict=True)]
