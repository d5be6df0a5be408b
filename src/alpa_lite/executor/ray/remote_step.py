"""A planned step on a Ray cluster, called like a local one: state stays on the workers between steps.

In: arguments, of which arrays of the last step are on the workers already. Out: results as ``RemoteArray``s. A call returns when
the step has ended on all workers, so that a lost worker shows in the call that it belongs to.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from alpa_lite.core.spec import ShardingSpec
from alpa_lite.costs.tiles import Box
from alpa_lite.errors import ArgumentsError
from alpa_lite.executor.host_data import HostLeaf, Read, ReadOrder
from alpa_lite.executor.host_tiles import HostTiles, Tiling, raw_values, whole_tiles
from alpa_lite.executor.local import SignatureChanged, positional_tree
from alpa_lite.executor.parcel import Parcel
from alpa_lite.executor.ray.group import WorkerGroup
from alpa_lite.executor.ray.remote_array import RemoteArray
from alpa_lite.executor.ray.settings import RayExecutor
from alpa_lite.executor.ray.values import RemoteValues
from alpa_lite.executor.staged_array import StagedArray
from alpa_lite.executor.worker import StepAnswer, StepOrder
from alpa_lite.plan.plan import Plan
from alpa_lite.trace.program import Traced


@dataclass(frozen=True, slots=True)
class _Argument:
    """Where an argument is wanted: the submeshes, and how each process gets its parts."""

    submeshes: frozenset[int]
    tilings: tuple[Tiling, ...]


@dataclass(slots=True)
class StepTimes:
    """Of the last step, in seconds: the driver's call, and per worker its own part and, if it was timed, its programs."""

    call_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)


