"""What clients of SGLang's realtime video say, in the words of this server: the fields of ``init``, and events; and
the error that they are told."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from seko_runtime import VideoManifest
from seko_serve.errors import MAX_NAME_LETTERS, ServeError, check_fields
from seko_serve.http.fields import (
    A_FLAG,
    A_NUMBER,
    A_TEXT,
    A_WHOLE,
    Field,
    Fields,
    Read,
    anything,
    one_of,
    text,
    whole,
)
from seko_serve.http.schemas import PROMPT, SEED, UPLOAD, Table
from seko_serve.media.downloads import downloaded, is_address
from seko_serve.media.uploads import MAX_PICTURE_BYTES
from seko_serve.protocol import whole_seed
from seko_serve.settings import Settings
from seko_serve.video.facts import described
from seko_serve.video.fields import size_of

MAX_TRANSITIONS = 64  # of keys in one event
LARGEST = (1 << 53) - 1  # whole number of JavaScript
BEST = 100  # quality of a picture
_COMPOSED = (["prompt"], ["camera_actions"], ["prompt", "camera_actions"], ["camera_actions", "prompt"])
MAX_ERROR_BYTES = 255  # SGLang's page reads no longer texts


@dataclass(frozen=True)
class Form:
    """One form in which frames are sent: its name, its media type, the largest number of frames in a message, and the
    usual quality of a picture; None for pixels as they are."""

    name: str
    content_type: str
    frames: int
    quality: int | None = None


FORMS: Mapping[str, Form] = {
    form.name: form
    for form in (
        Form("raw", "application/x-raw-rgb", 16),
        Form("webp", "image/webp", 6, 90),
        Form("jpeg", "image/jpeg", 6, 95),
    )
}

# What SGLang's page sends as long as nobody has changed it there: no wish of anybody.
USUAL: Mapping[str, object] = {
    "size": "832x480",
    "num_frames": 9,
    "num_inference_steps": 4,
    "realtime_causal_sink_size": 9,
    "realtime_causal_kv_cache_num_frames": 18,
}

# The letters of its eight buttons, by the keys that may mean the same here.
BUTTONS: Mapping[str, tuple[str, ...]] = {
    **{letter: (f"Key{letter.upper()}",) for letter in "wasd"},
    "i": ("KeyI", "ArrowUp"),
    "j": ("KeyJ", "ArrowLeft"),
    "k": ("KeyK", "ArrowDown"),
    "l": ("KeyL", "ArrowRight"),
}


def _seed(value: Any, name: str) -> int:
    """Return a seed, which the page sends as a float from 65,536 on."""
    return whole_seed(int(value) if isinstance(value, float) and value.is_integer() else value, name)


def _picture(value: Any, name: str) -> str:
    """Return a picture's base64, data URL or web address, for which its bytes may stand."""
    if isinstance(value, bytes):
        if len(value) > MAX_PICTURE_BYTES:
            raise ServeError(
                "too_large", f"{name} has {len(value)} bytes, at most {MAX_PICTURE_BYTES} are taken"
            )
        return b64encode(value).decode()
    return text(value, name)


def _from_one(most: int, expected: str) -> Read:
    """Return the reader of whole numbers from 1 to ``most``."""

    def read(value: Any, name: str) -> int:
        if not 1 <= (found := whole(value, name)) <= most:
            raise ServeError("bad_request", f"{name} is {found}, expected {expected}")
        return found

    return read


_ARTIFACTS = "the artifact's, or what SGLang's page sends unasked; another value is refused"
_OFF = "off; otherwise refused"
_QUALITY: Table = {"type": "integer", "minimum": 1, "maximum": BEST}

