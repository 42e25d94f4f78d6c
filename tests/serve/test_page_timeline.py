"""The prompts of a session on the page: those before are at hand, and a timeline of them is saved and played again."""

from __future__ import annotations

from pathlib import Path

import pytest

from seko_runtime.controls.recording import read_recording
from seko_serve.protocol import Control
from seko_serve.video.content import VideoContent
from tests.runtime import toy_pool

from .bounded import until
from .browser import Page, open_page
from .conftest import Starter
from .pages import CHUNK, IS_ERROR, LINES, NEEDS_BROWSER, STATE, begin, play, playing

pytestmark = [pytest.mark.usefixtures("quick"), NEEDS_BROWSER]
ALL_PLACED = (
    "document.querySelectorAll('#history button').length === {} && !document.querySelector('.waiting')"
)
# A fade's steps are followed as the network lets them come: here two of them by one chunk.
LATE_STEPS = """
(async () => {
  const { name } = performance.getEntriesByType("resource").find(({ name }) => name.endsWith("/prompts.js"));
  const { Timeline, fadeWeight, recordedPrompts } = await import(name);
  const timeline = new Timeline(document.createElement("ol"), () => {}, () => {});
  timeline.begin(7, "a");
  const fade = timeline.note({ prompt: "b", steps: 4 });
  [3, 4, 4, 5].forEach((chunk, step) => timeline.place(fade, chunk, fadeWeight(4 - step)));
  timeline.place(timeline.note({ prompt: "c" }), 5, 1);
  const text = timeline.text();
  return [text.trim().split("\\n").map(JSON.parse), recordedPrompts(text, "the timeline").prompts];
})()
"""
FIELD = "document.getElementById('prompt').value"


def asked_for(page: Page, *prompts: tuple[str, str]) -> None:
    """Begin with the first prompt, and change to each further one in its way once the one before is followed."""
    play(page, prompts[0][0])
    for number, (prompt, way) in enumerate(prompts[1:], 2):
        change(page, prompt, way)
        page.until(ALL_PLACED.format(number))


def change(page: Page, prompt: str, way: str) -> None:
    """Change to a prompt in a way."""
    page.value(f"document.getElementById('change').value = '{way}', true")
    begin(page, prompt)


def saved(page: Page, folder: Path) -> Path:
    """Save the timeline; return its file."""
    page.save_into(folder)
    page.click("timeline-save")
    until(lambda: [*folder.glob("seko*.jsonl")], "nothing was saved")
    return next(folder.glob("seko*.jsonl"))


def test_a_timeline_that_was_saved_and_is_played_again_asks_for_the_same(
    start: Starter, applied: list[Control], tmp_path: Path
) -> None:
    server = start()

    def asked() -> list[tuple[str, bool, float]]:
        fields = [control.fields for control in applied if control.type == "prompt"]
        return [(each["text"], each["recache"], each.get("weight", 1.0)) for each in fields]

    with open_page(f"{server.url}/") as page:
        page.until("!document.getElementById('start').disabled")
        page.value("document.getElementById('seed').value = 7, true")
        page.value("document.getElementById('amount').value = 2, true")  # seconds, or percent
        asked_for(page, ("a b", ""), ("c a", "cut"), ("b", "fade"))
        until(lambda: asked()[-1] == ("b", False, 1.0))  # the fade's last step
        for prompt, way in (("c", "mix"), ("a", "flow")):
            change(page, prompt, way)
        page.until(ALL_PLACED.format(5))
        file = saved(page, tmp_path)
        page.click("stop")
        assert page.problems == []
    once = asked()
    fade = [weight for text, _, weight in once if text == "b"]
    assert len(fade) > 2
    assert fade == [1 / left for left in range(len(fade), 0, -1)]
    assert ("c", False, 0.02) in once
    applied.clear()
    with open_page(f"{server.url}/") as page:
        page.until("!document.getElementById('start').disabled")
        page.upload("#timeline-file", file)
        page.until(ALL_PLACED.format(5))
        assert page.value(LINES) == ["a b", "c a", "b", "c", "a"]
        (session,) = server.manager.sessions.values()
        assert isinstance(session.content, VideoContent)
        assert (session.content.opening.seed, session.content.opening.prompt) == (7, "a b")
        assert page.problems == []
    assert asked() == once


