"""Boxes behind a gateway on loopback: sessions go where room is, move, and never run twice."""

from __future__ import annotations

import asyncio
import io
import socket
import ssl
import time
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np
import pytest
from PIL import Image

from seko_serve.client import AsyncClient
from seko_serve.errors import ServeError
from seko_serve.fleet import asked_boxes, choice
from seko_serve.fleet.answers import model_of
from seko_serve.fleet.asked_boxes import AskedBoxes
from seko_serve.fleet.box import Box
from seko_serve.fleet.boxes import Boxes, BoxSilentError
from seko_serve.fleet.directory import BoxFacts, DirectoryError, Lease, MemoryDirectory
from seko_serve.http.bodies import MAX_ENTRIES
from seko_serve.live import admission

from .bounded import LIMIT_S, comes
from .clients import to_the_end
from .fleets import KEYS, Fleet, FleetStarter, memory
from .test_line import Listener
from .test_server import PROMPT, alone, http, pictures, watch

pytest.importorskip("aiohttp", reason="needs seko-serve[ray]")


async def ask(
    fleet: Fleet, path: str, method: str = "GET", table: object = None, key: str = "", queue: str = ""
) -> tuple[int, Any]:
    return await asyncio.to_thread(http, fleet.url + path, method, table, key, queue)


@pytest.mark.shows("fleet")
async def test_a_drained_boxs_session_goes_on_at_another_box_with_the_bytes_of_one_stream(
    fleet: Fleet,
) -> None:
    first = await fleet.box()
    async with AsyncClient(fleet.url) as client:
        await client.open(codecs=["rgb24"], prompt=PROMPT, seed=3)
        media = (await watch(client, 2))[0]
        second = await fleet.box()
        stopping = asyncio.create_task(fleet.stop(first))
        rest, code = await to_the_end(client)
        assert code == "stopping"
        await stopping
        await client.resume()
        assert second.facts().sessions == 1
        media += rest + (await watch(client, 3))[0]
        assert [packet.serial for packet in media] == list(range(len(media)))
        assert np.array_equal(pictures(media), alone(media[-1].chunk + 1, {0: PROMPT})[: len(media)])
        _, table = await ask(fleet, "/v1/sessions")
        assert [session["state"] for session in table["data"]] == ["running"]
        name = table["data"][0]["id"]
        assert (await ask(fleet, f"/v1/sessions/{name}", "DELETE"))[0] == 204
        assert (await ask(fleet, f"/v1/sessions/{name}"))[0] == 404


async def test_sessions_go_to_the_box_with_most_room_and_wait_when_none_has_any(fleet: Fleet) -> None:
    boxes = [await fleet.box(max_sessions=2), await fleet.box(max_sessions=1)]
    for _ in range(3):
        assert (await ask(fleet, "/v1/sessions", "POST", {"prompt": PROMPT}))[0] == 201
    assert [box.facts().sessions for box in boxes] == [2, 1]
    assert (await ask(fleet, "/ready"))[1]["boxes"] == 2
    waiting = AsyncClient(fleet.url)
    status, table = await ask(fleet, "/v1/sessions", "POST", {"prompt": PROMPT})
    assert (status, table["error"]["code"]) == (503, "full")
    opening = asyncio.create_task(waiting.open(prompt=PROMPT, wait=True))
    await comes(lambda: any(box.facts().waiting for box in boxes))
    for session in (await ask(fleet, "/v1/sessions"))[1]["data"]:
        await ask(fleet, f"/v1/sessions/{session['id']}", "DELETE")
    await opening
    await waiting.close()


async def test_a_key_has_no_more_sessions_than_it_may_have_on_all_boxes(start_fleet: FleetStarter) -> None:
    fleet = await start_fleet(keys=KEYS)
    for _ in range(2):
        await fleet.box(most=2, keys=KEYS)
    body = {"prompt": PROMPT}
    answers = [await ask(fleet, "/v1/sessions", "POST", body, key) for key in (*[KEYS[0]] * 3, KEYS[1])]
    assert [status for status, _ in answers] == [201, 201, 429, 201]
    name = answers[0][1]["id"]
    assert (await ask(fleet, f"/v1/sessions/{name}", key=KEYS[1]))[0] == 404
    assert (await ask(fleet, f"/v1/sessions/{name}"))[0] == 401
    assert len((await ask(fleet, "/v1/sessions", key=KEYS[0]))[1]["data"]) == 2
    await ask(fleet, f"/v1/sessions/{name}", "DELETE", key=KEYS[0])
    assert (await ask(fleet, "/v1/sessions", "POST", body, KEYS[0]))[0] == 201


