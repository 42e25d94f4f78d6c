"""What an open session holds: buffers, bound programs, captured chunks, kept latents. Dropped as a whole at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from seko_runtime.buffers_check import GIVEN_FRAMES, TEXT_BUFFER
from seko_runtime.clocks import KeptChunk, RowClocks
from seko_runtime.decoding import Decoder
from seko_runtime.errors import UsageError
from seko_runtime.manifest import Manifest, TensorSpec
from seko_runtime.memory import Engine, Memory, Tensor
from seko_runtime.program import BoundProgram, BoundTensors
from seko_runtime.programs_check import Programs


class Live:
    """The tensors and programs of one session.

    Made inside of the memory's `ordered`.

    Parameters
    ----------
    manifest, programs, engines, weights, memory
        As `Session` takes them, programs resolved.
    clocks : RowClocks
        The session's.
    overlap : bool
        Whether decoding may run beside the chunks.
    """

    def __init__(
        self,
        manifest: Manifest,
        programs: Programs,
        engines: Mapping[str, Engine],
        weights: Mapping[str, Tensor],
        memory: Memory,
        clocks: RowClocks,
        *,
        overlap: bool,
    ) -> None:
        self._manifest, self._memory, self._clocks = manifest, memory, clocks
        self.host = memory.host_block([spec for spec in manifest.buffers if spec.role == "chunk"])
        self.specs = {spec.name: spec for spec in manifest.buffers}
        self.buffers = {spec.name: memory.allocate(spec) for spec in manifest.buffers if spec.role != "chunk"}
        self.buffers.update(self.host.tensors)
        self.engine_specs = {engine.name: engine for engine in manifest.engines}
        tensors = BoundTensors(engines, self.engine_specs, weights, self.buffers, memory)
        bound = {
            name: [BoundProgram(calls, tensors) for calls in passes] for name, passes in programs.items()
        }
        self.once = {name: bound[name][0] for name in ("prompt", "text", "encode") if name in bound}
        self.has_full = "denoise_full" in bound
        self.chunk = {False: [*bound["begin"], *bound["denoise"], *bound["context"]]}
        if self.has_full:
            self.chunk[True] = [*bound["begin"], *bound["denoise_full"], *bound["context_full"]]
        self.replays: dict[bool, Callable[[], None]] = {}
        latents = self.specs[manifest.output]
        self._kept = [
            memory.allocate(TensorSpec(f"kept.{place}", latents.shape, latents.dtype))
            for place in range(clocks.places)
        ]
        self.decoder: Decoder | None = None
        if manifest.video is not None:
            decode_buffers = [spec.name for spec in manifest.buffers if spec.role == "decode"]
            self.decoder = Decoder(
                bound["decode_first"],
                bound["decode"],
                self.buffers,
                decode_buffers,
                memory,
                overlap=overlap,
            )

    @property
    def latents(self) -> Tensor:
        """The buffer of a finished chunk."""
        return self.buffers[self._manifest.output]

    def prepare(self, seeds: NDArray[np.int64]) -> None:
        """Run every program on the session's stream, clear what that wrote, and capture, as the memory says.

        This loads each engine's kernels, which is illegal inside a capture, and checks their results.
        """
        memory = self._memory
        if memory.warm_up_runs:
            with memory.ordered():
                self._warm_up(seeds)
            memory.wait()
        if memory.captures:
            for full, programs in self.chunk.items():
                self.replays[full] = memory.capture(partial(_run_all, programs))
        if self.decoder is not None:
            self.decoder.prepare()

    def set_text(self, text: object) -> None:
        """Write the text's embeddings and run the prompt program; UsageError if their shape does not fit."""
        buffer = self.buffers.get(TEXT_BUFFER)
        wanted = None if buffer is None else self._memory.describe(buffer)[0]
        found = None if text is None else tuple(getattr(text, "shape", ()))
        if found != wanted:
            raise UsageError(f"text has shape {found}, this artifact takes {wanted}")
        with self._memory.ordered():
            if buffer is not None:
                self._memory.write(buffer, text)
            self.once["prompt"].run()

    def cache_sample(self, step: int) -> dict[str, NDArray[np.float32]]:
        """Copy every ``step``-th token of every cache buffer to the host; waits for the last chunk."""
        return {
            spec.name: self._memory.read(self._memory.every(self.buffers[spec.name], int(spec.layered), step))
            for spec in self._manifest.buffers
            if spec.role == "cache"
        }

    def send_positions(
        self,
        seeds: NDArray[np.int64],
        frames: NDArray[np.int64],
        slot_firsts: Sequence[int],
        given: NDArray[np.int64] | int = 0,
    ) -> bool:
        """Write the chunk's small tensors; return whether every row's cache is full once it is written.

        Parameters
        ----------
        seeds : numpy.ndarray
            int64 [B].
        frames : numpy.ndarray
            int64 [B, F], absolute.
        slot_firsts : sequence of int
            Frames in each row's cache before this chunk, evicted ones included.
        given : numpy.ndarray or int
            int64 [B], leading frames that are given.
        """
        ring = self._clocks.ring
        valid = [ring.valid_frames(first) for first in slot_firsts]
        host = self.host.acquire()
        for name, values in (
            ("seeds", seeds),
            ("frames", frames),
            ("write_slots", [ring.write_slots(first) for first in slot_firsts]),
            ("valid_tokens", [count * self._manifest.stream.frame_tokens for count in valid]),
            (GIVEN_FRAMES, given),
        ):
            if name in host:
                host[name][...] = values
        self.host.send()
        return self.has_full and min(valid) == ring.cache_frames

    def run_chunk(self, *, full: bool) -> bool:
        """Queue begin, all passes and context; return whether that was one launch of a capture."""
        if self.replays:
            self.replays[full]()
            return True
        _run_all(self.chunk[full])
        return False

    def keep(self) -> None:
        """Queue copies of the chunk's latents to where the clocks keep them."""
        places = self._clocks.next_places()
        if len(set(places)) == 1:
            self._memory.copy(self._kept[places[0]], self.latents)
            return
        for row, place in enumerate(places):
            self._memory.copy(self._row(self._kept[place], row), self._row(self.latents, row))

    def rebuild_caches(self, seeds: NDArray[np.int64]) -> None:
        """Queue context passes over the kept chunks, oldest first, into caches that begin anew."""
        steps = self._clocks.rebuild()
        for entries in steps:
            self._load_kept(entries)
            firsts = np.array([entry.first_frame for entry in entries], np.int64)
            frames = firsts[:, None] + np.arange(self._clocks.ring.chunk_frames)
            full = self.send_positions(seeds, frames, [entry.slot_first for entry in entries])
            self.chunk[full][-1].run()
        for row in self._clocks.rebuilt() if steps else ():
            self.clear_row(row)

    def clear_row(self, row: int) -> None:
        """Queue zeros into a row's part of every cache.

        Zeros, not only a smaller valid_tokens: a masked 0 * NaN is NaN, and another client's keys are no one's.
        """
        for spec in self._manifest.buffers:
            if spec.role == "cache":
                self._memory.zero(self.row_of(spec.name, row))

    def row_of(self, buffer: str, row: int) -> Tensor:
        """View of a row's part of a buffer, behind the layers if it is layered."""
        spec = self.specs[buffer]
        return self._memory.row(self.buffers[buffer], int(spec.layered), row, self._manifest.stream.batch)

    def drop(self) -> None:
        """Let go of graphs first, then of the tensors that they refer to."""
        self.replays.clear()
        self.chunk.clear()
        self.once.clear()
        if self.decoder is not None:
            self.decoder.close()
            self.decoder = None
        self.buffers.clear()
        self._kept.clear()
        del self.host

    def _load_kept(self, entries: Sequence[KeptChunk]) -> None:
        places = {entry.place for entry in entries}
        if len(places) == 1 and None not in places:
            self._memory.copy(self.latents, self._kept[entries[0].place or 0])
            return
        for row, entry in enumerate(entries):
            target = self._row(self.latents, row)
            if entry.place is None:
                self._memory.zero(target)
            else:
                self._memory.copy(target, self._row(self._kept[entry.place], row))

    def _row(self, tensor: Tensor, row: int) -> Tensor:
        return self._memory.index(tensor, (row,))

    def _warm_up(self, seeds: NDArray[np.int64]) -> None:
        ring, memory = self._clocks.ring, self._memory
        for full, programs in self.chunk.items():
            first = ring.cache_frames if full else 0
            frames = np.full((len(seeds), 1), first) + np.arange(ring.chunk_frames)
            self.send_positions(seeds, frames, [first] * len(seeds))
            for _ in range(memory.warm_up_runs):
                _run_all([programs[0], programs[1], programs[-1]])  # begin, one denoise pass, context
        for spec in self._manifest.buffers:
            if spec.role in ("cache", "state"):
                memory.zero(self.buffers[spec.name])


def _run_all(programs: Sequence[BoundProgram]) -> None:
    for program in programs:
        program.run()
