"""Models of forms that the examples do not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.errors import ServeError

SIZES = {"slots": 2, "max_length": 8, "buckets": (4,)}
VOCABULARY = 61


class Bigrams:
    """What follows a token depends on that token alone; there is no cache."""

    def init_cache(self, slots: int, max_length: int) -> Any:
        return ()

    def prefill(self, params: Any, cache: Any, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Any]:
        return self.decode(params, cache, tokens[jnp.arange(len(tokens)), lengths - 1])

    def decode(self, params: Any, cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        return params["table"][tokens], cache


class WithKeys(Bigrams):
    """With typed keys among parameters and in the cache, as ``nnx.state`` of a model with dropout has them."""

    def init_cache(self, slots: int, max_length: int) -> Any:
        return jax.random.split(jax.random.key(0), slots)


class Sums:
    """A state per slot: the sum of the rows of a table that does not divide."""

    def init_cache(self, slots: int, max_length: int) -> Any:
        return jnp.zeros((slots, 16))

    def prefill(self, params: Any, cache: Any, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Any]:
        sums = jnp.cumsum(params["table"][tokens], 1)
        last = jnp.take_along_axis(sums, lengths[:, None, None] - 1, 1)[:, 0]
        return jnp.tanh(last) @ params["out"], last

    def decode(self, params: Any, cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        sums = cache + params["table"][tokens]
        return jnp.tanh(sums) @ params["out"], sums


@pytest.mark.medium
@pytest.mark.parametrize("with_keys", [False, True])
def test_no_cache_and_typed_keys(with_keys: bool) -> None:
    following = np.random.default_rng(0).permutation(32)
    params = {"table": jnp.eye(32)[following]}
    if with_keys:
        params["key"] = jax.random.key(1)
    with al.serve.Engine((WithKeys if with_keys else Bigrams)(), params, **SIZES) as engine:
        (found,) = engine.generate([[3]], max_tokens=4)
    expected = [3]
    for _ in range(4):
        expected.append(int(following[expected[-1]]))
    assert list(found) == expected[1:]


def test_a_model_without_parameters_and_cache_is_refused() -> None:
    with pytest.raises(ServeError, match=r"neither parameters nor a cache.*test_odd_models.*init_cache"):
        al.serve.Engine(Bigrams(), {}, **SIZES)


class Narrow(Bigrams):
    """Whose logits have 8 bits."""

    def decode(self, params: Any, cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        return params["table"][tokens].astype(jnp.float8_e4m3fn), cache


@pytest.mark.medium
def test_logits_of_8_bits() -> None:
    following = np.random.default_rng(0).permutation(32)
    with al.serve.Engine(Narrow(), {"table": jnp.eye(32)[following]}, **SIZES) as engine:
        assert engine.generate([[3]], max_tokens=2) == [[following[3], following[following[3]]]]


@jax.tree_util.register_dataclass
@dataclass
class Called:
    """Parameters that are a tree and can be called, as modules of some libraries are."""

    table: Any

    def __call__(self, x: Any) -> Any:
        raise AssertionError("it is no function that makes parameters")


class ByName(Bigrams):
    def decode(self, params: Any, cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        return params.table[tokens], cache


@pytest.mark.medium
def test_parameters_in_numbers_of_numpy_and_in_a_tree_that_can_be_called() -> None:
    """JAX has no numbers of 64 bits by default; NumPy makes no others."""
    table = np.eye(32)[np.random.default_rng(0).permutation(32)]
    answers = []
    for model, params in (
        (Bigrams(), {"table": table.astype(np.float32)}),
        (Bigrams(), {"table": table, "count": np.arange(3)}),
        (Bigrams(), lambda: {"table": table}),
        (ByName(), Called(table)),
    ):
        with al.serve.Engine(model, params, **SIZES) as engine:
            answers.append(engine.generate([[3]], max_tokens=4))
    assert answers == answers[:1] * 4
    for wrong in (np.array(["a"]), np.array([None])):
        with pytest.raises(ServeError, match=r"the parameter 'params/table' is array.*Parameters are arrays"):
            al.serve.Engine(Bigrams(), {"table": wrong}, **SIZES)


@pytest.mark.medium
def test_numbers_of_64_bits_in_the_thread_that_made_the_engine() -> None:
    """The engine's own thread takes them, too; and tiles are cut out at places of the type that the mesh has."""
    table = np.eye(32)[np.random.default_rng(0).permutation(32)]
    with al.serve.Engine(Bigrams(), {"table": table}, **SIZES) as engine:
        expected = engine.generate([[3]], max_tokens=4)
    with jax.enable_x64(True):
        graphs = al.serve.graphs(Bigrams(), {"table": table}, **SIZES)
        assert graphs["decode"][1][0]["table"].dtype == np.float64
        layout = al.plan_shared(
            graphs,
            shared="0",
            pins={"0/table": P(), "out/0": P(None, "x")},  # cut out of the whole table
            donate_argnums=1,
            cluster=al.Cluster.parse("1x2:cpu"),
        )
        for given in (None, layout):
            with al.serve.Engine(Bigrams(), {"table": table}, given, **SIZES) as engine:
                assert engine.generate([[3]], max_tokens=4) == expected


class Counts(Sums):
    def decode(self, params: Any, cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        return super().decode(params, cache, tokens)[0], 3


def test_a_cache_that_comes_back_as_a_number() -> None:
    params = {"table": np.ones((32, 16), np.float32), "out": np.ones((16, 32), np.float32)}
    with pytest.raises(
        ServeError, match=r"Counts.decode: the leaf 'cache' was float32\[2, 16\] as given and is int as"
    ):
        al.serve.Engine(Counts(), params, **SIZES)


@pytest.mark.medium
def test_uneven_pins_hold_in_a_shared_layout() -> None:
    """Each graph keeps the pin inside, padded; the leaf itself lies as is best for all."""
    shape = jax.ShapeDtypeStruct
    params = {"table": shape((VOCABULARY, 16), "float32"), "out": shape((16, VOCABULARY), "float32")}
    graphs = al.serve.graphs(Sums(), params, slots=4, max_length=16, buckets=(4,))
    options = al.PlanOptions(mesh_shape=(4,), axis_names=("x",))
    for pins in ({"0/table": P("x")}, {"0/out": P(None, "x")}, {"0/table": P("x"), "0/out": P(None, "x")}):
        layout = al.plan_shared(
            graphs, shared=("0", "1"), pins=pins, donate_argnums=1, cluster=al.Cluster.parse("1x4:cpu"), options=options
        )
        for plan in layout.plans.values():
            assert len(plan.paddings) == len(pins)
            assert sum("for the padded form of" in note for note in plan.notes) == len(pins)
