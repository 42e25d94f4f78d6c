"""The socket's messages: what is written is read back, and whatever a client sends is answered by an error of ours."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seko_serve.errors import KINDS, ServeError
from seko_serve.protocol import (
    CONTROLS,
    HEADER,
    MAX_AUDIO_BYTES,
    MAX_FRAME_BYTES,
    NONE_SEEN,
    Codec,
    Entrance,
    Media,
    frame_message,
    message,
    parse_binary,
    parse_control,
    parse_subprotocols,
    sound_message,
)

unsigned = st.integers(0, (1 << 32) - 1)
media = st.builds(
    Media,
    st.sampled_from(Codec),
    unsigned,
    unsigned,
    unsigned,
    st.integers(0, (1 << 64) - 1),
    unsigned,
    st.binary(max_size=64),
    key=st.booleans(),
    discontinuity=st.booleans(),
    last=st.booleans(),
)
EXAMPLES = (
    {"type": "hello", "codecs": ["h264"], "audio": ["aac"], "buffer": 2},
    {"type": "ack", "chunk": 7},
    {"type": "prompt", "id": "a", "text": "a red disc", "recache": True},
    {"type": "control", "id": "b", "name": "camera", "event": {"held": ["KeyW"]}},
    {"type": "keys", "id": "b", "held": ["KeyW", "ArrowLeft"]},
    {"type": "poses", "id": "c", "poses": [[1.0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]]},
    {"type": "audio", "id": "c", "pcm16": "AAAB", "last": True},
    {"type": "audio_end", "id": "d"},
    {"type": "text", "id": "e", "text": "Good morning.", "last": True},
    {"type": "seed", "id": "f", "value": -3},
    {"type": "pause", "id": "g"},
    {"type": "play", "id": "h"},
    {"type": "restart", "id": "i", "seed": 1},
    {"type": "ping", "t": 1.5},
    {"type": "close"},
)


@given(media)
def test_a_media_message_is_read_as_it_was_written(sent: Media) -> None:
    packed = sent.pack()
    assert len(packed) == HEADER.size + len(sent.payload) == 32 + len(sent.payload)
    assert Media.parse(packed) == sent


@given(st.binary(max_size=80))
def test_any_bytes_are_a_media_message_or_refused(packed: bytes) -> None:
    try:
        parsed = Media.parse(packed)
    except ServeError:
        return
    assert parsed.pack()[4:] == packed[4:]  # but for reserved bits


@given(media)
def test_a_binary_message_of_a_client_is_voice_a_frame_or_refused(sent: Media) -> None:
    if sent.codec is Codec.MJPEG:
        control = parse_binary(frame_message(sent.payload, sent.serial, dropped=sent.first))
        assert control == parse_binary(sent.pack())
        assert (control.type, control.id) == ("frame", str(sent.serial) if sent.serial else "")
        assert control.fields == {"picture": sent.payload, "dropped": sent.first}
        return
    if sent.codec is not Codec.PCM:
        with pytest.raises(ServeError, match="expected PCM or MJPEG"):
            parse_binary(sent.pack())
        return
    message = sound_message(sent.payload, sent.count, sent.serial, last=sent.last)
    control = parse_binary(message)
    assert control == parse_binary(sent.pack())
    assert (control.type, control.id) == ("audio", str(sent.serial))
    assert control.fields == {"pcm16": sent.payload, "last": sent.last}


def test_a_long_piece_of_voice_and_a_large_frame_are_refused_unread() -> None:
    with pytest.raises(ServeError, match="at most"):
        parse_binary(sound_message(bytes(MAX_AUDIO_BYTES + 2), 1, 1, last=False))
    with pytest.raises(ServeError, match="at most"):
        parse_binary(bytes(HEADER.size + MAX_FRAME_BYTES + 1))


def test_there_is_an_example_of_each_control_and_it_is_read() -> None:
    assert [example["type"] for example in EXAMPLES] == list(CONTROLS)
    for example in EXAMPLES:
        control = parse_control(json.dumps(example))
        assert control.type == example["type"]
        assert control.id == example.get("id", "")
        assert set(control.fields) == set(example) - {"type", "id"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["type"])
def test_a_control_with_a_field_more_or_less_is_refused(example: dict[str, object]) -> None:
    with pytest.raises(ServeError, match="unknown field"):
        parse_control(json.dumps({**example, "more": 1}))
    for name, _ in CONTROLS[str(example["type"])].required:
        less = {key: value for key, value in example.items() if key != name}
        with pytest.raises(ServeError, match=f"{example['type']}.{name} is missing"):
            parse_control(json.dumps(less))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(EXAMPLES), st.data())
def test_whatever_stands_in_a_field_is_read_or_refused(
    example: dict[str, object], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(example)))
    changed = {**example, name: data.draw(json_values)}
    with contextlib.suppress(ServeError):
        assert parse_control(json.dumps(changed)).type in CONTROLS


@pytest.mark.parametrize(
    "text", ["", "[", "1", "null", '"a"', "NaN", '{"type": []}', "[" * 100_000, "{" * 70_000]
)
def test_what_is_no_control_is_refused(text: str) -> None:
    with pytest.raises(ServeError):
        parse_control(text)


def test_errors_name_no_content_of_a_users_fields() -> None:
    """Names of fields and types are named, and nothing that stands in a text."""
    secret = "my-secret-text"
    texts = (
        f'{{"type": "ack", "chunk": "{secret}"}}',
        f'{{"type": "prompt", "id": "{secret * 9}", "text": "a"}}',
        f'{{"type": "prompt", "id": "1", "text": "{secret * 999}"}}',
        f'{{"type": "prompt", "id": "1", "text": ["{secret}"]}}',
        f'{{"type": "close", "other": "{secret}"}}',
    )
    for text in texts:
        with pytest.raises(ServeError) as caught:
            parse_control(text)
        assert secret not in caught.value.message


@pytest.mark.parametrize(
    ("offered", "entrance"),
    [
        (["seko.v1", "seko.ticket.abc"], Entrance(ticket="abc")),
        (["seko.resume.a.b-c.17", "seko.v1"], Entrance(resume="a.b-c", last_serial=17)),
        (["seko.v1", "seko.resume.a."], Entrance(resume="a", last_serial=NONE_SEEN)),
    ],
)
def test_the_entrance_is_read_from_subprotocols(offered: list[str], entrance: Entrance) -> None:
    assert parse_subprotocols(offered) == entrance
    assert sorted(entrance.subprotocols()) == sorted(offered)


@pytest.mark.parametrize(
    "offered",
    [
        [],
        ["seko.v1"],
        ["seko.ticket.abc"],
        ["seko.v1", "seko.ticket.a", "seko.ticket.b"],
        ["seko.v1", "seko.ticket.a", "seko.resume.b.1"],
        ["seko.v1", "seko.resume.1"],
        ["seko.v1", "seko.resume.a.x"],
        ["seko.v1", "seko.resume.a.99999999999"],
    ],
)
def test_other_subprotocols_are_refused(offered: list[str]) -> None:
    with pytest.raises(ServeError):
        parse_subprotocols(offered)


def test_an_error_is_an_object_with_its_code() -> None:
    error = ServeError("full", "no row is free", retry_after=2.5, facts={"position": 3})
    body = {"code": "full", "message": "no row is free", "retryable": True, "position": 3, "retry_after": 2.5}
    assert error.body() == body
    assert json.loads(message("error", **error.body())) == {"type": "error", **body}
    assert all(400 <= kind.status < 600 and kind.close in (1008, 1011, 1012, 1013) for kind in KINDS.values())
