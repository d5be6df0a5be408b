"""Contiguous runs of layers as programs, without cutting the whole step: what a table of stage costs is made of.

Layers that are equal but for the names of their arguments have one *class*; runs of equal classes are equal programs. To
find the classes the step is cut once into stages of one layer each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from alpa_lite._jax_compat import Literal
from alpa_lite.core.program import Program
from alpa_lite.core.rule_text import NamedRule
from alpa_lite.trace.commute import commute_sums
from alpa_lite.trace.flatten import FlatJaxpr
from alpa_lite.trace.layers import Layered
from alpa_lite.trace.program import Rules
from alpa_lite.trace.rules import op_key
from alpa_lite.trace.staged import microbatch_loop, stage_program
from alpa_lite.trace.stages import StageProgram, stages_of_step

Run = tuple[int, int]  # first and last layer, inclusive


class LayerRuns:
    """The runs of one step's layers."""

    def __init__(
        self,
        whole: Program,
        flat: FlatJaxpr,
        layered: Layered,
        rules: tuple[NamedRule, ...] = (),
        labels: tuple[Sequence[str], Sequence[str]] | None = None,
        known: Rules | None = None,
    ) -> None:
        """Arguments as of ``staged_step``; ``labels`` of the step's arguments and results (pins) make layers differ."""
        self.whole, self.flat, self.layered, self.rules, self.labels = whole, flat, layered, rules, labels
        self.known = {} if known is None else known

    @property
    def num_layers(self) -> int:
        return self.layered.num_layers

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """Per layer a number, the same for layers with the same content."""
        layers = range(self.num_layers)
        numbers: dict[str, int] = {}
        parts = enumerate(self._parts(tuple(layers), layers))
        digests = (f"{_digest(part, layer)} {self._labels(part)}" for layer, part in parts)
        return tuple(numbers.setdefault(digest, len(numbers)) for digest in digests)

    def _labels(self, part: StageProgram) -> list[list[str]]:
        if self.labels is None:
            return []
        return [[self.labels[0][a] for a in part.args], [self.labels[1][r] for r in part.results]]

    def programs(self, runs: Iterable[Run]) -> dict[Run, tuple[StageProgram, Program]]:
        """Each run as a stage of its own; the layers before and after it are others'."""
        found = {}
        for group in _disjoint(runs):
            stage_of_layer, wanted = _stages_around(group, self.num_layers)
            for run, part in zip(group, self._parts(stage_of_layer, wanted), strict=True):
                found[run] = part, stage_program(self.whole, part, self.rules, self.known)
        return found

    def _parts(self, stage_of_layer: Sequence[int], wanted: Iterable[int]) -> tuple[StageProgram, ...]:
        loop = microbatch_loop(self.flat)
        flat, layered = commute_sums(self.flat, loop, self.layered, stage_of_layer)
        return stages_of_step(flat, loop, layered, stage_of_layer, self.whole.aliases, wanted)


def _disjoint(runs: Iterable[Run]) -> list[list[Run]]:
    """The runs in groups without overlap, so that one cut of the step makes a whole group."""
    groups: list[list[Run]] = []
    for run in sorted(set(runs), key=lambda run: (run[1], run)):
        group = next((g for g in groups if g[-1][1] < run[0]), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    return groups


def _stages_around(group: Sequence[Run], num_layers: int) -> tuple[list[int], list[int]]:
    """Layer -> stage with every run of the group a stage and what lies between them stages too; and the runs' numbers."""
    starts = {edge for first, last in group for edge in (first, last + 1)}
    stage_of_layer: list[int] = []
    for layer in range(num_layers):
        stage = stage_of_layer[-1] if stage_of_layer else 0
        stage_of_layer.append(stage + (layer in starts and layer > 0))
    return stage_of_layer, [stage_of_layer[first] for first, _ in group]


def _digest(part: StageProgram, layer: int) -> str:
    """Of what a layer computes and exchanges; from how far before or behind it receives what, in the loop."""
    text = hashlib.sha256(_text(part.flat).encode())
    received = [(c.when, c.source - layer if c.when == "loop" else 0) for c in part.received]
    text.update(f"{received} {[c.when for c in part.sent]} {part.num_forward} {part.rounds}".encode())
    return text.hexdigest()


def _text(flat: FlatJaxpr) -> str:
    """Ops with their types, values by number; values of stage programs are numbered in the order of first use."""

    def name(value: Any) -> str:
        return str(value.val) if isinstance(value, Literal) else str(value)

    lines = [f"{flat.inputs} {[name(o) for o in flat.outputs]}"]
    for op in flat.ops:
        key = op_key(op, flat) if not op.bodies else (op.name, op.params.get("length"))
        lines.append(f"{key} {[name(i) for i in op.inputs]} {op.outputs}")
        lines += [_text(body) for body in op.bodies]
    return "\n".join(lines)
