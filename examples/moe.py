"""A byte-level transformer with top-2 mixture-of-experts layers in plain JAX, dispatched by dense one-hot products.

Dimension letters: b batch (also the routing group), s sequence (query), t sequence (key), h head, d width of a head,
w model width, e expert, c slot of an expert, f hidden width of an expert.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make the package `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import optax

import alpa_lite as al
from examples.corpus import VOCAB, text_batch
from examples.example import Example, PyTree, make_optimizer, train, use_virtual_devices

EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """``capacity``: how many tokens of one sequence an expert takes; the rest pass by it on the residual."""

    num_layers: int
    width: int
    num_heads: int
    num_experts: int
    expert_hidden: int
    capacity: int
    seq_len: int
    batch_size: int
    balance_weight: float = 0.01
    learning_rate: float = 1e-3


CONFIGS = {
    "small": Config(
        num_layers=2, width=64, num_heads=8, num_experts=8, expert_hidden=128, capacity=16, seq_len=32, batch_size=16
    ),
    "base": Config(
        num_layers=4, width=256, num_heads=8, num_experts=8, expert_hidden=1024, capacity=64, seq_len=128, batch_size=16
    ),
}


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + EPSILON) * scale


def attention(params: PyTree, x: jax.Array) -> jax.Array:
    """Causal self-attention on x of shape (b, s, w)."""
    q, k, v = (jnp.einsum("bsw,whd->bshd", x, params[name]) for name in ("query", "key", "value"))
    scores = jnp.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), dtype=bool))
    scores = jnp.where(causal[None, None], scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bhst,bthd,hdw->bsw", jax.nn.softmax(scores), v, params["out"])


def route(logits: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sends each token to its two best experts while they have room; first choices are seated before second ones.

    Args:
        logits: (b, s, e) scores of the experts.
        capacity: slots per expert and sequence.

    Returns:
        combine (b, s, e, c): weight of each slot in a token's result, zero where it is not seated;
        balance (): the load-balancing loss of the Switch transformer, 1 when all experts are used alike;
        choices (b, s, 2): the experts chosen.
    """
    gates = jax.nn.softmax(logits)
    num_experts = logits.shape[-1]
    first = jnp.argmax(gates, axis=-1)
    first_mask = jax.nn.one_hot(first, num_experts, dtype=gates.dtype)
    second = jnp.argmax(jnp.where(first_mask > 0, -1.0, gates), axis=-1)
    second_mask = jax.nn.one_hot(second, num_experts, dtype=gates.dtype)
    balance = num_experts * jnp.mean(jnp.sum(jnp.mean(first_mask, axis=1) * jnp.mean(gates, axis=1), axis=-1))

    first_seat = jnp.cumsum(first_mask, axis=1) - first_mask
    second_seat = jnp.cumsum(second_mask, axis=1) - second_mask + jnp.sum(first_mask, axis=1, keepdims=True)
    total = jnp.sum(gates * (first_mask + second_mask), axis=-1, keepdims=True)
    combine = jnp.zeros((*logits.shape, capacity), gates.dtype)
    for mask, seat in ((first_mask, first_seat), (second_mask, second_seat)):
        # A seat beyond the capacity has an all-zero one-hot vector: that token is dropped by the expert.
        slots = jax.nn.one_hot(seat.astype(jnp.int32), capacity, dtype=gates.dtype)
        combine = combine + (gates / total * mask)[..., None] * slots
    return combine, balance, jnp.stack([first, second], axis=-1).astype(jnp.int32)


