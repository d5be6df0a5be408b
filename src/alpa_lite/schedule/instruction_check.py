"""The verifier of instruction lists: transfers are matched, and every buffer lives from one birth to one end."""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

from alpa_lite.errors import ScheduleError
from alpa_lite.schedule import instructions as ins
from alpa_lite.schedule.actions import Schedule


def check_instructions(instructions: ins.Instructions, schedule: Schedule | None = None) -> None:
    """Checks instruction lists, except that they end: that is what ``simulate`` finds out.

    1. Every transfer of ``instructions.transfers`` has one SEND and one RECV, of the same buffer, on the meshes that it names;
       each pair of meshes sends and receives in the same order.
    2. No buffer is read, sent or freed before it is there or after it was freed; none is made twice.
    3. At its end a mesh holds exactly the buffers that it keeps.
    4. With ``schedule``: the RUNs of every mesh are its column.

    Raises:
        ScheduleError: with ``problem`` "unmatched transfer", "use before definition", "use after free", "double free",
            "double", "leak" or "missing".
    """
    _check_transfers(instructions)
    for mesh, each in enumerate(instructions.meshes):
        _check_buffers(instructions.name, mesh, each)
    if schedule is not None:
        _check_runs(instructions, schedule)


def _check_transfers(instructions: ins.Instructions) -> None:
    sends: dict[tuple[int, int], list[tuple[int, ins.BufferId]]] = {}
    recvs: dict[tuple[int, int], list[tuple[int, ins.BufferId]]] = {}
    for mesh, each in enumerate(instructions.meshes):
        for instruction in each.instructions:
            if isinstance(instruction, ins.Send):
                pair = mesh, instruction.destination
                sends.setdefault(pair, []).append((instruction.transfer, instruction.buffer))
            elif isinstance(instruction, ins.Recv):
                pair = instruction.source, mesh
                recvs.setdefault(pair, []).append((instruction.transfer, instruction.buffer))
    listed: dict[tuple[int, int], list[tuple[int, ins.BufferId]]] = {}
    for transfer in instructions.transfers:
        listed.setdefault((transfer.source, transfer.destination), []).append((transfer.id, transfer.buffer))
    for pair in sorted({*sends, *recvs, *listed}):
        sent, received = sends.get(pair, []), recvs.get(pair, [])
        for other in (received, listed.get(pair, [])):
            if difference := sorted((Counter(sent) - Counter(other)) + (Counter(other) - Counter(sent)), key=str):
                _unmatched(instructions, pair, difference[0], sent, received)
        if sent != received:
            k = next(k for k, (a, b) in enumerate(zip(sent, received, strict=True)) if a != b)
            raise ScheduleError(
                f"the instructions of {instructions.name!r} send #{sent[k][0]} but receive #{received[k][0]} as number {k + 1} "
                f"from mesh {pair[0]} to mesh {pair[1]}. Both sides of a pair name their transfers in one order. Exchange "
                "the SENDs or the RECVs.",
                "unmatched transfer",
            )


def _unmatched(
    instructions: ins.Instructions,
    pair: tuple[int, int],
    transfer: tuple[int, ins.BufferId],
    sent: list[tuple[int, ins.BufferId]],
    received: list[tuple[int, ins.BufferId]],
) -> NoReturn:
    raise ScheduleError(
        f"the instructions of {instructions.name!r} hold transfer #{transfer[0]} of {transfer[1]} with {sent.count(transfer)} "
        f"SENDs and {received.count(transfer)} RECVs. Every transfer in the list has one of each, of one buffer. It goes from "
        f"mesh {pair[0]} to mesh {pair[1]}: add or remove the other half there.",
        "unmatched transfer",
    )


def _check_buffers(name: str, mesh: int, each: ins.MeshInstructions) -> None:
    there, freed = set(each.arguments), set[ins.BufferId]()

    def need(buffer: ins.BufferId, at: int, instruction: ins.Instruction) -> None:
        if buffer in there:
            return
        problem = "use before definition" if buffer not in freed else "use after free"
        if isinstance(instruction, ins.Free) and buffer in freed:
            problem = "double free"
        _refuse(name, problem, mesh, at, instruction, buffer)

    for at, instruction in enumerate(each.instructions):
        if isinstance(instruction, ins.Run):
            for buffer in instruction.reads:
                need(buffer, at, instruction)
            born = [buffer for buffer in instruction.writes if buffer not in instruction.reads]
        else:
            born = [instruction.buffer] if isinstance(instruction, (ins.Zeros, ins.Recv)) else []
        if isinstance(instruction, (ins.Send, ins.Free)):
            need(instruction.buffer, at, instruction)
        if isinstance(instruction, ins.Free):
            there.remove(instruction.buffer)
            freed.add(instruction.buffer)
        for buffer in born:
            if buffer in there or buffer in freed:
                _refuse(name, "double", mesh, at, instruction, buffer)
            there.add(buffer)
    if different := sorted(there.symmetric_difference(each.kept), key=str):
        left = different[0] in there
        raise ScheduleError(
            f"the instructions of {name!r} end with {different[0]} {'still' if left else 'not'} on mesh {mesh}. At its end a "
            f"mesh holds the buffers that it keeps, and they are {[str(b) for b in each.kept][:8]}. "
            + ("Add a FREE after its last use." if left else "Remove its FREE, or make it."),
            "leak" if left else "missing",
        )


def _refuse(
    name: str, problem: str, mesh: int, at: int, instruction: ins.Instruction, buffer: ins.BufferId
) -> NoReturn:
    what = {
        "use before definition": "before the buffer is there",
        "use after free": "after the buffer was freed",
        "double free": "a second time",
        "double": "though the buffer was made before",
    }[problem]
    raise ScheduleError(
        f"the instructions of {name!r} hold '{instruction}' {what} ({problem} of {buffer}). A buffer is made once (by ZEROS, "
        "RECV or RUN, or as an argument), then used, then freed once. It is instruction "
        f"{at + 1} of mesh {mesh}: move or remove it.",
        problem,
    )


def _check_runs(instructions: ins.Instructions, schedule: Schedule) -> None:
    for mesh, (each, column) in enumerate(zip(instructions.meshes, schedule.columns, strict=True)):
        runs = [instruction.action for instruction in each.instructions if isinstance(instruction, ins.Run)]
        if tuple(runs) != column:
            k = next(
                (k for k, (a, b) in enumerate(zip(runs, column, strict=False)) if a != b), min(len(runs), len(column))
            )
            wanted = column[k] if k < len(column) else "nothing"
            got = runs[k] if k < len(runs) else "nothing"
            raise ScheduleError(
                f"the instructions of {instructions.name!r} run {got} where the schedule has {wanted}. The RUNs of a mesh are "
                f"the column of its schedule. It is RUN {k + 1} of mesh {mesh}: emit the instructions again.",
                "missing" if len(runs) < len(column) else "double" if len(runs) > len(column) else "order",
            )
