"""The page ``docs/serving.md``: its Python runs as it stands, and gives what it says."""

from __future__ import annotations

import numpy as np
import pytest

import alpa_lite as al
from docs import pages

TEXT = (pages.DOCS / "serving.md").read_text(encoding="utf-8")


@pytest.mark.medium
def test_the_blocks_run_and_the_model_answers() -> None:
    names: dict = {"__name__": "page"}
    engine, graphs, shared, split, *_ = pages.python_blocks(TEXT)
    exec(engine, names)
    params = {name: np.asarray(x, np.float64) for name, x in names["params"].items()}

    def greedy(prompt: bytes, count: int) -> list[int]:
        hidden, found = np.zeros(64), []
        for token in prompt:
            hidden = np.tanh(params["in"][token] + hidden @ params["between"])
        for _ in range(count):
            found.append(int((hidden @ params["out"]).argmax()))
            hidden = np.tanh(params["in"][found[-1]] + hidden @ params["between"])
        return found

    prompts = (b"class ", b"import ", b"def __init__(self")
    assert names["answers"] == [greedy(prompt, 16) for prompt in prompts]
    assert names["streamed"] == list(names["request"].tokens)
    assert names["seen"].prefills[8] >= 2 and names["seen"].prefills[32] == 1
    exec(graphs, names)
    assert list(names["graphs"]) == ["prefill_8", "prefill_32", "decode"]
    exec(shared, names)
    assert names["again"] == names["answers"]
    assert list(names["layout"].plans) == list(names["graphs"])
    exec(split, names)
    (first, pick), (last, pick_last) = names["Layers"](["layer0", "layer1", "layer2"]).split(2)
    assert (first.takes_tokens, first.gives_logits, last.takes_tokens, last.gives_logits) == (True, False, False, True)
    assert list(pick(dict.fromkeys(["in", *first.names, *last.names, "out"]))) == ["layer0", "in"]
    assert list(pick_last(dict.fromkeys(["in", *first.names, *last.names, "out"]))) == ["layer1", "layer2", "out"]


def test_the_advice_is_what_the_command_prints() -> None:
    printed = str(al.serve.propose_buckets([12, 15, 100, 900, 1000], 3)) + "--buckets 15,100,1000\n"
    assert printed in TEXT
