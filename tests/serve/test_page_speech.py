"""The page of an artifact that speaks in a real browser: what is written is said once, whatever happens meanwhile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from seko_serve.live.session import LiveSession
from seko_serve.protocol import Control
from tests.speech.toy_speech import PATCH

from .bounded import until
from .browser import Page, open_page
from .conftest import Starter
from .held import held_opening
from .pages import (
    BLOCKED,
    COUNT_SOCKETS,
    IN_LINE,
    IS_ERROR,
    NEEDS_BROWSER,
    OPENINGS,
    STATE,
    WAY,
    go_on,
    lose_connection,
    write_key,
)
from .test_controls import wav
from .test_server import http
from .test_speech import opener

pytestmark = NEEDS_BROWSER


def listen(page: Page) -> None:
    """Press Start once the page has met its server, and wait until it listens."""
    page.until(f"{STATE} === 'Ready' || {STATE} === 'Ended'")
    page.click("start")
    page.until(f"{STATE} === 'Listening'")


def test_it_asks_for_a_key_and_says_when_it_is_wrong(start: Starter) -> None:
    server = start(opener, keys=("a key of a person",))
    with open_page(f"{server.url}/") as page:
        page.until(f"{STATE} === 'This server asks for an API key'")
        write_key(page, "another key of 16")
        page.until(f"{IS_ERROR} && {STATE} === 'The server does not know this API key'")
        write_key(page, "a key of a person")
        page.until(f"{STATE} === 'Ready'")
        page.value("document.getElementById('text').value = 'hallo', true")
        page.click("save")
        page.until(f"{STATE} === 'Saved'")


def test_it_begins_again_while_an_opening_that_was_given_up_is_not_answered(start: Starter) -> None:
    server = start(opener, lease_s=3600)
    held = held_opening(server)
    with open_page(f"{server.url}/") as page:
        page.until(f"{STATE} === 'Ready'")
        page.click("start")
        held.wait_for_call()
        go_on(page)
        page.until(f"{STATE} === 'Ended'")
        listen(page)
        held.finish()
        until(lambda: len(server.manager.sessions) == 1, "the session that was given up ends")
        assert page.value(STATE) == "Listening"


def test_one_that_waits_in_line_has_one_place_however_much_is_written(start: Starter) -> None:
    server = start(opener, max_sessions=1)
    url = f"{server.url}/v1/sessions"
    other = http(url, "POST", {"seed": 0})[1]["id"]
    with open_page(f"{server.url}/") as page:
        page.until(f"{STATE} === 'Ready'")
        for written in ("h", "ha", "hal"):
            page.value(
                f"document.getElementById('text').value = '{written}';"
                "document.getElementById('text').dispatchEvent(new Event('input')), true"
            )
            page.until(IN_LINE)
        assert http(url, "POST", {"seed": 0})[1]["error"]["waiting"] == 1
        http(f"{url}/{other}", "DELETE")
        page.until(f"{STATE} === 'Listening'")


def test_a_letter_that_is_changed_is_sent_whole(start: Starter) -> None:
    """The two begin with the same half."""
    with open_page(f"{start(opener).url}/") as page:
        page.value(
            "window.told = []; window.sends = WebSocket.prototype.send;"
            "WebSocket.prototype.send = function (data) { told.push(data); sends.call(this, data); }; true"
        )
        listen(page)
        for written in ("\U0001f600", "\U0001f601"):
            page.value(
                f"document.getElementById('text').value = 'a {written} b';"
                "document.getElementById('text').dispatchEvent(new Event('input')), true"
            )
            page.until(f"told.some((data) => data.includes?.('{written}'))")
        assert page.value(
            "told.every((data) => !data.isWellFormed || JSON.parse(data).text?.isWellFormed() !== false)"
        )


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What sessions were given to say, as it comes."""
    pieces: list[str] = []
    control = LiveSession.control

    def heard(session: LiveSession, taken: Control) -> None:
        pieces.extend([taken.fields["text"]] if taken.type == "text" else [])
        control(session, taken)

    monkeypatch.setattr(LiveSession, "control", heard)
    return pieces


def test_a_word_is_said_when_it_is_finished_or_nothing_more_is_written(
    start: Starter, said: list[str]
) -> None:
    with open_page(f"{start(opener).url}/") as page:
        listen(page)
        for written in ("h", "hul", "hal", "hallo", "hallo j", "hallo ja"):
            page.value(
                f"document.getElementById('text').value = '{written}';"
                "document.getElementById('text').dispatchEvent(new Event('input')), true"
            )
        until(lambda: "".join(said) == "hallo ja", "all words are said")
        assert said == ["hallo ", "ja"]


def test_drafts_of_an_input_method_are_not_said(start: Starter, said: list[str]) -> None:
    with open_page(f"{start(opener).url}/") as page:
        listen(page)
        page.value("document.getElementById('text').focus()")
        for draft in ("h", "ほ", "本"):
            page.call("Input.imeSetComposition", text=draft, selectionStart=1, selectionEnd=1)
        page.call("Input.insertText", text="本")
        page.call("Input.insertText", text="も")
        until(lambda: len(said) > 1, "both letters are said")
        assert said == ["本", "も"]