FIELDS = Fields(
    Field("model", "the artifact's name; may be left out", *A_TEXT),
    Field("prompt", "what the video shows; left out where the artifact takes no text", PROMPT, anything),
    Field("seed", "seed of the noise (0)", SEED, _seed),
    Field("fps", "frames shown a second (the artifact's)", *A_NUMBER),
    Field(
        "first_frame",
        "the picture with which the video begins: its bytes, base64, a data URL, or a web address of a host that "
        "`--picture-hosts` names; left out where the artifact takes no picture",
        UPLOAD,
        _picture,
    ),
    Field(
        "max_chunks",
        "chunks after which the stream ends (none)",
        A_WHOLE[0],
        _from_one(LARGEST, "1 or more"),
    ),
    Field(
        "realtime_output_format",
        "`raw` (RGB, the usual one), `webp` or `jpeg`",
        {"enum": [*FORMS]},
        one_of(*FORMS),
    ),
    Field(
        "output_compression",
        "quality of WebP (90) or JPEG (95), 1 to 100",
        _QUALITY,
        _from_one(BEST, "1 to 100"),
    ),
    Field("size", _ARTIFACTS, *A_TEXT, own=size_of),
    Field("num_frames", _ARTIFACTS, *A_WHOLE, own=lambda manifest: manifest.workload.video.chunk_frames),
    Field(
        "num_inference_steps",
        _ARTIFACTS,
        *A_WHOLE,
        own=lambda manifest: manifest.workload.schedule.denoise_passes,
    ),
    Field(
        "realtime_causal_sink_size",
        _ARTIFACTS,
        *A_WHOLE,
        own=lambda manifest: manifest.workload.stream.sink_frames,
    ),
    Field(
        "realtime_causal_kv_cache_num_frames",
        _ARTIFACTS,
        *A_WHOLE,
        own=lambda manifest: manifest.workload.stream.cache_frames,
    ),
    Field("guidance_scale", "1; another number is refused", *A_NUMBER, own=lambda _: 1),
    *(
        Field(name, _OFF, *A_FLAG, own=lambda _: False)
        for name in ("enable_upscaling", "enable_frame_interpolation")
    ),
    *(
        Field(name, "without effect", {}, anything)
        for name in (
            "seconds",
            "realtime_output_pacing",
            "realtime_preview_max_width",
            "upscaling_scale",
            "upscaling_model_path",
            "frame_interpolation_exp",
            "frame_interpolation_scale",
        )
    ),
)


@dataclass(frozen=True)
class Init:
    """The first message of a client.

    Parameters
    ----------
    opening : mapping of str to object
        The fields of a session's opening; see `opening_of`.
    form : Form
        In which form frames are sent.
    quality : int
        Quality of pictures, 1 to 100.
    max_chunks : int or None
        Number of chunks after which the stream ends.
    notes : sequence of str
        What was left out, a sentence each.
    """

    opening: Mapping[str, Any]
    form: Form
    quality: int
    max_chunks: int | None
    notes: tuple[str, ...]


def init_of(table: Mapping[str, Any], manifest: VideoManifest) -> Init:
    """Return what a message says with which a stream is to begin; ServeError if it says nothing valid, or what this
    artifact cannot do."""
    if table.get("type") != "init":
        raise ServeError("bad_request", "the first message has another type, expected init")
    given = {name: value for name, value in table.items() if name != "type" and value is not None}
    notes: list[str] = []
    takes: Any = described(manifest)["takes"]
    for name, takes_it, what in (
        ("prompt", takes["prompt"], "text"),
        ("first_frame", takes["image"] != "no", "picture"),
    ):
        if name in given and not takes_it:
            del given[name]
            notes.append(f"{name} is left out: this artifact takes no {what}")
    for name, usual in USUAL.items():
        own = FIELDS[name].own
        if given.get(name) == usual and own is not None and (has := own(manifest)) != usual:
            del given[name]
            notes.append(f"{name} is {has}, the artifact's")
    values = FIELDS.read(given, manifest)
    form = FORMS[values.get("realtime_output_format", "raw")]
    opening: dict[str, Any] = {
        name: values[name] for name in ("model", "prompt", "seed", "fps") if name in values
    }
    if "first_frame" in values:
        opening["image"] = values["first_frame"]
    quality = values.get("output_compression", form.quality or BEST)
    return Init(opening, form, quality, values.get("max_chunks"), tuple(notes))


