"""What the host knows of each row's stream, and how a stream begins, is stored, loaded and ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from seko_runtime.arguments import shown
from seko_runtime.backends.memory import Memory, Parked, Tensor
from seko_runtime.errors import TornStreamError, UsageError
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.video.chunk import Readable
from seko_runtime.video.clocks import RowClocks, checked_seeds
from seko_runtime.video.conditioning import ConditioningFrames
from seko_runtime.video.inputs import CallerInputs, as_array
from seko_runtime.video.live import Live
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.reference_frames import check_reference, set_reference, with_portrait
from seko_runtime.video.ring import Ring
from seko_runtime.video.snapshot import RowNumbers, RowState, check_numbers
from seko_runtime.video.voices import Voices


class RowMoves:
    """Copies of rows to the host and back, which run beside chunks; its methods are called inside the memory's
    `ordered`.

    Parameters
    ----------
    memory : Memory
        The session's.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._ends: dict[int, object] = {}  # by row

    def settle(self, rows: Sequence[int]) -> None:
        """Make later work on the device wait for these rows' copies."""
        for row in rows:
            if row in self._ends:
                self._memory.after(self._ends[row])
                del self._ends[row]

    def park(self, row: int, tensors: Mapping[str, Tensor]) -> Parked:
        """Queue copies of a row's tensors to the host."""
        with self._all_or_waited():
            parked, self._ends[row] = self._memory.park(tensors)
        return parked

    def unpark(self, row: int, parked: Parked, tensors: Mapping[str, Tensor]) -> None:
        """Queue copies back into a row's tensors."""
        with self._all_or_waited():
            self._ends[row] = self._memory.unpark(parked, tensors)

    @contextmanager
    def _all_or_waited(self) -> Iterator[None]:
        """Wait for the device if only a part of the copies was queued, since no end exists that later work could wait
        for.
        """
        try:
            yield
        except BaseException:
            self._memory.wait()
            raise


