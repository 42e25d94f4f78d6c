"""The control ``pictures``: the picture with which a session begins, the one that it leads to, and reference
pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import as_array, mapping_of, real_number, whole_number
from seko_runtime.controls.base import MEDIA, Control, ControlOption, Event, one_of, parameters_of
from seko_runtime.controls.fitting import PICTURE_SCHEMA, cover_pictures, fit_levels, fit_pictures
from seko_runtime.controls.recording import of_json
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import ControlSpec, InputSpec
from seko_runtime.format.records import Within
from seko_runtime.media_files.arrays import load_array
from seko_runtime.media_files.pictures import load_image

NO_ENCODER = (
    "this artifact encodes no pictures; rebuild it with a VAE that does (--vae, or --vae-encoder beside a tiny "
    "decoder), or give latents"
)
CONDITION_KIND = "picture_condition"  # kind of the input per session that is made of the picture
LAST_FRAME_KIND = (
    "last_frame"  # kind of the input that numbers the latent frame of the last picture; 0 for none
)
SEEN_KIND = "squashed_pictures"  # kind of the input with the pictures for an image encoder
FEATURES_KIND = "picture_features"  # kind of the input with what the caller's image encoder makes of them
MADE_OF_PICTURE = (CONDITION_KIND, SEEN_KIND)  # kinds that an artifact makes of the first picture
OF_PICTURE = (*MADE_OF_PICTURE, FEATURES_KIND)  # kinds that say what the first picture shows
PORTRAIT_KIND = "portrait"  # kind of the input that defaults to the first reference picture
WORDS = {
    "condition": CONDITION_KIND,
    "last_frame": LAST_FRAME_KIND,
    "seen": SEEN_KIND,
    "portrait": PORTRAIT_KIND,
}
TOKEN_SIDE = 16  # pixels of the video
LAST_S, MAX_LAST_S = 5.0, 600.0  # default and largest time from the stream's start to its last picture
_AXES = 3  # axes of a picture: rows, columns, channels
_MOST = 1 << 16  # pixels, frames, frames a second
_SIDE = Annotated[int, Within(1, _MOST)]


@dataclass(frozen=True)
class PicturesParameters:
    """The parameters of pictures in the manifest.

    Parameters
    ----------
    height, width : int
        Size of the encoder's pictures in pixels.
    chunk_frames, per_latent, lacking, fps : int
        Latent frames of a chunk; video frames of a latent frame, and how many of them the first one lacks; video frames
        a second.
    start, last : bool
        Whether a session takes a picture to begin with, and one that it leads to.
    levels : bool
        Whether the picture becomes a condition of the model, and is resized as levels; otherwise it is the first frame.
    averaged : bool
        Whether levels are resized by a triangle filter, which averages, and cropped to the last pixel; otherwise by
        cubic convolution, and stretched if a crop would cut off less than a token.
    seen_fitted : bool
        Whether an image encoder sees the picture after it got the video's size; otherwise the whole picture.
    reference_frames : int
        Largest number of reference pictures.
    portrait : bool
        Whether the picture to begin with is the reference picture.
    """

    height: _SIDE
    width: _SIDE
    chunk_frames: _SIDE
    per_latent: _SIDE
    lacking: Annotated[int, Within(0, _MOST)]
    fps: _SIDE
    start: bool = False
    last: bool = False
    levels: bool = False
    averaged: bool = False
    seen_fitted: bool = False
    reference_frames: Annotated[int, Within(0, _MOST)] = 0
    portrait: bool = False


class PicturesControl(Control):
    """Pictures, which a session takes with its beginning; each is cropped and resized as the model's authors do.

    Attributes
    ----------
    notes : list of (str, str)
        What each picture is called, and how it was cropped and resized.
    """

    kind = "pictures"
    options: ClassVar = (
        ControlOption(
            "--image",
            "FILE",
            "start with a picture, or the portrait that speaks: .npy uint8; with PyAV also .png",
            MEDIA,
            file=True,
        ),
        ControlOption(
            "--last-image",
            "FILE",
            "with --image, for models that take one: the picture with which the last chunk ends",
            MEDIA,
            file=True,
        ),
        ControlOption(
            "--reference",
            "FILE",
            "reference frames: pictures as --image takes them, or .npy float32 latents",
            MEDIA,
            file=True,
        ),
    )

    def __init__(self, spec: ControlSpec, inputs: Mapping[str, InputSpec]) -> None:
        super().__init__(spec, inputs)
        self.takes = parameters_of(PicturesParameters, spec)
        self._arguments: dict[str, Any] = {}  # of `open_session`: image, reference
        self._inputs: dict[str, Any] = {}  # by their words
        self._last_frame_given = False
        self._portrait = ""  # the event that brought the portrait

    def describe(self) -> dict[str, Any]:
        """Return the events with their schemas, and the ``pictures`` that a page asks for: the field of a request that
        opens a session, words for people, whether a session needs it, and when the last one is shown."""
        start: dict[str, Any] = {"start": PICTURE_SCHEMA}
        if self.takes.last:
            start |= {"last": PICTURE_SCHEMA, "last_s": {"type": "number", "maximum": MAX_LAST_S}}
        events: dict[str, Any] = {"start": start} if self.takes.start or self.takes.portrait else {}
        if self.takes.reference_frames:
            events["reference"] = {"reference": PICTURE_SCHEMA}
        return {
            "events": events,
            "pictures": self._asked_for(),
            "size": [self.takes.height, self.takes.width],
        }

    def _asked_for(self) -> list[dict[str, Any]]:
        if not self.takes.start:
            return []
        condition = self.inputs.get("condition")
        required = self.takes.reference_frames > 0 or (
            condition is not None and condition.default == "required"
        )
        label = (
            "Portrait"
            if self.takes.portrait
            else "Reference picture"
            if self.takes.reference_frames
            else "Picture to begin with"
        )
        asked: list[dict[str, Any]] = [{"field": "image", "label": label, "required": required}]
        if self.takes.last:
            shown_at = {
                "field": "last_s",
                "label": "Seconds from the first picture to the last",
                "default": LAST_S,
                "maximum": MAX_LAST_S,
            }
            asked.append(
                {"field": "last_image", "label": "Last picture", "required": required, "seconds": shown_at}
            )
        return asked

    def check(self, event: Event) -> Event:
        """Return an event with checked values.

        Parameters
        ----------
        event : mapping
            One of the following; pictures are uint8 [rows, columns, 3] of any size. ``names`` says what messages call
            each picture.

            ``start``: the picture to begin with; for a model that takes it, ``last``: the picture that the stream leads
            to, and the time from the stream's start to it: ``last_frame``, a latent frame, or ``last_s`` seconds at
            ``fps`` video frames a second, by default the model's.

            ``reference``: the reference pictures, [R, rows, columns, 3] or one, or their latents, float32.
        """
        known = {"start": ("last", "last_frame", "last_s", "fps", "names"), "reference": ("names",)}
        _, values = one_of(event, known, "pictures")
        self._made(values)
        return values

    def _apply(self, event: Event) -> None:
        arguments, inputs, notes = self._made(event)
        word = "reference" if "reference" in event else "start"
        if self.takes.portrait and self._portrait not in ("", word):
            raise UsageError("--image and --reference are both the portrait of a model that speaks; give one")
        self._portrait = word
        self._arguments |= arguments
        if "start" in event:
            self._inputs, self._last_frame_given = inputs, "last_frame" in inputs
        self.notes += notes

    def _made(self, event: Event) -> tuple[dict[str, Any], dict[str, Any], list[tuple[str, str]]]:
        """Return the arguments of `open_session`, the inputs by their words, and the notes that an event makes."""
        names = {
            "start": "image",
            "last": "last_image",
            "reference": "reference",
            **mapping_of(event.get("names"), "names"),
        }
        if "reference" in event or self.takes.portrait:
            which = "reference" if "reference" in event else "start"
            return self._reference(event[which], str(names[which]))
        if not self.takes.start:
            raise UsageError(NO_ENCODER)
        if event["start"] is None:
            raise UsageError(f"{names['start']} is None, expected uint8 [rows, columns, 3]")
        given = {word: event[word] for word in ("start", "last") if event.get(word) is not None}
        if "last" in given and not self.takes.last:
            raise UsageError(f"{names['last']}: this artifact's model takes no last picture; leave it out")
        if self.takes.last and "last" not in given:
            raise UsageError(
                f"{names['start']}: this artifact's model takes a last picture, too; give --last-image"
            )
        pictures = {word: _checked(picture, str(names[word])) for word, picture in given.items()}
        fitted = {word: self._fitted(picture) for word, picture in pictures.items()}
        notes = [(str(names[word]), words) for word, (_, words) in fitted.items() if words]
        arrays = [array for array, _ in fitted.values()]
        inputs: dict[str, Any] = {}
        if "seen" in self.inputs:
            seen = arrays if self.takes.seen_fitted else [*pictures.values()]
            inputs["seen"] = squashed(self.inputs["seen"], seen)
        if (frame := self._last_frame(event)) is not None:
            inputs["last_frame"] = np.array([frame], np.int64)
        if len(arrays) == 1:
            return {"image": arrays[0]}, inputs, notes
        first, last = (array.shape for array in arrays)
        if first != last:
            raise UsageError(
                f"{names['start']} is {[*first]} and {names['last']} is {[*last]} in the encoder's size, expected as "
                "many pictures of each"
            )
        same = np.uint8 if all(array.dtype == np.uint8 for array in arrays) else np.float32
        return {"image": np.stack([array.astype(same) for array in arrays], axis=-1 - _AXES)}, inputs, notes

    def _fitted(self, picture: NDArray[np.uint8]) -> tuple[NDArray[Any], str]:
        """Return a picture in the encoder's size, and how it was cropped and resized: for a model with a condition as
        `PicturesParameters` says, by Lanczos' filter for others."""
        size = self.takes.height, self.takes.width
        if self.takes.levels and self.takes.averaged:
            return fit_levels(picture, *size)
        if self.takes.levels:
            return fit_levels(picture, *size, bicubic=True, stretch=TOKEN_SIDE)
        return cover_pictures(picture, *size)

    def _reference(
        self, pictures: object, name: str
    ) -> tuple[dict[str, Any], dict[str, Any], list[tuple[str, str]]]:
        array = as_array(pictures, name)
        if not self.takes.reference_frames:
            raise UsageError("this artifact has no reference frames; rebuild it with --reference-frames N")
        if array.dtype != np.uint8:
            return {"reference": array}, {}, []
        fitted, words = fit_pictures(_checked(array, name), self.takes.height, self.takes.width)
        return {"reference": fitted}, {}, [(name, words)] if words else []

    def _last_frame(self, event: Event) -> int | None:
        if event.get("last_frame") is not None:
            return whole_number(event["last_frame"], "last_frame", 0, 1 << 40)
        if event.get("last_s") is None:
            return None
        expected = f"a number above 0 and at most {MAX_LAST_S:g}"
        seconds = real_number(event["last_s"], "last_s", expected)
        if not 0 < seconds <= MAX_LAST_S:
            raise UsageError(f"last_s is {seconds:g}, expected {expected}")
        fps = real_number(event.get("fps", self.takes.fps), "fps", most=_MOST)
        frame = (max(1, round(seconds * fps)) - 1 + self.takes.lacking) // self.takes.per_latent
        if frame < 1:
            raise UsageError("last_s is so early that the first picture is still shown")
        return frame

    @property
    def active(self) -> bool:
        """Whether pictures have come."""
        return bool(self._arguments)

    @property
    def input_names(self) -> set[str]:
        """Names of the inputs that follow from the pictures that have come."""
        pictures = self._arguments.get("reference")
        words = {"condition", "seen", "last_frame"} if "image" in self._arguments else set()
        words |= {"portrait", "seen"} if pictures is not None and pictures.dtype == np.uint8 else set()
        return {spec.name for word, spec in self.inputs.items() if word in words}

    def check_lasts(self, chunks: int) -> None:
        """Let the last picture, if no time was said, be that of the last of so many chunks."""
        if self.takes.last and self.active and not self._last_frame_given:
            self._inputs["last_frame"] = np.array([chunks * self.takes.chunk_frames - 1], np.int64)

    def opening(self) -> dict[str, Any]:
        """Return the pictures as `open_session` takes them, and the inputs that are made of them."""
        inputs = {
            self.inputs[word].name: array for word, array in self._inputs.items() if word in self.inputs
        }
        return {**self._arguments, "inputs": inputs}

    def reset(self) -> None:
        """Keep the pictures, with which a stream begins again."""

    def state(self) -> dict[str, Any]:
        """Return the pictures for `load`."""
        return {
            "arguments": dict(self._arguments),
            "inputs": dict(self._inputs),
            "last": self._last_frame_given,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned; UsageError for any other value."""
        try:
            arguments = {str(name): np.asarray(array) for name, array in of_json(state["arguments"]).items()}
            inputs = {str(word): np.asarray(array) for word, array in of_json(state["inputs"]).items()}
            if set(arguments) - {"image", "reference"} or set(inputs) - set(WORDS):
                raise ValueError(f"found {sorted({*arguments, *inputs})[:4]}")
            last = bool(state["last"])
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, UsageError) as fault:
            raise UsageError(f"this is no state of pictures: {fault}; take what state() gave") from None
        self._arguments, self._inputs, self._last_frame_given = arguments, inputs, last

    @classmethod
    def events_of(cls, given: Mapping[str, Any]) -> list[Event]:
        """Return the events of ``--image``, ``--last-image`` and ``--reference``."""
        image, last, reference = (given.get(name) for name in ("--image", "--last-image", "--reference"))
        if last is not None and image is None:
            raise UsageError(f"--last-image {last} belongs to --image: give the first picture, too")
        events: list[Event] = []
        if image is not None:
            named = {"start": f"--image {image}", "last": f"--last-image {last}"}
            more = {} if last is None else {"last": load_image(last, "--last-image")}
            events.append({"start": load_image(image), "names": named, **more})
        if reference is not None:
            events.append(
                {"reference": load_reference(reference), "names": {"reference": f"--reference {reference}"}}
            )
        return events

    @classmethod
    def lacking(cls, inputs: Sequence[InputSpec]) -> str:
        """Return why an artifact takes no pictures."""
        del inputs
        return NO_ENCODER


def squashed(spec: InputSpec, pictures: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Return pictures for an image encoder (CLIP), resized to its square input without a crop, as Wan's code does: by
    cubic convolution over four pixels, without a low-pass filter or rounding.

    Parameters
    ----------
    spec : InputSpec
        The model's input for the pictures, float32 [count, rows, columns, 3].
    pictures : sequence of array
        As many pictures as the model takes, uint8 or float32 [..., rows, columns, 3], of any sizes.

    Raises
    ------
    UsageError
        If the model takes another number of pictures.
    """
    count, height, width, _ = spec.shape
    if len(pictures) != count:
        raise UsageError(f"found {len(pictures)} pictures, this artifact's model takes {count}")
    each = [fit_levels(picture, height, width, bicubic=True, stretch=math.inf)[0] for picture in pictures]
    return np.stack([picture.astype(np.float32) for picture in each], axis=-1 - _AXES)


def load_reference(path: Path) -> NDArray[Any]:
    """Read reference frames: a picture (see `load_image`), or an array file of pictures or float32 latents.

    Raises
    ------
    UsageError, VideoWriterError
        If the file cannot be read; see `load_image`.
    """
    if path.suffix != ".npy":
        return load_image(path, "--reference")
    array = load_array(path, "--reference")
    if array.dtype not in (np.uint8, np.float32):
        raise UsageError(
            f"--reference {path} is {array.dtype} {list(array.shape)}, expected uint8 pictures or float32 latents"
        )
    return array


def _checked(picture: object, name: str) -> NDArray[np.uint8]:
    array = as_array(picture, name)
    if array.ndim < _AXES or array.shape[-1] != _AXES or 0 in array.shape or array.dtype != np.uint8:
        raise UsageError(f"{name} is {array.dtype} {list(array.shape)}, expected uint8 [rows, columns, 3]")
    return array
