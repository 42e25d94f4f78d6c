"""Streams whose chunks are made by several processes: the caller's side, over a rank group.

Every rank has the whole `Streams` and gets the same calls in the same order, so all know where each row stands. What is
read comes from rank 0, but for what each rank has a share of: `split_axes`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import HostBytes
from seko_runtime.errors import SekoRuntimeError, UsageError
from seko_runtime.format.json_fields import Fields
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.parallel.group import RankGroup
from seko_runtime.video.call_lock import CallLock
from seko_runtime.video.chunk import Chunk, SessionStats
from seko_runtime.video.conditioning.voice import AudioWindows, Voice
from seko_runtime.video.contract import PICTURE_AXIS
from seko_runtime.video.inputs import Inputs
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.session import Session
from seko_runtime.video.snapshot import RowState, read_numbers
from seko_runtime.video.streams import CLOSED, Streams
from seko_runtime.video.video_stream import QueuedChunks

# A chunk of a large model on a CPU takes minutes. A process that hangs is found by its silence, long before.
CALL_S = 600.0
_CALLED = (  # methods of `Streams` that every rank runs as it was asked
    *("set_prompt", "set_text", "set_conditioning", "set_inputs", "set_reference", "push_audio"),
    *("audio_needed", "restart", "rewind", "forget", "reserve", "free_bytes"),
)


class RankedStreams(Streams):
    """`Streams` of an artifact of several ranks. Every call may raise a RankLostError.

    Parameters
    ----------
    manifest, group
        The artifact's.
    command, facts
        ``open_session`` or ``open_pool``, and its arguments by name.
    """

    def __init__(
        self, manifest: VideoManifest, group: RankGroup, command: str, facts: Mapping[str, Any]
    ) -> None:
        self.manifest = manifest
        self._live: Any = group
        self.call_lock = CallLock(CLOSED)
        self._row_chunks: dict[int, Chunk] = {}
        self._layout: dict[str, TensorSpec] = {}
        self._stats = SessionStats(0, 0, 0, manifest.workload.kv.pool_bytes)
        self.overlaps = bool(self.asked(command, facts, patient=True)[0])

    decodes_beside = property(lambda self: self.overlaps)

    @property
    def stats(self) -> SessionStats:
        """Counters so far; of closed streams the last ones."""
        return self._stats if self._live is None else SessionStats(**self.each("stats")[0])

    def begin_owner(self, row: int, tenant: str | None) -> None:
        """Give a row another owner, unless a rank was lost, so that sessions can be closed."""
        if not self._live.over:
            self.each("begin_owner", row, tenant)

    def run_chunk(self, rows: Sequence[int], inputs: Sequence[Inputs | None] | Inputs | None = None) -> Chunk:
        """Make the next chunk of each row; see `Streams.run_chunk`."""
        made = self.asked("run_chunk", {"rows": rows, "inputs": inputs})[0]
        chunk, *parts = (
            Chunk(index, frames, None, self, serial, tuple(map(tuple, pictures)), row, heard)
            for index, frames, serial, pictures, row, heard in made
        )
        self._row_chunks |= zip(rows, parts, strict=True)
        return chunk

    def row_chunk(self, chunk: Chunk, place: int, row: int) -> Chunk:
        """Return one row's part of the last chunk; see `Streams.row_chunk`."""
        del chunk, place
        return self._row_chunks[row]

    def read_latents(self, chunk: Chunk) -> Callable[[], Any]:
        """Copy a chunk's latents to the host, and return a function that returns them.

        The processes answer one command at a time, so this waits where streams of one process do not.
        """
        facts = {"row": chunk.row, "serial": chunk.serial, "index": chunk.index}
        latents = self.asked("read_latents", facts, ranks=(0,))[0]
        return lambda: latents

    def decoder(self) -> Any:
        """Return what reads video frames: itself. UsageError if the artifact makes no video."""
        if self.manifest.workload.video is None:
            raise UsageError("this artifact makes no video; read latents with run_chunk().to_host()")
        return self

    def finished(self, row: int, number: int) -> Callable[[], None]:  # noqa: ARG002 - as the decoder has it
        """Return a function that does nothing: `video_frames` waits, in rank 0's process."""
        return lambda: None

    def video_frames(self, row: int, number: int) -> Any:
        """Return a row's video frames of one chunk; see `Decoder.video_frames`."""
        facts = {"row": row, "number": number}
        if not self.manifest.shares_decoding:
            return self.asked("video_frames", facts, ranks=(0,))[0]
        return np.concatenate(self.asked("video_frames", facts), PICTURE_AXIS - 1)

    def cache_sample(self, step: int) -> dict[str, NDArray[np.float32]]:
        """Copy every ``step``-th token of every cache buffer to the host, with the heads of all ranks."""
        whole, *others = self.each("cache_sample", step)
        for name, axis in split_axes(self.manifest).items():
            if name in whole:
                whole[name] = np.concatenate([whole[name], *(one[name] for one in others)], axis)
        return dict(whole)

    def layout(self) -> dict[str, TensorSpec]:
        """Return the tensors of one row's stream, with the shares of all ranks."""
        if not self._layout:
            axes = split_axes(self.manifest)
            for name, one in self.each("layout")[0].items():
                shape = one["shape"]
                if name in axes:
                    shape[axes[name]] *= self.manifest.ranks
                self._layout[name] = TensorSpec(name, tuple(shape), one["dtype"])
        return self._layout

    def store(self, row: int) -> RowState:
        """Copy a row's whole stream to the host, with the shares of all ranks."""
        layout = self.layout()
        parts = self.asked("store", {"row": row}, patient=True)
        whole = parts[0]
        for name, axis in split_axes(self.manifest).items():
            before = prod(layout[name].shape[:axis])
            shares = [one["tensors"][name].reshape(before, -1) for one in parts]
            whole["tensors"][name] = np.concatenate(shares, 1).reshape(-1)
        return state_of_message(whole, {})

    def load(self, row: int, state: RowState) -> None:
        """Copy a stored stream into a row, to each rank its share."""
        layout, split = self.layout(), split_axes(self.manifest)
        tensors = state.tensors.arrays()
        own: list[dict[str, Any]] = [{"shares": {}} for _ in range(self.manifest.ranks)]
        for name, axis in split.items():
            before = prod(layout[name].shape[:axis])
            shares = tensors[name].reshape(before, self.manifest.ranks, -1)
            for rank, one in enumerate(own):
                one["shares"][name] = shares[:, rank].reshape(-1)
        same = state_to_message(state, [name for name in tensors if name not in split])
        self.asked("load", {"row": row, "state": same}, own=own, patient=True)

    def close(self) -> None:
        """Free the memory of all ranks; a second call does nothing."""
        with suppress(SekoRuntimeError):  # of processes that are gone; whoever used them was told
            self._stats = self.stats  # sessions tell them after their end, too
            self.asked("close", patient=True)
        self._live = None

    def each(self, method: str, *args: object, **named: object) -> list[Any]:
        """Call a method of each rank's streams; return the results by rank."""
        return self.asked("call", {"method": method, "args": args, "named": named})

    def asked(
        self,
        command: str,
        facts: Mapping[str, Any] | None = None,
        *,
        own: Sequence[Mapping[str, Any]] | None = None,
        ranks: Sequence[int] | None = None,
        patient: bool = False,
    ) -> list[Any]:
        """Send a command to ranks; return their results by rank. See `RankGroup.call`."""
        group: Any = self.live()
        answers = group.call(command, facts, own=own, ranks=ranks, seconds=CALL_S, patient=patient)
        return [answers.results[rank] for rank in sorted(answers.results)]


