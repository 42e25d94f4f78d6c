"""Where the page has its things: nothing lies off the screen, over another thing, or in a second line."""

from __future__ import annotations

import pytest

from .browser import Page, open_page
from .conftest import Starter, toy_opener
from .pages import FAKE_DEVICES, NEEDS_BROWSER, STATE, play, playing
from .test_speech import opener as speech_opener
from .toys import film_opener, game_opener, shown_opener

pytestmark = [pytest.mark.usefixtures("quick"), NEEDS_BROWSER]
SIZES = [(1280, 800), (390, 844), (844, 390)]
# What is wrong with where controls are; the examples alone may be scrolled to.
FAULTS = """
(() => {
  const named = (e) => e.id || e.dataset.code || e.textContent.trim();
  const all = [...document.querySelectorAll("button, .button, select, textarea, input[type=number], h1")]
    .concat(["state", "recording"].map((id) => document.getElementById(id)))
    .filter((e) => e.checkVisibility() && !e.matches("#examples *, .twice"));
  const box = (e) => e.getBoundingClientRect();
  const found = [];
  for (const e of all) {
    const {left, top, right, bottom, height} = box(e);
    if (Math.min(left, top) < 0 || right > innerWidth + .5 || bottom > innerHeight + .5) {
      found.push(`${named(e)} is off the screen`);
    }
    if (e.matches("button, .button, select") && height < 40) found.push(`${named(e)} is too small for a finger`);
    for (const text of [...e.childNodes].filter(({nodeType}) => nodeType === Node.TEXT_NODE)) {
      const range = document.createRange();
      range.selectNode(text);
      const lines = range.getClientRects().length;
      if (e.matches("button, .button, h1") && lines > 1) found.push(`${named(e)} has several lines`);
    }
  }
  for (const [at, a] of all.entries()) for (const b of all.slice(at + 1)) {
    if (a.contains(b) || b.contains(a)) continue;
    const [p, q] = [box(a), box(b)];
    const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const along = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (across > 1 && along > 1) found.push(`${named(a)} and ${named(b)} overlap`);
  }
  for (const row of ["#transport", "header"]) {
    const middles = [...document.querySelector(row).children].filter((e) => e.checkVisibility())
      .map((e) => box(e).top + box(e).height / 2);
    if (Math.max(...middles) - Math.min(...middles) > 4) found.push(`${row} has several rows`);
  }
  const {scrollWidth, scrollHeight} = document.documentElement;
  if (scrollWidth > innerWidth || scrollHeight > innerHeight) found.push("the page can be scrolled");
  return found;
})()
"""


def seen(page: Page, name: str) -> bool:
    """Whether a click in the middle of an element reaches it."""
    reached: bool = page.value(
        f"(({{left, top, width, height}}) => document.getElementById('{name}').contains("
        "document.elementFromPoint(left + width / 2, top + height / 2)))"
        f"(document.getElementById('{name}').getBoundingClientRect())"
    )
    return reached


@pytest.mark.parametrize("opener", [toy_opener, game_opener, shown_opener])
def test_all_of_a_video_page_is_on_the_screen_and_nothing_lies_over_another(
    start: Starter, opener: object
) -> None:
    with open_page(f"{start(opener).url}/", "--force-prefers-reduced-motion") as page:
        page.until(f"{STATE} === 'Ready'")
        for size in SIZES:
            page.resize(*size)
            assert page.value(FAULTS) == []
            assert seen(page, "start")
        play(page)
        for size in SIZES:
            page.resize(*size)
            page.mouse("mouseMoved", size[0] / 2, 100)
            assert page.value(FAULTS) == []
            assert seen(page, "start")
            page.click("record")
            page.value("document.getElementById('change').value = 'fade', true")
            page.value("document.getElementById('change').dispatchEvent(new Event('change')), true")
            assert page.value("document.getElementById('amount').checkVisibility()")
            assert page.value(FAULTS) == []
            page.click("record")
        assert page.problems == []


