"""Players that watch by WebRTC: aiortc's own client and a browser."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

pytest.importorskip("aiortc")
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.rtp import RTCP_PSFB_APP, RtcpPsfbPacket, pack_remb_fci

from seko_serve.http import access
from seko_serve.live.workload import ServedPool
from seko_serve.media.video import Frame, MjpegEncoder, Packet
from seko_serve.settings import Settings

from .bounded import comes
from .browser import browser_path, open_page
from .conftest import NewClient, Running, Starter
from .test_controls import noise, wav
from .test_server import PROMPT, http
from .toys import talk_opener

WAIT_S, FRAMES = 60.0, 12
WATCH = "/v1/whep?prompt=a+b&seed=3&fps=20"


def ask(
    url: str, method: str, body: str = "", kind: str = "application/sdp", key: str = ""
) -> tuple[int, str, str]:
    headers = {"content-type": kind} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        with urlopen(Request(url, body.encode(), headers, method=method), timeout=20) as answer:
            return answer.status, answer.read().decode(), answer.headers.get("location", "")
    except HTTPError as refused:
        return refused.code, refused.read().decode(), ""


class Player:
    """A client of aiortc with a data channel; what comes over it lies in `messages`."""

    def __init__(self) -> None:
        self.rtc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.rtc.addTransceiver("video", direction="recvonly")
        self.controls = self.rtc.createDataChannel("controls")
        self.controls.on("message", lambda text: self.messages.put_nowait(json.loads(text)))
        self.track: Any = None
        self.rtc.on("track", lambda track: setattr(self, "track", track))
        self.place = ""

    async def watch(self, server: Running, path: str, key: str = "") -> None:
        await self.rtc.setLocalDescription(await self.rtc.createOffer())
        status, answer, self.place = await asyncio.to_thread(
            ask, server.url + path, "POST", self.rtc.localDescription.sdp, key=key
        )
        assert status == 201, answer
        await self.rtc.setRemoteDescription(RTCSessionDescription(answer, "answer"))

    async def until(self, kind: str) -> dict[str, Any]:
        while (message := await self.messages.get())["type"] != kind:
            pass
        return message

    def send(self, kind: str, **fields: object) -> None:
        self.controls.send(json.dumps({"type": kind, **fields}))


@asynccontextmanager
async def player() -> AsyncIterator[Player]:
    async with asyncio.timeout(WAIT_S):
        one = Player()
        try:
            yield one
        finally:
            await one.rtc.close()


@pytest.fixture
async def one() -> AsyncIterator[Player]:
    """A player that is closed with the test."""
    one = Player()
    yield one
    await one.rtc.close()


async def test_a_player_sees_frames_steers_and_frees_its_place(server: Running, one: Player) -> None:
    await one.watch(server, WATCH)
    for _ in range(FRAMES):
        frame = await one.track.recv()
        assert (frame.width, frame.height) == (24, 8)
    ready = await one.until("ready")
    (session,) = server.manager.sessions
    assert one.place.startswith(f"/v1/sessions/{session}/whep/")
    assert (ready["session"], ready["fps"]) == (session, 20)
    one.send("prompt", id="p", text="c a")
    assert (await one.until("received"))["id"] == "p"
    assert (await one.until("applied"))["chunk"] > 0
    one.send("ack", chunk=1 << 20)
    assert (await one.until("rejected"))["code"] == "conflict"
    one.send("pause", id="q")
    assert (await one.until("state"))["paused"] is True
    assert http(f"{server.url}/v1/sessions/{session}")[1]["state"] == "paused"
    fragment = "a=mid:0\r\na=candidate:1 1 udp 2130706431 127.0.0.1 9 typ host\r\n"
    kind = "application/trickle-ice-sdpfrag"
    assert (await asyncio.to_thread(ask, server.url + one.place, "PATCH", fragment, kind))[0] == 204
    assert (await asyncio.to_thread(ask, server.url + one.place, "DELETE"))[0] == 200
    assert not server.manager.sessions
    assert server.manager.admission.running == 0


async def test_a_player_that_ends_its_session_frees_its_row_while_the_device_is_busy(
    server: Running, one: Player
) -> None:
    manager, begun, over = server.manager, threading.Event(), threading.Event()

    def busy(_: ServedPool) -> None:
        begun.set()
        over.wait(WAIT_S)

    await one.watch(server, WATCH)
    await one.until("chunk")
    call = asyncio.run_coroutine_threadsafe(manager.call(busy), manager._loop)
    await asyncio.to_thread(begun.wait, WAIT_S)
    one.send("close")
    try:
        await comes(lambda: one.rtc.connectionState == "closed")
    finally:
        over.set()
    await asyncio.wrap_future(call)
    await comes(lambda: not manager.admission.running)
    free = asyncio.run_coroutine_threadsafe(manager.call(lambda pool: pool.free), manager._loop)
    assert await asyncio.wrap_future(free) == manager.capacity


async def test_a_player_takes_over_from_a_socket_within_a_chunk(
    start: Starter, monkeypatch: pytest.MonkeyPatch, one: Player, new_client: NewClient
) -> None:
    """The rest of the chunk is none of the codec that the socket had."""
    server, entered, encode = start(), threading.Event(), MjpegEncoder.encode

    def slow(self: MjpegEncoder, frame: Frame) -> Packet:
        if self._number == 2:
            entered.wait(WAIT_S)
        return encode(self, frame)

    monkeypatch.setattr(MjpegEncoder, "encode", slow)
    await new_client(server).open(codecs=["mjpeg"], prompt=PROMPT)
    (session,) = server.manager.sessions
    await one.watch(server, f"/v1/sessions/{session}/whep")
    await one.until("ready")
    entered.set()
    for _ in range(2 * FRAMES):
        await one.track.recv()


async def test_a_player_of_a_paused_session_is_told_so(server: Running, one: Player) -> None:
    name = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})[1]["id"]
    http(f"{server.url}/v1/sessions/{name}", "PATCH", {"paused": True})
    await one.watch(server, f"/v1/sessions/{name}/whep")
    assert (await one.messages.get())["type"] == "ready"
    assert (await one.messages.get())["paused"] is True
    one.send("play", id="p")
    await one.track.recv()


async def test_a_player_that_ends_its_session_is_told_its_end(server: Running, one: Player) -> None:
    await one.watch(server, WATCH)
    await one.until("chunk")
    one.send("close")
    while (message := await one.messages.get())["type"] not in ("end", "error"):
        pass
    assert message == {"type": "end", "reason": "closed"}


async def test_a_session_is_recorded_if_the_players_address_says_so(server: Running, one: Player) -> None:
    assert ask(f"{server.url}{WATCH}&record=yes", "POST", "nothing")[0] == 400
    await one.watch(server, f"{WATCH}&record=true")
    events = f"{server.url}/v1/sessions/{(await one.until('ready'))['session']}/events"
    status, recording, _ = await asyncio.to_thread(ask, events, "GET")
    assert (status, json.loads(recording.splitlines()[0])["begin"]["seed"]) == (200, 3)


async def test_a_session_that_was_opened_before_outlives_its_player(server: Running) -> None:
    name = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})[1]["id"]
    async with player() as one:
        await one.watch(server, f"/v1/sessions/{name}/whep")
        await one.track.recv()
        assert (await asyncio.to_thread(ask, server.url + one.place, "DELETE"))[0] == 200
    assert server.manager.sessions[name].viewer.detached_at is not None


async def test_a_player_that_was_sent_away_ends_its_own_connection_alone(
    server: Running, one: Player
) -> None:
    async with player() as other:
        await one.watch(server, WATCH)
        await one.track.recv()
        session = one.place.partition("/whep")[0]
        await other.watch(server, f"{session}/whep")
        await other.track.recv()
        assert (await asyncio.to_thread(ask, server.url + one.place, "DELETE"))[0] == 404
        await other.until("ready")
        for _ in range(2 * FRAMES):
            await other.track.recv()
        assert (await asyncio.to_thread(ask, server.url + other.place, "DELETE"))[0] == 200


async def test_a_voice_is_heard_beside_the_frames(start: Starter, one: Player) -> None:
    server, heard = start(talk_opener), []
    voice = base64.b64encode(wav(noise(80_000))).decode()
    name = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT, "voice": voice})[1]["id"]
    one.rtc.addTransceiver("audio", direction="recvonly")
    await one.watch(server, f"/v1/sessions/{name}/whep")
    tracks = {receiver.track.kind: receiver.track for receiver in one.rtc.getReceivers()}
    for _ in range(FRAMES):
        await tracks["video"].recv()
    for _ in range(2 * FRAMES):
        heard.append((await tracks["audio"].recv()).to_ndarray())
    assert (await one.until("ready"))["audio"]["codec"] == "pcm"
    assert np.concatenate(heard, 1).std() > 100


async def test_the_device_waits_for_no_player_that_takes_nothing(server: Running, one: Player) -> None:
    await one.watch(server, WATCH)
    session = (await one.until("ready"))["session"]
    await comes(lambda: http(f"{server.url}/v1/sessions/{session}")[1]["chunks"] >= FRAMES)


async def test_the_bitrate_follows_what_the_peer_asks_and_loses_and_the_device_waits_for_neither(
    server: Running, one: Player
) -> None:
    def encoder(session: str) -> Any:
        peer: Any = server.application._webrtc._peers["whep"][session].peer
        return peer._sender._RTCRtpSender__encoder

    def chunks(session: str) -> int:
        made: int = http(f"{server.url}/v1/sessions/{session}")[1]["chunks"]
        return made

    (receiver,) = one.rtc.getReceivers()
    receiver._RTCRtpReceiver__remote_bitrate_estimator = None  # what it asks is said here
    await one.watch(server, WATCH)
    await one.track.recv()
    session = (await one.until("ready"))["session"]
    usual, least = encoder(session).target_bitrate, 300_000
    estimate = pack_remb_fci(400_000, [*receiver._RTCRtpReceiver__remote_streams])
    packet = RtcpPsfbPacket(fmt=RTCP_PSFB_APP, ssrc=1, media_ssrc=0, fci=estimate)
    await receiver._send_rtcp(packet)
    await comes(lambda: encoder(session).target_bitrate <= 400_000)
    assert usual > encoder(session).target_bitrate > least

    whole, count = receiver.transport._handle_rtp_data, 0

    async def lossy(data: bytes, **words: Any) -> None:
        nonlocal count
        count += 1
        if count % 5 > 1:  # two of five are lost
            await whole(data, **words)

    receiver.transport._handle_rtp_data = lossy
    before = chunks(session)
    await comes(lambda: encoder(session).target_bitrate <= least)
    await comes(lambda: chunks(session) >= before + 5)
    receiver.transport._handle_rtp_data = whole
    lowest = encoder(session).target_bitrate
    await comes(lambda: encoder(session).target_bitrate >= 1.05 * lowest)


def test_what_is_no_offer_takes_no_place(start: Starter) -> None:
    server = start()
    assert ask(server.url + WATCH, "POST", "nothing")[0] == 400
    assert ask(server.url + WATCH, "POST", "{}", "application/json")[0] == 415
    assert ask(f"{server.url}/v1/whep?promt=a", "POST", "nothing")[0] == 400
    assert not server.manager.sessions
    assert ask(f"{server.url}/v1/sessions/x/whep/x", "DELETE")[0] == 404


async def test_a_client_learns_the_relay_and_what_else_it_needs(start: Starter, one: Player) -> None:
    """MediaMTX asks for the servers before its offer, and takes no answer without an ETag."""
    key = "k" * 32
    server = start(
        stun="stun:a.example.org:3478", turn="turn:b.example.org:3478", turn_login='user:p"w', keys=(key,)
    )
    url, links = f"{server.url}/v1/whep", 'credential="p\\"w"'
    assert ask(url, "OPTIONS")[0] == 401
    with urlopen(Request(url, headers={"authorization": f"Bearer {key}"}, method="OPTIONS")) as told:
        assert (told.status, told.headers["accept-post"]) == (204, "application/sdp")
        assert told.headers["link"].startswith('<stun:a.example.org:3478>; rel="ice-server", <turn:b')
        assert links in told.headers["link"]
    server = start()
    await one.rtc.setLocalDescription(await one.rtc.createOffer())
    offer = Request(
        server.url + WATCH,
        one.rtc.localDescription.sdp.encode(),
        {"content-type": "application/sdp"},
    )
    with await asyncio.to_thread(urlopen, offer) as answer:
        assert re.fullmatch(r'"\w+"', answer.headers["etag"])
        assert answer.headers["accept-patch"] == "application/trickle-ice-sdpfrag"
        assert answer.headers["link"] is None


@pytest.mark.parametrize("login", ["user", "user:p\u20ac", "user:p\n"])
def test_a_login_of_the_relay_that_no_answer_can_carry_is_refused(login: str) -> None:
    with pytest.raises(ValueError, match="SEKO_SERVE_TURN_LOGIN"):
        Settings(Path("toy"), turn="turn:a.example.org:3478", turn_login=login)


def test_without_the_library_nothing_is_opened(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    monkeypatch.setitem(sys.modules, "aiortc", None)
    for name in ("peer", "player", "sender"):
        monkeypatch.delitem(sys.modules, f"seko_serve.http.{name}", raising=False)
    status, answer, _ = ask(server.url + WATCH, "POST", "nothing")
    assert (status, json.loads(answer)["error"]["code"]) == (501, "not_installed")
    assert not server.manager.sessions


def test_a_server_with_keys_asks_for_the_right_one(start: Starter) -> None:
    key, other = "k" * 32, "o" * 32
    server = start(keys=(key, other))
    assert ask(server.url + WATCH, "POST", "nothing")[0] == 401
    name = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT}, key=key)[1]["id"]
    assert ask(f"{server.url}/v1/sessions/{name}/whep", "POST", "nothing")[0] == 401
    assert ask(f"{server.url}/v1/sessions/{name}/whep", "POST", "nothing", key=other)[0] == 404
    assert ask(server.url + WATCH, "POST", "nothing", key=key)[0] == 400


def test_peers_that_enter_one_session_too_often_keep_none_from_another(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a gateway all have its address."""
    monkeypatch.setattr(access, "SOCKETS", (access.SOCKETS[0] / 1000, 5.0))  # a slow machine is no rest
    server = start()
    busy, other = (http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})[1]["id"] for _ in range(2))
    statuses = [ask(f"{server.url}/v1/sessions/{busy}/whep", "POST", "nothing")[0] for _ in range(6)]
    assert statuses == [400] * 5 + [429]
    assert ask(f"{server.url}/v1/sessions/{other}/whep", "POST", "nothing")[0] == 400


