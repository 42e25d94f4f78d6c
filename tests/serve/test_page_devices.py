"""The page with a microphone and a camera: they come and go, and a voice that ends while the socket is lost ends."""

from __future__ import annotations

import pytest

from .browser import HELD_DEVICES, open_page
from .conftest import Starter
from .pages import FAKE_DEVICES, FRAMES, NEEDS_BROWSER, STATE, lose_connection, play, playing
from .toys import film_opener, talk_opener

pytestmark = [pytest.mark.usefixtures("quick"), NEEDS_BROWSER]


def test_a_microphone_is_off_when_its_session_has_ended_and_the_button_says_so(start: Starter) -> None:
    with playing(start, talk_opener, options=FAKE_DEVICES) as (_, page):
        page.click("microphone")
        page.until("document.getElementById('microphone').title === 'Stop speaking'")
        page.click("stop")
        assert page.value("document.getElementById('microphone').title") == "Speak"


GONE = "inputs[0].getTracks()[0].stop(), inputs[0].getTracks()[0].dispatchEvent(new Event('ended')), true"


def test_a_camera_that_is_taken_away_is_off(start: Starter) -> None:
    with open_page(f"{start(film_opener).url}/", *FAKE_DEVICES) as page:
        page.value(f"{HELD_DEVICES}; allow(), true")
        page.until("!document.getElementById('start').disabled")
        page.click("webcam")
        page.until("document.getElementById('webcam').title === 'Camera off'")
        play(page)
        page.value(GONE)
        page.until(f"{STATE} === 'The camera is gone'")
        assert page.value("document.getElementById('webcam').title") == "Camera on"


def test_a_microphone_that_is_taken_away_is_off(start: Starter) -> None:
    with open_page(f"{start(talk_opener).url}/", *FAKE_DEVICES) as page:
        page.value(f"{HELD_DEVICES}; allow(), true")
        play(page)
        page.click("microphone")
        page.until("document.getElementById('microphone').title === 'Stop speaking'")
        page.value(GONE)
        page.until(f"{STATE} === 'The microphone is gone'")
        assert page.value("document.getElementById('microphone').title") == "Speak"


def test_a_voice_that_ends_while_the_socket_is_lost_holds_nothing_up(start: Starter) -> None:
    with playing(start, talk_opener, options=FAKE_DEVICES) as (_, page):
        page.click("microphone")
        page.until("Number(document.body.dataset.heard || 0) > 0.05")
        lose_connection(page)
        page.click("microphone")
        page.until("document.getElementById('microphone').title === 'Speak'")
        page.value("window.WebSocket = Counted, true")
        page.until(f"{STATE} === 'Live'")
        page.until(f"{FRAMES} > {page.value(FRAMES)} + 30")


def test_a_microphone_moves_a_portrait_that_was_silent(start: Starter) -> None:
    heard = "Number(document.body.dataset.heard || 0)"
    with playing(start, talk_opener, options=FAKE_DEVICES) as (_, page):
        assert page.value(heard) < 0.01
        page.click("microphone")
        page.until("document.getElementById('microphone').getAttribute('aria-pressed') === 'true'")
        page.until(f"{heard} > 0.05")  # the browser's own beeps
        page.click("microphone")
        page.until(f"{FRAMES} > {page.value(FRAMES)} + 30")  # it ends, and the portrait is silent again
        assert page.problems == []
