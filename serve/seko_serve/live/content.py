"""The interface through which a `LiveSession` uses one kind of workload, such as video or speech."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from seko_runtime.sessions.session import RowSession
from seko_serve.protocol import Codec, Control, Media


@dataclass(frozen=True)
class Opening:
    """The conditions with which a video session begins, checked by the package `http`.

    Parameters
    ----------
    prompt : str or None
        A sentence.
    seed : int
        Seed of the noise.
    fps : float
        Video frames that the viewer shows a second.
    image : numpy.ndarray, optional
        The picture that the stream begins with, or the portrait, in the artifact's size: [H, W, 3].
    inputs : mapping of str to numpy.ndarray
        The caller's further inputs per session, by name.
    voice : numpy.ndarray, optional
        Samples [speakers, N] at 16 kHz, float32 in -1..1, the voice from the stream's start on.
    """

    prompt: str | None
    seed: int
    fps: float
    image: NDArray[Any] | None = None
    inputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    voice: NDArray[np.float32] | None = None

    def state(self) -> dict[str, Any]:
        """Return all fields except the prompt, which the row's state holds, as a JSON value."""
        return {
            "seed": self.seed,
            "fps": self.fps,
            "image": None if self.image is None else array_table(self.image),
            "inputs": array_tables(self.inputs),
            "voice": None if self.voice is None else array_table(self.voice),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Opening:
        """Return the opening from a value that `state` returned; KeyError, TypeError or ValueError if the value is
        invalid.
        """
        image, voice = state["image"], state["voice"]
        return cls(
            None,
            int(state["seed"]),
            float(state["fps"]),
            image=None if image is None else array_of(image),
            inputs=arrays_of(state["inputs"]),
            voice=None if voice is None else array_of(voice),
        )


def array_table(array: NDArray[Any]) -> dict[str, Any]:
    """Return an array as a JSON object."""
    content = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": array.dtype.str, "shape": list(array.shape), "base64": content}


def array_of(table: Mapping[str, Any]) -> NDArray[Any]:
    """Return the array from a JSON object that `array_table` returned."""
    content = base64.b64decode(table["base64"])
    return np.frombuffer(content, np.dtype(table["dtype"])).reshape(table["shape"]).copy()


def array_tables(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays by name as a JSON object."""
    return {name: array_table(np.asarray(array)) for name, array in arrays.items()}


def arrays_of(tables: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return the arrays by name from a JSON object that `array_tables` returned."""
    return {name: array_of(table) for name, table in tables.items()}


@dataclass(frozen=True)
class SpeechOpening:
    """The conditions with which a speech session begins.

    Parameters
    ----------
    seed : int
        Seed of the noise.
    guidance, temperature : float, optional
        Guidance strength and noise's standard deviation; see `SpeechPool.open_session`; default: the artifact's.
    voice : numpy.ndarray, optional
        Samples [N] float32 in -1..1, at the rate of the artifact's voice encoder: the voice to imitate.
    voice_text : str
        The words of ``voice``, if the speech continues this recording; otherwise empty.
    """

    seed: int = 0
    guidance: float | None = None
    temperature: float | None = None
    voice: NDArray[np.float32] | None = None
    voice_text: str = ""


class Piece(Protocol):
    """One result of a row that is to be sent to the viewer; a worker calls `read`, then `encode`."""

    def read(self) -> int:
        """Wait for the result, and return its length in units of the viewer's clock: video frames or samples."""

    def encode(self, number: int, first: int) -> list[Media]:
        """Return the encoded messages in the order in which they are sent; the caller sets their serial numbers.

        Parameters
        ----------
        number : int
            Number of the chunk in the session.
        first : int
            Number of the chunk's first unit (video frame or sample) in the session.
        """


class Content(Protocol):
    """The stream of one session, and the effect of the session's controls on it."""

    @property
    def rate(self) -> float:
        """Units of the viewer's clock (video frames or samples) per second."""

    @property
    def period_s(self) -> float:
        """Seconds in which the viewer plays one chunk."""

    # -- the event loop

    def check(self, control: Control) -> None:
        """Raise a ServeError for a control that the artifact does not support."""

    def codecs(self, hello: Control) -> tuple[Codec, ...]:
        """Return the codecs for a client; ServeError if the client supports none of the server's codecs."""

    def attach(self, codecs: Sequence[Codec]) -> None:
        """Begin or continue with these codecs; a decoder can begin with the next message."""

    def ready(self, codecs: Sequence[Codec]) -> dict[str, object]:
        """Return the fields of the message ``ready`` that describe the content."""

    # -- the device's thread

    def open(self, pool: Any, name: str, tenant: str) -> RowSession:
        """Open a session of the pool; errors of the pool are raised unchanged."""

    def apply(self, row: Any, control: Control) -> None:
        """Change the row's stream from the next chunk on; errors of the runtime are raised unchanged."""

    def starved(self) -> bool:
        """Return whether the next chunk lacks something that the viewer must still send."""

    def ask(self, row: Any, due: float) -> None:
        """Request the row's next chunk from the pool; a repeated request replaces the due time."""

    def made(self, result: Any) -> Piece:
        """Take the requested chunk."""

    def state(self) -> dict[str, Any]:
        """Return the part of the session's state that a snapshot of the row lacks, as a JSON value."""

    def load(self, row: Any, state: Mapping[str, Any]) -> None:
        """Continue from a value that `state` returned, with a row that was restored from the snapshot of the same
        moment.
        """