def test_what_is_written_while_the_connection_is_lost_is_said_later(
    start: Starter,
) -> None:
    with open_page(f"{start(opener).url}/") as page:
        page.value(COUNT_SOCKETS)
        listen(page)
        lose_connection(page)
        page.value(
            "document.getElementById('text').value = 'hallo. ja. ';"
            "document.getElementById('text').dispatchEvent(new Event('input')), true"
        )
        page.click("say")
        page.until(f"{IS_ERROR} && {STATE} === 'The connection was lost. Try again when it is back'")
        page.value("window.WebSocket = Counted, true")
        page.until(f"{STATE} === 'Listening'")
        page.click("say")
        page.until("Number(document.body.dataset.samples || 0) > 0")


def test_what_is_sent_into_a_dead_socket_is_said_when_it_is_back(start: Starter, said: list[str]) -> None:
    with open_page(f"{start(opener).url}/") as page:
        page.value(COUNT_SOCKETS)
        listen(page)
        page.value("document.getElementById('text').focus()")
        page.value(
            "sockets.at(-1).addEventListener('message', ({ data }) => "
            "{ window.told ||= typeof data === 'string' && JSON.parse(data).type === 'received'; }), true"
        )
        page.call("Input.insertText", text="hallo. ")
        page.until("window.told")
        page.value("sockets.at(-1).send = () => {}, true")
        page.call("Input.insertText", text="ja. ")
        page.click("say")
        page.value("sockets.at(-1).close(), true")
        page.until(f"sockets.length > 1 && {STATE} === 'Listening'")
        page.call("Input.insertText", text="ja. ")
        until(lambda: "".join(said) == "hallo. ja. ja. ", "all that was written is said")


def test_it_makes_one_file_however_often_save_is_pressed(start: Starter) -> None:
    with open_page(f"{start(opener).url}/") as page:
        page.until(f"{STATE} === 'Ready'")
        page.value(
            "window.asked = 0; const ask = fetch; window.fetch = (url, ...given) => "
            "{ asked += String(url).endsWith('audio/speech'); return ask(url, ...given); }; true"
        )
        page.value("document.getElementById('text').value = 'hallo', true")
        for times in (1, 2):  # one can be made after another
            page.value(
                "document.getElementById('save').click(), document.getElementById('save').click(), true"
            )
            page.until(f"asked === {times} && {STATE} === 'Saved'")


FAR_AHEAD_S = 10
# Sound counts as if so much lay between what came and what is heard.
COMES_EARLY = (
    "window.Punctual = WebSocket; window.WebSocket = class extends Punctual { constructor(...given) { super(...given);"
    "this.addEventListener('message', ({ data }) => { if (typeof data === 'string') return;"
    "const view = new DataView(data);"
    f"view.setUint32(12, view.getUint32(12, true) + {FAR_AHEAD_S * PATCH.sample_rate}, true); }}); }} }}; true"
)


def test_it_goes_on_in_a_session_behind_one_that_was_not_heard_to_its_end(
    start: Starter,
) -> None:
    server = start(opener)
    came = "Number(document.body.dataset.samples || 0) > {}".format
    with open_page(f"{server.url}/") as page:
        page.until(f"{STATE} === 'Ready'")
        page.value(
            "delete window.AudioDecoder"
        )  # plain samples: a packet holds more than the toy says at once
        page.value(COMES_EARLY)
        page.value(r"document.getElementById('text').value = 'hallo.\n'.repeat(30), true")
        page.click("start")
        page.until(came(FAR_AHEAD_S * PATCH.sample_rate + 3 * PATCH.samples))
        (session,) = server.manager.sessions
        http(f"{server.url}/v1/sessions/{session}", "DELETE")
        # The reason is told first; the way on comes when the socket has closed.
        page.until(f"{BLOCKED} && {WAY}.textContent === 'Start again'")
        assert page.value(STATE) == "The session has ended: closed"
        page.value("document.body.dataset.samples = 0, window.WebSocket = Punctual, true")
        go_on(page)
        page.until(came(20 * PATCH.samples))  # more than comes before anything is heard


def test_a_voice_that_is_chosen_in_line_is_what_the_session_speaks_with(
    start: Starter, tmp_path: Path
) -> None:
    server = start(opener, max_sessions=1)
    (tmp_path / "voice.wav").write_bytes(wav(np.zeros(16_000, "<i2"), 16_000))
    with open_page(f"{server.url}/") as first, open_page(f"{server.url}/") as second:
        listen(first)
        second.until(f"{STATE} === 'Ready'")
        second.value(OPENINGS)
        second.click("start")
        second.until(IN_LINE)
        second.upload("#voice", tmp_path / "voice.wav")
        second.until("document.getElementById('voice-name').textContent === 'voice.wav'")
        first.call("Page.navigate", url="about:blank")
        second.until("Boolean(asked.at(-1).voice)")
