"""SGLang's realtime video: a client of its protocol streams, steers, is refused, and is out of nobody's way."""

from __future__ import annotations

import io
import json
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("msgpack")
import msgpack
from PIL import Image

from seko_serve.errors import ServeError
from seko_serve.protocol import parse_control
from seko_serve.video.opening import opening_of
from seko_serve.video.realtime_messages import (
    BUTTONS,
    FIELDS,
    FORMS,
    USUAL,
    controls_of,
    error_message,
    init_of,
)
from seko_serve.video.realtime_stream import unpacked
from tests.runtime import toy_whole

from .conftest import Running, Starter
from .pages import wait_until_empty
from .realtime_client import PATH, WAIT_S, Client, opened
from .test_controls import camera_of, chunk_of
from .test_server import PROMPT, alone, http
from .test_speech import opener as speech_opener
from .toys import CAMERA, game_opener, toy_manifest, world_opener

KEY = "k" * 32
SIZE = f"{toy_whole.WIDTH}x{toy_whole.HEIGHT}"


def watched(client: Client, chunks: int) -> np.ndarray:
    return np.stack([frame for _ in range(chunks) for frame in client.chunk()[0]])


def noisy_picture(side: int) -> bytes:
    """A PNG that no compression makes small: 3 bytes a pixel."""
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize("form", [None, "raw", "webp", "jpeg"])
def test_the_frames_are_those_of_the_runtime_alone(start: Starter, form: str | None) -> None:
    with opened(start().url) as client:
        client.init(prompt=PROMPT, seed=3, size=SIZE, realtime_output_format=form)
        seen = watched(client, 5).astype(int)
    wanted = alone(5, {0: PROMPT})
    if form in (None, "raw"):
        assert np.array_equal(seen, wanted)
    else:  # what a lossy picture loses of so small ones, it loses of all alike
        errors = np.abs(seen[:, None] - wanted).mean((2, 3, 4))
        assert (errors.argmin(1) == np.arange(len(wanted))).all()


@pytest.mark.parametrize(("form", "together"), [("raw", 16), ("webp", 6), ("jpeg", 6)])
def test_a_chunk_comes_in_messages_that_say_where_they_belong(
    start: Starter, form: str, together: int
) -> None:
    with opened(start().url) as client:
        client.init(prompt=PROMPT, realtime_output_format=form, max_chunks=3)
        for number, frames in enumerate((toy_whole.FIRST_FRAMES, *(toy_whole.CHUNK_VIDEO,) * 2)):
            _, batches, stats = client.chunk()
            assert [batch["num_frames"] for batch in batches] == [
                min(together, frames - first) for first in range(0, frames, together)
            ]
            assert [batch["frame_batch_index"] for batch in batches] == [*range(len(batches))]
            assert {batch["num_frame_batches"] for batch in batches} == {len(batches)}
            assert [batch["is_final_frame_batch"] for batch in batches] == [
                *[False] * (len(batches) - 1),
                True,
            ]
            assert {batch["chunk_index"] for batch in batches} == {stats["chunk_index"]} == {number}
            assert {batch["request_id"] for batch in batches} == {stats["request_id"]}
            assert (stats["num_frames"], stats["num_batches"]) == (frames, len(batches))
            assert stats["raw_bytes"] == frames * toy_whole.HEIGHT * toy_whole.WIDTH * 3
        assert client.end() == (1000, "generation complete")


def test_a_row_is_free_when_its_client_has_left_or_has_all(start: Starter) -> None:
    server = start(max_sessions=1)
    with opened(server.url) as client:
        client.init(prompt=PROMPT)
        client.chunk()
    for _ in range(3):  # a page closes one socket and opens the next at once
        with opened(server.url) as client:
            client.init(prompt=PROMPT, max_chunks=1)
            client.chunk()
            assert client.end()[0] == 1000
    wait_until_empty(server)


def test_who_comes_while_all_rows_are_taken_is_told_so(start: Starter) -> None:
    server = start(max_sessions=1)
    with opened(server.url) as first, opened(server.url) as second:
        first.init(prompt=PROMPT)
        first.chunk()
        second.init(prompt=PROMPT)
        assert "no row is free" in second.error()
        assert second.end()[0] == 1008
        first.chunk()


