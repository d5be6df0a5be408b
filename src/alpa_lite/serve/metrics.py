"""An engine's statistics as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from alpa_lite.serve.statistics import REASONS, Histogram, Statistics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Text of the metrics of an engine.

    Args:
        read: returns its statistics now.
    """

    def __init__(self, read: Callable[[], Statistics]) -> None:
        from prometheus_client import CollectorRegistry

        self._read = read
        self._registry = CollectorRegistry(
            auto_describe=False
        )  # not the process's own: a process may have several engines
        self._registry.register(self)  # pyrefly: ignore[bad-argument-type] - whatever has `collect`

    def text(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest(self._registry)

    def collect(self) -> Iterator[Any]:
        """All metrics; called by Prometheus's client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        now = self._read()
        for name, text, value in (
            ("queued_requests", "Requests that wait for a slot.", now.queued),
            ("queue_limit", "Requests that may wait.", now.queue_limit),
            ("active_requests", "Requests in a slot.", now.active),
            ("slots", "Requests that can be served at once.", now.slots),
            ("batch_fill", "Share of slots in use, on average over the decode steps so far.", now.batch_fill),
            ("padding_waste", "Share of padding among the tokens of prompts so far.", now.padding_waste),
        ):
            yield GaugeMetricFamily(f"alpa_lite_{name}", text, value=value)
        for name, text, total in (
            ("prompt_tokens", "Tokens of prompts.", now.prompt_tokens),
            ("generated_tokens", "Tokens that were made.", now.generated_tokens),
            ("decode_steps", "Steps that made the next token of all slots in use.", now.decode_steps),
            ("decoded_rows", "Slots in use in all these steps together.", now.decoded_rows),
        ):
            yield CounterMetricFamily(f"alpa_lite_{name}", text, value=total)
        for name, text, label, counts in (
            ("finished_requests", "Requests by how they ended.", "reason", dict.fromkeys(REASONS, 0) | now.finished),
            ("prefills", "Prompts by bucket.", "bucket", now.prefills),
            ("padded_tokens", "Tokens that prompts were padded by, by bucket.", "bucket", now.padded_tokens),
        ):
            family = CounterMetricFamily(f"alpa_lite_{name}", text, labels=[label])
            for key, count in counts.items():
                family.add_metric([str(key)], count)
            yield family
        for name, text, times in (
            ("queue_seconds", "From submission until a slot was free.", now.queue_time),
            ("time_to_first_token_seconds", "From submission until the first token.", now.time_to_first_token),
            ("time_per_token_seconds", "From one token of a request to its next.", now.time_per_token),
        ):
            buckets = list(_cumulative(times))
            yield HistogramMetricFamily(f"alpa_lite_{name}", text, buckets=buckets, sum_value=times.total)


def _cumulative(times: Histogram) -> Iterator[tuple[str, float]]:
    seen = 0
    for bound, count in zip((*map(str, times.bounds), "+Inf"), times.counts, strict=True):
        seen += count
        yield bound, seen
