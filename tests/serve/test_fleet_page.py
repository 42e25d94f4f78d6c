"""The page of a gateway in a real browser: it plays from a box, goes on at another one, and has a model to choose."""

from __future__ import annotations

import asyncio

import pytest

from .browser import open_page
from .fleets import Fleet
from .pages import FRAMES, NEEDS_BROWSER, STATE, begin, play
from .test_speech import opener

pytest.importorskip("aiohttp", reason="needs seko-serve[ray]")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.quiet,
    NEEDS_BROWSER,
]


async def test_it_plays_and_goes_on_at_another_box_when_its_own_ends(fleet: Fleet) -> None:
    loop, allowed = asyncio.get_running_loop(), frozenset({fleet.url})
    first = await fleet.box(allowed_origins=allowed)

    def person() -> None:
        with open_page(f"{fleet.url}/") as page:
            begin(page)
            page.until(f"{FRAMES} > 20")
            second = asyncio.run_coroutine_threadsafe(fleet.box(allowed_origins=allowed), loop).result()
            asyncio.run_coroutine_threadsafe(fleet.stop(first), loop).result()
            painted = page.value(FRAMES)
            page.until(f"{FRAMES} > {painted} + 30")
            assert page.value(STATE) == "Live"
            assert second.facts().sessions == 1
            assert page.value("document.getElementById('models').children.length") == 0

    await asyncio.to_thread(person)


async def test_a_link_leads_to_the_box_that_has_the_session(fleet: Fleet) -> None:
    for _ in range(2):
        await fleet.box(allowed_origins=frozenset({fleet.url}))

    def people() -> None:
        with open_page(f"{fleet.url}/") as page:
            begin(page)
            page.until(f"{FRAMES} > 5 && document.getElementById('share').checkVisibility()")
            page.click("share")
            link = page.until("document.getElementById('link-text').value")
            assert not link.startswith(fleet.url)
            with open_page(link) as other:
                other.until(f"{FRAMES} > 20 && {STATE} === 'Live'")
                assert other.problems == page.problems == []

    await asyncio.to_thread(people)


async def test_a_fleet_of_two_models_has_a_page_for_each(fleet: Fleet) -> None:
    allowed = frozenset({fleet.url})
    video = await fleet.box(allowed_origins=allowed)
    speech = await fleet.box(opener, digest="5" * 64, allowed_origins=allowed)

    def person() -> None:
        with open_page(f"{fleet.url}/?model={video.facts().model}") as page:
            play(page)
            page.follow("#models a[href*=speech]")
            page.until("document.title === 'Seko speaks' && !document.getElementById('save').disabled")
            page.value("document.getElementById('text').value = 'hallo'")
            page.click("save")
            page.until("Number(document.body.dataset.saved || 0) > 0")  # from the box, by its link
            assert page.problems == []

    await asyncio.to_thread(person)
    assert speech.facts().model != video.facts().model