def test_what_is_wrong_with_a_request_is_told_and_another_one_may_follow(start: Starter) -> None:
    server, other = start(), next(name for name in USUAL if name != "size")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"type": "event"}, "expected init"),
        ({"prompt": 7}, "prompt is missing or no text"),
        ({"size": "640x480"}, f"this artifact has {SIZE} alone"),
        ({other: 1_000}, f"{other} is 1000"),
        ({"model": "other"}, "this server has the model toy"),
        ({"fps": 0}, "fps is 0"),
        ({"max_chunks": 0}, "max_chunks is 0, expected 1 or more"),
        ({"output_compression": 101}, "expected 1 to 100"),
        ({"realtime_output_format": "png"}, "expected raw or webp or jpeg"),
        ({"enable_upscaling": True}, "enable_upscaling is True"),
        ({"first_frame": b"GIF89a"}, "first_frame is no picture"),
        ({"first_frame": "https://example.org/a.png"}, "--picture-hosts"),
        ({"promt": PROMPT}, "the unknown field 'promt': did you mean prompt?"),
    ]
    with opened(server.url) as client:
        for fields, words in wrong:
            client.send(**{"type": "init", "prompt": PROMPT, **fields})
            assert words in (told := client.error()), told
        for message in (b"\xc1", b"\x01", b"\x81\x01\x02", b"\xdd\xff\xff\xff\xff", "text"):
            client.socket.send(message)
            assert "a message is" in client.error()
        assert not server.manager.sessions
        client.init(prompt=PROMPT, seed=3)
        assert np.array_equal(watched(client, 2), alone(2, {0: PROMPT}))


def test_no_error_is_longer_than_a_page_can_read() -> None:
    for text in ("a", "ä" * 200, "b" * 255, "b" * 256):
        message = error_message(text)
        assert message[:1] == b"\x82"
        content = message.partition(b"content\xd9")[2]
        assert content[0] == len(content) - 1
        assert content[1:].decode().rstrip(".") == text[: len(content[1:].decode().rstrip("."))]


def test_what_the_page_sends_unasked_is_no_wish(start: Starter) -> None:
    """Its defaults, and numbers as floats, as its own packing writes them from 65,536 on."""
    with opened(start().url) as client:
        client.init(prompt=PROMPT, **USUAL, guidance_scale=1, seed=3.0, fps=25, output_compression=80)
        frames, _, stats = client.chunk()
        assert np.array_equal(frames, alone(1, {0: PROMPT}))
        assert f"size is {SIZE}, the artifact's" in stats["notes"]
        assert "notes" not in client.chunk()[2]


def test_a_picture_of_megabytes_begins_the_video(start: Starter) -> None:
    picture = noisy_picture(700)
    assert len(picture) > 1 << 20
    with opened(start().url) as client:
        client.init(prompt=PROMPT, seed=3, first_frame=picture)
        assert not np.array_equal(watched(client, 1), alone(1, {0: PROMPT}))


def test_a_held_button_moves_the_world_as_its_key_does(start: Starter) -> None:
    with opened(start(world_opener).url) as client:
        client.init(prompt=PROMPT, seed=3)
        client.chunk()
        client.hold("wl", event_id=7)
        frames, events = [], []
        for _ in range(5):
            came, batches, stats = client.chunk()
            frames.append(came)
            events += [batches[0].get("event_id")]
            assert stats["event_id"] == batches[-1].get("event_id")
    pressed = events.index(7) + 1
    assert events == [None] * (pressed - 1) + [7] * (6 - pressed)
    with world_opener() as pool, pool.open_session(seed=3, prompt=PROMPT) as session:
        camera, wanted = camera_of(session.manifest), []
        for number in range(6):
            if number == pressed:
                camera.take({"held": ["w", "l"]})
            wanted.append(session.run_chunk(chunk_of(camera)).video()[0])
    assert np.array_equal(np.concatenate(frames), np.concatenate(wanted[1:]))


def test_a_button_that_is_pressed_and_released_in_one_event_counts(start: Starter) -> None:
    server = start(world_opener)
    seen = []
    for steps in (("",), ("w", "")):
        with opened(server.url) as client:
            client.hold(*steps)  # before init: no event is taken yet
            assert "expected init" in client.error()
            client.init(prompt=PROMPT, seed=3)
            client.hold(*steps, event_id=1)
            while client.chunk()[2]["event_id"] is None:
                pass
            seen.append(client.chunk()[0])
    assert not np.array_equal(*seen)


