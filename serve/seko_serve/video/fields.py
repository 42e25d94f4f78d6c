"""The fields of ``POST /v1/videos``, as OpenAI's clients and those of other servers send them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seko_runtime import VideoManifest
from seko_serve.errors import ServeError
from seko_serve.http.fields import A_NUMBER, A_TEXT, A_WHOLE, Field, Fields, anything, structure
from seko_serve.http.schemas import PROMPT, SEED, TEXT, UPLOAD, WHOLE, Table, object_of
from seko_serve.protocol import whole_seed

DEFAULT_SECONDS, MAX_SECONDS = 4, 60.0
PICTURES = ("input_reference", "image", "image_reference")  # names of the same picture
EXTRA = "extra_body"  # an object with further fields, as some clients send them in a form
REFERENCE: Table = {"anyOf": [UPLOAD, object_of({"image_url": UPLOAD})]}
INPUTS: Table = {
    "type": "object",
    "additionalProperties": object_of(
        {"dtype": TEXT, "shape": {"type": "array", "items": WHOLE}, "data": UPLOAD}
    ),
}
VOICE: Table = {"anyOf": [UPLOAD, {"type": "array", "items": UPLOAD}]}


def _video(manifest: VideoManifest) -> Any:
    return manifest.workload.video


def size_of(manifest: VideoManifest) -> str:
    """Return the size of an artifact's video, such as ``832x480``."""
    return f"{_video(manifest).width}x{_video(manifest).height}"


def _one(_: VideoManifest) -> int:
    return 1


def _picture(value: Any, name: str) -> Any:
    """Return a picture's base64, data URL or web address, which may stand in an object as ``image_url``."""
    value = structure(value, name)
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if isinstance(value, dict) and set(value) == {"image_url"}:
        value = value["image_url"]
    if isinstance(value, dict) and "file_id" in value:
        raise ServeError(
            "unsupported", f"{name} names a file_id, and this server keeps no files: send the picture"
        )
    return value


_ARTIFACTS = "the artifact's; another value is refused"
_BEGINS = (
    "the picture with which the video begins: a file of the form, base64, a data URL, or "
    '`{"image_url": DATA_URL}`; a web address only of a host that `--picture-hosts` names'
)

FIELDS = Fields(
    Field("model", "the artifact's name; may be left out", *A_TEXT),
    Field("prompt", "what the video shows", PROMPT, anything),
    Field("seconds", f"length of the video ({DEFAULT_SECONDS}; at most {MAX_SECONDS:g})", *A_NUMBER),
    Field("num_frames", "its number of frames, instead of `seconds`", *A_WHOLE),
    Field("seed", "seed of the noise (0)", SEED, whole_seed),
    *(Field(name, _BEGINS, REFERENCE, _picture) for name in PICTURES),
    Field("last_image", "the picture with which it ends", REFERENCE, _picture),
    Field(
        "voice", "the sound that it follows: a file, or a list with one for each speaker", VOICE, structure
    ),
    Field("inputs", "further inputs of the model, by name", INPUTS, structure),
    Field("size", _ARTIFACTS, *A_TEXT, own=size_of),
    Field("width", _ARTIFACTS, *A_WHOLE, own=lambda manifest: _video(manifest).width),
    Field("height", _ARTIFACTS, *A_WHOLE, own=lambda manifest: _video(manifest).height),
    Field("fps", _ARTIFACTS, *A_NUMBER, own=lambda manifest: manifest.workload.stream.fps),
    Field(
        "num_inference_steps",
        _ARTIFACTS,
        *A_WHOLE,
        own=lambda manifest: manifest.workload.schedule.denoise_passes,
    ),
    Field("n", "1; another number is refused", *A_WHOLE, own=_one),
    Field("num_outputs_per_prompt", "1; another number is refused", *A_WHOLE, own=_one),
)


def video_request(table: Mapping[str, Any], manifest: VideoManifest) -> tuple[dict[str, Any], int, str]:
    """Return what a request says of a video: the fields of its opening, its number of frames, and the name by which
    the client calls the first picture; ServeError if the artifact cannot make the video."""
    extra = structure(table.get(EXTRA), EXTRA) or {}
    if not isinstance(extra, dict):
        raise ServeError("bad_request", f"{EXTRA} is no object with fields", field=EXTRA)
    values = FIELDS.read(
        {name: value for name, value in {**table, **extra}.items() if name != EXTRA}, manifest
    )
    named = [name for name in PICTURES if name in values] or ["input_reference"]
    if len(named) > 1:
        raise ServeError("bad_request", f"{' and '.join(named)} are the same picture: give one of them")
    if named[0] in values:
        values["image"] = values.pop(named[0])
    frames = _frames(
        values.pop("seconds", None), values.pop("num_frames", None), manifest.workload.stream.fps
    )
    return values, frames, named[0]


def _frames(seconds: float | None, frames: int | None, fps: int) -> int:
    """Return the number of video frames of a request, which gives a duration, a number of frames, or neither."""
    if frames is not None and not 1 <= frames <= MAX_SECONDS * fps:
        raise ServeError(
            "bad_request",
            f"num_frames is {frames}, expected a whole number from 1 to {MAX_SECONDS * fps:g}",
            field="num_frames",
        )
    if seconds is None:
        return frames or round(DEFAULT_SECONDS * fps)
    if not (0 < seconds <= MAX_SECONDS and round(seconds * fps) >= 1):
        raise ServeError(
            "bad_request",
            f"seconds is {seconds:g}, expected a number from {1 / fps:g}, the time of one frame, to {MAX_SECONDS:g}",
            field="seconds",
        )
    if frames not in (None, round(seconds * fps)):
        raise ServeError(
            "bad_request",
            f"seconds is {seconds:g}, which is {round(seconds * fps)} frames, and num_frames is {frames}: give one of "
            "them",
            field="num_frames",
        )
    return round(seconds * fps)
