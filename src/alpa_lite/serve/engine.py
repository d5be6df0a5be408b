"""``al.serve.Engine``: a model that answers requests, many at once, from one copy of its parameters."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from alpa_lite.api.given import checked_executor
from alpa_lite.cluster.cluster import Cluster
from alpa_lite.errors import RequestError, ServeError, user_line
from alpa_lite.executor.compiled import keep_compiled
from alpa_lite.executor.ray.settings import RayExecutor
from alpa_lite.numeric import positive, real, several, whole
from alpa_lite.plan.files import as_path
from alpa_lite.plan.plan import Plan
from alpa_lite.serve.layout import buckets_of
from alpa_lite.serve.model_graphs import Model, check_instance, checked_counts, checked_sizes
from alpa_lite.serve.pipeline import Pipeline
from alpa_lite.serve.programs import Programs
from alpa_lite.serve.request import Request
from alpa_lite.serve.runners import SHOWN, Layout, check_layout, runner_of
from alpa_lite.serve.sampling import Sampling
from alpa_lite.serve.scheduler import Scheduler
from alpa_lite.serve.statistics import Statistics

if TYPE_CHECKING:
    from alpa_lite.serve.hosts import Hosts

_GREEDY = Sampling()
_DROPPED = "it was dropped, or its process ended, without close()"
_TEXT = (str, bytes, bytearray)
_ENCODE = "Encode text with the model's own tokenizer, where tokens are bytes with text.encode()."


class Engine:
    """Serves a model on this process's devices, or on those of a Ray cluster. All methods may be called from any thread.

    A thread of its own runs the model; it ends with ``close``, at the end of a ``with`` block, or when nobody holds the engine.

    Args:
        model: see ``al.serve.Model``.
        params: its parameters: arrays on the host or on devices; a function that makes them, on every host of theirs; or
            ``al.serve.StoredParams``: where they lie in a checkpoint. JAX arrays that lie where they are served are not copied:
            do not donate or delete them.
        layout: of ``al.plan_shared``: plans of ``al.serve.graphs(model, params, ...)`` with the same sizes; None plans them for
            the devices of this process. Where only the parameters are shared, the cache lies as ``decode`` has it, and graphs
            that have it elsewhere are planned again, which their plans note. With plans that have stages, slots go in groups of
            as many as were planned.
        slots: requests that are served at once.
        max_length: tokens of a request, prompt and answer together.
        buckets: sizes to which prompts are padded, the largest being the longest prompt; None = those that the layout has, or
            without a layout powers of four from 32 and ``max_length``.
        executor: "local": the devices of this process; "ray" or ``al.RayExecutor(...)``: those of a Ray cluster, one actor per
            host of the layout's mesh, or of each of its stages (``serve/hosts.py``).
        cluster: that is planned for without a layout; None = the devices of this process, or of the Ray cluster.
        num_stages: parts into which the model itself is cut, each on its part of the devices or of the cluster
            (``al.serve.StagedModel``); then ``layout`` is one layout per part.
        queue_limit: requests that may wait; None = 4 times ``slots``.
        prefills_per_step: prompts that are taken in between two tokens of those that run: with more, requests start sooner, with
            fewer, tokens come more evenly.
        compile_cache: folder where compiled programs are kept for the next start, and the layout where none is given. JAX has
            one for the programs of the whole process: this sets it, unless one is set already.

    Raises:
        ServeError: a number is not allowed, the layout is another model's, or the folder for compiled programs cannot be made.
        CheckpointError: the parameters cannot be read.

    Example:
        >>> with al.serve.Engine(model, params, slots=16, max_length=2048) as engine:
        ...     answers = engine.generate(prompts, max_tokens=64)
        ...     for token in engine.submit(prompt, max_tokens=64, sampling=al.serve.Sampling(temperature=0.8)):
        ...         print(token)
    """

    def __init__(
        self,
        model: Model,
        params: Any,
        layout: Layout | Sequence[Layout] | None = None,
        *,
        slots: int = 16,
        max_length: int = 2048,
        buckets: Sequence[int] | None = None,
        executor: Literal["local", "ray"] | RayExecutor = "local",
        cluster: Cluster | None = None,
        num_stages: int = 1,
        queue_limit: int | None = None,
        prefills_per_step: int = 4,
        compile_cache: str | PathLike[str] | None = None,
    ) -> None:
        check_instance(model)
        check_layout(layout)
        (max_length,) = checked_counts(max_length=max_length)
        given = buckets_of(layout, max_length) if buckets is None else buckets
        slots, max_length, sizes = checked_sizes(slots, max_length, given)
        num_stages, limit, prefills_per_step = checked_counts(
            num_stages=num_stages,
            queue_limit=4 * slots if queue_limit is None else queue_limit,
            prefills_per_step=prefills_per_step,
        )
        if jax.process_count() > 1:
            raise ServeError(
                f"this is one of {jax.process_count()} processes of a jax.distributed job. An engine runs on the devices of one "
                f"process. At {user_line()}. Start it in a process of its own."
            )
        settings = checked_executor(executor, None)
        folder = ""
        if compile_cache is not None:
            folder = str(as_path(compile_cache, 'al.serve.Engine(compile_cache="folder")', ServeError))
            if settings is None:
                folder = os.path.expanduser(folder)
                _keep_compiled(folder)
            else:
                settings = replace(settings, compile_cache=settings.compile_cache or folder)
        self.max_length, self.buckets = max_length, sizes
        self.programs = runner_of(
            model,
            params,
            layout,
            cluster,
            num_stages,
            settings,
            folder if settings is None else os.path.expanduser(settings.cache_folder),
            slots=slots,
            max_length=max_length,
            buckets=sizes,
        )
        try:
            self._begin(limit, prefills_per_step)
        except BaseException:
            _close(self.programs)
            raise

    def _begin(self, limit: int, prefills_per_step: int) -> None:
        """Starts the thread that runs the model."""
        self.vocab_size = self.programs.vocab_size
        self._scheduler = Scheduler(self.programs, queue_limit=limit, prefills_per_step=prefills_per_step)
        # The thread holds the scheduler, not the engine: an engine that nobody holds ends its thread. Whoever drops it waits for
        # no lock: it may be the garbage collector, in a thread that holds one for which the engine's waits.
        wide = jax.dtypes.canonicalize_dtype(np.int64) == np.int64
        run = (self._scheduler, self.programs, wide)
        self._thread = threading.Thread(target=_run, args=run, name="alpa_lite-engine", daemon=True)
        dropped = threading.Thread(target=self._scheduler.close, args=(_DROPPED,), daemon=True)
        weakref.finalize(self, dropped.start).atexit = False  # pyrefly: ignore[missing-attribute]
        # At the end of the process, before JAX's own clean-up, as it was registered later.
        weakref.finalize(self._thread, _end, weakref.ref(self._scheduler), weakref.ref(self._thread))
        try:
            self._thread.start()
        except BaseException:  # an interrupt may come when it runs already
            self._scheduler.close(_DROPPED)
            raise

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int] | bytes | np.ndarray,
        *,
        max_tokens: int = 16,
        sampling: Sampling = _GREEDY,
        stop: Iterable[int] = (),
        timeout_s: float | None = None,
    ) -> Request:
        """Queue a request and return at once.

        Args:
            prompt: tokens, at least one and at most the largest bucket; bytes are tokens, too.
            max_tokens: how many to make, at most ``max_length`` less the prompt's.
            sampling: how they are chosen; by default the likeliest.
            stop: tokens after which it ends.
            timeout_s: seconds from now by when it must be finished; None = whenever.

        Returns:
            A ``Request``: iterate over it for tokens as they come, or ask for its ``result()``.

        Raises:
            RequestError: it cannot be served.
            QueueFull: too many requests wait already.
            EngineClosed: the engine was closed.
        """
        return self._submit(prompt, max_tokens, sampling, stop, timeout_s, wait=False)

    def generate(
        self,
        prompts: Sequence[Sequence[int] | bytes | np.ndarray],
        *,
        max_tokens: int = 16,
        sampling: Sampling | Sequence[Sampling] = _GREEDY,
        stop: Iterable[int] = (),
    ) -> list[list[int]]:
        """The answers to all prompts; waits for room in the queue where there are many.

        Args:
            prompts, max_tokens, stop: as for ``submit``.
            sampling: for all, or one per prompt.

        Raises:
            RequestError, EngineClosed: as ``submit``.
        """
        _check_several(prompts, sampling)
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(each) != len(prompts):
            raise RequestError(
                f"{len(each)} samplings were given for {len(prompts)} prompts; it must be one for all, or one for each. At "
                f"{user_line()}. Correct it."
            )
        stop = self._stops(stop)
        requests: list[Request] = []
        try:
            for prompt, own in zip(prompts, each, strict=True):
                requests.append(self._submit(prompt, max_tokens, own, stop, None, wait=True))
            return [list(request.result()) for request in requests]
        finally:
            if not self._scheduler.ending:  # else all that are left end as closed
                for request in requests:
                    request.cancel()

    def _submit(
        self,
        prompt: Any,
        max_tokens: int,
        sampling: Sampling,
        stop: Iterable[int],
        timeout_s: float | None,
        *,
        wait: bool,
    ) -> Request:
        tokens = self._checked(prompt, max_tokens, sampling, timeout_s)
        request = Request(
            tokens,
            max_tokens=int(max_tokens),
            sampling=sampling,
            stop=self._stops(stop),
            timeout_s=None if timeout_s is None else real(timeout_s),
        )
        self._scheduler.submit(request, wait=wait)
        return request

    def _checked(self, prompt: Any, max_tokens: Any, sampling: Any, timeout_s: Any) -> np.ndarray:
        if isinstance(prompt, str):
            raise RequestError(
                f"a prompt of text, {prompt!r:.{SHOWN}}, was given; it must be a sequence of tokens (bytes are tokens, "
                f"too). At {user_line()}. {_ENCODE}"
            )
        try:
            tokens = np.frombuffer(prompt, np.uint8) if isinstance(prompt, (bytes, bytearray)) else _array_of(prompt)
        except ValueError:  # rows of different lengths
            tokens = np.empty(1, object)
        except (TypeError, RuntimeError) as error:  # a key of random numbers, an array that was deleted
            raise RequestError(
                f"a prompt was given that cannot be read: {error}. It must be a list of whole numbers. At {user_line()}. Change "
                "the request."
            ) from error
        wanted = positive(max_tokens)
        longest = self.buckets[-1]
        for fault in (
            (tokens.ndim != 1 or tokens.dtype.kind not in "iu")
            and tokens.size > 0
            and f"a prompt of shape {list(tokens.shape)} and type {tokens.dtype} was given; it must be a list of whole numbers",
            tokens.size == 0 and "an empty prompt was given; it must have at least one token",
            tokens.size > longest and f"a prompt of {tokens.size} tokens was given; the largest bucket holds {longest}",
            wanted is None and f"max_tokens={max_tokens!r:.60} was given; it must be a whole number from 1",
            wanted is not None
            and tokens.size + wanted > self.max_length
            and f"a prompt of {tokens.size} tokens with max_tokens={wanted} was given; together they may be at most "
            f"max_length={self.max_length}",
            not isinstance(sampling, Sampling)
            and f"sampling={sampling!r:.60} was given; it must be an al.serve.Sampling",
            timeout_s is not None
            and not 0 < real(timeout_s) <= threading.TIMEOUT_MAX
            and f"timeout_s={timeout_s!r:.40} was given; it must be a positive number of seconds, or None for no deadline",
        ):
            if fault:
                raise RequestError(f"{fault}. At {user_line()}. Change the request, or make an engine that takes it.")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            wrong = int(tokens[(tokens < 0) | (tokens >= self.vocab_size)][0])
            raise RequestError(
                f"a prompt with the token {wrong} was given; the model's tokens are 0 to {self.vocab_size - 1}. At "
                f"{user_line()}. Encode it with the model's own tokenizer."
            )
        return tokens.astype(np.int32)

    def _stops(self, stop: Any) -> frozenset[int]:
        """As tokens, checked."""
        if isinstance(stop, frozenset) and not stop:
            return stop
        listed = several(stop)
        found = {whole(token) for token in ([None] if listed is None else listed)}
        if any(token is None or not 0 <= token < self.vocab_size for token in found):
            raise RequestError(
                f"stop={stop!r:.80} was given; it must be a list of tokens, from 0 to {self.vocab_size - 1}. At "
                f"{user_line()}. Write stop=[token, ...], also for one; text is encoded with the model's own tokenizer."
            )
        return frozenset(token for token in found if token is not None)

    # -- the engine itself ---------------------------------------------------------------------------------------------

    @property
    def params(self) -> Any:
        """On the devices; of stages one tree each; only shapes where actors hold them."""
        return self.programs.params

    @property
    def plans(self) -> Mapping[str, Plan]:
        """By graph."""
        return self.programs.plans

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests; those that it has may still go on (``close(drain_s=...)``)."""
        return self._scheduler.shut

    def statistics(self) -> Statistics:
        """What was counted so far."""
        return self._scheduler.statistics()

    def warm_up(self) -> None:
        """Compiles all programs, which otherwise happens when each is first used; waits until no request runs."""
        self._scheduler.call(self.programs.warm_up).result()

    def close(self, *, drain_s: float = 0.0) -> None:
        """Ends the engine: takes no more requests, and ends those that are not finished.

        From any thread, but not in a signal handler, which may have interrupted a ``submit`` of its own thread: set a flag there.

        Args:
            drain_s: seconds that requests may go on for before that.

        Raises:
            ServeError: that is no number of seconds from 0.
        """
        if not 0 <= real(drain_s) <= threading.TIMEOUT_MAX:
            raise ServeError(
                f"drain_s={drain_s!r:.40} was given; it must be a number of seconds from 0 to {threading.TIMEOUT_MAX:g}. At "
                f"{user_line()}. Correct it, or leave it out to end at once."
            )
        if drain_s > 0:
            self._scheduler.drain()
            self._thread.join(real(drain_s))
        self._scheduler.close("it was asked to")
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _array_of(prompt: Any) -> np.ndarray:
    """NumPy alone takes truth values between numbers for 0 and 1, and whole numbers of two of its types for fractions."""
    if not isinstance(prompt, (list, tuple)):
        return np.asarray(prompt)
    found = [whole(token) for token in prompt]
    if None not in found:
        return np.asarray(found)
    array = np.asarray(prompt)
    return array if array.dtype.kind not in "iu" else array.astype(object)


