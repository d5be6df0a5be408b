"""The Python of the README runs, in the order in which it stands, on a model with the paths that it names."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

from docs import pages
from examples.serving_models import Llama

README = pages.DOCS.parent / "README.md"


def loss_fn(params, batch):
    hidden = jax.nn.relu(batch["inputs"] @ params["block0"]["up"]["kernel"])
    return jnp.mean((hidden @ params["block0"]["down"]["kernel"] - batch["targets"]) ** 2)


@pytest.mark.medium
def test_the_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)  # the tests have 8 virtual devices already
    optimizer = optax.adam(1e-3)
    params = {"block0": {"up": {"kernel": jnp.ones((32, 64))}, "down": {"kernel": jnp.ones((64, 32))}}}
    state = {"params": params, "opt_state": optimizer.init(params)}
    batch = {"inputs": jnp.ones((64, 32)), "targets": jnp.ones((64, 32))}
    shapes = jax.eval_shape(lambda: (state, batch))
    names = {"optimizer": optimizer, "loss_fn": loss_fn, "state": state, "batch": batch}
    names |= {"state_shapes": shapes[0], "batch_shapes": shapes[1], "x": jnp.ones((4, 6, 8)), "w": jnp.ones((8, 8))}
    use, cluster, fit, serve, pins, stages, rule = pages.python_blocks(README.read_text(encoding="utf-8"))
    exec(use, names)
    assert "Audit on mesh" in capsys.readouterr().out and names["loss"].shape == ()
    exec(cluster.replace("8x8:h100-sxm", "1x8:h100-sxm"), names)
    assert (tmp_path / "plan.json").exists() and (tmp_path / "out" / "manifest.json").exists()
    state, loss = names["step"](*jax.tree.map(jnp.copy, (names["state"], batch)))
    assert loss.shape == () and names["step"].plan(state, batch) == names["plan"]
    start = jax.tree.map(jnp.copy, state)
    names |= {"init_state": lambda: start, "batches": itertools.repeat(batch)}
    exec(
        fit.replace('executor="ray"', 'executor="local"').replace("10_000", "3"), names
    )  # Ray: tests/executor/test_fit.py
    assert names["done"].position == 3 and (tmp_path / "runs" / "gpt" / "step_00000003").is_dir()
    model = Llama.of("small")
    served = {
        "model": model,
        "params": jax.jit(model.init_params)(jax.random.key(0)),
        "prompts": [b"import ", b"x" * 200],
    }
    small = serve.replace(
        "slots=16, max_length=2048, buckets=(128, 512, 2047)", "slots=2, max_length=264, buckets=(8, 200)"
    )
    exec(small, names | served)
    assert len(capsys.readouterr().out.split()) == 16
    exec(pins.replace("al.parallelize(", "pinned = al.parallelize(", 1), names)
    specs = names["pinned"].plan(state, batch).specs_by_path
    P = jax.sharding.PartitionSpec
    assert specs["0/params/block0/up/kernel"] == specs["0/opt_state/0/mu/block0/up/kernel"] == P(None, "model")
    exec(stages, names)
    assert names["step_in_stages"](state, batch)[1].shape == ()
    assert len(names["step_in_stages"].plan(state, batch).stages) == 2
    exec(rule, names)
    assert names["my_matmul"](jnp.ones((2, 3)), jnp.ones((3, 4))) is None  # its body is left out there
