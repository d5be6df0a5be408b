"""What XLA:GPU must know of a GPU to compile for it without having one.

In: a device name of the hardware table. Out: the text of a ``GpuTargetConfigProto`` (openxla/xla,
``xla/stream_executor/device_description.proto``). The figures are the vendor's and what the CUDA driver reports; XLA
uses them for fusion, tiling and collective decisions and for the memory limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from alpa_lite.errors import ClusterError

# One CUDA 12 toolkit for all: the versions only switch work-arounds that concern neither collectives nor memory.
_TOOLKIT = "12.9.0"
_DNN = (9, 10, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTarget:
    """One GPU model.

    Attributes:
        name: as the driver prints it.
        major, accelerated: CUDA compute capability, and whether its architecture-specific features ("a" suffix) exist.
        core_count: streaming multiprocessors.
        fpus_per_core: float32 units of one of them.
        shared_memory_per_core_bytes, shared_memory_optin_bytes: in all, and the most that one block may ask for.
        l2_cache_bytes, memory_bytes, memory_bandwidth_bytes_per_s, clock_ghz: of the whole device.
    """

    name: str
    major: int
    accelerated: bool
    core_count: int
    fpus_per_core: int
    shared_memory_per_core_bytes: int
    shared_memory_optin_bytes: int
    l2_cache_bytes: int
    memory_bytes: int
    memory_bandwidth_bytes_per_s: int
    clock_ghz: float

    def config_text(self) -> str:
        """The target configuration as protobuf text."""
        extension = "ACCELERATED_FEATURES" if self.accelerated else "NONE"
        device = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 49152,
            "shared_memory_per_core": self.shared_memory_per_core_bytes,
            "shared_memory_per_block_optin": self.shared_memory_optin_bytes,
            "threads_per_core_limit": 2048,
            "core_count": self.core_count,
            "fpus_per_core": self.fpus_per_core,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "thread_dim_limit_x": 1024,
            "thread_dim_limit_y": 1024,
            "thread_dim_limit_z": 64,
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
            "device_address_bits": 64,
            "memory_bandwidth": self.memory_bandwidth_bytes_per_s,
            "l2_cache_size": self.l2_cache_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.memory_bytes,
            "name": f'"{self.name}"',
            "driver_version": f'"{_TOOLKIT}"',
            "runtime_version": f'"{_TOOLKIT}"',
            "compile_time_toolkit_version": f'"{_TOOLKIT}"',
            "dnn_version": f'"{".".join(map(str, _DNN))}"',
        }
        fields = "".join(f"  {key}: {value}\n" for key, value in device.items())
        capability = f"  cuda_compute_capability {{ major: {self.major} feature_extension: {extension} }}\n"
        dnn = "dnn_version_info {{ major: {} minor: {} patch: {} }}\n".format(*_DNN)
        return (
            f"gpu_device_info {{\n{fields}{capability}}}\n"
            f'platform_name: "CUDA"\n{dnn}device_description_str: "{self.name}"\n'
        )


def _volta(name: str, memory_bytes: int) -> GpuTarget:
    return GpuTarget(
        name=name,
        major=7,
        accelerated=False,
        core_count=80,
        fpus_per_core=64,
        shared_memory_per_core_bytes=98304,
        shared_memory_optin_bytes=98304,
        l2_cache_bytes=6 * 2**20,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=898_048_000_000,
        clock_ghz=1.53,
    )


def _ampere(name: str, memory_bytes: int, bandwidth: int) -> GpuTarget:
    return GpuTarget(
        name=name,
        major=8,
        accelerated=False,
        core_count=108,
        fpus_per_core=64,
        shared_memory_per_core_bytes=167936,
        shared_memory_optin_bytes=166912,
        l2_cache_bytes=40 * 2**20,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=bandwidth,
        clock_ghz=1.41,
    )


def _hopper(name: str, memory_bytes: int, bandwidth: int) -> GpuTarget:
    return GpuTarget(
        name=name,
        major=9,
        accelerated=True,
        core_count=132,
        fpus_per_core=128,
        shared_memory_per_core_bytes=233472,
        shared_memory_optin_bytes=232448,
        l2_cache_bytes=50 * 2**20,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=bandwidth,
        clock_ghz=1.98,
    )


def _blackwell(name: str, memory_bytes: int, bandwidth: int) -> GpuTarget:
    return GpuTarget(
        name=name,
        major=10,
        accelerated=True,
        core_count=148,
        fpus_per_core=128,
        shared_memory_per_core_bytes=233472,
        shared_memory_optin_bytes=232448,
        l2_cache_bytes=132_644_864,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=bandwidth,
        clock_ghz=1.965,
    )


def gpu_targets() -> dict[str, GpuTarget]:
    """All known targets by their name in the hardware table."""
    return {
        "v100-sxm2-16gb": _volta("Tesla V100-SXM2-16GB", 16_935_682_048),
        "v100-sxm2-32gb": _volta("Tesla V100-SXM2-32GB", 34_072_559_616),
        "a100-40gb": _ampere("NVIDIA A100-SXM4-40GB", 42_331_013_120, 1_555_200_000_000),
        "a100-80gb": _ampere("NVIDIA A100-SXM4-80GB", 85_100_068_864, 2_039_040_000_000),
        "h100-sxm": _hopper("NVIDIA H100 80GB HBM3", 84_942_979_072, 3_352_320_000_000),
        "h200": _hopper("NVIDIA H200 141GB HBM3e", 151_397_597_184, 4_800_000_000_000),
        "b200": _blackwell("NVIDIA B200", 191_514_411_008, 7_672_320_000_000),
    }


def gpu_target(device: str) -> GpuTarget:
    """The target named ``device``.

    Raises:
        ClusterError: no such GPU is known.
    """
    targets = gpu_targets()
    if device not in targets:
        raise ClusterError(
            f"verification on the target's compiler was asked for device {device!r}. Known GPUs are "
            f"{', '.join(targets)}. The name comes from the cluster (what follows ':' in a text like '1x8:h100-sxm'). "
            f"Plan for one of these GPUs, or audit the step on the devices at hand with step.compile(...).audit()."
        )
    return targets[device]
