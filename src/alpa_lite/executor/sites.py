"""Where a plan's stages run on several hosts: one process per submesh and host.

In: a plan. Out: ``Site``s, in the order in which their processes are numbered. The sites of one submesh form a world of their
own: a ``jax.distributed`` job if the submesh spans hosts, a process by itself otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The devices of one host that a submesh has.

    Attributes:
        number: of the site in the plan.
        submesh: number of the submesh, in the order of the stages.
        stages: that lie on the submesh.
        host: of the cluster.
        devices: of the cluster, host by host.
        process, num_processes: this one's place among the sites of its submesh, and how many there are.
    """

    number: int
    submesh: int
    stages: tuple[int, ...]
    host: int
    devices: tuple[int, ...]
    process: int
    num_processes: int


def sites_of(plan: Plan, cluster: Cluster | None = None) -> tuple[Site, ...]:
    """The sites of a plan; ``cluster`` is the plan's own unless given."""
    cluster = cluster or Cluster.parse(plan.identity.cluster)
    submeshes: dict[tuple[int, int], list[int]] = {}
    for number, stage in enumerate(plan.stages):
        submeshes.setdefault((stage.first_device, stage.mesh.num_devices), []).append(number)
    sites: list[Site] = []
    for submesh, ((first, count), stages) in enumerate(submeshes.items()):
        devices = range(first, first + count)
        hosts = sorted({device // cluster.devices_per_host for device in devices})
        for process, host in enumerate(hosts):
            own = tuple(d for d in devices if d // cluster.devices_per_host == host)
            sites.append(
                Site(
                    number=len(sites),
                    submesh=submesh,
                    stages=tuple(stages),
                    host=host,
                    devices=own,
                    process=process,
                    num_processes=len(hosts),
                )
            )
    return tuple(sites)