async def test_a_retired_box_takes_no_new_session_and_keeps_those_of_its_digest(fleet: Fleet) -> None:
    old = await fleet.box(digest="0" * 64, group="old")
    async with AsyncClient(fleet.url) as client:
        await client.open(codecs=["rgb24"], prompt=PROMPT, seed=3)
        await watch(client, 1)
        new = await fleet.box(digest="1" * 64)
        async with fleet.gateway(retired={"old"}) as other_url:
            for _ in range(2):
                body = {"prompt": PROMPT}
                assert (await asyncio.to_thread(http, f"{other_url}/v1/sessions", "POST", body))[0] == 201
            assert (old.facts().sessions, new.facts().sessions) == (1, 2)
        await client.drop()
        await client.resume()
        await watch(client, 2)
        assert (old.facts().sessions, new.facts().sessions) == (1, 2)
        await fleet.stop(old)
        with pytest.raises(ServeError) as refused:
            await client.resume()
        assert refused.value.kind.code == "full"


async def test_a_model_whose_boxes_have_failed_is_neither_unknown_nor_another(fleet: Fleet) -> None:
    await fleet.box()
    directory = fleet._open_directory()  # for a box that need not run
    other = BoxFacts("other", "ws://b:1", "http://b:1", "group", "other", "digest", 1, 1, 0, 0, True)
    await directory.announce(other)
    await asyncio.sleep(2 * choice.FRESH_S)
    both = await ask(fleet, "/v1/sessions", "POST", {"prompt": PROMPT})
    assert both[0] == 400
    await directory.withdraw(other.name)
    await asyncio.sleep(2 * choice.FRESH_S)
    unnamed = await ask(fleet, "/v1/sessions", "POST", {"prompt": PROMPT})
    assert (unnamed[0], unnamed[1]["error"]["message"]) == (both[0], both[1]["error"]["message"])
    named = await ask(fleet, "/v1/sessions", "POST", {"prompt": PROMPT, "model": other.model})
    assert (named[0], named[1]["error"]["code"]) == (503, "full")


async def test_videos_models_and_what_is_not_there(fleet: Fleet) -> None:
    assert (await ask(fleet, "/ready"))[0] == 503
    assert (await ask(fleet, "/v1/sessions", "POST", {}))[0] == 503
    for _ in range(2):
        await fleet.box()
    models = (await ask(fleet, "/v1/models"))[1]["data"]
    assert len(models) == 1
    assert (await ask(fleet, f"/v1/models/{models[0]['id']}"))[1]["id"] == models[0]["id"]
    assert (await ask(fleet, "/v1/model_info"))[1]["model_path"] == models[0]["id"]
    for model, words in (("another", "no box has this model"), (models[0]["id"], "no such picture")):
        status, answer = await ask(fleet, f"/v1/models/{model}/pictures/0")  # the second is the box's answer
        assert status == 404
        assert words in answer["error"]["message"]
    refused = await ask(fleet, "/v1/sessions", "POST", {"prompt": PROMPT, "model": "another"})
    assert refused[0] == 404
    videos = [
        (await ask(fleet, "/v1/videos", "POST", {"prompt": PROMPT, "seconds": 0.5}))[1]["id"]
        for _ in range(2)
    ]
    for name in videos:
        while (await ask(fleet, f"/v1/videos/{name}"))[1]["status"] != "completed":
            await asyncio.sleep(0.05)
        status, content = await ask(fleet, f"/v1/videos/{name}/content")
        assert (status, content[4:8]) == (200, b"ftyp")
        status, link = await ask(fleet, f"/v1/videos/{name}/content/link", "POST")
        assert status == 201
        assert await asyncio.to_thread(http, link["url"]) == (200, content)
    listed = (await ask(fleet, "/v1/videos?limit=1"))[1]
    assert listed["has_more"]
    following = (await ask(fleet, f"/v1/videos?after={listed['last_id']}"))[1]
    assert (await ask(fleet, "/v1/videos?after=video_none"))[0] == 404
    for query in ("limit=00501", "order=up"):
        assert (await ask(fleet, f"/v1/videos?{query}"))[0] == 400
    assert {listed["last_id"], following["last_id"]} == set(videos)
    assert (await ask(fleet, f"/v1/videos/{videos[0]}", "DELETE"))[1]["deleted"]
    status, answer = await ask(fleet, f"/v1/videos/{videos[1]}/remix", "POST", {"prompt": PROMPT})
    assert (status, answer["error"]["code"]) == (415, "unsupported")
    for path in ("/v1/videos/video_none", "/v1/sessions/" + "0" * 16, "/v1/queue"):
        assert (await ask(fleet, path))[0] == 404
    figures = (await ask(fleet, "/metrics"))[1].decode()
    assert figures.count("seko_serve_box_capacity{") == 2
    assert "seko_serve_gateway_admit_seconds_count" in figures


