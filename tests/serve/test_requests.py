"""Requests and controls as people and programs write them: what is wrong is named, with what would be right."""

from __future__ import annotations

import base64
import textwrap
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seko_runtime.controls import controls_of
from seko_serve.client import Client
from seko_serve.errors import ServeError
from seko_serve.http.fields import Fields
from seko_serve.media import uploads
from seko_serve.protocol import parse_control
from seko_serve.speech.fields import FIELDS as SPEECH_FIELDS
from seko_serve.speech.fields import VOICE_FIELDS
from seko_serve.video.fields import FIELDS as VIDEO_FIELDS
from seko_serve.video.fields import MAX_SECONDS, video_request
from seko_serve.video.opening import opening_of
from tests.runtime import toy_whole

from .conftest import Starter
from .pages import wait_until_empty
from .test_client import watched
from .test_server import PROMPT, alone, http, pictures
from .test_speech import opener as speech_opener
from .toys import VOICE, toy_manifest


@pytest.mark.parametrize(
    ("path", "method", "table", "named"),
    [
        (
            "/v1/sessions",
            "POST",
            {"promt": "a"},
            "the unknown field 'promt': did you mean prompt?; it takes fps, image",
        ),
        ("/v1/sessions", "POST", {"prompt": "a", "a\nb" * 99: 1}, "the unknown field 'a\\nba"),
        (
            "/v1/sessions",
            "POST",
            {"prompt": "a", "inputs": {"mask": {"dtyp": "uint8"}}},
            "'dtyp': did you mean dtype?",
        ),
        ("/v1/sessions", "POST", {"prompt": "a", "\ud800": 1}, "the unknown field '\\ud800'"),
        ("/v1/sessions", "POST", {"prompt": "a", "inputs": {"\ud800": 1}}, "\\ud800"),
        ("/v1/sessions/ID", "PATCH", {"pause": True}, "the unknown field 'pause': did you mean paused?"),
        (
            "/v1/videos",
            "POST",
            {"prompt": "a", "negative_prompt": "b"},
            "the unknown field 'negative_prompt'",
        ),
        (
            "/v1/videos",
            "POST",
            {"prompt": "a", "second": 4},
            "the unknown field 'second': did you mean seconds?",
        ),
    ],
)
def test_an_unknown_field_is_named_with_the_nearest_known_one(
    start: Starter, path: str, method: str, table: object, named: str
) -> None:
    url = start().url
    name = http(f"{url}/v1/sessions", "POST", {"prompt": PROMPT})[1]["id"]
    status, answer = http(url + path.replace("ID", name), method, table)
    assert (status, answer["error"]["code"]) == (400, "bad_request")
    assert named in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 500


def test_an_unknown_field_of_speech_is_named(start: Starter) -> None:
    url = start(speech_opener).url
    for path, table, named in (
        ("/v1/audio/speech", {"inputs": "a"}, "'inputs': did you mean input?"),
        ("/v1/sessions", {"temperatur": 1}, "'temperatur': did you mean temperature?"),
    ):
        assert named in http(url + path, "POST", table)[1]["error"]["message"]


@pytest.mark.parametrize(
    ("control", "named"),
    [
        (
            '{"type": "prompt", "id": "1", "text": "a", "recash": true}',
            "prompt has the unknown field 'recash': did you mean rec",
        ),
        ('{"type": "close", "id": "1"}', "close has the unknown field 'id'; it takes none"),
        ('{"type": "promt"}', "unknown type of control 'promt': did you mean prompt?"),
        ('{"type": 1}', "unknown type of control '1'; expected one of hello"),
    ],
)
def test_an_unknown_word_of_a_control_is_named(control: str, named: str) -> None:
    with pytest.raises(ServeError) as refused:
        parse_control(control)
    assert named in refused.value.message


NO_PROMPTS = [
    ("", "the prompt is empty"),
    (" \t\u3000", "the prompt has no letter that can be seen"),
    ("\u200b", "the prompt has no letter that can be seen"),
    ("\0", "letter 1 of the prompt is NUL"),
    ("a\0", "letter 2 of the prompt is NUL"),
]


@pytest.mark.parametrize(("prompt", "named"), NO_PROMPTS)
def test_a_prompt_without_words_is_refused_at_every_door(start: Starter, prompt: str, named: str) -> None:
    server = start()
    with Client(server.url) as client:
        client.open(codecs=["rgb24"], prompt=PROMPT, seed=3)
        path = f"/v1/sessions/{client.ready['session']}"
        for door, method in (("/v1/sessions", "POST"), ("/v1/videos", "POST"), (path, "PATCH")):
            status, answer = http(server.url + door, method, {"prompt": prompt})
            assert (status, answer["error"]["code"]) == (400, "bad_request")
            assert named in answer["error"]["message"]
        name, told = client.send("prompt", text=prompt), list[dict[str, Any]]()
        media = watched(client, 3, told)
        (rejected,) = [message for message in told if message["type"] == "rejected"]
        assert (rejected["id"], rejected["code"]) == (name, "bad_request")
        assert named in rejected["message"]
    assert np.array_equal(pictures(media), alone(3, {0: PROMPT})[: len(media)])
    wait_until_empty(server)


