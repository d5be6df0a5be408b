"""Stage slicing equals exhaustive search, and the published dynamic program where its numbers are known."""

from __future__ import annotations

import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import SlicingError
from alpa_lite.interop import compare_stage_counts, slice_stages
from tests.interop.oracle import best_slicing, objective
from tests.marks import medium_from

SUBMESHES = ((1, 2, 4, 8), (1, 2), (2, 4), (1, 3), (2, 3, 4), (4, 2, 2), (8,), (1,))


def random_case(seed: int, layers: int) -> dict:
    """One random table; every third has integers, so that ties occur, and every second a memory limit."""
    rng = np.random.default_rng([seed, layers])
    sizes = SUBMESHES[seed % len(SUBMESHES)]
    choices = int(rng.integers(1, 4)) if layers <= 5 else 1
    shape = (layers, layers, len(sizes), choices)
    span = np.maximum(np.arange(layers)[None, :] - np.arange(layers)[:, None] + 1, 1)[:, :, None, None]
    work = span * rng.uniform(0.5, 1.5, shape) / np.array(sizes)[:, None] ** rng.uniform(0, 1)
    cost_s = np.ceil(2 * work) if seed % 3 == 0 else work
    cost_s[rng.random(shape) < rng.choice([0.0, 0.1, 0.4])] = np.inf
    tolerated = rng.integers(-1, layers, shape) if seed % 2 else np.full(shape, layers)
    return {
        "cost_s": cost_s,
        "tolerated": tolerated,
        "sizes": sizes,
        "num_devices": int(rng.integers(1, 9)),
        "num_microbatches": int(rng.choice([1, 2, 4, 16, 1000])),
    }


def extras(seed: int, case: dict) -> dict:
    """Pins, once-per-step costs and transfers, each in some of the cases."""
    rng = np.random.default_rng([seed, 7])
    layers, _, submeshes, _ = case["cost_s"].shape
    more: dict = {}
    if seed % 4 == 1:
        more["num_stages"] = int(rng.integers(1, layers + 1))
    if seed % 4 == 2:
        count = int(rng.integers(1, min(layers, 4) + 1))
        more["stage_submeshes"] = tuple(
            None if rng.random() < 0.4 else int(rng.integers(submeshes)) for _ in range(count)
        )
    if seed % 5 in (0, 3):
        pinned = np.sort(rng.choice(layers, size=min(layers, 2), replace=False))
        more["layer_stage"] = {int(layer): int(rng.integers(0, layer + 1)) for layer in pinned}
    if seed % 3 != 1:
        more["once_s"] = np.round(3 * rng.random(case["cost_s"].shape), 1 if seed % 2 else 9)
    if seed % 7 in (0, 1, 4):
        more["transfer_s"] = np.round(2 * rng.random((layers - 1, submeshes, submeshes)), seed % 2 * 8)
    return more


def check(case: dict, more: dict) -> bool:
    """Compares one case with the oracle; True when a slicing exists."""
    expected = best_slicing(**case, **more)
    names = {"tolerated": "tolerated_later_stages", "sizes": "submesh_sizes"}
    arguments = {names.get(name, name): value for name, value in case.items()}
    if expected is None:
        with pytest.raises(SlicingError):
            slice_stages(**arguments, **more)
        return False
    found = slice_stages(**arguments, **more)
    costs = {name: more.get(name) for name in ("once_s", "transfer_s")}
    assert found.objective == pytest.approx(expected[0], rel=1e-11)
    assert objective(found.stages, case["cost_s"], case["num_microbatches"], **costs) == pytest.approx(found.objective)
    assert found.stages == expected[1]
    return True


@pytest.mark.parametrize("layers", medium_from(6, 9, 9)[1:])
def test_plain_tables_equal_exhaustive_search(layers):
    found = [check(random_case(seed, layers), {}) for seed in range(40)]
    assert sum(found) > 8


