"""Finished latents to video frames on the host: beside the next chunk where the device can, in order where not.

Torch-free: streams, events and pinned memory are the memory's lane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from seko_runtime.buffers_check import DECODE_LATENTS, VIDEO, VIDEO_FIRST
from seko_runtime.errors import StaleChunkError, UsageError
from seko_runtime.memory import Memory, Tensor
from seko_runtime.program import BoundProgram

FRAME_BLOCKS = (
    4  # chunks whose frames the host keeps: a chunk's can be read until the fourth after it is queued
)


class Decoder:
    """The decode programs of a session, one set of caches a row.

    Parameters
    ----------
    first, steady : sequence of BoundProgram
        ``decode_first`` and ``decode`` of each row.
    buffers : Mapping[str, tensor]
        The session's, by name.
    decode_buffers : sequence of str
        Those of role ``decode``.
    memory : Memory
        The session's; `Decoder` is made inside of its `ordered`.
    overlap : bool
        Whether decoding runs beside the chunks, if the memory captures.
    """

    def __init__(
        self,
        first: Sequence[BoundProgram],
        steady: Sequence[BoundProgram],
        buffers: Mapping[str, Tensor],
        decode_buffers: Sequence[str],
        memory: Memory,
        *,
        overlap: bool,
    ) -> None:
        # What is not captured is launched by the host, engine by engine: beside the chunks it would gain nothing.
        self.overlaps = overlap and memory.captures
        self._memory = memory
        self._programs = {True: list(first), False: list(steady)}
        self._runs: dict[bool, list[Callable[[], None]]] = {
            kind: [program.run for program in programs] for kind, programs in self._programs.items()
        }
        self._latents = buffers[DECODE_LATENTS]
        self._buffers = [buffers[name] for name in decode_buffers]
        self._lane = memory.lane(beside=self.overlaps)
        self._blocks = self._lane.frame_blocks(
            {VIDEO_FIRST: buffers[VIDEO_FIRST], VIDEO: buffers[VIDEO]}, FRAME_BLOCKS
        )
        self._rows_done: set[int] = set()  # rows of the next chunk that a failed try has decoded already
        self._kinds: dict[int, tuple[str, ...]] = {}  # by chunk: which buffer each row's frames were in

    def prepare(self) -> None:
        """Run each program once to load its kernels, clear what that wrote, and capture, where the memory says so."""
        if self._memory.warm_up_runs:
            with self._lane.ordered():
                for _ in range(self._memory.warm_up_runs):
                    for kind in (True, False):
                        for program in self._programs[kind]:
                            program.run()
                for buffer in self._buffers:
                    self._memory.zero(buffer)
            self._memory.wait()
        if self._memory.captures:
            self._runs = {
                kind: [self._lane.capture(program.run) for program in programs]
                for kind, programs in self._programs.items()
            }

    def feed(self, latents: Tensor) -> None:
        """Queue the copy of a finished chunk; called inside of the memory's `ordered`, before `decode`."""
        self._lane.feed(self._latents, latents)

    def decode(self, number: int, begins: Sequence[bool]) -> None:
        """Queue the decoding of what was fed last, and the frames' way to the host.

        A row is decoded once: if another one's call fails and the chunk is made again, rows that are done are left
        alone, since their caches have moved on.

        Parameters
        ----------
        number : int
            Of the chunk.
        begins : sequence of bool
            Whether each row's stream begins with this chunk.
        """
        turn = number % FRAME_BLOCKS
        kinds = tuple(VIDEO_FIRST if begin else VIDEO for begin in begins)
        with self._lane.ordered():
            try:
                for row, begin in enumerate(begins):
                    if row not in self._rows_done:
                        self._runs[begin][row]()
                        self._rows_done.add(row)
            finally:
                self._lane.mark_read()
            self._kinds.pop(number - FRAME_BLOCKS, None)
            self._blocks.queue(turn, kinds)
        self._rows_done.clear()
        self._kinds[number] = kinds

    def restart(self, row: int) -> None:
        """Forget what a failed try has decoded of a row that begins anew."""
        self._rows_done.discard(row)

    def readable(self, number: int) -> bool:
        """Whether a chunk's frames are still held."""
        return number in self._kinds

    def frames(self, number: int) -> NDArray[np.uint8]:
        """Copy of a chunk's frames, uint8 [B, T, H, W, 3]; waits for them.

        Raises
        ------
        StaleChunkError
            If they are overwritten.
        UsageError
            If rows differ in T.
        """
        kinds = self._held(number)
        if len(set(kinds)) > 1:
            begun = [row for row, kind in enumerate(kinds) if kind == VIDEO_FIRST]
            raise UsageError(
                f"rows {begun} begin with chunk {number} and have fewer video frames than the others, "
                "expected all or none; read it with video_rows()"
            )
        return self._blocks.wait(number % FRAME_BLOCKS)[kinds[0]].copy()

    def row_frames(self, number: int) -> list[NDArray[np.uint8]]:
        """Copies of a chunk's frames, uint8 [T, H, W, 3] a row; waits for them."""
        kinds = self._held(number)
        arrays = self._blocks.wait(number % FRAME_BLOCKS)
        return [arrays[kind][row].copy() for row, kind in enumerate(kinds)]

    def close(self) -> None:
        """Let go of graphs and programs; called after the memory's `wait`."""
        self._runs.clear()
        self._programs.clear()
        self._buffers.clear()
        self._kinds.clear()
        del self._latents, self._blocks
        self._lane.close()

    def _held(self, number: int) -> tuple[str, ...]:
        if number not in self._kinds:
            raise StaleChunkError(
                f"the frames of chunk {number} were overwritten: the last {FRAME_BLOCKS} chunks' are kept; "
                "read them before queueing more"
            )
        return self._kinds[number]
