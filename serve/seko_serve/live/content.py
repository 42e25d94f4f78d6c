"""The content of a live session: what one kind of workload makes of a row. `LiveSession` knows no more of it."""

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
    """The conditions with which a session begins, checked by the HTTP room.

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
        Further inputs per session, by name.
    voice : numpy.ndarray, optional
        Samples [speakers, N] at 16 kHz, float32 in -1..1, that the stream hears from its start on.
    """

    prompt: str | None
    seed: int
    fps: float
    image: NDArray[Any] | None = None
    inputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    voice: NDArray[np.float32] | None = None

    def state(self) -> dict[str, Any]:
        """Return all but the sentence, which is in the row, as JSON can hold it."""
        return {
            "seed": self.seed,
            "fps": self.fps,
            "image": None if self.image is None else array_table(self.image),
            "inputs": array_tables(self.inputs),
            "voice": None if self.voice is None else array_table(self.voice),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Opening:
        """Return the opening of a `state`; KeyError, TypeError or ValueError if it is none."""
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
    """Return an array as JSON can hold it."""
    content = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": array.dtype.str, "shape": list(array.shape), "base64": content}


def array_of(table: Mapping[str, Any]) -> NDArray[Any]:
    """Return the array of an `array_table`."""
    content = base64.b64decode(table["base64"])
    return np.frombuffer(content, np.dtype(table["dtype"])).reshape(table["shape"]).copy()


def array_tables(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays by name as JSON can hold them."""
    return {name: array_table(np.asarray(array)) for name, array in arrays.items()}


def arrays_of(tables: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return the arrays of `array_tables`."""
    return {name: array_of(table) for name, table in tables.items()}


@dataclass(frozen=True)
class SpeechOpening:
    """The conditions with which a session that speaks begins.

    Parameters
    ----------
    seed : int
        Seed of the noise.
    guidance, temperature : float, optional
        As `SpeechPool.open_session` takes them; default: the artifact's.
    voice : numpy.ndarray, optional
        Samples [N] float32 in -1..1, at the rate of the artifact's voice encoder, to sound like.
    voice_text : str
        The words of the voice, where it is to go on from there.
    """

    seed: int = 0
    guidance: float | None = None
    temperature: float | None = None
    voice: NDArray[np.float32] | None = None
    voice_text: str = ""


class Piece(Protocol):
    """One result of a row on its way to the viewer; a worker calls both methods, in this order."""

    def read(self) -> int:
        """Wait for the result, and return how many units of the viewer's clock it has: video frames or samples."""

    def encode(self, number: int, first: int) -> list[Media]:
        """Return the coded result, in the order in which it is sent; serials are the caller's.

        Parameters
        ----------
        number : int
            Number of the chunk in the session.
        first : int
            Number of its first unit in the session.
        """


class Content(Protocol):
    """What one session streams, and how its controls change it."""

    @property
    def rate(self) -> float:
        """Units of the viewer's clock a second."""

    @property
    def savable(self) -> bool:
        """Whether a session can go on from a snapshot of its row and `state`."""

    @property
    def period_s(self) -> float:
        """Seconds in which the viewer plays one chunk."""

    # -- the event loop

    def check(self, control: Control) -> None:
        """Raise a ServeError for a control that the artifact has no place for."""

    def codecs(self, hello: Control) -> tuple[Codec, ...]:
        """Return the codecs that a client is sent; ServeError if it takes none that there is."""

    def attach(self, codecs: Sequence[Codec]) -> None:
        """Begin, or go on, with these codecs; a decoder can begin with what comes next."""

    def ready(self, codecs: Sequence[Codec]) -> dict[str, object]:
        """Return the fields of the message ``ready`` that tell of the content."""

    # -- the device's thread

    def open(self, pool: Any, name: str, tenant: str) -> RowSession:
        """Open a row of the pool; raises what that raises."""

    def apply(self, row: Any, control: Control) -> None:
        """Change the row's stream from the next chunk on; raises what the runtime raises."""

    def starved(self) -> bool:
        """Return whether the next chunk lacks something that the viewer must still send."""

    def ask(self, row: Any, due: float) -> None:
        """Ask the pool for the row's next chunk; again, where the pool has not served it yet."""

    def made(self, result: Any) -> Piece:
        """Take the chunk that was asked for."""

    def state(self) -> dict[str, Any]:
        """Return what a snapshot of the row lacks, as JSON can hold it."""

    def load(self, row: Any, state: Mapping[str, Any]) -> None:
        """Go on from a `state` with a row that was restored from the snapshot beside it."""
