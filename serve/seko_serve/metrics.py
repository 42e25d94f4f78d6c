"""Prometheus metrics of a server, which any thread may update."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from seko_serve.errors import KINDS

PREFIX = "seko_serve"
CHUNK_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
ENCODE_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
OPEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
TTFC_S = (0.05, 0.1, 0.2, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
SNAPSHOTS = ("written", "failed", "restored")  # what became of one


class Metrics:
    """Counters and histograms of one server process.

    Attributes
    ----------
    registry : CollectorRegistry
        Registry of these metrics and of the gauges of the server's state.
    call : Histogram
        Seconds of one call of the device, by number of rows.
    chunks, due_chunks, late_chunks : Counter
        Number of chunks made, number of chunks with a due time (because a viewer was playing), and number of chunks
        that were late.
    encode : Histogram
        Seconds from the moment when the device has finished a chunk to its last encoded frame.
    ttfc : Histogram
        Seconds from a session's opening to its first encoded chunk.
    opening : Histogram
        Seconds for which opening a session occupies the device's thread, for example to encode the session's prompt.
    snapshot : Histogram
        Seconds of a step of a snapshot: ``capture`` on the device's thread, ``write`` to the store, ``read`` from the
        store into a row.
    sent_bytes : Counter
        Number of bytes of media and JSON that were handed to sockets.
    snapshots : Counter
        Number of snapshots, by outcome.
    refused : Counter
        Number of requests, sockets and controls that were refused, by the error's code.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.call = self._histogram("call_seconds", "One call of the device", CHUNK_S, "bucket")
        self.chunks = self._counter("chunks", "Chunks made")
        self.due_chunks = self._counter("due_chunks", "Chunks that a playing viewer waited for")
        self.late_chunks = self._counter("late_chunks", "Chunks that came after they were due")
        self.encode = self._histogram(
            "encode_seconds", "From a chunk's first frames on the host to its last coded frame", ENCODE_S
        )
        self.ttfc = self._histogram("ttfc_seconds", "From a session's opening to its first chunk", TTFC_S)
        self.opening = self._histogram("open_seconds", "The device's part of opening a session", OPEN_S)
        self.snapshot = self._histogram("snapshot_seconds", "One step of a snapshot", OPEN_S, "step")
        self.sent_bytes = self._counter("sent_bytes", "Bytes handed to sockets")
        self.snapshots = self._counter("snapshots", "Snapshots, by what became of them", "result")
        self.refused = self._counter("refused", "Refusals, by the error's code", "code")
        for result in SNAPSHOTS:  # a series that appears with its first event has no rate then
            self.snapshots.labels(result)
        for code in KINDS:
            self.refused.labels(code)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(name, meaning, labels, namespace=PREFIX, registry=self.registry)

    def _histogram(self, name: str, meaning: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, meaning, labels, namespace=PREFIX, registry=self.registry, buckets=bounds)
