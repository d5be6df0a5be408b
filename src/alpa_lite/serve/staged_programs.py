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
from alpa_lite.executor.parcel import read_parcel
from alpa_lite.executor.places import part_creator, places_of
from alpa_lite.executor.transport import PullTransport
from alpa_lite.executor.worker import Progress, StepOrder, Worker
from alpa_lite.plan.load import read_plan
from alpa_lite.serve.model_graphs import DECODE, prefill_name
from alpa_lite.serve.programs import arguments, padded
from alpa_lite.serve.sampling import Rows, Sampler
from alpa_lite.serve.stored import device_bytes, digests, placed_parts

_LOGITS = -1  # their name among what an actor keeps, until the next tokens are drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedCharge:
    """What every actor is given.

    Attributes:
        init_cache: makes the cache of one group of slots.
        params: as for ``Hosts``; arrays are on the host.
        plans: graph -> plan as in a plan file.
        parcels: graph -> what of it is run.
        num_groups: of slots.
    """

    init_cache: Callable[[], Any]
    params: Any
    plans: Mapping[str, bytes]
    parcels: Mapping[str, bytes]
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
        self._charge, self._site, self._one_world, self._calls = charge, site, one_world, 0
        self._kept: dict[int, Any] = {}
        self._graphs: dict[str, _Graph] = {}
        params = charge.params() if callable(charge.params) else charge.params
        self._digests = digests(params) if callable(charge.params) else {}
        plan = read_plan(charge.plans[DECODE], DECODE)
        of_params, of_cache = arguments(plan, "0"), arguments(plan, "1")
        # All graphs have these leaves, or rows of leaves, at the same paths and on the same stages.
        self._number = {leaf.path: number for number, leaf in enumerate((*of_params, *of_cache))}
        meshes = self._graph(DECODE).worker.meshes
        self._params, self._cache = (
            [leaf.path for leaf in own if leaf.stage in meshes] for own in (of_params, of_cache)
        )
        made = placed_parts(params, places_of(of_params, meshes))
        self._kept.update(zip(map(self._name, self._params), made, strict=True))
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
            charge, plan = self._charge, read_plan(self._charge.plans[name], name)
            parcel = read_parcel(charge.parcels[name])
            worker = Worker(parcel, self._site, self.transport, one_world=self._one_world, kept=self._kept)
            inputs = {position: leaf.path for position, leaf in enumerate(plan.inputs)}
            outputs = {position: leaf.path.removeprefix("out/") for position, leaf in enumerate(plan.outputs)}
            self._graphs[name] = _Graph(
                worker,
                kept={
                    i: path
                    for i, path in inputs.items()
                    if path in self._number and plan.inputs[i].stage in worker.meshes
                },
                returned={i: path for i, path in outputs.items() if i > 0},
                given=[i for i, path in inputs.items() if path not in self._number],
            )
        return self._graphs[name]

    def reset(self) -> None:
        """Nothing is in any slot."""
        for group in range(self._charge.num_groups):
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