def _check_several(prompts: Any, sampling: Any) -> None:
    """Refuses what is no list of prompts, and what is neither one sampling nor a list of them."""
    listed = isinstance(prompts, Collection) and not isinstance(prompts, (*_TEXT, Mapping))
    first = next(iter(prompts), None) if listed else None
    if not listed or isinstance(first, (int, float)) or getattr(first, "ndim", None) == 0:
        raise RequestError(
            f"prompts={prompts!r:.{SHOWN}} was given; it must be a list of prompts, each a sequence of tokens (bytes "
            f"are tokens, too). At {user_line()}. Give a list also of one prompt. {_ENCODE}"
        )
    if not isinstance(sampling, Sampling) and (
        not isinstance(sampling, Iterable) or isinstance(sampling, (str, Mapping))
    ):
        raise RequestError(
            f"sampling={sampling!r:.{SHOWN}} was given; it must be an al.serve.Sampling, or a list of one per prompt. "
            f"At {user_line()}. Write for example sampling=al.serve.Sampling(temperature=0.8)."
        )


def _run(scheduler: Scheduler, runner: Programs | Pipeline | Hosts, wide: bool) -> None:
    """``wide``: whether JAX takes numbers of 64 bits, as it did for the graphs: that may be a setting of one thread alone."""
    try:
        # Prompts, tokens and settings of draws cross on purpose, also where the user has JAX watch for transfers.
        with jax.transfer_guard_host_to_device("allow"), jax.enable_x64(wide):
            scheduler.run()
    finally:
        _close(runner)


def _close(runner: Programs | Pipeline | Hosts) -> None:
    if not isinstance(runner, (Programs, Pipeline)):  # actors, which are processes of their own
        runner.close()


def _end(scheduler: weakref.ref[Scheduler], thread: weakref.ref[threading.Thread]) -> None:
    """Ends an engine that still runs when the process ends; nothing where its thread is gone."""
    running, left = thread(), scheduler()
    if running is not None and left is not None:
        left.close(_DROPPED)
        if running.ident is not None:  # else it never ran
            running.join()


def _keep_compiled(folder: str) -> None:
    """As workers on Ray keep theirs (``executor/ray/actor.py``): whatever takes however long to compile."""
    if getattr(jax.config, "jax_compilation_cache_dir") is not None:  # noqa: B009 - its attributes are made at run time
        return
    try:
        keep_compiled(folder)
    except OSError as error:
        raise ServeError(
            f"compiled programs cannot be kept in {folder!r}: {error.strerror or error}. It must be a folder that you may write "
            f"to; it is made where its parent may be written to. At {user_line()}. Correct compile_cache (--compile-cache at the "
            "command line), or leave it out."
        ) from error
