"""One process of a plain job: ``python -m tests.executor.job_worker CASE PROCESS PROCESSES DEVICES PORT FOLDER``.

Out: what the case returns, as JSON in FOLDER/PROCESS.json.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.executor import processes
from tests.executor.exported_steps import batch, state, step

PINS = {"0/params/w1": P(None, "x"), "1/x": P("x", None)}  # split weights and a split batch


def three_steps(folder: Path) -> dict[str, Any]:
    """State made in the planned layout; the batch as host values, in parts, and on one device of each process."""
    compiled_names: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **about: compiled_names.append(about["fun_name"]) if "backend_compile" in event else None
    )
    run = al.parallelize(step, pins=PINS, donate_argnums=0)
    plan = run.plan(state(), batch())
    now = run.init(lambda key: {"key": key, "params": state()["params"]}, jax.random.key(7))
    compiled = run.compile(now, batch())
    shardings = jax.tree.map(lambda spec: NamedSharding(now["key"].sharding.mesh, spec), plan.in_specs[1])
    mine = slice(8 * jax.process_index() // jax.process_count(), 8 * (jax.process_index() + 1) // jax.process_count())
    parts = jax.tree.map(lambda x, s: in_parts(x, s, mine), batch(), shardings)
    on_device = jax.device_put(batch(), jax.local_devices()[-1])
    losses, addressable = [], now["params"]["w1"].is_fully_addressable
    for given in (batch(), parts, on_device):
        before = now["params"]["w1"]
        now, loss = run(now, given)
        losses.append(float(loss))
        assert before.is_deleted()
    host = jax.tree.map(lambda x: x if is_key(x) else np.asarray(x), state())
    again = [float(run(given, batch())[1]) for given in (host, state())]
    again.append(float(compiled(jax.device_put(state(), jax.local_devices()[0]), batch())[1]))
    if jax.process_index() == 0:
        plan.save(folder / "plan.json")
    words = now | {"key": jax.random.key_data(now["key"])}
    whole = {path: multihost_utils.process_allgather(x, tiled=True) for path, x in flat(words).items()}
    if jax.process_index() == 0:
        np.savez(folder / "state.npz", **{path: np.asarray(x, dtype="float64") for path, x in whole.items()})
    return {
        "cluster": str(al.Cluster.local()),
        "losses": losses,
        "again": again,
        "addressable": addressable,
        "compilations": compiled_names.count("jit(step)"),
        "audit": compiled.audit().ok,
        "collectives": len(plan.collectives),
    }


def checkpoints(folder: Path) -> dict[str, Any]:
    """A state of global arrays and one of host values, saved together; the disk fails in the first process once."""
    run = al.parallelize(step, pins=PINS)
    run.plan(state(), batch())
    now, _ = run(state(), batch())
    paths = [run.save(folder / "checkpoints", now, step=1), run.save(folder / "checkpoints", state(), step=0)]
    back = run.restore(folder / "checkpoints")
    found = {
        path: is_key(x) or x.sharding == y.sharding
        for (path, x), y in zip(flat(back).items(), jax.tree.leaves(now), strict=True)
    }
    refused = message(lambda: run.save(folder / "file", now, step=2))
    _, loss = run(back, batch())
    return {
        "paths": [path.name for path in paths],
        "kept": all(found.values()),
        "loss": float(loss),
        "refused": refused,
    }


def in_parts(whole: np.ndarray, sharding: NamedSharding, mine: slice) -> jax.Array:
    """Of what is split by rows the process gives its own rows."""
    held = whole[mine] if sharding.spec and sharding.spec[0] else whole
    return jax.make_array_from_process_local_data(sharding, held, whole.shape)


def flat(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def placements(folder: Path) -> dict[str, bool]:
    """What becomes of single values."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    keys = jax.random.split(jax.random.key(0), 4)
    at_home = jax.device_put(keys, jax.local_devices()[0])
    placed = processes.placed(at_home, split)
    buffer = aligned(4096)
    buffer[:] = 1
    copied = processes.placed(buffer, split)
    buffer[:] = 2
    return {
        "as it is": processes.placed(copied, split) is copied,
        "copied": bool((copied.addressable_data(0) == 1).all()),
        "moved": processes.placed(copied, whole).sharding == whole,
        "keys": placed.sharding == split,
        "keys moved": processes.placed(placed, whole).is_fully_replicated,
        "number": float(processes.placed(1.5, whole)) == 1.5,
        "narrowed": processes.placed(np.ones(4), split).dtype == jnp.float32,
    }


def aligned(count: int) -> np.ndarray:
    """Float32 at a multiple of 64 bytes, where JAX would share memory on CPUs."""
    raw = np.empty(4 * count + 64, dtype="uint8")
    start = -raw.ctypes.data % 64
    return raw[start : start + 4 * count].view("float32")


def refusals(folder: Path) -> dict[str, str]:
    """Messages of what cannot run, at the end of a call that one process does not make."""
    me = jax.process_index()
    x = np.ones((8, 8), dtype="float32")

    def double(x: Any) -> Any:
        return 2 * x

    def halve(x: Any) -> Any:
        return x / 2

    run = al.parallelize(double)
    cases = {
        "shapes": lambda: run(x[: 8 - 4 * me]),
        "steps": lambda: al.parallelize(halve if me else double)(x),
        "plans": lambda: al.parallelize(double, pins={"0": P("x") if me else P(None, "x")})(x),
        "count": lambda: al.parallelize(double, plan=al.load_plan(folder / "plan.json"))(x),
        "restored": lambda: al.parallelize(double, plan=al.load_plan(folder / "plan.json")).restore(folder),
        "stages": lambda: al.parallelize(pipelined, plan=al.load_plan(folder / "stages.json"))(*weights_and_x()),
        "calibrate": lambda: al.Cluster.local(calibrate=True),
    }
    said = {name: message(case) for name, case in cases.items()}
    said["after"] = str(float(jnp.sum(run(x))))
    processes._WAIT_S = 1.0
    said["absent"] = "" if me else message(lambda: al.parallelize(halve)(x))
    return said


def message(call: Any) -> str:
    try:
        call()
    except al.AlpaLiteError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def weights_and_x() -> Any:
    return {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}, jnp.ones((8, 8))


def pipelined(params: Any, x: Any) -> Any:
    """Two layers, a gradient: can be cut into two stages."""

    def loss(params: Any, x: Any) -> jax.Array:
        hidden = al.layer_boundary(jnp.tanh(x @ params["a"]))
        return jnp.mean((hidden @ params["b"]) ** 2)

    return al.value_and_grad(loss)(params, x)


def main(case: str, process: str, count: str, devices: str, port: str, folder: str) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.config.update("jax_enable_preemption_service", False)  # it swallows SIGTERM
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, int(count), int(process), initialization_timeout=60)
    try:
        found = {
            "three_steps": three_steps,
            "checkpoints": checkpoints,
            "placements": placements,
            "refusals": refusals,
        }[case](Path(folder))
        (Path(folder) / f"{process}.json").write_text(json.dumps(found))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # not by sys.exit: JAX's shutdown would wait for the other processes


def end_with_parent() -> None:
    os.read(0, 1)  # the pipe ends with the process that runs the tests
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
