"""A model on the devices of several hosts: an actor of Ray per stage and host runs the programs, the scheduler stays here.

In: a model and plans of one mesh, or of one mesh per stage that the model was cut into, or plans that have stages. The actors of
a stage are one ``jax.distributed`` job. All are asked the same in the same order, and one answers. What one part of a model
makes goes to the actors of the next as an object of Ray; planned stages send each other what their plans say
(``serve/staged_programs.py``). Stages work on different groups of slots at the same time (``serve/pipeline.py``). When an actor
is lost, all are ended: what was in a slot is gone, and new ones load the parameters.
"""

from __future__ import annotations

import contextlib
import pickle
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import ray

from alpa_lite.api.bound import Trees, staged_for
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.errors import CheckpointError, EngineLost, ServeError, WorkerLost, user_line
from alpa_lite.executor.parcel import make_parcel
from alpa_lite.executor.ray.actor import Later
from alpa_lite.executor.ray.group import ActorGroup, describe
from alpa_lite.executor.ray.settings import RayExecutor
from alpa_lite.executor.sites import Site, sites_of
from alpa_lite.executor.worker import Progress
from alpa_lite.plan.encode import encode_plan
from alpa_lite.plan.load import read_plan
from alpa_lite.plan.plan import Plan
from alpa_lite.serve.model_graphs import DECODE, Model, graphs
from alpa_lite.serve.pipeline import Part, in_turns
from alpa_lite.serve.programs import Programs, check_plans, padded, run_all, traced_graphs, vocab_size_of
from alpa_lite.serve.sampling import Rows
from alpa_lite.serve.staged_programs import StagedCharge, StagedPrograms, placed_at
from alpa_lite.serve.stored import StoredParams, device_bytes, is_maker, made_here
from alpa_lite.trace.program import Traced

