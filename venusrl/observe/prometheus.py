"""Counts in Prometheus' text format, through prometheus_client (which orbax brings)."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_UNITS = {"s": "seconds"}  # endings of our names, and what Prometheus calls the unit


@dataclasses.dataclass(frozen=True)
class Description:
    """Of a number. Attributes:
    text: what it counts.
    counter: it only grows while the process lives, and begins at 0 with it; else it goes up and down (a gauge).
    """

    text: str
    counter: bool


def exposition(
    prefix: str, values: Mapping[str, float], labels: Mapping[str, str], descriptions: Mapping[str, Description]
) -> str:
    """`values`, each with `labels`, under the names that Prometheus' conventions give them.

    Args:
      prefix: of every name.
      values: by our names. A name that ends in `_s` is in seconds.
      descriptions: of every one of them.

    Returns:
      gauges called PREFIX_NAME and counters called PREFIX_NAME_total, with HELP and TYPE.

    Raises:
      KeyError: a value has no description.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Values(_families(prefix, values, labels, descriptions)))
    return generate_latest(registry).decode()


class _Values:
    """Hands a registry what there is; prometheus_client's own Counter can only be added to."""

    def __init__(self, families: Iterable[Metric]):
        self._families = tuple(families)

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _families(prefix, values, labels, descriptions) -> Iterator[Metric]:
    for name, value in values.items():
        description = descriptions[name]
        family = CounterMetricFamily if description.counter else GaugeMetricFamily
        stem, _, end = name.rpartition("_")
        full = f"{prefix}_{stem}_{_UNITS[end]}" if stem and end in _UNITS else f"{prefix}_{name}"
        metric = family(full, description.text, labels=list(labels))
        metric.add_metric(list(labels.values()), value)
        yield metric
