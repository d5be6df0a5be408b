"""GPU descriptions for XLA:GPU."""

from __future__ import annotations

import re

import pytest

from alpa_lite.errors import ClusterError
from alpa_lite.executor.gpu_targets import gpu_target, gpu_targets


@pytest.mark.parametrize("device", sorted(gpu_targets()))
def test_text_is_balanced_and_names_the_device(device: str) -> None:
    target = gpu_target(device)
    text = target.config_text()
    assert text.count("{") == text.count("}") == 3
    assert f"device_memory_size: {target.memory_bytes}\n" in text
    assert text.rstrip().endswith(f'device_description_str: "{target.name}"')
    keys = re.findall(r"^  (\w+):", text, flags=re.M)
    assert len(keys) == len(set(keys)) > 20


def test_figures_of_known_devices() -> None:
    assert gpu_target("h100-sxm").core_count == 132
    assert gpu_target("a100-40gb").memory_bytes < gpu_target("a100-80gb").memory_bytes
    assert "major: 7 feature_extension: NONE" in gpu_target("v100-sxm2-16gb").config_text()
    assert "major: 9 feature_extension: ACCELERATED_FEATURES" in gpu_target("h200").config_text()


def test_unknown_device_is_refused_with_the_list() -> None:
    with pytest.raises(
        ClusterError, match=r"asked for device 'cpu'\. Known GPUs are .*h100-sxm.*Plan for one of these"
    ):
        gpu_target("cpu")
