"""Workers without Ray: several in this process, one thread each, over a transport that hands arrays on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.api.bound import staged_for
from alpa_lite.core.spec import ShardingSpec
from alpa_lite.executor.host_tiles import Tiling, joined, whole_tiles
from alpa_lite.executor.parcel import Parcel, make_parcel, read_parcel
from alpa_lite.executor.worker import StepOrder, Worker
from tests.executor import exported_steps, pipeline_steps
from tests.serve.engines import STAGED_SIZES, model_and_params, staged_layout


class Handed:
    """A transport within one process."""

    address = "here"

    def __init__(self, offers: dict[int, Any], changed: threading.Condition) -> None:
        self.offers, self.changed = offers, changed

    def connect(self, addresses: Sequence[str]) -> None: ...

    def post(self, key: int, arrays: Sequence[Any]) -> None:
        with self.changed:
            assert key not in self.offers
            self.offers[key] = list(arrays)
            self.changed.notify_all()

    def pull(self, process: int, key: int, types: Sequence[jax.ShapeDtypeStruct]) -> Sequence[Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.offers, timeout=60), f"nobody posted {key}"
            arrays = self.offers.pop(key)
        assert [(a.shape, a.dtype) for a in arrays] == [(t.shape, t.dtype) for t in types]
        return [jax.device_put(a, t.sharding) for a, t in zip(arrays, types, strict=True)]


def parcel_of(step: Any, *args: Any) -> Parcel:
    traced, plan = step._traced_plan(args, {})
    staged = staged_for(plan, traced) if plan.pipeline else None
    return read_parcel(msgspec.msgpack.encode(make_parcel(plan, traced, staged)))


class Group:
    """All workers of a parcel, as a driver uses them."""

    def __init__(self, parcel: Parcel) -> None:
        offers: dict[int, Any] = {}
        changed = threading.Condition()
        self.parcel = parcel
        self.process_of = {d: s.number for s in parcel.sites for d in s.devices}
        self.workers = [Worker(parcel, s.number, Handed(offers, changed)) for s in parcel.sites]
        self.offers = offers
        self.steps = 0

    def each(self, do: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(do, range(len(self.workers))))

    def step(self, leaves: Sequence[Any], kept: dict[int, int], names: dict[int, int]) -> dict[int, np.ndarray]:
        self.steps += 1
        tiles: list[dict[int, Any]] = [{} for _ in self.workers]
        for call in self.parcel.read_calls():
            if call.kind == "place":
                position = int(call.reads[0][1:])
                kind, stage = self.parcel.inputs[position], self.parcel.stages[call.stage]
                spec = ShardingSpec.parse(call.spec)
                dealt = Tiling(kind.shape, kind.dtype, spec, stage.logical, stage.devices, self.process_of)
                for process, part in dealt.deal(leaves[position]).items() if position not in kept else ():
                    tiles[process][position] = part

        def one(k: int) -> Any:
            held = {p: n for p, n in kept.items() if n in self.workers[k].kept}
            order = StepOrder(number=self.steps, given=tiles[k], kept=held, names=names, timed=self.steps == 2)
            return self.workers[k].step(order)

        answers = self.each(one)
        assert all((answer.busy_s > 0) == (self.steps == 2) for answer in answers)
        assert not self.offers, "everything that was posted was pulled"
        return {position: value for answer in answers for position, value in answer.told.items()}

    def fetch(self, name: int) -> np.ndarray:
        return joined([w.fetch(name) for w in self.workers if name in w.kept])


def run(step: Any, args: tuple[Any, ...], state: Sequence[tuple[int, int]], count: int = 3) -> Group:
    """Some steps of workers beside the local executor: bit-equal, as all is on one host."""
    group = Group(parcel_of(step, *args))
    leaves, kept = jax.tree.leaves(args), {}
    expected = args
    for _ in range(count):
        names = {r: 1000 * group.steps + r for r in range(len(group.parcel.outputs))}
        told = group.step(leaves, kept, names)
        kept = {a: names[r] for a, r in state}
        made = step(*jax.tree.map(lambda x: x.copy(), expected))
        expected = (made[0], *args[1:])
        for position, value in told.items():
            np.testing.assert_array_equal(value, words(jax.tree.leaves(made)[position]))
    for position, leaf in enumerate(jax.tree.leaves(made)):
        np.testing.assert_array_equal(group.fetch(names[position]), words(leaf), err_msg=str(position))
    return group


def words(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def aliases(step: Any, *args: Any) -> list[tuple[int, int]]:
    return list(step._traced_plan(args, {})[0].program.aliases)


@pytest.mark.medium
def test_a_step_on_one_mesh() -> None:
    """Keys and bfloat16 among the state."""
    args = exported_steps.state(), exported_steps.batch()
    step = al.parallelize(exported_steps.step, plan=exported_steps.plan(4), donate_argnums=0)
    group = run(step, args, aliases(step, *args))
    assert len(group.workers) == 1


@pytest.mark.slow
def test_two_stages_in_two_processes() -> None:
    """With a tied embedding and a norm over all stages, so that values cross before, in and after the loop."""
    options = al.PlanOptions(num_stages=2, num_microbatches=pipeline_steps.MICROBATCHES)
    step = al.parallelize(
        pipeline_steps.step_of(pipeline_steps.loss_fn),
        cluster=al.Cluster.parse("1x4:cpu"),
        options=options,
        donate_argnums=0,
    )
    args = pipeline_steps.arguments()
    group = run(step, args, aliases(step, *args))
    assert [s.devices for s in group.parcel.sites] == [(0, 1), (2, 3)]


@pytest.mark.slow
def test_workers_of_two_graphs_on_one_transport() -> None:
    """Their steps are numbered together; nothing is posted under a name that was used before."""
    model, params = model_and_params("gpt")
    offers: dict[int, Any] = {}
    transport = Handed(offers, threading.Condition())
    workers, given, sent = [], [], 0
    for name, (fn, args) in al.serve.graphs(model, params, **STAGED_SIZES).items():
        if name != "prefill_24":
            plan = staged_layout("gpt").plans[name]
            sent += len(plan.pipeline.transfers)
            workers.append(Worker(parcel_of(al.parallelize(fn, plan=plan, donate_argnums=1), *args), 0, transport))
            zeros = [np.zeros(leaf.value.shape, leaf.value.dtype) for leaf in plan.inputs]
            given.append({position: whole_tiles(x) for position, x in enumerate(zeros)})
    for number in range(1, 31):
        workers[number % 2].step(StepOrder(number=number, given=given[number % 2]))
    assert sent >= 3  # a prompt, a token, and where caches are written
    assert len(offers) == 15 * sent


def test_a_worker_that_writes_a_checkpoint_goes_on() -> None:
    """The driver takes one for lost whose progress stands still, however long its disk takes."""
    worker: Any = Worker.__new__(Worker)
    worker.steps, worker.calls = 200, 31
    seen = []

    class Writer:
        def wait(self, tell: Callable[[int], None]) -> str:
            for size in (2**20, 2**20 + 1):
                tell(size)
                seen.append(worker.progress())
            return "written"

    worker.writer = Writer()
    assert worker.finish_save() == "written" and len(set(map(str, seen))) == 2
    assert worker.progress().doing == "waiting"
