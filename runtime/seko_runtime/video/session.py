"""A session: one batch of streams that advance together, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import flag, is_whole, iterates, shown, whole_number
from seko_runtime.backends.memory import Engine, Memory, Tensor
from seko_runtime.errors import UsageError
from seko_runtime.executor.resolved import Programs
from seko_runtime.video.chunk import Chunk, ChunkMaker, SessionStats
from seko_runtime.video.clocks import checked_seeds
from seko_runtime.video.conditioning import Camera, steered
from seko_runtime.video.inputs import Inputs
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.prompts import PROMPT_CACHE
from seko_runtime.video.rank_place import ALONE, RankPlace
from seko_runtime.video.reference_frames import with_portrait
from seko_runtime.video.streams import Streams
from seko_runtime.video.text import TokenIds
from seko_runtime.video.video_stream import QueuedChunks, VideoStream

__all__ = ["Chunk", "Session", "SessionStats"]


MAX_STEP = 1 << 31  # between two tokens of a sample of the cache


class Session:
    """Streams of one batch; rows may be at different chunks.

    For a pool's artifact it is a batch of the largest call's size. It is for one thread at a time: a call during
    another thread's call raises a SessionBusyError, except `close`, which waits.

    Parameters
    ----------
    manifest, engines, weights, memory, programs, prompt_ids, digest, prompt_cache, overlap, rank
        As `Streams` takes them.
    seeds, text, prompt, reference, inputs
        As `OpenArtifact.open_session` takes them; what the artifact has a place for is required.
    image : array, optional
        uint8 [H, W, 3] or [B, H, W, 3]: each stream begins with this picture.
    conditioning_latents : array, optional
        Instead of ``image``: float32 [C, n, h, w] or [B, C, n, h, w], n up to F.

    Raises
    ------
    ManifestError, ArtifactError
        If the manifest's programs are inconsistent.
    UsageError
        If seeds, text or conditioning frames do not fit the batch.
    EnvironmentLacksError, ArtifactError
        If ``prompt`` cannot be tokenised.
    """

    def __init__(
        self,
        manifest: VideoManifest,
        engines: Mapping[str, Engine],
        weights: Mapping[str, Tensor],
        memory: Memory,
        *,
        seeds: Sequence[int],
        text: object = None,
        prompt: str | Sequence[str] | None = None,
        image: object = None,
        conditioning_latents: object = None,
        reference: object = None,
        inputs: Inputs | None = None,
        programs: Programs | None = None,
        prompt_ids: TokenIds | None = None,
        digest: str = "",
        prompt_cache: int = PROMPT_CACHE,
        overlap: bool = True,
        rank: RankPlace = ALONE,
    ) -> None:
        self.manifest = manifest
        self._rows = range(manifest.call_rows)
        self._ahead = QueuedChunks()  # queued by `stream`, not given out yet
        streams = Streams(
            manifest,
            engines,
            weights,
            memory,
            programs=programs,
            prompt_ids=prompt_ids,
            digest=digest,
            prompt_cache=prompt_cache,
            overlap=overlap,
            rank=rank,
        )
        self._streams = streams
        try:
            streams.seeds[list(self._rows)] = checked_seeds(seeds, len(self._rows))
            if (prompt is not None and text is not None) or (
                image is not None and conditioning_latents is not None
            ):
                raise UsageError(
                    "found both prompt and text, or both image and conditioning_latents; give one"
                )
            given = with_portrait(manifest, inputs, reference)
            streams.set_inputs(self._rows, given, opening=True, image=image)
            if prompt is not None:
                self.set_prompt(prompt)
            else:
                self.set_text(text)
            streams.set_conditioning(self._rows, image, conditioning_latents)
            streams.set_reference(self._rows, reference)
            streams.prepare()
            if manifest.workload.video is not None:
                for row in self._rows:
                    streams.decoder().reserve(row)
        except BaseException:
            self.close()
            raise

    def run_chunk(self, inputs: Inputs | None = None, *, camera: Camera | None = None) -> Chunk:
        """Make the next chunk of every row; see `Streams.run_chunk`.

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
        with self._streams.call_lock.take():
            return steered(lambda all_inputs: self._streams.run_chunk(self._rows, all_inputs), inputs, camera)

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
        return video_stream(self, self._streams, prompt, chunks, recache, inputs)

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
        with self._streams.call_lock.take():
            self._streams.set_prompt(self._rows, prompt, recache=recache)

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
        with self._streams.call_lock.take():
            self._streams.set_text(self._rows, text, recache=recache)

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
        with self._streams.call_lock.take():
            self._streams.set_inputs(self._rows, inputs)

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
        with self._streams.call_lock.take():
            if self._ahead:
                raise UsageError("the session has a chunk that `stream` has not given out; take it first")
            self._streams.rewind(self._rows_of(row), chunk)

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
        with self._streams.call_lock.take():
            self._streams.push_audio(self._rows_of(row), samples, at, last=last)

    def audio_needed(self, row: int = 0) -> tuple[int, int]:
        """Return which samples of the voice a row's next chunk hears: the first, and the one behind the last.

        Raises
        ------
        UsageError
            If the artifact hears no audio, or there is no such row.
        SessionClosedError
            After `close()`.
        """
        with self._streams.call_lock.take():
            return self._streams.audio_needed(self._checked_row(row))

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
        with self._streams.call_lock.take():
            self._streams.restart(self._checked_row(row), seed=seed, image=image, reference=reference)

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
        with self._streams.call_lock.take():
            return self._streams.cache_sample(step)

    def _rows_of(self, row: int | None) -> Sequence[int]:
        """Return a row that exists, or all of them for None."""
        return self._rows if row is None else [self._checked_row(row)]

    def _checked_row(self, row: int) -> int:
        if not is_whole(row) or row not in self._rows:
            raise UsageError(f"row {shown(row)} does not exist, expected 0 to {self._rows[-1]}")
        return row

    @property
    def stats(self) -> SessionStats:
        """Counters so far."""
        return self._streams.stats

    @property
    def decodes_beside(self) -> bool:
        """Whether a chunk is decoded while the next one is computed."""
        return self._streams.decodes_beside

    @property
    def closed(self) -> bool:
        """Whether the session has ended."""
        return self._streams.closed

    def close(self) -> None:
        """Wait for the running call and the device, and free all memory; a second call does nothing.

        In a forked process it does nothing, since the device must not be used there.
        """
        if not self._streams.call_lock.forked:
            with self._streams.call_lock.last():
                self._ahead.clear()
                self._streams.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def video_stream(
    session: Any,
    streams: ChunkMaker,
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
    with streams.call_lock.take():
        ahead = int(streams.decoder().overlaps)
        if prompt is not None:
            session.set_prompt(prompt, recache=recache)
        elif recache:
            raise UsageError("recache without a prompt does nothing; give both, or neither")
    return VideoStream(session.run_chunk, session._ahead, ahead, chunks, inputs)
