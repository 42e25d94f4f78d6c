"""The decoder: VAE programs that turn finished latents into video frames on the host, at the same time as the next
chunk if the device can.

The module of decoding does not import torch. CUDA streams, events and pinned memory for decoding belong to a lane (a
queue of work) of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import Memory, Tensor
from seko_runtime.errors import StaleChunkError, TornStreamError
from seko_runtime.executor.program import BoundProgram
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.video.contract import VIDEO, VIDEO_FIRST
from seko_runtime.video.manifest import DECODE_LATENTS, VideoManifest
from seko_runtime.video.stream_programs import StreamPrograms

# host buffers of a row's frames: a chunk's frames can be read until the fourth chunk after it is queued
FRAME_BLOCKS = 4


class Decoder:
    """The decode programs of a pool, with VAE caches for each row.

    A run of a decode program decodes a part of a chunk (`VideoManifest.decode_parts`). The parts of a chunk are decoded
    one after another, for all rows of a call the first part first, and the video frames of each part are copied to the
    host before the next part is decoded.

    Parameters
    ----------
    manifest : VideoManifest
        The artifact's manifest.
    first, steady : sequence of BoundProgram
        The programs ``decode_first`` (first part of a stream) and ``decode`` (later parts), bound to the tensors of
        each row.
    buffers : Mapping[str, tensor]
        The tensors of the pool, by the names of their buffers.
    decode_buffers : sequence of str
        Names of the buffers with role ``lane``.
    memory : Memory
        The memory of the pool's tensors. The constructor must be called inside `Memory.ordered`, the context of
        queued device work.
    overlap : bool
        Whether a chunk is decoded while the next chunk is computed. This needs a memory that captures graphs.

    Attributes
    ----------
    parts : int
        Number of parts in which a chunk is decoded.
    """

    def __init__(
        self,
        manifest: VideoManifest,
        first: Sequence[BoundProgram],
        steady: Sequence[BoundProgram],
        buffers: Mapping[str, Tensor],
        decode_buffers: Sequence[str],
        memory: Memory,
        *,
        overlap: bool,
    ) -> None:
        # Without captured graphs the host launches engine after engine, and decoding beside the chunks would gain
        # nothing.
        self.overlaps = overlap and memory.captures
        self._memory = memory
        self._programs = StreamPrograms(first, steady, [buffers[name] for name in decode_buffers])
        self.parts, self._read = manifest.decode_parts, buffers[DECODE_LATENTS]
        self._latents = self._read  # of a whole chunk
        if self.parts > 1:
            shape, dtype = memory.describe(self._read)
            whole = (*shape[:2], self.parts * shape[2], *shape[3:])
            self._latents = memory.allocate(TensorSpec("decode.chunk", whole, dtype))
        self._lane = memory.lane(overlaps=self.overlaps)
        self._blocks = self._lane.result_blocks(
            {VIDEO_FIRST: buffers[VIDEO_FIRST], VIDEO: buffers[VIDEO]}, FRAME_BLOCKS * self.parts
        )
        # by row: number of parts of the row's next chunk that a failed try has already decoded
        self._parts_done: dict[int, int] = {}
        self._queued = [0] * len(first)  # number of decoded chunks of each row, over all of its streams

    def prepare(self) -> None:
        """Run each decode program once to load its kernels, zero the buffers that it wrote, and capture it if the
        memory can."""
        self._programs.prepare(self._memory, self._lane, "the decoder's run")

    def reserve(self, row: int) -> None:
        """Allocate the host buffers of a row's frames before the row's chunks run, because allocating may wait for the
        device."""
        self._blocks.reserve(row)

    def join(self) -> None:
        """Make all later work on the device wait for the decoding that is queued so far."""
        self._lane.join()

    def feed(self, rows: Sequence[int], latents: Tensor) -> None:
        """Queue the copy of a finished chunk's latents into the decoder's buffers. Call `feed` inside `Memory.ordered`,
        before `decode`.

        Raises
        ------
        TornStreamError
            If a failed call has already decoded a stream's next chunk from other latents.
        """
        if not self._parts_done and list(rows) == list(range(len(self._queued))):
            self._lane.feed(self._latents, latents)
            return
        for batch_index, row in enumerate(rows):
            target, source = (
                self._memory.index(tensor, (at,))
                for tensor, at in ((self._latents, row), (latents, batch_index))
            )
            if row not in self._parts_done:
                self._lane.feed(target, source)
            elif self._memory.read(target).tobytes() != self._memory.read(source).tobytes():
                raise self._ahead(row)

    def check(self, row: int) -> None:
        """Raise a TornStreamError if a failed call has already decoded a stream's next chunk."""
        if row in self._parts_done:
            raise self._ahead(row)

    def decode(self, rows: Sequence[int], begins: Sequence[bool]) -> None:
        """Queue the decoding of the latents that `feed` copied last, and the copies of the frames to the host.

        Each part is decoded only once, even if `decode` is called again after an error: parts that were decoded are
        skipped, because the VAE caches have advanced.

        Parameters
        ----------
        rows : sequence of int
            The rows whose latents `feed` copied last.
        begins : sequence of bool
            Whether each row's stream begins with this chunk.
        """
        with self._lane.ordered():
            try:
                for part in range(self.parts):
                    for row, begin in zip(rows, begins, strict=True):
                        if self._parts_done.get(row, 0) <= part:
                            opens = begin and part == 0
                            self._decode_part(row, part, begin=opens)
                            self._blocks.queue(
                                row, self._turn(self._queued[row], part), VIDEO_FIRST if opens else VIDEO
                            )
                            self._parts_done[row] = part + 1
            finally:
                self._lane.mark_read()

    def chunk_made(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Count the chunk that `decode` has decoded for each of these rows; return its number, with which its frames
        are read."""
        numbers = tuple(self._queued[row] for row in rows)
        for row in rows:
            self._queued[row] += 1
            del self._parts_done[row]
        return numbers

    def _decode_part(self, row: int, part: int, *, begin: bool) -> None:
        """Queue the decoding of a part of the latents that `feed` copied last; ``begin`` is true for the first part of
        a stream. Called inside the lane's `ordered`."""
        if self.parts > 1:
            whole, read = (self._memory.index(tensor, (row,)) for tensor in (self._latents, self._read))
            self._memory.copy(read, self._memory.row(whole, 1, part, self.parts))
        self._programs.run(row, begin=begin)

    def rewind(self, row: int, latents: Sequence[Tensor]) -> None:
        """Restore the VAE's caches of a stream by decoding the latents [1, C, F, h, w] of all chunks since the stream
        began.

        The decoded frames of the repeated chunks are dropped.
        """
        self.restart(row)
        for number, chunk_latents in enumerate(latents):
            with self._memory.ordered():
                self._lane.feed(
                    self._memory.index(self._latents, (row,)), self._memory.index(chunk_latents, (0,))
                )
            with self._lane.ordered():
                try:
                    for part in range(self.parts):
                        self._decode_part(row, part, begin=number == part == 0)
                finally:
                    self._lane.mark_read()

    def restart(self, row: int) -> None:
        """Begin a new stream on a row: forget which chunk a failed call has decoded."""
        self._parts_done.pop(row, None)

    def finished(self, row: int, number: int, part: int) -> Callable[[], None]:
        """Return a function that waits until the video frames of a part of one chunk of a stream are on the host; any
        thread may call the returned function at any time.

        Raises
        ------
        StaleChunkError
            If later chunks have overwritten the frames.
        """
        return self._blocks.finished(row, self._turn_of_kept(row, number, part))

    def video_frames(self, row: int, number: int, part: int) -> NDArray[np.uint8]:
        """Return a row's video frames of a part of one chunk, uint8 [T, H, W, 3], once `finished` has waited for them.

        The returned array is the decoder's own buffer: later chunks of the row overwrite it.

        Raises
        ------
        StaleChunkError
            If later chunks have overwritten the frames.
        """
        return self._blocks.array(row, self._turn_of_kept(row, number, part))

    def _turn(self, number: int, part: int) -> int:
        """Return the host block of a row for a part of its chunk."""
        return number % FRAME_BLOCKS * self.parts + part

    def _turn_of_kept(self, row: int, number: int, part: int) -> int:
        if not self._queued[row] - FRAME_BLOCKS <= number < self._queued[row]:
            raise StaleChunkError(
                f"the frames of chunk {number} of row {row} were overwritten: the last {FRAME_BLOCKS} chunks' are "
                "kept; read them before queueing more"
            )
        return self._turn(number, part)

    def _ahead(self, row: int) -> TornStreamError:
        return TornStreamError(
            f"the next chunk of row {row} was decoded before its call failed; make the same chunk again, or restart it"
        )

    def close(self) -> None:
        """Release captured graphs and programs. Call `close` after `Memory.wait`."""
        self._programs.close()
        del self._latents, self._read, self._blocks
        self._lane.close()