_STARTS = 3  # of new actors, before the engine ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What the actors of a stage are given.

    Attributes:
        model, params, given: of the ``Part``; arrays are on the host.
        plans: graph -> plan as in a plan file.
        sizes: slots of a group, max_length and buckets.
        num_groups: of slots.
    """

    model: Model
    params: Any
    given: Mapping[str, Any] | None
    plans: Mapping[str, bytes]
    sizes: Mapping[str, Any]
    num_groups: int


class HostPrograms:
    """The part of one actor: ``Programs`` on a mesh of which this process has some devices. Only the first process answers."""

    def __init__(self, process: int, charge: Charge) -> None:
        params, self._digests = made_here(charge.params)
        made = graphs(charge.model, params, **charge.sizes, given=charge.given)
        plans = {name: replace(read_plan(data, name), trees=Trees()) for name, data in charge.plans.items()}
        self._programs = Programs(charge.model, params, made, plans, **charge.sizes, num_groups=charge.num_groups)
        self._takes_prompts, self._first, self._calls = charge.given is None, process == 0, 0

    def prefill(self, bucket: int, slot: int, length: int, x: np.ndarray, group: int, rows: Rows | None) -> Any:
        """A prompt, or what the stage before made of it, into a slot of a group; ``rows``: of the last stage, which samples."""
        if self._takes_prompts:
            x = padded(bucket, x)
        return self._answer(self._programs.prefill_call(bucket, slot, length, x, group), rows)

    def decode(self, x: np.ndarray, group: int, rows: Rows | None) -> Any:
        """Tokens, or what the stage before made of them, for all slots of a group."""
        return self._answer(self._programs.decode_call(x, group), rows)

    def _answer(self, made: jax.Array, rows: Rows | None) -> Any:
        self._calls += 1
        sampler = self._programs.sampler
        found = sampler.fetched(made if rows is None else sampler(made, rows))
        return found if self._first else None

    def reset(self) -> None:
        """Nothing is in any slot."""
        self._programs.reset()

    def digests(self) -> dict[str, int]:
        """Of parameters that a function made here, by path."""
        return self._digests

    def param_bytes(self) -> dict[int, int]:
        """Device -> bytes of the parameters there."""
        return device_bytes(jax.tree.leaves(self._programs.params))

    def progress(self) -> Progress:
        """Read by another thread."""
        return Progress(steps=self._calls, calls=0, doing="serving")


class ServingGroup(ActorGroup):
    """The actors of an engine, with programs and parameters."""

    def __init__(self, sites: Sequence[Site], plan: Plan, settings: RayExecutor) -> None:
        self._sent: list[Any] = []
        platform = Cluster.parse(plan.identity.cluster).device.platform
        super().__init__(sites, platform, jnp.result_type(float) == jnp.float64, settings)

    @abstractmethod
    def send(self, stage: int, method: str, *args: Any) -> Any:
        """Asks the actors of a part of the model, and waits for nothing; the answer of the one that tells it, to be given to
        others or to ``received``."""

    def _asked(self, sites: Sequence[Site], teller: int, method: str, args: Sequence[Any]) -> Any:
        self.check()
        args = [Later(x) if isinstance(x, ray.ObjectRef) else x for x in args]
        answers: dict[int, Any] = {}
        with self.all_or_none(method, answers):
            for site in sites:
                answers[site.number] = self.actors[site.number].call.remote(method, *args)
        told = answers.pop(teller)
        self._sent += answers.values()
        return told

    def _check_alike(self, first_of: Callable[[Site], int]) -> None:
        """That a function made the same parameters in each process as in the first of those that have the same."""
        found = self.wait([actor.call.remote("digests") for actor in self.actors])
        for site, other in zip(self.sites, found, strict=True):
            first = found[first_of(site)]
            if other != first:
                path = next(path for path in {**first, **other} if first.get(path) != other.get(path))
                raise ServeError(
                    f"the function that makes the parameters made other values of {path!r} in {describe(site)} than in "
                    f"{describe(self.sites[first_of(site)])}. All need the same ones. At {user_line()}. Give it a fixed key, or "
                    "give arrays or al.serve.StoredParams."
                )

    def received(self, answers: Sequence[Any]) -> list[Any]:
        """What was sent for, when all have done their part of it."""
        sent, self._sent = self._sent, []
        return self.wait([*answers, *sent])[: len(answers)]


class PartGroup(ServingGroup):
    """Of a model in parts, each on actors of its own; ``charges``: per part."""

    def __init__(self, plans: Sequence[Plan], charges: Sequence[Charge], settings: RayExecutor) -> None:
        self._charges = charges
        super().__init__(_sites(plans), plans[0], settings)

    def _give(self) -> None:
        given = [_put(charge) for charge in self._charges]  # once, however many actors there are
        each = zip(self.actors, self.sites, strict=True)
        self.wait([actor.begin.remote(HostPrograms, site.process, given[site.submesh]) for actor, site in each])
        self._check_alike(lambda site: site.number - site.process)

    def send(self, stage: int, method: str, *args: Any) -> Any:
        own = [site for site in self.sites if site.submesh == stage]
        return self._asked(own, own[0].number, method, args)


class StagedGroup(ServingGroup):
    """Of plans that have stages; those of one graph lie where those of the others do."""

    def __init__(self, plan: Plan, charge: StagedCharge, settings: RayExecutor) -> None:
        self._charge = charge
        sites = sites_of(plan)
        self._teller = next(site.number for site in sites if plan.outputs[0].stage in site.stages)  # it has the logits
        super().__init__(sites, plan, settings)

    def _give(self) -> None:
        given = _put(self._charge)
        each = zip(self.actors, self.sites, self.hosts, strict=True)
        begun = [actor.begin.remote(StagedPrograms, given, s.number, host, self.one_world) for actor, s, host in each]
        self.wait(begun)
        addresses = self.wait([actor.call.remote("address") for actor in self.actors])
        self.wait([actor.connect.remote(addresses) for actor in self.actors], self.settings.start_timeout_s)
        self._check_alike(lambda site: 0)

    def send(self, stage: int, method: str, *args: Any) -> Any:
        return self._asked(self.sites, self._teller, method, args)


def _put(charge: Charge | StagedCharge) -> Any:
    """Where actors find it.

    Raises:
        ServeError: the model, or the function that makes the parameters, cannot be sent.
    """
    try:
        return ray.put(charge)
    except (
        TypeError,
        AttributeError,
        ValueError,  # of pointers
        RecursionError,
        pickle.PicklingError,
    ) as error:  # Ray's have in their text all that it tried to send
        cause = (
            error.__cause__ or error.__context__ or (error if not isinstance(error, TypeError) else "of an attribute")
        )
        raise ServeError(
            f"the model, or the function that makes its parameters, cannot be sent to the actors: {cause!s:.200}. They are "
            f"pickled: of a model that is its class by name and its attributes. At {user_line()}. Define both in a module, and "
            "keep locks, files and devices out of their attributes."
        ) from None


def _sites(plans: Sequence[Plan]) -> tuple[Site, ...]:
    """Of plans that lie side by side, each on hosts of its own (of which Ray may put several on a node that has room)."""
    sites: list[Site] = []
    hosts = 0
    for submesh, plan in enumerate(plans):
        first = len(sites)
        own = sites_of(plan)
        sites += [
            replace(site, number=first + site.number, submesh=submesh, stages=(submesh,), host=hosts + site.host)
            for site in own
        ]
        hosts += Cluster.parse(plan.identity.cluster).num_hosts
    return tuple(sites)


class Hosts:
    """A ``Runner`` (see ``scheduler``) over actors; its methods are called by one thread at a time.

    Where no request comes for 5 s, actors are asked whether they live.

    Args:
        parts: of the model, each with plans of one mesh; or one, whose plans have stages. Models are pickled, as the actors are
            given them. Of ``StoredParams`` each host reads what its devices hold.
        settings: how actors are started and watched.
        slots: of a group.
        num_groups: of slots.

    Raises:
        ServeError: the plans are not for these graphs.
        ClusterError: the Ray cluster has no room.
    """

    check_s = 5.0

    def __init__(
        self,
        parts: Sequence[Part],
        settings: RayExecutor,
        *,
        slots: int,
        max_length: int,
        buckets: tuple[int, ...],
        num_groups: int,
    ) -> None:
        traced = []  # before actors, which trace them again
        for part in parts:
            check_plans(part.graphs, part.plans, num_groups)
            traced.append(traced_graphs(part.graphs, part.plans) if part.traced is None else part.traced)
        self.parts, self.buckets, self.num_groups, self.per_group = parts, buckets, num_groups, slots
        self.slots = num_groups * slots
        self.vocab_size = vocab_size_of(parts[-1].graphs, parts[-1].plans)
        sizes = {"slots": slots, "max_length": max_length, "buckets": buckets}
        self._start = _starter(parts, traced, settings, sizes, num_groups)
        self._group = self._start()

    @property
    def plans(self) -> dict[str, Plan]:
        """By graph; of a model in several parts by part and graph, "0/decode"."""
        if len(self.parts) == 1:
            return dict(self.parts[0].plans)
        return {f"{k}/{name}": plan for k, part in enumerate(self.parts) for name, plan in part.plans.items()}

    @property
    def params(self) -> Any:
        """Shapes alone; of several parts one tree each."""
        shapes = tuple(part.graphs[DECODE][1][0] for part in self.parts)
        return shapes[0] if len(shapes) == 1 else shapes

    def prefill(self, bucket: int, slot: int, prompt: np.ndarray, rows: Rows) -> int:
        """Puts a prompt into a slot; returns the token after it."""
        group, own = divmod(slot, self.per_group)

        def through() -> np.ndarray:
            x: Any = prompt
            for stage in range(len(self.parts)):
                x = self._group.send(stage, "prefill", bucket, own, prompt.size, x, group, self._rows(stage, rows))
            return self._group.received([x])[0]

        return int(self._lost_is_told(through)[0])

    def decode(self, tokens: np.ndarray, rows: Rows) -> Sequence[int]:
        """The token after ``tokens`` (slots,), for all slots."""
        n = self.per_group

        def step(stage: int, group: int, x: Any) -> Any:
            own = Rows(*(column[group * n : (group + 1) * n] for column in rows))
            return self._group.send(stage, "decode", x, group, self._rows(stage, own))

        def through() -> list[np.ndarray]:
            return self._group.received(in_turns(list(tokens.reshape(self.num_groups, n)), len(self.parts), step))

        return np.concatenate(self._lost_is_told(through)).tolist()

    def _rows(self, stage: int, rows: Rows) -> Rows | None:
        """For the last stage, which samples."""
        return rows if stage == len(self.parts) - 1 else None

    def reset(self) -> None:
        """Nothing is in any slot. Where an actor was lost there are new ones, with their programs compiled."""
        if not self._group.lost:
            try:
                self._empty()
                return
            except EngineLost:
                pass
        for _ in range(_STARTS - 1):
            # What took an actor may take one that starts, too; and a checkpoint may be removed while they start.
            with contextlib.suppress(EngineLost, WorkerLost, CheckpointError):
                self._start_again()
                return
        self._start_again()

    def _start_again(self) -> None:
        self._group = self._start()
        run_all(self, self._empty)  # not ``reset``, which would start again by itself

    def _empty(self) -> None:
        self._lost_is_told(lambda: self._group.each("reset", lambda site: ()))

    def check(self) -> None:
        """Finds actors that died when nothing was asked of them, so that no request need find them."""
        if not self._group.lost and (dead := self._group.dead()):
            self._group.kill(f"{dead[0]} died")
        self._lost_is_told(self._group.check)

    def warm_up(self) -> None:
        """Compiles every program by running it; nobody may be in a slot."""
        run_all(self)

    def close(self) -> None:
        """Ends the actors."""
        self._group.kill("the engine was closed")

    def param_bytes(self) -> list[dict[int, int]]:
        """Per actor: device -> bytes of the parameters there."""
        return self._group.each("param_bytes", lambda site: ())

    @property
    def places(self) -> list[tuple[str, int]]:
        """(host, process id) of every actor."""
        return list(self._group.places)

    def _lost_is_told(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except WorkerLost as error:
            raise EngineLost(
                f"an actor of the engine was lost, and with it what was in the slots: {str(error).split('. ')[0]}. New ones are "
                "started. Send the request again."
            ) from error


def _sent_params(part: Part) -> Any:
    """As actors are given them: arrays are on the host."""
    stays = isinstance(part.params, StoredParams) or is_maker(part.params)
    return part.params if stays else jax.device_get(part.params)


def _settled(charges: Sequence[Any]) -> list[Any]:
    """With parameters of one checkpoint for all actors, also where a newer one is written while they start."""
    places = [charge.params.found().place for charge in charges[:1] if isinstance(charge.params, StoredParams)]
    return [replace(c, params=replace(c.params, place=places[0])) for c in charges] if places else list(charges)


def _sent_plans(part: Part) -> dict[str, bytes]:
    return {name: encode_plan(part.plans[name]) for name in part.graphs}


def _starter(
    parts: Sequence[Part],
    traced: Sequence[Mapping[str, Traced]],
    settings: RayExecutor,
    sizes: Mapping[str, Any],
    num_groups: int,
) -> Callable[[], ServingGroup]:
    """What starts the actors, at first and again; they are given the same."""
    plans = [part.plans[DECODE] for part in parts]
    if len(plans[0].stages) > 1:
        part = parts[0]
        init_cache = partial(part.model.init_cache, sizes["slots"], sizes["max_length"])
        own_graphs = [(name, part.plans[name], own) for name, own in traced[0].items()]
        parcels = {name: make_parcel(plan, own, staged_for(plan, own)) for name, plan, own in own_graphs}
        read_at: dict[str, dict[int, str]] = {}
        for name, parcel in parcels.items():
            for path, layouts in placed_at(part.plans[name], parcel).items():
                read_at.setdefault(path, {}).update(layouts)
        charge = StagedCharge(
            init_cache=init_cache,
            params=_sent_params(part),
            plans=_sent_plans(part),
            parcels={name: msgspec.msgpack.encode(parcel) for name, parcel in parcels.items()},
            read_at=read_at,
            num_groups=num_groups,
        )
        return lambda: StagedGroup(plans[0], _settled([charge])[0], settings)
    charges = [
        Charge(
            model=part.model,
            params=_sent_params(part),
            given=part.given,
            plans=_sent_plans(part),
            sizes=sizes,
            num_groups=num_groups,
        )
        for part in parts
    ]
    return lambda: PartGroup(plans, _settled(charges), settings)
