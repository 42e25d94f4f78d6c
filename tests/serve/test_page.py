"""The page in a real browser: it plays, prompts and pauses work, also where it is not secure."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from seko_serve.video.content import VideoContent, VideoPiece

from .bounded import until
from .browser import ALL_INPUTS_ENDED, HELD_DEVICES, Page, open_browser, open_page
from .conftest import Running, Starter
from .pages import (
    CHUNK,
    COUNT_SOCKETS,
    FAKE_DEVICES,
    FRAMES,
    LINES,
    NEEDS_BROWSER,
    REACTION,
    STATE,
    begin,
    choose_tone,
    play,
    playing,
    wait_until_empty,
)
from .toys import talk_opener

pytestmark = [pytest.mark.usefixtures("quick"), NEEDS_BROWSER]
LAN = "--host-resolver-rules=MAP lan.test 127.0.0.1"  # a host of a network


def descendants(pid: int) -> set[tuple[int, str]]:
    """Processes below one, each with the moment of its start."""
    children: dict[int, list[tuple[int, str]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent, *fields = stat.read_text().rpartition(")")[2].split()[1:]
        except OSError:  # it has ended
            continue
        children.setdefault(int(parent), []).append((int(stat.parent.name), fields[17]))
    found = set(children.get(pid, ()))
    return found.union(*(descendants(child) for child, _ in found))


def alive(process: tuple[int, str]) -> bool:
    """Whether a process with that number and start is there and no zombie."""
    try:
        state, *fields = Path(f"/proc/{process[0]}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return state != "Z" and fields[18] == process[1]


def test_a_closed_browser_leaves_no_process() -> None:
    before = descendants(os.getpid())
    with open_browser() as browser, browser.page():
        started = descendants(os.getpid()) - before
        assert sum(map(alive, started)) > 2  # more than the command
    until(lambda: not any(map(alive, started)), "a process of the browser")


@pytest.mark.shows("page")
def test_it_plays_and_frames_come_in_order(start: Starter, tmp_path: Path) -> None:
    server = start()
    with open_page(f"{server.url}/") as page:
        assert page.value("'VideoDecoder' in window")
        page.value(
            "window.seen = []; new MutationObserver(() => seen.push(Number(document.body.dataset.frame)))"
            ".observe(document.body, {attributes: true, attributeFilter: ['data-frame']}); true"
        )
        begin(page)
        page.until(f"{FRAMES} > 40")
        assert page.value(STATE) == "Live"
        seen = page.value("seen")
        assert seen == sorted(set(seen))
        assert int(page.value(CHUNK)) > 2
        page.screenshot(tmp_path / "page.png")
        assert page.problems == []
        (session,) = server.manager.sessions.values()
        assert session.content.frames is not None
        assert session.content.frames.codec.name == "H264"
        page.click("stop")
        page.until("document.getElementById('start').textContent === 'Start'")
    wait_until_empty(server)


def test_a_prompt_is_applied_and_its_time_to_the_picture_told(start: Starter) -> None:
    with playing(start) as (_, page):
        begin(page, "c a")
        page.until(f"{REACTION}.endsWith('ms')")
        assert page.value(LINES) == ["a b", "c a"]


def test_pause_stops_the_picture_and_play_goes_on(start: Starter) -> None:
    with playing(start) as (_, page):
        page.click("pause")
        page.until(f"{STATE} === 'Paused'")
        page.until("Number(document.getElementById('buffered').textContent) === 0")
        stood = page.value(FRAMES)
        page.click("pause")
        page.until(f"{FRAMES} > {stood} + 20")


@contextmanager
def insecure_page(start: Starter, *opened: object) -> Iterator[tuple[Running, Page]]:
    """A server's page under a host name of a network, over plain http."""
    server = start(*opened, allowed_origins=frozenset({"http://lan.test"}))
    port = server.url.rsplit(":", 1)[1]
    with open_page(f"http://lan.test:{port}/", LAN) as page:
        assert not page.value("'VideoDecoder' in window")
        yield server, page
        assert [problem for problem in page.problems if "Cross-Origin-Opener-Policy" not in problem] == []


def test_a_page_that_is_not_secure_plays_by_media_source(start: Starter) -> None:
    with insecure_page(start) as (server, page):
        page.value(COUNT_SOCKETS)
        begin(page)
        page.until(f"{FRAMES} > 40")
        (session,) = server.manager.sessions.values()
        assert isinstance(session.content, VideoContent)
        assert session.content.frames is not None
        assert session.content.frames.codec.name == "FMP4"
        page.click("pause")
        page.until(f"{STATE} === 'Paused'")
        stood = page.value(FRAMES)
        page.click("pause")
        page.until(f"{FRAMES} > {stood} + 20")
        stood = page.value(FRAMES)
        page.value("sockets.at(-1).close(); true")
        page.until(f"sockets.length > 1 && {FRAMES} > {stood} + 30")
        assert page.value(STATE) == "Live"


def test_a_page_that_is_not_secure_has_sound(start: Starter, tmp_path: Path) -> None:
    with insecure_page(start, talk_opener) as (_, page):
        choose_tone(page, tmp_path)
        begin(page)
        page.until(f"{FRAMES} > 20")
        assert page.value("document.body.dataset.sound") == "aac"
        page.value(
            "(() => { const context = new AudioContext(), heard = context.createAnalyser();"
            "context.createMediaStreamSource(document.getElementById('source').captureStream()).connect(heard);"
            "const samples = new Float32Array(heard.fftSize);"
            "window.peak = () => { heard.getFloatTimeDomainData(samples); return Math.max(...samples); }; })(), true"
        )
        page.until("peak() > 0.2")
        assert page.value("peak()") < 0.6  # 12,000 / 32,768


