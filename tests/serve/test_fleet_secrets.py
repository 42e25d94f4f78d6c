"""What a caller of a fleet may do: tickets and links of one box, quotas over all boxes, TLS of boxes."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from seko_serve.client import AsyncClient
from seko_serve.fleet.box import Box
from seko_serve.fleet.redis_directory import RedisDirectory
from seko_serve.protocol import QUEUE_HEADER, SUBPROTOCOL, TICKET_PREFIX
from seko_serve.security.tokens import LINK_S, MOST_LINKS, Links
from tests.runtime import toy_pool

from .bounded import comes
from .fleets import KEYS, Fleet, FleetStarter
from .test_flags import certificate
from .test_fleet_directory import Clock, RedisServer, redis_server
from .test_fleet_gateway import ask
from .test_server import PROMPT, http, watch
from .test_speech import levels, opener, said_alone

pytest.importorskip("aiohttp", reason="needs seko-serve[ray]")
__all__ = ["redis_server"]
SPEECH = "/v1/audio/speech"


async def entered(box: Box, session: str, ticket: str) -> str:
    """The type of the first message, or the code of the refusal, at a box's socket."""
    protocols = [Subprotocol(SUBPROTOCOL), Subprotocol(TICKET_PREFIX + ticket)]
    url = f"{box.facts().url}/v1/sessions/{session}/stream"
    async with connect(url, subprotocols=protocols) as stream:
        with suppress(ConnectionClosed):  # by a refusal, which is read next
            await stream.send('{"type": "hello", "codecs": ["rgb24"]}')
        first = await stream.recv()
    assert isinstance(first, str)
    for word in ("unauthorized", "ready"):
        if f'"{word}"' in first:
            return word
    return first


async def test_a_ticket_opens_one_session_at_one_box_once_while_its_lease_lasts(
    start_fleet: FleetStarter,
) -> None:
    fleet = await start_fleet(keys=KEYS)
    first, second = await fleet.box(keys=KEYS), await fleet.box(keys=KEYS, lease_s=0.2)

    async def opened(box: Box) -> tuple[str, str]:
        body = {"prompt": PROMPT}
        _, table = await asyncio.to_thread(http, f"{box.facts().inside}/v1/sessions", "POST", body, KEYS[0])
        return table["id"], table["ticket"]

    (mine, ticket), (other, _) = await opened(first), await opened(second)
    assert await entered(second, other, ticket) == "unauthorized"  # a ticket of another box
    assert await entered(second, mine, ticket) == "unauthorized"
    assert await entered(first, mine, ticket) == "ready"
    assert await entered(first, mine, ticket) == "unauthorized"  # used
    late, late_ticket = await opened(second)
    await comes(lambda: late not in second._manager.sessions)
    assert await entered(second, late, late_ticket) == "unauthorized"


async def test_a_key_that_asks_two_gateways_at_once_gets_no_more_sessions_than_it_may_have(
    redis_server: RedisServer, tmp_path: Path, start_fleet: FleetStarter
) -> None:
    """Sixteen requests race over two gateways for three boxes with room for all; then one session ends."""
    fleet = await start_fleet(lambda: RedisDirectory(redis_server.url, tmp_path.name), keys=KEYS)
    boxes = [await fleet.box(most=3, keys=KEYS) for _ in range(3)]
    async with fleet.gateway(keys=KEYS) as other_url, aiohttp.ClientSession() as client:

        async def opened(url: str, key: str) -> tuple[int, Any]:
            headers = {"authorization": f"Bearer {key}"}
            async with client.post(f"{url}/v1/sessions", json={"prompt": PROMPT}, headers=headers) as answer:
                return answer.status, await answer.json()

        async def statuses_of_race() -> list[int]:
            answers = await asyncio.gather(*(opened(url, KEYS[0]) for url in [fleet.url, other_url] * 8))
            ids.extend(table["id"] for status, table in answers if status == 201)
            return [status for status, _ in answers]

        ids: list[str] = []
        statuses = await statuses_of_race()
        assert (statuses.count(201), set(statuses)) == (3, {201, 429})
        assert sum(box.facts().sessions for box in boxes) == 3
        assert (await opened(other_url, KEYS[1]))[0] == 201
        assert (await ask(fleet, f"/v1/sessions/{ids.pop()}", "DELETE", key=KEYS[0]))[0] == 204
        statuses = await statuses_of_race()
        assert (statuses.count(201), set(statuses)) == (1, {201, 429})


