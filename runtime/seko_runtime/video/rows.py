"""The interface through which sessions and pools use the rows of a video artifact, each of which holds one stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import UsageError
from seko_runtime.parallel.records import record
from seko_runtime.sessions.over_ranks import OverRanks, joined_arrays
from seko_runtime.sessions.rows import Rows
from seko_runtime.video.chunk import Chunk, SessionStats
from seko_runtime.video.contract import PICTURE_AXIS
from seko_runtime.video.inputs import Inputs
from seko_runtime.video.manifest import VideoManifest


@record
@dataclass(frozen=True)
class Beginning:
    """The conditions with which a video stream begins.

    Parameters
    ----------
    seed : int
        Seed of the noise.
    prompt : str, optional
        The prompt, a sentence.
    text : array or tensor, optional
        Text embeddings, [1, tokens, text_dim]: the text encoder's output.
    image : array, optional
        Start picture, uint8 [H, W, 3] or [1, H, W, 3].
    conditioning_latents : array, optional
        Latents with which the stream begins, float32 [C, n, h, w] or [1, C, n, h, w].
    reference : array, optional
        The reference frames of the stream; see `reference_frames.set_reference`.
    inputs : mapping of str to array, optional
        Inputs that the caller supplies once for a session or prompt, by name: [*shape], or [1, *shape].
    """

    seed: int
    prompt: str | None = None
    text: object = None
    image: object = None
    conditioning_latents: object = None
    reference: object = None
    inputs: Inputs | None = None

    def check(self) -> None:
        """Raise a UsageError if prompt and text, or picture and latents, are both set."""
        if self.prompt is not None and self.text is not None:
            raise UsageError("found both prompt and text; give one")
        if self.image is not None and self.conditioning_latents is not None:
            raise UsageError("found both image and conditioning_latents; give one")


def _made_here(rows: Any, parts: Sequence[list[Chunk]]) -> list[Chunk]:
    """Return rank 0's chunks, which the caller's rows then read."""
    return [replace(chunk, maker=rows) for chunk in parts[0]]


def _shared_pictures(rows: VideoRows, frames: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """Return what a rank other than 0 sends of a chunk's video frames: its part of each picture, if it has a part."""
    return frames if rows.manifest.shares_decoding else None


def _joined_pictures(rows: VideoRows, parts: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    return np.concatenate(parts, PICTURE_AXIS - 1) if rows.manifest.shares_decoding else parts[0]


class VideoRows(Rows[Inputs | None, Chunk], Protocol):
    """The interface of a pool's rows of video streams: `Rows` whose engine calls return chunks."""

    @property
    def manifest(self) -> VideoManifest:
        """The artifact's manifest, with the number of denoise passes that these streams use."""

    @property
    def stats(self) -> SessionStats:
        """Counters of the pool so far: chunks, graph launches, and hits and misses of the prompt cache."""

    @property
    @OverRanks(fixed=True)
    def overlaps_decoding(self) -> bool:
        """Whether a chunk is decoded while the next one is computed."""

    @OverRanks(join=_made_here)
    def run(self, rows: Sequence[int], inputs: Sequence[Inputs | None] | None = None) -> list[Chunk]:
        """Make and return the next chunk of each of some streams."""

    @OverRanks(patient=True)
    def begin(self, row: int, beginning: Beginning) -> None:
        """Begin a stream on an empty row of the pool; UsageError if a condition of the stream is invalid."""

    def set_prompt(self, row: int, prompt: str, *, recache: bool = False, weight: float = 1.0) -> None:
        """Set a stream's prompt to a sentence; see `Session.set_prompt`."""

    @OverRanks(first=True)
    def check_prompt(self, row: int | None, prompt: str, *, recache: bool = False) -> None:
        """Raise the error that `set_prompt` would raise for a sentence on this row, or on any new row if ``row`` is
        None. The prompt does not change."""

    def set_text(self, row: int, text: object, *, recache: bool = False) -> None:
        """Set a stream's prompt to text embeddings [1, tokens, text_dim]; see `Session.set_text`."""

    def set_inputs(self, row: int, inputs: Inputs | None) -> None:
        """Set the inputs that the caller supplies once for a session or prompt, from the stream's next chunk on."""

    def next_frame(self, row: int) -> int:
        """Return the number of the first latent frame of a stream's next chunk."""

    def restart(
        self, row: int, *, seed: int | None = None, image: object = None, reference: object = None
    ) -> None:
        """Restart a stream at frame 0 with an empty cache; see `Session.restart`."""

    def cut(self, row: int, frames: int) -> None:
        """Begin another scene with a row's next chunk; see `Session.cut`."""

    def rewind(self, row: int, chunk: int) -> None:
        """Set a stream back to its state before it made a chunk; see `Session.rewind`."""

    @OverRanks(first=True)
    def read_latents(self, row: int, serial: int, index: int) -> Callable[[], NDArray[np.float32]]:
        """Queue the copy of a chunk's latents to the host; return a function that waits for the copy and returns the
        latents. The parameters are attributes of the `Chunk`."""

    def video_finished(self, row: int, number: int, part: int) -> Callable[[], None]:
        """Return a function that waits until the video frames of a part of one chunk of a stream are on the host;
        UsageError if the artifact makes no video. See `Decoder.finished`."""

    @OverRanks(share=_shared_pictures, join=_joined_pictures)
    def video_frames(self, row: int, number: int, part: int) -> NDArray[np.uint8]:
        """Return a row's video frames of a part of one chunk, uint8 [T, H, W, 3], once they are on the host; see
        `Decoder.video_frames`."""

    @OverRanks(join=joined_arrays)
    def cache_sample(self, step: int) -> dict[str, NDArray[np.float32]]:
        """Copy every ``step``-th token of every cache buffer to the host; waits for the last chunk."""
