"""Paths of leaves and globs over them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.trace.paths import argument_paths, below, leaf_paths, select


class State(NamedTuple):
    params: dict
    step: int


def test_leaf_paths():
    state = State(params={"dense": {"kernel": 1, "bias": 2}}, step=3)
    assert leaf_paths(state, "0") == [("0/params/dense/bias", 2), ("0/params/dense/kernel", 1), ("0/step", 3)]
    assert leaf_paths((5, {"loss": 6}), "out") == [("out/0", 5), ("out/1/loss", 6)]
    assert leaf_paths(5, "out") == [("out", 5)]
    assert leaf_paths(None, "0") == []


def test_argument_paths():
    assert argument_paths(({"w": 1}, 2), {"z": 3, "k": [4]}) == [("0/w", 1), ("1", 2), ("k/0", 4), ("z", 3)]


@pytest.mark.parametrize(
    ("key", "path", "matches"),
    [
        ("0/w", "0/w", True),
        ("0/*/kernel", "0/dense/kernel", True),
        ("0/*/kernel", "0/a/b/kernel", False),
        ("0/*/kernel", "0/kernel", False),
        ("0/**/kernel", "0/kernel", True),
        ("0/**/kernel", "0/a/b/kernel", True),
        ("**/kernel", "out/0/kernel", True),
        ("**/kernel", "0/my_kernel", False),
        ("out/**", "out", True),
        ("out/**", "out/0/x", True),
        ("out/**", "outer", False),
        ("**", "0", True),
        ("0/layers_*/kernel", "0/layers_12/kernel", True),
        ("0/layers_*/kernel", "0/layers_1/2/kernel", False),
        ("0/**/b/**", "0/a/b", True),
        ("0/x.y*", "0/xzy1", False),
        ("*", "0", True),
        ("*", "0/w", False),
    ],
)
def test_globs(key, path, matches):
    assert bool(select(key, [path])) is matches


@given(st.lists(st.sampled_from(["a", "b", "kernel", "0"]), min_size=1, max_size=5), st.data())
def test_a_glob_made_from_a_path_matches_it(segments, data):
    key = [data.draw(st.sampled_from([s, "*", s[:1] + "*", "*" + s[1:]])) for s in segments]
    start = data.draw(st.integers(0, len(segments)))
    stop = data.draw(st.integers(start, len(segments)))
    deep = [*key[:start], "**", *key[stop:]]
    assert select("/".join(key), ["/".join(segments)]) == [0]
    assert select("/".join(deep), ["/".join(segments)]) == [0]


def test_below():
    assert below("0/a", ["0/a", "0/a/b", "0/ab", "1/0/a"]) == [0, 1]