def test_the_log_has_no_address_of_an_offer() -> None:
    """The library tells of each pair of addresses that it tries; its own words, in the process of a server."""
    script = """
import logging
from seko_serve.logs import set_up
set_up("debug")
for library in ("aioice.ice", "aiortc.rtcicetransport"):
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        logging.getLogger(library).log(level, "Check 192.0.2.1")
logging.getLogger("seko_serve").info("serving")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "serving" in done.stderr
    assert "192.0.2.1" not in done.stderr


@pytest.mark.skipif(browser_path() is None, reason="no browser")
@pytest.mark.parametrize("codec", ["H264", "VP8"])
def test_a_browser_plays_it(start: Starter, codec: str) -> None:
    server = start()
    with open_page(f"{server.url}/health", "--disable-features=WebRtcHideLocalIpsWithMdns") as page:
        seen = page.value(
            """(async () => {
            const video = document.body.appendChild(document.createElement("video"));
            video.muted = video.autoplay = true;
            const pc = new RTCPeerConnection(), came = [];
            const transceiver = pc.addTransceiver("video", { direction: "recvonly" });
            transceiver.setCodecPreferences(RTCRtpReceiver.getCapabilities("video").codecs.filter(
                (one) => one.mimeType === "video/CODEC"));
            const controls = pc.createDataChannel("controls");
            const applied = new Promise((done) => {
                controls.onmessage = (event) => JSON.parse(event.data).type === "applied" && done(true);
            });
            pc.ontrack = (event) => { video.srcObject = new MediaStream([event.track]); };
            await pc.setLocalDescription(await pc.createOffer());
            if (pc.iceGatheringState !== "complete") await new Promise((done) => {
                pc.onicegatheringstatechange = () => pc.iceGatheringState === "complete" && done();
            });
            const answer = await fetch("WATCH", { method: "POST", body: pc.localDescription.sdp,
                headers: { "content-type": "application/sdp" } });
            await pc.setRemoteDescription({ type: "answer", sdp: await answer.text() });
            for (let count = 0; count < FRAMES; count++)
                await new Promise((done) => video.requestVideoFrameCallback(done));
            controls.send(JSON.stringify({ type: "prompt", id: "p", text: "c a" }));
            const size = [video.videoWidth, video.videoHeight], steered = await applied;
            await fetch(answer.headers.get("location"), { method: "DELETE" });
            return [...size, steered];
            })()""".replace("CODEC", codec)
            .replace("WATCH", WATCH)
            .replace("FRAMES", str(FRAMES))
        )
    assert seen == [24, 8, True]
    assert not server.manager.sessions
