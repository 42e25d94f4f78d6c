"""WebRTC and SGLang's protocol by a gateway: it passes on who wants to talk, and media go straight to the box."""

from __future__ import annotations

import asyncio
import json

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from .fleets import KEYS, Fleet, FleetStarter
from .test_server import PROMPT, http
from .toys import film_opener

pytest.importorskip("aiohttp", reason="needs seko-serve[ray]")
pytest.importorskip("aiortc", reason="needs seko-serve[webrtc]")
from .test_webrtc import WATCH, ask, player
from .test_whip import SEND, sending

REALTIME = "/v1/realtime_video/generate"
TRICKLE = "application/trickle-ice-sdpfrag"


async def test_a_player_watches_by_a_gateway_and_steers_at_the_box_itself(start_fleet: FleetStarter) -> None:
    fleet = await start_fleet(keys=KEYS)
    for _ in range(2):
        await fleet.box(keys=KEYS)
    async with player() as one:
        await one.watch(fleet, WATCH, KEYS[0])  # type: ignore[arg-type]
        await one.track.recv()
        one.send("prompt", id="p", text="c a")
        assert (await one.until("applied"))["id"] == "p"
        (session,) = (await asyncio.to_thread(http, f"{fleet.url}/v1/sessions", key=KEYS[0]))[1]["data"]
        assert one.place.startswith(f"/v1/sessions/{session['id']}/whep/")
        place, fragment = fleet.url + one.place, "a=mid:0\r\n"
        assert (await asyncio.to_thread(ask, place, "PATCH", fragment, TRICKLE, KEYS[0]))[0] == 204
        assert (await asyncio.to_thread(ask, place, "DELETE", key=KEYS[1]))[0] == 404
        assert (await asyncio.to_thread(ask, place, "DELETE", key=KEYS[0]))[0] == 200
        assert not (await asyncio.to_thread(http, f"{fleet.url}/v1/sessions", key=KEYS[0]))[1]["data"]


async def test_video_is_sent_to_the_box_that_has_the_session(fleet: Fleet) -> None:
    for _ in range(2):
        await fleet.box(film_opener)
    async with sending(fleet, SEND) as (_, place), player() as one:  # type: ignore[arg-type]
        session = place.partition("/whip")[0]
        await one.watch(fleet, f"{session}/whep")  # type: ignore[arg-type]
        await one.track.recv()
        url = fleet.url + session
        while (await asyncio.to_thread(http, url))[1]["video_in"]["frames taken"] < 3:
            await one.track.recv()


async def test_what_no_box_can_answer_is_refused_by_a_sentence(fleet: Fleet) -> None:
    await fleet.box(max_sessions=1)
    for path, kind, said in (
        (WATCH, "application/json", "expected Content-Type: application/sdp"),
        (f"{WATCH}&model=other", "application/sdp", "no box has this model"),
        (WATCH, "application/sdp", "is no SDP offer"),
        (SEND, "application/sdp", "takes no video"),
    ):
        _, answer, _ = await asyncio.to_thread(ask, fleet.url + path, "POST", "nothing", kind)
        assert said in json.loads(answer)["error"]["message"], path
    await asyncio.to_thread(http, f"{fleet.url}/v1/sessions", "POST", {"prompt": PROMPT})
    status, answer, _ = await asyncio.to_thread(ask, fleet.url + WATCH, "POST", "nothing")
    assert (status, json.loads(answer)["error"]["code"]) == (503, "full")


async def test_a_gateway_gives_the_address_of_a_socket_of_sglangs_protocol(start_fleet: FleetStarter) -> None:
    msgpack = pytest.importorskip("msgpack")
    fleet = await start_fleet(keys=KEYS)
    box = await fleet.box(keys=KEYS)
    status, link = await asyncio.to_thread(http, f"{fleet.url}{REALTIME}/link", "POST", {}, KEYS[0])
    assert status == 201, link
    assert link["url"].startswith(box.facts().url)
    async with connect(link["url"]) as socket:
        await socket.send(msgpack.packb({"type": "init", "prompt": PROMPT, "max_chunks": 1}))
        kinds = [msgpack.unpackb(message)["type"] async for message in socket]
    assert {"frame_batch", "chunk_stats"} <= {*kinds}
    async with connect(f"{fleet.url.replace('http', 'ws')}{REALTIME}") as socket:
        assert "/link gives" in msgpack.unpackb(await socket.recv())["content"]
        with pytest.raises(ConnectionClosed):
            await socket.recv()
