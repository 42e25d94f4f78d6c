"""Senders of video by WebRTC: FFmpeg and aiortc. What comes in is looked at where a chunk takes it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

pytest.importorskip("aiortc")
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription, VideoStreamTrack
from av import VideoFrame

from seko_serve.live.session import MAX_FRAMES
from tests.runtime.toy_whole import HEIGHT, WIDTH

from .bounded import comes
from .browser import open_page
from .conftest import NewClient, Running, Starter
from .pages import FAKE_DEVICES, FRAMES, NEEDS_BROWSER, STATE, begin
from .test_server import PROMPT, http, watch
from .test_video_in import control_of
from .test_webrtc import WAIT_S, ask, player
from .toys import film_opener

SEND = "/v1/whip?prompt=a+b&seed=3"
DARK, BRIGHT = 30, 220


class Camera(VideoStreamTrack):
    """Frames of one colour, of `size` and `level`, 30 a second; none while it is `covered`."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.level, self.covered = (64, 48), DARK, False

    async def recv(self) -> VideoFrame:
        await comes(lambda: not self.covered)
        pts, base = await self.next_timestamp()
        width, height = self.size
        picture = np.full((height, width, 3), self.level, np.uint8)
        frame = VideoFrame.from_ndarray(picture, format="rgb24")
        frame.pts, frame.time_base = pts, base
        return frame


@asynccontextmanager
async def sending(server: Running, path: str, key: str = "") -> AsyncIterator[tuple[Camera, str]]:
    """A client that sends by WHIP, and its place."""
    rtc, camera = RTCPeerConnection(RTCConfiguration(iceServers=[])), Camera()
    try:
        rtc.addTransceiver(camera, direction="sendonly")
        await rtc.setLocalDescription(await rtc.createOffer())
        offer = rtc.localDescription.sdp
        status, answer, place = await asyncio.to_thread(ask, server.url + path, "POST", offer, key=key)
        assert status == 201, answer
        await rtc.setRemoteDescription(RTCSessionDescription(answer, "answer"))
        yield camera, place
    finally:
        await rtc.close()


def used(server: Running) -> tuple[float, tuple[int, ...]]:
    """The level and the shape of the newest frame that a chunk has used."""
    frame = control_of(server)._last
    return (-1.0, ()) if frame is None else (float(frame.mean()), frame.shape)


async def test_ffmpeg_sends_and_another_player_sees_its_video(start: Starter) -> None:
    server = start(film_opener)
    command = [sys.executable, "-m", "tests.serve.ffmpeg_sender", server.url + SEND, "5"]
    ffmpeg = subprocess.Popen(command)
    try:
        await comes(lambda: server.manager.sessions or ffmpeg.poll() is not None)
        (name,) = server.manager.sessions
        async with player() as one:
            await one.watch(server, f"/v1/sessions/{name}/whep")
            await one.track.recv()
            first, shape = used(server)
            assert shape == (HEIGHT, WIDTH, 3)
            while used(server)[0] < first + 60:
                await one.track.recv()
            came = http(f"{server.url}/v1/sessions/{name}")[1]["video_in"]
            assert came["frames taken"] > came["dropped"] > 0  # it sends more frames than the model takes
        await comes(lambda: ffmpeg.poll() is not None)
        assert ffmpeg.returncode == 0
        await comes(lambda: not server.manager.sessions)  # it takes its leave
    finally:
        ffmpeg.kill()