def test_buttons_are_the_artifacts_own_keys(start: Starter) -> None:
    """The toy game has no key L, and its arrow steers."""
    server = start(game_opener)
    with opened(server.url) as client:
        client.init(prompt=PROMPT)
        client.chunk()
        client.hold("wjl")
        session = next(iter(server.manager.sessions.values()))
        while not (state := session.content.state()["controls"]["actions"])["held"]:
            client.chunk()
    assert state["held"] == ["KeyW", "ArrowLeft"]
    assert set(BUTTONS) == set("wasdijkl")


def test_a_prompt_changes_the_chunk_that_names_it(start: Starter) -> None:
    with opened(start().url) as client:
        client.init(prompt=PROMPT, seed=3)
        first = client.chunk()[0]
        client.event("prompt", "c a", event_id=70_000)
        more, numbers = [], []
        for _ in range(5):
            frames, batches, _ = client.chunk()
            more += frames
            numbers += [batch["chunk_index"] for batch in batches if batch.get("event_id") == 70_000]
    assert np.array_equal([*first, *more], alone(6, {0: PROMPT, numbers[0]: "c a"}))


def test_a_wrong_event_is_told_and_the_stream_goes_on(start: Starter) -> None:
    wrong: list[tuple[str, object, str]] = [
        ("jump", None, "expected prompt, camera_actions or composite_input"),
        ("prompt", 7, "expected a text"),
        ("prompt", b"a", "expected a text"),
        ("camera_actions", [["w"]], "mode state"),
        ("camera_actions", {"mode": "state", "transitions": [{"actions": ["x"]}]}, "expected letters"),
        ("camera_actions", {"mode": "state", "transitions": [{"actions": [["w"]]}]}, "expected letters"),
        ("camera_actions", {"mode": "state", "transitions": [{}] * 65}, "at most 64"),
        ("composite_input", {"input_types": [["prompt"]]}, "no input_types"),
        ("composite_input", {"input_types": ["prompt"]}, "expected a text"),
        ("camera_actions", {"mode": "state", "transitions": [{"actions": ["w"]}]}, "no such control"),
    ]
    with opened(start().url) as client:
        client.init(prompt=PROMPT)
        client.chunk()
        for kind, payload, words in wrong:
            client.event(kind, payload, event_id=1)
            assert words in (told := client.error()), told
        client.event("composite_input", {"input_types": ["prompt"], "prompt": "c a"}, event_id=2)
        while client.message().get("event_id") != 2:
            pass


def test_long_messages_are_taken_for_init_alone(start: Starter) -> None:
    server = start()
    with opened(server.url) as client:
        client.init(prompt=PROMPT)
        client.chunk()
        client.event("prompt", "a" * (1 << 17))
        assert client.end()[0] == 1009
    with opened(server.url) as client:
        # The head of a masked binary frame alone: content that is still being sent when the server closes would reset
        # the connection, and the close that the server sent could be lost.
        client.socket.socket.sendall(b"\x82\xff" + (12 << 20 | 1).to_bytes(8, "big") + bytes(4))
        assert client.end()[0] == 1009


WORDS = ("kind", "payload", "event_id", "mode", "transitions", "actions", "input_types")
NAMES = [*FIELDS, *WORDS, "prompt", "camera_actions"]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9)
    | st.sampled_from(["init", "event", "state", "w", *FORMS, "prompt", "camera_actions", "composite_input"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=4)
    ),
)


