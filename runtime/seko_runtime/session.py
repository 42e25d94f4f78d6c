"""A session: one batch of streams, advanced chunk by chunk. Torch-free; tensors and capture are the memory's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from seko_runtime.buffers_check import TEXT_BUFFER
from seko_runtime.errors import SessionClosedError, StaleChunkError, UsageError
from seko_runtime.manifest import Manifest
from seko_runtime.memory import Engine, Memory, Tensor
from seko_runtime.program import BoundProgram, BoundTensors
from seko_runtime.programs_check import Programs, resolve_programs
from seko_runtime.ring import Ring


@dataclass(frozen=True)
class Chunk:
    """One finished (on CUDA: queued) chunk.

    Parameters
    ----------
    index : int
        Number of the chunk in its session.
    frames : numpy.ndarray
        int64 [B, F], absolute latent-frame numbers of each row.
    latents : tensor
        float32 [B, C, F, h, w], the session's own buffer: valid until its next `run_chunk`.
    session : Session
        The session that made it.
    """

    index: int
    frames: NDArray[np.int64]
    latents: Tensor
    session: Session

    def to_host(self) -> NDArray[np.float32]:
        """Return a float32 copy [B, C, F, h, w]; waits for the chunk.

        Raises
        ------
        StaleChunkError
            If the session has begun another chunk, which overwrites the latents.
        SessionClosedError
            If the session is closed.
        """
        return self.session._read_chunk(self.index)


@dataclass(frozen=True)
class SessionStats:
    """Counters of a session.

    ``graph_launches`` counts launches of captured chunks; it equals ``chunks`` where the backend captures.
    """

    chunks: int
    graph_launches: int
    captured_graphs: int
    pool_bytes: int


class Session:
    """Streams of one batch; rows may stand at different chunks.

    Parameters
    ----------
    manifest : Manifest
        Its programs, tables and stream; its files are not looked at.
    engines : Mapping[str, Engine]
        By name: callables ``list[tensor] -> list[tensor]``, loaded engines or plain functions.
    weights : Mapping[str, tensor]
        By name, on the memory's device; kept alive by the session.
    memory : Memory
        Owned by the session and closed with it.
    seeds : Sequence[int]
        One per row.
    text : array or tensor or None
        [B, tokens, text_dim]; None only if the manifest has no text buffer.
    programs : Programs, optional
        What `resolve_programs(manifest)` gave, if the caller has it already.

    Raises
    ------
    ProgramError, EngineSignatureError
        If the manifest's programs do not fit together.
    UsageError
        If seeds or text do not fit the batch.
    """

    def __init__(
        self,
        manifest: Manifest,
        engines: Mapping[str, Engine],
        weights: Mapping[str, Tensor],
        memory: Memory,
        *,
        seeds: Sequence[int],
        text: object = None,
        programs: Programs | None = None,
    ) -> None:
        self.manifest = manifest
        self._memory = memory
        self._live: _Live | None = None
        try:
            programs = resolve_programs(manifest) if programs is None else programs
            stream = manifest.stream
            self._ring = Ring(stream.sink_frames, stream.ring_frames, stream.chunk_frames)
            self._seeds = _checked_seeds(seeds, stream.batch)
            self._first_frames = np.zeros(stream.batch, np.int64)
            self._chunks = self._launches = 0
            self._readable: int | None = None  # number of the chunk whose latents are whole
            with memory.ordered():
                self._live = _Live(manifest, programs, engines, weights, memory)
            self.set_text(text)
            if memory.warm_up_runs:
                self._warm_up(self._live)
            if memory.captures:
                for full, chunk_programs in self._live.chunk.items():
                    self._live.replays[full] = memory.capture(partial(_run_all, chunk_programs))
        except BaseException:
            self.close()
            raise

    def run_chunk(self) -> Chunk:
        """Make the next chunk of every row.

        The chunk counts only once it has run: after an error the same call gives the same bytes, since every
        slot that the failed try may have written is written anew before it is read.

        Returns
        -------
        Chunk
            Its latents are overwritten by the next call.

        Raises
        ------
        SessionClosedError
            After `close()`.
        """
        live = self._check_open()
        frames = self._first_frames[:, None] + np.arange(self._ring.chunk_frames)
        self._readable = None
        with self._memory.ordered():
            full = self._send_positions(live, frames)
            if live.replays:
                live.replays[full]()
                self._launches += 1
            else:
                _run_all(live.chunk[full])
        self._first_frames += self._ring.chunk_frames
        chunk = Chunk(self._chunks, frames, live.buffers[self.manifest.output], self)
        self._readable = self._chunks
        self._chunks += 1
        return chunk

    def set_text(self, text: object) -> None:
        """Replace the prompt of all rows, from the next chunk on.

        Parameters
        ----------
        text : array or tensor
            [B, tokens, text_dim], the text encoder's output; converted to the buffer's dtype.

        Raises
        ------
        UsageError
            If its shape does not fit.
        SessionClosedError
            After `close()`.
        """
        live = self._check_open()
        buffer = live.buffers.get(TEXT_BUFFER)
        wanted = None if buffer is None else self._memory.describe(buffer)[0]
        found = None if text is None else tuple(getattr(text, "shape", ()))
        if found != wanted:
            raise UsageError(f"text has shape {found}, this artifact takes {wanted}")
        with self._memory.ordered():
            if buffer is not None:
                self._memory.write(buffer, text)
            live.prompt.run()

    def restart_row(self, row: int, *, seed: int | None = None) -> None:
        """Begin row ``row`` anew at frame 0, with a clean cache; the other rows go on.

        Parameters
        ----------
        row : int
            In ``[0, batch)``.
        seed : int, optional
            New seed; without it the row keeps its own.

        Raises
        ------
        UsageError
            If there is no such row.
        SessionClosedError
            After `close()`.
        """
        live = self._check_open()
        batch = self.manifest.stream.batch
        if not 0 <= row < batch:
            raise UsageError(f"row {row} does not exist, expected 0 to {batch - 1}")
        if seed is not None:
            self._seeds[row] = _checked_seeds([seed], 1)[0]
        # Zeros, not only a smaller valid_tokens: a masked 0 * NaN is NaN, and another client's keys are no one's.
        with self._memory.ordered():
            for spec in self.manifest.buffers:
                if spec.role == "cache":
                    view = self._memory.row(live.buffers[spec.name], int(spec.layered), row, batch)
                    self._memory.zero(view)
        self._first_frames[row] = 0

    def cache_sample(self, step: int) -> dict[str, NDArray[np.float32]]:
        """Copy every ``step``-th token of every cache buffer to the host; waits for the last chunk.

        Parameters
        ----------
        step : int
            At least 1; `Golden.cache_step`.

        Returns
        -------
        dict of str to numpy.ndarray
            A cache buffer each: its numbers as float32, codes of one byte as whole numbers.

        Raises
        ------
        SessionClosedError
            After `close()`.
        """
        live = self._check_open()
        return {
            spec.name: self._memory.read(self._memory.every(live.buffers[spec.name], int(spec.layered), step))
            for spec in self.manifest.buffers
            if spec.role == "cache"
        }

    @property
    def stats(self) -> SessionStats:
        """Counters so far."""
        captured = 0 if self._live is None else len(self._live.replays)
        return SessionStats(self._chunks, self._launches, captured, self.manifest.kv.pool_bytes)

    @property
    def closed(self) -> bool:
        """Whether the session has ended."""
        return self._live is None

    def close(self) -> None:
        """Wait for the device and give all memory back; a second call does nothing."""
        live, self._live = self._live, None
        if live is None:
            return
        self._memory.wait()
        live.drop()
        self._memory.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> _Live:
        if self._live is None:
            raise SessionClosedError("the session is closed; open a new one with open_session()")
        return self._live

    def _read_chunk(self, index: int) -> NDArray[np.float32]:
        live = self._check_open()
        if index != self._readable:
            raise StaleChunkError(
                f"chunk {index} was overwritten by a later run_chunk(); call to_host() before the next one"
            )
        return self._memory.read(live.buffers[self.manifest.output])

    def _send_positions(self, live: _Live, frames: NDArray[np.int64]) -> bool:
        """Write the chunk's small tensors; return whether every row's cache is full once it is written."""
        stream, ring = self.manifest.stream, self._ring
        firsts = frames[:, 0].tolist()
        valid = [ring.valid_frames(first) for first in firsts]
        host = live.host.acquire()
        for name, values in (
            ("seeds", self._seeds),
            ("frames", frames),
            ("write_slots", [ring.write_slots(first) for first in firsts]),
            ("valid_tokens", [count * stream.frame_tokens for count in valid]),
        ):
            if name in host:
                host[name][...] = values
        live.host.send()
        return live.has_full and min(valid) == ring.cache_frames

    def _warm_up(self, live: _Live) -> None:
        """Run every program on the session's stream, then clear what that wrote.

        This loads each engine's kernels, which is illegal inside a capture, and checks their results.
        """
        with self._memory.ordered():
            for full, programs in live.chunk.items():
                first = self._ring.cache_frames if full else 0
                frames = np.full((len(self._seeds), 1), first) + np.arange(self._ring.chunk_frames)
                self._send_positions(live, frames)
                for _ in range(self._memory.warm_up_runs):
                    _run_all([programs[0], programs[1], programs[-1]])  # begin, one denoise pass, context
            for spec in self.manifest.buffers:
                if spec.role in ("cache", "state"):
                    self._memory.zero(live.buffers[spec.name])
        self._memory.wait()


class _Live:
    """What an open session holds, dropped as a whole when it is closed."""

    def __init__(
        self,
        manifest: Manifest,
        programs: Programs,
        engines: Mapping[str, Engine],
        weights: Mapping[str, Tensor],
        memory: Memory,
    ) -> None:
        self.host = memory.host_block([spec for spec in manifest.buffers if spec.role == "chunk"])
        self.buffers = {spec.name: memory.allocate(spec) for spec in manifest.buffers if spec.role != "chunk"}
        self.buffers.update(self.host.tensors)
        specs = {engine.name: engine for engine in manifest.engines}
        tensors = BoundTensors(engines, specs, weights, self.buffers, memory)
        bound = {
            name: [BoundProgram(calls, tensors) for calls in passes] for name, passes in programs.items()
        }
        self.prompt = bound["prompt"][0]
        self.has_full = "denoise_full" in bound
        self.chunk = {False: [*bound["begin"], *bound["denoise"], *bound["context"]]}
        if self.has_full:
            self.chunk[True] = [*bound["begin"], *bound["denoise_full"], *bound["context_full"]]
        self.replays: dict[bool, Callable[[], None]] = {}

    def drop(self) -> None:
        """Let go of graphs first, then of the tensors that they refer to."""
        self.replays.clear()
        self.chunk.clear()
        self.buffers.clear()
        del self.prompt, self.host


def _run_all(programs: Sequence[BoundProgram]) -> None:
    for program in programs:
        program.run()


def _checked_seeds(seeds: Sequence[int], rows: int) -> NDArray[np.int64]:
    if len(seeds) != rows:
        raise UsageError(f"{len(seeds)} seeds given for {rows} rows, expected one each")
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or abs(int(seed)) >= 1 << 62:
            raise UsageError(f"seed {seed!r} is no integer within 62 bits")
    return np.array(seeds, dtype=np.int64)
