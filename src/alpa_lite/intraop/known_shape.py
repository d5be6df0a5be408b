"""What a search finds of a core that follows from its edges and from how many states its nodes have, and from no cost.

Problems of one program on different numbers of devices mostly leave cores of one shape. Whoever solves them one after the other
may hand on what was found: the next answer is the same, bit for bit, and earlier there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from alpa_lite.intraop.level_sweeps import KnownLevels
from alpa_lite.intraop.narrow import KnownScopes


@dataclass(frozen=True, slots=True, eq=False)
class KnownShape:
    """Of the last core; it changes while problems are solved.

    Attributes:
        levels: of sweeps over it.
        scopes: in which order its nodes are eliminated before any sweep.
    """

    levels: KnownLevels = field(default_factory=KnownLevels)
    scopes: KnownScopes = field(default_factory=KnownScopes)
