"""Counts in Prometheus' text format, through prometheus_client (which orbax brings)."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge, generate_latest


def exposition(prefix: str, values: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """`values` as gauges called PREFIX_NAME, each with `labels`."""
    registry = CollectorRegistry()
    for name, value in values.items():
        gauge = Gauge(f"{prefix}_{name}", name.replace("_", " "), list(labels), registry=registry)
        gauge.labels(*labels.values()).set(value)
    return generate_latest(registry).decode()
