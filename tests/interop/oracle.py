"""Stage slicing and layer clustering by trying everything; written from the definitions, not from the code under test."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np


def all_slicings(cost_s, tolerated, sizes, num_devices, num_stages=None, layer_stage=None, stage_submeshes=None):
    """Every admissible tuple of (i, j, m, c)."""
    layers, _, _, choices = cost_s.shape

    def continued(start: int, left: int) -> Iterator[tuple]:
        if start == layers:
            if left == 0:
                yield ()
            return
        for last in range(start, layers):
            for m, size in enumerate(sizes):
                options = [c for c in range(choices) if np.isfinite(cost_s[start, last, m, c])] if size <= left else []
                for rest in continued(last + 1, left - size) if options else ():
                    for c in options:
                        if tolerated[start, last, m, c] >= len(rest):
                            yield ((start, last, m, c), *rest)

    for stages in continued(0, num_devices):
        if num_stages is not None and len(stages) != num_stages:
            continue
        if stage_submeshes is not None and not (
            len(stages) == len(stage_submeshes)
            and all(w is None or w == stage[2] for w, stage in zip(stage_submeshes, stages, strict=True))
        ):
            continue
        if all(k < len(stages) and stages[k][0] <= layer <= stages[k][1] for layer, k in (layer_stage or {}).items()):
            yield stages


def objective(stages, cost_s, num_microbatches, once_s=None, transfer_s=None) -> float:
    times = [float(cost_s[stage]) for stage in stages]
    if transfer_s is not None:
        times += [float(transfer_s[a[1], a[2], b[2]]) for a, b in itertools.pairwise(stages)]
    once = 0.0 if once_s is None else max(float(once_s[stage]) for stage in stages)
    return math.fsum(times) + (num_microbatches - 1) * max(times) + once


def best_slicing(cost_s, tolerated, sizes, num_devices, num_microbatches, once_s=None, transfer_s=None, **pins):
    """(objective, stages) of the best slicing with the documented ties, or None."""
    best = None
    for stages in all_slicings(cost_s, tolerated, sizes, num_devices, **pins):
        if once_s is not None and not all(np.isfinite(once_s[stage]) for stage in stages):
            continue
        value = objective(stages, cost_s, num_microbatches, once_s, transfer_s)
        if not np.isfinite(value):
            continue
        if best is None or value < best[0] * (1 - 1e-12):
            best = value, stages
        elif value <= best[0] * (1 + 1e-12):
            best = best[0], min(best[1], stages, key=lambda found: (len(found), found))
    return best


def clusterings(flops, cut_bytes, num_layers, forced=()):
    """Every (bytes, largest load, cuts)."""
    for cuts in itertools.combinations(range(1, len(flops)), num_layers - 1):
        if set(forced) <= set(cuts):
            loads = [sum(flops[a:b]) for a, b in itertools.pairwise((0, *cuts, len(flops)))]
            moved = sum(cut_bytes[cut - 1] for cut in cuts)
            if np.isfinite(moved):
                yield moved, max(loads), cuts
