"""A process that saves one checkpoint after the other until it is killed: ``python -m tests.executor.checkpoint_saver FOLDER``.

It goes on from the newest checkpoint, whose values it checks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

KEEP = 3


def values(step: int) -> dict[str, np.ndarray]:
    """The state after some steps."""
    rng = np.random.default_rng(step)
    return {"w": rng.standard_normal((256, 256), dtype="float32"), "v": rng.integers(0, 99, 1000), "n": np.int32(step)}


def main(root: Path) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_enable_x64", True)
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from alpa_lite.executor.checkpoint_item import ItemWriter
    from alpa_lite.plan.checkpoint_folder import CheckpointFolder

    mesh = Mesh(np.array(jax.devices()), ("x",))
    folder = CheckpointFolder(root, keep=KEEP)
    step = check(folder) + 1
    while True:
        unfinished = folder.begin(step)
        arrays: dict[str, Any] = {}
        for path, value in values(step).items():
            arrays[path] = jax.device_put(value, NamedSharding(mesh, P(*"x"[: value.ndim])))
        writers = [ItemWriter(), ItemWriter()]
        writers[0].start(unfinished / "submesh_0", {"w[0:128]": arrays["w"][:128], "n": arrays["n"]})
        writers[1].start(unfinished / "submesh_1", {"w[128:256]": arrays["w"][128:], "v": arrays["v"]})
        folder.commit(step, [writer.wait() for writer in writers], plan_text="{}\n")
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()
        step += 1


def check(folder: Any) -> int:
    """The newest step, 0 if there is none; all that are listed are complete and hold what was saved."""
    import jax

    from alpa_lite.executor.item_reader import read_leaves

    for step in folder.steps():
        expected = values(step)
        wanted = {path: jax.ShapeDtypeStruct(value.shape, value.dtype) for path, value in expected.items()}
        manifest = folder.read(step, verify=True)
        assert manifest.step == step
        for path, array in read_leaves(folder.path(step), manifest, wanted).items():
            assert np.asarray(array).tobytes() == expected[path].tobytes(), (step, path)
    return folder.newest() or 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
