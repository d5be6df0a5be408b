"""Carries out the calls of a pipelined step (``calls.py``), or those of them that concern some stages.

In: calls in the order of the driver, the devices of the stages, and their programs. Out: the results of the step, by position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from alpa_lite.core.spec import ShardingSpec
from alpa_lite.executor.calls import Call, constant_of
from alpa_lite.lowering.segments import crossing_sharding

Values = dict[str, Any]


class Mover(Protocol):
    """Puts values where calls want them. ``lowering.transfer.Transfers`` does so within a process."""

    def place(self, value: Any, sharding: Any) -> Any: ...
    def send(self, array: Any, sharding: Any) -> Any: ...
    def receive(self, sent: Any) -> Any: ...


class Crossing(Protocol):
    """A "send" whose stages lie in different processes.

    ``send`` runs where the value is, ``expect`` where it is wanted, and ``pass_by`` in all other processes if ``by_all`` is set.
    """

    by_all: bool

    def send(self, array: Any) -> None: ...
    def expect(self) -> Any: ...
    def pass_by(self) -> None: ...


class Replay:
    """Carries out calls; a value is dropped after its last reader.

    Args:
        calls: of one step, in order. Those that neither run, read nor write on a stage of ``meshes`` are left out.
        meshes: stage -> its devices.
        functions: (stage, program) -> the function of its index and what it reads.
        mover: places, sends and receives within the process.
        crossing: makes the halves of a "send" of which one stage is not in ``meshes``, given the call's number among ``calls``.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        meshes: Mapping[int, Mesh],
        functions: Mapping[tuple[int, str], Any],
        mover: Mover,
        crossing: Callable[[int, Call], Crossing] | None = None,
    ) -> None:
        self.meshes, self.functions, self.mover, self.crossing = meshes, functions, mover, crossing
        self.constants: Values = {}
        self.returned: dict[str, int] = {}  # name of a result -> its position
        known: set[str] = set()  # what exists here
        mine: list[tuple[Callable[[Values], None], Call]] = []
        for number, call in enumerate(calls):
            do = self._do(number, call, known)
            if do is not None:
                mine.append((do, call))
                known.update(call.writes)
        last = {name: number for number, (_, call) in enumerate(mine) for name in call.reads}
        self.steps: list[tuple[Callable[[Values], None], tuple[str, ...]]] = []
        for number, (do, call) in enumerate(mine):
            names = (*call.reads, *call.writes)
            self.steps.append(
                (do, tuple(sorted({n for n in names if last.get(n, -1) <= number} - self.constants.keys())))
            )

    def __call__(self, given: Values, done: Callable[[int], None] | None = None) -> dict[int, Any]:
        """One step; waits for nothing.

        Args:
            given: the arguments by name, "a0" and so on; those that no stage here reads may be missing.
            done: told after every call how many were issued.
        """
        values = self.constants | given
        results: dict[int, Any] = {}
        values["results"] = results
        for number, (do, gone) in enumerate(self.steps, 1):
            do(values)
            for name in gone:
                values.pop(name, None)
            if done is not None:
                done(number)
        return results

    def _do(self, number: int, call: Call, known: set[str]) -> Callable[[Values], None] | None:
        """What a call means here; None if nothing, or if it is done once for all steps."""
        if call.kind == "return":
            if call.reads[0] not in known:
                return None
            return partial(_result, call.reads[0], int(call.value))
        if call.kind == "send":
            return self._send(number, call, known)
        if call.stage not in self.meshes:
            return None
        if call.kind == "constant":
            value = constant_of(call)
            self.constants[call.writes[0]] = self._place(value, call) if call.spec else jnp.asarray(value)
            known.add(call.writes[0])
            return None
        return partial(_work, self._work(call), call.reads, call.writes)

    def _send(self, number: int, call: Call, known: set[str]) -> Callable[[Values], None] | None:
        here, wanted = call.reads[0] in known, call.stage in self.meshes
        if here and wanted:
            sharding, send = self._sharding(call), self.mover.send
            return partial(_work, lambda given: [send(given[0], sharding)], call.reads, call.writes)
        if self.crossing is None:
            assert not here and not wanted, "a stage of another process"
            return None
        halves = self.crossing(number, call)
        if not here and not wanted:
            return (lambda values: halves.pass_by()) if halves.by_all else None
        if here:
            return partial(_post, halves, call.reads[0])
        return partial(_expect, halves, call.writes[0])

    def _sharding(self, call: Call) -> Any:
        return crossing_sharding(ShardingSpec.parse(call.spec), self.meshes[call.stage])

    def _place(self, value: Any, call: Call) -> Any:
        return self.mover.place(value, self._sharding(call))

    def _work(self, call: Call) -> Callable[[list[Any]], Sequence[Any]]:
        """The arrays that the call reads -> those that it writes."""
        match call.kind:
            case "run":
                function = self.functions[call.stage, call.program]
                index = Call(kind="constant", stage=call.stage, spec=str(ShardingSpec.replicated(0)))
                return partial(_run, function, self._place(np.int32(call.microbatch), index))
            case "place":
                sharding, place = self._sharding(call), self.mover.place
                return lambda given: [place(given[0], sharding)]
            case "receive":
                receive = self.mover.receive
                return lambda given: [receive(given[0])]
            case "copy":
                return lambda given: [jnp.copy(given[0])]
            case "stack":
                axis = 1 if ShardingSpec.parse(call.spec).unreduced else 0  # behind the dim of the partial sums
                stack = jax.jit(partial(jnp.stack, axis=axis), out_shardings=self._sharding(call))
                return lambda given: [stack(given)]
        raise AssertionError(call)


def exported_function(program: Any, mesh: Mesh, donated: Sequence[int]) -> Any:
    """A ``jax.export`` program as a jitted function on devices; donation does not survive the export."""
    return jax.jit(
        program.call, out_shardings=program.out_shardings_jax(mesh), donate_argnums=tuple(donated), keep_unused=True
    )


def _run(function: Any, index: Any, given: list[Any]) -> Sequence[Any]:
    return function(index, *given)


def _work(
    work: Callable[[list[Any]], Sequence[Any]], reads: tuple[str, ...], writes: tuple[str, ...], values: Values
) -> None:
    values.update(zip(writes, work([values[name] for name in reads]), strict=True))


def _result(name: str, position: int, values: Values) -> None:
    values["results"][position] = values[name]


def _post(crossing: Crossing, name: str, values: Values) -> None:
    crossing.send(values[name])


def _expect(crossing: Crossing, name: str, values: Values) -> None:
    values[name] = crossing.expect()