@pytest.mark.parametrize("layers", medium_from(5, 8, 8)[1:])
def test_pins_and_further_costs_equal_exhaustive_search(layers):
    found = []
    for seed in range(60):
        case = random_case(seed, layers)
        found.append(check(case, extras(seed, case)))
    assert sum(found) > 8


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(40))
def test_close_calls_equal_exhaustive_search(seed):
    # Any two slicings differ by a few millionths: a bound that cuts a little too much loses the best one.
    rng = np.random.default_rng(seed)
    # Not so many microbatches that a difference of millionths falls below the share of 1e-12 that counts as rounding.
    case = {"sizes": (1, 2, 4), "num_devices": 8, "num_microbatches": int(rng.choice([1, 2, 4, 16]))}
    shape = (6, 6, 3, 2)
    span = np.maximum(np.arange(6)[None, :] - np.arange(6)[:, None] + 1, 1)[:, :, None, None]
    case["cost_s"] = span / np.array([1, 2, 4])[:, None] * (1 + 1e-6 * rng.random(shape))
    case["tolerated"] = rng.integers(0, 6, shape) if seed % 2 else np.full(shape, 6)
    assert check(case, {"once_s": 1 + 1e-6 * rng.random(shape)})


def test_equal_costs_go_to_the_fewest_stages_and_then_to_the_first():
    ones = np.full((4, 4, 3, 2), 1.0)
    alone = slice_stages(ones, np.full(ones.shape, 9), (1, 2, 4), 4, 1)
    assert alone.stages == ((0, 3, 2, 0),)
    two = slice_stages(ones, np.full(ones.shape, 9), (1, 2, 3), 4, 8)
    assert two.stages == ((0, 0, 0, 0), (1, 3, 2, 0))


def test_stages_that_cost_nothing():
    """The bound without the pin is 0."""
    cost_s = np.array([0.0, 1.0]).reshape(1, 1, 2, 1)
    found = slice_stages(cost_s, np.ones_like(cost_s), (1, 1), 1, 4, stage_submeshes=(1,))
    assert (found.stages, found.objective) == (((0, 0, 1, 0),), 4.0)


def test_the_order_of_additions_does_not_decide():
    # 0.1 + 0.2 and 0.3 differ in the last bit; as sums of stages they are a tie, and the first in order wins.
    cost_s = np.full((3, 3, 1, 1), np.inf)
    for (i, j), seconds in {(0, 0): 0.1, (1, 2): 0.2, (0, 1): 0.3, (2, 2): 1e-17}.items():
        cost_s[i, j] = seconds
    found = slice_stages(cost_s, np.full(cost_s.shape, 9), (1,), 2, 1)
    assert found.stages == ((0, 0, 0, 0), (1, 2, 0, 0))


def power_table(weights, exponent: float) -> np.ndarray:
    """Seconds sum(w) / n^e on 1, 2, 4, 8 devices."""
    layers = len(weights)
    total = np.cumsum([0, *weights])
    table = np.full((layers, layers, 4, 1), np.inf)
    for i in range(layers):
        for j in range(i, layers):
            table[i, j, :, 0] = (total[j + 1] - total[i]) / np.array([1, 2, 4, 8]) ** exponent
    return table


def devices(found) -> list[tuple[int, int, int]]:
    return [(i, j, (1, 2, 4, 8)[m]) for i, j, m, _ in found.stages]


def test_alpas_random_table():
    table = np.random.RandomState(42).rand(8, 8, 4, 5)
    found = slice_stages(table, np.full(table.shape, 4096), num_microbatches=16)
    assert found.objective == pytest.approx(0.29528505, rel=1e-6)
    assert found.stages == ((0, 3, 2, 2), (4, 7, 2, 4))


@pytest.mark.parametrize(
    ("microbatches", "expected", "stages"),
    [
        (1, 2.828427, [(0, 7, 8)]),
        (4, 9.899494, [(0, 1, 2), (2, 3, 2), (4, 5, 2), (6, 7, 2)]),
        (16, 23, [(i, i, 1) for i in range(8)]),
        (64, 71, [(i, i, 1) for i in range(8)]),
    ],
)
def test_alpas_equal_layers(microbatches, expected, stages):
    table = power_table([1] * 8, 0.5)
    found = slice_stages(table, np.full(table.shape, 4096), num_microbatches=microbatches)
    assert found.objective == pytest.approx(expected, rel=1e-6)
    assert devices(found) == stages


