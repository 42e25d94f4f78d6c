"""The route ``/metrics`` with Prometheus metrics, for requests from this machine and requests with an API key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from seko_serve.http.access import Access
from seko_serve.http.workload import RouteFamily
from seko_serve.live.manager import SessionManager
from seko_serve.metrics import PREFIX

STATES = ("running", "paused", "ended")


class SessionsCollector(Collector):
    """Prometheus gauges that are computed at each request: sessions, capacity, and the share of chunks that were on
    time.

    Parameters
    ----------
    manager : SessionManager
        The live sessions.
    """

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager

    def collect(self) -> Iterator[Metric]:
        """Yield the Prometheus gauges of sessions and capacity."""
        sessions = [session.facts() for session in list(self._manager.sessions.values())]
        states = Counter(str(facts["state"]) for facts in sessions)
        open_sessions = GaugeMetricFamily(f"{PREFIX}_sessions", "Sessions with a row", labels=["state"])
        for state in STATES:
            open_sessions.add_metric([state], states[state])
        yield open_sessions
        watched = sum(bool(facts["attached"]) for facts in sessions)
        yield GaugeMetricFamily(f"{PREFIX}_sockets", "Sessions with a socket", watched)
        yield GaugeMetricFamily(f"{PREFIX}_capacity", "Sessions that may be open", self._manager.capacity)
        yield GaugeMetricFamily(
            f"{PREFIX}_device_lost",
            "1 when the device is lost, so that the server ends",
            self._manager.device.lost,
        )
        starts = GaugeMetricFamily(
            f"{PREFIX}_variant_start",
            "Number of the chunk from which a stream's calls are of another launch variant",
            labels=["variant"],
        )
        for number, chunk in enumerate(self._manager.device.variant_starts, 1):
            starts.add_metric([str(number)], chunk)
        yield starts
        yield GaugeMetricFamily(
            f"{PREFIX}_queue", "Requests for a session that wait", self._manager.admission.waiting
        )
        shares = [1 - late / due for late, due in map(_late_and_due, sessions) if due]
        if shares:  # no figure at all is the only one that is true while nothing was due
            yield GaugeMetricFamily(
                f"{PREFIX}_cpr",
                "Share of chunks in time, the mean of the sessions that play",
                sum(shares) / len(shares),
            )


def _late_and_due(facts: Mapping[str, Any]) -> tuple[int, int]:
    return facts["late_chunks"], facts["due_chunks"]


class MetricsRoutes(RouteFamily):
    """The route ``/metrics``, which returns the Prometheus metrics."""

    def __init__(self, manager: SessionManager, access: Access) -> None:
        super().__init__(manager, access)
        self._metrics = manager.device.metrics
        self._metrics.registry.register(SessionsCollector(manager))

    def routes(self) -> list[BaseRoute]:
        """Return the route ``/metrics``."""
        return [Route("/metrics", self._text)]

    async def _text(self, request: Request) -> Response:
        self._access.check_watcher(request)
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)
