"""A model on the devices of several hosts: an actor of Ray per host runs the programs, the scheduler stays with the engine.

In: a model and plans of one mesh. The actors are one ``jax.distributed`` job. All are asked the same in the same order, and the
first one says which tokens came. When one is lost, all are ended: what was in a slot is gone, and new ones load the parameters.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray

from alpa_lite.api.bound import Trees
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.errors import EngineLost, ServeError, WorkerLost, user_line
from alpa_lite.executor.ray.group import ActorGroup
from alpa_lite.executor.ray.settings import RayExecutor
from alpa_lite.executor.sites import sites_of
from alpa_lite.executor.worker import Progress
from alpa_lite.plan.encode import encode_plan
from alpa_lite.plan.load import read_plan
from alpa_lite.plan.plan import Plan
from alpa_lite.serve.model_graphs import DECODE, Graph, Model, graphs
from alpa_lite.serve.programs import Programs, check_plans
from alpa_lite.serve.sampling import Rows
from alpa_lite.serve.stored import StoredParams, shapes_of
from alpa_lite.trace.paths import leaf_paths

_STARTS = 3  # of new actors, before the engine ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What every actor is given.

    Attributes:
        model, params: as for ``Engine``; arrays are on the host.
        plans: graph -> plan as in a plan file.
        sizes: slots, max_length and buckets.
    """

    model: Model
    params: Any
    plans: Mapping[str, bytes]
    sizes: Mapping[str, Any]


class HostPrograms:
    """The part of one actor: ``Programs`` on a mesh of which this process has some devices."""

    def __init__(self, process: int, charge: Charge) -> None:
        params = charge.params() if callable(charge.params) else charge.params
        self._digests = _digests(params) if callable(charge.params) else {}
        made = graphs(charge.model, shapes_of(params), **charge.sizes)
        plans = {name: replace(read_plan(data, name), trees=Trees()) for name, data in charge.plans.items()}
        self._programs = Programs(charge.model, params, made, plans, **charge.sizes)
        self._first, self._calls = process == 0, 0

    def run(self, method: str, *args: Any) -> Any:
        """A method of the programs; only the first process answers."""
        self._calls += 1
        found = getattr(self._programs, method)(*args)
        return found if self._first else None

    def digests(self) -> dict[str, int]:
        """Of parameters that a function made here, by path."""
        return self._digests

    def param_bytes(self) -> dict[int, int]:
        """Device -> bytes of the parameters there."""
        found: dict[int, int] = {}
        for leaf in jax.tree.leaves(self._programs.params):
            for shard in leaf.addressable_shards:
                found[shard.device.id] = found.get(shard.device.id, 0) + shard.data.nbytes
        return found

    def progress(self) -> Progress:
        """Read by another thread."""
        return Progress(steps=self._calls, calls=0, doing="serving")


def _digests(params: Any) -> dict[str, int]:
    return {path: zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).data) for path, leaf in leaf_paths(params, "")}


class ServingGroup(ActorGroup):
    """The actors of an engine, with programs and parameters."""

    def __init__(self, plan: Plan, charge: Charge, settings: RayExecutor) -> None:
        self._charge = charge
        platform = Cluster.parse(plan.identity.cluster).device.platform
        super().__init__(sites_of(plan), platform, jnp.result_type(float) == jnp.float64, settings)

    def _give(self) -> None:
        given = ray.put(self._charge)  # once, however many actors there are
        each = zip(self.actors, self.sites, strict=True)
        self.wait([actor.begin.remote(HostPrograms, site.process, given) for actor, site in each])
        first, *others = self.wait([actor.call.remote("digests") for actor in self.actors])
        for number, other in enumerate(others, 1):
            if other != first:
                path = next(path for path in first if first[path] != other.get(path))
                raise ServeError(
                    f"the function that makes the parameters made other values of {path!r} on host {number} than on host 0. All "
                    f"hosts need the same ones. At {user_line()}. Give it a fixed key, or give arrays or al.serve.StoredParams."
                )


class Hosts:
    """A ``Runner`` (see ``scheduler``) over actors; its methods are called by one thread at a time.

    Where no request comes for 5 s, actors are asked whether they live.

    Args:
        model: see ``model_graphs.Model``; it is pickled, as the actors are given it.
        params: arrays, a function that makes them, or ``StoredParams``, of which each host reads what its devices hold.
        graphs: of the model.
        plans: one per graph, of one mesh.
        settings: how actors are started and watched.

    Raises:
        ServeError: the plans are not for these graphs.
        ClusterError: the Ray cluster has no room.
    """

    check_s = 5.0

    def __init__(
        self,
        model: Model,
        params: Any,
        graphs: Mapping[str, Graph],
        plans: Mapping[str, Plan],
        settings: RayExecutor,
        *,
        slots: int,
        max_length: int,
        buckets: tuple[int, ...],
    ) -> None:
        check_plans(graphs, plans)
        if len(plans[DECODE].stages) > 1:
            raise ServeError(
                f"the plans have {len(plans[DECODE].stages)} stages. On several hosts an engine runs plans of one mesh. At "
                f"{user_line()}. Plan with PlanOptions(num_stages=1), or serve them on the devices of one process."
            )
        self.slots, self.buckets, self.plans = slots, buckets, plans
        self.vocab_size = plans[DECODE].outputs[0].value.shape[-1]
        self.params = graphs[DECODE][1][0]
        self._settings = settings
        self._charge = Charge(
            model=model,
            params=params if isinstance(params, StoredParams) or callable(params) else jax.device_get(params),
            plans={name: encode_plan(plans[name]) for name in graphs},
            sizes={"slots": slots, "max_length": max_length, "buckets": buckets},
        )
        self._group = self._started()

    def prefill(self, bucket: int, slot: int, prompt: np.ndarray, rows: Rows) -> int:
        """Puts a prompt into a slot; returns the token after it."""
        return self._ask("prefill", bucket, slot, prompt, rows)

    def decode(self, tokens: np.ndarray, rows: Rows) -> Sequence[int]:
        """The token after ``tokens`` (slots,), for all slots."""
        return self._ask("decode", tokens, rows)

    def reset(self) -> None:
        """Nothing is in any slot. Where an actor was lost there are new ones, with their programs compiled."""
        if not self._group.lost:
            try:
                return self._ask("reset")
            except EngineLost:
                pass
        for _ in range(_STARTS - 1):
            with contextlib.suppress(EngineLost, WorkerLost):  # what took an actor may take one that starts, too
                return self._start_again()
        return self._start_again()

    def _start_again(self) -> None:
        self._group = self._started()
        self._ask("warm_up")

    def check(self) -> None:
        """Finds actors that died when nothing was asked of them, so that no request need find them."""
        if not self._group.lost and (dead := self._group.dead()):
            self._group.kill(f"{dead[0]} died")
        self._lost_is_told(self._group.check)

    def warm_up(self) -> None:
        """Compiles every program by running it; nobody may be in a slot."""
        self._ask("warm_up")

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

    def _started(self) -> ServingGroup:
        return ServingGroup(self.plans[DECODE], self._charge, self._settings)

    def _ask(self, method: str, *args: Any) -> Any:
        return self._lost_is_told(lambda: self._group.each("run", lambda site: (method, *args))[0])

    def _lost_is_told(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except WorkerLost as error:
            raise EngineLost(
                f"an actor of the engine was lost, and with it what was in the slots: {str(error).split('. ')[0]}. New ones are "
                "started. Send the request again."
            ) from error