def test_a_saved_timeline_is_a_recording_that_the_runtime_plays(start: Starter, tmp_path: Path) -> None:
    with open_page(f"{start().url}/") as page:
        asked_for(page, ("a b", ""), ("c a", "cut"))
        entries = read_recording(saved(page, tmp_path), "--events")
    assert [entry.what for entry in entries] == ["begin", "prompt", "end"]
    assert 0 < entries[1].chunk <= entries[2].chunk
    with toy_pool.open_pool() as pool, pool.open_session(**entries[0].opening) as session:
        for entry in entries[:-1]:
            session.replay(entry)
        assert session.run_chunk().index == 0


def test_a_fade_of_which_a_chunk_followed_two_steps_is_saved_and_read_as_one_fade(start: Starter) -> None:
    with open_page(f"{start().url}/") as page:
        page.until("!document.getElementById('start').disabled")
        lines, prompts = page.value(LATE_STEPS)
    assert [
        (line["chunk"], line["prompt"]["prompt"], line["prompt"].get("weight", 1.0)) for line in lines[1:-1]
    ] == [(3, "b", 1 / 4), (4, "b", 1 / 3), (4, "b", 1 / 2), (5, "b", 1.0), (5, "c", 1.0)]
    assert [(each["chunk"], each["prompt"], each.get("steps", 1)) for each in prompts] == [
        (0, "a", 1),
        (3, "b", 4),
        (5, "c", 1),
    ]


def test_a_file_that_is_no_timeline_is_told_and_can_be_chosen_again(start: Starter, tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"chunk": 0}\n')
    with playing(start) as (_, page):
        page.upload("#timeline-file", file)
        page.until(f"{IS_ERROR} && {STATE}.startsWith('some.jsonl is no timeline')")
        assert page.value("document.getElementById('stop').checkVisibility()")  # the video goes on
        assert page.value("document.getElementById('timeline-file').value") == ""
        file.write_text('{"chunk": 0, "begin": {"seed": 9007199254740993, "prompt": "b"}}\n')
        page.upload("#timeline-file", file)
        page.until(f"{STATE}.startsWith('A page takes seeds from')")  # a browser reads another number
        file.write_text('{"chunk": 0, "begin": {"seed": 0, "prompt": "b"}}\n')
        page.upload("#timeline-file", file)
        page.until(f"{LINES}.join() === 'b' && {STATE} === 'Live'")


def test_the_arrows_go_through_what_was_asked_before(start: Starter) -> None:
    with open_page(f"{start().url}/") as page:
        asked_for(page, ("a b", ""), ("c a", "flow"))
        page.value("document.getElementById('prompt').value = 'b', document.getElementById('prompt').focus()")
        seen = []
        for key in ("ArrowUp", "ArrowUp", "ArrowUp", "ArrowDown", "ArrowDown"):
            page.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)
            seen.append(page.value(FIELD))
        assert seen == ["c a", "a b", "a b", "c a", "b"]


def test_a_stream_that_begins_again_in_a_fade_begins_with_its_prompt(
    start: Starter, applied: list[Control]
) -> None:
    chunk = f"Number({CHUNK})"
    with open_page(f"{start().url}/") as page:
        asked_for(page, ("a b", ""), ("c a", "fade"))
        page.click("restart")
        page.until(f"{LINES}.join() === 'c a'")
        page.until(f"{chunk} > {page.value(chunk)} + 8")
    told = [(control.type, control.fields.get("weight", 1)) for control in applied]
    assert told[-2:] == [("prompt", 1), ("restart", 1)]
    assert told[0] != ("prompt", 1)  # it was a fade