async def unnoted(_: MemoryDirectory, __: str) -> None:
    """Return nothing, as two hours later, or in a directory that has lost its content."""


def silence(changes: pytest.MonkeyPatch, silent: Box) -> None:
    """Let a box give no answer to the gateway."""
    ask_box = Boxes.ask

    async def asked(boxes: Boxes, box: BoxFacts, *arguments: Any, **fields: Any) -> Any:
        if box.name == silent.name:
            raise BoxSilentError(box.name)
        return await ask_box(boxes, box, *arguments, **fields)

    changes.setattr(Boxes, "ask", asked)


async def test_a_model_is_listed_though_a_box_of_it_is_silent(
    monkeypatch: pytest.MonkeyPatch, fleet: Fleet
) -> None:
    for silent in (await fleet.box(), await fleet.box()):
        with monkeypatch.context() as changes:
            silence(changes, silent)
            assert len((await ask(fleet, "/v1/models"))[1]["data"]) == 1


async def test_a_video_whose_box_nobody_noted_is_found(monkeypatch: pytest.MonkeyPatch, fleet: Fleet) -> None:
    for _ in range(2):
        await fleet.box()
    table = {"prompt": PROMPT, "seconds": 0.1}
    name = (await ask(fleet, "/v1/videos", "POST", table))[1]["id"]
    monkeypatch.setattr(MemoryDirectory, "noted", unnoted)
    while (await ask(fleet, f"/v1/videos/{name}"))[1]["status"] != "completed":
        await asyncio.sleep(0.05)
    assert (await ask(fleet, f"/v1/videos/{name}/content/link", "POST"))[0] == 201
    assert (await ask(fleet, f"/v1/videos/{name}", "DELETE"))[1]["deleted"]
    assert (await ask(fleet, f"/v1/videos/{name}"))[0] == 404


async def test_a_video_that_a_silent_box_may_have_is_not_said_to_be_gone(
    monkeypatch: pytest.MonkeyPatch, fleet: Fleet
) -> None:
    box = await fleet.box()
    table = {"prompt": PROMPT, "seconds": 0.1}
    name = (await ask(fleet, "/v1/videos", "POST", table))[1]["id"]
    await fleet.box()
    monkeypatch.setattr(MemoryDirectory, "noted", unnoted)
    with monkeypatch.context() as changes:
        silence(changes, box)
        status, answer = await ask(fleet, f"/v1/videos/{name}")
    assert (status, answer["error"]["retryable"]) == (503, True)
    assert (await ask(fleet, f"/v1/videos/{name}"))[0] == 200


async def test_a_video_that_the_directory_cannot_note_is_the_clients_all_the_same(
    monkeypatch: pytest.MonkeyPatch, fleet: Fleet
) -> None:
    async def silent(_: MemoryDirectory, __: str, ___: str) -> None:
        raise DirectoryError("it is silent")

    await fleet.box()
    monkeypatch.setattr(MemoryDirectory, "note", silent)
    status, video = await ask(fleet, "/v1/videos", "POST", {"prompt": PROMPT, "seconds": 0.1})
    assert status == 200
    assert [listed["id"] for listed in (await ask(fleet, "/v1/videos"))[1]["data"]] == [video["id"]]
    assert (await ask(fleet, f"/v1/videos/{video['id']}"))[0] == 200


