"""`/metrics` in Prometheus' text format."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

_COUNTERS = {
    "completions": "completions sampled",
    "tokens": "tokens sampled",
    "prompt_tokens": "tokens of prompts taken on, each once for all completions that a request asks of it",
    "cancelled": "completions that nobody waited for any more",
    "failed": "completions that failed",
    "uploads": "adapters applied",
    "refused": "completions refused because the queue was full",
}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)


class Latencies:
    """Histograms of how long clients wait, in seconds."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self.queue = self._histogram("queue_time_seconds", "seconds until a completion joins the batch")
        self.first_token = self._histogram("time_to_first_token_seconds", "seconds until a completion's first token")
        self.request = self._histogram("request_seconds", "seconds until a request is answered whole")

    def text(self) -> str:
        """The histograms in Prometheus' text format."""
        return generate_latest(self._registry).decode()

    def _histogram(self, name: str, meaning: str) -> Histogram:
        return Histogram(f"covey_{name}", meaning, buckets=_SECONDS, registry=self._registry)


def prometheus_text(engine: Any) -> str:
    """The counts and latencies of a `BatchingEngine` in Prometheus' text format."""
    registry = CollectorRegistry()
    for name, meaning in _COUNTERS.items():
        Counter(f"covey_{name}", meaning, registry=registry).inc(getattr(engine.counts, name))
    running, waiting = engine.load
    gauges = {
        "running": ("completions in the batch", running),
        "waiting": ("completions in the queue", waiting),
        "policy_version": ("version of the weights", engine.version),
        "reused_tokens": (
            "tokens of prompts held and not computed, in whole blocks of each completion, since the last upload",
            engine.counts.reused_tokens,
        ),
    }
    for name, (meaning, value) in gauges.items():
        Gauge(f"covey_{name}", meaning, registry=registry).set(value)
    return f"{generate_latest(registry).decode()}{engine.latencies.text()}"
