"""The planned graphs of a model on this process's devices: parameters once, one cache, programs compiled when first used.

All plans lay out parameters and cache in the same way, so both stay where they are whichever program runs; what a call moves are
its prompt, its slot and the tokens that come back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite.api.bound import traced_for
from alpa_lite.errors import ServeError, user_line
from alpa_lite.executor.local import local_mesh, runnable
from alpa_lite.lowering.lower import partition_spec
from alpa_lite.plan.plan import Plan
from alpa_lite.serve.model_graphs import DECODE, Graph, Model, prefill_name
from alpa_lite.serve.sampling import Rows, Sampling, sample
from alpa_lite.serve.stored import placed

_SHARED = ("parameter", "leaf of the cache")  # arguments 0 and 1 of all graphs


class Programs:
    """A ``Runner`` (see ``scheduler``); its methods are called by one thread at a time.

    Args:
        model: see ``model_graphs.Model``.
        params: arrays, on the host or on devices, or ``StoredParams``; those that already lie as planned are not copied.
        graphs: of the model.
        plans: one per graph.

    Raises:
        ServeError: the plans are not for these graphs.
    """

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
    ) -> None:
        check_plans(graphs, plans)
        self.slots, self.buckets, self.plans = slots, buckets, plans
        self._graphs = graphs
        decode = plans[DECODE]
        self._mesh = local_mesh(decode.mesh)
        layouts = [NamedSharding(self._mesh, partition_spec(leaf.spec)) for leaf in decode.inputs]
        trees = [jax.tree_util.tree_structure(argument) for argument in graphs[DECODE][1][:2]]
        own, cache = layouts[: trees[0].num_leaves], layouts[trees[0].num_leaves : -1]
        self.params = placed(params, jax.tree_util.tree_unflatten(trees[0], own))
        shardings = jax.tree_util.tree_unflatten(trees[1], cache)
        self._init_cache = jax.jit(partial(model.init_cache, slots, max_length), out_shardings=shardings)
        self.cache = self._init_cache()
        whole = NamedSharding(self._mesh, PartitionSpec())
        self._sample = jax.jit(sample, out_shardings=whole)
        self._put = partial(jax.device_put, device=whole)
        self._runs: dict[str, Any] = {}
        self._prompts = {bucket: np.zeros((1, bucket), np.int32) for bucket in buckets}
        self._numbers: dict[tuple[int, tuple[int, ...]], jax.Array] = {}
        self.compile_s: dict[str, float] = {}  # per program, its first call

    # -- as a runner ---------------------------------------------------------------------------------------------------

    def prefill(self, bucket: int, slot: int, prompt: np.ndarray, rows: Rows) -> int:
        """Puts a prompt into a slot; returns the token after it."""
        return int(self._tokens(self.prefill_logits(bucket, slot, prompt), rows)[0])

    def decode(self, tokens: np.ndarray, rows: Rows) -> Sequence[int]:
        """The token after ``tokens`` (slots,), for all slots."""
        return self._tokens(self.decode_logits(tokens), rows).tolist()

    def reset(self) -> None:
        """A new cache: the old one may be gone with the call that failed."""
        del self.cache
        self.cache = self._init_cache()

    def warm_up(self) -> None:
        """Compiles every program by running it; nobody may be in a slot."""
        for draws in (Sampling(), Sampling(1.0)):
            rows = Rows.greedy(self.slots)
            rows.set(0, draws)
            for bucket in self.buckets:
                self.prefill(bucket, 0, np.zeros(bucket, np.int32), rows.row(0))
            self.decode(np.zeros(self.slots, np.int32), rows)
        self.reset()

    # -- logits --------------------------------------------------------------------------------------------------------

    def prefill_logits(self, bucket: int, slot: int, prompt: np.ndarray) -> jax.Array:
        """Puts a prompt into a slot; returns logits (1, vocabulary), which lie as planned."""
        padded = self._prompts[bucket]
        padded[0, : prompt.size] = prompt
        padded[0, prompt.size :] = 0
        slot_given, length = self._number(slot, ()), self._number(prompt.size, (1,))
        return self._call(prefill_name(bucket), (slot_given, self._put(padded), length))

    def decode_logits(self, tokens: np.ndarray) -> jax.Array:
        """One more token (slots,) for all slots; returns logits (slots, vocabulary), which lie as planned."""
        return self._call(DECODE, (self._put(tokens),))

    def _number(self, value: int, shape: tuple[int, ...]) -> jax.Array:
        """On all devices, put there once: slots and lengths are few, and each put costs tens of microseconds."""
        key = value, shape
        if key not in self._numbers:
            self._numbers[key] = self._put(np.full(shape, value, np.int32))
        return self._numbers[key]

    def _call(self, name: str, given: tuple[Any, ...]) -> jax.Array:
        if name in self.compile_s:
            logits, self.cache = self._runs[name](self.params, self.cache, *given)
            return logits
        start_s = time.perf_counter()
        logits, self.cache = jax.block_until_ready(self.run(name)(self.params, self.cache, *given))
        self.compile_s[name] = time.perf_counter() - start_s
        return logits

    def run(self, name: str) -> Any:
        """The jitted function of a graph: (parameters, cache, ...) -> (logits, cache). It takes the cache that it is given."""
        if name not in self._runs:
            self._runs[name] = self._lowered(name)
        return self._runs[name]

    def _tokens(self, logits: jax.Array, rows: Rows) -> np.ndarray:
        return jax.device_get(self._sample(logits, self._put(rows)))

    def _lowered(self, name: str) -> Any:
        fn, args = self._graphs[name]
        plan = self.plans[name]
        traced = traced_for(plan, fn, args, {})
        return runnable(traced, plan, (1,), self._mesh).run


def check_plans(graphs: Mapping[str, Graph], plans: Mapping[str, Plan]) -> None:
    """That there is a plan for each graph, and that all put parameters and cache in one place.

    Raises:
        ServeError: it is not so; the message names the graph and the leaf.
    """
    if missing := [name for name in graphs if name not in plans]:
        raise ServeError(
            f"the layout has no plan for {', '.join(map(repr, missing))}; it has {', '.join(map(repr, plans))}. An engine needs "
            f"one for each of its graphs. At {user_line()}. Plan the graphs of al.serve.graphs(...), with the same buckets."
        )
    first = plans[DECODE]
    for name, (_, args) in graphs.items():
        plan = plans[name]
        if plan.pipeline is not None:
            raise ServeError(
                f"the plan of {name!r} has {len(plan.stages)} stages. This engine runs plans of one mesh. At {user_line()}. Plan "
                "with PlanOptions(num_stages=1)."
            )
        given = [(tuple(x.shape), str(jnp.dtype(x.dtype))) for x in jax.tree_util.tree_leaves(args)]
        planned = [(leaf.value.shape, leaf.value.dtype) for leaf in plan.inputs]
        if given != planned:
            pairs = zip(plan.inputs, given, planned, strict=False)
            leaf, *types = next((p for p in pairs if p[1] != p[2]), (None, len(given), len(planned)))
            what = (
                f"the leaf {leaf.path!r} is {types[1]} there and {types[0]} here"
                if leaf
                else f"{types[1]} leaves, not {types[0]}"
            )
            raise ServeError(
                f"the layout is of another model or other sizes: in its plan of {name!r} {what}. Parameters, slots, max_length "
                f"and buckets must be those that were planned. At {user_line()}. Plan the graphs of this model."
            )
        count = sum(leaf.path.startswith(("0/", "1/")) or leaf.path in ("0", "1") for leaf in plan.inputs)
        for leaf, other in zip(plan.inputs[:count], first.inputs, strict=False):
            if (leaf.spec, plan.mesh) != (other.spec, first.mesh):
                raise ServeError(
                    f"the {_SHARED[int(leaf.path[0])]} {leaf.path!r} lies as {leaf.spec} on {plan.mesh} for {name!r} and as "
                    f"{other.spec} on {first.mesh} for {DECODE!r}. All graphs must have it in one layout, or it would be moved "
                    f'between them. At {user_line()}. Plan them together: al.plan_shared(graphs, shared=("0", "1"), ...).'
                )