def fetched(opening: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return an opening whose picture, where it is a web address, was fetched from there; ServeError if it cannot be
    had, or the operator has not named its host."""
    image = opening.get("image")
    if not is_address(image):
        return dict(opening)
    data = downloaded(str(image), "first_frame", settings.picture_hosts, MAX_PICTURE_BYTES)
    return {**opening, "image": b64encode(data).decode()}


def controls_of(table: Mapping[str, Any], manifest: VideoManifest) -> tuple[int | None, list[dict[str, Any]]]:
    """Return an event's id, and the messages of this server's own socket, without an id, that the event stands for;
    ServeError if it is none that this server knows."""
    check_fields(table, ("type", "kind", "payload", "event_id"), "an event")
    if table.get("type") != "event":
        raise ServeError("bad_request", "a message has another type, expected event")
    event = table.get("event_id")
    number = None if event is None else whole(event, "event_id")
    if number is not None and not 0 <= number <= LARGEST:
        raise ServeError("bad_request", f"event_id is {number}, expected 0 to {LARGEST}")
    return number, _messages(table.get("kind"), table.get("payload"), manifest)


def _messages(kind: object, payload: object, manifest: VideoManifest) -> list[dict[str, Any]]:
    if kind == "prompt":
        return [{"type": "prompt", "text": text(payload, "prompt")}]
    if kind == "camera_actions":
        return [{"type": "keys", "held": held} for held in _held(payload, manifest)]
    if kind == "composite_input":
        named = payload.get("input_types") if isinstance(payload, dict) else None
        if not isinstance(payload, dict) or named not in _COMPOSED:
            raise ServeError(
                "bad_request",
                "composite_input has no input_types, expected a list of prompt and camera_actions",
            )
        return [one for name in named for one in _messages(name, payload.get(name), manifest)]
    found = repr(kind)[:MAX_NAME_LETTERS]
    raise ServeError(
        "unsupported", f"an event is {found}, expected prompt, camera_actions or composite_input"
    )


def _held(payload: object, manifest: VideoManifest) -> list[list[str]]:
    """Return the keys that are held after each transition of an event, by `KeyboardEvent.code`."""
    transitions = payload.get("transitions") if isinstance(payload, dict) else None
    if not isinstance(payload, dict) or payload.get("mode") != "state" or not isinstance(transitions, list):
        raise ServeError("unsupported", "camera_actions is no object with mode state and a list transitions")
    if len(transitions) > MAX_TRANSITIONS:
        raise ServeError(
            "too_large",
            f"camera_actions has {len(transitions)} transitions, at most {MAX_TRANSITIONS} are taken",
        )
    codes = _codes(manifest)
    return [_pressed(transition, codes) for transition in transitions]


def _pressed(transition: object, codes: Collection[str]) -> list[str]:
    """Return those of an artifact's keys that the buttons of a transition stand for; buttons that stand for none of
    them steer nothing, like other keys of a keyboard."""
    buttons = transition.get("actions") if isinstance(transition, dict) else None
    if not isinstance(buttons, list) or any(button not in [*BUTTONS] for button in buttons):
        raise ServeError(
            "bad_request", f"a transition has no list actions, expected letters {', '.join(BUTTONS)}"
        )
    meant = (next((code for code in BUTTONS[button] if code in codes), "") for button in buttons)
    return [code for code in dict.fromkeys(meant) if code]


def _codes(manifest: VideoManifest) -> set[str]:
    """Return the keys that steer the artifact."""
    controls: Any = described(manifest)["controls"]
    return {code for control in controls.values() for key in control.get("keys", ()) for code in key["codes"]}


def error_message(text: str) -> bytes:
    """Return the message of an error, in msgpack: a map with ``type`` and ``content``. It is packed without the
    library, whose absence it may have to tell, and of the text there are at most `MAX_ERROR_BYTES`."""
    content = text.encode()
    if len(content) > MAX_ERROR_BYTES:
        content = content[: MAX_ERROR_BYTES - 3].decode(errors="ignore").encode() + b"..."
    return b"\x82\xa4type\xa5error\xa7content\xd9" + bytes([len(content)]) + content
