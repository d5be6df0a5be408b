"""An array in parts: what it says of itself, and that its parts are handed out as they lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.executor.staged_array import StagedArray

ROWS = np.arange(12, dtype=np.float32).reshape(6, 2)


def staged() -> StagedArray:
    first, second = jax.devices()[:2]
    return StagedArray([jax.device_put(ROWS[:4], first), jax.device_put(ROWS[4:], second)])


def test_it_looks_like_the_whole():
    array = staged()
    assert (array.shape, array.dtype, array.ndim, array.size, array.nbytes, len(array)) == (
        (6, 2),
        ROWS.dtype,
        2,
        12,
        48,
        6,
    )
    assert array.devices() == set(jax.devices()[:2])
    np.testing.assert_array_equal(np.asarray(array), ROWS)
    assert np.asarray(array, dtype=np.float16).dtype == np.float16
    np.testing.assert_array_equal(jnp.asarray(array) + 1, ROWS + 1)
    assert jax.block_until_ready({"w": array})["w"] is array
    assert not array.is_deleted()
    assert repr(array) == "StagedArray(shape=(6, 2), dtype=float32, rows: 4 on 1 devices, 2 on 1 devices)"


def test_a_part_is_handed_out_as_it_lies():
    array = staged()
    assert array[0:4] is array.parts[0]
    assert array[4:6] is array.parts[1]
    np.testing.assert_array_equal(array[1:5], ROWS[1:5])
    np.testing.assert_array_equal(array[-1], ROWS[-1])


def test_donated_parts_are_gone():
    array = staged()
    array.parts[1].delete()
    assert array.is_deleted()


@pytest.mark.medium
def test_keys_are_gathered_as_keys():
    first, second = jax.devices()[:2]
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 6)
    array = StagedArray([jax.device_put(keys[:4], first), jax.device_put(keys[4:], second)])
    assert array.gathered().dtype == keys.dtype and array.devices() == {first, second}
    np.testing.assert_array_equal(jax.random.key_data(array.gathered()), jax.random.key_data(keys))
    assert jax.random.bits(array[5]) == jax.random.bits(keys[5])
    with pytest.raises(TypeError, match=r"keys of jax.random.*key_data\(x.gathered\(\)\)"):
        np.asarray(array)
    np.testing.assert_array_equal(staged().gathered(), ROWS)
