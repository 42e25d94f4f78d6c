"""The line in which requests wait for a row: who gives up or leaves frees the place at once, who listens keeps it."""

from __future__ import annotations

import asyncio
import json
import time
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest

from seko_serve.client import AsyncClient
from seko_serve.live import admission

from .bounded import LIMIT_S, comes, until
from .browser import open_page
from .conftest import Running, Starter
from .held import held_opening
from .pages import FRAMES, IN_LINE, NEEDS_BROWSER, STATE, begin, play
from .test_server import PROMPT, http


def full(start: Starter) -> tuple[Running, str]:
    """A server of one row, which another one has; and the address of that session."""
    server = start(max_sessions=1)
    opened = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})[1]
    return server, f"{server.url}/v1/sessions/{opened['id']}"


def joined(server: Running) -> str:
    """Join the line; return the token of the place."""
    refused = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT}, queue="join")[1]["error"]
    token: str = refused["queue_token"]
    return token


def waiting(server: Running) -> int:
    return server.manager.admission.waiting


class Listener:
    """One that listens to the events of its place."""

    def __init__(self, url: str, token: str) -> None:
        self._connection = HTTPConnection(urlsplit(url).netloc, timeout=LIMIT_S)
        self._connection.request(
            "GET", "/v1/queue", headers={"seko-queue": token, "accept": "text/event-stream"}
        )
        self._answer = self._connection.getresponse()
        assert self._answer.headers["content-type"].startswith("text/event-stream")

    def event(self) -> dict[str, Any]:
        line = self._answer.readline()
        assert self._answer.readline() == b"\n"
        event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
        return event

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


def test_a_place_that_is_given_up_is_free_at_once(start: Starter) -> None:
    server, _ = full(start)
    first, second = joined(server), joined(server)
    assert http(f"{server.url}/v1/queue", queue=second)[1]["place"] == 2
    assert http(f"{server.url}/v1/queue", "DELETE", queue=first)[0] == 204
    assert http(f"{server.url}/v1/queue", queue=first)[0] == 404
    assert http(f"{server.url}/v1/queue", queue=second)[1]["place"] == 1


def test_one_that_listens_keeps_its_place_is_told_its_turn_and_frees_the_place_when_it_leaves(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seko_serve.http.line.SOONEST_S", 0.05)
    monkeypatch.setattr(admission, "GRACE", 0.5)  # times a second
    server, session = full(start)
    leaver, stayer = Listener(server.url, joined(server)), Listener(server.url, joined(server))
    token = joined(server)
    for _ in range(20):
        assert leaver.event()["place"] == 1
        assert stayer.event()["place"] == 2
    until(lambda: waiting(server) == 2)  # the one that neither asks nor listens has none
    assert http(f"{server.url}/v1/queue", queue=token)[0] == 404
    leaver.close()
    until(lambda: waiting(server) == 1)
    http(session, "DELETE")
    while not (event := stayer.event())["admitted"]:
        assert event["place"] <= 2
    stayer.close()
    until(lambda: not waiting(server))  # nobody takes the row that is kept: it is the next one's


def test_a_server_that_stops_tells_those_that_listen(start: Starter) -> None:
    server, _ = full(start)
    listener = Listener(server.url, joined(server))
    assert listener.event()["place"] == 1
    server.stop()
    while "error" not in (event := listener.event()):
        pass
    assert event["error"]["code"] == "stopping"
    listener.close()


async def test_a_program_that_gives_up_frees_its_place(start: Starter) -> None:
    server, _ = full(start)
    opening = asyncio.create_task(AsyncClient(server.url).open(wait=True, prompt=PROMPT))
    await comes(lambda: waiting(server))
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not waiting(server)


@pytest.mark.parametrize("room", [True, False])
def test_a_request_whose_client_has_left_leaves_neither_a_session_nor_a_place(
    start: Starter, room: bool
) -> None:
    server = start(max_sessions=1)
    if not room:
        http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})
    sessions = len(server.manager.sessions)
    held = held_opening(server)
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=LIMIT_S)
    connection.request("POST", "/v1/sessions", json.dumps({"prompt": PROMPT}), {"seko-queue": "join"})
    held.wait_for_call()
    connection.close()
    held.finish()
    until(lambda: len(server.manager.sessions) == sessions and not waiting(server))


