"""Prometheus gauges of a fleet's boxes."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from seko_serve.fleet.directory import BoxFacts
from seko_serve.metrics import PREFIX

GROUPS = ("model", "digest", "box")


class BoxRows(Collector):
    """Prometheus gauges, computed from the boxes' entries in the directory.

    Parameters
    ----------
    boxes : list of BoxFacts
        The entries of all boxes.
    """

    def __init__(self, boxes: list[BoxFacts]) -> None:
        self._boxes = boxes

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yield the gauges."""
        for field, meaning in (
            ("capacity", "The most sessions of a box"),
            ("free", "Further sessions that a box would admit"),
            ("waiting", "Requests in a box's queue"),
            ("sessions", "Sessions of a box that are open, or are being opened"),
            ("accepts", "Whether a box takes new sessions"),
        ):
            gauge = GaugeMetricFamily(f"{PREFIX}_box_{field}", meaning, labels=GROUPS)
            for box in self._boxes:
                gauge.add_metric([box.model, box.digest[:16], box.name], float(getattr(box, field)))
            yield gauge
