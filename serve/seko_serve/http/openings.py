"""Parser of the body of ``POST /v1/sessions``, which contains a new session's prompt, seed, picture, voice and
inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime import VideoManifest
from seko_runtime.controls import controls_of
from seko_runtime.errors import UsageError
from seko_runtime.speech.manifest import MAX_GUIDANCE, MAX_TEMPERATURE, SpeechManifest
from seko_runtime.speech.prompts import prompt_tokens
from seko_runtime.speech.texts import checked_text
from seko_runtime.video.contract import begins_with_picture
from seko_serve.errors import MAX_NAME_LETTERS, ServeError, check_fields
from seko_serve.live.content import Opening, SpeechOpening
from seko_serve.live.kinds import Served
from seko_serve.live.video import last_frame_input, picture_place, speakers_of
from seko_serve.media import uploads
from seko_serve.protocol import MAX_PROMPT_LETTERS, whole_seed

LEAST_FPS, MAX_FPS = 1.0, 240.0
LAST_S = 5.0  # default time from the stream's start to its last picture
# Bytes of a body: a picture, and a voice for each of a few speakers, in base64, beside the other fields.
MAX_OPENING_BYTES = (uploads.MAX_PICTURE_BYTES + uploads.MAX_SOUND_BYTES) // 3 * 4 + (1 << 20)
SPEECH_FIELDS = ("model", "seed", "guidance", "temperature", "voice", "voice_text")
FIELDS = (
    "model",
    "prompt",
    "prompts",
    "seed",
    "fps",
    "image",
    "last_image",
    "last_s",
    "voice",
    "inputs",
    "record",
)


def session_opening_of(table: dict[str, Any], manifest: Served) -> Opening | SpeechOpening:
    """Return the conditions of a new session (its opening) from the JSON object of a request. The function decodes
    uploads, so call it in a thread.

    Raises
    ------
    ServeError
        If a field is unknown, of a wrong type, too large, or not supported by this artifact.
    """
    if isinstance(manifest, SpeechManifest):
        return speech_opening_of(table, manifest)
    return opening_of(table, manifest)


def opening_of(table: dict[str, Any], manifest: Served, picture: str = "image") -> Opening:
    """Return the opening of a session of a video artifact from a request; see `session_opening_of`. Messages of errors
    call the field ``image`` by the name ``picture``."""
    if not isinstance(manifest, VideoManifest):
        raise ServeError("unsupported", "this artifact speaks, and makes no video")
    _check_opening(table, FIELDS, manifest.name)
    prompt, seed = _prompt(_first_prompt(table), manifest), whole_seed(table.get("seed", 0), "seed")
    fps = _fps(table.get("fps", manifest.workload.stream.fps), manifest)
    image, of_pictures = _pictures(table, fps, manifest, picture)
    inputs = {**of_pictures, **_inputs(table.get("inputs", {}))}
    record = table.get("record", False)
    if not isinstance(record, bool):
        raise ServeError("bad_request", f"record is of type {type(record).__name__}, expected true or false")
    return Opening(prompt, seed, fps, image, inputs, _voice(table.get("voice"), manifest), record)


def speech_opening_of(
    table: dict[str, Any], manifest: SpeechManifest, sound: str = "voice", words: str = "voice_text"
) -> SpeechOpening:
    """Return the opening of a session of a speech artifact from a request; see `session_opening_of`. Messages of errors
    call the fields ``voice`` and ``voice_text`` by the names ``sound`` and ``words``."""
    _check_opening(table, SPEECH_FIELDS, manifest.name)
    seed, text, voice = (
        whole_seed(table.get("seed", 0), "seed"),
        table.get("voice_text", ""),
        table.get("voice"),
    )
    if seed < 0:
        raise ServeError("bad_request", f"seed is {seed}, expected 0 or more for speech")
    if not isinstance(text, str):
        raise ServeError("bad_request", f"{words} is no text, expected the words that {sound} says")
    if len(text) > MAX_PROMPT_LETTERS:
        raise ServeError(
            "too_large", f"{words} has {len(text)} letters, at most {MAX_PROMPT_LETTERS} are taken"
        )
    try:
        checked_text(text, words)
    except UsageError as error:
        raise ServeError("bad_request", str(error)) from None
    if text and voice is None:
        raise ServeError("bad_request", f"{words} has the words that {sound} says, but {sound} is missing")
    samples = None
    if voice is not None:
        data = uploads.data_of(voice, sound, uploads.MAX_SOUND_BYTES)
        samples = uploads.decoded_sound(
            data, sound, rate=manifest.workload.voice.sample_rate, max_s=_voice_seconds(manifest, bool(text))
        )
    return SpeechOpening(
        seed,
        _between(table.get("guidance"), "guidance", MAX_GUIDANCE),
        _between(table.get("temperature"), "temperature", MAX_TEMPERATURE),
        samples,
        text,
    )


def _voice_seconds(manifest: SpeechManifest, continued: bool) -> float:
    """Return the length in seconds of the longest voice that leaves a session's positions a word and a patch of it.

    Known from the manifest alone, so a voice that no text could follow is refused before it is decoded as a whole.
    """
    spec = manifest.workload.voice
    least = prompt_tokens(1) if continued else prompt_tokens(1, reference=1) - 1
    patches = max(0, manifest.session_positions - least - 1)
    return min(float(uploads.MAX_VOICE_S), patches * spec.patch_samples / spec.sample_rate)


def _check_opening(table: dict[str, Any], fields: Sequence[str], name: str) -> None:
    check_fields(table, fields)
    if table.get("model", name) != name:
        raise ServeError("not_found", f"this server has the model {name}")


def _between(value: object, name: str, most: float) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ServeError("bad_request", f"{name} is no number from 0 to {most:g}")
    return float(value)


def _first_prompt(table: dict[str, Any]) -> object:
    """Return the field ``prompt`` of a request, or the only entry of its field ``prompts``."""
    prompts = table.get("prompts")
    if prompts is None:
        return table.get("prompt")
    if table.get("prompt") is not None:
        raise ServeError("bad_request", "prompt and prompts are given: give one of them")
    if not isinstance(prompts, list) or not prompts:
        raise ServeError("bad_request", "prompts is no list with a text")
    if len(prompts) > 1:
        raise ServeError(
            "unsupported",
            f"prompts has {len(prompts)} texts, and a session begins with one: send each further prompt when it is "
            "due, in a control prompt on the session's socket",
        )
    return prompts[0]


def _prompt(prompt: object, manifest: VideoManifest) -> str | None:
    takes_text = manifest.workload.text is not None
    if not takes_text and prompt is not None:
        raise ServeError(
            "unsupported", "this artifact has no text encoder and takes no prompt: leave prompt out"
        )
    if not takes_text:
        return None
    if not isinstance(prompt, str):
        raise ServeError("bad_request", "prompt is missing or no text, expected a text")
    if len(prompt) > MAX_PROMPT_LETTERS:
        raise ServeError(
            "too_large", f"prompt has {len(prompt)} letters, at most {MAX_PROMPT_LETTERS} are taken"
        )
    return prompt


def _fps(fps: object, manifest: VideoManifest) -> float:
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not LEAST_FPS <= fps <= MAX_FPS:
        found = repr(fps)[:MAX_NAME_LETTERS]
        raise ServeError(
            "bad_request", f"fps is {found}, expected a number from {LEAST_FPS:g} to {MAX_FPS:g}"
        )
    own = manifest.workload.stream.fps
    if fps != own and controls_of(manifest).sounding() is not None:
        raise ServeError("unsupported", f"this artifact's video follows a voice at {own} fps: leave fps out")
    return float(fps)


def _pictures(
    table: dict[str, Any], fps: float, manifest: VideoManifest, picture: str
) -> tuple[NDArray[Any] | None, dict[str, NDArray[Any]]]:
    """Return the pictures of a request as a session takes them, and the session's inputs that follow from them."""
    place, last_frame = picture_place(manifest), last_frame_input(manifest)
    if last_frame is None and (table.get("last_image") is not None or table.get("last_s") is not None):
        raise ServeError(
            "unsupported", "this artifact takes no last picture: leave last_image and last_s out"
        )
    if table.get("image") is None:
        if begins_with_picture(manifest):
            raise ServeError(
                "bad_request", f"{picture} is missing: this artifact's video begins with a picture"
            )
        return None, {}
    if place is None:
        raise ServeError("unsupported", f"this artifact takes no picture: leave {picture} out")
    if last_frame is not None and table.get("last_image") is None:
        raise ServeError(
            "bad_request", "last_image is missing: this artifact's video leads from one picture to another"
        )
    fields = {picture: table["image"]}
    if last_frame is not None:
        fields["last_image"] = table["last_image"]
    pictures = [
        uploads.decoded_picture(uploads.data_of(field, name, uploads.MAX_PICTURE_BYTES), name)
        for name, field in fields.items()
    ]
    event: dict[str, Any] = {"start": pictures[0], "names": {"start": picture, "last": "last_image"}}
    if last_frame is not None:
        event |= {"last": pictures[1], "last_s": table.get("last_s", LAST_S), "fps": fps}
    if place == "reference":
        event = {"reference": pictures[0]}
    (control,) = controls_of(manifest).of_kind("pictures")
    try:
        control.take(event)
    except UsageError as error:
        raise ServeError("bad_request", str(error)) from None
    made = control.opening()
    return made.get("image", made.get("reference")), made["inputs"]


def _inputs(value: object) -> dict[str, NDArray[Any]]:
    if not isinstance(value, dict):
        raise ServeError(
            "bad_request", f"inputs are of type {type(value).__name__}, expected an object of arrays"
        )
    return {str(name): uploads.array_of(array, f"inputs.{name}"[:80]) for name, array in value.items()}


def _voice(value: object, manifest: VideoManifest) -> NDArray[np.float32] | None:
    if value is None:
        return None
    speakers = speakers_of(controls_of(manifest))
    if not speakers:
        raise ServeError("unsupported", "this artifact hears no audio: leave voice out")
    files = value if isinstance(value, list) else [value]
    if len(files) != speakers:
        raise ServeError(
            "bad_request", f"voice holds {len(files)} sounds, expected {speakers}: one a speaker"
        )
    voices = [
        uploads.decoded_sound(uploads.data_of(file, "voice", uploads.MAX_SOUND_BYTES)) for file in files
    ]
    longest = max(len(samples) for samples in voices)
    return np.stack([np.pad(samples, (0, longest - len(samples))) for samples in voices])