def _called(method: str) -> Callable[..., Any]:
    """Return a method that calls that one of each rank's streams, and returns rank 0's result."""
    return lambda streams, *args, **named: streams.each(method, *args, **named)[0]


for _method in _CALLED:
    setattr(RankedStreams, _method, _called(_method))


class RankedSession(Session):
    """A `Session` of an artifact of several ranks; made by the artifact's `open_session`."""

    def __init__(self, streams: RankedStreams) -> None:
        self.manifest = streams.manifest
        self._rows = range(self.manifest.call_rows)
        self._ahead = QueuedChunks()
        self._streams = streams


def split_axes(manifest: VideoManifest) -> dict[str, int]:
    """Return the axis of a row's tensor of which each rank has a share, by name: heads, or rows of pictures."""
    shared = [buffer for buffer in manifest.buffers if buffer.rank_axis]
    return {buffer.name: buffer.rank_axis - (buffer.role == "lane") for buffer in shared}


def state_to_message(state: RowState, names: Collection[str] | None = None) -> dict[str, Any]:
    """Return a row's state as a message, with these tensors or all."""
    tensors = state.tensors.arrays()
    kept = {name: one for name, one in tensors.items() if names is None or name in names}
    voice = None if state.voice is None else state.voice.state()
    return {"numbers": state.numbers, "tensors": kept, "inputs": state.inputs, "voice": voice}


def state_of_message(message: Mapping[str, Any], further: Mapping[str, NDArray[np.uint8]]) -> RowState:
    """Return the row's state that `state_to_message` made a message of, and ``further`` tensors."""
    numbers, told = read_numbers(Fields(message["numbers"], "numbers")), message["voice"]
    voice = told and Voice(**told | {"windows": AudioWindows(**told["windows"])})
    return RowState(numbers, HostBytes({**message["tensors"], **further}), message["inputs"], voice)
