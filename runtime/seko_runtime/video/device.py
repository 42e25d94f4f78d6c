"""The device side of a pool of video streams: their programs, kept latents and decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import check_magnitude
from seko_runtime.backends.memory import Memory, Tensor
from seko_runtime.errors import TornStreamError, UsageError
from seko_runtime.executor.contract import RANK
from seko_runtime.executor.resolved import Programs
from seko_runtime.format.manifest import Buffer, EngineSpec, TensorSpec
from seko_runtime.host.part_times import part
from seko_runtime.host.releasing import release_all
from seko_runtime.sessions.device import Device, has_rows
from seko_runtime.sessions.loaded import Loaded
from seko_runtime.video.chunk_programs import ChunkCall, chunk_programs
from seko_runtime.video.clocks import KeptChunk, RowClocks
from seko_runtime.video.contract import (
    CONDITIONING_LATENTS,
    ENCODE_VIDEO,
    ENCODE_VIDEO_FIRST,
    ENCODER_PROGRAMS,
    REFERENCE_LATENTS,
    TEXT_BUFFER,
    VIDEO_IN_FRAMES,
    VIDEO_IN_LATENTS,
    video_contract,
)
from seko_runtime.video.decoding import Decoder
from seko_runtime.video.encoding import VideoEncoder
from seko_runtime.video.inputs import STEADY, CallerInputs
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.options import VideoOptions
from seko_runtime.video.positions import Positions
from seko_runtime.video.rebuilt_context import RebuiltContext
from seko_runtime.video.ring import ring_of
from seko_runtime.video.text import NO_TEXT


class VideoDevice(Device):
    """The device side of a pool: tensors and programs of its video streams.

    The constructor must be called inside `Memory.ordered`, the context of queued device work.

    Parameters
    ----------
    loaded, memory
        The parameters of `Device` with the same names.
    clocks : RowClocks
        The positions of the pool's streams.
    inputs : CallerInputs
        The inputs that the callers supply, for all streams.
    options : VideoOptions
        Options of the pool, chosen when it is opened.
    """

    def __init__(
        self,
        loaded: Loaded[VideoManifest],
        memory: Memory,
        clocks: RowClocks,
        inputs: CallerInputs,
        options: VideoOptions,
    ) -> None:
        manifest, programs = loaded.manifest, loaded.programs
        super().__init__(loaded, memory, video_contract(manifest).units)
        self._manifest, self._clocks, self._inputs = manifest, clocks, inputs
        self._rank, self._first_apart = loaded.rank.number, manifest.first_apart
        self._prompt = self.programs["prompt"]  # one program for all rows, or one for each row
        self.prompt_by_row = any(ref.by_row for call in programs["prompt"][0] for ref in call.inputs)
        self.prompt_buffers = _prompt_buffers(programs, {engine.name: engine for engine in manifest.engines})
        # rows whose prompt was changed only in part, because an error came
        self.half_prompted: set[int] = set()
        self.once = loaded.rank.sharing(ENCODER_PROGRAMS, programs, self.programs, self.buffers)
        self.chunk = chunk_programs(manifest, self.programs)
        latents = self.specs[manifest.workload.output]
        kept_shape = (manifest.rows, *latents.shape[1:])
        self._kept = [
            memory.allocate(TensorSpec(f"kept.{place}", kept_shape, latents.dtype))
            for place in range(clocks.kept_slots)
        ]
        self.decoder: Decoder | None = None
        if manifest.workload.video is not None:
            decode_buffers = [spec.name for spec in manifest.buffers if spec.role == "lane"]
            self.decoder = Decoder(
                manifest,
                self.programs["decode_first"],
                self.programs["decode"],
                self.buffers,
                decode_buffers,
                memory,
                overlap=options.overlap,
            )
        self.context: RebuiltContext | None = None
        if manifest.workload.stream.rebuilt:
            self.context = RebuiltContext(manifest, memory, self.buffers, self.once["encode"].run)
        self.encoder: VideoEncoder | None = None
        if manifest.takes_video:
            taken = {ref.name for call in programs[ENCODE_VIDEO][0] for ref in (*call.inputs, *call.outputs)}
            self.encoder = VideoEncoder(
                self.programs[ENCODE_VIDEO_FIRST],
                self.programs[ENCODE_VIDEO],
                partial(self.row_of, VIDEO_IN_FRAMES),
                [tensor for name, tensor in self.buffers.items() if name in taken],
                memory,
            )

    @property
    def latents(self) -> Tensor:
        """The buffer with the latents of a finished chunk; axis 0 is the batch index in the call."""
        return self.buffers[self._manifest.workload.output]

    def prepare(self) -> None:
        """Run every program once. If the memory can record CUDA graphs, also capture the calls of a chunk; see
        `Device.prepare`."""
        memory = self._memory
        if memory.warm_up_runs:
            with part("warm"):
                with memory.ordered():
                    self._warm_up()
                memory.wait()
        if memory.captures:
            for call, chunk in self.chunk.items():
                for number, programs in enumerate(chunk.launches):
                    self.capture((call, number), programs, "a chunk's run of all its engines")
        if self.decoder is not None:
            self.decoder.prepare()
        if self.encoder is not None:
            self.encoder.prepare()

    def set_text(self, row: int, text: object) -> None:
        """Write the text embeddings of a row and run the prompt program; UsageError if the shape is wrong."""
        spec = self.specs.get(TEXT_BUFFER)
        wanted = None if spec is None else (1, *spec.shape[1:])
        shape = None if text is None else tuple(getattr(text, "shape", ()))
        if shape is not None and wanted is None:
            raise UsageError(NO_TEXT)
        if shape is None and wanted is not None:
            raise UsageError(
                f"found neither prompt nor text; give a sentence as prompt, or embeddings {wanted} as text"
            )
        if shape != wanted:
            raise UsageError(f"text has shape {shape}, this artifact takes {wanted}")
        if isinstance(text, np.ndarray) and text.dtype.kind not in "fiu":
            raise UsageError(f"text is {text.dtype}, expected numbers")
        on_host = isinstance(text, np.ndarray) or str(getattr(text, "device", "")) == "cpu"
        if spec is not None and on_host:  # checking the numbers of a GPU tensor would wait for the device
            check_magnitude(text, "text")
        with self.prompting(row):
            if spec is not None:
                self._memory.write(self.row_of(TEXT_BUFFER, row), text)
            self.run_prompt(row)

    def set_inputs(self, row: int, inputs: Mapping[str, object] | None, *, rerun: bool) -> None:
        """Write the inputs that the caller supplies once for a session or prompt. If ``rerun`` is true and an input of
        a prompt was written, also run the prompt program again.

        Raises
        ------
        UsageError
            If an input's name is unknown, or its array has a wrong shape, dtype or value.
        """
        written = self._inputs.steady(inputs)
        rerun = rerun and any(spec.per == "prompt" for spec, _ in written)
        with self.prompting(row) if rerun else self._memory.ordered():
            for spec, array in written:
                self._memory.write(self.row_of(spec.buffer, row), array)
            if rerun:
                self.run_prompt(row)

    @contextmanager
    def prompting(self, row: int) -> Iterator[None]:
        """Context manager in which the prompt of a row changes, in the order of `Memory.ordered`. After an error inside
        the context, the prompt is incomplete, and `check_prompts` refuses the row."""
        with self._memory.ordered():
            self.half_prompted.add(row)
            yield
            self.half_prompted.discard(row)

    def check_prompts(self, rows: Sequence[int]) -> None:
        """Raise a TornStreamError if a row's prompt was changed only in part."""
        for row in self.half_prompted.intersection(rows):
            raise TornStreamError(f"the prompt of row {row} was set in part when an error came; set it again")

    def run_prompt(self, row: int) -> None:
        """Queue the prompt program for a row, or for all rows if the program reads all rows. The prompt program turns
        text embeddings into the keys and values of cross-attention."""
        for program in [self._prompt[row]] if self.prompt_by_row else self._prompt:
            program.run()

    def cache_sample(self, step: int) -> dict[str, NDArray[np.float32]]:
        """Copy every ``step``-th token of every cache buffer to the host; waits for the last chunk.

        In a pool the sample covers as many of the first rows as the largest engine call carries.
        """
        sample = {}
        for spec in self._manifest.buffers:
            if spec.role == "cache":
                axis = spec.row_axis
                tokens = spec.shape[axis] // self._manifest.state_rows * self._manifest.call_rows
                if spec.device_layers:
                    read = self.layers.sample(spec.name, step)
                else:
                    read = self._memory.read(self._memory.every(self.buffers[spec.name], axis, step))
                sample[spec.name] = read[(slice(None),) * axis + (slice(-(-tokens // step)),)]
        return sample

    def run_chunk(
        self, positions: Positions, inputs: Mapping[str, NDArray[Any]], made: Callable[[], None]
    ) -> int:
        """Queue the next chunk of the streams of a call, and copy its latents to the slots that keep them.

        All rows of a launch have the same kind (`ChunkCall`). Engines for full caches may round differently from
        engines with a mask, and a stream's first chunk may have passes of its own, so the kind of a row's launch must
        depend on that row alone. A call with rows of several kinds is therefore several launches of its bucket (call
        size). A row has the same batch index in every launch of a call. In launches for rows
        of other kinds, the spare row is computed at the row's batch index.

        Parameters
        ----------
        positions : Positions
            Positions of the streams of the call.
        inputs : mapping of str to numpy.ndarray
            The inputs that the callers supply for this chunk, from `CallerInputs.of_chunk`.
        made : callable
            Function that queues what is done with the latents of all rows; called as soon as `latents` has them, which
            may be before the context pass.

        Returns
        -------
        int
            Number of launches of captured CUDA graphs.
        """
        rows, graphs = positions.rows, 0
        kinds = self._kinds(positions.full(self._clocks.ring), positions.begins())
        launches = [
            [at for at, kind in enumerate(kinds) if kind == call] for call in sorted({*kinds}, reverse=True)
        ]
        for batch_indices in launches:
            call = self.send_positions(positions, batch_indices, inputs, first=kinds[batch_indices[0]].first)
            graphs += self._launch(call)
            self._keep(rows, batch_indices)
            if batch_indices is not launches[-1]:
                graphs += self._launch(call, behind=True)
        # each launch wrote the spare row's latents at the batch indices of the launches before
        for batch_indices in launches[:-1]:
            for at in batch_indices:
                kept_latents = self._kept[self._clocks.next_kept_slot(rows[at])]
                self._memory.copy(self._row(self.latents, at), self._row(kept_latents, rows[at]))
        made()
        return graphs + self._launch(call, behind=True)

    def _launch(self, call: ChunkCall, *, behind: bool = False) -> int:
        """Queue the launch that makes a chunk's latents, or those ``behind`` it; return the number of graphs."""
        launches = list(enumerate(self.chunk[call].launches))
        chosen = launches[1:] if behind else launches[:1]
        return sum(self.launch((call, number), programs) for number, programs in chosen)

    def send_positions(
        self,
        positions: Positions,
        batch_indices: Sequence[int] | None = None,
        inputs: Mapping[str, NDArray[Any]] | None = None,
        *,
        first: bool = False,
    ) -> ChunkCall:
        """Write the host's tensors for a launch of some or all batch indices; return the kind of the launch.

        If ``inputs`` is None, the inputs that callers supply are zeros in this launch. If ``first`` is true, the
        launch runs the passes of a stream's first chunk.
        """
        ring, bucket = self._clocks.ring, self._bucket(positions.rows)
        batch_indices = range(len(positions.rows)) if batch_indices is None else batch_indices
        host = self.host.acquire()
        stream, spare = self._manifest.workload.stream, self._manifest.state_rows - 1
        for name, values in positions.values(ring, stream, bucket, batch_indices, spare).items():
            if name in host:
                host[name][:bucket] = values
        if RANK in host:
            host[RANK][:] = self._rank
        self._inputs.fill(host, inputs or {})
        self.host.send()
        full = positions.full(ring)
        return ChunkCall(bucket, self._serves_full(bucket) and all(full[at] for at in batch_indices), first)

    def rebuild_caches(self, rows: Sequence[int], seeds: NDArray[np.int64]) -> None:
        """Queue context passes over the kept chunks of some streams, oldest first, into empty caches.

        Parameters
        ----------
        rows : sequence of int
            The rows of the streams, at most as many as the largest call carries.
        seeds : numpy.ndarray
            The seeds of all rows of the artifact, int64 [rows].
        """
        self.write_references(rows)
        called, clocks = self._called(rows), self._clocks
        steps = clocks.rebuild(rows)
        for step in steps:
            # A call may carry rows whose caches are not rebuilt: they write only slots that their next chunk
            # overwrites.
            own = dict(zip(rows, step, strict=True))
            entries = [
                own.get(row, KeptChunk(None, int(clocks.first[row]), clocks.next_slot_first(row)))
                for row in called
            ]
            firsts = np.array([entry.first_frame for entry in entries], np.int64)
            frames = firsts[:, None] + np.arange(clocks.ring.chunk_frames)
            slot_firsts = [entry.slot_first for entry in entries]
            positions = Positions(called, seeds[called], frames, slot_firsts)
            self._write_caches(
                positions,
                partial(self._load_kept, called, entries),
                self._inputs.of_kept_chunks(called, entries),
            )
        unstarted = [row for row in called if row not in rows and not clocks.chunks_made(row)]
        empty = [*clocks.rebuilt(rows), *unstarted] if steps else []
        for row in empty:
            self.clear_cache(row)
        if empty:
            self.write_references(empty)

    def write_contexts(self, rows: Sequence[int], seeds: NDArray[np.int64]) -> None:
        """Queue the context passes that make the caches of some streams again for their next chunks, which are not
        their first ones; the parameters are those of `rebuild_caches`."""
        called, clocks, context = self._called(rows), self._clocks, self.context
        if context is None:
            raise UsageError("this artifact makes no cache again before a chunk")
        self.join()  # the frames of the last chunk
        entries = [
            KeptChunk(clocks.last_kept_slot(row), 0, 0)
            if row in rows
            else KeptChunk(None, int(clocks.first[row]), clocks.next_slot_first(row))
            for row in called
        ]
        firsts = np.array([entry.first_frame for entry in entries], np.int64)
        frames = firsts[:, None] + np.arange(clocks.ring.chunk_frames)
        positions = Positions(called, seeds[called], frames, [entry.slot_first for entry in entries])

        def load() -> None:
            self._load_kept(called, entries)
            for at, row in enumerate(called):
                if row in rows and clocks.chunks_made(row) > 1:
                    context.load(self._row(self.latents, at), row, clocks.chunks_made(row))

        self._write_caches(positions, load, self._inputs.of_kept_chunks(called, entries))

    def write_references(self, rows: Sequence[int]) -> None:
        """Queue the passes that write reference frames into the caches of some rows; nothing for an artifact without
        reference frames.

        Reference frames form chunks in front of the stream. The last chunk of reference frames is filled up with copies
        (`Ring.repeats_references`), or with zeros that no stream attends to. The passes over reference frames run at
        the context timestep. The passes over reference frames are the context pass or, in an artifact without one, the
        denoise pass of each cache with the frames as conditioning frames. If a call carries all rows of the pool, the
        rows without new references write only slots that their next chunk overwrites before it reads them. Inputs that
        callers supply for each chunk are zeros in the passes over reference frames.
        """
        ring, clocks = self._clocks.ring, self._clocks
        called = self._called(rows)
        for first in range(-ring.reference_frames, 0, ring.chunk_frames):
            firsts = [first if row in rows else clocks.next_slot_first(row) for row in called]
            frames = clocks.next_frames(called)
            written = [(at, row) for at, row in enumerate(called) if row in rows]
            for at, _ in written:
                frames[at] = ring.latent_frames(first)
            frame_counts = np.full(len(called), ring.chunk_frames)
            positions = Positions(called, np.zeros(len(called), np.int64), frames, firsts, frame_counts)
            self._write_caches(positions, partial(self._load_references, written, first))

    def _write_caches(
        self,
        positions: Positions,
        load: Callable[[], None],
        inputs: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        """Queue the programs that write the KV caches of a call at these positions. The program ``begin`` runs first,
        because a pass may read values that ``begin`` computes from the cache. Then ``load`` replaces the noise of
        ``begin`` by the latents that the passes read.
        """
        call = self.send_positions(positions, inputs=inputs)
        programs = self.chunk[call]
        programs.begin.run()
        load()
        self.layers.arm()
        self.run_all(programs.cache_writers)

    def restart(self, row: int) -> None:
        """Let the row's next chunk be a stream's first for the programs beside the passes, on the host alone."""
        if self.context is not None:
            self.context.forget(row)
        if self.decoder is not None:
            self.decoder.restart(row)
        if self.encoder is not None:
            self.encoder.restart(row)

    def clear_cache(self, row: int) -> None:
        """Queue zeros into the part of every cache buffer that belongs to a row.

        Setting the buffer valid_tokens to 0 would not be enough: attention computes 0 * NaN = NaN for a masked NaN, and
        the keys of the previous session must not remain in memory.
        """
        for spec in self._manifest.buffers:
            if spec.device_layers:
                self.layers.clear(spec.name, row)
            elif spec.role == "cache":
                self._memory.zero(self.row_of(spec.name, row))

    def tensors(self, row: int) -> dict[str, Tensor]:
        """Return views of all tensors of a stream, by name: caches, prompt, conditioning, kept chunks, decoder.

        The tensors of a row and the host's numbers of the row are the whole state of its video stream: another row with
        equal tensors and numbers continues the stream with the same bytes.
        """
        state = {
            spec.name: self._row(self.buffers[spec.name], row)
            if spec.role == "lane"
            else self.row_of(spec.name, row)
            for spec in _state_buffers(self._manifest, self.prompt_buffers)
        }
        return state | {f"kept.{place}": self._row(latents, row) for place, latents in enumerate(self._kept)}

    def kept_latents(self, row: int, slot: int | None = None) -> Tensor:
        """Return a view [1, C, F, h, w] of the latents in slot ``slot`` of a row's kept chunks; default: the latents of
        the row's last chunk.
        """
        slot = self._clocks.last_kept_slot(row) if slot is None else slot
        return self._memory.row(self._kept[slot], 0, row, self._manifest.rows)

    def join(self) -> None:
        """Make later work on the device wait for the decoding that is queued so far."""
        if self.decoder is not None:
            self.decoder.join()

    def drop(self) -> None:
        """Release the captured graphs first, then the tensors that the graphs use."""
        self.replays.clear()
        self.chunk.clear()
        self.once.clear()
        self._prompt.clear()
        decoder, self.decoder = self.decoder, None
        encoder, self.encoder = self.encoder, None
        release_all(
            None if decoder is None else decoder.close,
            None if encoder is None else encoder.close,
            self._kept.clear,
            super().drop,
        )

    def _called(self, rows: Sequence[int]) -> list[int]:
        """Return the rows that an engine call for some rows carries: all rows, if every call of the artifact carries
        all.

        The next chunk of each further row of the call counts as begun, because its cache slots are written.
        """
        if self._manifest.pool is not None:
            return list(rows)
        every = list(range(self._manifest.rows))
        self._clocks.begin_chunk([row for row in every if row not in rows])
        return every

    def _kinds(self, full: Sequence[bool], begins: Sequence[bool]) -> list[ChunkCall]:
        """Return the kind of launch for each of a call's rows, from whether its cache is full and whether its chunk is
        its stream's first. Without a pool all rows are in one launch, whose engines `send_positions` chooses."""
        bucket, pooled = self._bucket(range(len(full))), self._manifest.pool is not None
        return [
            ChunkCall(
                bucket, pooled and self._serves_full(bucket) and is_full, self._first_apart and is_first
            )
            for is_full, is_first in zip(full, begins, strict=True)
        ]

    def _serves_full(self, bucket: int) -> bool:
        """Whether calls of ``bucket`` rows have engines for full caches."""
        return ChunkCall(bucket, full=True) in self.chunk

    def _bucket(self, rows: Sequence[int]) -> int:
        pool = self._manifest.pool
        return len(rows) if pool is None else pool.bucket(len(rows))

    def _keep(self, rows: Sequence[int], batch_indices: Sequence[int]) -> None:
        """Queue copies of the latents at some batch indices of a call to the slots that keep them."""
        slots = [self._clocks.next_kept_slot(row) for row in rows]
        if self._every_row(rows) and len(batch_indices) == len(rows) and len(set(slots)) == 1:
            self._memory.copy(self._kept[slots[0]], self.latents)
            return
        for at in batch_indices:
            self._memory.copy(self._row(self._kept[slots[at]], rows[at]), self._row(self.latents, at))

    def _load_kept(self, rows: Sequence[int], entries: Sequence[KeptChunk]) -> None:
        kept_slots = {entry.kept_slot for entry in entries}
        if self._every_row(rows) and len(kept_slots) == 1 and None not in kept_slots:
            self._memory.copy(self.latents, self._kept[entries[0].kept_slot or 0])
            return
        for at, (row, entry) in enumerate(zip(rows, entries, strict=True)):
            target = self._row(self.latents, at)
            if entry.kept_slot is None:
                self._memory.zero(target)
            else:
                self._memory.copy(target, self._row(self._kept[entry.kept_slot], row))

    def _load_references(self, written: Sequence[tuple[int, int]], first: int) -> None:
        """Queue copies of the reference frames from frame ``first`` on into the call's latents; ``written`` has pairs
        of batch index and row."""
        memory, ring = self._memory, self._clocks.ring
        for batch_index, row in written:
            target = self._row(self.latents, batch_index)  # [C, F, h, w]
            reference_latents = self._row(self.buffers[REFERENCE_LATENTS], row)  # [C, R, h, w]
            memory.zero(target)
            for offset, frame in enumerate(ring.latent_frames(first)):
                if frame < 0:
                    source = memory.row(
                        reference_latents, 1, ring.reference_frames + frame, ring.reference_frames
                    )
                    memory.copy(memory.row(target, 1, offset, ring.chunk_frames), source)

    def _row(self, tensor: Tensor, row: int) -> Tensor:
        return self._memory.index(tensor, (row,))

    def _every_row(self, rows: Sequence[int]) -> bool:
        """Return whether an engine call carries all rows in order, so that batch index and row number are equal."""
        return list(rows) == list(range(self._manifest.rows))

    def _warm_up(self) -> None:
        ring, memory = self._clocks.ring, self._memory
        for (bucket, full, _), programs in self.chunk.items():
            first = ring.cache_frames if full else 0
            frames = np.full((bucket, 1), first) + np.arange(ring.chunk_frames)
            self.send_positions(
                Positions(range(bucket), np.zeros(bucket, np.int64), frames, [first] * bucket)
            )
            for _ in range(memory.warm_up_runs):
                self.run_all(programs.every_engine)
        for spec in self._manifest.buffers:
            if spec.device_layers:
                self.layers.clear(spec.name)
            elif spec.role in ("cache", "state"):
                memory.zero(self.buffers[spec.name])


def state_bytes(manifest: VideoManifest, programs: Programs) -> int:
    """Return the size in bytes of a row's whole state, its host arrays included, as pauses and snapshots hold it."""
    prompt_buffers = _prompt_buffers(programs, {engine.name: engine for engine in manifest.engines})
    size = sum(
        spec.nbytes // (spec.shape[0] if spec.role == "lane" else manifest.state_rows)
        for spec in _state_buffers(manifest, prompt_buffers)
    )
    latents = next(spec for spec in manifest.buffers if spec.name == manifest.workload.output)
    kept = RowClocks(ring_of(manifest.workload.stream), 1).kept_slots
    inputs = sum(
        spec.nbytes
        for spec in manifest.caller_inputs
        if spec.per not in STEADY and spec.buffer != VIDEO_IN_FRAMES
    )
    return size + kept * (latents.nbytes // latents.shape[0]) + (1 + kept) * inputs


def _state_buffers(manifest: VideoManifest, prompt_buffers: Iterable[str]) -> list[Buffer]:
    """Return the buffers that hold a part of a row's state."""
    own = {
        *(TEXT_BUFFER, CONDITIONING_LATENTS, REFERENCE_LATENTS, VIDEO_IN_FRAMES, VIDEO_IN_LATENTS),
        *prompt_buffers,
        *(spec.buffer for spec in manifest.caller_inputs if spec.per in STEADY),
    }
    # Left out: layers on the host, which are not split by row, and buffers that the prompts of all rows share.
    return [
        spec
        for spec in manifest.buffers
        if spec.role == "lane"
        or (
            (spec.role == "cache" or spec.name in own)
            and not spec.device_layers
            and has_rows(spec, manifest.state_rows)
        )
    ]


def _prompt_buffers(programs: Programs, engines: Mapping[str, EngineSpec]) -> tuple[str, ...]:
    """Return the buffers that the prompt program writes."""
    names: list[str] = []
    for call in programs["prompt"][0]:
        refs = [*call.outputs]
        taken = zip(call.inputs, engines[call.engine].inputs, strict=True)
        refs += [ref for ref, spec in taken if spec.name in engines[call.engine].mutates]
        names += [ref.name for ref in refs if ref.kind == "buffer"]
    return tuple(dict.fromkeys(names))