@NEEDS_BROWSER
def test_one_that_ends_and_starts_again_many_times_has_one_place(start: Starter) -> None:
    server, session = full(start)
    with open_page(f"{server.url}/") as page:
        for _ in range(11):
            begin(page)
            page.until(IN_LINE)
            page.click("stop")
            page.until(f"{STATE} === 'Ended'")
        until(lambda: not waiting(server))
        for _ in range(5):  # also before the server has answered
            begin(page)
            page.click("stop")
        until(lambda: not waiting(server))
        begin(page)
        page.until(IN_LINE)
        http(session, "DELETE")
        page.until(f"{FRAMES} > 5")


@NEEDS_BROWSER
def test_one_that_starts_and_ends_alone_gets_in_each_time(start: Starter) -> None:
    server = start(max_sessions=1)
    with open_page(f"{server.url}/") as page:
        for _ in range(11):
            begin(page)
            page.click("stop")
        play(page)
        assert not waiting(server)


@NEEDS_BROWSER
def test_one_that_asks_too_often_is_told_and_gets_in(start: Starter) -> None:
    with open_page(f"{start(opens_per_s=1.0).url}/") as page:
        for _ in range(11):
            begin(page)
            page.click("stop")
        play(page)


@NEEDS_BROWSER
def test_a_closed_tab_frees_its_place(start: Starter) -> None:
    server, _ = full(start)
    with open_page(f"{server.url}/") as page:
        begin(page)
        page.until(IN_LINE)
        page.call("Page.navigate", url="about:blank")
        until(lambda: not waiting(server))


@NEEDS_BROWSER
def test_a_tab_whose_timers_are_slowed_down_keeps_its_place_and_gets_in(start: Starter) -> None:
    server, session = full(start)
    with open_page(f"{server.url}/") as page:
        page.value(
            "window.known = setTimeout; window.setTimeout = (f, ms, ...more) => known(f, ms + 60000, ...more); true"
        )
        begin(page)
        page.until(IN_LINE)
        newer = joined(server)
        time.sleep(2 * admission.GRACE * admission.SOONEST_S)  # without a timer of the page
        assert page.value(IN_LINE)
        newer = joined(server)
        assert http(f"{server.url}/v1/queue", queue=newer)[1]["place"] == 2
        http(f"{server.url}/v1/queue", "DELETE", queue=newer)
        http(session, "DELETE")
        page.until(f"{FRAMES} > 5")


@NEEDS_BROWSER
def test_a_line_whose_news_a_proxy_keeps_back_is_waited_in_by_requests(start: Starter) -> None:
    server, session = full(start)
    with open_page(f"{server.url}/") as page:
        page.value(
            "window.known = fetch; window.fetch = (url, options) => String(url).endsWith('v1/queue') "
            "? new Promise(() => {}) : known(url, options); true"
        )
        begin(page)
        page.until(IN_LINE)
        http(session, "DELETE")
        page.until(f"{FRAMES} > 5")


@NEEDS_BROWSER
def test_a_place_in_line_is_not_read_out_each_second(start: Starter) -> None:
    server, _ = full(start)
    with open_page(f"{server.url}/") as page:
        begin(page)
        page.until(IN_LINE)
        page.value(
            "window.told = 0; new MutationObserver(() => { told += 1; }).observe(document.getElementById('state'), "
            "{childList: true, characterData: true, subtree: true}); true"
        )
        time.sleep(3.5)
        assert page.value("told") == 0
