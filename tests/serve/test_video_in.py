"""An input video over the socket and from the page's camera: the stream is that of the runtime, given the same."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from seko_serve.client import AsyncClient
from seko_serve.live.session import MAX_FRAMES
from seko_serve.protocol import Control, Media
from tests.runtime.toy_whole import HEIGHT, WIDTH

from .bounded import until
from .browser import ALL_INPUTS_ENDED, HELD_DEVICES, open_page
from .conftest import NewClient, Running, Starter
from .pages import FAKE_DEVICES, FRAMES, HINT, NEEDS_BROWSER, REACTION, STATE, begin
from .test_server import PROMPT, http, pictures, watch
from .toys import film_opener


def picture(level: int, height: int = HEIGHT, width: int = WIDTH) -> NDArray[np.uint8]:
    return np.full((height, width, 3), level, np.uint8)


def png(level: int, height: int = HEIGHT, width: int = WIDTH) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="image2pipe") as container:
        stream: Any = container.add_stream("png", rate=1)
        stream.height, stream.width, stream.pix_fmt = height, width, "rgb24"
        container.mux(
            stream.encode(av.VideoFrame.from_ndarray(picture(level, height, width), format="rgb24"))
        )
        container.mux(stream.encode(None))
    return file.getvalue()


def alone(chunks: int, feed: Callable[[Any, int], None]) -> NDArray[np.uint8]:
    """Frames of the runtime alone; ``feed`` gives events before each chunk."""
    with film_opener() as pool, pool.open_session(seed=3, prompt=PROMPT) as session:
        frames = []
        for number in range(chunks):
            feed(session.controls["video_in"], number)
            frames.append(session.run_chunk().video()[0])
        return np.concatenate(frames)


def control_of(server: Running) -> Any:
    (session,) = server.manager.sessions.values()
    return session.row.controls["video_in"]  # type: ignore[union-attr]


async def rejections(client: AsyncClient, names: set[str]) -> list[dict[str, Any]]:
    """Wait until all of these controls were rejected, and return the messages."""
    found: list[dict[str, Any]] = []
    async for received in client.messages():
        if isinstance(received, Media):
            continue
        if received["type"] == "rejected":
            found.append(received)
        if received["type"] == "chunk":
            await client.send("ack", chunk=received["chunk"])
        if {message["id"] for message in found} == names:
            break
    return found


async def test_a_stream_begins_with_the_first_frame_and_follows_frames_and_strength(
    start: Starter, new_client: NewClient
) -> None:
    server = start(film_opener)
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    assert client.ready["takes"]["video"]
    described = client.ready["controls"]["video_in"]
    assert described["video"] == {"height": HEIGHT, "width": WIDTH, "fps": 16}
    assert described["strength"] == {"minimum": 0, "maximum": 1, "default": 0.5, "value": 0.5}
    await client.send_frame(png(40))
    media, _ = await watch(client, 3)
    named = await client.send_frame(png(200))
    changed = await client.send("control", name="video_in", event={"strength": 0.25})
    more, messages = await watch(client, 5)
    applied = {m["id"]: m["chunk"] for m in messages if m["type"] == "applied"}
    await client.close()

    def feed(video: Any, number: int) -> None:
        if not number:
            video.take({"frame": picture(40)})
        if number == applied[named]:
            video.take({"frame": picture(200)})
        if number == applied[changed]:
            video.take({"strength": 0.25})

    assert np.array_equal(pictures(media + more), alone(8, feed))


async def test_while_nothing_is_made_the_newest_frames_wait_and_the_others_are_counted(
    start: Starter, new_client: NewClient
) -> None:
    server, more = start(film_opener), 9
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    await client.send_frame(png(1))
    await watch(client, 2)
    await client.send("pause")
    async for received in client.messages():
        if not isinstance(received, Media) and received["type"] == "chunk":
            await client.send("ack", chunk=received["chunk"])
        elif not isinstance(received, Media) and received["type"] == "state":
            break
    before = dict(control_of(server).counts)
    for level in range(MAX_FRAMES + more):
        await client.send_frame(png(level), dropped=2)
    await client.send("play")
    await watch(client, 3)
    after = control_of(server).counts
    assert after["frames taken"] - before["frames taken"] == 3 * (MAX_FRAMES + more)
    assert after["dropped"] - before["dropped"] >= 2 * (MAX_FRAMES + more) + more
    await client.close()


async def test_a_frame_whose_place_a_newer_one_took_is_answered_like_all_others(
    start: Starter, new_client: NewClient
) -> None:
    client = await new_client(start(film_opener)).open(codecs=["rgb24"], prompt=PROMPT)
    await client.send("pause")
    names = {await client.send_frame(png(level)) for level in range(MAX_FRAMES + 2)}
    await client.send("play")
    _, messages = await watch(client, 2)
    assert names <= {message["id"] for message in messages if message["type"] == "applied"}


@pytest.mark.parametrize("size", [(8 * HEIGHT, 4 * WIDTH), (8, 10 * WIDTH)])
async def test_a_frame_waits_in_the_size_of_the_model(
    size: tuple[int, int], start: Starter, new_client: NewClient, applied: list[Control]
) -> None:
    client = await new_client(start(film_opener)).open(codecs=["rgb24"], prompt=PROMPT)
    await client.send_frame(png(9, *size))
    await watch(client, 1)
    assert applied[0].fields["frame"].shape == (HEIGHT, WIDTH, 3)


async def test_what_is_no_frame_is_rejected_and_the_stream_goes_on(
    start: Starter, new_client: NewClient
) -> None:
    server = start(film_opener)
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    names = [await client.send_frame(b"no picture"), await client.send_frame(png(9)[:60])]
    names.append(await client.send("control", name="video_in", event={"strength": 2}))
    names.append(await client.send("control", name="video_in", event={"clip": "/etc/passwd"}))
    await client.send_frame(png(9))
    rejected = await rejections(client, {*names})
    assert "no picture" in next(m for m in rejected if m["id"] == names[0])["message"]
    await watch(client, 3)
    await client.close()


async def test_others_take_no_frames_and_videos_by_request_have_no_input(
    start: Starter, new_client: NewClient
) -> None:
    server = start()
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT)
    name = await client.send_frame(png(9))
    (rejected,) = await rejections(client, {name})
    assert "takes no video" in rejected["message"]
    await client.close()
    status, body = http(f"{start(film_opener).url}/v1/videos", "POST", {"prompt": PROMPT})
    assert status == 415
    assert "input video" in body["error"]["message"]


@NEEDS_BROWSER
def test_a_camera_that_is_turned_off_before_it_is_allowed_stays_off(start: Starter) -> None:
    with open_page(f"{start(film_opener).url}/", *FAKE_DEVICES) as page:
        page.until("!document.getElementById('strength-box').hidden")
        page.value(HELD_DEVICES)
        for _ in range(2):
            page.click("webcam")
        page.value("allow(), true")
        page.until(ALL_INPUTS_ENDED)
        assert page.value("document.getElementById('webcam').getAttribute('aria-pressed')") == "false"
        page.click("webcam")
        page.until("!document.getElementById('camera-box').hidden")
        assert page.problems == []


@NEEDS_BROWSER
def test_the_page_sends_its_camera_and_shows_it_beside_the_model(start: Starter) -> None:
    """Camera left, model right; the slider is the strength; how long a frame takes to the picture is measured."""
    server = start(film_opener)
    left = "(id) => document.getElementById(id).getBoundingClientRect().left"
    with open_page(f"{server.url}/", *FAKE_DEVICES) as page:
        page.until("!document.getElementById('strength-box').hidden")
        assert page.value("document.getElementById('strength').value") == "0.5"
        assert page.value(HINT).startswith("Turn your camera on")
        page.click("webcam")
        page.until("!document.getElementById('camera-box').hidden")
        begin(page)
        page.until(f"{FRAMES} > 60")
        assert page.value(STATE) == "Live"
        assert page.value(f"({left})('camera') < ({left})('video')")
        page.until(f"{REACTION}.endsWith('ms')")
        page.until("parseInt(document.getElementById('frames-sent').textContent) > 10")
        video = control_of(server)
        assert video.counts["frames taken"] > 5
        assert video.next_chunk()["video"].std() > 10  # the fake camera's picture, not one colour
        page.value(
            "const s = document.getElementById('strength'); s.value = 0.2; s.dispatchEvent(new Event('input')); true"
        )
        until(lambda: video.strength == 0.2)
        page.click("webcam")
        assert page.value("document.getElementById('camera-box').hidden")
        painted = page.value(FRAMES)
        page.until(f"{FRAMES} > {painted} + 20")  # the last frame stays
        assert page.problems == []
