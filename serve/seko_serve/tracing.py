"""Spans of OpenTelemetry: off unless its environment variables name an exporter.

A span has the name of what was done, its times, and counts. No span has a prompt, a key, an address or the text of an
exception. A request's trace is that of its ``traceparent`` header, so the id of a request in the log is its trace.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from seko_runtime.errors import LibraryMissingError, UsageError

SERVICE = "seko-serve"
_EXPORTER, _PROTOCOL = "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL"
_ADDRESSES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_tracer: Any = None  # of OpenTelemetry; None: no span is made
Parent = Any  # a span's context, as OpenTelemetry has it; None without


def set_up(environment: Mapping[str, str] = os.environ) -> None:
    """Send spans where OpenTelemetry's environment variables say; do nothing if they name neither an exporter
    (``OTEL_TRACES_EXPORTER``, such as ``otlp`` or ``console``) nor the address of a collector. Sampler, batches and
    resource are those of its other variables.

    Raises
    ------
    LibraryMissingError
        If the SDK or the exporter is not installed.
    """
    name = environment.get(_EXPORTER, "").strip()
    named = name or next((environment[address] for address in _ADDRESSES if environment.get(address)), "")
    if not named or name == "none" or environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return
    if "," in name:
        raise UsageError(f"{_EXPORTER} names several exporters, expected one")
    grpc = environment.get(_PROTOCOL, "").strip() == "grpc"
    entry = {"otlp": f"otlp_proto_{'grpc' if grpc else 'http'}", "": "otlp_proto_http"}.get(name, name)
    found = next(iter(entry_points(group="opentelemetry_traces_exporter", name=entry)), None)
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if found is None:
            raise ImportError(entry)
        exporter = found.load()()
    except ImportError:
        raise LibraryMissingError(
            f"OpenTelemetry's variables ask for traces by {entry[:40]}, which is not installed; in Seko's folder, "
            f"pip install ./runtime './serve[otel]', or set {_EXPORTER}=none"
        ) from None
    resource = Resource.create({} if environment.get("OTEL_SERVICE_NAME") else {"service.name": SERVICE})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    use(provider)


def use(provider: Any) -> None:
    """Make spans with a tracer provider of OpenTelemetry from now on; None: make none."""
    global _tracer
    _tracer = None if provider is None else provider.get_tracer(SERVICE)


@contextmanager
def request(method: str, carrier: Mapping[str, str]) -> Iterator[Any]:
    """Context manager with the span of a request, or None; ``carrier`` are the request's headers, of which
    ``traceparent`` and ``tracestate`` name the span's parent."""
    if _tracer is None:
        yield None
        return
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = TraceContextTextMapPropagator().extract(carrier)
    attributes = {"http.request.method": method}
    with _tracer.start_as_current_span(
        method, parent, SpanKind.SERVER, attributes, record_exception=False, set_status_on_exception=False
    ) as span:
        yield span


def answered(span: Any, method: str, status: int, route: str) -> None:
    """Note the status and the route of a request's answer; ``route`` is a template without names of sessions."""
    if span is None:
        return
    from opentelemetry.trace import StatusCode

    if route:
        span.update_name(f"{method} {route}")
        span.set_attribute("http.route", route)
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(StatusCode.ERROR)


def headers() -> dict[str, str]:
    """Return the headers by which another server's spans become children of the current one; empty without."""
    found: dict[str, str] = {}
    if _tracer is not None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(found)
    return found


def current() -> Parent:
    """Return the context of the running task's span, for `record` in other threads; None without one."""
    if _tracer is None:
        return None
    from opentelemetry import trace

    span = trace.get_current_span()
    return trace.set_span_in_context(span) if span.is_recording() else None


def record(name: str, parent: Parent, seconds: float, **attributes: int) -> None:
    """Record what has just ended after so many seconds, as a child of ``parent``; nothing without a parent."""
    if parent is None or _tracer is None:
        return
    end = time.time_ns()
    span = _tracer.start_span(name, parent, attributes=attributes, start_time=end - int(seconds * 1e9))
    span.end(end)
