"""The page as people use it: by keyboard alone, in the dark, on a phone; and what it records plays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import av
import numpy as np
import pytest

from tests.runtime import toy_whole

from .browser import Page, open_page
from .conftest import Starter
from .held import held_opening
from .pages import (
    FRAMES,
    IS_ERROR,
    LINES,
    NEEDS_BROWSER,
    REACTION,
    STATE,
    begin,
    choose_tone,
    lose_connection,
    play,
    playing,
    wait_until_empty,
)
from .toys import game_opener, shown_opener, talk_opener, world_opener

pytestmark = [pytest.mark.usefixtures("quick"), NEEDS_BROWSER]
# A tab that comes to the front, or goes to the back.
HIDDEN = (
    "Object.defineProperty(document, 'hidden', {{value: {}, configurable: true}});"
    "document.dispatchEvent(new Event('visibilitychange')), true"
)
FOCUS = "document.activeElement.id || document.activeElement.tagName"
MOST_TABS = 60
# The least contrast of the texts that are seen, and the text that has it, over a white and a black picture; WCAG 2.2
# wants 4.5.
CONTRAST = """
(() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => {
    const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const [r, g, b] = rgb.map((v) => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const over = (e, picture) => {
    if (!e || e.id === "stage") return picture;
    const [r, g, b, alpha = 1] = channels(getComputedStyle(e).backgroundColor), below = over(e.parentElement, picture);
    return [r, g, b].map((v, at) => alpha * v + (1 - alpha) * below[at]);
  };
  let least = [99, ""];
  const texts = "h1, h2, span, label, legend, dt, dd, p, time, textarea, select, button:enabled";
  for (const e of document.querySelectorAll(texts)) {
    if (!e.checkVisibility() || !(e.textContent.trim() || e.value) || e.closest(".twice")) continue;
    for (const picture of [[0, 0, 0], [255, 255, 255]]) {
      const [a, b] = [light(channels(getComputedStyle(e).color).slice(0, 3)), light(over(e, picture))];
      const contrast = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
      if (contrast < least[0]) least = [contrast, `${e.tagName} ${e.id} ${e.textContent.slice(0, 30)}`];
    }
  }
  return least;
})()
"""


def tab_to(page: Page, name: str) -> None:
    """Press Tab until an element has the focus, which is seen."""
    for _ in range(MOST_TABS):
        page.press("Tab")
        if page.value(FOCUS) == name:
            assert page.value("getComputedStyle(document.activeElement).outlineStyle") != "none"
            return
    raise AssertionError(f"{name} cannot be reached by Tab")


def test_everything_can_be_done_by_keyboard_alone(start: Starter, tmp_path: Path) -> None:
    server = start()
    with open_page(f"{server.url}/") as page:
        page.save_into(tmp_path)
        page.until("!document.getElementById('start').disabled")
        tab_to(page, "prompt")
        page.value("document.getElementById('prompt').value = ''")
        page.call("Input.insertText", text="a b")
        page.press("Enter", "\r")
        page.until(f"{FRAMES} > 5")
        assert page.value(STATE) == "Live"
        tab_to(page, "pause")
        page.press("Enter", "\r")
        page.until(f"{STATE} === 'Paused'")
        page.press(" ", " ")
        page.until(f"{STATE} === 'Live'")
        tab_to(page, "record")
        page.press("Enter", "\r")
        page.until(f"{FRAMES} > {page.value(FRAMES)} + 20")
        page.press("Enter", "\r")
        page.until("Number(document.body.dataset.saved) > 100")
        tab_to(page, "prompt")
        page.call("Input.insertText", text=" c")
        page.press("Enter", "\r")
        page.until("document.querySelectorAll('#history button').length === 2")
        reached = set()
        for _ in range(MOST_TABS):
            page.press("Tab")
            reached.add(page.value(FOCUS))
        seen = page.value(
            "[...document.querySelectorAll('button, input, select, textarea, canvas')].filter((e) => !e.disabled &&"
            " e.checkVisibility({checkVisibilityCSS: true}) && e.tabIndex >= 0)"
            ".map((e) => e.id).filter(Boolean)"
        )
        assert len(seen) > 8
        assert set(seen) <= reached
        tab_to(page, "stop")
        page.press("Enter", "\r")
        page.until("document.getElementById('start').textContent === 'Start'")
        assert page.problems == []
    wait_until_empty(server)


def test_keys_steer_from_wherever_nobody_writes(start: Starter) -> None:
    lit = "[...document.querySelectorAll('.keys .held')].map((e) => e.dataset.code).join()"
    with playing(start, world_opener) as (_, page):
        assert page.value(FOCUS) == "video"
        page.key("KeyW", down=True)
        page.key("ArrowLeft", down=True)
        assert page.value(lit) == "KeyW,KeyJ"
        page.key("KeyW", down=False)
        page.key("ArrowLeft", down=False)
        page.until(f"{REACTION}.endsWith('ms')")
        page.key("KeyW", down=True)
        page.key("MetaLeft", down=True)
        page.key("MetaLeft", down=False)  # macOS does not tell that W was released meanwhile
        assert page.value(lit) == ""
        page.value("document.getElementById('prompt').focus()")
        page.key("KeyW", down=True)
        assert page.value(lit) == ""


# A gamepad in place of one that is plugged in, and the control's events that the page sends.
GAMEPAD = """
window.pads = [{connected: true, buttons: [{pressed: false}], axes: [0, 0, 0, 0]}];
navigator.getGamepads = () => window.pads;
window.events = [];
const send = WebSocket.prototype.send;
WebSocket.prototype.send = function (data) {
  const message = typeof data === "string" ? JSON.parse(data) : {};
  if (message.type === "control") window.events.push(message.event);
  return send.call(this, data);
};
true
"""


@pytest.fixture
def played(start: Starter) -> Iterator[Page]:
    """The page of a world with axes, while it runs; of what it sends, see `GAMEPAD`."""
    with playing(start, game_opener) as (_, page):
        page.value(GAMEPAD)
        yield page
        assert page.problems == []


def moved_by(page: Page) -> dict[str, float]:
    """By how much the page said that each axis moved, in all."""
    events = page.value("events.filter((event) => event.moved).map((event) => event.moved)")
    return {axis: sum(event.get(axis, 0.0) for event in events) for axis in ("yaw", "pitch")}


def test_a_gamepad_presses_keys_and_moves_axes(played: Page) -> None:
    page, lit = played, "[...document.querySelectorAll('.keys .held')].map((e) => e.dataset.code).join()"
    page.value("pads[0].buttons[0].pressed = true, pads[0].axes = [-.9, 0, .5, .1], true")
    page.until(f"{lit} === 'KeyW,ArrowLeft'")
    page.until("events.some((event) => event.axes?.yaw === .5)")
    page.value("pads[0].buttons[0].pressed = false, pads[0].axes = [0, 0, 0, 1], true")
    page.until(f"{lit} === ''")
    page.until("events.some((event) => event.axes?.yaw === 0 && event.axes?.pitch === -1)")
    assert page.value("events.filter((event) => event.axes).length") == 2  # only what changes is told
    page.until(f"{REACTION}.endsWith('ms')")


def middle(page: Page) -> tuple[float, float]:
    """The middle of the picture."""
    x, y = page.value(
        "(({x, y, width, height}) => [x + width / 2, y + height / 2])("
        "document.getElementById('video').getBoundingClientRect())"
    )
    return x, y


def hold_mouse(page: Page) -> None:
    """Click the picture, which holds the mouse then."""
    for kind in ("mousePressed", "mouseReleased"):
        page.mouse(kind, *middle(page))
    page.until("document.pointerLockElement?.id === 'video'")


def test_a_mouse_that_the_picture_holds_looks_around(played: Page) -> None:
    played.mouse("mouseMoved", *middle(played))
    assert played.value("events.length") == 0  # nobody has clicked
    hold_mouse(played)
    played.value("new Promise((done) => setTimeout(() => { events.length = 0; done(true); }, 300))")
    played.value(
        "document.getElementById('video').dispatchEvent("
        "new PointerEvent('pointermove', {movementX: 30, movementY: 20})), true"
    )
    played.until("events.some((event) => event.moved)")
    assert moved_by(played) == pytest.approx({"yaw": 0.3, "pitch": -0.2})


def test_a_finger_that_drags_looks_around(played: Page) -> None:
    played.resize(390, 844)
    x, y = middle(played)
    for kind, points in (("touchStart", [(x, y)]), ("touchMove", [(x - 25, y + 10)]),
                         ("touchMove", [(x - 50, y + 10)]), ("touchEnd", [])):  # fmt: skip
        played.call("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": a, "y": b} for a, b in points])
    played.until(
        "events.filter((event) => event.moved).reduce((sum, {moved}) => sum + (moved.yaw ?? 0), 0) <= -.49"
    )
    assert moved_by(played) == pytest.approx({"yaw": -0.5, "pitch": -0.1})


def test_who_comes_sees_the_example_move_where_a_place_is_free(start: Starter) -> None:
    server = start(shown_opener)
    pages = [open_page(f"{server.url}/") for _ in range(server.manager.capacity + 1)]
    with ExitStack() as opened:
        for each in pages[:-1]:
            page = opened.enter_context(each)
            page.until(f"{FRAMES} > 5")
            assert page.value(LINES) == ["a b"]
            assert page.problems == []
        late = opened.enter_context(pages[-1])
        late.until(f"{STATE} === 'Ready'")
        assert late.value("document.getElementById('start').textContent") == "Start"


def test_a_page_begins_though_the_place_that_it_left_is_not_free_at_once(start: Starter) -> None:
    server = start(shown_opener)
    full_at_first = (
        "const plain = window.fetch; let asked = 0;"
        "window.fetch = (url, ...more) => String(url).endsWith('/ready') && !asked++"
        " ? Promise.resolve(Response.json({status: 'ready', free: 0, capacity: 1})) : plain(url, ...more);"
    )
    with open_page("about:blank") as page:
        page.call("Page.addScriptToEvaluateOnNewDocument", source=full_at_first)
        page.call("Page.navigate", url=f"{server.url}/")
        page.until("location.protocol === 'http:' && document.readyState === 'complete'")
        page.until(f"{FRAMES} > 5")
        assert page.problems == []


def test_nothing_moves_by_itself_for_who_wants_less_motion(start: Starter) -> None:
    server = start(shown_opener)
    with open_page(f"{server.url}/", "--force-prefers-reduced-motion") as page:
        page.until(f"{STATE} === 'Ready'")
        time.sleep(0.5)
        assert not server.manager.sessions


def test_figures_stand_behind_a_key(start: Starter) -> None:
    with playing(start) as (_, page):
        shown = "document.getElementById('figures').checkVisibility()"
        assert not page.value(shown)
        page.key("F2", down=True)
        assert page.value(shown)
        assert page.value("document.getElementById('measures').getAttribute('aria-pressed')") == "true"
        page.key("F2", down=True)
        assert not page.value(shown)
        assert not page.value("document.getElementById('access').checkVisibility()")  # no key is asked for


def test_the_help_names_each_key_once_and_what_else_steers(played: Page) -> None:
    text = played.value("document.getElementById('keys-help').textContent")
    assert "Look: ←." in text
    assert "mouse" in text
    assert "gamepad" in text


@pytest.mark.parametrize("width", [1280, 390])
def test_texts_can_be_read_over_any_picture(start: Starter, width: int) -> None:
    with open_page(f"{start(world_opener).url}/") as page:
        page.resize(width, 844)
        page.until("!document.getElementById('start').disabled")
        for state in ("before", "live"):
            if state == "live":
                play(page)
            for sheet in ("", "timeline", "more"):
                page.value(f"document.querySelector('[aria-controls={sheet}]').click()" if sheet else "1")
                contrast, text = page.value(CONTRAST)
                assert contrast >= 4.5, (state, sheet, text)
        page.value("document.getElementById('state').className = 'error'")
        assert page.value(CONTRAST)[0] >= 4.5


def test_in_full_screen_the_picture_takes_the_whole_screen(start: Starter) -> None:
    with open_page(f"{start().url}/") as page:
        page.resize(1280, 800)
        play(page)
        page.click("full")
        page.until("document.fullscreenElement?.id === 'stage'")
        box = page.until(
            "(({x, y, width, height}) => [x, y, width, height])("
            "document.getElementById('video').getBoundingClientRect())"
        )
        assert box == page.value("[0, 0, innerWidth, innerHeight]")
        assert page.problems == []


def recorded(page: Page, folder: Path) -> Path:
    """Record for a while by the button; return the file that the browser saved."""
    page.save_into(folder)
    page.until(f"{FRAMES} > 5")
    page.click("record")
    assert page.value("document.getElementById('recording').textContent") == "0:00"
    page.until("document.getElementById('recording').checkVisibility()")
    page.until(f"{FRAMES} > {page.value(FRAMES)} + 30")
    page.until("/^0:0[1-9]$|^0:[1-5][0-9]$/.test(document.getElementById('recording').textContent)")
    page.click("record")
    page.until("Number(document.body.dataset.saved) > 100")
    while True:
        files = [file for file in folder.glob("seko.*") if file.suffix in (".mp4", ".webm")]
        if files and files[0].stat().st_size == page.value("Number(document.body.dataset.saved)"):
            return files[0]
        time.sleep(0.05)


def test_a_recording_plays_what_was_shown(start: Starter, tmp_path: Path) -> None:
    with open_page(f"{start().url}/") as page:
        begin(page)
        file = recorded(page, tmp_path)
        assert page.problems == []
    with av.open(str(file)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) >= 15
    assert {frame.shape for frame in frames} == {(toy_whole.HEIGHT, toy_whole.WIDTH, 3)}
    assert len({frame.tobytes() for frame in frames}) > 10
    assert np.mean([frame.std() for frame in frames]) > 5  # pictures, not black


def test_a_recording_of_a_pause_alone_is_no_file(start: Starter, tmp_path: Path) -> None:
    with open_page(f"{start().url}/") as page:
        page.save_into(tmp_path)
        play(page)
        page.click("pause")
        page.until(f"{STATE} === 'Paused'")
        page.until("Number(document.getElementById('buffered').textContent) === 0")
        for _ in range(2):
            page.click("record")
        page.until(f"{STATE}.startsWith('Nothing was shown')")
        assert page.value("document.body.dataset.saved === undefined")


def test_a_recording_has_the_sound_that_was_heard(start: Starter, tmp_path: Path) -> None:
    with open_page(f"{start(talk_opener).url}/") as page:
        choose_tone(page, tmp_path)
        begin(page)
        file = recorded(page, tmp_path)
    with av.open(str(file)) as container:
        assert container.streams.video
        (stream,) = container.streams.audio
        samples = np.concatenate([frame.to_ndarray().reshape(-1) for frame in container.decode(stream)])
        rate = stream.rate * stream.channels
    loud = samples[np.abs(samples).argmax() // 2 :][: 1 << 14].astype(float)
    assert 0.2 < np.abs(loud).max() < 0.6  # 12,000 / 32,768
    strongest = np.abs(np.fft.rfft(loud * np.hanning(len(loud)))).argmax() * rate / len(loud)
    assert strongest / stream.channels == pytest.approx(440, rel=0.05)


def test_a_session_that_ended_behind_another_tab_leaves_the_next_one_to_its_viewer(start: Starter) -> None:
    with playing(start) as (_, page):
        page.value(HIDDEN.format("true"))
        page.until(f"{STATE} === 'Paused'")
        page.click("stop")
        page.value(HIDDEN.format("false"))
        page.value(
            "window.said = []; const send = WebSocket.prototype.send; WebSocket.prototype.send = function (data) "
            "{ said.push(JSON.parse(data).type); return send.call(this, data); }; true"
        )
        begin(page)
        page.until(f"{STATE} === 'Live'")
        page.click("pause")
        page.until(f"{STATE} === 'Paused'")
        assert "play" not in page.value("said")


def test_who_comes_back_to_a_dead_socket_finds_the_session_live_again(start: Starter) -> None:
    with playing(start) as (_, page):
        page.value(HIDDEN.format("true"))
        page.until(f"{STATE} === 'Paused'")
        page.value(
            "window.send = WebSocket.prototype.send; WebSocket.prototype.send = function (data) "
            "{ window.lost = true; }; true"
        )
        page.value(HIDDEN.format("false"))
        page.until("window.lost")
        page.value("WebSocket.prototype.send = window.send, true")
        lose_connection(page)
        page.value("window.WebSocket = Counted, true")
        page.until(f"{STATE} === 'Live'")


def test_a_tab_that_is_shown_and_hidden_at_once_stays_paused(start: Starter) -> None:
    with playing(start) as (server, page):
        page.value(HIDDEN.format("true"))
        page.until(f"{STATE} === 'Paused'")
        page.value(f"{HIDDEN.format('false')}; {HIDDEN.format('true')}")
        page.value("new Promise((done) => setTimeout(done, 500))")
        assert all(session.paused for session in server.manager.sessions.values())
        page.value(HIDDEN.format("false"))
        page.until(f"{STATE} === 'Live'")


def test_a_session_that_opens_behind_another_tab_waits_for_its_viewer(start: Starter) -> None:
    server = start()
    held = held_opening(server)
    with open_page(f"{server.url}/") as page:
        begin(page)
        held.wait_for_call()
        page.value(HIDDEN.format("true"))
        assert not page.value(IS_ERROR)
        held.release_soon()
        page.until(f"{STATE} === 'Paused'")
        page.value(HIDDEN.format("false"))
        page.until(f"{STATE} === 'Live'")


def test_what_a_gamepad_does_while_the_connection_is_lost_is_told_when_it_is_back(played: Page) -> None:
    played.value("pads[0].axes = [0, 0, .5, 0], true")
    played.until("events.some((event) => event.axes?.yaw === .5)")
    lose_connection(played)
    played.value("pads[0].buttons[0].pressed = true, pads[0].axes = [0, 0, 0, 0], true")
    played.until("document.querySelectorAll('.keys .held').length")  # it was looked at
    played.value("window.WebSocket = Counted, true")
    played.until("events.filter((event) => event.axes).at(-1).axes.yaw === 0")


def test_what_is_held_when_a_session_begins_steers_it(start: Starter) -> None:
    server = start(game_opener)
    held = held_opening(server)
    key = {"code": "ArrowLeft", "key": "ArrowLeft"}
    with open_page(f"{server.url}/") as page:
        page.value(GAMEPAD)
        page.value("pads[0].axes = [0, 0, .5, 0], true")
        begin(page)
        held.wait_for_call()
        page.value("pads[0].buttons[0].pressed = true, true")
        page.until("document.querySelectorAll('.keys .held').length")
        page.call("Input.dispatchKeyEvent", type="keyDown", **key)
        held.release_soon()
        page.until("events.some((event) => event.held?.join() === 'KeyW')")
        page.until("events.some((event) => event.axes?.yaw === .5)")
        page.until(f"{FRAMES} > 5")
        page.call("Input.dispatchKeyEvent", type="keyDown", autoRepeat=True, **key)
        page.until("events.some((event) => event.held?.join() === 'KeyW,ArrowLeft')")


def test_a_gamepad_that_is_unplugged_lets_its_sticks_go(played: Page) -> None:
    played.value("pads[0].axes = [0, 0, .5, 0], true")
    played.until("events.some((event) => event.axes?.yaw === .5)")
    played.value("pads = [null], true")
    played.until("events.at(-1).axes?.yaw === 0")


def test_enter_that_is_held_asks_once(start: Starter) -> None:
    with playing(start) as (_, page):
        page.value(
            "document.getElementById('prompt').value = 'b', document.getElementById('prompt').focus(), true"
        )
        for again in (False, True, True):
            page.call(
                "Input.dispatchKeyEvent",
                type="keyDown",
                key="Enter",
                windowsVirtualKeyCode=13,
                text="\r",
                autoRepeat=again,
            )
        assert page.value("document.querySelectorAll('#history button').length") == 2


def test_the_picture_lets_the_mouse_go_where_a_button_is_offered(played: Page) -> None:
    hold_mouse(played)
    lose_connection(played)
    played.until("!document.pointerLockElement")
