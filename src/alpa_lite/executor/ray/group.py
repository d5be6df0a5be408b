"""The actors of one step, and what the driver does when one of them is lost.

In: sites, what each is given to do, and settings. Out: calls that go to all actors at once, and either all answers or
``WorkerLost`` after every actor of the group was killed. A group is never mended: a new one is started.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, NoReturn

import msgspec
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, UnserializableException
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from alpa_lite.errors import AlpaLiteError, CheckpointError, ClusterError, WorkerLost, user_line
from alpa_lite.executor.parcel import Parcel
from alpa_lite.executor.ray.actor import WorkerActor
from alpa_lite.executor.ray.cluster import alive_nodes, bundles, check_room, connect
from alpa_lite.executor.ray.settings import RayExecutor
from alpa_lite.executor.sites import Site

_SEEN_S = 1.0
_TOGETHER_S = 0.002


class ActorGroup(ABC):
    """One actor per site, each in the ``jax.distributed`` world of its submesh. Subclasses say in ``_give`` what they do.

    Args:
        sites: of a plan.
        platform: "cpu" or "cuda".
        wide: whether values have 64 bits.
        settings: how they are started and watched.

    Raises:
        ClusterError: the cluster has no room for them.
        WorkerLost: one was lost while it started.

    Attributes:
        steps: that have ended.
        started: whether all processes are there; until then nobody need answer.
        lost: why the group is dead, "" while it lives.
    """

    _job = ""

    def __init__(self, sites: Sequence[Site], platform: str, wide: bool, settings: RayExecutor) -> None:
        self.sites, self.platform, self.wide, self.settings = sites, platform, wide, settings
        self.steps = 0
        self.started = False
        self.lost = ""
        self.actors: list[Any] = []
        self.hosts: list[str] = []
        self.group: PlacementGroup | None = None
        self._dropped: Callable[[], object] | None = None
        needed = bundles(self.sites, platform)
        self.local = connect(settings.address, int(sum(b["CPU"] for b in needed)))
        self._job = _job()
        check_room(needed)
        _remove_left(self.settings.name)
        try:
            self._place(needed)
            self._start()
            self._give()
        except BaseException:
            self.kill()
            raise

    def _place(self, needed: Sequence[dict[str, float]]) -> None:
        spread = len(alive_nodes()) >= len(needed) > 1
        name = f"{self.settings.name}/{_process()}/{uuid.uuid4()}" if self.settings.name else ""
        self.group = placement_group(list(needed), strategy="STRICT_SPREAD" if spread else "PACK", name=name)
        self._dropped = _removed_with(self, self.group)
        end = time.monotonic() + self.settings.start_timeout_s
        while not (there := self.group.wait(1)) and time.monotonic() < end:
            pass  # in turns: no signal comes through while Ray waits
        if not there:
            raise ClusterError(
                f"the Ray cluster did not give {len(needed)} hosts to this step within {self.settings.start_timeout_s:g} s: it "
                f"has {ray.available_resources()} free. Others may hold them, or this step itself, for other arguments. "
                f"At {user_line()}. Wait for them, close what is not needed, or plan for fewer devices."
            )
        order = sorted({site.host for site in self.sites})
        gpu = self.platform != "cpu"
        env = {"env_vars": dict(self.settings.env_vars)} if self.settings.env_vars else None
        for site in self.sites:
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=order.index(site.host)
            )
            count = len(site.devices)
            resources: dict[str, Any] = {"num_gpus": count, "num_cpus": 1} if gpu else {"num_cpus": count}
            actor: Any = WorkerActor
            options = actor.options(scheduling_strategy=strategy, **resources, **({"runtime_env": env} if env else {}))
            self.actors.append(options.remote())

    @abstractmethod
    def _give(self) -> None:
        """What the actors run, given to them once they are there."""

    def _start(self) -> None:
        limit = self.settings.start_timeout_s
        self.places = self.wait([actor.where.remote() for actor in self.actors], limit)
        self.started = True
        self.hosts = ["127.0.0.1" if self.local else host for host, _ in self.places]
        cache = self.settings.cache_folder
        worlds = self._worlds()
        each = zip(self.actors, self.sites, worlds, strict=True)
        self.wait(
            [a.setup.remote(self.platform, len(s.devices), self.wide, cache, world) for a, s, world in each], limit
        )

    @property
    def one_world(self) -> bool:
        """Whether all workers are one ``jax.distributed`` job."""
        return self.settings.transport == "device_put" and len(self.sites) > 1

    def _worlds(self) -> list[dict[str, Any] | None]:
        """Per site how it joins the processes of its submesh, or of all, if there are others."""
        limit = self.settings.start_timeout_s
        if self.one_world:
            hosts = self.hosts
            ports = self.wait([a.free_port.remote(host) for a, host in zip(self.actors, hosts, strict=True)], limit)
            world = self._world(
                f"{hosts[0]}:{self.wait([self.actors[0].free_port.remote(hosts[0])], limit)[0]}", len(self.sites)
            )
            sockets = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
            extra = [{"socket_address": s} if self.platform == "cpu" else {} for s in sockets]
            return [world | {"process_id": site.number} | more for site, more in zip(self.sites, extra, strict=True)]
        first = {site.submesh: site.number for site in reversed(self.sites)}
        shared = sorted({site.submesh for site in self.sites if site.num_processes > 1})
        starts = [first[submesh] for submesh in shared]
        ports = self.wait(
            [self.actors[k].free_port.remote(self.hosts[k]) for k in starts], self.settings.start_timeout_s
        )
        coordinators = {m: f"{self.hosts[k]}:{port}" for m, k, port in zip(shared, starts, ports, strict=True)}
        return [
            None
            if site.num_processes == 1
            else self._world(coordinators[site.submesh], site.num_processes) | {"process_id": site.process}
            for site in self.sites
        ]

    def _world(self, coordinator: str, count: int) -> dict[str, Any]:
        """Arguments of ``jax.distributed.initialize`` that are equal in all processes."""
        return {
            "coordinator_address": coordinator,
            "coordinator_bind_address": coordinator,  # JAX's own choice is every interface of the host
            "num_processes": count,
            "heartbeat_timeout_seconds": max(10, int(self.settings.hang_timeout_s)),
            "initialization_timeout": int(self.settings.start_timeout_s),
        }

    # -- calls --------------------------------------------------------------------------------------------------------

    def each(self, method: str, args_of: Callable[[Site], tuple[Any, ...] | None]) -> list[Any]:
        """A method of the workers, all at once; ``args_of`` says what each is given, None for one that is not asked."""
        self.check()
        refs = []
        with self.all_or_none(method, refs):
            for site, actor in zip(self.sites, self.actors, strict=True):
                args = args_of(site)
                if args is not None:
                    refs.append(actor.call.remote(method, *args))
        return self.wait(refs)

    @contextlib.contextmanager
    def all_or_none(self, method: str, asked: Sized) -> Iterator[None]:
        """Where only some workers were asked, the group is of no use: the next call would find them at different places."""
        try:
            yield
        except BaseException as error:
            if asked:
                self.kill(
                    f"only {len(asked)} of {len(self.actors)} workers were asked for {method!r}: {type(error).__name__}"
                )
            raise

    def check(self) -> None:
        if self.lost:
            raise WorkerLost(self.lost, self.steps)
        # Else the next call to Ray would start a cluster, with settings of its own, or ask one that knows no such actors.
        if not ray.is_initialized() or (self._job and self._job != _job()):
            self._ended(None)

    def _ended(self, cause: BaseException | None) -> NoReturn:
        raise ClusterError(
            f"Ray was ended in this process, by ray.shutdown() or because the process ends, and with it {len(self.sites)} "
            "workers. They need it. End what runs on them first, or start again."
        ) from cause

    def wait(self, refs: Sequence[Any], limit_s: float | None = None) -> list[Any]:
        """The answers, in order; while they take long, workers are asked whether they live.

        Raises:
            WorkerLost: one is lost; all were killed.
        """
        answers: dict[Any, Any] = {}
        try:
            self._collect(refs, answers, limit_s)
        except BaseException as error:
            told = isinstance(error, KeyboardInterrupt | ClusterError)
            if not told and not self.lost and not ray.is_initialized():
                self._ended(error)  # Ray's own wait then raises SystemExit, which a thread ends with in silence
            with contextlib.suppress(Exception):  # Ray prints errors that nobody has seen
                if ray.is_initialized() and (unseen := [ref for ref in refs if ref not in answers]):
                    for ref in ray.wait(unseen, num_returns=len(unseen), timeout=_SEEN_S)[0]:
                        with contextlib.suppress(Exception):
                            ray.get(ref)
            raise
        return [answers[ref] for ref in refs]

    def _collect(self, refs: Sequence[Any], answers: dict[Any, Any], limit_s: float | None) -> None:
        rest = list(refs)
        start = time.monotonic()
        watch = _Watch(self)
        while rest:
            ready, rest = ray.wait(rest, timeout=self.settings.heartbeat_s)
            self.check()  # Ray may have been ended meanwhile
            if ready and rest:  # workers of a step end nearly together: two calls for all instead of two for each
                more, rest = ray.wait(rest, num_returns=len(rest), timeout=_TOGETHER_S)
                ready += more
            answers.update(zip(ready, self._answers(ready), strict=True))
            if not ready:
                watch.look()
                if limit_s is not None and time.monotonic() - start > limit_s:
                    self._lose(f"{len(rest)} of {len(refs)} workers did not start within {limit_s:g} s")

    def _answers(self, refs: Sequence[Any]) -> list[Any]:
        try:
            return ray.get(list(refs))
        except RayError:  # it does not say whose
            return [self._answer(ref) for ref in refs]

    def _answer(self, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except RayTaskError as error:  # first: one that another actor's loss made is both
            cause = error.cause
            if isinstance(cause, CheckpointError):  # the workers are well: only nothing was saved or restored
                raise cause from None
            if isinstance(cause, AlpaLiteError):
                self.kill(f"a worker refused: {cause}")
                raise cause from None
            if isinstance(cause, UnserializableException):  # of another one, whose answer this one was given
                self._not_sent(cause)
            dead = self.dead()
            # Neither lost (nor another one's answer to this one), nor JAX's: a mistake in what was asked.
            if not dead and not isinstance(cause, RuntimeError | RayError):
                self.kill(f"a worker failed: {type(cause).__name__}: {cause}")
                raise cause from error  # which has the worker's traceback
            self._lose(f"{dead[0]} died" if dead else f"a worker failed: {_reason(cause)}")
        except RayActorError as error:
            self._lose(f"a worker died: {_reason(error)}")
        except UnserializableException as error:
            self._not_sent(error)
        except RayError as error:
            self._lose(f"a worker's answer was lost: {_reason(error)}")

    def _not_sent(self, error: UnserializableException) -> NoReturn:
        """A mistake in what was asked, told by an exception whose ``__init__`` takes other arguments than it passes on."""
        self.kill("a worker failed with an exception that cannot be sent")
        raise RuntimeError(f"a worker failed with an exception that cannot be sent: {error}") from None

    def dead(self) -> list[str]:
        """The workers that are no more."""
        self.check()
        pings = [actor.ping.remote() for actor in self.actors]
        answered, _ = ray.wait(pings, num_returns=len(pings), timeout=self.settings.heartbeat_s)
        found = []
        for site, ping in zip(self.sites, pings, strict=True):
            try:
                if ping in answered:
                    ray.get(ping)
            except RayError:
                found.append(describe(site))
        return found

    def _lose(self, what: str) -> NoReturn:
        position = self.steps
        text = (
            f"{what}. All workers of the step were stopped; {position} steps had ended. Their state is gone. Restore the newest "
            "checkpoint and go on from its position, or let al.fit do so."
        )
        self.kill(text)
        raise WorkerLost(text, position)

    def kill(self, why: str = "the step was closed") -> None:
        """Ends all actors and gives back what they held; never raises."""
        self.lost = self.lost or why
        if ray.is_initialized():
            for actor in self.actors:
                with contextlib.suppress(Exception):
                    ray.kill(actor, no_restart=True)
            if self.group is not None:
                with contextlib.suppress(Exception):
                    remove_placement_group(self.group)
        if self._dropped is not None:
            self._dropped()
        self.actors, self.group, self._dropped = [], None, None


class WorkerGroup(ActorGroup):
    """The actors of a planned step, loaded with its programs and connected; raises ``WorkerError`` where versions differ."""

    def __init__(self, parcel: Parcel, settings: RayExecutor) -> None:
        self.parcel = parcel
        super().__init__(parcel.sites, parcel.platform, parcel.wide, settings)

    def _give(self) -> None:
        data = ray.put(msgspec.msgpack.encode(self.parcel))
        sites = zip(self.actors, self.sites, self.hosts, strict=True)
        addresses = self.wait(
            [actor.load.remote(data, site.number, host, self.one_world) for actor, site, host in sites]
        )
        self.wait([actor.connect.remote(addresses) for actor in self.actors], self.settings.start_timeout_s)


class _Watch:
    """Asks workers how they are, over one wait."""

    def __init__(self, group: ActorGroup) -> None:
        self.group = group
        now = time.monotonic()
        self.asked: dict[int, Any] = {}
        self.heard = [now] * len(group.actors)
        self.moved = [now] * len(group.actors)
        self.last: list[Any] = [None] * len(group.actors)

    def look(self) -> None:
        """Take what was answered since the last look, ask again, and give up on those that were silent or idle for too long."""
        group, now = self.group, time.monotonic()
        for k, actor in enumerate(group.actors):
            ref = self.asked.get(k)
            if ref is not None and ray.wait([ref], timeout=0)[0]:
                try:
                    found = ray.get(ref)
                except RayError as error:
                    group._lose(f"{describe(group.sites[k])} died: {_reason(error)}")
                del self.asked[k]
                self.heard[k] = now
                if found != self.last[k]:
                    self.last[k], self.moved[k] = found, now
            if k not in self.asked:
                self.asked[k] = actor.ping.remote()
            if group.started and now - self.heard[k] > group.settings.hang_timeout_s:
                group._lose(f"{describe(group.sites[k])} has not answered for {now - self.heard[k]:.0f} s")
        idle = min(now - moved for moved in self.moved)
        if idle > group.settings.progress_timeout_s:
            doing = "; ".join(
                f"{describe(s)}: {last[2]}" for s, last in zip(group.sites, self.last, strict=True) if last
            )
            group._lose(f"no worker has gone on for {idle:.0f} s ({doing})")


def _removed_with(group: ActorGroup, placed: PlacementGroup) -> Callable[[], object]:
    """Ray keeps what a placement group holds even when all its actors are gone: it goes when ``group`` is dropped.

    The garbage collector may drop it at any moment, and must not call Ray then: it tells a thread, which waits for that.

    Returns:
        What does the same now, once.
    """
    dropped: queue.SimpleQueue[None] = queue.SimpleQueue()  # the one that may be put into from anywhere

    def remove() -> None:
        dropped.get()
        with contextlib.suppress(Exception):  # it is gone already
            if ray.is_initialized():
                remove_placement_group(placed)

    threading.Thread(target=remove, name="alpa_lite placement", daemon=True).start()
    finalizer = weakref.finalize(group, dropped.put, None)
    finalizer.atexit = False  # Ray ends it with the job
    return finalizer


def _job() -> str:
    """A name of this process's part in the cluster, which is another one whenever it joins one."""
    context = ray.get_runtime_context()
    return f"{context.get_node_id()}/{context.get_job_id()}"


def _process() -> str:
    """A name that no other process of the cluster has."""
    return ray.get_runtime_context().get_worker_id()


def _remove_left(name: str) -> None:
    """Takes away what another process left under a name: Ray keeps an actor's placement groups until its job ends."""
    for entry in placement_group_table().values() if name else ():
        left, _, process = entry["name"].rpartition("/")[0].rpartition("/")
        if left == name and process != _process() and entry["state"] != "REMOVED":
            with contextlib.suppress(ValueError):  # it is gone meanwhile
                remove_placement_group(get_placement_group(entry["name"]))


def describe(site: Site) -> str:
    """For messages: which worker."""
    stages = ", ".join(map(str, site.stages))
    return f"worker {site.number} (host {site.host}, stage{'s' * (len(site.stages) > 1)} {stages})"


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
