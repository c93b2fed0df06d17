"""`/metrics` in Prometheus' text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

from covey.serving.batching import BatchingEngine

_COUNTERS = {
    "completions": "completions sampled",
    "tokens": "tokens sampled",
    "prompt_tokens": "tokens of prompts",
    "cancelled": "completions that nobody waited for any more",
    "failed": "completions that failed",
    "uploads": "adapters applied",
    "refused": "completions refused because the queue was full",
}


def prometheus_text(engine: BatchingEngine) -> str:
    """The counts of an engine."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    for name, meaning in _COUNTERS.items():
        Counter(f"covey_{name}", meaning, registry=registry).inc(getattr(engine.counts, name))
    running, waiting = engine.load
    gauges = {
        "running": ("completions in the batch", running),
        "waiting": ("completions in the queue", waiting),
        "policy_version": ("version of the weights", engine.version),
        "reused_prompts": ("prompts found in the prefix cache since the last upload", engine.counts.reused_prompts),
    }
    for name, (meaning, value) in gauges.items():
        Gauge(f"covey_{name}", meaning, registry=registry).set(value)
    return generate_latest(registry).decode()
