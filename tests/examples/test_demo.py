"""``make demo`` with few steps: it leaves its files, and both models answer."""

from __future__ import annotations

import json

import pytest

import alpa_lite as al


@pytest.mark.slow
def test_both_models_are_trained_and_served(tmp_path, capsys):
    from examples import demo

    losses, llama_losses = demo.run(tmp_path, num_steps=3, num_llama_steps=3)
    assert losses.largest_difference() < 1e-4 and len(losses.planned) == len(llama_losses) == 3
    assert json.loads((tmp_path / "losses.json").read_text())["planned"] == losses.planned
    assert al.load_plan(tmp_path / "plan.json").objective > 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "checkpoints").is_dir()
    printed = capsys.readouterr().out
    assert all(repr(prompt) in printed for prompt in demo.PROMPTS)  # the GPT goes on from them
    assert "Shared layout of 4 graphs" in printed and "24 requests" not in printed
    assert "finished {'length': 24}" in printed  # the Llama's answers
