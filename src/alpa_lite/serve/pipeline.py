"""A model in stages, each with its own layers on its own part of the devices: cut by the model itself, or as it was planned.

Slots are served in groups: while a stage works on one group, the stage before it works on the next one. All programs of a step
are handed to the devices in that order without waiting, and each device starts one when what it reads is there; what is between
two stages goes from devices to devices. With G groups and S stages a step takes G + S - 1 turns instead of G * S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.errors import ServeError, user_line
from alpa_lite.executor.calibrate import local_cluster
from alpa_lite.plan.plan import Plan
from alpa_lite.serve.layout import check_sizes, plans_of
from alpa_lite.serve.model_graphs import DECODE, Graph, Model, graphs
from alpa_lite.serve.picked import check_all_picked
from alpa_lite.serve.programs import Programs, check_types, padded, run_all, vocab_size_of
from alpa_lite.serve.sampling import Rows
from alpa_lite.serve.stored import StoredParams, is_maker
from alpa_lite.trace.program import Traced

T = TypeVar("T")


class StagedModel(Model, Protocol):
    """A model that can be cut."""

    def split(self, num_stages: int) -> Sequence[tuple[Model, Callable[[Any], Any]]]:
        """Parts in order, each a model of its own with what picks its parameters out of all.

        The first part takes tokens, each later one what the part before returned; the last one returns logits. What lies
        between parts is one array, of which the first dim is the slot.
        """
        ...


class Pipeline:
    """A ``Runner`` (see ``scheduler``) over stages; its methods are called by one thread at a time.

    Args:
        stages: in order; each has a cache per group of slots. Where plans have stages themselves, programs of all in one.
    """

    check_s = None

    def __init__(self, stages: Sequence[Programs]) -> None:
        self.stages, first = stages, stages[0]
        self.buckets, self.num_groups, self.per_group = first.buckets, len(first.caches), first.slots
        self.slots = self.num_groups * self.per_group

    def prefill(self, bucket: int, slot: int, prompt: np.ndarray, rows: Rows) -> int:
        """Puts a prompt into a slot; returns the token after it."""
        logits = self.prefill_logits(bucket, slot, prompt)
        return int(jax.device_get(self.stages[-1].sampler(logits, rows))[0])

    def decode(self, tokens: np.ndarray, rows: Rows) -> Sequence[int]:
        """The token after ``tokens`` (slots,), for all slots."""
        last, n = self.stages[-1], self.per_group
        found = [
            last.sampler(logits, Rows(*(x[group * n : (group + 1) * n] for x in rows)))
            for group, logits in enumerate(self._decoded(tokens))
        ]
        return np.concatenate(jax.device_get(found)).tolist()

    def check(self) -> None:
        """Nothing can be lost but the whole process."""

    def reset(self) -> None:
        """Nothing is in any slot."""
        for stage in self.stages:
            stage.reset()

    def warm_up(self) -> None:
        """Compiles every program by running it; nobody may be in a slot."""
        run_all(self)

    def prefill_logits(self, bucket: int, slot: int, prompt: np.ndarray) -> jax.Array:
        """Puts a prompt into a slot; returns logits (1, vocabulary), which lie as planned."""
        group, own = divmod(slot, self.per_group)
        x: Any = padded(bucket, prompt)
        for stage in self.stages:
            x = stage.prefill_call(bucket, own, prompt.size, x, group)
        return x

    def decode_logits(self, tokens: np.ndarray) -> np.ndarray:
        """One more token (slots,) for all slots; returns logits (slots, vocabulary)."""
        return np.concatenate(jax.device_get(self._decoded(tokens)))

    def _decoded(self, tokens: np.ndarray) -> list[jax.Array]:
        """Logits of each group; nothing is waited for."""
        given = list(tokens.reshape(self.num_groups, self.per_group))
        return in_turns(given, len(self.stages), lambda stage, group, x: self.stages[stage].decode_call(x, group))

    @property
    def vocab_size(self) -> int:
        return self.stages[-1].vocab_size

    @property
    def params(self) -> tuple[Any, ...]:
        """Of each stage, on its devices."""
        return tuple(stage.params for stage in self.stages)

    @property
    def plans(self) -> dict[str, Plan]:
        """By stage and graph, "0/decode"; by graph where plans have stages themselves."""
        return self._by_stage(lambda stage: stage.plans)

    @property
    def compile_s(self) -> dict[str, float]:
        """The seconds of the first call, by the names of ``plans``."""
        return self._by_stage(lambda stage: stage.compile_s)

    def _by_stage(self, of: Callable[[Programs], Mapping[str, T]]) -> dict[str, T]:
        if len(self.stages) == 1:
            return dict(of(self.stages[0]))
        return {f"{k}/{name}": found for k, stage in enumerate(self.stages) for name, found in of(stage).items()}


def cut_by_model(
    model: StagedModel,
    params: Any,
    *,
    num_stages: int,
    slots: int,
    max_length: int,
    buckets: tuple[int, ...],
    num_groups: int | None = None,
    layouts: Sequence[Mapping[str, Plan]] | None = None,
    folder: str = "",
) -> Pipeline:
    """A model in the parts that it is split into.

    Args:
        model, params: as for ``Engine``; the model has ``split``.
        num_stages: into how many parts; the devices are shared out evenly.
        num_groups: into how many groups the slots go; None = twice the stages, or as many as divide the slots.
        layouts: plans of each stage's graphs; None plans them.
        folder: as of ``plans_of``.

    Raises:
        ServeError: it cannot be cut so.
    """
    each = _devices_of_stage(num_stages)
    groups = groups_of(num_stages, slots) if num_groups is None else num_groups
    if slots % groups:
        raise ServeError(
            f"{slots} slots were given in num_groups={groups}; groups are of one size. At {user_line()}. Change one of them."
        )
    sizes: dict[str, Any] = {"slots": slots // groups, "max_length": max_length, "buckets": buckets}
    stages: list[Programs] = []
    cluster = _cluster(each) if layouts is None else None
    for number, part in enumerate(parts_of(model, params, num_stages, layouts, cluster, folder, **sizes)):
        devices = jax.devices()[number * each : (number + 1) * each]
        stages.append(programs_of(part, **sizes, num_groups=groups, devices=devices))
    return Pipeline(stages)


def in_turns(given: list[Any], num_stages: int, step: Callable[[int, int, Any], Any]) -> list[Any]:
    """What the last stage makes of each group, from what the first one is given; ``step`` is given (stage, group, what lies
    between), and waits for nothing. While a stage has a group, the one before has the next."""
    x = list(given)
    for turn in range(len(x) + num_stages - 1):
        for stage in range(num_stages):
            if 0 <= (group := turn - stage) < len(x):
                x[group] = step(stage, group, x[group])
    return x


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stage of a model.

    Attributes:
        model, params: its own; as for ``Engine``.
        given: graph -> what it takes in place of tokens; None for the first.
        graphs, plans: by name.
        traced: the graphs as they are run; None where they were not traced yet.
    """

    model: Model
    params: Any
    given: Mapping[str, Any] | None
    graphs: Mapping[str, Graph]
    plans: Mapping[str, Plan]
    traced: Mapping[str, Traced] | None = None


