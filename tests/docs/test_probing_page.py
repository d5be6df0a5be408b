"""The page ``docs/probing.md``: the error it shows is the error that comes, and what it says probing finds is found."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from docs import pages
from docs import probing as page

TEXT = (pages.DOCS / "probing.md").read_text(encoding="utf-8")


def test_the_error_shown_is_the_error_raised():
    shown = re.search(r"```text\n(the sharding rule .*?)```", TEXT, re.DOTALL)
    assert shown is not None
    with pytest.raises(al.AlpaLiteError) as caught:
        al.register_rule("i k, k$ j -> i j", reduction="k")
    assert f"{caught.value}\n" == shown.group(1)


@pytest.mark.medium
def test_what_probing_is_said_to_find():
    rule = al.rules.probe(jnp.matmul, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((32, 64), (64, 32))))
    layouts = [str(layout) for layout in al.rules.enumerate_sharded(rule, 4)]
    for text in (str(rule), al.rules.suggest(rule), ";  ".join(layouts[:4])):
        assert text in TEXT


def test_the_panels_of_the_picture_say_what_the_text_says():
    verdicts = [title.rpartition(", dim ")[2] for title, _ in page.panels()]
    assert verdicts == [
        "0: follows result dim 0",
        "1: follows result dim 1",
        "2: stays whole",
        "1: mixes: partial results",
    ]