async def test_frames_come_into_a_session_that_its_viewer_plays_on_a_socket(
    start: Starter, new_client: NewClient
) -> None:
    """The stream outlives what may happen to its video: another size, a pause, an end, another sender."""
    server = start(film_opener)
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    (name,) = server.manager.sessions
    path = f"/v1/sessions/{name}/whip"

    async def shows(level: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while abs(used(server)[0] - level) > 5:
                await watch(client, 1)

    async with sending(server, path) as (camera, place):
        assert place.startswith(f"{path}/")
        await shows(DARK)
        camera.size, camera.level = (128, 72), BRIGHT
        await shows(BRIGHT)
        camera.covered = True
        repeated = control_of(server).counts["repeated"]
        while control_of(server).counts["repeated"] < repeated + 20:
            await watch(client, 1)
        assert used(server)[0] > BRIGHT - 5  # the last frame stays
        async with sending(server, path):  # which takes its place
            await shows(DARK)
    await watch(client, 3)
    async with sending(server, path) as (camera, place):
        camera.level = BRIGHT
        await shows(BRIGHT)
        assert (await asyncio.to_thread(ask, server.url + place, "DELETE"))[0] == 200
    assert server.manager.sessions[name].alone_since is None
    await watch(client, 3)  # what did not open the session does not end it
    await client.close()


async def test_who_sends_keeps_the_session_and_no_queue_grows_while_nobody_watches(start: Starter) -> None:
    server = start(film_opener, lease_s=0.5)
    async with sending(server, SEND):
        (session,) = server.manager.sessions.values()
        await comes(lambda: len(session._waiting) == MAX_FRAMES)
        seen = session._waiting[0]
        await comes(lambda: session._waiting[0] is not seen)
        assert len(session._waiting) == MAX_FRAMES
        await asyncio.sleep(2)  # longer than the lease
        assert server.manager.sessions
    await comes(lambda: not server.manager.sessions)


@NEEDS_BROWSER
async def test_the_page_tells_where_to_send_and_plays_what_comes_of_it(start: Starter) -> None:
    server = start(film_opener)
    with open_page(f"{server.url}/") as page:
        begin(page)
        page.until("document.getElementById('ways').textContent.includes('elsewhere')")
        page.value("document.getElementById('ways').lastChild.click(); true")
        page.until("document.getElementById('whip-address').checkVisibility()")
        address = page.value("document.getElementById('whip-address').value")
        async with sending(server, address.removeprefix(server.url)):
            await asyncio.to_thread(page.until, f"{FRAMES} > 20")
        assert page.value(STATE) == "Live"
        assert page.problems == []


@NEEDS_BROWSER
async def test_a_browser_sends_its_camera(start: Starter) -> None:
    server = start(film_opener)
    with open_page(
        f"{server.url}/health", *FAKE_DEVICES, "--disable-features=WebRtcHideLocalIpsWithMdns"
    ) as page:
        place = page.value(
            """(async () => {
            const media = await navigator.mediaDevices.getUserMedia({ video: true });
            const pc = window.pc = new RTCPeerConnection();
            pc.addTransceiver(media.getVideoTracks()[0], { direction: "sendonly" });
            await pc.setLocalDescription(await pc.createOffer());
            const answer = await fetch("SEND", { method: "POST", body: pc.localDescription.sdp,
                headers: { "content-type": "application/sdp" } });
            await pc.setRemoteDescription({ type: "answer", sdp: await answer.text() });
            return answer.headers.get("location");
            })()""".replace("SEND", SEND)
        )
        async with player() as one:
            await one.watch(server, place.partition("/whip")[0] + "/whep")
            while control_of(server).counts["frames taken"] < 10:
                await one.track.recv()
        assert control_of(server)._last.std() > 10  # the fake camera's picture, not one colour


def test_what_sends_no_video_takes_no_place(start: Starter) -> None:
    server = start()
    status, answer, _ = ask(server.url + SEND, "POST", "nothing")
    assert (status, json.loads(answer)["error"]["code"]) == (415, "unsupported")
    assert "takes no video" in answer
    server = start(film_opener)
    assert ask(server.url + SEND, "POST", "nothing")[0] == 400
    assert ask(server.url + SEND, "POST", "{}", "application/json")[0] == 415
    assert ask(f"{server.url}/v1/whip?promt=a", "POST", "nothing")[0] == 400
    assert not server.manager.sessions
    name = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})[1]["id"]
    assert ask(f"{server.url}/v1/sessions/{name}/whip/x", "DELETE")[0] == 404
    assert ask(f"{server.url}/v1/sessions/{name}/whip", "POST", "nothing")[0] == 400
    assert server.manager.sessions[name].alone_since is not None


async def test_an_offer_that_only_receives_video_sends_no_other_sender_away(start: Starter) -> None:
    server = start(film_opener)
    async with sending(server, SEND), player() as other:
        (session,) = server.manager.sessions
        await other.rtc.setLocalDescription(await other.rtc.createOffer())
        offer, path = other.rtc.localDescription.sdp, f"{server.url}/v1/sessions/{session}/whip"
        status, answer, _ = await asyncio.to_thread(ask, path, "POST", offer)
        assert (status, json.loads(answer)["error"]["code"]) == (400, "bad_request")


async def test_only_the_key_of_a_session_sends_it_video(start: Starter) -> None:
    key, other = "k" * 32, "o" * 32
    server = start(film_opener, keys=(key, other))
    assert ask(server.url + SEND, "POST", "nothing")[0] == 401
    async with sending(server, SEND, key) as (_, place):
        assert ask(server.url + place.rpartition("/")[0], "POST", "nothing", key=other)[0] == 404
        assert ask(server.url + place, "DELETE", key=other)[0] == 404
        assert server.manager.sessions


@pytest.mark.parametrize(("rate", "taken"), [(30, 160), (60, 160), (16, 160), (10, 100)])
def test_of_more_frames_than_the_model_takes_the_right_share_is_passed_on(rate: int, taken: int) -> None:
    from seko_serve.http.sender import Sender

    sender = Sender.__new__(Sender)
    sender._due, sender._period_s = -1e9, 1 / 16
    places = [sender._has_place(number / rate) for number in range(10 * rate)]
    assert abs(sum(places) - taken) <= 1
    assert sender._has_place(0.0)  # a clock that began anew
