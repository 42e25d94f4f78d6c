"""The OpenAPI document: valid, of every route, and true of the answers."""

from __future__ import annotations

import json
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from starlette.routing import Route, WebSocketRoute

from seko_serve.http.app import Application
from seko_serve.http.openapi import document
from seko_serve.live.device import Device
from seko_serve.live.manager import SessionManager
from seko_serve.settings import Settings
from seko_serve.speech import opening as speech_opening
from seko_serve.speech.fields import FIELDS as SPEECH_FIELDS
from seko_serve.speech.fields import VOICE_FIELDS
from seko_serve.video import opening as video_opening
from seko_serve.video.fields import FIELDS as VIDEO_FIELDS
from seko_serve.video.realtime_messages import FIELDS as REALTIME_FIELDS

from .bounded import until
from .conftest import Starter, toy_opener
from .test_server import PROMPT, http

DOCUMENT = document()


def check(answer: object, schema: str) -> None:
    table = {"$ref": f"#/components/schemas/{schema}", "components": DOCUMENT["components"]}
    Draft202012Validator(table).validate(answer)


def check_answer(url: str, path: str, status: int, headers: dict[str, str]) -> None:
    """Check that a GET request is answered with a status and a type that the document names."""
    try:
        with urlopen(Request(url, headers=headers), timeout=20) as answer:
            given, kind, body = answer.status, answer.headers.get_content_type(), answer.read()
    except HTTPError as refused:
        given, kind, body = refused.code, refused.headers.get_content_type(), refused.read()
    assert given == status
    content = DOCUMENT["paths"][path]["get"]["responses"][str(status)]["content"]
    assert kind in content
    if kind == "application/json":
        Draft202012Validator({**content[kind]["schema"], "components": DOCUMENT["components"]}).validate(
            json.loads(body)
        )


def test_it_is_valid_openapi() -> None:
    validate(DOCUMENT)


def test_it_has_every_route_and_no_other(tmp_path: Any) -> None:
    settings = Settings(tmp_path)
    application = Application(settings, SessionManager(settings, Device(toy_opener)))
    routed = set()
    for family in application._families:
        for route in family.routes():
            assert isinstance(route, Route | WebSocketRoute)
            methods = (route.methods or set()) - {"HEAD"} if isinstance(route, Route) else {"GET"}
            routed |= {(route.path, method.lower()) for method in methods}
    documented = {
        (path, name) for path, item in DOCUMENT["paths"].items() for name in item if name != "parameters"
    }
    assert documented == routed


@pytest.mark.parametrize(
    ("schema", "fields"),
    [
        ("SessionRequest", {*video_opening.FIELDS, *speech_opening.FIELDS}),
        ("VideoRequest", {*VIDEO_FIELDS}),
        ("RealtimeInit", {*REALTIME_FIELDS}),
        ("SpeechRequest", {*SPEECH_FIELDS}),
        ("VoiceRequest", {*VOICE_FIELDS}),
    ],
)
def test_requests_have_the_fields_that_are_taken(schema: str, fields: set[str]) -> None:
    assert set(DOCUMENT["components"]["schemas"][schema]["properties"]) == set(fields)


@pytest.mark.parametrize(
    ("schema", "table"),
    [
        ("VideoRequest", {"prompt": "a", "seconds": "2", "fps": "16", "seed": None, "model": None}),
        (
            "VideoRequest",
            {"prompt": "a", "num_frames": 8, "input_reference": {"image_url": "data:,"}, "n": 1},
        ),
        (
            "SpeechRequest",
            {"input": "a", "voice": {"id": "voice_1"}, "speed": 1.0, "stream": True, "ref_text": None},
        ),
        ("VoiceRequest", {"name": "a", "audio_sample": "AAAA", "consent": "cons_1"}),
    ],
)
def test_requests_may_be_as_clients_send_them(schema: str, table: dict[str, object]) -> None:
    check(table, schema)


def test_answers_are_as_it_says(start: Starter) -> None:
    server = start()
    url = server.url
    for path, schema in (
        ("/health", "Health"),
        ("/ready", "Ready"),
        ("/version", "Version"),
        ("/v1/models", "Models"),
        ("/v1/model_info", "ModelInfo"),
    ):
        check(http(url + path)[1], schema)
    (model,) = http(f"{url}/v1/models")[1]["data"]
    assert http(f"{url}/v1/models/{model['id']}")[1] == model
    check(model, "Model")
    status, opened = http(f"{url}/v1/sessions", "POST", {"prompt": PROMPT})
    assert str(status) in DOCUMENT["paths"]["/v1/sessions"]["post"]["responses"]
    check(opened, "OpenedSession")
    check(http(f"{url}/v1/sessions")[1], "Sessions")
    check(http(f"{url}/v1/sessions/{opened['id']}", "PATCH", {"paused": True})[1], "Session")
    for path, method in (
        ("/v1/sessions/x", "GET"),
        ("/v1/sessions", "PUT"),
        ("/v1/models/x", "GET"),
        ("/v1/videos/x", "DELETE"),
        ("/v1/videos/x/remix", "POST"),
        ("/v1/videos/edits", "POST"),
        ("/x", "GET"),
    ):
        check(http(url + path, method)[1], "Error")
    video = http(f"{url}/v1/videos", "POST", {"prompt": PROMPT, "seconds": 0.1})[1]
    check(video, "Video")
    check(http(f"{url}/v1/videos")[1], "Videos")
    until(lambda: http(f"{url}/v1/videos/{video['id']}")[1]["status"] == "completed")
    path = "/v1/videos/{name}/content"
    for parts, status in (
        ("bytes=0-9", 206),
        ("bytes=0-1,5-6", 206),
        ("bytes=99999999-", 416),
        ("letters=1", 400),
    ):
        check_answer(f"{url}/v1/videos/{video['id']}/content", path, status, {"range": parts})
    check(http(f"{url}/v1/videos/{video['id']}", "DELETE")[1], "RemovedVideo")
    path = "/v1/sessions/{name}/stream"
    check_answer(f"{url}/v1/sessions/{opened['id']}/stream", path, 400, {})
    for path, item in DOCUMENT["paths"].items():
        if "get" in item:
            check_answer(url + path.replace("{name}", "x"), path, 403, {"host": "evil.example"})
    while (answer := http(f"{url}/v1/sessions", "POST", {"prompt": PROMPT}, queue="join"))[0] == 201:
        pass
    check(answer[1], "Error")
    place = http(f"{url}/v1/queue", queue=answer[1]["error"]["queue_token"])[1]
    check(place, "Place")
    assert set(DOCUMENT["components"]["schemas"]["Place"]["properties"]) == set(place)
    served = http(f"{url}/openapi.json")[1]
    assert served == DOCUMENT