def parts_of(
    model: Any,
    params: Any,
    num_stages: int,
    layouts: Sequence[Mapping[str, Plan]] | None,
    cluster: Cluster | None,
    folder: str,
    **sizes: Any,
) -> Iterator[Part]:
    """The stages of a model, planned for a cluster each where there are no layouts; one stage is the model itself. ``folder``:
    as of ``plans_of``.

    Raises:
        ServeError: it cannot be cut so.
    """
    given = None
    for number, (part, pick) in enumerate(_parts(model, params, num_stages) if num_stages > 1 else [(model, None)]):
        own = params if pick is None else _picked(params, pick)
        made = graphs(part, own, **sizes, given=given)
        plans, traced = plans_of(made, None if layouts is None else layouts[number], cluster, folder)
        last = number == num_stages - 1
        if last:
            vocab_size_of(made, plans)
        yield Part(model=part, params=own, given=given, graphs=made, plans=plans, traced=traced)
        given = None if last else {name: jax.eval_shape(fn, *args)[0] for name, (fn, args) in made.items()}


def programs_of(part: Part, **sizes: Any) -> Programs:
    """Of a part, on devices of this process; the sizes are those of ``Programs``."""
    return Programs(part.model, part.params, part.graphs, part.plans, traced=part.traced, **sizes)