async def test_a_queue_token_that_is_made_up_opens_no_more_sessions_than_none(
    start_fleet: FleetStarter,
) -> None:
    fleet = await start_fleet(keys=KEYS)
    box = await fleet.box(keys=KEYS)
    async with (
        fleet.gateway(keys=KEYS, opens_per_s=1e-3) as url,
        aiohttp.ClientSession(headers={"authorization": f"Bearer {KEYS[0]}"}) as client,
    ):

        async def opened(token: str) -> int:
            headers = {QUEUE_HEADER: token}
            async with client.post(f"{url}/v1/sessions", json={"prompt": PROMPT}, headers=headers) as answer:
                return answer.status

        tokens = (f"{box.name}.made-up", f"{box.name}.another", "no-box.x", "x")
        assert [await opened(token) for token in tokens] == [201, 429, 429, 429]


async def test_a_key_with_enough_sessions_is_told_so_by_a_full_box_and_holds_no_row(
    start_fleet: FleetStarter,
) -> None:
    """A full box answers 503 to a key that may have another session, and 429 to one that may not."""
    fleet = await start_fleet(keys=KEYS)
    most = toy_pool.SESSIONS - 1
    await fleet.box(most=most, keys=KEYS)

    async def opened(key: str) -> int:
        return (await ask(fleet, "/v1/sessions", "POST", {"prompt": PROMPT}, key))[0]

    assert [await opened(KEYS[0]) for _ in range(most)] == [201] * most
    assert [await opened(KEYS[0]), await opened(KEYS[1])] == [429, 201]
    assert [await opened(KEYS[0]), await opened(KEYS[1])] == [429, 503]  # the box is full


async def test_speech_is_answered_by_a_box_to_which_the_client_is_sent(start_fleet: FleetStarter) -> None:
    """The client drops its key when it is sent to another address, as aiohttp, httpx and curl do."""
    fleet = await start_fleet(keys=KEYS)
    await fleet.box(keys=KEYS)
    assert (await ask(fleet, SPEECH, "POST", {"input": "abc"}, KEYS[0]))[0] == 415
    box = await fleet.box(opener, digest="5" * 64, keys=KEYS)
    while len((await ask(fleet, "/v1/models", key=KEYS[0]))[1]["data"]) < 2:
        await asyncio.sleep(0.05)
    body = {"input": "hallo", "seed": 3, "response_format": "pcm"}
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEYS[0]}"}) as client:
        async with client.post(fleet.url + SPEECH, json=body) as answer:
            assert answer.status == 200
            assert [step.status for step in answer.history] == [307]
            assert "authorization" not in answer.request_info.headers
            content = await answer.read()
        assert np.array_equal(np.frombuffer(content, "<i2"), levels(said_alone("hallo", seed=3)))
        async with client.post(fleet.url + SPEECH, json=body, allow_redirects=False) as answer:
            location = answer.headers["location"]
    assert location.startswith(f"{box.facts().web}{SPEECH}?ticket=")
    statuses = []
    async with aiohttp.ClientSession() as client:
        for url in (location, location, f"{box.facts().web}{SPEECH}"):  # a link is for one request
            async with client.post(url, json=body) as answer:
                statuses.append(answer.status)
    assert statuses == [200, 401, 401]
    for path, table, code in (
        ("/v1/sessions", {"prompt": PROMPT}, 400),  # of which model?
        ("/v1/sessions", {"prompt": PROMPT, "model": "toy-speech"}, 400),
        ("/v1/sessions", {"model": "toy-speech"}, 201),
        ("/v1/videos", {"prompt": PROMPT, "seconds": 0.1}, 200),  # one model makes video
        ("/v1/videos", {"model": "toy-speech"}, 415),
        (SPEECH, {"input": "abc", "model": "another"}, 404),
        (SPEECH, {"response_format": "pcm"}, 400),
        (SPEECH, {"input": "abc", "model": "tts-1"}, 200),
    ):
        key = {"authorization": f"Bearer {KEYS[0]}"}
        async with (
            aiohttp.ClientSession(headers=key) as client,
            client.post(fleet.url + path, json=table) as answer,
        ):
            assert answer.status == code, (path, table)


async def test_a_videos_file_comes_from_its_box(start_fleet: FleetStarter) -> None:
    fleet = await start_fleet(keys=KEYS)
    boxes = [await fleet.box(keys=KEYS) for _ in range(2)]
    request = {"prompt": PROMPT, "seconds": 0.5}
    name = (await ask(fleet, "/v1/videos", "POST", request, KEYS[0]))[1]["id"]
    path = f"/v1/videos/{name}"
    while (table := (await ask(fleet, path, key=KEYS[0]))[1])["status"] != "completed":
        assert table["status"] in ("queued", "in_progress")
        await asyncio.sleep(0.05)
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEYS[0]}"}) as client:
        async with client.get(f"{fleet.url}{path}/content", headers={"range": "bytes=4-7"}) as answer:
            assert (answer.status, await answer.read()) == (206, b"ftyp")
            assert str(answer.url).partition("?")[0] in {f"{box.facts().web}{path}/content" for box in boxes}
        async with client.get(f"{fleet.url}{path}/content?variant=thumbnail") as answer:
            assert answer.status == 415
    assert (await ask(fleet, f"{path}/content", key=KEYS[1]))[0] == 404
    assert (await ask(fleet, path, "DELETE", key=KEYS[0]))[1]["deleted"]
    assert (await ask(fleet, f"{path}/content", key=KEYS[0]))[0] == 404