@pytest.mark.parametrize("call", ["boxes", "find", "noted"])
async def test_what_a_box_may_have_that_the_directory_does_not_know_again_yet_is_not_said_to_be_gone(
    call: str, monkeypatch: pytest.MonkeyPatch, fleet: Fleet
) -> None:
    async def silent(*_: object) -> None:
        raise DirectoryError("it is silent")

    await fleet.box()
    paths = ("/v1/videos/video_none", "/v1/sessions/" + "0" * 16)
    for path in paths:
        assert (await ask(fleet, path))[0] == 404
    monkeypatch.setattr(choice, "FRESH_S", 0.0)
    with monkeypatch.context() as changes:
        changes.setattr(MemoryDirectory, call, silent)
        assert 503 in [(await ask(fleet, path))[0] for path in paths]
    for path in paths:
        status, answer = await ask(fleet, path)
        assert (status, answer["error"]["code"]) == (503, "full")

    async def elsewhere(*_: object) -> str:
        return "a-box-without-an-entry"

    with monkeypatch.context() as changes:
        changes.setattr(MemoryDirectory, "noted", elsewhere)
        assert (await ask(fleet, paths[0]))[0] == 503
        changes.setattr(asked_boxes, "LEASE_S", 0.0)  # it is known by now whose boxes are gone
        assert (await ask(fleet, paths[0]))[0] == 404
        assert (await ask(fleet, paths[1]))[0] == 404


async def test_without_any_box_no_video_is_said_to_be_gone(fleet: Fleet) -> None:
    assert (await ask(fleet, "/v1/videos/video_none"))[0] == 503


async def test_a_box_counts_sessions_that_are_being_opened(fleet: Fleet) -> None:
    """Else its row would have neither free rows nor sessions, and the scaler would take it for a box of one row."""
    box = await fleet.box()
    box._manager.admission.ask(admission.Demand("local", 1.0), None, "0" * 16)
    facts = box.facts()
    assert (facts.sessions, facts.sessions + facts.free) == (1, facts.capacity)
    box._manager.admission.finish("0" * 16)
    assert box.facts().sessions == 0


async def test_a_gateway_lists_all_videos_of_a_box(
    monkeypatch: pytest.MonkeyPatch, start_fleet: FleetStarter
) -> None:
    monkeypatch.setattr("seko_serve.fleet.videos.MAX_LISTED", 2)
    fleet = await start_fleet()
    await fleet.box()
    table = {"prompt": PROMPT, "seconds": 0.1}
    made = [(await ask(fleet, "/v1/videos", "POST", table))[1]["id"] for _ in range(5)]
    listed = (await ask(fleet, "/v1/videos"))[1]["data"]
    assert {video["id"] for video in listed} == {*made}


async def test_a_gateway_waits_for_a_picture_that_its_box_fetches(
    monkeypatch: pytest.MonkeyPatch, start_fleet: FleetStarter
) -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "png")

    def slow(*_: object) -> bytes:
        time.sleep(0.5)
        return file.getvalue()

    monkeypatch.setattr("seko_serve.fleet.boxes.ANSWER_S", 0.1)
    monkeypatch.setattr("seko_serve.video.routes.downloaded", slow)
    fleet = await start_fleet()
    await fleet.box()
    table = {"prompt": PROMPT, "seconds": 0.1, "image": "http://a/b.png"}
    assert (await ask(fleet, "/v1/videos", "POST", table))[0] == 200


async def test_the_gateway_looks_at_nothing_before_it_knows_the_key(start_fleet: FleetStarter) -> None:
    """An unknown key is refused alike whether a session, video or place is there; another key finds none."""
    fleet = await start_fleet(keys=KEYS)
    await fleet.box(keys=KEYS, max_sessions=1)
    body = {"prompt": PROMPT}
    session = (await ask(fleet, "/v1/sessions", "POST", body, KEYS[0]))[1]["id"]
    video = (await ask(fleet, "/v1/videos", "POST", {**body, "seconds": 0.1}, KEYS[0]))[1]["id"]
    for known, unknown in (
        (f"/v1/sessions/{session}", "/v1/sessions/" + "0" * 16),
        (f"/v1/videos/{video}", "/v1/videos/video_none"),
        (f"/v1/videos/{video}/content", "/v1/videos/video_none/content"),
    ):
        for method in ("GET",) if unknown.endswith("content") else ("GET", "DELETE"):
            answers = [await ask(fleet, path, method, key="c" * 20) for path in (known, unknown)]
            assert answers[0] == answers[1]
            assert answers[0][0] == 401
            assert (await ask(fleet, known, method, key=KEYS[1]))[0] == 404
    assert (await ask(fleet, "/v1/queue", key="c" * 20))[0] == 401
    assert (await ask(fleet, f"/v1/sessions/{session}", key=KEYS[0]))[0] == 200