@given(st.sampled_from(["init", "event"]), st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_whatever_a_client_sends_is_taken_or_refused_in_words(kind: str, fields: dict[str, Any]) -> None:
    manifest = toy_manifest(CAMERA)
    table = {"type": kind, **fields}
    with suppress(ServeError):
        init = init_of(table, manifest)
        assert 1 <= init.quality <= 100
        opening_of({**init.opening}, manifest, "first_frame")
    with suppress(ServeError):
        for message in controls_of(table, manifest)[1]:
            parse_control(json.dumps({**message, "id": ""}))


@pytest.mark.parametrize("lists", [[0] * 1025, [[[]] * 600] * 2], ids=["long", "many"])
def test_a_message_of_many_small_parts_is_refused(lists: list[Any]) -> None:
    with pytest.raises(ServeError):
        unpacked(msgpack.packb({"type": "init", "prompt": lists}))


@given(st.binary(max_size=64))
def test_bytes_that_are_no_message_are_refused_in_words(received: bytes) -> None:
    with suppress(ServeError):
        assert isinstance(unpacked(received), dict)


def test_a_flood_of_wrong_events_is_slowed_and_takes_nobodys_time(start: Starter) -> None:
    server = start()
    with opened(server.url) as client, opened(server.url) as other:
        client.init(prompt=PROMPT)
        other.init(prompt=PROMPT, max_chunks=4)
        for _ in range(300):
            client.event("jump", None)
        watched(other, 4)
        assert other.end()[0] == 1000


def test_a_server_with_keys_takes_a_key_or_a_link_once(start: Starter) -> None:
    server = start(keys=(KEY,))
    with opened(server.url) as client:
        assert "no known key" in client.error()
        assert client.end() == (1008, "the header Authorization has no known key: send Bearer and the key")
    assert http(f"{server.url}{PATH}/link", "POST")[0] == 401
    status, link = http(f"{server.url}{PATH}/link", "POST", key=KEY)
    assert (status, link["url"].partition("?")[0]) == (201, PATH)
    query = link["url"].removeprefix(PATH)
    for key, ticket in ((KEY, ""), ("", query)):
        with opened(server.url, key, query=ticket) as client:
            client.init(prompt=7)  # a refused request does not use it up
            client.error()
            client.init(prompt=PROMPT)
            client.chunk()
    with opened(server.url, query=query) as client:
        assert "the link's ticket is unknown, used" in client.error()


def test_pages_of_other_sites_are_refused_unless_they_are_named(start: Starter) -> None:
    site = "http://page.example"
    with opened(start().url, origin=site) as client:
        assert "--allowed-origins" in client.error()
        assert client.end()[0] == 1008
    with opened(start(allowed_origins=frozenset({site})).url, origin=site) as client:
        client.init(prompt=PROMPT)
        client.chunk()


def test_without_the_library_the_client_reads_what_is_missing(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    monkeypatch.setitem(sys.modules, "msgpack", None)
    monkeypatch.delitem(sys.modules, "seko_serve.video.realtime_stream", raising=False)
    with opened(server.url) as client:
        assert b"the package msgpack is not installed" in client.socket.recv(WAIT_S)
        assert client.end()[0] == 1011


def test_an_artifact_that_makes_no_video_says_so(start: Starter) -> None:
    with opened(start(speech_opener).url) as client:
        assert "makes no video" in client.error()


def test_what_every_page_sends_is_left_out_where_an_artifact_takes_none(start: Starter) -> None:
    with opened(start(game_opener).url) as client:
        client.init(prompt=PROMPT, first_frame="https://example.org/a.png")
        assert client.chunk()[2]["notes"] == ["first_frame is left out: this artifact takes no picture"]
    manifest = toy_manifest(CAMERA)
    silent = replace(manifest, workload=replace(manifest.workload, text=None))
    init = init_of({"type": "init", "prompt": "a", "seed": 3}, silent)
    assert (init.opening, init.notes) == ({"seed": 3}, ("prompt is left out: this artifact takes no text",))


def test_the_device_makes_no_more_than_is_shown(start: Starter) -> None:
    """A client that reads as fast as it can is sent no more chunks than the two ahead of its clock."""
    server = start()
    with opened(server.url) as client:
        client.init(prompt=PROMPT, fps=1)
        began = time.monotonic()
        watched(client, 2)
        session = next(iter(server.manager.sessions.values()))
        shown = (time.monotonic() - began) // toy_whole.FIRST_FRAMES
        assert session.made_chunks <= 2 + shown


def test_a_server_that_stops_says_so(start: Starter) -> None:
    server: Running = start()
    with opened(server.url) as client:
        client.init(prompt=PROMPT)
        client.chunk()
        server.stop()
        assert "the server stops" in client.error()
        assert client.end()[0] == 1012