def test_a_link_is_for_one_request_of_one_purpose_within_its_time() -> None:
    from seko_serve.errors import ServeError

    clock = Clock()
    links = Links(clock)
    for purpose, wait in (("/other", 0.0), ("/mine", LINK_S)):
        ticket = links.issue("tenant", "/mine")
        clock.now += wait
        with pytest.raises(ServeError, match="unknown, used, or older"):
            links.redeem(ticket, purpose)
    first, second = links.issue("tenant", "/mine"), links.issue("other", "/mine")
    assert (links.redeem(first, "/mine"), links.redeem(second, "/mine")) == ("tenant", "other")
    with pytest.raises(ServeError):
        links.redeem(first, "/mine")
    oldest = links.issue("tenant", "/mine")
    another_tenants = links.issue("other", "/mine")
    for _ in range(MOST_LINKS):
        newest = links.issue("tenant", "/mine")
    assert links.redeem(newest, "/mine") == "tenant"
    with pytest.raises(ServeError):
        links.redeem(oldest, "/mine")
    assert (
        links.redeem(another_tenants, "/mine") == "other"
    )  # which no number of links of one tenant pushes out


async def test_boxes_with_tls_are_asked_only_by_gateways_that_trust_their_certificate(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start_fleet: FleetStarter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    key_file, certificate_file = certificate(tmp_path)
    fleet = await start_fleet()
    box = await fleet.box(tls_key=key_file, tls_certificate=certificate_file)
    assert (box.facts().url[:6], box.facts().inside[:8]) == ("wss://", "https://")
    body = {"prompt": PROMPT}
    assert (await ask(fleet, "/v1/sessions", "POST", body))[0] == 503  # by the system's authorities
    assert "has no certificate that is trusted" in caplog.text
    async with fleet.gateway(ca_file=str(certificate_file)) as url:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate_file))  # the client's authorities
        async with AsyncClient(url) as client:
            await client.open(codecs=["rgb24"], prompt=PROMPT)
            await watch(client, 2)
            await client.close()


async def test_new_connections_have_a_renewed_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_fleet: FleetStarter
) -> None:
    monkeypatch.setattr("seko_serve.run.RENEW_TICKS", 1)
    key_file, certificate_file = certificate(tmp_path)
    (tmp_path / "later").mkdir()
    later_key, later_certificate = certificate(tmp_path / "later")
    fleet = await start_fleet()
    box = await fleet.box(tls_key=key_file, tls_certificate=certificate_file)
    parts = urlsplit(box.facts().inside)

    async def shown() -> str:
        address = str(parts.hostname), int(parts.port or 0)
        return await asyncio.to_thread(ssl.get_server_certificate, address)

    before = await shown()
    assert before == certificate_file.read_text()
    certificate_file.write_bytes(later_certificate.read_bytes())
    await asyncio.sleep(0.5)  # some looks, which find a certificate beside the key of the one before
    assert await shown() == before
    key_file.write_bytes(later_key.read_bytes())
    while await shown() == before:
        await asyncio.sleep(0.05)
    assert await shown() == later_certificate.read_text()


async def test_a_box_tells_clients_the_configured_address_and_gateways_its_own(fleet: Fleet) -> None:
    front = await fleet.box()
    port = front.facts().inside.rpartition(":")[2]
    assert (front.facts().url, front.facts().web) == (
        f"ws://127.0.0.1:{port}",
        f"http://127.0.0.1:{port}",
    )
    await fleet.stop(front)
    box = await fleet.box(public="wss://{host}.example.org:{port}")
    port = box.facts().inside.rpartition(":")[2]
    _, table = await ask(fleet, "/v1/sessions", "POST", {"prompt": PROMPT})
    assert table["url"] == f"wss://127.0.0.1.example.org:{port}/v1/sessions/{table['id']}/stream"
    assert (await ask(fleet, f"/v1/sessions/{table['id']}"))[1]["url"] == table["url"]
    assert box.facts().web == f"https://127.0.0.1.example.org:{port}"
