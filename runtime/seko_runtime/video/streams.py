"""The streams of a session or pool, one for each row: they make chunks and have prompts. Owners of rows are not known
here.

Independent of torch: tensors and capture belong to the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import flag, items_of
from seko_runtime.backends.memory import Engine, Memory, Tensor
from seko_runtime.errors import SessionClosedError, UsageError
from seko_runtime.executor.resolved import Programs
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.host.faults import machine_faults
from seko_runtime.video.call_lock import CallLock
from seko_runtime.video.chunk import Chunk, SessionStats
from seko_runtime.video.contract import made_of, resolve_video
from seko_runtime.video.decoding import Decoder
from seko_runtime.video.inputs import Inputs, check_call
from seko_runtime.video.live import Live
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.positions import Positions
from seko_runtime.video.prompts import PROMPT_CACHE, RowPrompts
from seko_runtime.video.rank_place import ALONE, RankPlace
from seko_runtime.video.row_streams import RowStreams
from seko_runtime.video.snapshot import RowState
from seko_runtime.video.text import NO_TEXT_ENCODER, TokenIds

CLOSED = "the session is closed; open a new one with open_session()"


class Streams:
    """One stream for each row of an artifact's buffers; call `prepare` before the first chunk.

    The caller holds `call_lock`: nothing in here is safe for two threads at once.

    Parameters
    ----------
    manifest : VideoManifest
        Its files are not used.
    engines : Mapping[str, Engine]
        By name: callables ``list[tensor] -> list[tensor]``.
    weights : Mapping[str, tensor]
        By name, on the memory's device; kept alive here.
    memory : Memory
        Owned and closed by the streams.
    programs : Programs, optional
        Result of `resolve_video(manifest)`, if the caller has it already.
    prompt_ids : TokenIds, optional
        The artifact's tokenizer; without it no sentences are accepted.
    digest : str
        The artifact's digest, a part of the prompt cache's keys.
    prompt_cache : int
        Capacity of the prompt cache.
    overlap : bool
        Whether decoding runs at the same time as the chunks, if the device can.
    rank : RankPlace
        The place of this process, where several make a chunk together.

    Raises
    ------
    ManifestError, ArtifactError
        If the manifest's programs are inconsistent.
    UsageError
        If ``prompt_cache`` is negative.
    """

    @machine_faults()
    def __init__(
        self,
        manifest: VideoManifest,
        engines: Mapping[str, Engine],
        weights: Mapping[str, Tensor],
        memory: Memory,
        *,
        programs: Programs | None = None,
        prompt_ids: TokenIds | None = None,
        digest: str = "",
        prompt_cache: int = PROMPT_CACHE,
        overlap: bool = True,
        rank: RankPlace = ALONE,
    ) -> None:
        self.manifest, self.memory = manifest, memory
        self.call_lock = CallLock(CLOSED)
        self._live: Live | None = None
        try:
            overlap = flag(overlap, "overlap")
            programs = resolve_video(manifest) if programs is None else programs
            self._rows = RowStreams(manifest, memory)
            self.clocks, self.seeds = self._rows.clocks, self._rows.seeds
            self.conditioning, self.inputs = self._rows.conditioning, self._rows.inputs
            self._chunks = self._launches = 0
            self._prompts: RowPrompts | None = None
            if manifest.workload.text is not None and prompt_ids is not None:
                self._prompts = RowPrompts(memory, prompt_ids, digest, prompt_cache)
            with memory.ordered():
                self._live = Live(
                    manifest,
                    programs,
                    engines,
                    weights,
                    memory,
                    self.clocks,
                    self.inputs,
                    overlap=overlap,
                    rank=rank,
                )
        except BaseException:
            self.close()
            memory.close()  # also if there is nothing live yet; a second time does nothing
            raise

    @machine_faults()
    def prepare(self) -> None:
        """Load every engine's kernels, and capture if the memory does so."""
        self.live().prepare()

    @machine_faults()
    def run_chunk(self, rows: Sequence[int], inputs: Sequence[Inputs | None] | Inputs | None = None) -> Chunk:
        """Make the next chunk of each row; if the artifact makes video, also queue its decoding.

        The chunk counts only when it has run and its decoding is queued. After an error the same call gives the same
        bytes, since every slot that the failed attempt may have written is written again before it is read.

        Parameters
        ----------
        rows : sequence of int
            Distinct; without a pool all rows, else at most as many as the largest call carries.
        inputs : mapping or sequence of mappings, optional
            The caller's inputs, as in `CallerInputs.of_chunk`: one mapping for all rows, or one for each.

        Returns
        -------
        Chunk
            The next call for any rows overwrites its latents; `row_chunk` returns latents that stay.

        Raises
        ------
        UsageError
            If an input does not fit, or a required one is missing.
        TornStreamError
            If Ctrl-C came while a row was being advanced.
        SessionClosedError
            After `close()`.
        """
        live, clocks, known = self.live(), self.clocks, self._rows
        known.check_whole(rows)
        live.check_prompts(rows)
        frames, seeds = clocks.next_frames(rows), self.seeds[list(rows)]
        check_call(rows, inputs)
        inputs = known.voices.beside(rows, inputs, frames[:, 0].tolist())
        if inputs is None or isinstance(inputs, Mapping):
            seen = self.inputs.of_chunk(rows, inputs)
        else:
            seen = self.inputs.of_each(rows, inputs)
        first_frames, slot_firsts = frames[:, 0], [int(clocks.slot_first[row]) for row in rows]
        begins = [bool(first == 0) for first in first_frames]
        known.readable.let_go(rows)
        clocks.begin_chunk(rows)
        with self.memory.ordered():
            known.settle(rows)
            due = [row for row in rows if row in known.rebuild_due]
            if due:
                known.rebuild_caches(live, due)
                slot_firsts = [int(clocks.slot_first[row]) for row in rows]
            given = self.conditioning.of_chunk(rows, first_frames)
            self._launches += live.run_chunk(Positions(rows, seeds, frames, slot_firsts, given), seen)
            if live.decoder is not None:
                live.decoder.feed(rows, live.latents)
        known.torn.update(rows)  # until the host has counted what the device has decoded
        try:
            numbers = () if live.decoder is None else live.decoder.decode(rows, begins)
        except Exception:
            known.torn.difference_update(rows)  # the decoder knows what to do again
            raise
        self.inputs.chunk_made(rows, [clocks.next_kept_slot(row) for row in rows], seen)
        clocks.chunk_made(rows)
        # `rewind` goes back by the frames of the cache at most.
        heard_at = known.voices.heard_at(rows, first_frames.tolist())
        known.voices.made(
            rows, (clocks.first[list(rows)] - self.manifest.workload.stream.cache_frames).tolist()
        )
        latents = self.memory.leading(live.latents, len(rows))
        pictures = tuple(zip(rows, numbers, strict=True)) if numbers else ()
        chunk = Chunk(self._chunks, frames, latents, self, self._chunks, pictures, heard_at=heard_at)
        known.readable.made(rows, self._chunks)
        self._chunks += 1
        known.torn.difference_update(rows)
        return chunk

    def begin_owner(self, row: int, tenant: str | None) -> None:
        """Give a row another owner, or none; see `RowPrompts.begin_owner`."""
        if self._prompts is not None:
            self._prompts.begin_owner(row, tenant)

    def row_chunk(self, chunk: Chunk, place: int, row: int) -> Chunk:
        """Return one row's part of the last chunk, with latents that only the row's own next chunk overwrites.

        It is numbered by the row's own count. The latents are those kept for a rebuilt cache, so nothing is copied.
        """
        index = self.clocks.made(row) - 1
        latents = self.live().kept_latents(row)
        part = slice(place, place + 1)
        frames = chunk.frames[part]
        heard_at = self._rows.voices.heard_at([row], frames[:, 0].tolist())
        return Chunk(index, frames, latents, self, chunk.serial, chunk.pictures[part], row, heard_at)

    @machine_faults()
    def set_prompt(self, rows: Sequence[int], prompt: str | Sequence[str], *, recache: bool = False) -> None:
        """Set rows' prompts to sentences, one for all or one for each; see `Session.set_prompt`."""
        live = self._live_for(recache=recache)
        if self._prompts is None:
            raise UsageError(NO_TEXT_ENCODER)
        # What is no sentence is refused where each is cleaned.
        prompts = (
            [prompt] * len(rows)
            if isinstance(prompt, str)
            else items_of(
                prompt, f"a prompt is a text, got {type(prompt).__name__}; give one, or a list of one each"
            )
        )
        if len(prompts) != len(rows):
            raise UsageError(f"{len(prompts)} prompts given for {len(rows)} rows, expected one, or one each")
        with self.memory.ordered():
            self._rows.settle(rows)
        self._prompts.set(live, rows, prompts)
        if recache:
            self._rows.recache(live, rows)

    @machine_faults()
    def set_text(self, rows: Sequence[int], text: object, *, recache: bool = False) -> None:
        """Set rows' prompts to embeddings [k, tokens, text_dim]; see `Session.set_text`."""
        live = self._live_for(recache=recache)
        with self.memory.ordered():
            self._rows.settle(rows)
        live.set_text(rows, text)
        if recache:
            self._rows.recache(live, rows)

    @machine_faults()
    def set_conditioning(self, rows: Sequence[int], image: object = None, latents: object = None) -> None:
        """Begin rows' streams with a picture or with latents; see `ConditioningFrames`."""
        live = self.live()
        with self.memory.ordered():
            self._rows.settle(rows)
        if image is not None:
            self.conditioning.set_image(live, rows, image)
        if latents is not None:
            self.conditioning.set_latents(live, rows, latents)

    @machine_faults()
    def set_inputs(
        self, rows: Sequence[int], inputs: Inputs | None, *, opening: bool = False, image: object = None
    ) -> None:
        """Set rows' inputs per session or prompt, from their next chunks on.

        Parameters
        ----------
        rows : sequence of int
            k of them.
        inputs : mapping of str to array
            [*shape] for all of the rows, or [k, *shape].
        opening : bool
            Whether their streams are just beginning: all required inputs must then be there, and the prompt is set
            later.
        image : array, optional
            The picture that they begin with: an input that is made of it may then be missing.

        Raises
        ------
        UsageError
            If an input does not fit, or a required one is missing.
        """
        live = self.live()
        if opening:
            self.inputs.check_opening(inputs, made_of(self.manifest, image))
        with self.memory.ordered():
            self._rows.settle(rows)
        live.set_inputs(rows, inputs, rerun=not opening)

    def push_audio(
        self, rows: Sequence[int], samples: object, at: int | None = None, *, last: bool = False
    ) -> None:
        """Append samples to rows' voices; see `Session.push_audio`."""
        self.live()
        self._rows.voices.push(rows, samples, at, last=last)

    def audio_needed(self, row: int) -> tuple[int, int]:
        """Return the samples that a row's next chunk hears; see `Session.audio_needed`."""
        self.live()
        return self._rows.voices.windows.needed(int(self.clocks.first[row]))

    @machine_faults()
    def set_reference(self, rows: Sequence[int], reference: object) -> None:
        """Set the reference frames of rows whose streams are beginning; see `reference_frames.set_reference`."""
        self._rows.set_reference(self.live(), rows, reference)

    @machine_faults()
    def restart(
        self, row: int, *, seed: int | None = None, image: object = None, reference: object = None
    ) -> None:
        """Restart a row; see `Session.restart_row`."""
        self._rows.restart(self.live(), row, seed, image, reference)

    @machine_faults()
    def rewind(self, rows: Sequence[int], chunk: int) -> None:
        """Set rows back to where they stood before they made a chunk; see `Session.rewind`."""
        self._rows.rewind(self.live(), rows, chunk)

    @machine_faults()
    def forget(self, row: int, seed: int) -> None:
        """Queue zeros into everything of a row's stream, before another owner's stream with a seed begins there."""
        self._rows.forget(self.live(), row)
        self.seeds[row] = seed

    @machine_faults()
    def reserve(self, row: int) -> None:
        """Allocate what the host needs for a row; this may wait for the device."""
        decoder = self.live().decoder
        if decoder is not None:
            decoder.reserve(row)

    @machine_faults()
    def store(self, row: int) -> RowState:
        """Queue copies of a row's whole stream to the host, beside chunks of others; TornStreamError if it is torn."""
        return self._rows.store(self.live(), row)

    @machine_faults()
    def load(self, row: int, state: RowState) -> None:
        """Queue copies of a stored stream into a row, which then continues it; SnapshotError if it does not fit."""
        self._rows.load(self.live(), row, state)

    def layout(self) -> dict[str, TensorSpec]:
        """Return the tensors of one row's stream."""
        return self._rows.layout(self.live())

    @machine_faults()
    def read_latents(self, chunk: Chunk) -> Callable[[], NDArray[np.float32]]:
        """Queue the copy of a chunk's latents to the host; return a function that waits for it and returns it."""
        self.live()
        self._rows.readable.check(chunk)
        shape, _ = self.memory.describe(chunk.latents)
        with self.memory.ordered():
            parked, end = self.memory.park({"latents": chunk.latents})
            self.memory.after(end)  # the next chunk may overwrite them
        return lambda: parked.arrays()["latents"].view(np.float32).reshape(shape).copy()

    @machine_faults()
    def cache_sample(self, step: int) -> dict[str, NDArray[np.float32]]:
        """Copy every ``step``-th token of every cache buffer to the host; waits for the last chunk."""
        return self.live().cache_sample(step)

    def free_bytes(self) -> int:
        """Return the device's free memory."""
        return self.memory.free_bytes()

    def live(self) -> Live:
        """Return the device side; SessionClosedError after `close`."""
        if self._live is None:
            raise SessionClosedError(CLOSED)
        return self._live

    def decoder(self) -> Decoder:
        """Return the decoder; UsageError if the artifact makes no video."""
        decoder = self.live().decoder
        if decoder is None:
            raise UsageError("this artifact makes no video; read latents with run_chunk().to_host()")
        return decoder

    @property
    def stats(self) -> SessionStats:
        """Counters so far."""
        live, cache = self._live, None if self._prompts is None else self._prompts.cache
        return SessionStats(
            chunks=self._chunks,
            graph_launches=self._launches,
            captured_graphs=0 if live is None else len(live.replays),
            pool_bytes=self.manifest.workload.kv.pool_bytes,
            prompt_cache_hits=0 if cache is None else cache.hits,
            prompt_cache_misses=0 if cache is None else cache.misses,
        )

    @property
    def decodes_beside(self) -> bool:
        """Whether a chunk is decoded while the next one is computed."""
        live = self._live
        decoder = None if live is None else live.decoder
        return decoder is not None and decoder.overlaps

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._live is None

    @machine_faults()
    def close(self) -> None:
        """Wait for the device and free all memory; a second call does nothing."""
        live, self._live = self._live, None
        if live is None:
            return
        self.memory.wait()
        if self._prompts is not None:
            self._prompts.cache.clear()
        live.drop()
        self.memory.close()

    def _live_for(self, *, recache: bool) -> Live:
        """Return the device side if it can do what is asked; UsageError if a cache cannot be rebuilt."""
        live = self.live()
        if flag(recache, "recache") and not self.manifest.has_context:
            raise UsageError(
                "this artifact has a cache for each denoise pass and no context pass that could rebuild them; set the "
                "prompt without recache, or restart the row"
            )
        return live
