"""The benchmarks' own parts: model sizes, the hand-written layouts, the table. Nothing is timed here."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import models
from benchmarks.hand_layouts import TENSOR_RULES, hand_layouts
from benchmarks.report import Row, interleaved_medians_s, load_rows, save_rows, table
from examples.registry import EXAMPLES

SMALL = {
    "gpt": models.Config(
        family="gpt", num_layers=2, width=32, hidden=64, num_heads=4, num_kv_heads=4, vocab=64, seq_len=16, batch_size=2
    ),
    "llama": models.Config(
        family="llama",
        num_layers=2,
        width=32,
        hidden=64,
        num_heads=4,
        num_kv_heads=2,
        vocab=64,
        seq_len=16,
        batch_size=2,
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "millions"), [("gpt2-124m", 124.5), ("gpt-350m", 355.8), ("gpt-1.3b", 1315.6), ("llama3-8b", 8030.3)]
)
def test_parameter_counts(name: str, millions: float) -> None:
    assert models.make(name).num_params / 1e6 == pytest.approx(millions, rel=1e-3)


@pytest.mark.parametrize("name", ["gpt2-124m", "llama3-8b"])
def test_the_step_keeps_its_state_and_layers_set_the_depth(name: str) -> None:
    step = models.make(name, layers=1, remat=True)
    assert len(step.args[0]["params"]["layers"]) == 1
    state, loss = jax.eval_shape(step.fn, *step.args)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), step.args[0]
    )
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


@pytest.mark.parametrize("family", sorted(SMALL))
@pytest.mark.slow
def test_the_loss_starts_at_the_uniform_guess_and_remat_does_not_change_it(family: str) -> None:
    config = SMALL[family]
    leaves, structure = jax.tree.flatten(models.param_shapes(config))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    draw = [0.02 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    params = jax.tree.unflatten(structure, draw)
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 64)
    batch = {"inputs": tokens, "targets": tokens}

    def loss(params: dict, remat: bool) -> jax.Array:
        return models.loss_fn(config, params, batch, remat=remat, constrain=models.unconstrained)

    loss_and_grads = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    kept, kept_grads = loss_and_grads(params, False)
    recomputed, recomputed_grads = loss_and_grads(params, True)
    assert float(kept) == pytest.approx(np.log(64), rel=0.02)
    assert float(recomputed) == pytest.approx(float(kept), rel=1e-3)
    norms = [float(jnp.linalg.norm(leaf)) for leaf in jax.tree.leaves((kept_grads["embed"], recomputed_grads["embed"]))]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)
    assert norms[0] > 0


@pytest.mark.parametrize("name", sorted(TENSOR_RULES))
def test_hand_layouts_cover_every_leaf_and_divide_it(name: str) -> None:
    args = EXAMPLES[name]().abstract_args()
    layouts = hand_layouts(name, args)
    assert [layout.name for layout in layouts] == ["data", "fsdp", "tensor", "2d"]
    for layout in layouts:
        assert len(layout.pins) == len(jax.tree.leaves(args))
        shardings = layout.shardings(args, jax.devices()[:8])
        for leaf, sharding in zip(jax.tree.leaves(args), jax.tree.leaves(shardings), strict=True):
            sharding.shard_shape(leaf.shape)  # raises where a dim is not divisible
        split = [spec for path, spec in layout.pins.items() if path.startswith("0/") and any(spec)]
        assert bool(split) == (layout.name != "data")


@pytest.mark.parametrize("name", sorted(TENSOR_RULES))
def test_every_tensor_rule_names_something(name: str) -> None:
    layout = next(layout for layout in hand_layouts(name, EXAMPLES[name]().abstract_args()) if layout.name == "tensor")
    used = {spec for spec in layout.pins.values() if any(spec)}
    assert used == set(TENSOR_RULES[name].values())


def test_rows_survive_their_file_and_print_in_columns(tmp_path: Path) -> None:
    rows = [
        Row(benchmark="plan_time", case="a", value=1.5, unit="s", against="b", ratio=0.5, target="<= 1x"),
        Row(benchmark="plan_time", case="longer case", value=2, unit="GB"),
    ]
    save_rows(rows, tmp_path / "rows.json")
    assert load_rows(tmp_path / "rows.json") == rows
    lines = table(rows).splitlines()
    assert "0.50x" in lines[1] and "1.5 s" in lines[1]
    assert len({len(line) for line in lines}) == 1


def test_interleaving_runs_every_function_in_turn() -> None:
    order: list[str] = []
    medians = interleaved_medians_s(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, num_rounds=2, num_warmup=1
    )
    assert order == ["a", "b"] * 3
    assert set(medians) == {"a", "b"}
