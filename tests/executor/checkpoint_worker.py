"""One process of a test of checkpoints: ``python -m tests.executor.checkpoint_worker REQUEST``.

With an address it is one of two processes of a ``jax.distributed`` world, of two devices each; else it is alone. It writes its
item of the checkpoints in the folders that it is told of on standard input, and says for each what was written; told of a
complete checkpoint, it restores it in another layout and compares. Where an order says so, its disk is full meanwhile, or it
tells of which checkpoints the processes keep what they said to each other.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np


def main(text: str) -> None:
    request = json.loads(text)
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_enable_preemption_service", False)  # it swallows SIGTERM (JAX 0.10.2)
    if request["address"]:
        jax.distributed.initialize(request["address"], 2, request["process"], initialization_timeout=60)
    assert len(jax.devices()) == (4 if request["address"] else 2)
    from alpa_lite._jax_compat import JobStore
    from alpa_lite.errors import CheckpointError
    from alpa_lite.executor.checkpoint_item import ItemWriter

    writer = ItemWriter(timeout_s=60)
    for line in sys.stdin:
        order = json.loads(line)
        if "restore" in order:
            restore(Path(order["restore"]), order["step"])
            say({"restored": True})
        elif "said" in order:
            said = JobStore()._client.key_value_dir_get("alpa_lite/items")
            say({"said": sorted({key.split("/")[2] for key, _ in said})})
        else:
            leaves = state(order["step"], request["rows"])
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (100 if order.get("full") else hard, hard))
            try:
                writer.start(Path(order["folder"]) / request["item"], leaves)
                gone = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)(
                    {path: leaf for path, leaf in leaves.items() if path != "key"}
                )
                jax.block_until_ready(gone)
                say(msgspec.to_builtins(writer.wait()))
            except CheckpointError as error:
                say({"refused": str(error)})


def state(step: int, rows: list[int]) -> dict[str, Any]:
    """What this world owns of the state after some steps: rows of a stacked parameter; with the first ones, all else."""
    import jax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("x", "y"))
    whole = values(step)
    found = {f"w[{rows[0]}:{rows[1]}]": (whole["w"][slice(*rows)], P("y", "x"))}
    if rows[0] == 0:
        found |= {"b": (whole["b"], P()), "n": (whole["n"], P()), "odd/v": (whole["odd/v"], P("x"))}
    leaves = {
        path: jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index, v=value: v[index])
        for path, (value, spec) in found.items()
    }
    if rows[0] == 0:
        make_key = jax.jit(jax.random.key, out_shardings=NamedSharding(mesh, P()))
        leaves["key"] = make_key(step)
    return leaves


def values(step: int) -> dict[str, np.ndarray]:
    """The whole state after some steps, without its key."""
    import ml_dtypes

    rng = np.random.default_rng(step)
    return {
        "w": rng.standard_normal((8, 16), dtype="float32"),
        "b": rng.standard_normal(6).astype(ml_dtypes.bfloat16),
        "n": np.asarray(step, np.int32),
        "odd/v": rng.integers(0, 9, (4, 3), dtype="int8"),
    }


def restore(root: Path, step: int) -> None:
    """All leaves, the stacked one cut elsewhere, in layouts they were not saved in, over all processes of this world."""
    import jax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from alpa_lite.executor.item_reader import read_leaves
    from alpa_lite.plan.checkpoint_folder import CheckpointFolder

    mesh = Mesh(np.array(jax.devices()[::-1]), ("z",))
    whole = values(step)
    expected = {"w[2:6]": whole["w"][2:6], "w": whole["w"], "b": whole["b"], "n": whole["n"], "odd/v": whole["odd/v"]}
    specs = {"w[2:6]": P("z"), "w": P(None, "z"), "odd/v": P("z")}
    wanted = {
        path: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(mesh, specs.get(path, P())))
        for path, value in expected.items()
    }
    key = jax.eval_shape(lambda: jax.random.key(0))
    wanted["key"] = jax.ShapeDtypeStruct((), key.dtype, sharding=NamedSharding(mesh, P()))
    folder = CheckpointFolder(root)
    got = read_leaves(folder.path(step), folder.read(step), wanted)
    for path, value in expected.items():
        for shard in got[path].addressable_shards:
            assert np.asarray(shard.data).tobytes() == value[shard.index].tobytes(), path
    words = jax.jit(jax.random.key_data)(got["key"]).addressable_shards[0].data
    assert np.asarray(words).tolist() == [0, step]


def say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
