"""Pins of layers to stages (``al.pin_stage``): whether they can be kept, and where a loss is cut so that they are.

Stages are contiguous groups of at least one layer. So pins can be kept exactly when stages rise with layers, no layer is
pinned twice, and there are enough layers before, between and behind them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from alpa_lite.errors import LayerError
from alpa_lite.plan.leaf_rows import split_path
from alpa_lite.planner.even_layers import EVEN, UNEVEN, even_layers, fewer_bytes
from alpa_lite.trace.stage_pin import StagePin


def check_stage_pins(pins: Sequence[StagePin], num_layers: int, num_stages: int, what: str = "layer") -> None:
    """Refuse pins that no cut into stages keeps.

    Args:
        pins: in any order.
        num_layers: layers, or ops of a function that is not yet cut.
        num_stages: of the pipeline.
        what: that ``pins`` number.

    Raises:
        LayerError: with the pins that clash.
    """
    for pin in pins:
        if pin.stage >= num_stages:
            raise LayerError(
                f"{pin.reason} asks for stage {pin.stage} of {num_stages}. Stages are numbered from 0 to "
                f"{num_stages - 1}. Give such a stage, or ask for more with PlanOptions(num_stages=...)."
            )
    ordered = sorted(pins, key=lambda pin: (pin.place, pin.stage))
    for first, second in pairwise(ordered):
        if first.place == second.place and first.stage != second.stage:
            raise LayerError(
                f"{first.reason} asks for stage {first.stage}, {second.reason} for stage "
                f"{second.stage}, and both are in {what} {first.place}, which belongs to one stage. {_apart(first, second)}"
            )
        if first.stage > second.stage:
            raise LayerError(
                f"{second.reason} contradicts the flow of data: it puts {what} {second.place} on stage "
                f"{second.stage}, and {first.reason} puts {what} {first.place}, which comes before it, on stage "
                f"{first.stage}. Values would flow from stage {first.stage} back to stage {second.stage}{_cycle(first, second)}. "
                f"Stages must rise with the layers. {_in_order(first, second)}"
            )
        if second.place - first.place < second.stage - first.stage:
            raise _too_few(
                second,
                second.place - first.place,
                second.stage - first.stage,
                f"since {first.leaf or first.source}",
                what,
            )
    if ordered:
        first, last = ordered[0], ordered[-1]
        if first.place < first.stage:
            raise _too_few(first, first.place, first.stage, "before it", what)
        if num_layers - 1 - last.place < num_stages - 1 - last.stage:
            raise _too_few(last, num_layers - 1 - last.place, num_stages - 1 - last.stage, "behind it", what)


def _apart(first: StagePin, second: StagePin) -> str:
    """What to do about two pins of one place."""
    whole = split_path(first.leaf)[0]
    if first.leaf and whole == split_path(second.leaf)[0]:
        return (
            f"It reads rows of {whole!r} that other layers have: read it by layers here too (a result is its next value if it is "
            f"returned at 'out/{whole}'), or make it a leaf per layer."
        )
    if first.leaf and second.leaf:
        return (
            "Read each in a layer of its own stage: put al.layer_boundary between what reads the two, or move it there."
        )
    return "Drop one of the two, or put al.layer_boundary between them."


def _in_order(first: StagePin, second: StagePin) -> str:
    """What to do about two pins that data would pass in the wrong order."""
    if first.leaf and second.leaf:
        return "Read what lies on the earlier stage first, or leave one of the two out of follow= or shared=."
    return "Swap the two stages, or drop one of the pins."


def _cycle(first: StagePin, second: StagePin) -> str:
    """What stages would wait for each other, where parameters say where layers lie."""
    if not (first.leaf or second.leaf):
        return ""
    stages = (*range(second.stage, first.stage + 1), second.stage)
    return f", a cycle of stages: {' -> '.join(map(str, stages))}"


def _too_few(pin: StagePin, layers: int, stages: int, where: str, what: str) -> LayerError:
    return LayerError(
        f"{pin.reason} asks for stage {pin.stage}: {stages} stages {where}, for {layers} {what}s. Every stage "
        f"has at least one {what}. Mark more layers with al.layer_boundary{'' if pin.leaf else ', or pin another stage'}."
    )


def pinned_cuts(
    flops: Sequence[float],
    cut_bytes: Sequence[float],
    pins: Sequence[StagePin],
    stage_layers: Sequence[int],
    *,
    forward: bool = False,
) -> tuple[int, ...]:
    """Where a loss is cut into layers so that stages of ``stage_layers`` layers each keep the pins.

    Stages are as balanced as the pins allow (some more for fewer bytes between them), then each is cut on its own.

    Args:
        flops: of each op.
        cut_bytes: of the cut before each op but the first; inf where there can be none.
        pins: of ops.
        stage_layers: layers of each stage.
        forward: whether there is no gradient, so that balance matters less.

    Raises:
        LayerError: no cut keeps the pins.
    """
    num_ops, num_stages = len(flops), len(stage_layers)
    check_stage_pins(pins, num_ops, num_stages, "op")
    possible = np.flatnonzero(np.isfinite(cut_bytes)) + 1
    starts = []
    for stage in range(1, num_stages):
        low = max((pin.place for pin in pins if pin.stage < stage), default=0)
        high = min((pin.place for pin in pins if pin.stage >= stage), default=num_ops - 1)
        starts.append(possible[(low < possible) & (possible <= high)])
    work, size = np.asarray(flops, float), np.asarray(cut_bytes, float)
    ends = _stage_starts(work, size, starts, EVEN, pins)
    if forward:
        uneven = _stage_starts(work, size, starts, UNEVEN, pins)
        sent = [sum(cut_bytes[start - 1] for start in own) for own in (ends, uneven)]
        ends = fewer_bytes(ends, sent[0], uneven, sent[1])
    edges = [0, *ends, num_ops]
    layers = zip(pairwise(edges), stage_layers, strict=True)
    inner = [_inner_cuts(flops, cut_bytes, *edge, n, forward=forward) for edge, n in layers]
    return tuple(sorted([*ends, *(cut for cuts in inner for cut in cuts)]))


def _stage_starts(
    flops: np.ndarray,
    cut_bytes: np.ndarray,
    starts: Sequence[np.ndarray],
    tolerance: float,
    pins: Sequence[StagePin],
) -> list[int]:
    """The first op of each stage but the first, of those in ``starts``.

    load[s, p] = min over q < p of max(load[s - 1, q], work(q, p)) gives the least possible largest stage; with a cap on it,
    sent[s, p] = min over q < p with work(q, p) <= cap of sent[s - 1, q] + bytes(p) the fewest bytes.
    """
    work, num_ops = np.concatenate([[0.0], np.cumsum(flops)]), len(flops)
    rows = [np.array([0]), *starts, np.array([num_ops])]
    sent = np.concatenate([[0.0], cut_bytes, [0.0]])
    load = np.zeros(1)
    for before, now in pairwise(rows):
        load = np.array([_least(np.maximum(load, work[p] - work[before]), before < p)[0] for p in now])
    cap = max((1 + tolerance) * work[-1] / (len(rows) - 1), float(load.min(initial=math.inf))) * (1 + 1e-9)
    if not math.isfinite(cap):
        leaves = any(pin.leaf for pin in pins)
        raise LayerError(
            f"the pins of {'parameters to their stages' if leaves else 'al.pin_stage'} leave no place where a stage can end: "
            "layers end between ops that the gradient, or without one the result, passes, and every stage has at least one. "
            f"{'Mark more layers' if leaves else 'Pin other values, or mark layers'} with al.layer_boundary."
        )
    bytes_to, chosen = np.zeros(1), []
    for before, now in pairwise(rows):
        found = [_least(bytes_to, (before < p) & (work[p] - work[before] <= cap)) for p in now]
        bytes_to = np.array([least for least, _ in found]) + sent[now]
        chosen.append([q for _, q in found])
    at, ends = 0, []
    for row, back in zip(rows[-2:0:-1], chosen[:0:-1], strict=True):
        at = back[at]
        ends.append(int(row[at]))
    return ends[::-1]


def _least(values: np.ndarray, allowed: np.ndarray) -> tuple[float, int]:
    """The smallest of the allowed values, the first among equals, and its place; inf if there is none."""
    if not len(values):
        return math.inf, 0
    values = np.where(allowed, values, math.inf)
    place = int(values.argmin())
    return float(values[place]), place


def _inner_cuts(
    flops: Sequence[float], cut_bytes: Sequence[float], start: int, stop: int, layers: int, *, forward: bool
) -> list[int]:
    """Ends of the layers of one stage."""
    between = cut_bytes[start : stop - 1]
    possible = 1 + sum(map(math.isfinite, between))
    if layers > possible:
        raise LayerError(
            f"stage_layers asks for {layers} layers in a stage between pins of al.pin_stage that can be cut into at most "
            f"{possible}, between ops that the gradient passes. Ask for fewer there, or pin other values."
        )
    return [start + cut for cut in even_layers(flops[start:stop], between, layers, forward=forward)]
