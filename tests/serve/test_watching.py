"""What an operator sees: figures for Prometheus, and log lines that quote nobody."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import HTTPConnection

from seko_serve.errors import ServeError
from seko_serve.http.access import Access
from seko_serve.logs import JsonFormatter, last_line
from seko_serve.settings import Settings
from tests.runtime.pool_stories import FILL_CHUNKS

from .bounded import comes
from .conftest import NewClient, Starter
from .test_server import PROMPT, http, watch

KEY = "a-key-of-the-first-tenant"


def figures(url: str) -> dict[str, float]:
    """Return the samples of ``/metrics`` by name and labels."""
    with urlopen(f"{url}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    return {
        sample.name
        + "".join(f" {label}={value}" for label, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


async def test_figures_count_what_a_session_did(start: Starter, new_client: NewClient) -> None:
    server = start(max_sessions=1)
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT)
    media, _ = await watch(client, 4)
    assert http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})[0] == 503
    # An acknowledged chunk is followed by others: pause, so that nothing is counted between two looks.
    await client.send("pause")
    async for received in client.messages():
        if isinstance(received, dict) and received["type"] == "state":
            break
    facts = http(f"{server.url}/v1/sessions")[1]["data"][0]
    # A call is measured after its chunk may have been sent.
    while (chunks := figures(server.url))["seko_serve_chunks_total"] < facts["chunks"] or chunks[
        "seko_serve_call_seconds_count bucket=1"
    ] < 4:
        facts = http(f"{server.url}/v1/sessions")[1]["data"][0]
    assert chunks["seko_serve_sessions state=paused"] == 1
    assert chunks["seko_serve_sockets"] == chunks["seko_serve_capacity"] == 1
    assert chunks["seko_serve_queue"] == 0
    assert chunks["seko_serve_variant_start variant=1"] == FILL_CHUNKS - 1
    assert chunks["seko_serve_encode_seconds_count"] >= 4
    assert chunks["seko_serve_ttfc_seconds_count"] == 1
    assert chunks["seko_serve_due_chunks_total"] >= chunks["seko_serve_late_chunks_total"]
    assert chunks["seko_serve_due_chunks_total"] >= 3  # all but the one with which playing begins
    assert chunks["seko_serve_sent_bytes_total"] >= sum(len(packet.payload) for packet in media)
    assert chunks["seko_serve_refused_total code=full"] == 1
    assert chunks["seko_serve_snapshots_total result=failed"] == 0
    assert 0 <= chunks["seko_serve_cpr"] <= 1
    await client.close()


async def test_the_share_in_time_has_no_value_while_nothing_was_due(
    start: Starter, new_client: NewClient
) -> None:
    server = start(max_sessions=1)
    assert "seko_serve_cpr" not in figures(server.url)
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT)
    while http(f"{server.url}/v1/sessions")[1]["data"][0]["due_chunks"] == 0:
        await watch(client, 1)
    assert "seko_serve_cpr" in figures(server.url)
    await client.close()
    await comes(lambda: not http(f"{server.url}/v1/sessions")[1]["data"])
    assert "seko_serve_cpr" not in figures(server.url)


def test_what_is_free_before_the_first_session_is_what_a_usual_viewer_leaves(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    rows = server.manager.capacity
    assert http(f"{server.url}/ready")[1] == {"status": "ready", "free": rows, "capacity": rows}
    slow = property(lambda _: {1: 1e3})  # a second session would make the first one late
    monkeypatch.setattr(type(server.manager.device), "call_seconds", slow)
    assert http(f"{server.url}/ready")[1] == {"status": "ready", "free": 1, "capacity": rows}


@pytest.mark.parametrize(
    ("address", "uds", "alone"),
    [
        (("127.0.0.1", 1), None, True),
        (("::1", 1), None, True),
        (("10.0.0.1", 1), None, False),
        (None, None, False),
        (("127.0.0.1", 1), Path("socket"), False),
    ],
)
def test_this_machine_is_known_by_its_address(
    address: tuple[str, int] | None, uds: Path | None, *, alone: bool
) -> None:
    access = Access(Settings(Path("toy"), uds=uds, keys=(KEY,)))
    connection = HTTPConnection({"type": "http", "client": address, "headers": []})
    assert access.from_this_machine(connection) is alone


@pytest.mark.parametrize("header", ["Forwarded", "Via", "X-Real-IP", "X-Forwarded-Host"])
def test_a_proxy_on_this_machine_is_known_by_its_headers(header: str) -> None:
    access = Access(Settings(Path("toy"), keys=(KEY,)))
    headers = [(header.lower().encode(), b"1.2.3.4")]
    connection = HTTPConnection({"type": "http", "client": ("127.0.0.1", 1), "headers": headers})
    assert not access.from_this_machine(connection)
    with pytest.raises(ServeError, match="only to its own machine"):
        Access(Settings(Path("toy"))).check_watcher(connection)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (
            "\x1b[36mray::Replica.start()\x1b[39m (pid=7)\n  \x1b[1;31mthe address is taken\x1b[0m \n\x1b[0m\n",
            "the address is taken",
        ),
        ("\x1b]only\x1b[2K\x1b[?25l", "only"),
        ("", ""),
    ],
)
def test_the_last_line_of_a_message_has_no_colours(message: str, line: str) -> None:
    assert last_line(message) == line


@contextmanager
def log_lines() -> Iterator[io.StringIO]:
    """Yield the lines that the server's loggers write meanwhile, at their lowest level."""
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(JsonFormatter())
    names = ("seko_serve", "uvicorn")
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        for name in names:
            logging.getLogger(name).removeHandler(handler)
            logging.getLogger(name).setLevel(levels[name])


def test_an_unforeseen_error_is_logged_by_number_and_quotes_nobody(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(keys=(KEY,))

    async def broken(*_: object) -> None:
        raise RuntimeError(f"a library quotes {PROMPT} and {KEY}")

    with log_lines() as lines:
        status, opened = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT}, KEY)
        assert status == 201
        monkeypatch.setattr(server.manager, "open", broken)
        status, answer = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT}, KEY)
    assert (status, answer["error"]["code"]) == (500, "internal")
    entries = [json.loads(line) for line in lines.getvalue().splitlines()]
    (entry,) = [entry for entry in entries if entry["level"] == "error"]
    assert entry["error"] == answer["error"]["error"]
    assert entry["exception"] == "RuntimeError"
    assert any("broken" in place for place in entry["at"])
    for secret in (PROMPT, KEY, opened["ticket"], "/v1/sessions"):
        assert secret not in lines.getvalue()
        assert secret not in json.dumps(answer)


def test_what_no_route_takes_is_refused_in_the_same_shape(start: Starter) -> None:
    server = start()
    for path, method, status, code in (
        ("/nothing", "GET", 404, "not_found"),
        ("/v1/sessions", "PUT", 405, "not_allowed"),
    ):
        http_status, answer = http(f"{server.url}{path}", method)
        assert (http_status, answer["error"]["code"], answer["error"]["retryable"]) == (status, code, False)
    for path, methods in (
        ("/v1/sessions/a", {"DELETE", "GET", "HEAD", "PATCH"}),
        ("/v1/sessions", {"GET", "HEAD", "POST"}),
        ("/v1/videos", {"GET", "HEAD", "POST"}),
    ):
        with pytest.raises(HTTPError) as refused:
            urlopen(Request(f"{server.url}{path}", method="PUT"), timeout=20)
        with refused.value as answer:
            assert set(answer.headers["allow"].split(", ")) == methods
