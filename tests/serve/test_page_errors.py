"""What a person sees on the page when something goes wrong: what to do, on a page that goes on."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
from starlette.websockets import WebSocket

from seko_serve.errors import ServeError
from seko_serve.protocol import Control
from seko_serve.video.content import VideoContent

from .bounded import until
from .browser import open_page
from .conftest import Starter
from .forked import toy_process
from .held import held_opening
from .pages import (
    BLOCKED,
    CHUNK,
    COUNT_SOCKETS,
    FRAMES,
    HINT,
    IN_LINE,
    IS_ERROR,
    LINES,
    NEEDS_BROWSER,
    OPENINGS,
    RATE,
    REACTION,
    STATE,
    WAY,
    begin,
    go_on,
    lose_connection,
    play,
    playing,
    wait_until_empty,
    write_key,
)
from .processes import free_port
from .test_controls import wav
from .toys import talk_opener, world_opener

pytestmark = [pytest.mark.usefixtures("quick"), NEEDS_BROWSER]
KEY = "a key of a person"
GREEN = "document.getElementById('state').classList.contains('live')"


def test_a_page_asks_for_a_key_and_says_when_it_is_wrong(start: Starter) -> None:
    server = start(keys=(KEY,))
    with open_page(f"{server.url}/") as page:
        page.until(f"{STATE} === 'This server asks for an API key'")
        assert page.value(BLOCKED)
        assert page.value("document.activeElement.id") == "key"
        assert not page.value(IS_ERROR)
        for wrong in ("another key of 16", "schlüssel → falsch"):
            write_key(page, wrong)
            page.until(f"{IS_ERROR} && {STATE} === 'The server does not know this API key'")
            assert page.value(f"{HINT} === {STATE}")
            write_key(page, "")
            page.until(f"{STATE} === 'This server asks for an API key'")
        write_key(page, f" {KEY} ")  # as it was copied
        page.until(f"{STATE} === 'Ready'")
        play(page)
        assert not page.value("document.getElementById('key').checkVisibility()")


def test_a_ticket_that_is_not_taken_is_told_and_start_works_again(start: Starter) -> None:
    server = start(lease_s=3600)
    with open_page(f"{server.url}/") as page:
        page.value(
            "window.Known = WebSocket; window.WebSocket = class extends Known { constructor(url) "
            "{ super(url, ['seko.v1', 'seko.ticket.' + 'a'.repeat(43)]); } }; true"
        )
        begin(page)
        page.until(f"{STATE}.startsWith('The ticket is unknown or used')")
        assert page.value(IS_ERROR)
        assert page.value(f"{BLOCKED} && {HINT} === {STATE}")
        wait_until_empty(server)
        page.value(f"window.WebSocket = Known; {WAY}.click(), true")
        page.until(f"{FRAMES} > 5")
        assert page.value(STATE) == "Live"


def test_a_session_that_is_given_up_while_it_opens_ends(start: Starter) -> None:
    server = start(lease_s=3600)
    held = held_opening(server)
    with open_page(f"{server.url}/") as page:
        begin(page)
        held.wait_for_call()
        begin(page, "b")  # another press of Start, which does nothing
        go_on(page)
        page.until(f"{STATE} === 'Ended'")
        held.finish()
        wait_until_empty(server)
        assert held.calls == 1
        play(page)


def test_a_session_that_was_given_up_leaves_the_prompts_of_the_next_one(start: Starter) -> None:
    server = start(lease_s=3600)
    held = held_opening(server)
    with open_page(f"{server.url}/") as page:
        begin(page)
        held.wait_for_call()
        go_on(page)
        page.until(f"{STATE} === 'Ended'")
        play(page, "b")
        held.finish()
        until(lambda: len(server.manager.sessions) == 1, "the session that was given up ends")
        assert page.value(LINES) == ["b"]


def test_frames_of_a_session_that_has_ended_are_none_of_the_next_one(start: Starter) -> None:
    with playing(start) as (server, page):
        held = held_opening(server)
        page.click("timeline-replay")
        held.wait_for_call()
        shown = page.value(f"new Promise((resolve) => {{ setTimeout(() => resolve({CHUNK}), 500); }})")
        held.release_soon()
        assert shown == "\N{EN DASH}"
        page.until(f"{CHUNK} !== '\N{EN DASH}'")


def test_a_sentence_that_the_server_rejects_is_not_among_those_so_far(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(_: object, control: Control) -> None:
        if control.fields.get("text") == "b":
            raise ServeError("bad_request", "no such sentence")

    monkeypatch.setattr(VideoContent, "check", check)
    with playing(start) as (_, page):
        begin(page, "b")
        page.until(f"{IS_ERROR} && {STATE} === 'No such sentence'")
        begin(page, "a")
        page.until(f"{STATE} === 'Live'")
        assert page.value(LINES) == ["a b", "a"]


def test_what_is_wished_while_the_connection_is_lost_waits_and_is_sent_when_it_is_back(
    start: Starter, applied: list[Control]
) -> None:
    waits = "[...document.querySelectorAll('#history .waiting')].map((line) => line.textContent).join()"
    with playing(start, world_opener) as (_, page):
        page.key("KeyW", down=True)
        lose_connection(page)
        for prompt in ("b", "c a"):
            begin(page, prompt)
            assert page.value(waits) == prompt
            assert (
                page.value("getComputedStyle(document.querySelector('.waiting'), '::after').content")
                != "none"
            )
        page.key("KeyW", down=False)
        page.click("pause")
        page.until(f"{STATE} === 'The connection was lost. Try again when it is back'")
        page.value("window.WebSocket = Counted, true")
        page.until(f"{STATE} === 'Live'")
        page.until("!document.querySelector('.waiting')")
        assert page.value(LINES) == ["a b", "c a"]

        def told() -> list[object]:
            fields = [control.fields for control in applied]
            return [each.get("event", {}).get("held") or each.get("text") for each in fields]

        until(lambda: told() == [["KeyW"], "c a", None], "the keys and the newest prompt are told")


def test_a_sentence_that_the_server_did_not_get_is_sent_again(start: Starter, applied: list[Control]) -> None:
    """One that was written to a socket of which nobody knew yet that it was dead."""
    with playing(start) as (_, page):
        page.value("sockets.at(-1).send = () => {}, true")
        begin(page, "b")
        page.value("sockets.at(-1).close(), true")
        page.until(f"{REACTION}.endsWith('ms')")
    assert [control.fields.get("text") for control in applied] == ["b"]


def test_a_key_whose_answer_was_lost_with_the_connection_is_not_measured(start: Starter) -> None:
    with playing(start, world_opener) as (_, page):
        page.value(
            "document.dispatchEvent(new KeyboardEvent('keydown', {code: 'KeyW'})), sockets.at(-1).close(), true"
        )
        stood = page.value(FRAMES)
        page.until(f"sockets.length > 1 && {FRAMES} > {stood} + 30")
        assert page.value(STATE) == "Live"
        assert page.value(REACTION) == "\N{EN DASH}"
        page.key("KeyA", down=True)
        page.until(f"{REACTION}.endsWith('ms')")


def test_a_connection_that_is_tried_again_while_it_opens_goes_on(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, may_open = WebSocket.accept, threading.Event()

    async def held(socket: WebSocket, subprotocol: str | None = None) -> None:
        await asyncio.to_thread(may_open.wait)
        await accept(socket, subprotocol)

    with playing(start) as (_, page):
        monkeypatch.setattr(WebSocket, "accept", held)
        page.value("sockets.at(-1).close(), true")
        page.until(f"sockets.length > 1 && {WAY}?.checkVisibility()")
        go_on(page)
        page.until("sockets.length > 2")
        may_open.set()
        stood = page.value(FRAMES)
        page.until(f"{FRAMES} > {stood} + 30")
        assert page.value(STATE) == "Live"


# A picture of one session, which is decoded when the next one has begun, and four pictures of that one.
TWO_SESSIONS = """
(async () => {
  const worker = new Worker("page/player.js", { type: "module" });
  const screen = new OffscreenCanvas(8, 8), drawn = new OffscreenCanvas(8, 8);
  drawn.getContext("2d");
  const payload = new Uint8Array(await (await drawn.convertToBlob({ type: "image/jpeg" })).arrayBuffer());
  const begin = () => worker.postMessage({ ready: { codec: "mjpeg", width: 8, height: 8 } });
  const give = (number) => worker.postMessage(
    { media: { key: true, pts: number * 1000, chunk: number, first: number, last: true, payload } },
  );
  worker.postMessage({ canvas: screen }, [screen]);
  begin();
  give(90);
  begin();
  for (let tries = 0; tries < 20; tries += 1) await createImageBitmap(new Blob([payload], { type: "image/jpeg" }));
  for (let number = 0; number < 4; number += 1) give(number);
  const painted = [];
  return new Promise((resolve) => {
    worker.onmessage = ({ data }) => {
      if (data.number !== undefined) painted.push(data.number);
      if (data.shown === 3) resolve(painted);
    };
  });
})()
"""


def test_a_picture_that_is_decoded_when_its_session_has_ended_is_not_shown_in_the_next_one(
    start: Starter,
) -> None:
    with open_page(f"{start().url}/") as page:
        assert page.value(TWO_SESSIONS) == [0, 1, 2, 3]


def test_what_is_called_live_is_measured_from_the_frames_that_were_shown(start: Starter) -> None:
    server = start()
    with open_page(f"{server.url}/") as page:
        begin(page)
        page.until(f"{FRAMES} > 20 && {GREEN} && {STATE} === 'Live' && Number({RATE}) > 0")
        page.click("pause")
        page.until(f"{STATE} === 'Paused' && !{GREEN} && {RATE} === '0.0'")
        page.click("pause")
        page.until(f"{GREEN} && Number({RATE}) > 0")
        (session,) = server.manager.sessions.values()
        session.hold()  # as a device that hangs: the socket answers
        page.until(f"{BLOCKED} && /[2-9] s/.test({HINT}) && !{GREEN} && {RATE} === '0.0'")
        session.hold(False)
        page.until(f"!{BLOCKED} && {STATE} === 'Live' && {GREEN} && Number({RATE}) > 0")
        page.click("stop")
        assert page.value(f"[{STATE}, {GREEN}, {RATE}]") == ["Ended", False, "\u2013"]


def test_a_picture_that_stands_still_offers_another_connection(start: Starter) -> None:
    server = start()
    with open_page(f"{server.url}/") as page:
        page.value(COUNT_SOCKETS)
        begin(page)
        page.until(f"{FRAMES} > 20")
        (session,) = server.manager.sessions.values()
        session.hold()
        page.until(f"{WAY}?.checkVisibility()")
        go_on(page)
        page.until("sockets.length > 1")
        session.hold(False)
        stood = page.value(FRAMES)
        page.until(f"{STATE} === 'Live' && !{BLOCKED} && {FRAMES} > {stood} + 20")
        assert list(server.manager.sessions.values()) == [session]


def test_a_sentence_that_is_too_long_is_not_cut_and_not_sent(start: Starter) -> None:
    server = start()
    with open_page(f"{server.url}/") as page:
        begin(page, "a " * 2500 + "b")
        page.until(f"{IS_ERROR} && {STATE} === 'The prompt has 5001 letters, and at most 4000 are taken'")
        assert not server.manager.sessions
        assert page.value("document.getElementById('prompt').value.length") == 5001
        play(page)
        begin(page, "a " * 2500 + "b")
        page.until(f"{STATE} === 'The prompt has 5001 letters, and at most 4000 are taken'")
        begin(page, "b")
        page.until(f"{STATE} === 'Live'")
        assert page.value("document.querySelectorAll('#history button').length") == 2


def test_a_file_that_is_no_picture_is_told(start: Starter, tmp_path: Path) -> None:
    (tmp_path / "words.png").write_text("no picture")
    (tmp_path / "words.txt").write_text("no picture")
    with open_page(f"{start().url}/") as page:
        page.until("!document.getElementById('start').disabled")
        page.upload("#image", tmp_path / "words.png")
        page.until(f"{IS_ERROR} && {STATE} === 'words.png cannot be read as a picture'")
        page.upload("#image", tmp_path / "words.txt")
        page.until(f"{STATE} === 'words.txt is no picture'")
        assert page.value("document.getElementById('image-thumbnail').hidden")
        play(page)
        page.upload("#image", tmp_path / "words.png")
        page.until(f"{IS_ERROR} && {STATE} === 'words.png cannot be read as a picture'")
        page.until(f"{STATE} === 'Live' && {GREEN}")  # it is told for a while


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ("Promise.reject(new TypeError('Failed to fetch'))", "The server does not answer"),
        (
            "Promise.resolve(new Response('<h1>', {status: 502}))",
            "The server is not reached: a proxy answers 502",
        ),
    ],
)
def test_a_server_that_cannot_be_reached_is_told(start: Starter, answer: str, sentence: str) -> None:
    with open_page(f"{start().url}/") as page:
        page.until("!document.getElementById('start').disabled")
        page.value(f"window.known = window.fetch; window.fetch = () => {answer}; true")
        begin(page)
        page.until(f"{IS_ERROR} && {STATE} === '{sentence}'")
        page.value(f"window.fetch = known; {WAY}.click(), true")
        page.until(f"{FRAMES} > 5")
        assert page.value(STATE) == "Live"


def test_who_comes_while_the_server_is_away_can_try_again(start: Starter) -> None:
    server = start()
    with open_page("about:blank") as page:
        page.call(
            "Page.addScriptToEvaluateOnNewDocument",
            source="window.known = window.fetch; window.fetch = () => Promise.reject(new TypeError('away'))",
        )
        page.call("Page.navigate", url=f"{server.url}/")
        page.until(f"{WAY}?.checkVisibility()")
        assert page.value(f"{IS_ERROR} && {HINT} === {STATE}")
        page.value(f"window.fetch = known; {WAY}.click(), true")
        page.until(f"{STATE} === 'Ready'")
        play(page)


@pytest.mark.slow
def test_a_server_that_comes_back_without_the_session_is_told(tmp_path: Path) -> None:
    port = free_port()
    with toy_process(port, tmp_path / "first", 0) as server, open_page(f"http://127.0.0.1:{port}/") as page:
        play(page)
        server.kill()
        server.wait()
        page.until(f"{IS_ERROR} && {STATE} === 'The connection was lost. Trying again'")
        with toy_process(port, tmp_path / "second", 0):
            page.until("document.getElementById('start').textContent === 'Start'")
            assert page.value(f"{IS_ERROR} && {STATE}") == "The server no longer has this session"
            assert page.value(f"{BLOCKED} && {HINT} === {STATE}")
            go_on(page)
            page.until(f"{STATE} === 'Live'")
            assert not page.value(BLOCKED)


@pytest.mark.slow
def test_the_page_comes_back_after_the_servers_kill_9(tmp_path: Path) -> None:
    port = free_port()
    frame = "Number(document.body.dataset.frame)"
    with toy_process(port, tmp_path, 1) as server, open_page(f"http://127.0.0.1:{port}/") as page:
        begin(page)
        page.until(f"{FRAMES} > 30")
        server.kill()
        server.wait()
        page.until(f"{STATE}.includes('connection was lost')")
        stood = page.value(frame)
        with toy_process(port, tmp_path, 1):
            page.until(f"{STATE} === 'Live'")
            page.until(f"{frame} > {stood} + 30")
            page.value(
                "window.seen = []; new MutationObserver(() => seen.push(Number(document.body.dataset.frame)))"
                ".observe(document.body, {attributes: true, attributeFilter: ['data-frame']}); true"
            )
            seen = page.until("seen.length >= 8 && seen")
            assert seen == sorted(set(seen))


def test_a_timeline_that_is_opened_in_line_keeps_one_place(start: Starter, tmp_path: Path) -> None:
    server = start(max_sessions=1)
    (tmp_path / "b.jsonl").write_text('{"chunk": 0, "begin": {"seed": 0, "prompt": "b"}}\n')
    with open_page(f"{server.url}/") as first, open_page(f"{server.url}/") as second:
        play(first)
        begin(second)
        second.until(IN_LINE)
        held = held_opening(server)
        second.upload("#timeline-file", tmp_path / "b.jsonl")
        held.wait_for_call()
        held.finish()
        until(lambda: server.manager.admission.waiting == 1, "the place before is given up")


def test_a_session_that_cannot_begin_anew_leaves_no_buttons_of_the_one_before(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise ServeError("bad_request", "no more")

    server = start()
    with open_page(f"{server.url}/") as page:
        page.save_into(tmp_path)
        play(page)
        page.click("record")
        page.until(f"{FRAMES} > {page.value(FRAMES)} + 10")
        monkeypatch.setattr(server.manager, "open", refuse)
        page.click("timeline-replay")
        page.until(f"{IS_ERROR} && {STATE} === 'No more'")
        for name in ("pause", "share", "stop", "record"):
            assert page.value(f"document.getElementById('{name}').hidden")
        page.until("Number(document.body.dataset.saved) > 100")


def test_a_file_that_is_played_ends_with_its_session(start: Starter, tmp_path: Path) -> None:
    (tmp_path / "quiet.wav").write_bytes(wav(np.zeros(16_000 * 60, "<i2"), 16_000))
    with open_page(f"{start(talk_opener).url}/") as page:
        page.value(COUNT_SOCKETS)
        page.value(
            "window.pieces = []; const send = WebSocket.prototype.send; WebSocket.prototype.send = function (data) "
            "{ if (typeof data !== 'string') pieces.push(this); return send.call(this, data); }; true"
        )
        play(page)
        page.value(  # the second piece waits until `later` is called
            "window.wait = setTimeout; window.setTimeout = (action, ms, ...given) => "
            "pieces.length && !window.later ? (window.later = action) : wait(action, ms, ...given); true"
        )
        page.upload("#voice", tmp_path / "quiet.wav")
        page.until("pieces.length === 1 && Boolean(window.later)")
        page.click("stop")
        begin(page)
        page.until(f"{STATE} === 'Live' && sockets.length > 1")
        page.value("later(), true")
        page.until("document.getElementById('voice-name').textContent === 'quiet.wav, 60 s'")
        assert page.value("pieces.every((socket) => socket === sockets[0])")


def test_a_voice_that_is_chosen_while_a_session_opens_is_heard_in_it(start: Starter, tmp_path: Path) -> None:
    (tmp_path / "quiet.wav").write_bytes(wav(np.zeros(16_000, "<i2"), 16_000))
    with open_page(f"{start(talk_opener).url}/") as page:
        page.until("document.getElementById('model').textContent")
        page.value(  # the socket is opened when `connect` is called
            "window.pieces = 0; const Known = WebSocket, wait = new Promise((go) => { window.connect = go; });"
            "window.WebSocket = class extends EventTarget { static OPEN = 1; constructor(...given) { super();"
            "wait.then(() => { this.real = new Known(...given); for (const name of ['onopen', 'onmessage', 'onclose'])"
            "{ this.real[name] = this[name]; } this.real.binaryType = this.binaryType; }); }"
            "get readyState() { return this.real?.readyState ?? 0; } close() { this.real?.close(); }"
            "send(data) { pieces += typeof data !== 'string'; this.real.send(data); } }; true"
        )
        begin(page)
        page.until(f"{STATE} === 'Opening'")
        page.upload("#voice", tmp_path / "quiet.wav")
        page.until("document.getElementById('voice-name').textContent === 'quiet.wav'")
        page.value("connect(), true")
        page.until("document.getElementById('voice-name').textContent === 'quiet.wav, 1 s'")
        assert page.value("pieces") == 1
        page.until(f"{FRAMES} > 5")
        page.click("stop")
        play(page)
        assert page.value("pieces") == 1  # this one began with it


def test_a_file_that_cannot_be_played_while_the_connection_is_lost_is_told(
    start: Starter, tmp_path: Path
) -> None:
    (tmp_path / "quiet.wav").write_bytes(wav(np.zeros(16_000, "<i2"), 16_000))
    with playing(start, talk_opener) as (_, page):
        lose_connection(page)
        page.upload("#voice", tmp_path / "quiet.wav")
        page.until(f"{STATE} === 'The connection was lost. Try again when it is back'")


def test_a_video_that_cannot_be_decoded_starts_again(start: Starter) -> None:
    server = start()
    with open_page("about:blank") as page:
        page.call(
            "Page.addScriptToEvaluateOnNewDocument",
            source="const Known = Worker; window.Worker = class extends Known "
            "{ constructor(...given) { super(...given); window.worker = this; } };",
        )
        page.call("Page.navigate", url=f"{server.url}/")
        page.until("document.getElementById('start')?.disabled === false")
        play(page)
        before = set(server.manager.sessions)
        page.value("worker.onmessage({data: {failed: 'no'}}), true")
        page.until(f"{HINT} === 'This browser cannot decode the video: no'")
        go_on(page)
        page.until(f"{STATE} === 'Live'")
        assert not before & set(server.manager.sessions)


def test_a_browser_asks_whether_the_files_of_a_page_are_new(start: Starter) -> None:
    kept = "performance.getEntriesByType('resource').filter((file) => file.name.endsWith('.js') && !file.transferSize)"
    url = start().url
    with open_page(f"{url}/") as page:
        page.until(f"{STATE} === 'Ready'")
        page.call("Page.navigate", url=f"{url}/?again")
        page.until(
            "location.search === '?again' && document.getElementById('state')?.textContent === 'Ready'"
        )
        assert page.value(f"{kept}.map((file) => file.name)") == []


# A picture that somebody drops on the page.
DROP = """
(async () => {
  const canvas = new OffscreenCanvas(24, 8), held = new DataTransfer();
  canvas.getContext("2d").fillRect(0, 0, 8, 8);
  held.items.add(new File([await canvas.convertToBlob()], "some.png", { type: "image/png" }));
  document.dispatchEvent(new DragEvent("drop", { dataTransfer: held }));
  return true;
})()
"""


def test_a_picture_that_is_chosen_in_line_is_what_the_session_begins_with(start: Starter) -> None:
    server = start(max_sessions=1)
    with open_page(f"{server.url}/") as first, open_page(f"{server.url}/") as second:
        play(first)
        second.value(OPENINGS)
        begin(second)
        second.until(IN_LINE)
        second.value(
            "window.hints = []; const hint = document.getElementById('notice-text');"
            "new MutationObserver(() => hints.push(hint.textContent)).observe(hint, {childList: true}); true"
        )
        second.value(DROP)
        second.until("!document.getElementById('image-thumbnail').hidden")
        first.click("stop")
        second.until("Boolean(asked.at(-1).image)")
        assert not second.value("hints.some((hint) => hint.includes('press Start'))")