def test_the_gateway_reads_a_model_from_no_longer_list_than_a_server_reads() -> None:
    assert model_of(b'{"model": "a", "inputs": [' + b"{}," * 9 + b"{}]}") == "a"
    with pytest.raises(ServeError):
        model_of(b'{"model": "a", "inputs": [' + b"{}," * MAX_ENTRIES + b"{}]}")
    assert model_of(b'{"model": "a"') is None


async def test_the_gateway_refuses_other_sites_pages_and_other_names_of_itself(fleet: Fleet) -> None:
    await fleet.box()
    for headers, status in (
        ({"host": "evil.test"}, 403),
        ({"origin": "http://evil.test"}, 200),  # a page of another site cannot read the answer
        ({}, 200),
    ):
        request = Request(f"{fleet.url}/v1/sessions", headers=headers)
        assert await asyncio.to_thread(status_of, request) == status
    body, foreign = b'{"prompt": "a b"}', {"origin": "http://evil.test"}
    request = Request(f"{fleet.url}/v1/sessions", body, foreign, method="POST")
    assert await asyncio.to_thread(status_of, request) == 403


def status_of(request: Request) -> int:
    """The status of an answer, which has the headers of every answer."""
    try:
        answer: Any = urlopen(request, timeout=20)
    except HTTPError as refused:
        answer = refused
    with answer:
        assert "content-security-policy" in answer.headers
        return int(answer.status)


async def test_a_request_that_waits_gets_a_row_of_a_box_that_was_started_meanwhile(
    monkeypatch: pytest.MonkeyPatch, start_fleet: FleetStarter
) -> None:
    monkeypatch.setattr(admission, "GRACE", 1e6)  # no place is lost because nobody asks for it
    fleet = await start_fleet()
    full, body = await fleet.box(max_sessions=1), {"prompt": PROMPT}
    assert (await ask(fleet, "/v1/sessions", "POST", body))[0] == 201
    token = (await ask(fleet, "/v1/sessions", "POST", body, queue="join"))[1]["error"]["queue_token"]
    assert not (await ask(fleet, "/v1/queue", queue=token))[1]["admitted"]
    refused = (await ask(fleet, "/v1/sessions", "POST", body, queue=token))[1]["error"]
    assert (refused["queue_token"], refused["place"]) == (token, 1)
    started = await fleet.box(max_sessions=1)
    while not (await ask(fleet, "/v1/queue", queue=token))[1]["admitted"]:
        await asyncio.sleep(0.1)
    assert (await ask(fleet, "/v1/sessions", "POST", body, queue=token))[0] == 201
    assert (full.facts().sessions, started.facts().sessions) == (1, 1)
    await comes(lambda: not full.facts().waiting)  # its place at the first box is free, too


async def test_a_closed_box_keeps_its_sessions_and_takes_none_until_it_is_opened_again(fleet: Fleet) -> None:
    async def admitted(takes: bool) -> int:
        return await asyncio.wrap_future(closed.admit(takes))

    closed, body = await fleet.box(max_sessions=1), {"prompt": PROMPT}
    async with AsyncClient(fleet.url) as client:
        await client.open(codecs=["rgb24"], prompt=PROMPT, seed=3)
        media = (await watch(client, 1))[0]
        token = (await ask(fleet, "/v1/sessions", "POST", body, queue="join"))[1]["error"]["queue_token"]
        assert await admitted(False) == 1
        other = await fleet.box(max_sessions=1)
        while (await ask(fleet, "/v1/sessions", "POST", body))[0] != 201:
            await asyncio.sleep(0.1)  # until the gateway has read the other box's row
        assert (closed.facts().sessions, other.facts().sessions) == (1, 1)
        # The closed box's queue is over: the request waits at the other box.
        refused = (await ask(fleet, "/v1/sessions", "POST", body, queue=token))[1]["error"]
        assert refused["queue_token"].startswith(other.name)
        await client.drop()
        await client.resume()  # the closed box's own session comes back to it
        media += (await watch(client, 3))[0]
        assert (closed.facts().sessions, closed.facts().accepts) == (1, False)
        assert await admitted(False) == 1
        name = str(client.ready["session"])
        assert (await ask(fleet, f"/v1/sessions/{name}", "DELETE"))[0] == 204
    assert [packet.serial for packet in media] == list(range(len(media)))
    assert await admitted(False) == 0
    assert (await ask(fleet, "/v1/sessions", "POST", body))[1]["error"]["code"] in ("full", "stopping")
    assert await admitted(True) == 0
    assert closed.facts().accepts
    assert (await ask(fleet, "/v1/videos", "POST", {"prompt": PROMPT, "seconds": 0.5}))[0] == 200
    # A session and a video.
    assert await admitted(False) + await asyncio.wrap_future(other.admit(True)) == 2


