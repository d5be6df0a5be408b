"""What ``al.rules`` offers: coverage report, probing, re-check of a rule, its layouts on one mesh axis, its text."""

from __future__ import annotations

from alpa_lite.core.one_axis import OneAxisRule, enumerate_sharded
from alpa_lite.core.rule_source import suggest
from alpa_lite.trace.coverage import Coverage, CoverageRow, coverage
from alpa_lite.trace.probe import probe
from alpa_lite.trace.rule_check import check

__all__ = ["Coverage", "CoverageRow", "OneAxisRule", "check", "coverage", "enumerate_sharded", "probe", "suggest"]
