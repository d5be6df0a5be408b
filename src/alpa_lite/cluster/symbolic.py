"""A cluster whose number of devices is a name: what ``al.plan`` takes to make a plan for every number at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.errors import ClusterError


@dataclass(frozen=True, slots=True)
class SymbolicCluster:
    """Hosts of equal make, as many as ``name`` devices along one mesh axis need.

    Attributes:
        name: of the number, e.g. "n"; ``PlanOptions.mesh_shape`` holds it in place of one size.
        host: one host of the cluster.
        values: the numbers that are considered, rising.
    """

    name: str
    host: Cluster
    values: tuple[int, ...]

    @classmethod
    def make(cls, name: str, *, device: str, devices_per_host: int = 8, values: Iterable[int]) -> SymbolicCluster:
        """Checks what a user gave.

        Raises:
            ClusterError: the name is none, the device is unknown, or the values are not whole numbers of at least 1.
        """
        where = "It was given to Cluster.symbolic"
        if not isinstance(name, str) or not name.isidentifier():
            raise ClusterError(
                f"the number of workers is called {name!r}. A name like 'n' is allowed (letters, digits, _). {where}: write "
                "al.Cluster.symbolic('n', ...), or al.Cluster.parse('1x8:h100-sxm') for a number that is known."
            )
        if not _whole(devices_per_host):
            raise ClusterError(
                f"devices_per_host={devices_per_host!r} is no number of devices. A whole number of at least 1 is allowed; "
                f"only {name!r} itself stays open. {where}: give e.g. devices_per_host=8."
            )
        listed: list[object] = [*values] if isinstance(values, Iterable) and not isinstance(values, str) else [values]
        numbers = {v for v in listed if isinstance(v, int) and _whole(v)}
        wrong = [v for v in listed if not _whole(v)]
        if wrong or not numbers:
            raise ClusterError(
                f"values={values!r} holds {repr(wrong[0]) if wrong else 'no number'}. The values of {name!r} are whole "
                f"numbers of at least 1, and there is at least one. {where}: give e.g. values=range(1, 65)."
            )
        return cls(name, Cluster.of(device, devices_per_host=devices_per_host), tuple(sorted(numbers)))

    def specialize(self, n: int, *, others: int = 1) -> Cluster:
        """The cluster for ``n`` workers along the symbolic axis and ``others`` devices for each: as few hosts as hold them."""
        return replace(self.host, num_hosts=-(-n * others // self.host.devices_per_host))

    def __str__(self) -> str:
        return f"{self.name} x {self.host.device.name}, {self.host.devices_per_host} per host"


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