def test_base64_may_be_broken_into_lines() -> None:
    data = bytes(range(256)) * 4
    text = base64.b64encode(data).decode()
    for broken in (
        base64.encodebytes(data).decode(),
        "\r\n".join(textwrap.wrap(text, 76)),
        "data:image/png;base64," + base64.encodebytes(data).decode(),
    ):
        assert uploads.data_of(broken, "image", len(data)) == data
    voice = controls_of(toy_manifest((VOICE,)))["voice"]
    assert voice.check({"pcm16": "AAAA\nAAAA\n"})["pcm16"] == bytes(6)
    for wrong in ("AAA", "AA\x0bAA", "AA-_"):
        with pytest.raises(ServeError, match="image is no base64"):
            uploads.data_of(wrong, "image", 9)
    with pytest.raises(ServeError, match="image has more than 3 bytes"):
        uploads.data_of("AAAA\nAAAA\n", "image", 3)


@pytest.mark.parametrize(("seed", "taken"), [("7", 7), ("-3", -3), (7, 7)])
def test_a_seed_is_a_whole_number_or_its_digits(seed: object, taken: int) -> None:
    assert opening_of({"prompt": PROMPT, "seed": seed}, toy_whole.whole_manifest()).seed == taken
    value = f'"{seed}"' if isinstance(seed, str) else seed
    for control in (
        f'{{"type": "seed", "id": "1", "value": {value}}}',
        f'{{"type": "restart", "id": "1", "seed": {value}}}',
    ):
        assert list(parse_control(control).fields.values()) == [taken]


@pytest.mark.parametrize("seed", ["7.0", "", "a", " 7", "\u0667", 7.0, True, None, str(1 << 62), 1 << 62, []])
def test_what_is_no_seed_is_named(seed: object) -> None:
    with pytest.raises(ServeError) as refused:
        opening_of({"prompt": PROMPT, "seed": seed}, toy_whole.whole_manifest())
    assert refused.value.message == f"seed is {seed!r}, expected a whole number within 62 bits"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", 7),
        ("seed", "a"),
        ("fps", 0),
        ("image", "abc"),
        ("last_image", "abc"),
        ("inputs", []),
        ("record", 1),
        ("masks", []),
        ("voice", "abc"),
    ],
)
def test_the_field_that_is_wrong_is_told_to_programs(field: str, value: object) -> None:
    with pytest.raises(ServeError) as refused:
        opening_of({"prompt": PROMPT, field: value}, toy_whole.whole_manifest())
    assert refused.value.field == field


@pytest.mark.parametrize("fps", [0.001, 0, 0.999, 241, float("nan"), "16", True, 10**400])
def test_a_rate_that_nobody_watches_is_named(fps: object) -> None:
    with pytest.raises(ServeError) as refused:
        opening_of({"prompt": PROMPT, "fps": fps}, toy_whole.whole_manifest())
    assert refused.value.message == f"fps is {repr(fps)[:64]}, expected a number from 1 to 240"


@pytest.mark.parametrize("seconds", [1e-9, 0, -1, 61, "1e-9", "-inf", "nan", "soon", True, [], 10**400])
def test_a_time_in_which_no_frame_is_shown_is_named(start: Starter, seconds: object) -> None:
    status, answer = http(f"{start().url}/v1/videos", "POST", {"prompt": PROMPT, "seconds": seconds})
    assert status == 400
    assert answer["error"]["param"] == "seconds"


def test_a_conflict_that_will_pass_says_so(start: Starter) -> None:
    server = start()
    video = http(f"{server.url}/v1/videos", "POST", {"prompt": PROMPT, "seconds": 60})[1]
    status, answer = http(f"{server.url}/v1/videos/{video['id']}/content")
    assert (status, answer["error"]["retryable"], answer["error"]["retry_after"]) == (409, True, 1.0)
    assert ServeError.of_body(answer["error"]).retryable
    assert not ServeError("conflict", "for good").retryable


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["1", "1e999", "{", "[[", "true"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=9), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("fields", [VIDEO_FIELDS, SPEECH_FIELDS, VOICE_FIELDS])
@given(data=st.data())
def test_whatever_a_field_holds_is_taken_or_refused_by_its_name(fields: Fields, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(fields)))
    field, message, values = name, name, dict[str, Any]()
    try:
        values = fields.read({name: data.draw(JSON)}, toy_whole.whole_manifest())
    except ServeError as refused:
        field, message = str(refused.field), refused.message
    assert field == name
    assert name in message
    assert set(values) <= {name}


@given(st.dictionaries(st.sampled_from(sorted({*VIDEO_FIELDS, "extra_body"})), JSON, max_size=4))
def test_whatever_a_request_for_a_video_says_is_read_or_refused(table: dict[str, Any]) -> None:
    manifest = toy_whole.whole_manifest()
    with suppress(ServeError):
        _, frames, _ = video_request(table, manifest)
        assert 1 <= frames <= MAX_SECONDS * manifest.workload.stream.fps
