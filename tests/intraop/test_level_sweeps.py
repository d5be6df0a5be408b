"""Sweeps level by level do what sweeps group by group do."""

from __future__ import annotations

import numpy as np
import pytest

from alpa_lite.intraop import messages as messages_module
from alpa_lite.intraop.core import Core, finite
from alpa_lite.intraop.messages import Messages
from alpa_lite.intraop.tie import tie


def random_core(seed: int, *, copies: bool) -> tuple[Core, np.ndarray]:
    """Rows of nodes with some neighbours in the rows before and after; nodes differ in their numbers of states."""
    rng = np.random.default_rng(seed)
    rows, width = 4, 30
    sizes = rng.integers(1, 6, rows).tolist() if copies else rng.integers(1, 6, rows * width).tolist()
    unary, left, right, costs, unary_ids, matrix_ids = [], [], [], [], [], []
    shared: dict[object, tuple[int, np.ndarray]] = {}

    def array(key: object, *shape: int) -> tuple[int, np.ndarray]:
        if key not in shared:
            shared[key] = len(shared), rng.random(shape)
        return shared[key]

    for node in range(rows * width):
        row = node // width
        number, values = array(("node", row if copies else node), sizes[row if copies else node])
        unary.append(values)
        unary_ids.append(number)
        for shift in range(int(rng.integers(0, 3)) if row else 0):
            before = node - width - (node + shift) % 2
            a, b = (before // width, row) if copies else (before, node)
            number, matrix = array(("edge", a, b), sizes[a], sizes[b])
            if (before, node) not in zip(left, right, strict=True):
                left.append(before)
                right.append(node)
                costs.append(matrix)
                matrix_ids.append(number)
    core = Core(
        nodes=tuple(range(len(unary))),
        unary=tuple(unary),
        left=tuple(left),
        right=tuple(right),
        costs=tuple(costs),
        unary_ids=tuple(unary_ids),
        matrix_ids=tuple(matrix_ids),
        memory=None,
        constant=0.0,
        whole=False,
    )
    return core, np.arange(rows).repeat(width)


@pytest.mark.parametrize("copies", [False, True])
def test_levels_change_messages_as_groups_do(copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(5):
        core, classes = random_core(seed, copies=copies)
        unary, costs = finite(core)
        tied = tie(core, classes if copies else None)
        assert tied.is_trivial != copies
        found = []
        for by_levels in (True, False):
            with monkeypatch.context() as patch:
                if not by_levels:
                    patch.setattr(messages_module, "level_sweeps", lambda *_: None)
                messages = Messages.zero(core, unary, costs, tied)
                first = [messages.forward(), messages.backward(), messages.sweep(), *messages._values.tolist()]
                bounds = [sweep() for _ in range(3) for sweep in (messages.forward, messages.backward)]
                messages.set_unary([2 * c for c in unary])
                bounds += [messages.forward(), messages.backward()]
            assert (messages._levels is None) != by_levels
            found.append((first, bounds, np.concatenate(messages.node_rests()), messages.pick()))
        (first, bounds, rests, picks), (own_first, own_bounds, own_rests, own_picks) = found
        assert first == own_first  # to the last digit
        assert bounds == pytest.approx(own_bounds, rel=1e-12)
        assert rests == pytest.approx(own_rests, rel=1e-9, abs=1e-12)
        assert picks == own_picks
        assert bounds[-1] == pytest.approx(messages.exact_bound(), rel=1e-9)


@pytest.mark.parametrize("copies", [False, True])
def test_what_states_cost_more_is_the_same_by_levels(copies: bool) -> None:
    for seed in range(5):
        core, classes = random_core(seed, copies=copies)
        messages = Messages.zero(core, *finite(core), tie(core, classes if copies else None))
        for _ in range(messages_module._IN_ORDER):
            messages.forward()
        assert messages._levels is not None
        rng = np.random.default_rng(seed)
        sent = messages._values[sum(u.size for u in messages.unary) : -1]
        sent += rng.random(len(sent))  # sweeps leave every edge a 0
        bound, over = messages.over(core)
        messages._levels = None
        own_bound, own_over = messages.over(core)
        assert bound == pytest.approx(own_bound)
        assert np.concatenate(over) == pytest.approx(np.concatenate(own_over), abs=1e-12)
        assert min(map(min, over)) < 1e-12 < max(map(max, over))


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("forward", [False, True])
def test_choices_by_levels_are_those_by_groups_with_ties_as_well(copies: bool, forward: bool) -> None:
    for seed in range(10):
        core, classes = random_core(seed, copies=copies)
        few = [np.floor(3 * c) for c in core.unary], [np.floor(3 * c) for c in core.costs]
        tied = tie(core, classes if copies else None)
        messages = Messages.zero(core, few[0], [few[1][core.matrix_ids.index(n)] for n in core.matrix_ids], tied)
        for _ in range(seed % 3):
            messages.sweep()
        (messages.backward if forward else messages.forward)()
        by_levels = messages.pick(forward=forward)
        assert messages._levels is not None
        messages._levels = None
        assert by_levels == messages.pick(forward=forward)


def test_levels_are_left_out_where_they_are_as_narrow_as_nodes() -> None:
    unary = tuple(np.arange(3.0) for _ in range(40))
    core = Core(
        nodes=tuple(range(40)),
        unary=unary,
        left=tuple(range(39)),
        right=tuple(range(1, 40)),
        costs=tuple(np.eye(3) for _ in range(39)),
        unary_ids=(0,) * 40,
        matrix_ids=(0,) * 39,
        memory=None,
        constant=0.0,
        whole=True,
    )
    messages = Messages.zero(core, *finite(core), tie(core, None))
    for _ in range(2 * messages_module._IN_ORDER):
        bound = messages.forward()
    assert messages._levels is None
    assert bound == pytest.approx(messages.exact_bound())


def test_what_copies_tell_a_single_node_is_added_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    matrix, own, other = rng.random((3, 4)), rng.random(3), rng.random(4)
    core = Core(
        nodes=tuple(range(31)),
        unary=(own, *[other] * 30),
        left=(0,) * 30,
        right=tuple(range(1, 31)),
        costs=(matrix,) * 30,
        unary_ids=(0, *[1] * 30),
        matrix_ids=(0,) * 30,
        memory=None,
        constant=0.0,
        whole=False,
    )
    tied = tie(core, np.array([0, *[1] * 30]))
    messages = Messages.zero(core, *finite(core), tied)
    bounds = [messages.forward() for _ in range(messages_module._IN_ORDER - 1)]
    assert messages._levels is None  # the first sweeps go group by group
    assert [*bounds, messages.forward()][-1] == pytest.approx(messages.exact_bound())
    assert messages._levels is not None