async def test_a_box_beats_on_after_an_error_that_nobody_expected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fleet: Fleet
) -> None:
    announce, failed, beaten = MemoryDirectory.announce, asyncio.Event(), asyncio.Event()

    async def failing_once(directory: MemoryDirectory, facts: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("a defect")
        await announce(directory, facts)
        beaten.set()

    await fleet.box()
    monkeypatch.setattr(MemoryDirectory, "announce", failing_once)
    await failed.wait()
    await beaten.wait()
    assert "the box cannot renew its entry" in caplog.text


async def test_a_box_that_a_gateway_does_not_know_yet_keeps_its_session(
    monkeypatch: pytest.MonkeyPatch, start_fleet: FleetStarter
) -> None:
    monkeypatch.setattr(choice, "FRESH_S", LIMIT_S)
    fleet = await start_fleet()
    await fleet.box()
    assert (await ask(fleet, "/ready"))[1]["boxes"] == 1
    url = (await fleet.box()).facts().inside
    name = (await asyncio.to_thread(http, f"{url}/v1/sessions", "POST", {"prompt": PROMPT}))[1]["id"]
    lease = await fleet.lease(name)
    assert (await ask(fleet, f"/v1/sessions/{name}"))[0] == 200
    assert await fleet.lease(name) == lease


async def test_a_box_may_listen_on_an_address_of_ipv6(start_fleet: FleetStarter) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    fleet = await start_fleet()
    box = await fleet.box(host="::1")
    status, opened = await ask(fleet, "/v1/sessions", "POST", {"prompt": PROMPT})
    assert (status, urlsplit(opened["url"]).hostname) == (201, "::1")
    assert urlsplit(box.facts().web).port == urlsplit(opened["url"]).port


async def test_a_box_that_ends_while_a_request_is_under_way_renews_no_entry(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, start_fleet: FleetStarter
) -> None:
    monkeypatch.setattr("seko_serve.fleet.box.BEAT_S", 0.01)

    def listens(port: int | None) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    fleet = await start_fleet()
    box = await fleet.box()
    port = urlsplit(box.facts().inside).port
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/sessions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n\r\n")
    await writer.drain()
    stopping = asyncio.create_task(fleet.stop(box))
    while await asyncio.to_thread(listens, port):
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)  # ten beats
    writer.close()
    await stopping
    assert "the box cannot renew its entry" not in caplog.text


async def forgotten(fleet: Fleet, box: Box, session: str) -> Lease:
    """The lease of a box's session, of which the directory knows nothing any more."""
    lease = await fleet.lease(session)
    assert box._directory is not None
    assert lease is not None
    await box._directory.release(session, "local", lease)
    return lease


async def test_a_lease_that_is_given_up_while_it_is_taken_again_is_free(
    monkeypatch: pytest.MonkeyPatch, fleet: Fleet
) -> None:
    """The directory forgot a session's lease, and the session ends while its box takes the lease again."""
    box, claim, ended = await fleet.box(), MemoryDirectory.claim, asyncio.Event()
    name = (await ask(fleet, "/v1/sessions", "POST", {"prompt": PROMPT}))[1]["id"]

    async def while_it_ends(directory: MemoryDirectory, *arguments: Any) -> Lease:
        lease = await claim(directory, *arguments)
        await box._manager.close(box._manager.sessions[name])
        ended.set()
        return lease

    monkeypatch.setattr(MemoryDirectory, "claim", while_it_ends)
    await forgotten(fleet, box, name)
    await ended.wait()
    while await fleet.lease(name) is not None:
        await asyncio.sleep(0.02)
    assert not box._leases