@pytest.mark.parametrize("microbatches", [1, 3, 16, 1024])
def test_alpas_linear_speed_up_is_one_stage(microbatches):
    table = power_table([1] * 8, 1.0)
    found = slice_stages(table, np.full(table.shape, 4096), num_microbatches=microbatches)
    assert found.objective == pytest.approx(microbatches, rel=1e-6)
    assert devices(found) == [(0, 7, 8)]


@pytest.mark.parametrize(
    ("exponent", "microbatches", "expected", "stages"),
    [
        (0.5, 1, 12.727922, [(0, 7, 8)]),
        (0.5, 4, 45.683765, [(0, 3, 2), (4, 5, 2), (6, 7, 4)]),
        (0.8, 1, 6.820724, [(0, 7, 8)]),
        (0.8, 4, 27.282898, [(0, 7, 8)]),
        (0.8, 16, 105.342857, [(0, 3, 2), (4, 6, 4), (7, 7, 2)]),
    ],
)
def test_alpas_growing_layers(exponent, microbatches, expected, stages):
    table = power_table(range(1, 9), exponent)
    found = slice_stages(table, np.full(table.shape, 4096), num_microbatches=microbatches)
    assert found.objective == pytest.approx(expected, rel=1e-6)
    assert devices(found) == stages