def cut_as_planned(
    model: Model, params: Any, plans: Mapping[str, Plan], *, slots: int, max_length: int, buckets: tuple[int, ...]
) -> Pipeline:
    """A model whose plans have stages, on the devices of this process; raises as ``planned_part``."""
    part, per_group, groups = planned_part(model, params, plans, slots=slots, max_length=max_length, buckets=buckets)
    return Pipeline([programs_of(part, slots=per_group, max_length=max_length, buckets=buckets, num_groups=groups)])


def planned_part(
    model: Model, params: Any, plans: Mapping[str, Plan], *, slots: int, max_length: int, buckets: tuple[int, ...]
) -> tuple[Part, int, int]:
    """A model whose plans have stages, in one; slots go in groups of as many as were planned: so many each, so many groups.

    Raises:
        ServeError: the plans are not for this model and these sizes.
    """
    planned = plans[DECODE].inputs[-1].value.shape[0] if DECODE in plans else slots  # its tokens
    if slots % planned:
        raise ServeError(
            f"slots={slots} was given, and the layout is for {planned}. With stages, slots are groups of so many. At "
            f"{user_line()}. Give a multiple, or plan for other slots."
        )
    made = graphs(model, params, slots=planned, max_length=max_length, buckets=buckets)
    check_sizes(made, plans)
    check_types(made, plans)
    vocab_size_of(made, plans)
    return Part(model=model, params=params, given=None, graphs=made, plans=plans), planned, slots // planned


def _devices_of_stage(num_stages: int) -> int:
    count = len(jax.devices())
    if count % num_stages:
        raise ServeError(
            f"num_stages={num_stages} was given for {count} devices; each stage gets as many. At {user_line()}. Take a divisor."
        )
    return count // num_stages


def _cluster(num_devices: int) -> Cluster:
    return replace(local_cluster(False), devices_per_host=num_devices)


def groups_of(num_stages: int, slots: int) -> int:
    """How many groups the slots go in: the largest number up to twice the stages that divides the slots."""
    return max(count for count in range(1, 2 * num_stages + 1) if slots % count == 0)


def _parts(model: Any, params: Any, num_stages: int) -> Sequence[tuple[Model, Callable[[Any], Any]]]:
    if not hasattr(model, "split"):
        raise ServeError(
            f"num_stages={num_stages} was given, and {type(model).__name__} has no split(num_stages). A model that is served in "
            f"stages says where it may be cut. At {user_line()}. Write one (al.serve.StagedModel), or leave num_stages out."
        )
    given = model.split(num_stages)
    parts = list(given) if isinstance(given, Iterable) else []
    if not parts or not all(isinstance(part, (tuple, list)) and len(part) == 2 and callable(part[1]) for part in parts):
        raise ServeError(
            f"{type(model).__name__}.split({num_stages}) gave {given!r:.80}; it must be a list of {num_stages} pairs, of a model "
            f"and a function that picks its parameters out of all. At {user_line()}. See al.serve.StagedModel."
        )
    if len(parts) != num_stages:
        raise ServeError(
            f"{type(model).__name__}.split({num_stages}) gave {len(parts)} parts. At {user_line()}. Correct it."
        )
    check_all_picked(type(model).__name__, params, [pick for _, pick in parts])
    return parts


def _picked(params: Any, pick: Callable[[Any], Any]) -> Any:
    if isinstance(params, StoredParams):
        try:
            return params.picked(pick)
        except Exception as error:  # of the user's function, which may compute what shapes alone do not give
            raise ServeError(
                "num_stages was given with parameters of a checkpoint, and what the model's split(num_stages) picks of them "
                f"cannot be picked of shapes alone: {type(error).__name__}: {error!s:.200}. At {user_line()}. Load the "
                "parameters first, or give a layout with stages, which reads rows of a leaf where they belong."
            ) from error
    return (lambda: pick(params())) if is_maker(params) else pick(params)
