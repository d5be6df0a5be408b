"""The planned graphs of a model on this process's devices: parameters once, one cache, programs compiled when first used.

All plans lay out parameters and cache in the same way, on one mesh or on the same stages, so both stay where they are whichever
program runs; what a call moves are its prompt, its slot and the tokens that come back.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from alpa_lite.api.bound import staged_for, traced_for
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.errors import LayerError, PlanFileError, ServeError, user_line
from alpa_lite.executor.local import local_mesh, runnable, stage_meshes
from alpa_lite.executor.pipeline import runnable_pipeline
from alpa_lite.executor.places import creator, places_of
from alpa_lite.executor.state_rows import whole_types
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Leaf, StagePlan
from alpa_lite.planner.options import PlanOptions
from alpa_lite.planner.plan_step import budget_bytes
from alpa_lite.serve.model_graphs import DECODE, Graph, Model, prefill_name
from alpa_lite.serve.sampling import Rows, Sampler, Sampling
from alpa_lite.serve.scheduler import Runner
from alpa_lite.serve.stored import from_host, placed
from alpa_lite.trace.program import Traced
from alpa_lite.units import format_bytes

_MOST_NUMBERS = 1024  # on the devices: slots, and lengths of prompts
_SHARED = ("parameter", "leaf of the cache")  # arguments 0 and 1 of all graphs


class Programs:
    """A ``Runner`` (see ``scheduler``); its methods are called by one thread at a time.

    Args:
        model: see ``model_graphs.Model``.
        params: arrays, on the host or on devices, or ``StoredParams``; those that already lie as planned are not copied.
        graphs: of the model.
        plans: one per graph.
        num_groups: caches, each of ``slots`` slots. Groups of slots are served in turn, which stages of a pipeline need.
        devices: of which the plans' mesh is made; None = those of this process.
        traced: what ``traced_graphs`` gives for them; None asks it.

    Raises:
        ServeError: the plans are not for these graphs.
    """

    check_s = None

    def __init__(
        self,
        model: Model,
        params: Any,
        graphs: Mapping[str, Graph],
        plans: Mapping[str, Plan],
        *,
        slots: int,
        max_length: int,
        buckets: tuple[int, ...],
        num_groups: int = 1,
        devices: Sequence[Any] | None = None,
        traced: Mapping[str, Traced] | None = None,
    ) -> None:
        check_plans(graphs, plans, num_groups)
        self.slots, self.buckets, self.plans = slots, buckets, plans
        self._graphs, self._traced = graphs, traced_graphs(graphs, plans) if traced is None else traced
        decode = plans[DECODE]
        self._devices, meshes = devices, stage_meshes(decode, devices)
        params_at, cache_at = (places_of(arguments(decode, number), meshes) for number in "01")
        self.params = placed(params, params_at)
        self._init_cache = creator(partial(model.init_cache, slots, max_length), cache_at)
        self.caches: list[Any] = [self._init_cache() for _ in range(num_groups)]
        self.given = {  # shardings of the other arguments
            name: [sharding for number in "234" for _, _, sharding in places_of(arguments(plans[name], number), meshes)]
            for name in graphs
        }
        self.sampler = Sampler(meshes[decode.outputs[0].stage])
        self._runs: dict[str, Any] = {}
        self._numbers: dict[tuple[str, int, int], jax.Array] = {}
        self.compile_s: dict[str, float] = {}  # per program, its first call

    @property
    def vocab_size(self) -> int:
        return vocab_size_of(self._graphs, self.plans)

    @property
    def cache(self) -> Any:
        """Of the first group."""
        return self.caches[0]

    # -- as a runner ---------------------------------------------------------------------------------------------------

    def prefill(self, bucket: int, slot: int, prompt: np.ndarray, rows: Rows) -> int:
        """Puts a prompt into a slot; returns the token after it."""
        return int(jax.device_get(self.sampler(self.prefill_logits(bucket, slot, prompt), rows))[0])

    def decode(self, tokens: np.ndarray, rows: Rows) -> Sequence[int]:
        """The token after ``tokens`` (slots,), for all slots."""
        return jax.device_get(self.sampler(self.decode_logits(tokens), rows)).tolist()

    def check(self) -> None:
        """Nothing can be lost but the whole process."""

    def reset(self) -> None:
        """New caches: the old ones may be gone with the call that failed."""
        for group in range(len(self.caches)):
            self.caches[group] = None
            self.caches[group] = self._init_cache()

    def warm_up(self) -> None:
        """Compiles every program by running it; nobody may be in a slot."""
        run_all(self)

    # -- logits --------------------------------------------------------------------------------------------------------

    def prefill_logits(self, bucket: int, slot: int, prompt: np.ndarray) -> jax.Array:
        """Puts a prompt into a slot; returns logits (1, vocabulary), which lie as planned."""
        return self.prefill_call(bucket, slot, prompt.size, padded(bucket, prompt))

    def decode_logits(self, tokens: np.ndarray) -> jax.Array:
        """One more token (slots,) for all slots; returns logits (slots, vocabulary), which lie as planned."""
        return self.decode_call(tokens)

    def prefill_call(self, bucket: int, slot: int, length: int, x: Any, group: int = 0) -> jax.Array:
        """A prompt, or what the stage before made of it, into a slot of a group."""
        name = prefill_name(bucket)
        given = self._number(name, 0, slot), self._put(x, self.given[name][1]), self._number(name, 2, length)
        return self._call(name, group, given)

    def decode_call(self, x: Any, group: int = 0) -> jax.Array:
        """Tokens, or what the stage before made of them, for all slots of a group."""
        return self._call(DECODE, group, (self._put(x, self.given[DECODE][0]),))

    def _put(self, x: Any, sharding: NamedSharding) -> Any:
        """What comes from the host is left to the jitted call, which is faster than putting it there before. All else is on the
        devices already."""
        if not isinstance(x, np.ndarray):
            return jax.device_put(x, sharding)
        return x if sharding.is_fully_addressable else from_host(x, sharding)

    def _number(self, name: str, position: int, value: int) -> jax.Array:
        """A slot or a length on all devices, put there once, as each put takes tens of microseconds; of many the last ones."""
        key = name, position, value
        if key not in self._numbers:
            if len(self._numbers) >= _MOST_NUMBERS:
                del self._numbers[next(iter(self._numbers))]
            shape = self._graphs[name][1][2 + position].shape
            self._numbers[key] = from_host(np.full(shape, value, np.int32), self.given[name][position])
        return self._numbers[key]

    def _call(self, name: str, group: int, given: tuple[Any, ...]) -> jax.Array:
        if name in self.compile_s:
            found, self.caches[group] = self._runs[name](self.params, self.caches[group], *given)
            return found
        start_s = time.perf_counter()
        called = self.run(name)(self.params, self.caches[group], *given)
        found, self.caches[group] = jax.block_until_ready(called)
        self.compile_s[name] = time.perf_counter() - start_s
        return found

    def run(self, name: str) -> Any:
        """The jitted function of a graph: (parameters, cache, ...) -> (logits, cache). It takes the cache that it is given."""
        if name not in self._runs:
            self._runs[name] = self._lowered(name)
        return self._runs[name]

    def _lowered(self, name: str) -> Any:
        plan, traced = self.plans[name], self._traced[name]
        if plan.pipeline is None:
            return runnable(traced, plan, (1,), local_mesh(plan.mesh, self._devices)).run
        return runnable_pipeline(traced, staged_for(plan, traced), plan, self._devices or jax.devices()).run


def padded(bucket: int, prompt: np.ndarray) -> np.ndarray:
    """A prompt (1, bucket), in memory of its own: it is read until the call's result is there."""
    made = np.zeros((1, bucket), np.int32)
    made[0, : prompt.size] = prompt
    return made


