"""``al.fit``: a training loop that outlives its workers.

In: a parallelized step, its first state, data, a number of steps. Out: the last state. A state is saved every so often; after
a loss the newest complete checkpoint is restored, the data is read again from its position, and the steps are repeated: with one
plan on equal devices the parameters are those of a run without a loss, bit for bit.
"""

from __future__ import annotations

import inspect
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from alpa_lite.api.checkpoint import Checkpoint
from alpa_lite.api.elastic import Elastic, replanned
from alpa_lite.api.step import ParallelStep
from alpa_lite.errors import (
    ArgumentsError,
    CheckpointError,
    ClusterError,
    NotFiniteError,
    WorkerLost,
    user_line,
)
from alpa_lite.executor.batches import Batches
from alpa_lite.executor.host_data import HostData
from alpa_lite.numeric import whole
from alpa_lite.plan.checkpoint_folder import CheckpointFolder
from alpa_lite.trace.paths import leaf_paths

_SMALL = 64  # elements of a metric that is checked for NaN and told


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What ``on_step`` is told.

    Attributes:
        position: of the batch that was used; the first is 0.
        metrics: what the step returned beside the state.
        step_s: how long it took, with reading the batch.
        busy: per submesh the share of the step in which its programs ran, where that was measured (``step.timed_every``).
        restarts: so far.
    """

    position: int
    metrics: Any
    step_s: float
    busy: tuple[float, ...] = ()
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """The end of a run.

    Attributes:
        state: after the last step, where the step keeps it.
        metrics: of the last step; None if there was none to do.
        position: batches used, in all runs of the checkpoint folder.
        restarts: in this run.
        checkpoint: the newest one, None without.
        step: that the state belongs to; another than the given one if the run was planned again.
        skipped: positions of batches that were left out because of NaN.
    """

    state: Any
    metrics: Any
    position: int
    restarts: int
    checkpoint: Path | None
    step: ParallelStep
    skipped: tuple[int, ...] = ()


def fit(
    step: ParallelStep,
    *,
    init: Any,
    data: Callable[[int], Any] | Iterable[Any] | HostData,
    num_steps: int,
    checkpoint: Checkpoint | None = None,
    elastic: bool | Elastic = False,
    on_nan: Literal["stop", "skip", "restore"] = "stop",
    max_restarts: int = 100,
    max_restarts_in_place: int = 3,
    on_step: Callable[[StepReport], object] | None = None,
) -> FitResult:
    """Train until ``num_steps`` batches were used, through losses of workers and hosts.

    Args:
        step: of ``al.parallelize``, called as ``step(state, batch)``; returns (state, metrics), metrics any tree.
        init: the first state, or a function of no arguments that makes it, which runs where the state will lie. It is not used
            when ``checkpoint`` has a complete checkpoint: then the run goes on from there.
        data: a function of the position, an iterable of batches, or a ``HostData``, which every host reads for itself.
        num_steps: in all, counted from position 0.
        checkpoint: where and how often the state is saved; None = never, and a loss starts again from the beginning.
        elastic: whether the run goes on with what is left when hosts are gone for good, with another plan; an ``Elastic`` says
            how such plans are chosen.
        on_nan: when a metric is not finite: "stop"; "skip", go back to the checkpoint and leave the batch out; "restore", go back
            and try again, once per position.
        max_restarts: after losses, in all; ``max_restarts_in_place``: without a step further than before.
        on_step: told of every step.

    Raises:
        WorkerLost: more restarts than allowed were needed.
        NotFiniteError: a metric is not finite and ``on_nan`` says to stop.
        CheckpointError: the last state could not be saved. Earlier failures to save are warned of on stderr, and tried again.

    Example:
        >>> step = al.parallelize(train_step, donate_argnums=0, executor="ray")
        >>> done = al.fit(step, init=init_state, data=batches, num_steps=10_000, checkpoint=al.Checkpoint("runs/gpt"))
    """
    num_steps = _checked(step, num_steps, on_nan, checkpoint, elastic)
    _check_init(init)
    run = _Run(
        step=step,
        init=init,
        batches=Batches(data, here=step.ray is None),
        num_steps=num_steps,
        checkpoint=checkpoint,
        elastic=Elastic() if elastic is True else (elastic or None),
        on_nan=on_nan,
        budget=(max_restarts, max_restarts_in_place),
        on_step=on_step,
    )
    return run()


def _checked(step: Any, num_steps: Any, on_nan: Any, checkpoint: Any, elastic: Any) -> int:
    """The number of steps."""
    if not isinstance(step, ParallelStep):
        raise ArgumentsError(
            f"al.fit was given {step!r:.60} as its step. It must be what al.parallelize returns. At {user_line()}. Decorate it "
            "with @al.parallelize(donate_argnums=0)."
        )
    steps = whole(num_steps)
    if steps is None or steps < 0:
        raise ArgumentsError(
            f"num_steps={num_steps!r:.60} was given. It must be a whole number of at least 0. At {user_line()}. Correct it."
        )
    if on_nan not in ("stop", "skip", "restore"):
        raise ArgumentsError(
            f"on_nan={on_nan!r:.60} was given. It must be 'stop', 'skip' or 'restore'. At {user_line()}. Leave it out to stop."
        )
    if not isinstance(elastic, bool | Elastic):
        raise ArgumentsError(
            f"elastic={elastic!r:.60} was given. It must be True, False or an al.Elastic. At {user_line()}. Give True for "
            "the usual values."
        )
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        raise ArgumentsError(
            f"checkpoint={checkpoint!r:.60} was given. It must be an al.Checkpoint. At {user_line()}. Give "
            f"al.Checkpoint({str(checkpoint)!r}, every=200, keep=3)."
        )
    return steps


def _check_init(init: Any) -> None:
    """Refuses a function that cannot be called without arguments."""
    if not callable(init):
        return
    try:
        inspect.signature(init).bind()
    except TypeError as error:
        raise ArgumentsError(
            f"init={init!r:.60} was given, which cannot be called without arguments: {error}. It is the first state, or a "
            f"function of no arguments that makes it. At {user_line()}. Write for example "
            "init=functools.partial(init_state, key)."
        ) from None
    except ValueError:  # a built-in function that does not tell
        return


@dataclass(slots=True, kw_only=True)
class _Run:
    """One call of ``fit``."""

    step: ParallelStep
    init: Any
    batches: Batches
    num_steps: int
    checkpoint: Checkpoint | None
    elastic: Elastic | None
    on_nan: str
    budget: tuple[int, int]
    on_step: Callable[[StepReport], object] | None
    folder: CheckpointFolder | None = None
    saving: Any = None
    saved_at: int = -1
    newest: Path | None = None
    restarts: int = 0
    furthest: int = -1  # position of the furthest loss
    in_place: int = 0
    skipped: list[int] = field(default_factory=list)
    tried: set[int] = field(default_factory=set)  # positions that were not finite once

    def __call__(self) -> FitResult:
        given = self.step
        try:
            return self._run()
        except BaseException:
            try:
                self._end_save()
            finally:  # also where somebody does not wait for that either
                if self.step is not given:  # nobody else knows it
                    self.step.close()
            raise

    def _run(self) -> FitResult:
        self.folder = self.checkpoint.open() if self.checkpoint else None
        if self.folder is not None and (self.folder.newest() or 0) < self.num_steps:
            self.folder.make()
        state, position = None, -1
        metrics: Any = None
        while True:
            try:
                if position < 0:
                    state, position = self._start()
                while position < self.num_steps:
                    state, metrics, position = self._advance(state, position)
                    if position < 0:
                        break
                    self._keep(state, position)
                else:
                    self._finish(state, position)
                    break
            except WorkerLost as lost:
                state, metrics = None, None
                again: WorkerLost | None = lost
                while again is not None:  # new workers may be lost as well
                    again = self._recover(again, max(position, 0))
                position = -1
        return FitResult(
            state=state,
            metrics=metrics,
            position=position,
            restarts=self.restarts,
            checkpoint=self.newest,
            step=self.step,
            skipped=tuple(self.skipped),
        )

    # -- where a run begins -------------------------------------------------------------------------------------------

    def _copied_init(self) -> Any:
        """On the host: a step that donates its state must not take the user's arrays, from which a restart begins."""
        for path, leaf in leaf_paths(self.init, "init"):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ArgumentsError(
                    f"{path!r} of al.fit was deleted, or donated to a step that ran since. The first state must have values. At "
                    f"{user_line()}. Give what that step returned, or a function that makes the state."
                )
        return jax.tree.map(np.array, self.init)

    def _start(self) -> tuple[Any, int]:
        """The state of the newest checkpoint and the position after it, or the first state and 0."""
        first = self.batches.first
        shapes = jax.eval_shape(self.init) if callable(self.init) else self.init
        self.step.plan(shapes, self.batches.at(first))
        folder = self.folder
        found = self.step.restore_newest(folder) if folder is not None else None
        if found is None or folder is None:
            return self.step.init(self.init) if callable(self.init) else self._copied_init(), 0
        state, manifest = found
        self.newest = folder.path(None)
        self.saved_at = manifest.position
        self.skipped = [int(p) for p in manifest.extra.get("skipped", ())] + [
            p for p in self.skipped if p >= manifest.position
        ]
        self.batches.release(manifest.position)
        return state, manifest.position

    # -- one step -----------------------------------------------------------------------------------------------------

    def _advance(self, state: Any, position: int) -> tuple[Any, Any, int]:
        """A step; the position is -1 if the state must be restored."""
        start = time.perf_counter()
        batch = self.batches.at(position)
        if position in self.skipped:
            return state, None, position + 1
        made = self.step(state, batch)
        if not isinstance(made, tuple) or len(made) != 2:
            raise ArgumentsError(
                f"the step returned {type(made).__name__} of {len(made) if isinstance(made, tuple) else 1} values. al.fit needs "
                f"(state, metrics). At {user_line()}. Return exactly these two."
            )
        state, metrics = made
        if not _finite(metrics):
            return None, None, self._not_finite(position, metrics)
        if self.on_step is not None:
            self.on_step(self._report(position, metrics, time.perf_counter() - start))
        return state, metrics, position + 1

    def _report(self, position: int, metrics: Any, step_s: float) -> StepReport:
        busy = self.step.busy()
        return StepReport(position=position, metrics=metrics, step_s=step_s, busy=busy, restarts=self.restarts)

    def _not_finite(self, position: int, metrics: Any) -> int:
        """What is done about a metric that is not finite; the position to go on from."""
        self._end_save()
        values = ", ".join(str(np.asarray(x)) for x in _small(metrics))
        if self.on_nan == "stop" or (self.on_nan == "restore" and position in self.tried):
            again = " again, after its state was restored" if position in self.tried else ""
            raise NotFiniteError(
                f"a metric of batch {position} is not finite{again}: {values}. Metrics must be finite numbers. The newest "
                f"checkpoint is {self.newest or 'none'}. Look at that batch and the learning rate, or give on_nan='skip'.",
                position,
            )
        self.tried.add(position)
        if self.on_nan == "skip":
            self.skipped.append(position)
        _tell(
            f"a metric of batch {position} is not finite ({values}); going back to {self.newest or 'the first state'}"
        )
        return -1

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _keep(self, state: Any, position: int) -> None:
        """What a loss from here on would need, and no more."""
        if self.checkpoint is not None:
            self._save(state, position)
        else:
            self.batches.release(position)

    def _save(self, state: Any, position: int) -> None:
        """Look after the checkpoint that is being written; begin one if it is time."""
        assert self.checkpoint is not None and self.folder is not None
        last = position == self.num_steps
        due = last or position % self.checkpoint.every == 0
        try:
            if self.saving is not None:
                self._done(self.saving.wait() if due else self.saving.poll())
        except CheckpointError as error:  # of an earlier step, also where this is the last one
            self._not_saved(self.saved_at, error)
        try:
            if due and position > self.saved_at:
                extra = {"skipped": self.skipped} if self.skipped else None
                self.saving = self.step.begin_save(self.folder, position, state, position=position, extra=extra)
                self.saved_at = position
        except CheckpointError as error:
            if last:
                raise
            self._not_saved(position, error)

    def _not_saved(self, position: int, error: CheckpointError) -> None:
        self.saving, self.saved_at = None, -1
        _tell(f"no checkpoint at step {position}: {error}")

    def _done(self, path: Path | None) -> None:
        if path is not None:
            self.newest, self.saving = path, None
            self.batches.release(self.saved_at)

    def _finish(self, state: Any, position: int) -> None:
        if self.checkpoint is not None and position > self.saved_at and position > 0:
            self._save(state, position)
        if self.saving is not None:
            self._done(self.saving.wait())

    def _end_save(self) -> None:
        """Before the state is restored, or lost: a checkpoint that is being written is completed, or gone."""
        if self.saving is not None:
            saving, self.saving = self.saving, None
            try:
                self._done(saving.wait())
            except CheckpointError as error:
                self._not_saved(self.saved_at, error)
            except (WorkerLost, ClusterError):  # told where the workers are seen to
                pass

    # -- losses -------------------------------------------------------------------------------------------------------

    def _recover(self, lost: WorkerLost, position: int) -> WorkerLost | None:
        """New workers, on fewer hosts if there is no other way; what was told if one of them was lost while it started."""
        self._end_save()
        if self.checkpoint is None and self.batches.read is None:
            raise WorkerLost(
                f"{lost} Without a checkpoint, al.fit starts again from the first batch, which an iterable cannot give twice. "
                "Give checkpoint=al.Checkpoint(...), or data as a function of the position.",
                position,
            )
        self.restarts += 1
        self.in_place = 0 if position > self.furthest else self.in_place + 1
        self.furthest = max(position, self.furthest)
        total, in_place = self.budget
        if self.restarts > total or self.in_place >= in_place:
            why = (
                f"{self.restarts - 1} restarts"
                if self.restarts > total
                else f"{self.in_place} losses at step {position}"
            )
            raise WorkerLost(
                f"{lost}\nal.fit gave up after {why}; newest checkpoint: {self.newest or 'none'}.", position
            )
        _tell(f"lost at step {position}: {lost}")
        start = time.perf_counter()
        self.saved_at = -1
        try:
            self._restart()
        except WorkerLost as again:
            return again
        _tell(
            f"new workers after {time.perf_counter() - start:.1f} s; going back to {self.newest or 'the first state'}"
        )
        return None

    def _restart(self) -> None:
        while True:  # with fewer hosts each time
            try:
                return self.step.restart()
            except ClusterError as error:
                if self.elastic is None:
                    raise
                _tell(f"the hosts are gone for good: {error}")
            batch = self.batches.at(self.batches.first)
            shapes = jax.eval_shape(self.init) if callable(self.init) else self.init
            lost = self.step
            self.step = replanned(lost, (shapes, batch), self.elastic, _tell)
            lost.close()


def _small(metrics: Any) -> list[Any]:
    """Arrays of a few numbers, no keys."""
    leaves = (x for x in jax.tree.leaves(metrics) if hasattr(x, "dtype") and math.prod(x.shape) <= _SMALL)
    return [x for x in leaves if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)]


def _finite(metrics: Any) -> bool:
    floats = (x for x in _small(metrics) if jax.dtypes.issubdtype(x.dtype, np.inexact))
    return all(np.isfinite(np.asarray(x)).all() for x in floats)


def _tell(text: str) -> None:
    sys.stderr.write(f"alpa_lite: {text}\n")
    sys.stderr.flush()
