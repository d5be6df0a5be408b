"""Sampling: distributions as they should be, each row by its own settings and its own key."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.errors import RequestError
from alpa_lite.serve.sampling import NO_TOKEN, Rows, Sampling, sample

LOGITS = np.log(np.array([0.05, 0.4, 0.02, 0.3, 0.13, 0.1], np.float32))
DRAWS = 4000
run = jax.jit(sample)


def rows_of(*samplings: Sampling) -> Rows:
    rows = Rows.greedy(len(samplings))
    for index, sampling in enumerate(samplings):
        rows.set(index, sampling)
    return rows


def frequencies(sampling: Sampling) -> np.ndarray:
    """Of the tokens of one request that draws again and again from the same logits."""
    rows = rows_of(*[sampling] * DRAWS)._replace(drawn=np.arange(DRAWS, dtype=np.int32))
    tokens = run(np.tile(LOGITS, (DRAWS, 1)), rows)
    return np.bincount(np.asarray(tokens), minlength=LOGITS.size) / DRAWS


def expected(temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The distribution by its definition, token by token."""
    likely = np.exp(LOGITS / temperature)
    order = sorted(range(likely.size), key=lambda token: -likely[token])
    order = order[: top_k or None]
    total, kept = sum(likely[t] for t in order), []
    for token in order:
        if sum(likely[t] for t in kept) / total >= top_p:
            break
        kept.append(token)
    made = np.zeros(likely.size)
    made[kept] = likely[kept] / likely[kept].sum()
    return made


@pytest.mark.medium
@pytest.mark.parametrize(
    "settings", [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.65), (1.0, 4, 0.8), (0.7, 5, 0.01)]
)
def test_tokens_come_as_often_as_they_should(settings: tuple[float, int, float]) -> None:
    want = expected(*settings)
    got = frequencies(Sampling(*settings, seed=3))
    assert (got[want == 0] == 0).all(), "a token that was cut off"
    sigma = np.sqrt(want * (1 - want) / DRAWS)
    assert (abs(got - want) <= 4 * sigma + 1e-9).all(), (got, want)


@pytest.mark.medium
def test_without_temperature_it_is_the_likeliest_whatever_else_is_set() -> None:
    rows = rows_of(Sampling(), Sampling(0.0, 5, 0.9, 11), Sampling(5.0, top_k=1, seed=2), Sampling(5.0, top_p=1e-6))
    assert run(np.tile(LOGITS, (4, 1)), rows).tolist() == [1, 1, 1, 1]
    assert run(np.tile(LOGITS, (2, 1)), rows_of(Sampling(), Sampling())).tolist() == [1, 1]


@pytest.mark.medium
def test_a_row_knows_nothing_of_its_place_and_its_neighbours() -> None:
    logits = np.random.default_rng(0).normal(size=(5, 50)).astype(np.float32)
    samplings = [Sampling(1.0 + 0.1 * i, top_k=10 * i, top_p=1 - 0.1 * i, seed=i) for i in range(5)]
    for drawn in range(20):
        together = rows_of(*samplings)._replace(drawn=np.full(5, drawn, np.int32))
        tokens = run(logits, together).tolist()
        order = np.array([3, 0, 4, 2, 1])
        assert run(logits[order], Rows(*(x[order] for x in together))).tolist() == [tokens[i] for i in order]


@pytest.mark.medium
def test_a_seed_is_the_key_of_that_seed_and_others_differ() -> None:
    def tokens(sampling: Sampling) -> list[int]:
        rows = rows_of(*[sampling] * 64)._replace(drawn=np.arange(64, dtype=np.int32))
        return run(np.zeros((64, 1000), np.float32), rows).tolist()

    assert tokens(Sampling(1.0, seed=5)) == tokens(Sampling(1.0, key=jax.random.key(5)))
    assert tokens(Sampling(1.0, seed=5)) == tokens(Sampling(1.0, key=jax.random.PRNGKey(5)))
    assert tokens(Sampling(1.0, seed=5)) != tokens(Sampling(1.0, seed=6))
    assert len(set(tokens(Sampling(1.0, seed=5)))) > 50, "one draw like the other"


@pytest.mark.medium
def test_all_settings_are_one_program() -> None:
    count = run._cache_size()
    run(np.tile(LOGITS, (3, 1)), rows_of(Sampling(), Sampling(), Sampling()))
    run(np.tile(LOGITS, (3, 1)), rows_of(Sampling(1.0), Sampling(top_k=3), Sampling(2.0, top_p=0.5)))
    assert run._cache_size() == count + 1