@pytest.mark.parametrize(
    ("memory", "expected", "size"),
    [(1, 97.005859, 8), (2, 85.768013, 4), (3, 85.768013, 4), (4, 76.962791, 2), (8, 71, 1), (20, 71, 1)],
)
def test_alpas_memory_limits(memory, expected, size):
    table = power_table([1] * 8, 0.8)
    length = np.arange(8)[None, :] - np.arange(8)[:, None] + 1
    tolerated = np.floor(memory * np.array([1, 2, 4, 8]) / np.maximum(length, 1)[:, :, None]).astype(int)[..., None] - 1
    found = slice_stages(table, tolerated, num_microbatches=64)
    assert found.objective == pytest.approx(expected, rel=1e-6)
    assert devices(found) == [(k * size, (k + 1) * size - 1, size) for k in range(8 // size)]


def gpt_table(
    layers: int, sizes: tuple[int, ...], choices: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds, tolerated stages and once-per-step seconds of layers that speed up worse on larger submeshes."""
    rng = np.random.default_rng(seed)
    total = np.cumsum([0.0, *rng.uniform(0.99, 1.01, layers)])
    length = np.maximum(total[None, 1:] - total[:-1, None], 0.1)[:, :, None, None]
    width = np.array(sizes, dtype=float)[:, None]
    slowdown = 1 + 0.05 * np.log2(width) + rng.uniform(0, 0.3, choices)
    cost_s = length / width * slowdown * np.where(width > 8, 1.1, 1.0)
    tolerated = np.floor(4 * width / length * rng.uniform(0.5, 1.5, choices)).astype(int) - 1
    return cost_s, tolerated, 0.5 * length / width + 0.01 * np.log2(width) + np.zeros(choices)


@pytest.mark.medium
def test_many_devices_with_memory_limits():
    sizes = (1, 2, 4, 8, 16, 32, 64)
    cost_s, tolerated, once_s = gpt_table(48, sizes, 4)
    found = slice_stages(cost_s, tolerated, sizes, 64, 1024, once_s=once_s)
    assert sum(found.num_devices) == 64
    assert found.objective == pytest.approx(objective(found.stages, cost_s, 1024, once_s))
    for later, stage in enumerate(reversed(found.stages)):
        assert tolerated[stage] >= later
    # A slicing for each number of stages, by another path through the code; none is better, and one is the same.
    counts = compare_stage_counts(
        cost_s, tolerated, sizes, 64, 1024, once_s=once_s, counts=(1, 8, 16, found.num_stages)
    )
    assert counts.best.stages == found.stages
    assert all(slicing is None or slicing.objective >= found.objective for _, slicing in counts.slicings)


def test_comparison_of_stage_counts(golden):
    table = power_table(range(1, 9), 0.8)
    tolerated = np.full(table.shape, 4096)
    tolerated[0, 7] = -1
    once_s = np.where(np.isfinite(table), 0.25, 0.0)
    found = slice_stages(table, tolerated, num_microbatches=16, once_s=once_s, transfer_s=np.full((7, 4, 4), 0.125))
    counts = compare_stage_counts(table, tolerated, num_microbatches=16)
    assert counts.slicings[0] == (1, None)
    for count, slicing in counts.slicings[1:]:
        expected = best_slicing(table, tolerated, (1, 2, 4, 8), 8, 16, num_stages=count)
        assert (slicing.objective, slicing.stages) == (pytest.approx(expected[0]), expected[1])
    golden("stage_slicing", f"{found}\n{counts}")


def test_bubble_share():
    table = np.full((2, 2, 1, 1), np.inf)
    table[0, 0], table[1, 1] = 1.0, 3.0
    found = slice_stages(table, np.full(table.shape, 1), (1,), 2, 4, once_s=np.full(table.shape, 0.5))
    assert found.objective == 1 + 3 + 3 * 3 + 0.5
    assert found.bubble_share == pytest.approx(1 - (4 * (1 + 3) + 2 * 0.5) / (2 * 13.5))
    assert found.slowest_s == 3.0


def test_public_name():
    assert al.interop.slice_stages is slice_stages


def test_inputs_are_not_written():
    table = power_table([1] * 4, 0.5)
    tolerated = np.full(table.shape, 3)
    table.setflags(write=False)
    tolerated.setflags(write=False)
    slice_stages(table, tolerated, num_microbatches=4)


FINE = {"cost_s": power_table([1] * 4, 0.5), "tolerated_later_stages": np.full((4, 4, 4, 1), 9)}


def with_entry(where: tuple, value: float) -> np.ndarray:
    table = FINE["cost_s"].copy()
    table[where] = value
    return table


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cost_s": np.ones((4, 3, 4, 1))}, r"cost_s has the shape \(4, 3, 4, 1\).*must be \(layers, layers"),
        ({"cost_s": with_entry((0, 1, 2, 0), np.nan)}, r"cost_s\[0, 1, 2, 0\] is nan.*write inf instead"),
        ({"cost_s": with_entry((0, 1, 2, 0), -1.0)}, r"cost_s\[0, 1, 2, 0\] is -1.0.*0 or more"),
        (
            {"tolerated_later_stages": np.ones((4, 4, 4))},
            r"tolerated_later_stages has the shape.*must be \(4, 4, 4, 1\)",
        ),
        ({"tolerated_later_stages": np.full((4, 4, 4, 1), 0.5)}, "NaN or a fraction.*round it down"),
        ({"once_s": np.ones((4, 4, 4, 2))}, r"once_s has the shape \(4, 4, 4, 2\)"),
        ({"transfer_s": np.ones((4, 4, 4))}, r"transfer_s has the shape \(4, 4, 4\).*must be \(3, 4, 4\)"),
        ({"submesh_sizes": (1, 2)}, "submesh_sizes has 2 entries.*cost_s has 4 submeshes"),
        ({"submesh_sizes": (1, 2, 4, 0)}, "a size in submesh_sizes is 0.*at least 1"),
        ({"submesh_sizes": (3, 3, 6, 6)}, r"no submeshes of \[3, 6\] devices add up to 8.*plan for 6 devices"),
        ({"num_devices": 0}, "num_devices is 0"),
        ({"num_microbatches": 0}, "num_microbatches is 0.*at least 1"),
        ({"num_stages": 5}, "5 stages were asked for 4 layers.*at most 4"),
        ({"num_stages": 0}, "num_stages is 0"),
        ({"stage_submeshes": (1, 1)}, r"have 4 devices, the cluster has 8"),
        ({"stage_submeshes": (4, None)}, "puts stage 0 on submesh 4.*not the number of devices"),
        ({"stage_submeshes": (2, 2), "num_stages": 3}, "2 entries and num_stages is 3"),
        ({"stage_submeshes": (0, 0, 0, 0, 2)}, "5 stages were asked for 4 layers"),
        ({"layer_stage": {4: 0}}, "layer 4 to stage 0.*0 to 3"),
        ({"layer_stage": {0: 1, 2: 0}}, r"the start and layer 0 \(stage 1\) clash"),
        ({"layer_stage": {1: 1, 2: 0}}, r"layer 1 \(stage 1\) and layer 2 \(stage 0\) clash.*drop one"),
        ({"layer_stage": {1: 0, 2: 2}}, r"layer 1 \(stage 0\) and layer 2 \(stage 2\) clash"),
        ({"layer_stage": {2: 2}, "num_stages": 2}, r"layer 2 \(stage 2\) and the end of 2 stages clash"),
        ({"layer_stage": {2: 0}, "num_stages": 3}, r"layer 2 \(stage 0\) and the end of 3 stages clash"),
    ],
)
def test_bad_input(change, words):
    with pytest.raises(SlicingError, match=words):
        slice_stages(**{**FINE, **change})


def test_nothing_exists_says_what_to_give_up():
    lonely = FINE["cost_s"].copy()
    lonely[:3, 2:] = np.inf
    with pytest.raises(SlicingError, match=r"no stage can hold layer 2.*larger memory budget"):
        slice_stages(**{**FINE, "cost_s": lonely})
    whole = FINE["cost_s"].copy()
    whole[0, 3] = np.inf
    with pytest.raises(SlicingError, match=r"no slicing into 1 stage on 8 devices keeps the pins.*drop one"):
        slice_stages(**{**FINE, "cost_s": whole}, num_stages=1)
    single = np.where(np.eye(4, dtype=bool)[:, :, None, None], FINE["cost_s"], np.inf)
    two = np.full((4, 4, 4, 1), 2)
    with pytest.raises(SlicingError, match=r"fits the memory.*smaller microbatches"):
        slice_stages(**{**FINE, "cost_s": single, "tolerated_later_stages": two})
    small = np.where(np.arange(4)[:, None] > 0, np.inf, FINE["cost_s"])
    with pytest.raises(SlicingError, match="do not cover all layers and use all devices"):
        slice_stages(**{**FINE, "cost_s": small})


def test_values_equal_but_for_rounding_are_one_value():
    # Sums of the same seconds in another order: the search may not go back and forth between them.
    rng = np.random.default_rng(0)
    for _ in range(20):
        units = rng.random(3)
        cost_s, once_s = np.full((4, 4, 2, 2), np.inf), np.zeros((4, 4, 2, 2))
        for i in range(4):
            for j in range(i, 4):
                for c, order in enumerate((units, units[::-1])):
                    cost_s[i, j, :, c] = sum(order.tolist()) * (j - i + 1) / np.array([1, 2]) ** 0.9
                    once_s[i, j, :, c] = sum(order.tolist()) / 3
        check({"cost_s": cost_s, "tolerated": np.full((4, 4, 2, 2), 4), "sizes": (1, 2), "num_devices": 4,
               "num_microbatches": 8}, {"once_s": once_s, "num_stages": 3})  # fmt: skip


def test_tables_by_run_give_the_same_as_tables_by_layers():
    layers, found = 5, 0
    length = np.maximum(np.arange(layers)[None, :] - np.arange(layers)[:, None], 0)  # runs of one length cost the same
    for seed in range(24):
        case = random_case(seed, layers)
        more = extras(seed, case)
        more.update(submesh_sizes=case["sizes"], num_devices=case["num_devices"], num_microbatches=4)
        tables = {"cost_s": case["cost_s"][0], "tolerated_later_stages": case["tolerated"][0]}
        if "once_s" in more:
            tables["once_s"] = more.pop("once_s")[0]
        dense = {name: table[length] for name, table in tables.items()}
        try:
            expected = slice_stages(**dense, **more)
        except SlicingError:
            with pytest.raises(SlicingError):
                slice_stages(**tables, **more, runs=length)
        else:
            found += 1
            assert slice_stages(**tables, **more, runs=length) == expected
    assert found > 7


@pytest.mark.parametrize("runs", [np.zeros((2, 3), int), np.zeros((2, 2)), np.full((2, 2), 2), np.full((2, 2), -1)])
def test_bad_runs(runs):
    with pytest.raises(SlicingError, match="runs h"):
        slice_stages(np.ones((2, 1, 1)), np.ones((2, 1, 1)), (1,), 1, 1, runs=runs)