@pytest.mark.parametrize("repeated", [False, True], ids=["lost", "repeated"])
async def test_a_lease_whose_answer_was_lost_is_the_boxs_own(
    repeated: bool, monkeypatch: pytest.MonkeyPatch, start_fleet: FleetStarter
) -> None:
    """The directory forgot a session's lease, and takes it again for the box; the box hears nothing of it, or, as
    Redis' client has sent the request twice, that the lease is taken."""
    monkeypatch.setattr("seko_serve.fleet.box.BEAT_S", 0.02)
    fleet = await start_fleet()
    box, claim, lost = await fleet.box(), MemoryDirectory.claim, asyncio.Event()
    name = (await ask(fleet, "/v1/sessions", "POST", {"prompt": PROMPT}))[1]["id"]

    async def unheard(directory: MemoryDirectory, *arguments: Any) -> Lease:
        lease = await claim(directory, *arguments)
        if lost.is_set():
            return lease
        lost.set()
        if repeated:
            return await claim(directory, *arguments)
        raise DirectoryError("the directory does not answer: TimeoutError")

    monkeypatch.setattr(MemoryDirectory, "claim", unheard)
    lease = await forgotten(fleet, box, name)
    await lost.wait()
    session = box._manager.sessions[name]
    while session.end is None and box._leases == {}.fromkeys(box._leases, lease):
        await asyncio.sleep(0.02)
    assert session.end is None
    assert [*box._leases.values()] == [await fleet.lease(name)]


async def test_requests_do_not_wait_for_a_silent_directory_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, silent = asyncio.Event(), asyncio.Event()
    reads = [0]

    async def boxes(_: MemoryDirectory) -> list[BoxFacts]:
        reads[0] += 1
        silent.set()
        await answers.wait()
        if reads[0] == 1:
            raise DirectoryError("the directory does not answer: TimeoutError")
        return []

    monkeypatch.setattr(MemoryDirectory, "boxes", boxes)
    asked = AskedBoxes(memory(), ssl.create_default_context())
    async with asked.opened():
        waiting = [asyncio.create_task(asked.known(fresh=fresh)) for fresh in (False, True, False)]
        await silent.wait()
        answers.set()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(end) for end in ends] == [DirectoryError] * 3
        assert await asked.known() == []
    assert reads == [2]


async def test_one_that_listens_at_a_gateway_keeps_its_place_at_the_box_and_frees_it(fleet: Fleet) -> None:
    box, body = await fleet.box(max_sessions=1), {"prompt": PROMPT}
    session = (await ask(fleet, "/v1/sessions", "POST", body))[1]["id"]
    tokens = [
        (await ask(fleet, "/v1/sessions", "POST", body, queue="join"))[1]["error"]["queue_token"]
        for _ in range(3)
    ]
    assert (await ask(fleet, "/v1/queue", "DELETE", queue=tokens.pop()))[0] == 204
    assert box._manager.admission.waiting == 2
    leaver, stayer = [await asyncio.to_thread(Listener, fleet.url, token) for token in tokens]
    assert (await asyncio.to_thread(leaver.event))["place"] == 1
    leaver.close()
    await comes(lambda: box._manager.admission.waiting <= 1)
    await ask(fleet, f"/v1/sessions/{session}", "DELETE")
    while not (await asyncio.to_thread(stayer.event))["admitted"]:
        pass
    stayer.close()


async def test_one_that_listens_hears_that_the_directory_does_not_answer_and_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch, fleet: Fleet
) -> None:

    async def silent(_: MemoryDirectory) -> list[BoxFacts]:
        raise DirectoryError("it is silent")

    box, body = await fleet.box(max_sessions=1), {"prompt": PROMPT}
    await ask(fleet, "/v1/sessions", "POST", body)
    token = (await ask(fleet, "/v1/sessions", "POST", body, queue="join"))[1]["error"]["queue_token"]
    listener = await asyncio.to_thread(Listener, fleet.url, token)
    assert (await asyncio.to_thread(listener.event))["place"] == 1
    with monkeypatch.context() as patched:
        patched.setattr(MemoryDirectory, "boxes", silent)
        while "error" not in (event := await asyncio.to_thread(listener.event)):
            pass
    assert event["error"]["code"] == "full"
    listener.close()
    assert box._manager.admission.waiting == 1