class RemoteStep:
    """One step on one group of workers, which is started by the first call.

    Args:
        plan: what runs.
        traced: the step that it was made for.
        parcel: both, as the workers take them.
        settings: of the workers.

    Attributes:
        times: of the last step.
        read_bytes: what workers read of the checkpoint that was restored last.
        saving: whether a worker was writing a checkpoint when it ended.
        timed_every: every so many steps, workers wait for each program and tell how busy they were; 0 = never.
    """

    def __init__(self, plan: Plan, traced: Traced, parcel: Parcel, settings: RayExecutor) -> None:
        self.plan, self.traced, self.parcel, self.settings = plan, traced, parcel, settings
        self.values: RemoteValues | None = None
        self.times = StepTimes()
        self.saving = False
        self.read_bytes = 0
        self.timed_every = 0
        calls = parcel.read_calls()
        process_of = {device: s.number for s in parcel.sites for device in s.devices}
        submesh_of = {stage: s.submesh for s in parcel.sites for stage in s.stages}
        self.arguments = _arguments(parcel, process_of, submesh_of)
        at = {name: submesh_of[call.stage] for call in calls for name in call.writes}
        self.result_at = [at[call.reads[0]] for call in calls if call.kind == "return"]
        program = traced.program
        self.donated = frozenset(i for i, given in enumerate(program.donated) if given)
        self.moved: set[int] = set()  # arguments of which a warning told that the driver moves them

    @property
    def group(self) -> WorkerGroup:
        """The workers; started if they are not."""
        return self.start().group

    def start(self) -> RemoteValues:
        if self.values is None:
            self.values = RemoteValues(WorkerGroup(self.parcel, self.settings))
        return self.values

    def restart(self) -> None:
        """New workers in place of those that are lost; what the old ones kept is gone."""
        self.close()
        self.start()

    def close(self) -> None:
        """Stop the workers and give back their resources."""
        if self.values is not None:
            self.values.group.kill()
            self.values = None

    def busy(self) -> tuple[float, ...]:
        """Per submesh the mean share of the last call in which its processes' programs ran; empty if it was not timed."""
        times, sites = self.times, self.parcel.sites
        if not any(times.busy_s):
            return ()
        of_submesh = [[s.number for s in sites if s.submesh == m] for m in range(1 + sites[-1].submesh)]
        return tuple(sum(times.busy_s[k] for k in own) / len(own) / times.call_s for own in of_submesh)

    # -- a step -------------------------------------------------------------------------------------------------------

    def run(self, *args: Any) -> Any:
        """The step on positional dynamic arguments (keyword arguments follow, sorted by name).

        Raises:
            WorkerLost: a worker was lost; the state is gone, and what a restored one can go on from is in ``position``.
        """
        leaves, tree = jax.tree_util.tree_flatten(args)
        parts = self.traced.parts
        if tree != positional_tree(self.traced.in_tree) or [_type(x) for x in leaves] != self.whole_types():
            raise SignatureChanged
        made = self(leaves if parts is None else parts.split(leaves))
        if parts is not None:
            made = parts.join(made, StagedArray)
        return jax.tree_util.tree_unflatten(self.traced.out_tree, made)

    def whole_types(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and type of every argument leaf."""
        if self.traced.parts is not None:
            return [(x.shape, str(x.dtype)) for x in self.traced.parts.argument_types()]
        return [(leaf.value.shape, leaf.value.dtype) for leaf in self.plan.inputs]

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        start = time.perf_counter()
        for position, leaf in enumerate(leaves):  # before workers start for what they cannot run
            if isinstance(leaf, RemoteArray):
                self._check_given(leaf, position)
        values = self.start()
        group = values.group
        group.check()
        held, given, read = self._sorted(leaves, values)
        names = {position: values.new() for position in range(len(self.parcel.outputs))}
        dropped, timed = values.dropped(), bool(self.timed_every) and (group.steps + 1) % self.timed_every == 0

        asked = []

        def order(site: Any) -> tuple[StepOrder]:
            asked.append(site)
            return (
                StepOrder(
                    number=group.steps + 1,
                    given=given.get(site.number, {}),
                    kept={p: array.name for p, array in held.items() if array.submesh == site.submesh},
                    names={p: name for p, name in names.items() if self.result_at[p] == site.submesh},
                    dropped=dropped,
                    timed=timed,
                    read=read.get(site.number, {}),
                ),
            )

        donated = [a.name for p, a in held.items() if p in self.donated]
        try:
            answers: list[StepAnswer] = group.each("step", order)
        except BaseException:  # workers run it to its end: what it donates is gone, and nobody wants its results
            if asked:
                values.alive.difference_update(donated)
            for name in names.values():
                values.forget(name)
            raise
        group.steps += 1
        self.saving = any(a.saving for a in answers)
        self.times = StepTimes(time.perf_counter() - start, [a.step_s for a in answers], [a.busy_s for a in answers])
        values.alive.difference_update(donated)
        told = {position: value for answer in answers for position, value in answer.told.items()}
        return [self._result(values, p, names[p], told.get(p)) for p in names]

    def _result(self, values: RemoteValues, position: int, name: int, told: np.ndarray | None) -> RemoteArray:
        kind = self.parcel.outputs[position]
        return RemoteArray(values, name, kind, self.parcel.stages[kind.stage], self.result_at[position], told)

    def _sorted(
        self, leaves: Sequence[Any], values: RemoteValues
    ) -> tuple[dict[int, RemoteArray], dict[int, dict[int, HostTiles]], dict[int, dict[int, ReadOrder]]]:
        """Arguments that are on their workers, and per process the parts of the others, or what to read of them."""
        held: dict[int, RemoteArray] = {}
        read: dict[int, dict[int, ReadOrder]] = defaultdict(dict)
        given: dict[int, dict[int, HostTiles]] = defaultdict(dict)
        for position, (leaf, argument) in enumerate(zip(leaves, self.arguments, strict=True)):
            if isinstance(leaf, RemoteArray):
                if argument.submeshes <= {leaf.submesh}:
                    held[position] = leaf
                    continue
                self._warn_moved(position)
            if isinstance(leaf, HostLeaf):
                self._set_reader(leaf.read, values)
                for process, boxes in wanted_boxes(argument.tilings).items():
                    read[process][position] = ReadOrder(
                        position=leaf.position, path=leaf.path, shape=leaf.shape, dtype=str(leaf.dtype), boxes=boxes
                    )
                continue
            for process, tiles in deal(argument.tilings, leaf).items():
                given[process][position] = tiles
        return held, given, read

    def _set_reader(self, read: Read, values: RemoteValues) -> None:
        """Tell the workers, once per group, what they read batches with."""
        if values.read is not read:
            values.group.each("set_reader", lambda _: (read,))
            values.read = read

    def _check_given(self, array: RemoteArray, position: int) -> None:
        path = self.plan.inputs[position].path
        if array._values is not self.values:
            array._values.group.check()
            raise ArgumentsError(
                f"the argument {path!r} is a RemoteArray of another step, or of this one for arguments of other shapes or types, "
                "which has workers of its own. It must be a host array or come from the same step. Read it with np.asarray(...) "
                "first; let all batches of a loop have one shape: pad the last one, or leave it out."
            )
        if array.is_deleted():
            array._values.group.check()  # whose values are all gone, if it is lost
            raise ArgumentsError(
                f"the argument {path!r} was donated to an earlier call, so its value is gone. An argument must exist. Pass the "
                "result of that call, or leave it out of donate_argnums."
            )

    def _warn_moved(self, position: int) -> None:
        if position not in self.moved:
            self.moved.add(position)
            warnings.warn(
                f"alpa_lite: the argument {self.plan.inputs[position].path!r} is a result that lies on other devices than "
                "the step wants it on: it goes through the driver in every step. Pass it from the host, or pin both alike.",
                stacklevel=6,
            )

    def place(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments as they are: what is on the host travels with the step."""
        return tuple(args)

    # -- state --------------------------------------------------------------------------------------------------------

    def created(self, number: int, program: bytes, args: Sequence[Any], positions: Sequence[int]) -> list[RemoteArray]:
        """Results of a program that makes argument leaves ``positions`` of stage ``number``, on its workers."""
        values = self.start()
        tiles = [whole_tiles(a) for a in args]
        names = [values.new() for _ in positions]
        submesh = next(s.submesh for s in self.parcel.sites if number in s.stages)
        values.group.each("create", lambda s: (program, tiles, names, number) if s.submesh == submesh else None)
        return [self.argument(values, p, name, submesh) for p, name in zip(positions, names, strict=True)]

    def argument(self, values: RemoteValues, position: int, name: int, submesh: int) -> RemoteArray:
        """A value that workers keep, as an argument."""
        kind = self.parcel.inputs[position]
        return RemoteArray(values, name, kind, self.parcel.stages[kind.stage], submesh)


def deal(tilings: Sequence[Tiling], value: Any) -> dict[int, HostTiles]:
    """Per process its parts of a value that is wanted in one layout or several."""
    raw = raw_values(value)
    found: dict[int, HostTiles] = {}
    for tiling in tilings:
        for process, tiles in tiling.deal(raw).items():
            known = found.get(process)
            both = tiles.tiles if known is None else {**known.tiles, **tiles.tiles}
            found[process] = HostTiles(tiles.shape, tiles.dtype, both)
    return found


def wanted_boxes(tilings: Sequence[Tiling]) -> dict[int, tuple[Box, ...]]:
    """Per process the parts that it holds in one layout or several, each once."""
    found: dict[int, dict[Box, None]] = defaultdict(dict)
    for tiling in tilings:
        for process, boxes in tiling.boxes.items():
            found[process].update(dict.fromkeys(boxes))
    return {process: tuple(boxes) for process, boxes in found.items()}


def _arguments(parcel: Parcel, process_of: dict[int, int], submesh_of: dict[int, int]) -> list[_Argument]:
    """Of every argument, where its "place" calls want it."""
    tilings: dict[int, dict[tuple[int, str], Tiling]] = defaultdict(dict)
    submeshes: dict[int, set[int]] = defaultdict(set)
    for call in parcel.read_calls():
        if call.kind == "place":
            position, stage = int(call.reads[0][1:]), parcel.stages[call.stage]
            kind, spec = parcel.inputs[position], ShardingSpec.parse(call.spec)
            submeshes[position].add(submesh_of[call.stage])
            tilings[position][stage.first_device, call.spec] = Tiling(
                kind.shape, kind.dtype, spec, stage.logical, stage.devices, process_of
            )
    return [_Argument(frozenset(submeshes[i]), tuple(tilings[i].values())) for i in range(len(parcel.inputs))]


def _type(x: Any) -> tuple[tuple[int, ...], str]:
    dtype: Any = getattr(x, "dtype", None)
    if dtype is None:
        dtype = jax.dtypes.canonicalize_dtype(jax.numpy.result_type(x))
    elif not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return tuple(np.shape(x)), str(dtype)
