"""A session: one batch of streams, advanced chunk by chunk. Torch-free; tensors and capture are the memory's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from seko_runtime.chunk import Chunk, SessionStats
from seko_runtime.clocks import RowClocks, checked_seeds
from seko_runtime.decoding import Decoder
from seko_runtime.errors import SessionClosedError, StaleChunkError, UsageError
from seko_runtime.given import GivenFrames
from seko_runtime.live import Live
from seko_runtime.manifest import Manifest
from seko_runtime.memory import Engine, Memory, Tensor
from seko_runtime.programs_check import Programs, resolve_programs
from seko_runtime.prompts import PROMPT_CACHE, RowPrompts
from seko_runtime.ring import Ring
from seko_runtime.text import TokenIds

__all__ = ["Chunk", "Session", "SessionStats"]


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
    text : array or tensor, optional
        [B, tokens, text_dim]; needed without ``prompt`` if the manifest has a text buffer.
    prompt : str or Sequence[str], optional
        In place of ``text``: one sentence for all rows, or one per row.
    image : array, optional
        uint8 [H, W, 3] or [B, H, W, 3]: each stream begins with this picture.
    given_latents : array, optional
        In place of ``image``: float32 [C, n, h, w] or [B, C, n, h, w], n up to F.
    programs : Programs, optional
        What `resolve_programs(manifest)` gave, if the caller has it already.
    prompt_ids : TokenIds, optional
        The artifact's tokenizer; without it no sentence is taken.
    digest : str
        The artifact's, part of what names a prompt in the cache.
    prompt_cache : int
        Prompts that the cache holds.
    overlap : bool
        Whether decoding runs beside the chunks where the device can; off, to measure what that gains.

    Raises
    ------
    ProgramError, EngineSignatureError
        If the manifest's programs do not fit together.
    UsageError
        If seeds, text or given frames do not fit the batch.
    TokenizerMissingError, TokenizerError
        If ``prompt`` cannot be cut into tokens.
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
        prompt: str | Sequence[str] | None = None,
        image: object = None,
        given_latents: object = None,
        programs: Programs | None = None,
        prompt_ids: TokenIds | None = None,
        digest: str = "",
        prompt_cache: int = PROMPT_CACHE,
        overlap: bool = True,
    ) -> None:
        self.manifest = manifest
        self._memory = memory
        self._live: Live | None = None
        try:
            programs = resolve_programs(manifest) if programs is None else programs
            stream = manifest.stream
            ring = Ring(stream.sink_frames, stream.ring_frames, stream.chunk_frames)
            self._clocks = RowClocks(ring, stream.batch)
            self._seeds = checked_seeds(seeds, stream.batch)
            self._chunks = self._launches = 0
            self._readable: int | None = None  # number of the chunk whose latents are whole
            self._rebuild_due = False
            self._ahead: deque[Chunk] = deque()  # queued by `stream`, not given out yet
            self._given = GivenFrames(manifest, memory)
            self._prompts: RowPrompts | None = None
            if manifest.text is not None and prompt_ids is not None:
                self._prompts = RowPrompts(programs, stream.batch, memory, prompt_ids, digest, prompt_cache)
            with memory.ordered():
                self._live = Live(manifest, programs, engines, weights, memory, self._clocks, overlap=overlap)
            if (prompt is not None and text is not None) or (image is not None and given_latents is not None):
                raise UsageError("found both prompt and text, or both image and given_latents; give one")
            if prompt is not None:
                self.set_prompt(prompt)
            else:
                self.set_text(text)
            if image is not None:
                self._given.set_image(self._live, image)
            if given_latents is not None:
                self._given.set_latents(self._live, given_latents)
            self._live.prepare(self._seeds)
        except BaseException:
            self.close()
            memory.close()  # also if there was no session yet; a second time does nothing
            raise

    def run_chunk(self) -> Chunk:
        """Make the next chunk of every row; where the artifact makes video, queue its decoding too.

        The chunk counts only once it has run and is decoded: after an error the same call gives the same bytes, since
        every slot that the failed try may have written is written anew before it is read.

        Returns
        -------
        Chunk
            Its latents are overwritten by the next call.

        Raises
        ------
        SessionClosedError
            After `close()`.
        """
        live, clocks = self._check_open(), self._clocks
        frames = clocks.frames()
        begins = [bool(first == 0) for first in clocks.first]
        self._readable = None
        with self._memory.ordered():
            if self._rebuild_due:
                self._rebuild_caches(live)
            given = self._given.of_chunk(clocks.first)
            full = live.send_positions(self._seeds, frames, clocks.slot_first.tolist(), given)
            self._launches += live.run_chunk(full=full)
            live.keep()
            if live.decoder is not None:
                live.decoder.feed(live.latents)
        if live.decoder is not None:
            live.decoder.decode(self._chunks, begins)
        clocks.chunk_made()
        chunk = Chunk(self._chunks, frames, live.latents, self)
        self._readable = self._chunks
        self._chunks += 1
        return chunk

    def stream(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        chunks: int | None = None,
        recache: bool = False,
    ) -> Iterator[NDArray[np.uint8]]:
        """Make chunks and give their video frames as they get ready.

        Where decoding runs beside the chunks, one chunk more than was given out is queued; if the loop is left early,
        the next call of `stream` gives that one first.

        Parameters
        ----------
        prompt : str or Sequence[str], optional
            As `set_prompt` takes it; from the next chunk that is queued on.
        chunks : int, optional
            How many to give; without it there is no end.
        recache : bool
            As `set_prompt` takes it.

        Yields
        ------
        numpy.ndarray
            uint8 [B, T, H, W, 3], the caller's own.

        Raises
        ------
        UsageError
            If the artifact makes no video, or a row begins anew beside others; see `Chunk.video`.
        SessionClosedError
            After `close()`.
        """
        decoder = self._decoder()
        if prompt is not None:
            self.set_prompt(prompt, recache=recache)
        elif recache:
            raise UsageError("recache without a prompt does nothing; give both, or neither")
        return self._frames(int(decoder.overlaps), chunks)

    def set_prompt(self, prompt: str | Sequence[str], *, recache: bool = False) -> None:
        """Set the rows' prompts by sentences, from the next chunk on.

        Parameters
        ----------
        prompt : str or Sequence[str]
            One for all rows, or one per row. A sentence that the cache holds costs one copy a buffer.
        recache : bool
            Recompute the keys and values of the frames in the cache with the new prompt; else they stay until they are
            evicted.

        Raises
        ------
        UsageError
            If the artifact takes no sentences, there is not one per row, or one is too long.
        TokenizerMissingError, TokenizerError
            If it cannot be cut into tokens.
        SessionClosedError
            After `close()`.
        """
        live, batch = self._check_open(), self.manifest.stream.batch
        if self._prompts is None:
            raise UsageError("this artifact has no text encoder; give the embeddings of one as text")
        prompts = [prompt] * batch if isinstance(prompt, str) else list(prompt)
        if len(prompts) != batch:
            raise UsageError(f"{len(prompts)} prompts given for {batch} rows, expected one, or one each")
        self._prompts.set(live, prompts)
        if recache:
            self._recache(live)

    def set_text(self, text: object, *, recache: bool = False) -> None:
        """Set the rows' prompts by embeddings, from the next chunk on.

        Parameters
        ----------
        text : array or tensor
            [B, tokens, text_dim], the text encoder's output; converted to the buffer's dtype.
        recache : bool
            As `set_prompt` takes it.

        Raises
        ------
        UsageError
            If its shape does not fit.
        SessionClosedError
            After `close()`.
        """
        live = self._check_open()
        live.set_text(text)
        if recache:
            self._recache(live)

    def restart_row(self, row: int, *, seed: int | None = None, image: object = None) -> None:
        """Begin row ``row`` anew at frame 0, with a clean cache and nothing given; the other rows go on.

        Parameters
        ----------
        row : int
            In ``[0, batch)``.
        seed : int, optional
            New seed; without it the row keeps its own.
        image : array, optional
            uint8 [H, W, 3]: the picture that the row begins with.

        Raises
        ------
        UsageError
            If there is no such row, or the picture does not fit.
        SessionClosedError
            After `close()`.
        """
        live = self._check_open()
        batch = self.manifest.stream.batch
        if not 0 <= row < batch:
            raise UsageError(f"row {row} does not exist, expected 0 to {batch - 1}")
        new_seed = None if seed is None else checked_seeds([seed], 1)[0]
        if image is None:
            self._given.drop(row)
        else:
            self._given.set_image(live, image, row)
        if new_seed is not None:
            self._seeds[row] = new_seed
        with self._memory.ordered():
            live.clear_row(row)
        self._clocks.restart(row)
        if live.decoder is not None:
            live.decoder.restart(row)

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
        return self._check_open().cache_sample(step)

    @property
    def stats(self) -> SessionStats:
        """Counters so far."""
        cache = None if self._prompts is None else self._prompts.cache
        return SessionStats(
            chunks=self._chunks,
            graph_launches=self._launches,
            captured_graphs=0 if self._live is None else len(self._live.replays),
            pool_bytes=self.manifest.kv.pool_bytes,
            prompt_cache_hits=0 if cache is None else cache.hits,
            prompt_cache_misses=0 if cache is None else cache.misses,
        )

    @property
    def decodes_beside(self) -> bool:
        """Whether a chunk is decoded while the next one is made."""
        decoder = None if self._live is None else self._live.decoder
        return decoder is not None and decoder.overlaps

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
        if self._prompts is not None:
            self._prompts.cache.clear()
        self._ahead.clear()
        live.drop()
        self._memory.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _frames(self, ahead: int, chunks: int | None) -> Iterator[NDArray[np.uint8]]:
        queued = self._ahead
        for given in count() if chunks is None else range(chunks):
            wanted = 1 + ahead if chunks is None else min(1 + ahead, chunks - given)
            while len(queued) < wanted:
                queued.append(self.run_chunk())
            yield queued.popleft().video()

    def _recache(self, live: Live) -> None:
        self._rebuild_due = True  # until it is done: a chunk must not run on half a cache
        self._readable = None
        with self._memory.ordered():
            self._rebuild_caches(live)

    def _rebuild_caches(self, live: Live) -> None:
        live.rebuild_caches(self._seeds)
        self._rebuild_due = False

    def _check_open(self) -> Live:
        if self._live is None:
            raise SessionClosedError("the session is closed; open a new one with open_session()")
        return self._live

    def _decoder(self) -> Decoder:
        decoder = self._check_open().decoder
        if decoder is None:
            raise UsageError("this artifact makes no video; read latents with run_chunk().to_host()")
        return decoder

    def _read_chunk(self, index: int) -> NDArray[np.float32]:
        live = self._check_open()
        if index != self._readable:
            raise StaleChunkError(
                f"chunk {index} was overwritten by a later run_chunk() or recache; call to_host() before it"
            )
        return self._memory.read(live.latents)