def test_all_of_a_page_that_takes_a_camera_is_on_the_screen(start: Starter) -> None:
    with open_page(f"{start(film_opener).url}/", *FAKE_DEVICES) as page:
        page.until(f"{STATE} === 'Ready'")
        for size in SIZES:
            page.resize(*size)
            assert page.value(FAULTS) == []
        page.click("webcam")
        page.until("document.getElementById('webcam').getAttribute('aria-pressed') === 'true'")
        play(page)
        page.value("document.getElementById('change').value = 'fade', true")
        page.value("document.getElementById('change').dispatchEvent(new Event('change')), true")
        for size in SIZES:
            page.resize(*size)
            assert page.value(FAULTS) == []
            assert seen(page, "start")
            assert seen(page, "strength")


@pytest.mark.parametrize("size", SIZES)
def test_all_of_a_page_that_speaks_is_on_the_screen(start: Starter, size: tuple[int, int]) -> None:
    with open_page(f"{start(speech_opener).url}/") as page:
        page.resize(*size)
        page.until(f"{STATE} === 'Ready'")
        assert page.value(FAULTS) == []
        assert seen(page, "start")
        assert seen(page, "text")
        page.click("start")
        page.until("document.getElementById('say').checkVisibility()")
        assert page.value(FAULTS) == []
        assert seen(page, "say")


@pytest.mark.parametrize("size", SIZES)
def test_the_picture_is_the_page_and_is_whole(start: Starter, size: tuple[int, int]) -> None:
    with open_page(f"{start().url}/") as page:
        page.resize(*size)
        play(page)
        width, height, fit = page.value(
            "(({width, height}) => [width, height, getComputedStyle(document.getElementById('video')).objectFit])"
            "(document.getElementById('video').getBoundingClientRect())"
        )
        assert fit == "contain"  # no part of it is cut off
        assert width == size[0]
        assert height >= 0.9 * size[1]


def test_a_sheet_closes_by_its_button_by_escape_and_by_a_press_on_the_picture(start: Starter) -> None:
    with playing(start) as (_, page):
        sheet = "document.getElementById('timeline')"
        for closing in ("button", "escape", "picture", "other"):
            page.value("document.querySelector('[aria-controls=timeline]').click(), true")
            assert page.value(f"{sheet}.checkVisibility()")
            if closing == "button":
                page.value(f"{sheet}.querySelector('.icon').click(), true")
            elif closing == "escape":
                page.call("Input.dispatchKeyEvent", type="rawKeyDown", key="Escape", code="Escape")
            elif closing == "picture":
                page.click("video")
            else:
                page.value("document.querySelector('[aria-controls=more]').click(), true")
                assert page.value("document.getElementById('more').checkVisibility()")
            assert not page.value(f"{sheet}.checkVisibility()")
        assert page.value("document.querySelectorAll('[aria-expanded=true]').length") == 1


def test_controls_fade_while_nobody_does_anything_and_a_key_is_still_answered(start: Starter) -> None:
    opacity = "Number(getComputedStyle(document.getElementById('{}')).opacity)"
    with playing(start, game_opener) as (_, page):
        page.mouse("mouseMoved", 100, 100)
        page.until(f"{opacity.format('dock')} === 0 && {opacity.format('pad')} === 0")
        page.key("KeyW", down=True)
        page.until(f"{opacity.format('pad')} === 1")
        keys = "[...document.querySelectorAll('#pad .keys button')].map((key) => getComputedStyle(key).pointerEvents)"
        assert "none" not in page.value(keys)  # another finger presses the next one
        assert page.value(opacity.format("dock")) == 0  # who steers wants to see the picture
        page.key("KeyW", down=False)
        page.mouse("mouseMoved", 120, 100)
        page.until(f"{opacity.format('dock')} === 1")
        page.click("pause")
        page.until(f"{STATE} === 'Paused'")
        page.value("new Promise((done) => setTimeout(done, 4500))")
        assert page.value(opacity.format("dock")) == 1  # nothing plays: what goes on is at hand
