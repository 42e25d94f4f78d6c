"""The video streams of a pool in this process: the host's state of each stream, and the operations that change it.

`LocalVideoRows` does not import torch, because tensors and captured graphs belong to the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import as_array, flag, real_number, shown, whole_number
from seko_runtime.backends.memory import Memory
from seko_runtime.controls.pictures import LAST_FRAME_KIND
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.host.faults import machine_faults
from seko_runtime.sessions.loaded import Loaded
from seko_runtime.sessions.row_state import RowState
from seko_runtime.sessions.rows import LocalRows
from seko_runtime.video.chunk import NO_VIDEO, Chunk, Readable, SessionStats
from seko_runtime.video.clocks import MAX_JUMP, checked_seed
from seko_runtime.video.conditioning.clip_pictures import with_clip_pictures
from seko_runtime.video.contract import begins_with_picture, input_of_picture
from seko_runtime.video.decoding import Decoder
from seko_runtime.video.device import VideoDevice
from seko_runtime.video.inputs import Inputs, check_call
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.options import VideoOptions
from seko_runtime.video.positions import Positions
from seko_runtime.video.prompts import RowPrompts
from seko_runtime.video.reference_frames import check_reference, set_reference, with_portrait
from seko_runtime.video.row_numbers import STATE_FORM
from seko_runtime.video.rows import Beginning
from seko_runtime.video.streams import Streams
from seko_runtime.video.text import no_sentences


class LocalVideoRows(LocalRows[VideoManifest, VideoDevice]):
    """The video streams of a pool in this process. Call `prepare` before the first chunk.

    Parameters
    ----------
    loaded : Loaded
        The opened artifact, with the number of denoise passes that these streams use.
    options : VideoOptions
        Options of the pool; ``steps`` and ``shift`` have already been applied to the manifest.
    memory : Memory
        The memory of the pool's tensors; `close` closes it.

    Attributes
    ----------
    streams : Streams
        The host's state of the streams.

    Raises
    ------
    UsageError
        If an option of the pool is impossible for the artifact.
    """

    @machine_faults()
    def __init__(self, loaded: Loaded[VideoManifest], options: VideoOptions, memory: Memory) -> None:
        super().__init__(loaded, memory, STATE_FORM)
        manifest = loaded.manifest
        self.streams = Streams(manifest, memory)
        self.readable = Readable()
        self._chunks = self._launches = 0
        self._prompts: RowPrompts | None = None
        if manifest.workload.text is not None and loaded.tokens is not None:
            self._prompts = RowPrompts(
                memory,
                loaded.tokens,
                loaded.digest,
                options.prompt_cache,
                may_be_empty=begins_with_picture(self.manifest),
            )
        self._open(lambda: VideoDevice(loaded, memory, self.streams.clocks, self.streams.inputs, options))

    @machine_faults()
    def run(self, rows: Sequence[int], inputs: Sequence[Inputs | None] | None = None) -> list[Chunk]:
        """Make the next chunk of some streams; if the artifact makes video, also queue the decoding of these chunks.

        The streams advance only when their chunks have run and their decoding is queued. After an error the same call
        of `run` gives the same bytes, because every slot that the failed attempt may have written is written again
        before it is read.

        Parameters
        ----------
        rows : sequence of int
            Distinct row numbers, at most as many as the largest engine call carries; if the artifact was built without
            ``--sessions``, all rows in order.
        inputs : sequence of mappings, optional
            The inputs that the callers supply for each stream's chunk, as in `CallerInputs.of_chunk`.

        Returns
        -------
        list of Chunk
            The chunk of each stream, with the chunk's number in the stream. A chunk is valid until the stream's next
            chunk. A chunk's latents are a view of the buffer that keeps the latents, without a copy.

        Raises
        ------
        UsageError
            If an input of a chunk is invalid, or a required input is missing.
        TornStreamError
            If Ctrl-C came while a stream was being advanced.
        SessionClosedError
            If the pool is closed.
        """
        device, clocks = self.device(), self.streams.clocks
        arrays = self._chunk_inputs(rows, inputs)
        frames, seeds = clocks.next_frames(rows), self.streams.seeds[list(rows)]
        first_frames, slot_firsts = frames[:, 0], [clocks.next_slot_first(row) for row in rows]
        begins = [bool(first == 0) for first in first_frames]
        self.readable.let_go(rows)
        clocks.begin_chunk(rows)
        with self._undone(rows), self.settled(rows):
            due = [row for row in rows if row in self.streams.rebuild_due]
            if due:
                self._rebuild_caches(due)
                slot_firsts = [clocks.next_slot_first(row) for row in rows]
            if device.context is not None and (later := [row for row in rows if clocks.chunks_made(row)]):
                self._in_calls(later, device.write_contexts)
            conditioned = self.streams.conditioning.of_chunk(rows, first_frames)
            positions = Positions(rows, seeds, clocks.next_positions(rows), slot_firsts, conditioned)
            video = self.streams.inputs.frames(arrays)
            if device.encoder is not None and video is not None:
                device.encoder.encode(rows, begins, video)
            self._launches += device.run_chunk(positions, arrays, partial(self._decode, rows, begins))
        pictures = () if device.decoder is None else device.decoder.chunk_made(rows)
        if device.encoder is not None:
            device.encoder.chunk_made(rows)
        self.streams.chunk_made(rows, arrays)
        serial = self._chunks
        self.readable.record(rows, serial)
        self._chunks += 1
        self.inconsistent.difference_update(rows)
        return [
            Chunk(
                index=clocks.chunks_made(row) - 1,
                frames=frames[batch_index : batch_index + 1],
                latents=device.kept_latents(row),
                maker=self,
                serial=serial,
                row=row,
                picture=pictures[batch_index] if pictures else None,
                parts=1 if device.decoder is None else device.decoder.parts,
            )
            for batch_index, row in enumerate(rows)
        ]

    @contextmanager
    def _undone(self, rows: Sequence[int]) -> Iterator[None]:
        """Context manager for a chunk of these rows: after an error none of them is inconsistent, because the decoder
        knows what it has decoded."""
        try:
            yield
        except Exception:
            self.inconsistent.difference_update(rows)
            raise

    def _decode(self, rows: Sequence[int], begins: Sequence[bool]) -> None:
        """Queue the decoding of the latents of a call; the rows are inconsistent until the host has counted the
        chunk."""
        decoder = self.device().decoder
        if decoder is not None:
            decoder.feed(rows, self.device().latents)
        self.inconsistent.update(rows)
        if decoder is not None:
            decoder.decode(rows, begins)

    def _chunk_inputs(
        self, rows: Sequence[int], inputs: Sequence[Inputs | None] | None
    ) -> Mapping[str, NDArray[Any]]:
        """Return the inputs of the next chunk of some streams; raise an error if an input is missing."""
        self.check_whole(rows)
        self._check_first_chunks(rows)
        self.device().check_prompts(rows)
        inputs = [None] * len(rows) if inputs is None else inputs
        check_call(rows, inputs)
        return self.streams.inputs.of_each(rows, inputs)

    def _check_first_chunks(self, rows: Sequence[int]) -> None:
        """Raise a UsageError if a single launch would have to run both first chunks and later chunks, which differ."""
        apart = self.manifest.pool is None and self.manifest.first_apart
        if apart and len({self.streams.clocks.chunks_made(row) == 0 for row in rows}) > 1:
            raise UsageError(
                "the first chunk of this artifact has passes of its own, and all its rows run together: restart all "
                "rows, or rebuild it with --sessions"
            )

    def check(self, rows: Sequence[int], inputs: Sequence[Inputs | None]) -> None:
        """Raise the error that `run` would raise for these rows before it queues work; otherwise do nothing."""
        self._chunk_inputs(rows, inputs)

    def variants(self, rows: Sequence[int]) -> list[Hashable]:
        """Return for each row whether its next chunk runs on the engines for full caches, and whether it runs the
        passes of a first chunk."""
        calls, clocks = self.device().chunk, self.streams.clocks
        by_fill, apart = any(call.full for call in calls), any(call.first for call in calls)
        return [(by_fill and clocks.full(row), apart and not clocks.chunks_made(row)) for row in rows]

    def begin_owner(self, row: int, tenant: str | None) -> None:
        """Give a row of the pool another owner, or none; see `RowPrompts.begin_owner`."""
        if self._prompts is not None:
            self._prompts.begin_owner(row, tenant)

    @machine_faults()
    def begin(self, row: int, beginning: Beginning) -> None:
        """Begin a stream on an empty row of the pool; UsageError if a condition of the stream is invalid."""
        seed = checked_seed(beginning.seed)
        beginning.check()
        image = beginning.image
        inputs = with_portrait(self.manifest, beginning.inputs, beginning.reference)
        inputs = with_clip_pictures(self.manifest, inputs, image)
        self.device()
        self.streams.inputs.check_opening(inputs, input_of_picture(self.manifest, image))
        self._write_inputs(row, inputs, rerun=False)
        if beginning.prompt is not None:
            self.set_prompt(row, beginning.prompt)
        else:
            self.set_text(row, beginning.text)
        self.set_conditioning(row, image, beginning.conditioning_latents)
        self._set_reference(row, beginning.reference)
        self.streams.seeds[row] = seed

    @machine_faults()
    def set_prompt(self, row: int, prompt: str, *, recache: bool = False, weight: float = 1.0) -> None:
        """Set a row's prompt to a sentence; see `Session.set_prompt`."""
        if not 0 < real_number(weight, "weight") <= 1:
            raise UsageError(f"weight is {weight}, expected a number above 0, at most 1")
        device, prompts = self._device_for(row, recache=recache), self._row_prompts()
        self.settle([row])
        prompts.set(device, row, prompt, weight)
        if recache:
            self._recache(row)

    def check_prompt(self, row: int | None, prompt: str, *, recache: bool = False) -> None:
        """Raise the error that `set_prompt` would raise for a sentence; the prompt does not change."""
        self._device_for(row, recache=recache)
        self._row_prompts().check(prompt)

    @machine_faults()
    def set_text(self, row: int, text: object, *, recache: bool = False) -> None:
        """Set a row's prompt to embeddings [1, tokens, text_dim]; see `Session.set_text`."""
        device = self._device_for(row, recache=recache)
        self.settle([row])
        device.set_text(row, text)
        if recache:
            self._recache(row)

    @machine_faults()
    def set_conditioning(self, row: int, image: object = None, latents: object = None) -> None:
        """Make a picture, or latents, the beginning of a stream; see `ConditioningFrames`."""
        device = self.device()
        self.settle([row])
        if image is not None:
            self.streams.conditioning.set_image(device, row, image)
        if latents is not None:
            self.streams.conditioning.set_latents(device, row, latents)

    @machine_faults()
    def set_inputs(self, row: int, inputs: Inputs | None) -> None:
        """Set the inputs that the caller supplies once for a session or prompt, from the stream's next chunk on.

        Parameters
        ----------
        row : int
            Number of the stream's row.
        inputs : mapping of str to array
            Arrays by input name, [*shape] or [1, *shape].

        Raises
        ------
        UsageError
            If an input's name is unknown, or its array has a wrong shape, dtype or value.
        """
        self._write_inputs(row, inputs, rerun=True)

    def _write_inputs(self, row: int, inputs: Inputs | None, *, rerun: bool) -> None:
        device = self.device()
        self.settle([row])
        device.set_inputs(row, inputs, rerun=rerun)

    def next_frame(self, row: int) -> int:
        """Return the number of the first latent frame of a stream's next chunk."""
        self.device()
        return int(self.streams.clocks.first[row])

    def _set_reference(self, row: int, reference: object) -> None:
        """Set the reference frames of a stream that is about to begin; see `reference_frames.set_reference`."""
        self.settle([row])
        if set_reference(self.device(), self.manifest, self.memory, row, reference):
            # reference frames are written before the next chunk, with the prompt at that time
            self.streams.rebuild_due.add(row)

    @machine_faults()
    def restart(
        self, row: int, *, seed: int | None = None, image: object = None, reference: object = None
    ) -> None:
        """Restart a stream at frame 0 with an empty cache; see `Session.restart`."""
        device = self.device()
        new_seed = None if seed is None else checked_seed(seed)
        if reference is not None:
            check_reference(self.manifest, as_array(reference, "reference"))
        self.settle([row])
        if image is None:
            self.streams.conditioning.drop(row)
        else:
            self.streams.conditioning.set_image(device, row, image)
        # All checks are done: an error from here on loses the old stream, and the row is inconsistent.
        self.inconsistent.add(row)
        if new_seed is not None:
            self.streams.seeds[row] = new_seed
        if reference is not None:
            self._set_reference(row, reference)
            device.set_inputs(row, with_portrait(self.manifest, None, reference), rerun=True)
        if image is not None:
            device.set_inputs(row, with_clip_pictures(self.manifest, None, image), rerun=True)
        with self.memory.ordered():
            device.clear_cache(row)
        self._restart(row)
        self.inconsistent.discard(row)

    def cut(self, row: int, frames: int) -> None:
        """Begin another scene with a row's next chunk; see `Session.cut`."""
        self.device()
        self.check_whole([row])
        if self.manifest.workload.stream.rings:
            raise UsageError(
                "this artifact has rings of several sizes, which cannot keep a chunk alike; cut nothing"
            )
        if self.manifest.averages_sink:
            raise UsageError(
                "this artifact averages evicted chunks into its sink, where scenes would mix; restart the row instead"
            )
        if self.manifest.workload.schedule.chunks_at_once > 1:
            raise UsageError(
                "this artifact denoises several chunks at once, which a cut would part; restart the row instead"
            )
        if any(spec.kind == LAST_FRAME_KIND for spec in self.manifest.caller_inputs):
            raise UsageError(
                "this artifact's streams lead to a last picture at a numbered frame, and a cut moves the numbers; "
                "restart the row instead"
            )
        self.streams.clocks.cut(row, whole_number(frames, "frames", 0, MAX_JUMP))

    @machine_faults()
    def rewind(self, row: int, chunk: int) -> None:
        """Set a stream back to its state before it made chunk number ``chunk``; see `Session.rewind`."""
        device = self.device()
        self.check_whole([row])
        self._check_rewind(device, row, chunk)
        self.readable.let_go([row])
        self.settle([row])
        if chunk == self.streams.clocks.chunks_made(row):
            return
        slots = self.streams.clocks.kept_slots_before(chunk)
        self.inconsistent.add(row)
        if device.decoder is not None:
            device.decoder.rewind(row, [device.kept_latents(row, slot) for slot in slots])
        self.streams.inputs.rewind(row, slots[-1] if slots else None)
        self.streams.clocks.rewind(row, chunk)
        self.inconsistent.discard(row)

    def _check_rewind(self, device: VideoDevice, row: int, chunk: int) -> None:
        stream, chunks_made = self.manifest.workload.stream, self.streams.clocks.chunks_made(row)
        earliest = self.streams.clocks.earliest(row, min((stream.ring_frames, *stream.rings.values())))
        why = "the cache holds no frames that it would need"
        # The decoder's caches are restored by decoding all chunks again.
        if device.decoder is not None and not self.streams.clocks.keeps_all(row):
            earliest, why = (
                chunks_made,
                "not all of its chunks are kept, of which the VAE's caches would be made again",
            )
        if device.encoder is not None:
            earliest, why = chunks_made, "the encoder of its video keeps nothing"
        if self.manifest.workload.schedule.chunks_at_once > 1 and chunk != 0:
            earliest = max(earliest, self.streams.clocks.last_begun(row))
            why = "the latents of later chunks, which were denoised beside it, are gone"
        if isinstance(chunk, bool) or not isinstance(chunk, int) or not earliest <= chunk <= chunks_made:
            raise UsageError(
                f"a row that has made {chunks_made} chunks cannot step back to chunk {shown(chunk)}, expected "
                f"{earliest} to {chunks_made}" + (f": before that {why}" if earliest else "")
            )

    @machine_faults()
    def reserve(self, row: int) -> None:
        """Allocate the host memory that a stream needs; this may wait for the device."""
        decoder = self.device().decoder
        if decoder is not None:
            decoder.reserve(row)

    @machine_faults()
    def read_latents(self, row: int, serial: int, index: int) -> Callable[[], NDArray[np.float32]]:
        """Queue the copy of a chunk's latents to the host; return a function that waits for the copy and returns the
        latents. The parameters are attributes of the `Chunk`."""
        device = self.device()
        self.readable.check(row, serial, index)
        latents = device.kept_latents(row)  # only a row's last chunk is readable
        shape, _ = self.memory.describe(latents)
        # copied, because the next chunk may overwrite them
        read = self.read_later({"latents": latents})
        return lambda: read()["latents"].view(np.float32).reshape(shape).copy()

    def video_finished(self, row: int, number: int, part: int) -> Callable[[], None]:
        """Return a function that waits until the video frames of a part of one chunk of a stream are on the host; see
        `Decoder.finished`."""
        return self.decoder().finished(row, number, part)

    def video_frames(self, row: int, number: int, part: int) -> NDArray[np.uint8]:
        """Return a row's video frames of a part of one chunk, uint8 [T, H, W, 3], once they are on the host; see
        `Decoder.video_frames`."""
        return self.decoder().video_frames(row, number, part)

    @machine_faults()
    def cache_sample(self, step: int) -> dict[str, NDArray[np.float32]]:
        """Copy every ``step``-th token of every cache buffer to the host; waits for the last chunk."""
        return self.device().cache_sample(step)

    def decoder(self) -> Decoder:
        """Return the decoder of video frames; UsageError if the artifact has no VAE."""
        decoder = self.device().decoder
        if decoder is None:
            raise UsageError(NO_VIDEO)
        return decoder

    @property
    def stats(self) -> SessionStats:
        """Counters of the pool so far: chunks, graph launches, and hits and misses of the prompt cache."""
        device, cache = self._device, None if self._prompts is None else self._prompts.cache
        return SessionStats(
            chunks=self._chunks,
            graph_launches=self._launches,
            captured_graphs=0 if device is None else len(device.replays),
            pool_bytes=self.manifest.workload.kv.pool_bytes,
            prompt_cache_hits=0 if cache is None else cache.hits,
            prompt_cache_misses=0 if cache is None else cache.misses,
        )

    @property
    def overlaps_decoding(self) -> bool:
        """Whether a chunk is decoded while the next one is computed."""
        decoder = None if self._device is None else self._device.decoder
        return decoder is not None and decoder.overlaps

    def _row_prompts(self) -> RowPrompts:
        if self._prompts is None:
            raise UsageError(no_sentences(self.manifest))
        return self._prompts

    def _device_for(self, row: int | None, *, recache: bool) -> VideoDevice:
        """Return the device side; UsageError if ``recache`` is asked and the row's cache cannot be rebuilt."""
        device = self.device()
        if flag(recache, "recache") and (refusal := self.manifest.no_rebuild):
            raise UsageError(f"{refusal}; set the prompt without recache, or restart the row")
        if recache and row is not None and self.streams.clocks.has_cut(row):
            raise UsageError(
                "this session has cut to another scene, and the latents of the chunk that the cut keeps may be gone; "
                "set the prompt without recache, or restart the row"
            )
        return device

    def _recache(self, row: int) -> None:
        """Rebuild the KV cache of a stream with its current prompt; where caches are made again before each chunk,
        there is nothing to do."""
        if self.device().context is not None:
            return
        self.streams.rebuild_due.add(row)  # until the rebuild is done: a chunk must not run on half a cache
        with self.memory.ordered():
            self._rebuild_caches([row])

    def _rebuild_caches(self, rows: Sequence[int]) -> None:
        """Rebuild the KV caches of the streams that are due; called inside the memory's `ordered`."""
        self._in_calls(rows, self.device().rebuild_caches)
        self.streams.rebuild_due.difference_update(rows)

    def _in_calls(
        self, rows: Sequence[int], queue: Callable[[Sequence[int], NDArray[np.int64]], None]
    ) -> None:
        """Queue a rebuild of the KV caches of some streams, by calls with these rows and all seeds."""
        # The rows of a pool are rebuilt one by one, so that the bucket, and with it the rounding, does not depend on
        # other sessions.
        most = 1 if self.manifest.pool is not None else self.manifest.call_rows
        for first in range(0, len(rows), most):
            queue(rows[first : first + most], self.streams.seeds)

    def _begin(self, row: int) -> None:
        if self.manifest.offloads_cache:
            with self.memory.ordered():
                self.device().clear_cache(row)
        self.streams.conditioning.drop(row)
        self._restart(row)

    def _restart(self, row: int) -> None:
        """Set the host's state of a row to the beginning of a stream, whose conditioning frames must have been set
        before."""
        self.streams.restart(row)
        self.device().restart(row)

    def _save(self, row: int) -> tuple[Any, Mapping[str, NDArray[np.uint8]]]:
        device = self.device()
        self._check_moves()
        device.check_prompts([row])
        if device.decoder is not None:
            device.decoder.check(row)
        if device.encoder is not None:
            device.encoder.check(row)
        return self.streams.numbers(row), self.streams.inputs.state(row)

    def _check_moves(self) -> None:
        if self.manifest.offloads_cache:
            raise UsageError(
                "the cache of this artifact lies on the host (--offload-cache): its sessions cannot be paused, saved "
                "or restored"
            )

    def _check_load(self, state: RowState) -> None:
        self._check_moves()
        self.streams.check(state)

    def _load(self, row: int, state: RowState) -> None:
        device = self.device()
        self.streams.load(row, state)
        device.restart(row)
        device.half_prompted.discard(row)

    def _let_go(self, rows: Sequence[int]) -> None:
        self.readable.let_go(rows)

    def _arrays(self) -> Mapping[str, TensorSpec]:
        return self.streams.inputs.layout()

    def _drop(self) -> None:
        if self._prompts is not None:
            self._prompts.cache.clear()
