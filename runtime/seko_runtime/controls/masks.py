"""The control ``speaker_masks``: where each of several speakers is in the picture, by a mask picture of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import as_array, items_of
from seko_runtime.controls.base import MEDIA, Control, ControlOption, Event, one_of, parameters_of
from seko_runtime.controls.fitting import PICTURE_SCHEMA, fit_levels
from seko_runtime.controls.recording import of_json
from seko_runtime.controls.voice import FEATURES, KINDS
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import ControlSpec, InputSpec
from seko_runtime.format.records import Within
from seko_runtime.media_files.pictures import BLACK, load_image

KIND = "speaker_masks"  # also the kind of the input, float32 [speakers, tokens of a latent frame]
MASKS = "masks"  # word of the input
_MIDDLE = 127.5
_SIDE = Annotated[int, Within(1, 1 << 16)]


@dataclass(frozen=True)
class MasksParameters:
    """The parameters of speaker masks in the manifest: the video's size in pixels, and a latent frame's in tokens."""

    height: _SIDE
    width: _SIDE
    rows: _SIDE
    columns: _SIDE


class MasksControl(Control):
    """Masks, which the session takes with its beginning."""

    kind = KIND
    options: ClassVar = (
        ControlOption(
            "--mask",
            "FILE",
            "with several speakers: a picture, bright where one is in the portrait; one for each --audio, in order",
            MEDIA,
            file=True,
            repeatable=True,
        ),
    )

    def __init__(self, spec: ControlSpec, inputs: Mapping[str, InputSpec]) -> None:
        super().__init__(spec, inputs)
        self._layout, own = parameters_of(MasksParameters, spec), inputs[MASKS]
        if len(own.shape) != 2 or own.shape[1] != self._layout.rows * self._layout.columns:
            raise UsageError(
                f"its input {own.name!r} is {list(own.shape)}, expected [speakers, "
                f"{self._layout.rows * self._layout.columns}]"
            )
        self._masks: NDArray[np.float32] | None = None

    @staticmethod
    def declared(masks: str, *, height: int, width: int, rows: int, columns: int) -> ControlSpec:
        """Return the manifest's entry of masks, whose model's input is ``masks``; the parameters are those of
        `MasksParameters`."""
        parameters = {"height": height, "width": width, "rows": rows, "columns": columns}
        return ControlSpec(KIND, KIND, {MASKS: masks}, parameters)

    def describe(self) -> dict[str, Any]:
        """Return the event with its schema, the number of speakers, and the ``pictures`` that a page asks for: the
        field of a request that opens a session, each picture's place in it, words for people, and whether a session
        needs it."""
        pictures = {"type": "array", "items": PICTURE_SCHEMA}
        own = self.inputs[MASKS]
        asked = [
            {
                "field": "masks",
                "place": place,
                "label": f"Mask of speaker {place + 1}",
                "required": own.default == "required",
            }
            for place in range(own.shape[0])
        ]
        return {"events": {"masks": {"masks": pictures}}, "speakers": own.shape[0], "pictures": asked}

    def check(self, event: Event) -> Event:
        """Return an event with checked values: ``masks``, a picture uint8 [rows, columns, 3] of any size for each
        speaker, whose red channel is bright where the speaker is."""
        _, values = one_of(event, {"masks": ()}, "masks")
        self._fitted(values["masks"])
        return values

    def _apply(self, event: Event) -> None:
        self._masks = self._fitted(event["masks"])

    def _fitted(self, pictures: object) -> NDArray[np.float32]:
        """Return masks of 0 and 1, float32 [speakers, tokens]: cut and resized like the portrait, then resized by cubic
        convolution to one pixel a token."""
        listed = items_of(pictures, "expected a list of masks, one for each speaker")
        each = [as_array(picture, "a mask") for picture in listed]
        speakers, layout = self.inputs[MASKS].shape[0], self._layout
        if len(each) != speakers:
            raise UsageError(f"{len(each)} masks given for {speakers} speakers, expected one each")
        masks = []
        for picture in each:
            if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3 or 0 in picture.shape:
                raise UsageError(
                    f"a mask is {picture.dtype} {list(picture.shape)}, expected uint8 [rows, columns, 3]"
                )
            fitted, _ = fit_levels(picture, layout.height, layout.width)
            small, _ = fit_levels(fitted, layout.rows, layout.columns, bicubic=True)
            masks.append((small[..., 0] > _MIDDLE).astype(np.float32).ravel())
        return np.stack(masks)

    @property
    def active(self) -> bool:
        """Whether masks have come."""
        return self._masks is not None

    def opening(self) -> dict[str, Any]:
        """Return the masks as the session's input."""
        return {} if self._masks is None else {"inputs": {self.inputs[MASKS].name: self._masks}}

    def reset(self) -> None:
        """Keep the masks, which are those of the portrait."""

    def state(self) -> dict[str, Any]:
        """Return the masks for `load`."""
        return {"masks": self._masks}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned; UsageError for any other value."""
        masks: Any = of_json(state.get("masks")) if isinstance(state, Mapping) and "masks" in state else 0
        shape = self.inputs[MASKS].shape
        if masks is not None and (getattr(masks, "shape", ()) != shape or masks.dtype != np.float32):
            raise UsageError("this is no state of masks; take what state() gave")
        self._masks = masks

    @classmethod
    def events_of(cls, given: Mapping[str, Any]) -> list[Event]:
        """Return the event of ``--mask``."""
        return [{"masks": [load_image(path, "--mask", background=BLACK) for path in given["--mask"]]}]

    @classmethod
    def lacking(cls, inputs: Sequence[InputSpec]) -> str:
        """Return why an artifact with these inputs takes no masks."""
        if any(spec.kind in (*KINDS, FEATURES) for spec in inputs):
            return "this artifact has one speaker, who is the whole picture: it takes no masks"
        return "this artifact's model hears no speakers: it takes no masks"