def run_all(runner: Runner, reset: Callable[[], None] | None = None) -> None:
    """Every program once, greedy and drawing, so that all are compiled; nobody may be in a slot. ``reset``: the runner's own."""
    for draws in (Sampling(), Sampling(1.0)):
        rows = Rows.greedy(runner.slots)
        rows.set(0, draws)
        for bucket in runner.buckets:
            runner.prefill(bucket, 0, np.zeros(bucket, np.int32), rows.row(0))
        runner.decode(np.zeros(runner.slots, np.int32), rows)
    (reset or runner.reset)()


def check_plans(graphs: Mapping[str, Graph], plans: Mapping[str, Plan], num_groups: int = 1) -> None:
    """That there is a plan for each graph, that all put parameters and cache in one place, and that there is memory for the
    caches of all groups of slots, of which plans count one.

    Raises:
        ServeError: it is not so; the message names the graph and the leaf.
    """
    check_types(graphs, plans)
    first = plans[DECODE]
    lies = {leaf.path: (leaf.spec, first.stages[leaf.stage]) for leaf in first.inputs}
    for name in graphs:
        plan = plans[name]
        for leaf in (*arguments(plan, "0"), *arguments(plan, "1")):
            stage = plan.stages[leaf.stage]
            spec, other = lies.get(leaf.path, (None, stage))
            if (leaf.spec, stage.mesh, stage.first_device) != (spec, other.mesh, other.first_device):
                raise ServeError(
                    f"the {_SHARED[int(leaf.path[0])]} {leaf.path!r} lies as {leaf.spec} on {_place(stage)} for {name!r} and "
                    f"{'in other rows' if spec is None else f'as {spec} on {_place(other)}'} for {DECODE!r}. All graphs must "
                    f"have it in one layout, or it would be moved between them. At {user_line()}. Plan them together: "
                    'al.plan_shared(graphs, shared=("0", "1"), ...).'
                )
        _check_returned(name, plan)
        tokens, others = (p.stages[p.outputs[0].stage] for p in (plan, first))
        if (tokens.mesh, tokens.first_device) != (others.mesh, others.first_device):
            raise ServeError(
                f"the logits of {name!r} are made on {_place(tokens)}, those of {DECODE!r} on {_place(others)}. Tokens are drawn "
                f"from all logits in one place. At {user_line()}. Make them from the same parameters in all graphs, or give "
                "al.PlanOptions(num_stages=1)."
            )
    if num_groups > 1:
        _check_caches({name: plans[name] for name in graphs}, num_groups)