@pytest.mark.medium
def test_a_masked_token_is_never_drawn_however_hot() -> None:
    logits = np.where(np.arange(6) == 2, -np.inf, LOGITS).astype(np.float32)
    rows = rows_of(*[Sampling(1e6, seed=1)] * 500)._replace(drawn=np.arange(500, dtype=np.int32))
    found = set(run(np.tile(logits, (500, 1)), rows).tolist())
    assert found == {0, 1, 3, 4, 5}


def test_a_key_is_read_when_it_is_given() -> None:
    key = jax.random.key(5)
    sampling = Sampling(1.0, key=key)
    key.delete()
    assert sampling.key_words().tolist() == [0, 5]
    assert sampling == Sampling(1.0, key=jax.random.PRNGKey(5)) != Sampling(1.0, key=jax.random.key(6))
    assert len({sampling, Sampling(1.0, key=jax.random.key(5))}) == 1
    with pytest.raises(RuntimeError, match="deleted"):
        Sampling(1.0, key=key)


def test_numbers_of_numpy_are_numbers() -> None:
    given = Sampling(temperature=np.float32(0.5), top_k=np.int64(3), top_p=jnp.float32(0.5), seed=np.uint32(4))
    assert given == Sampling(temperature=0.5, top_k=3, top_p=0.5, seed=4)
    assert [type(x) for x in (given.temperature, given.top_k, given.top_p, given.seed)] == [float, int, float, int]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"temperature": -0.1}, r"temperature=-0\.1 was given; it must be a number from 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 10**400}, "temperature=1000"),
        ({"temperature": 1e300}, r"temperature=1e\+300 was given; it must be a number from 0 to 1e\+06"),
        ({"top_k": -1}, "top_k=-1 was given; it must be a whole number"),
        ({"top_k": 2.0}, r"top_k=2\.0"),
        ({"top_p": 0.0}, r"top_p=0\.0 was given; it must be a number above 0"),
        ({"top_p": 1.5}, r"top_p=1\.5"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": jax.random.key(3)}, r"(?s)seed=Array.* was given; .*Give it as key= instead"),
        ({"temperature": True}, "temperature=True"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"key": jnp.zeros(3)}, "a JAX key of type threefry2x32.*test_sampling"),
    ],
)
def test_bad_settings_are_refused(settings: dict, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        Sampling(**settings)


@pytest.mark.medium
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_the_largest_logit_is_no_number_there_is_no_token(temperature: float) -> None:
    odd = [np.where(np.arange(LOGITS.size) == 4, value, LOGITS) for value in (np.nan, np.inf, -np.inf)]
    rows = rows_of(*[Sampling(temperature)] * 5)
    got = run(np.stack([*odd, np.full_like(LOGITS, -np.inf), LOGITS]), rows).tolist()
    assert [token == NO_TOKEN for token in got] == [True, True, False, True, False]


@pytest.mark.medium
@pytest.mark.parametrize(("logit", "temperature"), [(30.0, 1e-7), (3e38, 1.0), (-3e38, 1.0)])
def test_equal_logits_are_drawn_evenly_however_large_they_are(logit: float, temperature: float) -> None:
    rows = rows_of(*(Sampling(temperature=temperature, seed=seed) for seed in range(256)))
    found = np.bincount(np.asarray(run(np.full((256, 4), logit, np.float32), rows)), minlength=4)
    assert (abs(found - 64) <= 4 * np.sqrt(256 * 0.25 * 0.75)).all()


@pytest.mark.medium
def test_a_seed_gives_the_same_where_64_bits_are_enabled() -> None:
    rows = rows_of(*(Sampling(temperature=1.5, seed=seed) for seed in range(64)))
    logits = np.tile(LOGITS, (64, 1))
    want = np.asarray(run(logits, rows))
    with jax.enable_x64(True):
        assert (np.asarray(run(logits, rows)) == want).all()


@pytest.mark.medium
def test_logits_of_64_bits_may_be_beyond_those_of_32() -> None:
    """Only their differences count."""
    rows = rows_of(*(Sampling(temperature=1.0, seed=seed) for seed in range(64)))
    with jax.enable_x64(True):
        found = np.asarray(run(np.tile([-1e300, 1e39, 1e39, 0.0], (64, 1)), rows))
    assert set(found.tolist()) == {1, 2} and 16 <= (found == 1).sum() <= 48