def test_a_page_that_is_not_secure_forgets_what_it_showed_and_goes_on(start: Starter) -> None:
    with insecure_page(start) as (_, page):
        play(page)
        page.value("window.held = document.getElementById('source'), held.playbackRate = 8")
        page.until("held.buffered.length && held.buffered.start(0) > 0")
        page.until(f"{FRAMES} > {page.value(FRAMES)} + 30")


def test_a_page_that_is_not_secure_goes_on_once_it_waited_for_sound_a_few_times(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time the browser wants more sound at hand before it goes on; it is more than the server sends ahead."""
    read, slow = VideoPiece.read, iter(range(6))

    def read_late(piece: VideoPiece) -> int:
        if next(slow, None) is not None:
            time.sleep(1.0)
        return read(piece)

    monkeypatch.setattr(VideoPiece, "read", read_late)
    with insecure_page(start, talk_opener) as (_, page):
        begin(page)
        page.until(f"{FRAMES} > 80")


def unpressed(page: Page, expression: str) -> None:
    """Wait as somebody who presses nothing: `Page.until` counts as a press."""
    until(lambda: page.call("Runtime.evaluate", expression=expression)["result"].get("value"), expression)


def test_a_microphone_that_is_turned_off_before_it_is_allowed_stays_off(start: Starter) -> None:
    with open_page(f"{start(talk_opener).url}/", *FAKE_DEVICES) as page:
        page.value(HELD_DEVICES)
        play(page)
        for _ in range(2):
            page.click("microphone")
        page.value("allow(), true")
        page.until(ALL_INPUTS_ENDED)
        assert page.value("document.getElementById('microphone').getAttribute('aria-pressed')") == "false"


@pytest.mark.parametrize(
    ("host", "silent", "heard"),
    [
        (
            "127.0.0.1",
            "document.body.dataset.sound && document.body.dataset.heard === undefined",
            "document.body.dataset.heard !== undefined",
        ),
        ("lan.test", "document.getElementById('source').muted", "!document.getElementById('source').muted"),
    ],
    ids=["secure", "not secure"],
)
def test_where_sound_needs_a_press_it_is_heard_from_then_on(
    start: Starter, host: str, silent: str, heard: str
) -> None:
    server = start(talk_opener, allowed_origins=frozenset({"http://lan.test"}))
    options = (LAN, "--autoplay-policy=document-user-activation-required")
    with open_page("about:blank", *options) as page:
        page.call("Page.navigate", url=f"http://{host}:{server.url.rsplit(':', 1)[1]}/")
        unpressed(page, "document.getElementById('start')?.disabled === false")
        begins = (
            "document.getElementById('prompt').value = 'a b', document.getElementById('start').click(), true"
        )
        unpressed(page, begins)
        unpressed(page, f"{FRAMES} > 60")
        assert server.manager.sessions
        unpressed(page, silent)
        page.press("Tab")
        unpressed(page, heard)
        unpressed(page, f"window.stood ??= {FRAMES}")
        unpressed(page, f"{FRAMES} > stood + 30")


@pytest.mark.slow
def test_a_page_without_media_source_plays_pictures(start: Starter) -> None:
    with insecure_page(start) as (server, page):
        page.value("delete window.MediaSource")
        begin(page)
        page.until(f"{FRAMES} > 20")
        (session,) = server.manager.sessions.values()
        assert isinstance(session.content, VideoContent)
        assert session.content.frames is not None
        assert session.content.frames.codec.name == "MJPEG"


@pytest.mark.parametrize("closes", [False, True])
def test_a_full_server_tells_the_place_in_line_and_lets_one_in_when_a_row_is_free(
    start: Starter, closes: bool
) -> None:
    server = start(max_sessions=1)
    with open_page(f"{server.url}/") as first, open_page(f"{server.url}/") as second:
        play(first)
        begin(second)
        second.until(f"{STATE}.includes('You are number 1 in line')")
        assert second.value("document.querySelector('#notice.wait #ways button').checkVisibility()")
        if closes:  # without a press of End
            first.call("Page.navigate", url="about:blank")
        else:
            first.click("stop")
        second.until(f"{FRAMES} > 5")
        assert second.value(STATE) == "Live"
        assert len(server.manager.sessions) == 1


def test_each_thing_that_is_used_has_a_name(start: Starter) -> None:
    with open_page(f"{start().url}/") as page:
        unnamed = page.value(
            "[...document.querySelectorAll('button, input, select, textarea, canvas')].filter((e) => "
            "!(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length)).map((e) => e.id)"
        )
        assert unnamed == []


def test_a_page_reaches_the_sockets_of_its_own_host_alone(start: Starter) -> None:
    """The other tests show that it reaches those."""
    server = start()
    with open_page(f"{server.url}/") as page:
        page.value(
            "window.refused = []; document.addEventListener('securitypolicyviolation', "
            "event => refused.push(event.effectiveDirective)); "
            f"try {{ window.other = new WebSocket('{server.url.replace('http://127.0.0.1', 'ws://localhost')}/'); }} "
            "catch (error) {} true"
        )
        page.until("refused.length || window.other?.readyState > 1")
        assert page.value("refused.join()") == "connect-src"
