"""The part of one actor in plans with stages: the stages that lie there, with a ``Worker`` per graph.

In: the graphs as parcels, as training steps are sent to actors, and the model's parameters. The workers of an actor share what
it keeps: the parameters, and a cache per group of slots. What goes from stage to stage goes from actor to actor, as planned;
the driver only says what is to be done next, so that stages work on different groups of slots at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alpa_lite.executor.host_tiles import whole_tiles
from alpa_lite.executor.parcel import Parcel, read_parcel
from alpa_lite.executor.places import Place, part_creator, places_of
from alpa_lite.executor.state_rows import leaf_rows
from alpa_lite.executor.transport import PullTransport
from alpa_lite.executor.worker import Progress, StepOrder, Worker
from alpa_lite.plan.load import read_plan
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Leaf
from alpa_lite.serve.model_graphs import DECODE, prefill_name
from alpa_lite.serve.programs import arguments, padded
from alpa_lite.serve.sampling import Rows, Sampler
from alpa_lite.serve.stored import device_bytes, made_here, placed_parts

_LOGITS = -1  # their name among what an actor keeps, until the next tokens are drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedCharge:
    """What every actor is given.

    Attributes:
        init_cache: makes the cache of one group of slots.
        params: as for ``Hosts``; arrays are on the host.
        plans: graph -> plan as in a plan file.
        parcels: graph -> what of it is run.
        read_at: path of a parameter that several stages read and that none sends to the others -> stage -> how it lies there.
        num_groups: of slots.
    """

    init_cache: Callable[[], Any]
    params: Any
    plans: Mapping[str, bytes]
    parcels: Mapping[str, bytes]
    read_at: Mapping[str, Mapping[int, str]]
    num_groups: int


@dataclass(frozen=True, slots=True)
class _Graph:
    """A graph in this process.

    Attributes:
        worker: runs it.
        kept: argument -> path of a parameter or a leaf of the cache that lies here.
        returned: result -> path of a leaf of the cache.
        given: the other arguments.
    """

    worker: Worker
    kept: Mapping[int, str]
    returned: Mapping[int, str]
    given: Sequence[int]


def placed_at(plan: Plan, parcel: Parcel) -> dict[str, dict[int, str]]:
    """Parameters that stages of a graph place for themselves: path -> stage -> how it lies there."""
    found: dict[str, dict[int, str]] = {}
    params = {leaf.path for leaf in arguments(plan, "0")}
    paths = {f"a{position}": leaf.path for position, leaf in enumerate(plan.inputs) if leaf.path in params}
    for call in parcel.read_calls():
        if call.kind == "place" and call.reads[0] in paths:
            found.setdefault(paths[call.reads[0]], {})[call.stage] = call.spec
    return found


def _places(leaves: Sequence[Leaf], read_at: Mapping[str, Mapping[int, str]], worker: Worker) -> dict[str, Place]:
    """Of the parameters that lie here, or that a stage here reads for itself, by path."""
    found: dict[str, Place] = {}
    for (number, rows), leaf in zip(leaf_rows(leaves), leaves, strict=True):
        layouts = {leaf.stage: str(leaf.spec), **read_at.get(leaf.path, {})}
        stage = next((stage for stage in layouts if stage in worker.meshes), None)
        if stage is not None:
            found[leaf.path] = number, rows, worker.sharding(layouts[stage], stage)
    return found


class StagedPrograms:
    """Programs of ``decode`` are compiled now, those of another graph when it is first used.

    Args:
        charge: what is to be run.
        site: number of this process among the plans' sites.
        host: the address at which the others reach it.
        one_world: whether all processes are one ``jax.distributed`` job.
    """

    def __init__(self, charge: StagedCharge, site: int, host: str, one_world: bool) -> None:
        self.transport = PullTransport(host)
        self._plans, self._parcels, self._num_groups = charge.plans, charge.parcels, charge.num_groups
        self._site, self._one_world, self._calls = site, one_world, 0
        self._kept: dict[int, Any] = {}
        self._graphs: dict[str, _Graph] = {}
        params, self._digests = made_here(charge.params)
        plan = read_plan(charge.plans[DECODE], DECODE)
        of_params, of_cache = arguments(plan, "0"), arguments(plan, "1")
        # All graphs have these leaves, or rows of leaves, at the same paths and on the same stages.
        self._number = {leaf.path: number for number, leaf in enumerate((*of_params, *of_cache))}
        worker = self._worker(DECODE)
        meshes = worker.meshes
        places = _places(of_params, charge.read_at, worker)
        self._params, self._cache = list(places), [leaf.path for leaf in of_cache if leaf.stage in meshes]
        made = placed_parts(params, list(places.values()))
        del params  # before there are caches
        self._kept.update(zip(map(self._name, self._params), made, strict=True))
        self._graphs[DECODE] = self._graph_of(DECODE, worker)
        self._init_cache = part_creator(charge.init_cache, places_of(of_cache, meshes))
        self.reset()
        mesh = meshes.get(plan.outputs[0].stage)
        self._sampler = mesh and Sampler(mesh)

    def prefill(self, bucket: int, slot: int, length: int, prompt: np.ndarray, group: int, rows: Rows) -> Any:
        """A prompt into a slot of a group; the token after it, from the process that tells it."""
        given = np.int32(slot), padded(bucket, prompt), np.array([length], np.int32)
        return self._call(prefill_name(bucket), group, given, rows)

    def decode(self, tokens: np.ndarray, group: int, rows: Rows) -> Any:
        """The tokens after these, for all slots of a group, from the process that tells them."""
        return self._call(DECODE, group, (tokens,), rows)

    def _call(self, name: str, group: int, given: Sequence[Any], rows: Rows) -> Any:
        graph = self._graph(name)
        self._calls += 1
        graph.worker.step(
            StepOrder(
                number=self._calls,
                given={position: whole_tiles(x) for position, x in zip(graph.given, given, strict=True)},
                kept={position: self._name(path, group) for position, path in graph.kept.items()},
                names={0: _LOGITS} | {position: self._name(path, group) for position, path in graph.returned.items()},
            )
        )
        logits = self._kept.pop(_LOGITS, None)  # of the stage that makes them
        if logits is None or self._sampler is None:
            return None
        tokens = self._sampler.fetched(self._sampler(logits, rows))
        return tokens if graph.worker.site.process == 0 else None

    def _name(self, path: str, group: int = 0) -> int:
        """Of a leaf among what is kept; of the cache, that of a group. Parameters are in all groups the same."""
        return self._number[path] + (group * len(self._number) if path.startswith("1") else 0)

    def _graph(self, name: str) -> _Graph:
        if name not in self._graphs:
            self._graphs[name] = self._graph_of(name, self._worker(name))
        return self._graphs[name]

    def _worker(self, name: str) -> Worker:
        parcel = read_parcel(self._parcels[name])
        return Worker(parcel, self._site, self.transport, one_world=self._one_world, kept=self._kept)

    def _graph_of(self, name: str, worker: Worker) -> _Graph:
        plan, here = read_plan(self._plans[name], name), {*self._params, *self._cache}
        inputs = {position: leaf.path for position, leaf in enumerate(plan.inputs)}
        outputs = {position: leaf.path.removeprefix("out/") for position, leaf in enumerate(plan.outputs)}
        return _Graph(
            worker,
            kept={i: path for i, path in inputs.items() if path in here},
            returned={i: path for i, path in outputs.items() if i > 0},
            given=[i for i, path in inputs.items() if path not in self._number],
        )

    def reset(self) -> None:
        """Nothing is in any slot."""
        for group in range(self._num_groups):
            names = [self._name(path, group) for path in self._cache]
            for name in names:  # before there is a new one
                self._kept.pop(name, None)
            self._kept.update(zip(names, self._init_cache(), strict=True))

    def address(self) -> str:
        """Where the others get what this process makes for them."""
        return self.transport.address

    def digests(self) -> dict[str, int]:
        """Of parameters that a function made here, by path."""
        return self._digests

    def param_bytes(self) -> dict[int, int]:
        """Device -> bytes of the parameters there."""
        return device_bytes([self._kept[self._name(path)] for path in self._params])

    def progress(self) -> Progress:
        """Read by another thread."""
        doing = next((g.worker.doing for g in list(self._graphs.values()) if g.worker.doing != "waiting"), "serving")
        return Progress(steps=self._calls, calls=0, doing=doing)
