"""A session: one batch of streams that advance together, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import flag, is_whole, iterates, shown, whole_number
from seko_runtime.errors import UsageError
from seko_runtime.video.chunk import Chunk, ChunkMaker, SessionStats
from seko_runtime.video.conditioning import Camera, steered
from seko_runtime.video.inputs import Inputs
from seko_runtime.video.rows import Beginning, VideoRows
from seko_runtime.video.video_stream import QueuedChunks, VideoStream

__all__ = ["Chunk", "Session", "SessionStats"]


MAX_STEP = 1 << 31  # between two tokens of a sample of the cache


class Session:
    """Streams of one batch; rows may be at different chunks.

    For a pool's artifact it is a batch of the largest call's size. It is for one thread at a time: a call during
    another thread's call raises a SessionBusyError, except `close`, which waits.

    Parameters
    ----------
    rows : VideoRows
        The artifact's, prepared; owned and closed by the session.
    beginning : Beginning
        What the streams begin with; what the artifact has a place for is required.

    Raises
    ------
    UsageError
        If seeds, text or conditioning frames do not fit the batch.
    EnvironmentLacksError, ArtifactError
        If a prompt cannot be tokenised.
    """

    def __init__(self, rows: VideoRows, beginning: Beginning) -> None:
        self.manifest = rows.manifest
        self._batch = range(self.manifest.call_rows)
        self._ahead = QueuedChunks()  # queued by `stream`, not given out yet
        self._rows = rows
        try:
            rows.begin(self._batch, beginning)
            for row in self._batch:
                rows.reserve(row)
        except BaseException:
            self.close()
            raise

    def run_chunk(self, inputs: Inputs | None = None, *, camera: Camera | None = None) -> Chunk:
        """Make the next chunk of every row; see `LocalVideoRows.run_chunk`.

        Parameters
        ----------
        inputs : mapping of str to array, optional
            The caller's inputs per chunk: [*shape] for all rows, or [B, *shape], in the input's dtype (float32 for
            bfloat16).
        camera : Camera, optional
            A `KeyboardCamera` or `CameraPath`, whose next chunk is taken for all rows. For rows with cameras of their
            own, stack what `next_chunk` of each gives, and pass it as ``inputs``.

        Returns
        -------
        Chunk
            Its latents are overwritten by the next call.

        Raises
        ------
        UsageError
            If an input does not fit, or a required one is missing; the message lists the artifact's inputs.
        SessionClosedError
            After `close()`.
        """
        with self._rows.call_lock.take():
            return steered(lambda all_inputs: self._rows.run_chunk(self._batch, all_inputs), inputs, camera)

    def stream(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        chunks: int | None = None,
        recache: bool = False,
        inputs: Iterable[Inputs] | None = None,
    ) -> Iterator[NDArray[np.uint8]]:
        """Yield video frames chunk by chunk as they become ready.

        If decoding overlaps the chunks, one more chunk is queued than was yielded. If the loop is left early, the
        next call of `stream` yields that one first.

        Parameters
        ----------
        prompt : str or Sequence[str], optional
            As in `set_prompt`; used from the next queued chunk on.
        chunks : int, optional
            Number of chunks; without it the stream is endless.
        recache : bool
            As in `set_prompt`.
        inputs : iterable of mappings, optional
            Inputs of each chunk, as `run_chunk` takes them, read when the chunk is queued: one chunk before it is
            yielded, if decoding overlaps. To react to keys at once, call `run_chunk`. The stream ends with them.

        Yields
        ------
        numpy.ndarray
            uint8 [B, T, H, W, 3], owned by the caller.

        Raises
        ------
        UsageError
            If the artifact makes no video, or a row restarts beside others; see `Chunk.video`.
        SessionClosedError
            After `close()`.
        """
        return video_stream(self, self._rows, prompt, chunks, recache, inputs)

    def set_prompt(self, prompt: str | Sequence[str], *, recache: bool = False) -> None:
        """Set the rows' prompts to sentences, from the next chunk on.

        Parameters
        ----------
        prompt : str or Sequence[str]
            One for all rows, or one for each.
        recache : bool
            Recompute the keys and values of the cached frames with the new prompt; otherwise they stay until they are
            evicted.

        Raises
        ------
        UsageError
            If the artifact takes no sentences or cannot rebuild caches, their number is wrong, or one is too long.
        EnvironmentLacksError, ArtifactError
            If it cannot be tokenised.
        SessionClosedError
            After `close()`.
        """
        with self._rows.call_lock.take():
            self._rows.set_prompt(self._batch, prompt, recache=recache)

    def set_text(self, text: object, *, recache: bool = False) -> None:
        """Set the rows' prompts to embeddings, from the next chunk on.

        Parameters
        ----------
        text : array or tensor
            [B, tokens, text_dim], the text encoder's output; converted to the buffer's dtype.
        recache : bool
            As in `set_prompt`.

        Raises
        ------
        UsageError
            If its shape does not fit, or the artifact cannot rebuild caches.
        SessionClosedError
            After `close()`.
        """
        with self._rows.call_lock.take():
            self._rows.set_text(self._batch, text, recache=recache)

    def set_inputs(self, inputs: Inputs) -> None:
        """Set the caller's inputs per session or prompt, from the next chunk on.

        Parameters
        ----------
        inputs : mapping of str to array
            By name; [*shape] for all rows, or [B, *shape]. Inputs that are left out stay.

        Raises
        ------
        UsageError
            If an input does not fit; the message lists the artifact's inputs.
        SessionClosedError
            After `close()`.
        """
        with self._rows.call_lock.take():
            self._rows.set_inputs(self._batch, inputs)

    def rewind(self, chunk: int, *, row: int | None = None) -> None:
        """Step back to before a chunk was made: the next one takes its place, with the same noise.

        Cache, inputs that are held, the VAE's caches and the voice stand as they did. Prompt and inputs per session
        stay as they are now. It goes back to any chunk until the cache evicts its first frame; afterwards by one chunk,
        and not at all once a chunk failed or a prompt rebuilt the cache, or where video is decoded and not all chunks
        are kept any more.

        Parameters
        ----------
        chunk : int
            Number of chunks of the stream that stay.
        row : int, optional
            The row that steps back; default: all rows.

        Raises
        ------
        UsageError
            If the row cannot stand there again, or `stream` has queued a chunk that was not taken.
        SessionClosedError
            After `close()`.
        """
        with self._rows.call_lock.take():
            if self._ahead:
                raise UsageError("the session has a chunk that `stream` has not given out; take it first")
            self._rows.rewind(self._rows_of(row), chunk)

    def push_audio(
        self, samples: object, *, row: int | None = None, at: int | None = None, last: bool = False
    ) -> None:
        """Append samples to the voice that the coming chunks hear.

        A chunk can be made as soon as its samples are there; `audio_needed` says which. `restart_row` forgets them.

        Parameters
        ----------
        samples : array
            [N] at 16 kHz, or with several speakers [speakers, N]: float32 in -1..1, or int16.
        row : int, optional
            The row that hears them; default: all rows.
        at : int, optional
            Number of the first of them, from the start of the stream; default: they follow what was pushed. Samples
            from there on are replaced.
        last : bool
            Whether the voice ends with them: later chunks hear silence.

        Raises
        ------
        UsageError
            If the artifact hears no audio, or the samples do not fit.
        SessionClosedError
            After `close()`.
        """
        with self._rows.call_lock.take():
            self._rows.push_audio(self._rows_of(row), samples, at, last=last)

    def audio_needed(self, row: int = 0) -> tuple[int, int]:
        """Return which samples of the voice a row's next chunk hears: the first, and the one behind the last.

        Raises
        ------
        UsageError
            If the artifact hears no audio, or there is no such row.
        SessionClosedError
            After `close()`.
        """
        with self._rows.call_lock.take():
            return self._rows.audio_needed(self._checked_row(row))

    def restart_row(
        self, row: int, *, seed: int | None = None, image: object = None, reference: object = None
    ) -> None:
        """Restart row ``row`` at frame 0 with an empty cache; its prompt stays, and other rows continue.

        Parameters
        ----------
        row : int
            In ``[0, batch)``.
        seed : int, optional
            New seed; default: the row keeps its seed.
        image : array, optional
            uint8 [H, W, 3]: a picture that the row begins with; default: no conditioning frames.
        reference : array, optional
            New reference frames; default: the row keeps its own.

        Raises
        ------
        UsageError
            If there is no such row, or seed, picture or reference does not fit; nothing changes then.
        SessionClosedError
            After `close()`.
        """
        with self._rows.call_lock.take():
            self._rows.restart(self._checked_row(row), seed=seed, image=image, reference=reference)

    def cache_sample(self, step: int) -> dict[str, NDArray[np.float32]]:
        """Copy every ``step``-th token of every cache buffer to the host; waits for the last chunk.

        Parameters
        ----------
        step : int
            At least 1; `Golden.cache_step`.

        Returns
        -------
        dict of str to numpy.ndarray
            By cache buffer: its numbers as float32, or one-byte codes as integers.

        Raises
        ------
        SessionClosedError
            After `close()`.
        UsageError
            If ``step`` is less than 1.
        """
        step = min(whole_number(step, "step", 1), MAX_STEP)
        with self._rows.call_lock.take():
            return self._rows.cache_sample(step)

    def _rows_of(self, row: int | None) -> Sequence[int]:
        """Return a row that exists, or all of them for None."""
        return self._batch if row is None else [self._checked_row(row)]

    def _checked_row(self, row: int) -> int:
        if not is_whole(row) or row not in self._batch:
            raise UsageError(f"row {shown(row)} does not exist, expected 0 to {self._batch[-1]}")
        return row

    @property
    def stats(self) -> SessionStats:
        """Counters so far."""
        return self._rows.stats

    @property
    def decodes_beside(self) -> bool:
        """Whether a chunk is decoded while the next one is computed."""
        return self._rows.decodes_beside

    @property
    def closed(self) -> bool:
        """Whether the session has ended."""
        return self._rows.closed

    def close(self) -> None:
        """Wait for the running call and the device, and free all memory; a second call does nothing.

        In a forked process it does nothing, since the device must not be used there.
        """
        if not self._rows.call_lock.forked:
            with self._rows.call_lock.last():
                self._ahead.clear()
                self._rows.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def video_stream(
    session: Any,
    rows: ChunkMaker,
    prompt: str | Sequence[str] | None,
    chunks: int | None,
    recache: bool,
    inputs: Iterable[Inputs] | None,
) -> VideoStream:
    """Return the iterator of `Session.stream`, for a session of its own or in a pool."""
    if chunks is not None:
        chunks = whole_number(chunks, "chunks", 0)
    if isinstance(inputs, str | bytes | Mapping) or (inputs is not None and not iterates(inputs)):
        raise UsageError(
            f"inputs are a {type(inputs).__name__}, expected a mapping for each chunk, in a list"
        )
    recache = flag(recache, "recache")
    with rows.call_lock.take():
        ahead = int(rows.decoder().overlaps)
        if prompt is not None:
            session.set_prompt(prompt, recache=recache)
        elif recache:
            raise UsageError("recache without a prompt does nothing; give both, or neither")
    return VideoStream(session.run_chunk, session._ahead, ahead, chunks, inputs)
