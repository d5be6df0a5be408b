"""Instruction lists: what every mesh executes, transfers and frees included. The second level of a schedule.

A mesh works its list off in order. RUN occupies it; everything else takes no time of its own: SEND and RECV post a transfer
that goes on beside later RUNs, and a RUN waits for the transfers of what it reads. Transfers of one pair of meshes are
carried out in the order in which they are posted.
"""

from __future__ import annotations

from dataclasses import dataclass

from alpa_lite.schedule.actions import Action


@dataclass(frozen=True, slots=True)
class BufferId:
    """One buffer: a name, and the microbatch where there is one per microbatch. Copies on two meshes share it."""

    name: str
    microbatch: int | None = None

    def __str__(self) -> str:
        return self.name if self.microbatch is None else f"{self.name}@{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Run:
    """Runs the program of an action; a buffer in both ``reads`` and ``writes`` is changed in place."""

    action: Action
    reads: tuple[BufferId, ...] = ()
    writes: tuple[BufferId, ...] = ()

    def __str__(self) -> str:
        return f"RUN {self.action} ({', '.join(map(str, self.reads))}) -> ({', '.join(map(str, self.writes))})"


@dataclass(frozen=True, slots=True)
class _OnBuffer:
    """What concerns one buffer."""

    buffer: BufferId

    def __str__(self) -> str:
        return f"{type(self).__name__.upper()} {self.buffer}"


@dataclass(frozen=True, slots=True)
class Zeros(_OnBuffer):
    """Makes a buffer of zeros, into which gradients are added."""


@dataclass(frozen=True, slots=True)
class Free(_OnBuffer):
    """Gives a buffer back."""


@dataclass(frozen=True, slots=True)
class Send:
    """Posts the sending half of a transfer; the buffer may be freed next, the memory goes when the transfer is over."""

    transfer: int
    buffer: BufferId
    destination: int

    def __str__(self) -> str:
        return f"SEND #{self.transfer} {self.buffer} to mesh {self.destination}"


@dataclass(frozen=True, slots=True)
class Recv:
    """Makes room for a buffer and posts the receiving half of a transfer."""

    transfer: int
    buffer: BufferId
    source: int

    def __str__(self) -> str:
        return f"RECV #{self.transfer} {self.buffer} from mesh {self.source}"


Instruction = Run | Zeros | Send | Recv | Free


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A buffer that goes from one mesh to another; ``size_bytes`` per device of the destination."""

    id: int
    buffer: BufferId
    source: int
    destination: int
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshInstructions:
    """What one mesh executes.

    Attributes:
        instructions: in order.
        arguments: buffers that are there at the start.
        kept: buffers that are there at the end.
        sizes: name and bytes per device of every buffer that is ever on this mesh.
        temporaries: programs, as texts like "0F", and the bytes per device that they need besides their buffers.
    """

    instructions: tuple[Instruction, ...]
    arguments: tuple[BufferId, ...] = ()
    kept: tuple[BufferId, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    temporaries: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructions:
    """Instruction lists of all meshes.

    Attributes:
        name: of the schedule.
        meshes: one list per mesh.
        transfers: by id; ids rise in an order in which all transfers can be carried out one after the other.
    """

    name: str
    meshes: tuple[MeshInstructions, ...]
    transfers: tuple[Transfer, ...] = ()

    def __str__(self) -> str:
        blocks = (
            f"mesh {mesh}\n" + "".join(f"  {instruction}\n" for instruction in each.instructions)
            for mesh, each in enumerate(self.meshes)
        )
        return f"{self.name}\n" + "".join(blocks)
