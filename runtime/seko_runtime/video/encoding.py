"""The encoder of input video: VAE programs that turn the video frames of a session's next chunk into the latents from
which the chunk starts.

An encoder keeps the features of earlier frames for each row, so that a stream of calls gives the latents of the whole
video. The host writes the frames of a chunk, and the encoder runs before the chunk's programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import Memory, Tensor
from seko_runtime.errors import TornStreamError
from seko_runtime.executor.program import BoundProgram
from seko_runtime.video.stream_programs import StreamPrograms


class VideoEncoder:
    """The programs that encode input video, with the encoder's caches for each row.

    Parameters
    ----------
    first, later : sequence of BoundProgram
        The programs ``encode_video_first`` (first chunk of a stream) and ``encode_video`` (later chunks), bound to the
        tensors of each row.
    frames : callable
        Function that returns the tensor of a row's frames, uint8 [1, T, H, W, 3].
    written : sequence of tensor
        The tensors that the programs read and write, of all rows.
    memory : Memory
        The memory of the pool's tensors.
    """

    def __init__(
        self,
        first: Sequence[BoundProgram],
        later: Sequence[BoundProgram],
        frames: Callable[[int], Tensor],
        written: Sequence[Tensor],
        memory: Memory,
    ) -> None:
        self._programs = StreamPrograms(first, later, written)
        self._frames, self._memory = frames, memory
        # rows whose next chunk's frames a failed call has already encoded
        self._rows_done: set[int] = set()

    def prepare(self) -> None:
        """Run each program once to load its kernels, zero what it wrote, and capture it if the memory can."""
        self._programs.prepare(self._memory, self._memory, "the video encoder's run")

    def encode(self, rows: Sequence[int], begins: Sequence[bool], frames: NDArray[np.uint8]) -> None:
        """Queue the encoding of the next chunk's frames of some rows. Call `encode` inside `Memory.ordered`.

        The frames of a chunk are encoded only once, even if `encode` is called again after an error, because the
        encoder's caches have advanced.

        Parameters
        ----------
        rows : sequence of int
            The rows of the call.
        begins : sequence of bool
            Whether each row's stream begins with this chunk.
        frames : numpy.ndarray
            The frames of each row, uint8 [k, T, H, W, 3]. The first chunk of a stream has fewer frames than T; they are
            the last ones of its array.

        Raises
        ------
        TornStreamError
            If a failed call has already encoded other frames for a stream's next chunk.
        """
        for at, (row, begin) in enumerate(zip(rows, begins, strict=True)):
            held, given = self._frames(row), frames[at : at + 1]
            if row not in self._rows_done:
                self._memory.write(held, given)
                self._programs.run(row, begin=begin)
                self._rows_done.add(row)
            elif not np.array_equal(self._memory.read(held), given):
                raise self._ahead(row)

    def chunk_made(self, rows: Sequence[int]) -> None:
        """Note that the chunks whose frames `encode` has taken were made."""
        self._rows_done.difference_update(rows)

    def check(self, row: int) -> None:
        """Raise a TornStreamError if a failed call has already encoded the frames of a stream's next chunk."""
        if row in self._rows_done:
            raise self._ahead(row)

    def restart(self, row: int) -> None:
        """Begin a new stream on a row: forget which frames a failed call has encoded."""
        self._rows_done.discard(row)

    def _ahead(self, row: int) -> TornStreamError:
        return TornStreamError(
            f"the video of row {row}'s next chunk was encoded before its call failed; make the same chunk again, or "
            "restart it"
        )

    def close(self) -> None:
        """Release captured graphs and programs. Call `close` after `Memory.wait`."""
        self._programs.close()
        del self._frames