class RowStreams:
    """Each row's clock, seed, conditioning frames and inputs, and what is still to be done for it.

    Parameters
    ----------
    manifest : VideoManifest
        Its stream and inputs are used.
    memory : Memory
        The session's.

    Attributes
    ----------
    rebuild_due : set of int
        Rows whose cache is rebuilt before their next chunk.
    torn : set of int
        Rows that are being advanced, or were when Ctrl-C came: it is not known where they stand.
    """

    def __init__(self, manifest: VideoManifest, memory: Memory) -> None:
        stream = manifest.workload.stream
        layout = (stream.sink_frames, stream.ring_frames, stream.chunk_frames)
        self._manifest, self._memory = manifest, memory
        self.clocks = RowClocks(Ring(*layout, stream.reference_frames), manifest.rows)
        self.seeds = np.zeros(manifest.rows, np.int64)
        self.readable = Readable()
        self.rebuild_due: set[int] = set()
        self.torn: set[int] = set()
        self._moves = RowMoves(memory)
        self.conditioning = ConditioningFrames(manifest, memory)
        self.inputs = CallerInputs(manifest, self.clocks.kept_slots)
        self.voices = Voices(manifest)

    def check_whole(self, rows: Sequence[int]) -> None:
        """Raise TornStreamError if one of the rows is torn."""
        torn = sorted(self.torn.intersection(rows))
        if torn:
            raise TornStreamError(
                f"the stream of row {torn[0]} was interrupted while a chunk was counted or it began anew, so it is "
                "not known where it stands; restart it, or close its session and open another"
            )

    def settle(self, rows: Sequence[int]) -> None:
        """Make later work on the device wait for these rows' copies; called inside the memory's `ordered`."""
        self._moves.settle(rows)

    def set_reference(self, live: Live, rows: Sequence[int], reference: object) -> None:
        """Set the reference frames of rows whose streams are beginning; see `reference_frames.set_reference`."""
        with self._memory.ordered():
            self.settle(rows)
        if set_reference(live, self._manifest, self._memory, rows, reference):
            self.rebuild_due.update(rows)  # written before the next chunk, with the prompt that stands then

    def restart(self, live: Live, row: int, seed: int | None, image: object, reference: object) -> None:
        """Restart a row at frame 0; see `Streams.restart`."""
        new_seed = None if seed is None else checked_seeds([seed], 1)[0]
        if reference is not None:
            check_reference(self._manifest, as_array(reference, "reference"), [row])
        with self._memory.ordered():
            self.settle([row])
        if image is None:
            self.conditioning.drop(row)
        else:
            self.conditioning.set_image(live, [row], image)
        self.torn.add(row)  # the checks are done: what fails now leaves neither the old stream nor the new
        if new_seed is not None:
            self.seeds[row] = new_seed
        if reference is not None:
            self.set_reference(live, [row], reference)
            live.set_inputs([row], with_portrait(self._manifest, None, reference), rerun=True)
        with self._memory.ordered():
            live.clear_cache(row)
        self._begin(live, row)

    def rewind(self, live: Live, rows: Sequence[int], chunk: int) -> None:
        """Set rows back to where they stood before they made a chunk; see `Session.rewind`."""
        self.check_whole(rows)
        for row in rows:
            self._check_rewind(live, row, chunk)
        self.readable.let_go(rows)
        with self._memory.ordered():
            self.settle(rows)
        for row in rows:
            slots = self.clocks.kept_slots_before(chunk)
            if chunk == self.clocks.made(row):
                continue
            self.torn.add(row)
            if live.decoder is not None:
                live.decoder.rewind(row, [live.kept_latents(row, slot) for slot in slots])
            self.inputs.rewind(row, slots[-1] if slots else None)
            self.clocks.rewind(row, chunk)
            self.torn.discard(row)

    def _check_rewind(self, live: Live, row: int, chunk: int) -> None:
        stream, made = self._manifest.workload.stream, self.clocks.made(row)
        earliest = self.clocks.earliest(row, min((stream.ring_frames, *stream.rings.values())))
        why = "the cache holds no frames that it would need"
        # The decoder's caches are made again, from the first chunk on.
        if live.decoder is not None and not self.clocks.keeps_all(row):
            earliest, why = (
                made,
                "not all of its chunks are kept, of which the VAE's caches would be made again",
            )
        if isinstance(chunk, bool) or not isinstance(chunk, int) or not earliest <= chunk <= made:
            raise UsageError(
                f"a row that has made {made} chunks cannot step back to chunk {shown(chunk)}, expected {earliest} "
                f"to {made}" + (f": before that {why}" if earliest else "")
            )

    def forget(self, live: Live, row: int) -> None:
        """Queue zeros into everything of a row's stream, before another owner's stream begins there."""
        self.readable.let_go([row])
        with self._memory.ordered():
            self.settle([row])
            if live.decoder is not None:
                live.decoder.join()
            for state in live.state_of(row).values():
                self._memory.zero(state)
        self.conditioning.drop(row)
        self._begin(live, row)

    def store(self, live: Live, row: int) -> RowState:
        """Queue copies of a row's whole stream to the host, while other rows continue."""
        self.check_whole([row])
        live.check_prompts([row])
        if live.decoder is not None:
            live.decoder.check(row)
        numbers = RowNumbers(
            seed=int(self.seeds[row]),
            conditioning_frames=int(self.conditioning.counts[row]),
            rebuild_due=row in self.rebuild_due,
            clock=self.clocks.state(row),
        )
        with self._memory.ordered():
            self.settle([row])
            if live.decoder is not None:
                live.decoder.join()
            parked = self._moves.park(row, live.state_of(row))
        return RowState(numbers, parked, self.inputs.state(row), self.voices.voice(row))

    def load(self, live: Live, row: int, state: RowState) -> None:
        """Queue copies of a stored stream into a row, which then continues it."""
        numbers = state.numbers
        check_numbers(numbers, self._manifest)
        self.readable.let_go([row])
        self.clocks.load(row, numbers.clock)
        with self._memory.ordered():
            self.settle([row])
            if live.decoder is not None:
                live.decoder.join()
            self._moves.unpark(row, state.tensors, live.state_of(row))
        self.inputs.load(row, state.inputs)
        self.voices.put(row, state.voice)
        self.seeds[row], self.conditioning.counts[row] = numbers.seed, numbers.conditioning_frames
        self.rebuild_due.discard(row)
        if numbers.rebuild_due:
            self.rebuild_due.add(row)
        if live.decoder is not None:
            live.decoder.restart(row)
        live.half_prompted.discard(row)
        self.torn.discard(row)

    def layout(self, live: Live) -> dict[str, TensorSpec]:
        """Return the tensors of one row's stream."""
        described = {name: self._memory.describe(one) for name, one in live.state_of(0).items()}
        held = {name: TensorSpec(name, shape, dtype) for name, (shape, dtype) in described.items()}
        return held | self.inputs.layout()

    def recache(self, live: Live, rows: Sequence[int]) -> None:
        """Rebuild rows' caches with the prompts that stand now."""
        self.rebuild_due.update(rows)  # until it is done: a chunk must not run on half a cache
        self.readable.let_go()
        with self._memory.ordered():
            self.rebuild_caches(live, rows)

    def rebuild_caches(self, live: Live, rows: Sequence[int]) -> None:
        """The same inside the memory's `ordered`, of rows that are due."""
        # A pool's rows are rebuilt one by one: in a bucket that depends on nobody else.
        most = 1 if self._manifest.pool is not None else self._manifest.call_rows
        for first in range(0, len(rows), most):
            part = rows[first : first + most]
            live.rebuild_caches(part, self.seeds[list(part)])
            self.rebuild_due.difference_update(part)

    def _begin(self, live: Live, row: int) -> None:
        """Set the host's numbers of a row to the beginning of a stream."""
        self.clocks.restart(row)
        self.inputs.restart(row)
        self.voices.put(row, None)
        self.rebuild_due.discard(row)
        if self._manifest.workload.stream.reference_frames:
            self.rebuild_due.add(row)
        if live.decoder is not None:
            live.decoder.restart(row)
        self.torn.discard(row)
