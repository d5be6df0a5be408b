"""Compiled HLO text, read as far as the audit needs it.

In: ``compiled.as_text()`` of XLA:CPU or XLA:GPU. Out: an ``HloModule`` of computations and instructions with types,
operands, attributes and the user's source line. Only the grammar of the printed text is known here; what a collective
is, ``hlo.py`` knows.

Two metadata forms exist: ``source_file``/``source_line`` on each instruction, and ``stack_frame_id`` into the tables
FileNames, FileLocations and StackFrames at the top of the module (jaxlib 0.8 and later). Both are read.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=]*)\]")
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[()]')
_NAME = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_SOURCE_FILE = re.compile(r'source_file="((?:[^"\\]|\\.)*)"')
_SOURCE_LINE = re.compile(r"source_line=(\d+)")
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """Element type and shape of one array, e.g. ``bf16[16,32]``."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def size_bytes(self) -> int:
        return bytes_of(self.dtype, self.elements)


def bytes_of(dtype: str, elements: int) -> int:
    """Bytes of an array; types below one byte are packed."""
    return math.ceil(elements * bits_of(dtype) / 8)


def bits_of(dtype: str) -> int:
    """Bits per element of an HLO element type: ``bf16`` 16, ``f8e4m3fn`` 8, ``s4`` 4, ``pred`` 8, ``token`` 0."""
    if dtype == "pred":
        return 8
    digits = re.search(r"\d+", dtype)
    return int(digits.group()) if digits else 0


def tensors_in(type_text: str) -> tuple[Tensor, ...]:
    """The arrays of a type text, nested tuples flattened, in order."""
    return tuple(
        Tensor(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))
        for dtype, dims in _SHAPE.findall(type_text)
    )


def dtypes_in(text: str) -> frozenset[str]:
    """All element types that occur in a text."""
    return frozenset(dtype for dtype, _ in _SHAPE.findall(text))


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: without the percent sign.
        type_text: result type as printed, layouts included.
        opcode: e.g. "all-reduce-start".
        rest: what follows the opcode: "(operands), attributes".
        is_root: whether it is the computation's result.
    """

    name: str
    type_text: str
    opcode: str
    rest: str
    is_root: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tensors_in(self.type_text)

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(_NAME.findall(self.rest[: _closing(self.rest)]))

    @property
    def attributes(self) -> str:
        return self.rest[_closing(self.rest) + 1 :]

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations it calls."""
        return tuple(name for text in _CALLED.findall(self.rest) for name in _NAME.findall(text))

    @property
    def op_name(self) -> str:
        found = _OP_NAME.search(self.rest)
        return found.group(1) if found else ""


@dataclass(slots=True)
class Computation:
    """Instructions in order, with look-ups by name and by user."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    _by_name: dict[str, Instruction] = field(default_factory=dict)
    _users: dict[str, list[Instruction]] = field(default_factory=dict)

    def get(self, name: str) -> Instruction | None:
        if not self._by_name:
            self._by_name = {i.name: i for i in self.instructions}
        return self._by_name.get(name)

    def users(self, name: str) -> list[Instruction]:
        if not self._users:
            for instruction in self.instructions:
                for operand in instruction.operands:
                    self._users.setdefault(operand, []).append(instruction)
        return self._users.get(name, [])

    @property
    def root(self) -> Instruction | None:
        return next((i for i in self.instructions if i.is_root), None)


@dataclass(frozen=True, slots=True)
class HloModule:
    """A parsed module.

    Attributes:
        computations: by name.
        entry: name of the entry computation.
        num_partitions, num_replicas: from the header.
        frames: stack frame id -> ((file, line), parent frame id).
    """

    computations: dict[str, Computation]
    entry: str
    num_partitions: int
    num_replicas: int
    frames: dict[int, tuple[tuple[str, int], int]]

    def source(self, instruction: Instruction) -> str:
        """The user's "file:line", "" if the text has none; this package's own lines are not the user's."""
        user = (frame for frame in self._stack(instruction) if not frame[0].startswith(_PACKAGE))
        file, line = next(user, ("", 0))
        return f"{file}:{line}" if file else ""

    def _stack(self, instruction: Instruction) -> Iterator[tuple[str, int]]:
        file, line = _SOURCE_FILE.search(instruction.rest), _SOURCE_LINE.search(instruction.rest)
        if file and line:
            yield file.group(1), int(line.group(1))
        found = _FRAME_ID.search(instruction.rest)
        frame, seen = int(found.group(1)) if found else 0, set[int]()
        while frame in self.frames and frame not in seen:  # a root frame names itself or 0 as its parent
            seen.add(frame)
            location, parent = self.frames[frame]
            yield location
            frame = parent


def parse_hlo(text: str) -> HloModule:
    """Reads module text.

    Raises:
        ValueError: the text has no entry computation, so it is not (whole) HLO text.
    """
    lines = text.splitlines()
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in lines:
        if current is None:
            header = _HEADER.match(line)
            if header:
                current = computations[header.group(2)] = Computation(header.group(2))
                entry = header.group(2) if header.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif (instruction := _parse_instruction(line)) is not None:
            current.instructions.append(instruction)
    if not entry:
        raise ValueError(
            f"expected the text of a compiled HLO module (compiled.as_text()) with an ENTRY computation, got "
            f"{len(text)} characters that start with {text[:60]!r}; pass the whole text of the compiled step"
        )
    header_line = next((line for line in lines if line.startswith("HloModule")), "")
    return HloModule(
        computations=computations,
        entry=entry,
        num_partitions=_header_number(header_line, "num_partitions"),
        num_replicas=_header_number(header_line, "replica_count"),
        frames=_parse_frames(lines),
    )


def _header_number(header: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d+)", header)
    return int(found.group(1)) if found else 1


def _parse_instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    start = match.end()
    if line.startswith("(", start):
        end = _closing(line, start) + 1
    else:
        end = line.find(" ", start)
    opening = line.find("(", end)
    if end <= 0 or opening < 0:
        return None
    opcode = line[end:opening].strip()
    return Instruction(match.group(2), line[start:end], opcode, line[opening:], match.group(1) is not None)


def _closing(text: str, start: int = 0) -> int:
    """Index of the parenthesis that closes the one at ``start`` (strings are skipped); the last index if none does."""
    depth = 0
    for match in _BRACKET.finditer(text, start):
        if match.group() == "(":
            depth += 1
        elif match.group() == ")":
            depth -= 1
            if depth == 0:
                return match.start()
    return len(text) - 1


def _parse_frames(lines: list[str]) -> dict[int, tuple[tuple[str, int], int]]:
    """Joins the tables FileNames, FileLocations and StackFrames."""
    table = ""
    files: dict[int, str] = {}
    locations: dict[int, tuple[str, int]] = {}
    frames: dict[int, tuple[tuple[str, int], int]] = {}
    for line in lines:
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = line
        elif line.startswith(("%", "ENTRY")):
            break
        elif table and line[:1].isdigit():
            number, _, value = line.partition(" ")
            index = int(number)
            if table == "FileNames":
                files[index] = value.strip('"')
            elif table == "FileLocations":
                locations[index] = (files.get(_field(value, "file_name_id"), ""), _field(value, "line"))
            elif table == "StackFrames":
                location = locations.get(_field(value, "file_location_id"), ("", 0))
                frames[index] = (location, _field(value, "parent_frame_id"))
    return frames


def _field(text: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d+)", text)
    return int(found.group(1)) if found else 0
