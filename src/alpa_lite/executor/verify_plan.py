"""``plan.verify``: compiles the planned step with the target's compiler and holds the result against the plan."""

from __future__ import annotations

from dataclasses import dataclass

from alpa_lite.cluster.cluster import Cluster
from alpa_lite.executor.serialize import abstract_step
from alpa_lite.executor.verify import TargetCompile, compile_for_target, export_step
from alpa_lite.lowering.audit import AuditReport, audit
from alpa_lite.plan.plan import Plan
from alpa_lite.trace.program import Traced
from alpa_lite.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What the target's compiler made of the plan.

    Attributes:
        audit: planned against compiled collectives.
        target: XLA's memory figures and compile time.
        predicted_peak_bytes: the plan's.
    """

    audit: AuditReport
    target: TargetCompile
    predicted_peak_bytes: int

    @property
    def ok(self) -> bool:
        return self.audit.ok

    @property
    def memory_ratio(self) -> float:
        """Predicted peak / XLA's peak."""
        return self.predicted_peak_bytes / max(1, self.target.peak_bytes)

    def __str__(self) -> str:
        t = self.target
        return (
            f"{self.audit}\n"
            f"memory per device on {t.device}: predicted {format_bytes(self.predicted_peak_bytes)}, "
            f"XLA {format_bytes(t.peak_bytes)} (ratio {self.memory_ratio:.3f}); "
            f"arguments {format_bytes(t.argument_bytes)}, temporaries {format_bytes(t.temp_bytes)}, "
            f"results {format_bytes(t.output_bytes)}, reused {format_bytes(t.alias_bytes)}\n"
            f"compiled in {t.compile_s:.1f} s\n"
        )


def verify_plan(plan: Plan, traced: Traced) -> VerifyReport:
    """Compile ``plan`` for its own cluster.

    Raises:
        VerificationError: the extra ``aot`` is missing, or the compiler failed.
        ClusterError: the cluster's device has no deviceless compiler (only NVIDIA GPUs have).
    """
    cluster = Cluster.parse(plan.identity.cluster)
    exported = export_step(*abstract_step(traced, plan))
    donated = tuple(i for i, d in enumerate(traced.program.donated) if d)
    target = compile_for_target(
        exported, device=cluster.device.name, mesh=plan.mesh, devices_per_host=cluster.devices_per_host, donated=donated
    )
    return VerifyReport(
        audit=audit(plan.collectives, target.hlo_text, plan.mesh),
        target=target,
        predicted_peak_bytes=plan.memory.peak,
    )