def _check_returned(name: str, plan: Plan) -> None:
    """That a call gives the cache back where the next one takes it."""
    taken = {leaf.path: (leaf.spec, leaf.stage) for leaf in arguments(plan, "1")}
    for leaf in plan.outputs:
        path = leaf.path.removeprefix("out/")
        spec, number = taken.get(path, (leaf.spec, leaf.stage))
        if (leaf.spec, leaf.stage) != (spec, number):
            raise ServeError(
                f"{name!r} takes the leaf of the cache {path!r} as {spec} on {_place(plan.stages[number])}, and returns it as "
                f"{leaf.spec} on {_place(plan.stages[leaf.stage])}. It must be returned where it was, or each call would move "
                f"it. At {user_line()}. Plan with donate_argnums=1, and pin {leaf.path!r} as {path!r} is, or not at all."
            )


def vocab_size_of(graphs: Mapping[str, Graph], plans: Mapping[str, Plan]) -> int:
    """Of the logits that all graphs of a model, or of its last part, return.

    Raises:
        ServeError: they are no logits, or of different vocabularies.
    """
    logits = {name: plans[name].outputs[0].value for name in graphs}
    size = logits[DECODE].shape[-1]
    for name, value in logits.items():
        fits = len(value.shape) == 2 and 0 < size == value.shape[-1]
        if not fits or not jnp.issubdtype(value.dtype, jnp.floating):
            positions = ", of the last token of each prompt alone" if len(value.shape) == 3 else ""
            both = f", and {DECODE!r} returns {logits[DECODE]}. Both" if name != DECODE else ". It"
            raise ServeError(
                f"{name!r} returns {value}{both} must be logits: floating-point numbers of shape (slots, "
                f"vocabulary){positions}, of one vocabulary{'' if size else ', which is not empty'}. At {user_line()}. Correct "
                "the model; see al.serve.Model."
            )
    return size


