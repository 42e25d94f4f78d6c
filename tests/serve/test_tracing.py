"""Spans of OpenTelemetry: one trace from a client's span by gateway and box to each step, and none unless asked for."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from seko_runtime.errors import LibraryMissingError, UsageError
from seko_serve import tracing

from .bounded import comes
from .conftest import NewClient, Starter
from .test_request_ids import TRACE, id_of
from .test_server import http
from .test_speech import opener, spoken

pytest.importorskip("opentelemetry.sdk", reason="needs seko-serve[otel]")
SPAN = "0123456789abcdef"


@pytest.fixture
def spans() -> Iterator[Any]:
    """The spans that have ended, oldest first."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter.get_finished_spans
    tracing.use(None)
    provider.shutdown()


def named(spans: Any, name: str) -> list[Any]:
    return [span for span in spans() if span.name == name]


def ended(spans: Any, name: str) -> Any:
    """The only span of a name, which ends behind the answer."""
    deadline = time.monotonic() + 20
    while not (found := named(spans, name)) and time.monotonic() < deadline:
        time.sleep(0.01)
    (span,) = found
    return span


def test_a_request_is_a_span_below_the_clients_with_nothing_that_the_client_sent(
    start: Starter, spans: Any
) -> None:
    server = start()
    assert id_of(f"{server.url}/v1/models/secret-name?secret=1", f"00-{TRACE}-{SPAN}-01") == TRACE
    span = ended(spans, "GET /v1/models/{name}")
    assert (format(span.context.trace_id, "032x"), format(span.parent.span_id, "016x")) == (TRACE, SPAN)
    assert span.attributes == {
        "http.request.method": "GET",
        "http.route": "/v1/models/{name}",
        "http.response.status_code": 404,
    }
    assert "secret" not in span.to_json()
    other = id_of(f"{server.url}/nothing/secret")
    span = ended(spans, "GET")
    assert (format(span.context.trace_id, "032x"), span.parent) == (other, None)
    assert "secret" not in span.to_json()


def test_steps_and_encoding_of_speech_are_below_its_request(start: Starter, spans: Any) -> None:
    server = start(opener)
    spoken(server.url, input="hallo", response_format="pcm")
    request = ended(spans, "POST /v1/audio/speech")
    for name in ("step", "encode"):
        of_speech = named(spans, name)
        assert of_speech
        for span in of_speech:
            assert (span.parent.span_id, span.context.trace_id) == (
                request.context.span_id,
                request.context.trace_id,
            )
            assert request.start_time <= span.end_time
            assert span.start_time <= span.end_time
    assert {span.attributes["rows"] for span in named(spans, "step")} == {1}
    assert named(spans, "queue") == []
    assert "hallo" not in "".join(span.to_json() for span in spans())


async def test_a_request_that_waited_has_its_time_in_the_queue(
    start: Starter, spans: Any, new_client: NewClient
) -> None:
    server = start(opener, max_sessions=1, queue=1)
    client = await new_client(server).open(audio=["pcm"])
    waiting = asyncio.create_task(asyncio.to_thread(spoken, server.url, input="abc", response_format="pcm"))
    await comes(lambda: server.manager.admission.waiting)
    await client.close()
    await waiting
    queue, request = ended(spans, "queue"), ended(spans, "POST /v1/audio/speech")
    assert queue.parent.span_id == request.context.span_id
    assert request.start_time < queue.start_time < queue.end_time


async def test_a_trace_goes_on_from_the_gateway_to_its_box(tmp_path: Path, spans: Any) -> None:
    pytest.importorskip("aiohttp", reason="needs seko-serve[ray]")
    from .fleets import Fleet, memory

    async with Fleet(tmp_path, memory()).running() as fleet:
        await fleet.box(opener)
        trace = f"00-{TRACE}-{SPAN}-01"
        assert await asyncio.to_thread(id_of, f"{fleet.url}/v1/sessions", trace, {"seed": 1}) == TRACE
    box, gateway = named(spans, "POST /v1/sessions")  # that of the box ends first
    assert box.parent.span_id == gateway.context.span_id
    assert format(gateway.parent.span_id, "016x") == SPAN
    assert {format(span.context.trace_id, "032x") for span in (box, gateway)} == {TRACE}


def test_a_trace_that_its_client_does_not_sample_has_no_spans(start: Starter, spans: Any) -> None:
    server = start(opener)
    body = json.dumps({"input": "abc", "response_format": "pcm"}).encode()
    headers = {"content-type": "application/json", "traceparent": f"00-{TRACE}-{SPAN}-00"}
    with urlopen(Request(f"{server.url}/v1/audio/speech", body, headers), timeout=30) as answer:
        assert (answer.headers["x-request-id"], bool(answer.read())) == (TRACE, True)
    assert spans() == ()


def test_without_the_variables_there_is_nothing(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    for environment in (
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
    ):
        tracing.set_up(environment)
        assert (tracing._tracer, tracing.headers(), tracing.current()) == (None, {}, None)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert http(f"{start().url}/health")[0] == 200


def test_variables_that_cannot_be_followed_are_told() -> None:
    with pytest.raises(LibraryMissingError, match="traces by nothing, which is not installed"):
        tracing.set_up({"OTEL_TRACES_EXPORTER": "nothing"})
    with pytest.raises(UsageError, match="several exporters"):
        tracing.set_up({"OTEL_TRACES_EXPORTER": "otlp,console"})


CONSOLE = """
    import os
    from seko_serve import tracing

    tracing.set_up({"OTEL_TRACES_EXPORTER": "console"})
    with tracing.request("GET", {}) as span:
        tracing.answered(span, "GET", 200, "/health")
        tracing.record("step", tracing.current(), 0.5, rows=3)
"""


def test_the_exporter_that_a_variable_names_gets_the_spans() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CONSOLE)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    decoder, rest, found = json.JSONDecoder(), done.stdout.strip(), []
    while rest:
        span, end = decoder.raw_decode(rest)
        found.append(span)
        rest = rest[end:].strip()
    assert [span["name"] for span in found] == ["step", "GET /health"]
    assert found[0]["parent_id"] == found[1]["context"]["span_id"]
    assert found[1]["resource"]["attributes"]["service.name"] == "seko-serve"
