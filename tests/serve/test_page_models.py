"""The page in a real browser over real artifacts: keys move a world, prompts change it, a portrait is heard."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch

from scripts.random_speech import write_random_voxcpm2
from seko_serve.client import Client
from seko_serve.live.device import pool_of
from seko_serve.video.content import VideoContent
from tests.support.shared import made_once
from tests.voxcpm2.models import PLAIN
from tests.voxcpm2.test_sessions import opened as opened_speech

from .artifacts import ENVIRONMENT, make_talk, make_way, make_world
from .browser import Page, open_page
from .conftest import Running, Starter
from .pages import FRAMES, NEEDS_BROWSER, REACTION, STATE, choose_tone
from .test_server import http

pytestmark = [
    pytest.mark.slow,
    pytest.mark.quiet,
    NEEDS_BROWSER,
]
# Keeps what the player of sound is told: samples, or that what is not heard yet is dropped.
LISTEN = """
(() => {
  const post = MessagePort.prototype.postMessage;
  window.told = [];
  MessagePort.prototype.postMessage = function (message, ...more) {
    if (message.samples || message.dropped) told.push(message.samples ? 'samples' : 'dropped');
    return post.call(this, message, ...more);
  };
  return true;
})()
"""
SHIFT = 10  # pixels, the most that is looked for
# Keeps every painted frame: its number and its pixels.
WATCH = """
(() => {
  const video = document.getElementById('video'), canvas = document.createElement('canvas');
  [canvas.width, canvas.height] = [video.width, video.height];
  const context = canvas.getContext('2d', {willReadFrequently: true});
  window.seen = [];
  window.watching = new MutationObserver(() => {
    context.drawImage(video, 0, 0);
    const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
    seen.push([Number(document.body.dataset.frame), btoa(Array.from(data, (b) => String.fromCharCode(b)).join(''))]);
  });
  watching.observe(document.body, {attributes: true, attributeFilter: ['data-frame']});
  return true;
})()
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "serve-world", make_world)


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "serve-talk", make_talk)


Serve = Callable[[Path], Running]


