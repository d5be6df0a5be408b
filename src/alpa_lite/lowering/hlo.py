"""The collectives of a compiled program, one record per moved tensor.

In: HLO text. Out: ``HloCollective`` records in program order. Every collective that runs is found wherever it stands
(fusions, called computations, loop bodies, branches, async wrappers), an async pair counts once, a combined (variadic)
collective gives one record per tensor, and a loop body multiplies by the loop's trip count.

What XLA does to collectives that the plan wrote out (seen with jaxlib 0.10.2 and 0.12.0); this module sees through the
printed form, ``audit.py`` through the rest:

- both: combines collectives of one kind and one group list into a variadic one; joins equal ones.
- XLA:CPU: moves bf16 as f32 and f8 as f16; an all-to-all becomes a tuple of slices.
- XLA:GPU: ``-start``/``-done`` pairs; all-reduces are laid end to end in one buffer (a concatenate feeds one,
  in 0.10 without metadata); all-reduces over x, then y become one over both, without metadata; AR(a) + AR(b) becomes
  AR(a + b), reduce-scatters likewise; a conversion to a wider type moves behind an all-gather; loops are peeled; an
  all-reduce of which only a slice is used becomes a reduce-scatter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from alpa_lite.core.collective import CollectiveKind
from alpa_lite.lowering.device_groups import Groups, parse_groups
from alpa_lite.lowering.hlo_text import Computation, HloModule, Instruction, Tensor, bytes_of, parse_hlo
from alpa_lite.lowering.hlo_trips import trip_count

# Kinds outside CollectiveKind are never planned; they are recorded so that the audit cannot overlook them.
_OTHER_KINDS = ("collective-broadcast", "ragged-all-to-all", "send")
_KINDS = (*(str(kind) for kind in CollectiveKind), *_OTHER_KINDS)
_PASSED = frozenset({"bitcast", "copy", "reshape", "transpose", "get-tuple-element", "copy-start", "copy-done"})
_GROUPS = re.compile(r"\b(?:replica_groups|source_target_pairs)=")
_KEY = re.compile(r"\bal_c(\d+)\b")
_HOPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class HloCollective:
    """One tensor moved by one collective.

    Attributes:
        kind: a ``CollectiveKind``, or the opcode of a collective that plans do not use.
        groups: device groups; (source, target) pairs for a permute.
        size_bytes: per device and execution, in the convention of ``core/collective.py``.
        dtype, elements: type and number of the moved elements (of the larger side).
        count: executions per step.
        count_is_known: False inside a loop whose trip count cannot be read; ``count`` then assumes one iteration.
        source: the user's "file:line".
        op_name: XLA's metadata; of all joined operations if it was combined.
        instruction: its name in the HLO text.
        keys: numbers of the ``al_c<number>`` scopes in ``op_name`` (or, if there is none, of what uses the result).
        near: opcodes that feed the tensor or use the result, and "convert:TYPE" for conversions there.
        parts: element counts, if the tensor is several ones that XLA laid end to end.
        joined: number of tensors that the instruction moves together.
    """

    kind: str
    groups: Groups
    size_bytes: int
    dtype: str
    elements: int
    count: int = 1
    count_is_known: bool = True
    source: str = ""
    op_name: str = ""
    instruction: str = ""
    keys: tuple[int, ...] = ()
    near: frozenset[str] = frozenset()
    parts: tuple[int, ...] = ()
    joined: int = 1

    def size_as(self, dtype: str) -> int:
        """Bytes if the elements were of another type."""
        return bytes_of(dtype, self.elements)


def collectives_in(hlo_text: str) -> tuple[HloCollective, ...]:
    """All collectives that one execution of the module runs; groups of one device are left out.

    Raises:
        ValueError: the text is not a compiled module, or prints device groups in an unknown notation.
    """
    module = parse_hlo(hlo_text)
    return tuple(_walk(module, module.entry, 1, True, frozenset(_with_collectives(module))))


def _kind_of(opcode: str) -> str:
    """The collective an opcode starts or runs, "" for others and for the second half of an async pair."""
    kind = opcode.removesuffix("-start")
    return kind if kind in _KINDS else ""


def _with_collectives(module: HloModule) -> set[str]:
    """Names of the computations that run a collective, directly or through calls."""
    callers: dict[str, set[str]] = {}
    found: list[str] = []
    for computation in module.computations.values():
        for instruction in computation.instructions:
            for callee in instruction.called:
                callers.setdefault(callee, set()).add(computation.name)
            if _kind_of(instruction.opcode):
                found.append(computation.name)
    closed: set[str] = set()
    while found:
        name = found.pop()
        if name not in closed:
            closed.add(name)
            found.extend(callers.get(name, ()))
    return closed


def _walk(
    module: HloModule, name: str, count: int, known: bool, interesting: frozenset[str]
) -> Iterator[HloCollective]:
    if name not in interesting:
        return
    computation = module.computations[name]
    for instruction in computation.instructions:
        kind = _kind_of(instruction.opcode)
        if kind:
            yield from _records(module, computation, instruction, kind, count, known)
        elif instruction.opcode in ("async-update", "async-done"):
            continue  # these name the computation that their async-start has run
        elif any(callee in interesting for callee in instruction.called):
            trips: int | None = 1
            if instruction.opcode == "while":
                trips = trip_count(module, computation, instruction)
            for callee in instruction.called:
                times = count * (1 if trips is None else trips)
                yield from _walk(module, callee, times, known and trips is not None, interesting)


def _records(
    module: HloModule, computation: Computation, instruction: Instruction, kind: str, count: int, known: bool
) -> Iterator[HloCollective]:
    """One record per tensor of one collective instruction."""
    attributes = instruction.attributes
    if kind == "send" and "is_host_transfer=true" in attributes:
        return
    groups = _groups(module, attributes, kind)
    if kind == CollectiveKind.COLLECTIVE_PERMUTE:
        if all(len(pair) == 2 and pair[0] == pair[1] for pair in groups):
            return
    elif all(len(group) <= 1 for group in groups):
        return
    moved = _moved(computation, instruction, kind, groups)
    for position, tensor in enumerate(moved):
        op_name = instruction.op_name
        operand = instruction.operands[position] if position < len(instruction.operands) else ""
        only = position if len(moved) > 1 else None
        yield HloCollective(
            kind=kind,
            groups=groups,
            size_bytes=tensor.size_bytes,
            dtype=tensor.dtype,
            elements=tensor.elements,
            count=count,
            count_is_known=known,
            source=module.source(instruction),
            op_name=op_name,
            instruction=instruction.name,
            keys=_keys(op_name) if op_name else _keys(" ".join(_use_names(computation, instruction))),
            near=_near(module, computation, instruction, operand, only),
            parts=_parts(module, computation, operand) if kind == CollectiveKind.ALL_REDUCE else (),
            joined=len(moved),
        )


def _groups(module: HloModule, attributes: str, kind: str) -> Groups:
    """Groups of flattened device ids, also where the text gives replica ids or nothing."""
    everyone = (tuple(range(module.num_partitions * module.num_replicas)),)
    match = _GROUPS.search(attributes)
    groups = parse_groups(attributes[match.end() :]) if match else ()
    if kind in (CollectiveKind.COLLECTIVE_PERMUTE, *_OTHER_KINDS):
        return groups
    by_replica = kind != CollectiveKind.ALL_TO_ALL and "use_global_device_ids=true" not in attributes
    if by_replica and module.num_replicas == 1 and module.num_partitions > 1:
        # Replica ids: with one replica, a channel makes it run over all partitions, none makes it run over one device.
        return everyone if "channel_id=" in attributes else ((0,),)
    return groups or everyone


def _moved(computation: Computation, instruction: Instruction, kind: str, groups: Groups) -> tuple[Tensor, ...]:
    """The larger side of every tensor."""
    operands = tuple(t for name in instruction.operands for t in _tensors(computation, name))
    results = instruction.tensors
    if instruction.opcode.endswith("-start"):
        done = next((u for u in computation.users(instruction.name) if u.opcode.endswith("-done")), None)
        results = done.tensors if done else results[-len(operands) :]
    if kind == CollectiveKind.ALL_TO_ALL and "dimensions=" not in instruction.attributes and len(operands) > 1:
        # The tuple form: one operand per device of the group, together one tensor.
        slices = operands or results
        return (Tensor(slices[0].dtype, (sum(t.elements for t in slices),)),)
    pairs = zip(operands, results, strict=False) if operands else zip(results, results, strict=True)
    return tuple(max(pair, key=lambda t: t.elements) for pair in pairs)


def _tensors(computation: Computation, name: str) -> tuple[Tensor, ...]:
    producer = computation.get(name)
    return producer.tensors if producer else ()


def _keys(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(number) for number in _KEY.findall(text)))


def _use_names(computation: Computation, instruction: Instruction) -> Iterator[str]:
    """``op_name`` of what uses a collective that has none itself, through slices of a common buffer."""
    frontier = [instruction]
    for _ in range(4):
        frontier = [user for origin in frontier for user in computation.users(origin.name)]
        for user in frontier:
            yield user.op_name
        frontier = [user for user in frontier if not user.op_name]


def _near(
    module: HloModule, computation: Computation, instruction: Instruction, operand: str, only: int | None
) -> frozenset[str]:
    """Opcodes on both sides; ``only`` = the one element of a tuple result to follow."""
    seen: set[str] = set()
    producer = computation.get(operand)
    for _ in range(_HOPS):
        if producer is None:
            break
        seen |= _opcodes(module, computation, producer)
        if producer.opcode not in _PASSED or not producer.operands:
            break
        producer = computation.get(producer.operands[0])
    frontier = [instruction]
    for _ in range(_HOPS):
        users = [user for origin in frontier for user in computation.users(origin.name)]
        users = [user for user in users if only is None or _element(user) in (None, only)]
        for user in users:
            seen |= _opcodes(module, computation, user)
        frontier = [user for user in users if user.opcode in _PASSED or user.opcode.endswith("-done")]
    return frozenset(seen)


def _element(user: Instruction) -> int | None:
    match = re.search(r"\bindex=(\d+)", user.attributes) if user.opcode == "get-tuple-element" else None
    return int(match.group(1)) if match else None


def _opcodes(module: HloModule, computation: Computation, instruction: Instruction) -> set[str]:
    """An instruction's opcode, or those of the computation it fuses; conversions with both types."""
    inner, home = [instruction], computation
    if instruction.opcode in ("fusion", "call") and instruction.called:
        home = module.computations.get(instruction.called[0], computation)
        inner = home.instructions if home is not computation else inner
    seen = {i.opcode for i in inner}
    for convert in (i for i in inner if i.opcode == "convert"):
        for tensor in (*convert.tensors, *(t for name in convert.operands for t in _tensors(home, name))):
            seen.add(f"convert:{tensor.dtype}")
    return seen


def _parts(module: HloModule, computation: Computation, operand: str) -> tuple[int, ...]:
    """Element counts of the tensors that XLA laid end to end to make ``operand``; () if it is one tensor."""
    producer = computation.get(operand)
    for _ in range(_HOPS):
        if producer is None or producer.opcode not in _PASSED or not producer.operands:
            break
        producer = computation.get(producer.operands[0])
    home = computation
    if producer is not None and producer.opcode == "fusion" and producer.called:
        home = module.computations.get(producer.called[0], computation)
        producer = home.root if home is not computation else producer
    if producer is None or producer.opcode != "concatenate" or producer.op_name:  # the user's own one has a name
        return ()
    return tuple(t.elements for name in producer.operands for t in _tensors(home, name))
