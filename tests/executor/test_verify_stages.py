"""Every program of every stage compiled with XLA:GPU on a machine without a GPU."""

from __future__ import annotations

import importlib.util

import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.executor.verify_stages import StagesReport
from benchmarks import gpt_stages

NO_COMPILER = any(importlib.util.find_spec(module) is None for module in ("jax_cuda12_plugin", "flatbuffers"))
needs_compiler = pytest.mark.skipif(NO_COMPILER, reason="XLA:GPU is not installed: pip install 'alpa-lite[aot]'")


@pytest.mark.slow
@needs_compiler
def test_gpt_of_six_layers() -> None:
    """As wide as the model of 2.6 billion weights; the two stages in the middle are one program each."""
    args = gpt_stages.arguments(6, batch_size=16, vocab=1024, seq_len=256)
    options = al.PlanOptions(num_stages=4, num_microbatches=2, stage_layers=(1, 2, 2, 1))
    cluster = al.Cluster.parse("1x8:v100-sxm2-16gb")
    plan = al.plan(gpt_stages.train_step, *args, cluster=cluster, options=options, donate_argnums=0)
    report = plan.verify(gpt_stages.train_step, *args)
    assert isinstance(report, StagesReport)
    assert report.ok, str(report)
    assert all(stage.counts()[0] == stage.counts()[1] > 0 for stage in report.stages)
    assert report.num_compiled == sum(len(report.stages[n].programs) for n in (0, 1, 3))
    assert "predicted" in str(report) and "backward" in str(report)


def test_the_step_is_the_published_model() -> None:
    params = gpt_stages.arguments()[0][0]
    assert len(params["layers"]) == 32 and params["embed"].shape == (51_200, 2560)
    assert jnp.float16 == gpt_stages.COMPUTE
