"""Transfers between device meshes: exact for any two specs, as many bytes as planned, never by the host, never waiting."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.conversion import SpecSpace
from alpa_lite.costs.tiles import check_tiles
from alpa_lite.errors import SpecError
from alpa_lite.lowering import transfer as transfers
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.lowering.transfer import Functions, Transfer, Transfers
from tests.harness import device_mesh
from tests.marks import slow_rows_but

MESHES = ((1,), (2,), (4,), (2, 2), (2, 4))
SHAPE = (8, 16, 8)


def mesh(shape: tuple[int, ...], first: int = 0) -> Mesh:
    """Devices from ``first`` on, wrapping round."""
    devices = (jax.devices() * 2)[first : first + np.prod(shape)]
    return Mesh(np.array(devices).reshape(shape), ("x", "y")[: len(shape)])


def sharding(spec: str, on: Mesh) -> NamedSharding:
    return NamedSharding(on, partition_spec(ShardingSpec.parse(spec)))


def numbers(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def pairs() -> list[tuple[tuple[int, ...], ShardingSpec, tuple[int, ...], ShardingSpec]]:
    """All ordered pairs of (mesh, spec) of equal rank."""
    specs: dict[int, list[Any]] = defaultdict(list)
    for shape, rank in itertools.product(MESHES, (1, 2, 3)):
        found = SpecSpace(mesh=device_mesh(shape), rank=rank).specs
        specs[rank] += [(shape, spec) for spec in found if not spec.unreduced]
    return [(*a, *b) for rank in specs for a, b in itertools.product(specs[rank], repeat=2)]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], int]:
    """Bytes that were really copied, per (source device, target device)."""
    real, counted = transfers.shard_putter, defaultdict(int)

    def counting(shape: tuple[int, ...], dtype: Any, to: NamedSharding) -> Any:
        put = real(shape, dtype, to)

        def count(shards: Any) -> Any:
            for shard, device in zip(shards, to.mesh.devices.flat, strict=True):
                if shard.devices() != {device}:
                    counted[next(iter(shard.devices())).id, device.id] += shard.nbytes
            return put(shards)

        return count

    monkeypatch.setattr(transfers, "shard_putter", counting)
    return counted


def check(made: Transfer, array: Any, want: np.ndarray, copied: dict[tuple[int, int], int]) -> None:
    """Every device holds what it should, and got the planned bytes from the planned devices."""
    copied.clear()
    check_tiles(made.plan)
    out = made(array)
    assert out.sharding == made.target and out.dtype == want.dtype
    for shard in out.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), want[shard.index])
    planned: dict[tuple[int, int], int] = defaultdict(int)
    for t in made.plan.transfers:
        if t.source != t.target:
            planned[t.source, t.target] += t.size_bytes
    assert copied == planned


def check_pair(
    pair: Any, first: int, gather_bytes: int, functions: Functions, copied: dict[tuple[int, int], int]
) -> None:
    one, before, other, after = pair
    source, target = mesh(one), mesh(other, first)
    want = numbers(SHAPE[: before.rank])
    array = jax.device_put(want, NamedSharding(source, partition_spec(before)))
    options = {"gather_bytes": gather_bytes, "functions": functions}
    made = Transfer.between(want.shape, want.dtype, before, source, after, target, **options)
    check(made, array, want, copied)


@pytest.mark.medium
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_sampled_pairs(seed, copied):
    """On the next devices (which overlap or wrap round if the meshes are large), gathered or not."""
    rng, functions = np.random.default_rng(seed), Functions()
    every = pairs()
    for k in rng.choice(len(every), 15, replace=False):
        first, gather_bytes = int(rng.choice([np.prod(every[k][0]) % 8, 1])), int(rng.choice([0, 1 << 30]))
        check_pair(every[k], first, gather_bytes, functions, copied)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_all_pairs(rank, copied):
    functions = Functions()
    for pair in pairs():
        if pair[1].rank == rank:
            check_pair(pair, int(np.prod(pair[0])) % 8, 0, functions, copied)


# -- nothing waits, nothing goes through the host -------------------------------------------------------------------

WAITING = [
    ("[x,_,_]", 2, "[x,_,_]", 4),
    ("[x,_,_]", 4, "[x,_,_]", 2),
    ("[x,_,_]", 2, "[_,x,_]", 2),
    ("[x,_,_]", 2, "[_,_,_]", 2),
]


@jax.jit
def slowly(x: Any) -> Any:
    return jax.lax.fori_loop(0, 400, lambda _, y: jnp.tanh(y @ y) * 0.01, x)


def seconds_to_move(move: Any, array: Any, to: NamedSharding) -> tuple[float, float]:
    """Of the call alone, and until the value has come, for an array that is still being made."""
    jax.block_until_ready(move(slowly(array), to))  # compile both
    made = slowly(array)
    start = time.perf_counter()
    moved = move(made, to)
    returned = time.perf_counter()
    jax.block_until_ready(moved)
    return returned - start, time.perf_counter() - start


@pytest.mark.medium
@pytest.mark.parametrize(
    ("before", "one", "after", "other"), slow_rows_but(WAITING[:2], [("[x,_,_]", 2, "[x,_,_]", 2), *WAITING])
)
def test_the_driver_does_not_wait_for_the_producer(before, one, after, other):
    array = jax.device_put(np.ones((4, 192, 192), np.float32), sharding(before, mesh((one,))))
    move, to = Transfers(gather_bytes=0).move, sharding(after, mesh((other,), 4))
    took = []
    while not took or (len(took) < 3 and took[-1][0] >= 0.1 * took[-1][1]):  # a driver that waits does so every time
        took.append(seconds_to_move(move, array, to))
    assert took[-1][0] < 0.1 * took[-1][1], f"seconds of the call and in all: {took}"


@pytest.mark.medium
@pytest.mark.parametrize(("before", "one", "after", "other"), slow_rows_but(WAITING[:1], WAITING))
def test_device_put_does_wait(before, one, after, other):
    """Why this module exists, and proof that the test above can fail. Once this one fails, JAX has become better."""
    array = jax.device_put(np.ones((4, 192, 192), np.float32), sharding(before, mesh((one,))))
    call, whole = seconds_to_move(jax.device_put, array, sharding(after, mesh((other,), 4)))
    assert call > 0.5 * whole


@pytest.mark.medium
def test_a_value_on_its_way_does_not_hold_up_the_receiver():
    """As long as it has only been sent; once its receipt is enqueued, what comes later waits for it."""
    array = jax.device_put(np.ones((4, 192, 192), np.float32), sharding("[_,_,_]", mesh((1,))))
    moves, to = Transfers(gather_bytes=0), sharding("[_,_,_]", mesh((2,), 4))
    work, given = jax.jit(lambda x: x * 2), jax.device_put(np.ones(4), sharding("[x]", mesh((2,), 4)))
    jax.block_until_ready((moves.move(slowly(array), to), work(given)))
    start = time.perf_counter()
    sent = moves.send(slowly(array), to)
    jax.block_until_ready(work(given))
    meanwhile = time.perf_counter() - start
    jax.block_until_ready(moves.receive(sent))
    assert meanwhile < 0.3 * (time.perf_counter() - start)


@pytest.mark.parametrize(("before", "one", "after", "other"), WAITING)
def test_nothing_reads_an_array_on_the_host(before, one, after, other, monkeypatch):
    array = jax.device_put(np.ones((4, 8, 8), np.float32), sharding(before, mesh((one,))))
    to = sharding(after, mesh((other,), 4))
    real, read = type(array)._value, []
    monkeypatch.setattr(type(array), "_value", property(lambda self: read.append(self) or real.fget(self)))
    Transfers(gather_bytes=0).move(array, to)
    assert not read
    jax.device_put(array, to)
    assert read, "the plain device_put no longer goes through the host"


# -- kinds of arrays ------------------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize("after", ["[_,x]", "[_,_]"])
@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "uint32", "bfloat16", "float16", "complex64"])
def test_types(dtype, after, copied):
    want = numbers((4, 8), jnp.dtype(dtype))
    source, target = mesh((2,)), mesh((4,), 4)
    specs = [ShardingSpec.parse(text) for text in ("[x,_]", after)]
    array = jax.device_put(want, sharding("[x,_]", source))
    check(Transfer.between((4, 8), dtype, specs[0], source, specs[1], target, gather_bytes=0), array, want, copied)


@pytest.mark.parametrize("other", [(1,), (2,), (2, 2)])
def test_scalars_are_sent_to_every_replica(other, copied):
    want, spec = np.float32(3.5).reshape(()), ShardingSpec.replicated(0)
    array = jax.device_put(want, sharding("[]", mesh((2,))))
    made = Transfer.between((), np.float32, spec, mesh((2,)), spec, mesh(other, 4), gather_bytes=0)
    check(made, array, want, copied)
    assert made.plan.moved_bytes == 4 * np.prod(other) and made.gather is None


@pytest.mark.parametrize("impl", ["threefry2x32", pytest.param("rbg", marks=pytest.mark.medium)])
def test_prng_keys(impl):
    keys = jax.random.split(jax.random.key(7, impl=impl), 8)
    to = sharding("[x]", mesh((4,), 4))
    moved = Transfers().move(jax.device_put(keys, sharding("[x]", mesh((2,)))), to)
    assert moved.dtype == keys.dtype and moved.sharding.is_equivalent_to(to, 1)
    assert [d.data.shape for d in moved.addressable_shards] == [(2,)] * 4
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))
    one = Transfers().move(jax.device_put(keys[3], sharding("[]", mesh((2,)))), sharding("[]", mesh((2,), 4)))
    assert jax.random.uniform(one) == jax.random.uniform(keys[3]) and one.devices() == set(jax.devices()[4:6])


def test_empty_arrays():
    to = sharding("[_,x]", mesh((2,), 4))
    moved = Transfers().move(jax.device_put(np.zeros((0, 4), np.int8), sharding("[_,_]", mesh((2,)))), to)
    assert moved.shape == (0, 4) and moved.dtype == np.int8 and moved.sharding == to


def test_deleted_arrays_are_refused():
    to = sharding("[x]", mesh((2,), 4))
    array = jax.device_put(np.ones(4, np.float32), sharding("[x]", mesh((2,))))
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(array))
    with pytest.raises(RuntimeError, match="deleted"):
        Transfers().move(array, to)


def test_a_copy_outlives_its_source():
    """Receivers may free or donate what they got, senders what they sent."""
    to = sharding("[_,x]", mesh((4,), 4))
    array = jax.device_put(numbers((4, 8)), sharding("[x,_]", mesh((2,))))
    moved = Transfers().send(array, to)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    array.delete()
    np.testing.assert_array_equal(np.asarray(moved.receive()), numbers((4, 8)))


def test_arguments_of_any_kind_are_placed():
    to, want = sharding("[x,_]", mesh((2,), 4)), numbers((4, 8))
    elsewhere = jax.device_put(want, sharding("[_,x]", mesh((8,))))
    for value in (want, jnp.asarray(want), jax.device_put(want, jax.devices()[3]), elsewhere):
        placed = Transfers().place(value, to)
        assert placed.sharding == to
        np.testing.assert_array_equal(np.asarray(placed), want)
    assert Transfers().place(2.5, sharding("[]", mesh((2,)))) == 2.5


# -- which way they go ----------------------------------------------------------------------------------------------


def between(shape: Any, before: str, one: Any, after: str, other: Any, **options: int) -> Transfer:
    specs = [ShardingSpec.parse(text) for text in (before, after)]
    return Transfer.between(shape, np.float32, specs[0], mesh(one), specs[1], mesh(other, 4), **options)


def test_equal_tilings_go_tile_by_tile():
    """Nothing is cut, joined or gathered: one call into the runtime."""
    for before, one, after, other in [("[x,_]", (4,), "[x.y,_]", (2, 2)), ("[_,_]", (2,), "[_,_]", (4,))]:
        made = between((8, 8), before, one, after, other)
        assert len(made.waves) == 1 and not made.joins and made.gather is None
        assert all(cut.function is None for cut in made.cuts)


def test_senders_share_the_load():
    made = between((8, 8), "[_,_]", (4,), "[x,_]", (2,))
    assert sorted(made.plan.sent_bytes().values()) == [0, 0, 128, 128]
    made = between((8, 8), "[y,_]", (2, 2), "[x,_]", (4,))
    assert set(made.plan.sent_bytes().values()) == {64}


def test_a_target_that_repeats_gets_each_byte_once():
    made = between((512, 1024), "[x,_]", (2,), "[_,_]", (4,))
    assert made.plan.moved_bytes == 512 * 1024 * 4
    assert made.gathered == (("x",), ())
    made = between((512, 1024), "[x,_]", (2,), "[_,x]", (2, 2))
    assert made.plan.moved_bytes == 512 * 1024 * 4 and [axes for dim in made.gathered for axes in dim] == ["y"]


def test_small_and_indivisible_tensors_are_sent_to_every_replica():
    """Many small pieces cost more than a program, too; what divides over some axes is split over these."""
    small = between((64, 64), "[_,_]", (2,), "[_,_]", (4,))
    assert small.plan.moved_bytes == 4 * 64 * 64 * 4 and small.gather is None
    assert between((64, 64), "[x,_]", (4,), "[_,_]", (4,)).plan.moved_bytes == 64 * 64 * 4
    odd = between((513, 1023), "[_,_]", (2,), "[_,_]", (4,), gather_bytes=0)
    assert odd.plan.moved_bytes == 4 * 513 * 1023 * 4 and odd.gather is None
    partly = between((514, 1023), "[_,_]", (2,), "[_,_]", (2, 2), gather_bytes=0)
    assert partly.plan.moved_bytes == 2 * 514 * 1023 * 4 and partly.gather is not None


def test_on_one_mesh_only_missing_parts_move():
    on = mesh((4,))
    spec, other = ShardingSpec.parse("[x,_]"), ShardingSpec.parse("[_,_]")
    assert Transfer.between((8, 8), np.float32, spec, on, spec, on).plan.moved_bytes == 0
    assert Transfer.between((8, 8), np.float32, other, on, spec, on).plan.moved_bytes == 0
    direct = Transfer.between((8, 8), np.float32, spec, on, other, on, gather_bytes=1 << 30)
    assert direct.plan.moved_bytes == 4 * 3 * 64  # each device lacks three quarters


def test_a_transfer_is_made_once():
    moves, to = Transfers(), sharding("[x,_]", mesh((2,), 4))
    array = jax.device_put(numbers((4, 8)), sharding("[_,x]", mesh((2,))))
    for _ in range(3):
        moves.move(array + 1, to)
    assert len(moves.made) == 1
    assert moves.move(array, array.sharding) is array and len(moves.made) == 1


def test_both_halves_compile_once():
    """The second array of a kind compiles nothing."""
    moves, to = Transfers(gather_bytes=0), sharding("[_,_]", mesh((2, 2), 4))
    array = jax.device_put(numbers((4, 8)), sharding("[x,_]", mesh((2,))))
    first = moves.move(array, to)
    with jax.no_tracing():
        second = moves.move(array, to)
    np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


# -- what is refused ------------------------------------------------------------------------------------------------


def test_partial_sums_stay_on_their_mesh():
    with pytest.raises(SpecError, match=r"Partial sums stay on their mesh.*reduce over x first"):
        between((4, 4), "[_,_]+{x}", (2,), "[_,_]", (2,))


def test_an_array_that_lies_on_no_mesh_is_refused():
    class Odd:
        shape, dtype, ndim, size, sharding = (4,), np.dtype("float32"), 1, 4, "by hand"

    with pytest.raises(SpecError, match=r"the sharding by hand.*NamedSharding.*Transfers.send.*jax.device_put"):
        Transfers().send(Odd(), sharding("[x]", mesh((2,))))


def test_one_device_is_a_mesh_of_one():
    array = jax.device_put(numbers((4,)), SingleDeviceSharding(jax.devices()[1]))
    moved = Transfers().move(array, sharding("[x]", mesh((2,), 4)))
    np.testing.assert_array_equal(np.asarray(moved), numbers((4,)))
    assert moved.sharding.spec == PartitionSpec("x")
