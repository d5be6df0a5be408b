"""Real text for the language models: the source files of Python's own standard library, one byte per token."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import numpy as np

VOCAB = 256


@functools.cache
def load_corpus(max_bytes: int = 4_000_000) -> np.ndarray:
    """The first ``max_bytes`` bytes of the top-level ``*.py`` files of the standard library, in order of their names.

    Returns:
        uint8 array of at most ``max_bytes``; the same on every call and for every run of one interpreter.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise FileNotFoundError(f"no Python sources in {folder}; use an interpreter whose standard library is on disk")
    parts: list[bytes] = []
    size = 0
    for file in files:
        parts.append(file.read_bytes())
        size += len(parts[-1])
        if size >= max_bytes:
            break
    corpus = np.frombuffer(b"".join(parts)[:max_bytes], dtype=np.uint8)
    corpus.setflags(write=False)
    return corpus


def text_batch(seed: int, *, batch_size: int, seq_len: int) -> dict[str, np.ndarray]:
    """``batch_size`` random windows of the corpus.

    Returns:
        ``{"inputs", "targets"}``: int32 tokens of shape (batch_size, seq_len); a target is the input one place later.
    """
    corpus = load_corpus()
    starts = np.random.default_rng(seed).integers(0, corpus.size - seq_len - 1, size=batch_size)
    windows = np.stack([corpus[start : start + seq_len + 1] for start in starts]).astype(np.int32)
    return {"inputs": windows[:, :-1].copy(), "targets": windows[:, 1:].copy()}