def expert_layer(params: PyTree, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x (b, s, w) through the experts: (result, balance loss, choices)."""
    logits = jnp.einsum("bsw,we->bse", x, params["router"])
    combine, balance, choices = route(logits.astype(jnp.float32), capacity)
    dispatch = (combine > 0).astype(x.dtype)
    seated = jnp.einsum("bsec,bsw->ebcw", dispatch, x)
    hidden = jax.nn.gelu(jnp.einsum("ebcw,ewf->ebcf", seated, params["up"]))
    results = jnp.einsum("ebcf,efw->ebcw", hidden, params["down"])
    return jnp.einsum("bsec,ebcw->bsw", combine.astype(x.dtype), results), balance, choices


def init_params(config: Config, key: jax.Array) -> PyTree:
    width, heads, hidden = config.width, config.num_heads, config.expert_hidden
    keys = iter(jax.random.split(key, 7 * config.num_layers + 3))

    def weight(*shape: int, fan_in: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * fan_in**-0.5

    layers = [
        {
            "attention_norm": jnp.ones((width,)),
            "attention": {
                "query": weight(width, heads, width // heads, fan_in=width),
                "key": weight(width, heads, width // heads, fan_in=width),
                "value": weight(width, heads, width // heads, fan_in=width),
                "out": weight(heads, width // heads, width, fan_in=width),
            },
            "expert_norm": jnp.ones((width,)),
            "experts": {
                "router": weight(width, config.num_experts, fan_in=width),
                "up": weight(config.num_experts, width, hidden, fan_in=width),
                "down": weight(config.num_experts, hidden, width, fan_in=hidden),
            },
        }
        for _ in range(config.num_layers)
    ]
    return {
        "embed": weight(VOCAB, width, fan_in=width),
        "positions": weight(config.seq_len, width, fan_in=width),
        "layers": layers,
        "norm": jnp.ones((width,)),
        "head": weight(width, VOCAB, fan_in=width),
    }


def forward(params: PyTree, tokens: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens (b, s) to (logits, mean balance loss, choices of shape (layers, b, s, 2))."""
    x = params["embed"][tokens] + params["positions"]
    balances, routing = [], []
    for layer in params["layers"]:
        x = x + attention(layer["attention"], rms_norm(x, layer["attention_norm"]))
        y, balance, choices = expert_layer(layer["experts"], rms_norm(x, layer["expert_norm"]), capacity)
        x = x + y
        balances.append(balance)
        routing.append(choices)
    logits = rms_norm(x, params["norm"]) @ params["head"]
    return logits, jnp.mean(jnp.stack(balances)), jnp.stack(routing)


def make(size: str = "small", dtype: jnp.dtype = jnp.float32, optimizer: str = "adamw") -> Example:
    """The mixture of experts of one size. ``metrics["routing"]`` is (layers, b, s, 2): the experts of every token."""
    config = CONFIGS[size]
    tx = make_optimizer(optimizer, config.learning_rate)

    def init(key: jax.Array) -> PyTree:
        params = init_params(config, key)
        return {"params": params, "opt_state": tx.init(params)}

    def loss_fn(params: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        logits, balance, routing = forward(params, batch["inputs"], config.capacity)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["targets"])
        return losses.mean() + config.balance_weight * balance, routing

    def update(state: PyTree, batch: PyTree) -> tuple[PyTree, dict[str, jax.Array], PyTree]:
        (loss, routing), grads = al.value_and_grad(loss_fn, has_aux=True)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss, "routing": routing}, grads

    def train_step(state: PyTree, batch: PyTree) -> tuple[PyTree, dict[str, jax.Array]]:
        state, metrics, _ = update(state, batch)
        return state, metrics

    def grads_step(state: PyTree, batch: PyTree) -> tuple[dict[str, jax.Array], PyTree, PyTree]:
        state, metrics, grads = update(state, batch)
        return metrics, grads, state["params"]

    def batch(seed: int) -> PyTree:
        return text_batch(seed, batch_size=config.batch_size, seq_len=config.seq_len)

    return Example(name="moe", init=init, train_step=train_step, grads_step=grads_step, batch=batch)


def target() -> al.PlanTarget:
    """For ``alpa-lite plan examples/moe.py:target``."""
    return make().target()


def main() -> None:
    use_virtual_devices()
    example = make()
    train(al.parallelize(example.train_step, donate_argnums=(0,)), example)


if __name__ == "__main__":
    main()
