"""The conditions with which a video session begins, and their parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime import VideoManifest
from seko_runtime.controls import Controls, controls_of
from seko_runtime.controls.pictures import LAST_S
from seko_runtime.controls.recording import of_json
from seko_runtime.errors import UsageError
from seko_serve.errors import MAX_NAME_LETTERS, ServeError, of_field
from seko_serve.http.openings import check_opening
from seko_serve.media import uploads
from seko_serve.protocol import MAX_PROMPT_LETTERS, whole_seed
from seko_serve.video.facts import asked_pictures, speakers_of

LEAST_FPS, MAX_FPS = 1.0, 240.0
FIELDS = (
    "model",
    "prompt",
    "prompts",
    "seed",
    "fps",
    "image",
    "last_image",
    "last_s",
    "masks",
    "voice",
    "inputs",
    "record",
)


@dataclass(frozen=True)
class Opening:
    """The conditions with which a video session begins, checked.

    Parameters
    ----------
    prompt : str or None
        The prompt, a sentence.
    seed : int
        Seed of the random noise.
    fps : float
        Number of video frames that the viewer shows in a second.
    pictures : mapping of str to object, optional
        The pictures with which the stream begins, as the state of the control of pictures. A session that goes on has
        them in the state of its own controls.
    inputs : mapping of str to numpy.ndarray
        Further model inputs that the caller supplies for the session, by name.
    masks : sequence of numpy.ndarray, optional
        For each of several speakers a picture uint8 [rows, columns, 3], bright where the speaker is. A session that
        goes on has them in the state of its own controls.
    voice : numpy.ndarray, optional
        The voice from the stream's start on: samples [speakers, N] at 16 kHz, float32 in -1..1.
    record : bool
        Whether what happens to the session is recorded, until it ends or goes on in another process.
    """

    prompt: str | None
    seed: int
    fps: float
    pictures: Mapping[str, Any] | None = None
    inputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    masks: Sequence[NDArray[np.uint8]] | None = None
    voice: NDArray[np.float32] | None = None
    record: bool = False

    def state(self) -> dict[str, Any]:
        """Return all conditions except the prompt, with their arrays; the state of the session's row holds the
        prompt."""
        return {
            "seed": self.seed,
            "fps": self.fps,
            "inputs": dict(self.inputs),
            "voice": self.voice,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Opening:
        """Return the conditions from a value that `state` returned; KeyError, TypeError, ValueError or the runtime's
        UsageError if the value is invalid.
        """
        return cls(
            None,
            int(state["seed"]),
            float(state["fps"]),
            inputs=of_json(state["inputs"]),
            voice=of_json(state["voice"]),
        )


def blank_opening(manifest: VideoManifest) -> Opening:
    """Return an opening with seed 0 and a word for a prompt, whose pictures and masks are black where the artifact
    takes them."""
    stream, controls = manifest.workload.stream, controls_of(manifest)
    black = np.zeros((stream.height, stream.width, 3), np.uint8)
    asked, masks = asked_pictures(controls), controls.taking("masks")
    last = {"last": black, "last_frame": 0} if "last_image" in asked else {}
    return Opening(
        None if manifest.workload.text is None else "a",
        0,
        float(stream.fps),
        pictures=_taken(controls, black, last) if "image" in asked else None,
        masks=None if masks is None else [black] * masks.describe()["speakers"],
    )


def opening_of(table: dict[str, Any], manifest: VideoManifest, picture: str = "image") -> Opening:
    """Return the opening of a session of a video artifact from a request; see
    `ServedWorkload.opening_of`. Messages of errors call the field ``image`` by the name ``picture``."""
    check_opening(table, FIELDS, manifest.name)
    with of_field("prompts" if table.get("prompts") is not None else "prompt"):
        prompt = _prompt(_first_prompt(table), manifest)
    with of_field("seed"):
        seed = whole_seed(table.get("seed", 0), "seed")
    with of_field("fps"):
        fps = _fps(table.get("fps", manifest.workload.stream.fps), manifest)
    with of_field(picture):
        pictures = _pictures(table, fps, manifest, picture)
    with of_field("inputs"):
        inputs = _inputs(table.get("inputs", {}))
    record = table.get("record", False)
    if not isinstance(record, bool):
        raise ServeError(
            "bad_request",
            f"record is of type {type(record).__name__}, expected true or false",
            field="record",
        )
    with of_field("masks"):
        masks = _masks(table.get("masks"), manifest)
    with of_field("voice"):
        voice = _voice(table.get("voice"), manifest)
    return Opening(prompt, seed, fps, pictures, inputs, masks, voice, record)


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
            "unsupported",
            "this artifact has no text encoder and takes no prompt: leave prompt out",
            field="prompt",
        )
    if not takes_text:
        return None
    if not isinstance(prompt, str):
        raise ServeError("bad_request", "prompt is missing or no text, expected a text", field="prompt")
    if len(prompt) > MAX_PROMPT_LETTERS:
        raise ServeError(
            "too_large",
            f"prompt has {len(prompt)} letters, at most {MAX_PROMPT_LETTERS} are taken",
            field="prompt",
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
) -> dict[str, Any] | None:
    """Return the pictures of a request, as the state of the control of pictures; None without any."""
    controls = controls_of(manifest)
    asked = asked_pictures(controls)
    if "last_image" not in asked and (table.get("last_image") is not None or table.get("last_s") is not None):
        raise ServeError(
            "unsupported",
            "this artifact takes no last picture: leave last_image and last_s out",
            field="last_image",
        )
    if table.get("image") is None:
        if asked.get("image"):
            raise ServeError(
                "bad_request", f"{picture} is missing: this artifact's video begins with a picture"
            )
        return None
    if "image" not in asked:
        raise ServeError("unsupported", f"this artifact takes no picture: leave {picture} out")
    if "last_image" in asked and table.get("last_image") is None:
        raise ServeError(
            "bad_request",
            "last_image is missing: this artifact's video leads from one picture to another",
            field="last_image",
        )
    fields = {picture: table["image"]}
    if "last_image" in asked:
        fields["last_image"] = table["last_image"]
    decoded = []
    for name, value in fields.items():
        with of_field(name):
            data = uploads.data_of(value, name, uploads.MAX_PICTURE_BYTES)
            decoded.append(uploads.decoded_picture(data, name))
    first, *last = decoded
    more = {"last": last[0], "last_s": table.get("last_s", LAST_S), "fps": fps} if last else {}
    try:
        return _taken(controls, first, {**more, "names": {"start": picture, "last": "last_image"}})
    except UsageError as error:
        raise ServeError("bad_request", str(error)) from None


def _taken(controls: Controls, picture: NDArray[Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the control of pictures after it has taken one: a reference picture where it takes these,
    otherwise the picture to begin with, with ``more`` of its event."""
    (control,) = controls.of_kind("pictures")
    references = "reference" in control.describe()["events"]
    control.take({"reference": picture} if references else {"start": picture, **more})
    return control.state()


def _inputs(value: object) -> dict[str, NDArray[Any]]:
    if not isinstance(value, dict):
        raise ServeError(
            "bad_request", f"inputs are of type {type(value).__name__}, expected an object of arrays"
        )
    return {str(name): uploads.array_of(array, f"inputs.{name}"[:80]) for name, array in value.items()}


def _masks(value: object, manifest: VideoManifest) -> list[NDArray[np.uint8]] | None:
    if value is None:
        return None
    steered = controls_of(manifest).taking("masks")
    if steered is None:
        raise ServeError("unsupported", "this artifact takes no masks: leave masks out")
    speakers = steered.describe()["speakers"]
    if not isinstance(value, list) or len(value) != speakers:
        raise ServeError("bad_request", f"masks is no list of {speakers} pictures, one a speaker")
    masks = [
        uploads.decoded_picture(uploads.data_of(picture, "masks", uploads.MAX_PICTURE_BYTES), "masks")
        for picture in value
    ]
    try:
        steered.check({"masks": masks})
    except UsageError as error:
        raise ServeError("bad_request", str(error)) from None
    return masks


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
