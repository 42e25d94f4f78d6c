"""The id of a request: in the answer, in the log, and the same at a gateway and the box that answers."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from seko_serve.live.manager import SessionManager
from seko_serve.logs import JsonFormatter

from .conftest import Starter
from .test_server import PROMPT

if TYPE_CHECKING:
    from .fleets import Fleet

TRACE = "0123456789abcdef" * 2


def id_of(url: str, trace: str = "", table: object = None) -> str:
    """Return the id that an answer has, whatever the answer."""
    headers = {"content-type": "application/json"} | ({"traceparent": trace} if trace else {})
    try:
        with urlopen(
            Request(url, json.dumps(table).encode() if table else None, headers), timeout=20
        ) as answer:
            return str(answer.headers["x-request-id"])
    except HTTPError as refused:
        return str(refused.headers["x-request-id"])


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What is logged, as `seko-serve` writes it."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter())
    logging.getLogger().addHandler(handler)
    yield written
    logging.getLogger().removeHandler(handler)


def fail(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("nobody expects it")


def faults(log: io.StringIO) -> list[dict[str, Any]]:
    """Return the log's lines about unexpected errors."""
    lines = map(json.loads, log.getvalue().splitlines())
    return [line for line in lines if line["message"] == "internal error"]


def test_each_request_has_an_id_of_its_own(start: Starter) -> None:
    server = start()
    first, second = id_of(f"{server.url}/health"), id_of(f"{server.url}/health")
    assert first != second
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert re.fullmatch("[0-9a-f]{32}", id_of(f"{server.url}/nothing"))


def test_a_trace_is_the_id_and_nothing_else_is(start: Starter) -> None:
    server = start()
    assert id_of(f"{server.url}/health", f"00-{TRACE}-0123456789abcdef-01") == TRACE
    for other in (TRACE, f"00-{TRACE.upper()}-0123456789abcdef-01", f"00-{TRACE}-x-01", "a prompt"):
        assert re.fullmatch("[0-9a-f]{32}", found := id_of(f"{server.url}/health", other))
        assert found != TRACE


def test_the_log_has_the_id(start: Starter, log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    monkeypatch.setattr(SessionManager, "open", fail)
    asked = id_of(f"{server.url}/v1/sessions", table={"prompt": PROMPT})
    assert [line["request"] for line in faults(log)] == [asked]


async def test_a_box_has_the_id_of_its_gateway(
    log: io.StringIO, monkeypatch: pytest.MonkeyPatch, fleet: Fleet
) -> None:
    await fleet.box()
    monkeypatch.setattr(SessionManager, "open", fail)
    trace = f"00-{TRACE}-0123456789abcdef-01"
    asked = await asyncio.to_thread(id_of, f"{fleet.url}/v1/sessions", trace, {"prompt": PROMPT})
    assert asked == TRACE
    assert {line["request"] for line in faults(log)} == {TRACE}