@pytest.fixture
def serve(start: Starter, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Serve the artifact of a folder."""
    monkeypatch.setenv(*next(iter(ENVIRONMENT.items())))
    return lambda folder: start(lambda: pool_of(folder / "artifact"), folder / "artifact")


def begin(page: Page, folder: Path, prompt: str) -> None:
    """Choose the picture, write a sentence, press Start."""
    page.until("document.getElementById('model').textContent")
    assert page.value("document.getElementById('start').disabled")  # before there is a picture
    page.upload("#image", folder / "picture.png")
    page.until("!document.getElementById('start').disabled")
    write(page, prompt)


def write(page: Page, prompt: str) -> None:
    page.value(
        f"document.getElementById('prompt').value = {prompt!r}; document.getElementById('start').click(); true"
    )


def watched(page: Page, frames: int) -> tuple[list[int], np.ndarray]:
    """The next painted frames: their numbers, and pixels [T, H, W, 3]."""
    page.value(WATCH)
    page.until(f"seen.length >= {frames}")
    seen = page.value("watching.disconnect(), seen")
    side = page.value("document.getElementById('video').width")
    shapes = [
        np.frombuffer(base64.b64decode(data), np.uint8).reshape(-1, side, 4)[:, :, :3] for _, data in seen
    ]
    return [number for number, _ in seen], np.stack(shapes)


def moved(before: np.ndarray, after: np.ndarray) -> tuple[int, int]:
    """How many pixels to the right and down the picture has moved: the shift with the least difference."""
    best, least = (0, 0), np.inf
    height, width = (side - 2 * SHIFT for side in after.shape[:2])
    old, new = before.astype(np.int16), after[SHIFT:-SHIFT, SHIFT:-SHIFT].astype(np.int16)
    for down in range(-SHIFT, SHIFT + 1):
        for right in range(-SHIFT, SHIFT + 1):
            top, left = SHIFT - down, SHIFT - right
            difference = int(np.abs(old[top : top + height, left : left + width] - new).sum())
            if difference < least:
                best, least = (right, down), difference
    return best


def share(picture: np.ndarray, colour: tuple[int, int, int]) -> float:
    """The share of pixels that are nearly of a colour."""
    return float((np.abs(picture.astype(int) - colour).max(-1) < 70).mean())


def test_a_world_plays_in_order_moves_as_keys_say_and_changes_with_the_sentence(
    world: Path, serve: Serve
) -> None:
    purple, yellow = (190, 90, 220), (240, 220, 60)
    with open_page(f"{serve(world).url}/") as page:
        page.until("!document.getElementById('start').disabled")  # the artifact brings picture and prompt
        page.click("start")
        page.until(f"{FRAMES} > 20")
        assert page.value("document.getElementById('video').getAttribute('width')") is not None
        numbers, still = watched(page, 12)
        assert moved(still[0], still[8]) == (0, 0)
        directions = {}
        for code in ("KeyD", "KeyA"):
            page.key(code, down=True)
            page.until(f"document.querySelector('[data-code={code}]').classList.contains('held')")
            page.until(f"{FRAMES} > {page.value(FRAMES)} + 40")
            more, frames = watched(page, 12)
            page.key(code, down=False)
            assert more == sorted(set(more))
            assert more[0] > numbers[-1]
            numbers = more
            assert len({frame.tobytes() for frame in frames}) > 8
            directions[code] = np.median([moved(frames[at], frames[at + 4]) for at in range(0, 8, 2)], axis=0)
        # A latent frame of 4 video frames moves the view by 8 pixels; what is seen moves the other way.
        assert np.abs(directions["KeyD"] - (-8, 0)).max() <= 2, directions
        assert np.abs(directions["KeyA"] - (8, 0)).max() <= 2, directions
        assert share(page.pixels(), purple) > 0.05
        page.value("document.getElementById('change').value = 'cut'")
        write(page, "a yellow triangle on a dark blue background")
        # The time to the picture that the page shows may still be that of a key.
        page.until(
            "document.querySelectorAll('#history li').length === 2 && !document.querySelector('.waiting')"
        )
        chunk = "Number(document.getElementById('chunk').textContent)"
        # At most 2 are on the way, and 2 further ones follow it.
        page.until(f"{chunk} >= {page.value(chunk)} + 4")
        picture = page.pixels()
        assert share(picture, yellow) > 0.05
        assert share(picture, purple) < 0.01
        page.click("record")
        page.until(f"{FRAMES} > {page.value(FRAMES)} + 20")
        page.click("record")
        page.until("Number(document.body.dataset.saved) > 1000")
        assert page.problems == []


# Plays a session by WebRTC, and keeps its frames: the time of each, and its pixels.
PLAY = """
(async () => {
  const video = document.body.appendChild(document.createElement('video')), pc = new RTCPeerConnection();
  const canvas = document.createElement('canvas'), context = canvas.getContext('2d', {willReadFrequently: true});
  video.muted = video.autoplay = true;
  window.seen = [];
  window.steering = pc.createDataChannel('controls');
  const keep = (_, {mediaTime}) => {
    [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
    context.drawImage(video, 0, 0);
    const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
    seen.push([mediaTime, btoa(Array.from(data, (b) => String.fromCharCode(b)).join(''))]);
    video.requestVideoFrameCallback(keep);
  };
  video.requestVideoFrameCallback(keep);
  pc.addTransceiver('video', {direction: 'recvonly'});
  pc.ontrack = (event) => { video.srcObject = new MediaStream([event.track]); };
  await pc.setLocalDescription(await pc.createOffer());
  if (pc.iceGatheringState !== 'complete') await new Promise((done) => {
    pc.onicegatheringstatechange = () => pc.iceGatheringState === 'complete' && done();
  });
  const answer = await fetch('/v1/sessions/SESSION/whep', {method: 'POST', body: pc.localDescription.sdp,
    headers: {'content-type': 'application/sdp'}});
  await pc.setRemoteDescription({type: 'answer', sdp: await answer.text()});
  return answer.status;
})()
"""


def shift(page: Page, fps: int) -> float:
    """By how many pixels the picture moves to the right in 4 frames, for a player's newest ones."""
    seen = page.value(f"seen.slice(-{fps})")
    side = page.value("document.querySelector('video').videoWidth")
    frames = [
        (time, np.frombuffer(base64.b64decode(data), np.uint8).reshape(-1, side, 4)[:, :, :3])
        for time, data in seen
    ]
    shifts = [
        moved(before, after)[0]
        for begun, before in frames
        for ended, after in frames
        if round((ended - begun) * fps) == 4
    ]
    return float(np.median(shifts)) if shifts else np.nan


def test_a_player_by_webrtc_sees_a_world_and_moves_it(world: Path, serve: Serve) -> None:
    pytest.importorskip("aiortc")
    url = f"{serve(world).url}/"
    with Client(url) as client:
        example = client.example()
    body, kind = json.dumps(example).encode(), {"content-type": "application/json"}
    with urlopen(Request(f"{url}v1/sessions", body, kind), timeout=120) as answer:
        opened = json.load(answer)
    fps = round(http(f"{url}v1/models")[1]["data"][0]["fps"])
    with open_page(f"{url}health", "--disable-features=WebRtcHideLocalIpsWithMdns") as page:
        assert page.value(PLAY.replace("SESSION", opened["id"])) == 201
        page.until("steering.readyState === 'open'")
        for held, low, high in ([], 0, 0), (["KeyD"], -10, -4), (["KeyA"], 4, 10):
            keys = json.dumps({"type": "keys", "id": str(held), "held": held})
            page.value(f"steering.send({json.dumps(keys)}); true")
            end = time.monotonic() + 120
            while not low <= (found := shift(page, fps)) <= high:
                assert time.monotonic() < end, (held, found)
        page.until("seen.at(-1)[0] - seen[0][0] > 8")
        assert page.problems == []


def test_a_portrait_is_seen_and_its_voice_heard_on_one_clock(
    talk: Path, serve: Serve, tmp_path: Path
) -> None:
    with open_page(f"{serve(talk).url}/") as page:
        choose_tone(page, tmp_path)
        begin(page, talk, "a red disc")
        page.until(f"{FRAMES} > 60")
        assert page.value("document.body.dataset.sound") == "opus"  # by isConfigSupported
        assert 0.2 < page.value("Number(document.body.dataset.heard)") < 0.6  # 12,000 / 32,768
        numbers = page.value(
            "new Promise((told) => { const seen = []; const o = new MutationObserver(() => {"
            " seen.push(Number(document.body.dataset.frame));"
            " if (seen.length === 40) { o.disconnect(); told(seen); } });"
            " o.observe(document.body, {attributes: true, attributeFilter: ['data-frame']}); })"
        )
        assert numbers == list(range(numbers[0], numbers[0] + 40))
        page.click("mute")
        page.click("pause")
        page.until(f"{STATE} === 'Paused'")
        page.click("pause")
        page.until(f"{FRAMES} > {page.value(FRAMES)} + 20")
        assert page.problems == []


def test_a_page_asks_for_two_pictures_where_a_video_leads_from_one_to_the_other(
    serve: Serve, tmp_path_factory: pytest.TempPathFactory
) -> None:
    way = made_once(tmp_path_factory, "serve-way", make_way)
    server = serve(way)
    with open_page(f"{server.url}/") as page:
        page.until("document.getElementById('model').textContent")
        page.upload("#image", way / "first.png")
        page.until("document.getElementById('image-thumbnail').naturalWidth")
        assert page.value("document.getElementById('start').disabled")
        assert page.value("document.getElementById('notice').checkVisibility()")
        page.upload("#last_image", way / "last.png")
        page.until("!document.getElementById('start').disabled")
        page.value("document.getElementById('last_s').value = 1; true")
        write(page, "a red disc")
        page.until(f"{FRAMES} > 20")
        (session,) = server.manager.sessions.values()
        assert isinstance(session.content, VideoContent)
        assert session.content.opening.pictures["inputs"]["last_frame"].tolist() == [
            4
        ]  # 16 frames: 1, and 4 a latent
        page.value("document.getElementById('last_s').value = 0.5; true")
        page.click("restart")
        while not (others := [other for other in server.manager.sessions.values() if other is not session]):
            time.sleep(0.02)
        assert isinstance(others[0].content, VideoContent)
        assert others[0].content.opening.pictures["inputs"]["last_frame"].tolist() == [2]
        page.until(f"{STATE} === 'Live'")
        page.screenshot(way.parent / "way.png")
        page.screenshot(way.parent / "way-phone.png", 390, 1300)
        assert page.value("document.documentElement.scrollWidth <= 390")
        assert page.problems == []


def test_what_one_types_is_spoken_in_the_browser(
    start: Starter, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = made_once(
        tmp_path_factory,
        "voxcpm2-tiny-fp32",
        lambda path: write_random_voxcpm2(path, PLAIN, seed=11, dtype=torch.float32),
    )
    with open_page(f"{start(lambda: opened_speech(folder, 2, (1, 2))).url}/") as page:
        page.until("!document.getElementById('text').disabled")
        page.value("document.getElementById('text').focus()")
        page.call("Input.insertText", text="The first sentence. And so")
        page.until("Number(document.body.dataset.samples) > 0")  # before the second one has ended
        page.until(f"{REACTION}.endsWith('ms')")
        page.until("Number(document.body.dataset.heard) > 0")
        stood = page.value("Number(document.body.dataset.samples)")
        page.call("Input.insertText", text=" on")
        page.click("say")
        page.until(f"Number(document.body.dataset.samples) > {stood}")
        page.value(f"document.getElementById('text').value = {'A sentence with many words. ' * 200!r}; true")
        page.click("again")
        page.value(LISTEN)
        page.until("told.length > 3")
        page.click("hush")
        page.until("told.includes('dropped')")
        time.sleep(0.5)  # of chunks that were on their way
        assert page.value("told.at(-1)") == "dropped"
        page.click("again")
        page.until("told.at(-1) === 'samples'")
        page.click("hush")
        page.value("document.getElementById('text').value = '😄'; true")
        page.click("again")
        page.until(f"{STATE}.includes('nothing to say')")
        page.value("document.getElementById('text').value = 'The first sentence.'; true")
        page.click("save")
        page.until("Number(document.body.dataset.saved) > 100")
        page.screenshot(folder.parent / "speech.png", 1280, 800)
        assert [text for text in page.problems if "503" not in text] == []  # its row is not free at once
        page.screenshot(folder.parent / "speech-phone.png", 390, 844)
        assert page.value("document.documentElement.scrollWidth <= 390")