def check_types(graphs: Mapping[str, Graph], plans: Mapping[str, Plan]) -> None:
    """That there is a plan for each graph, of its arguments.

    Raises:
        ServeError: it is not so; the message names the graph and the leaf.
    """
    if missing := [name for name in graphs if name not in plans]:
        raise ServeError(
            f"the layout has no plan for {', '.join(map(repr, missing))}; it has {', '.join(map(repr, plans))}. An engine needs "
            f"one for each of its graphs. At {user_line()}. Plan the graphs of al.serve.graphs(...), with the same buckets."
        )
    for name, (_, args) in graphs.items():
        plan = plans[name]
        given = [(tuple(x.shape), str(x.dtype)) for x in jax.tree_util.tree_leaves(args)]
        whole = whole_types(plan.inputs)
        planned = list(whole.values())
        if given != planned:
            pairs = zip(whole, given, planned, strict=False)
            path, *types = next((p for p in pairs if p[1] != p[2]), ("", len(given), len(planned)))
            what = (
                f"the leaf {path!r} is {types[1]} there and {types[0]} here"
                if path
                else f"{types[1]} leaves, not {types[0]}"
            )
            raise ServeError(
                f"the layout is of another model or other sizes: in its plan of {name!r} {what}. Parameters, slots, max_length "
                f"and buckets must be those that were planned. At {user_line()}. Plan the graphs of this model."
            )


def traced_graphs(graphs: Mapping[str, Graph], plans: Mapping[str, Plan]) -> dict[str, Traced]:
    """The graphs as they are run, each checked to be what its plan was made of: shapes alone do not tell models apart.

    Raises:
        ServeError: one is another function; the message says where it differs.
    """
    found = {}
    for name, (fn, args) in graphs.items():
        try:
            found[name] = traced_for(plans[name], fn, args, {})
        except (LayerError, PlanFileError) as error:
            other = "it has other layers" if isinstance(error, LayerError) else str(error).split(". ")[0]
            raise ServeError(
                f"the layout is of another model, as its plan of {name!r} shows: {other}. An engine runs exactly the functions "
                f"that were planned. At {user_line()}. Plan the graphs of this model: al.serve.graphs(model, params, ...)."
            ) from error
    return found


def arguments(plan: Plan, number: str) -> list[Leaf]:
    """The leaves, or rows of leaves, of an argument."""
    return [leaf for leaf in plan.inputs if re.split(r"[/\[]", leaf.path, maxsplit=1)[0] == number]


def _place(stage: StagePlan) -> str:
    return f"{stage.mesh}{f' from device {stage.first_device}' if stage.first_device else ''}"


def _check_caches(plans: Mapping[str, Plan], num_groups: int) -> None:
    for name, plan in plans.items():
        given = dict(plan.options).get("memory_budget_bytes")
        options = PlanOptions(memory_budget_bytes=given if isinstance(given, (int, float)) else None)
        budget = budget_bytes(Cluster.parse(plan.identity.cluster), options)
        for number, stage in enumerate(plan.stages):
            own = [leaf for leaf in arguments(plan, "1") if leaf.stage == number]
            one = sum(
                math.prod(leaf.spec.local_shape(leaf.value.shape, stage.mesh)) * leaf.value.itemsize for leaf in own
            )
            if stage.memory.peak + (num_groups - 1) * one > budget:
                raise ServeError(
                    f"{name!r} needs {format_bytes(stage.memory.peak)} per device of {_place(stage)} with the cache of one of "
                    f"{num_groups} groups of slots, {format_bytes(one)}, and {format_bytes((num_groups - 1) * one)} for the "
                    f"others; the budget is {format_bytes(budget)}. At {user_line()}. Take fewer slots or a shorter max_length, "
                    "or more devices."
                )
