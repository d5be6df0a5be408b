"""What was measured on real devices, as data: joins a ``Cluster`` and a plan's identity. The executor measures."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from alpa_lite.cluster.hardware import Device
from alpa_lite.core.collective import CollectiveKind
from alpa_lite.errors import ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """A fit ``time = alpha_s + beta_s_per_byte * size_bytes`` for one kind over ``num_devices`` of one host.

    ``inner``: along another dim than the first, where what is sent or received has to be copied together.
    """

    kind: CollectiveKind
    num_devices: int
    alpha_s: float
    beta_s_per_byte: float
    inner: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Figures measured with all local devices at work at once.

    Attributes:
        device_kind: what JAX calls the device.
        num_devices: how many took part.
        matmul_flops_per_s: by short dtype name ("f32", "bf16"), for large matmuls.
        ramp_s: what a matmul takes on top of its FLOPs at that rate.
        memory_bandwidth_bytes_per_s: of a large copy, read plus write; on CPU of elementwise loops of several kinds.
        launch_s: the least time of an op.
        across_s_per_byte: what a product of transposed rows (``x.T @ x``) adds to its FLOPs, per byte of its first operand.
        collectives: per kind and group size, along the first dim and along another one.
        date: ISO date.
        jax_version: with which it was measured.
    """

    device_kind: str
    num_devices: int
    matmul_flops_per_s: tuple[tuple[str, float], ...]
    ramp_s: float
    memory_bandwidth_bytes_per_s: float
    launch_s: float
    across_s_per_byte: float = 0.0
    collectives: tuple[MeasuredCollective, ...] = ()
    date: str = ""
    jax_version: str = ""

    def to_text(self) -> str:
        """One line of JSON; equal records give equal text."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Calibration:
        """Inverse of ``to_text``.

        Raises:
            ClusterError: the text is no calibration record.
        """
        try:
            data = json.loads(text)
            data["matmul_flops_per_s"] = tuple((str(d), float(rate)) for d, rate in data["matmul_flops_per_s"])
            data["collectives"] = tuple(
                MeasuredCollective(
                    kind=CollectiveKind(entry["kind"]),
                    num_devices=int(entry["num_devices"]),
                    alpha_s=float(entry["alpha_s"]),
                    beta_s_per_byte=float(entry["beta_s_per_byte"]),
                    inner=bool(entry.get("inner", False)),
                )
                for entry in data["collectives"]
            )
            return cls(**data)
        except (KeyError, TypeError, ValueError) as error:
            raise ClusterError(
                f"a calibration record cannot be read: {error}. Expected the JSON text of Calibration.to_text(), "
                f"got {text[:60]!r}. Measure again with al.Cluster.local(calibrate=True)."
            ) from None

    def collective(self, kind: CollectiveKind, num_devices: int, inner: bool = False) -> MeasuredCollective | None:
        """The measurement of ``kind`` whose group size is nearest (by ratio; ties: the smaller group)."""
        found = [entry for entry in self.collectives if entry.kind is kind and entry.inner == inner]
        if not found:
            return None
        return min(
            found, key=lambda e: (max(e.num_devices, num_devices) / min(e.num_devices, num_devices), e.num_devices)
        )


def calibrated_device(device: Device, calibration: Calibration) -> Device:
    """``device`` with measured rates in place of the table's; efficiencies become 1 because the rates are reached ones.

    Dtypes that were not measured keep their peak, scaled by the table's efficiency.
    """
    measured = dict(calibration.matmul_flops_per_s)
    # A float32 matmul runs on the tf32 units where there are any, so that is the rate which was measured.
    if any(dtype == "tf32" for dtype, _ in device.flops_per_s) and "f32" in measured:
        measured["tf32"] = measured.pop("f32")
    rates = tuple((dtype, measured.get(dtype, peak * device.matmul_efficiency)) for dtype, peak in device.flops_per_s)
    return dataclasses.replace(
        device,
        flops_per_s=rates,
        memory_bandwidth_bytes_per_s=calibration.memory_bandwidth_bytes_per_s,
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        ramp_s=calibration.ramp_s,
        launch_s=calibration.launch_s,
        across_s_per_byte=calibration.across_s_per_byte,
    )
