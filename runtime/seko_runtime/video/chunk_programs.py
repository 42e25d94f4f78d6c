"""The programs of one chunk, bound to their tensors, for each call that a session or pool makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from seko_runtime.executor.program import BoundProgram
from seko_runtime.format.program_key import ProgramKey
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.ring import ring_of


class ChunkCall(NamedTuple):
    """The kind of a launch of one chunk's programs.

    Parameters
    ----------
    bucket : int
        Number of sessions (rows) in the launch.
    full : bool
        Whether the launch runs the engines for rows with full caches.
    first : bool
        Whether the launch runs the passes or programs of a stream's first chunk; False if all chunks have the same.
    """

    bucket: int
    full: bool = False
    first: bool = False


@dataclass(frozen=True)
class ChunkPrograms:
    """The programs of one chunk, bound to their tensors.

    Parameters
    ----------
    begin : BoundProgram
        The program that draws the chunk's initial noise.
    denoise : tuple of BoundProgram
        The denoise programs, one for each denoise pass, in order.
    context : BoundProgram or None
        The context pass: a run of the model over clean latents, which writes the KV cache.
        None if the denoise passes write the cache.
    pass_caches : bool
        Whether each denoise pass has a cache of its own.
    rebuilt : bool
        Whether the context pass is no part of the chunk, but runs before it.
    apart : bool
        Whether the context pass is a launch of its own, so that a chunk's decoding begins before it.
    """

    begin: BoundProgram
    denoise: tuple[BoundProgram, ...]
    context: BoundProgram | None
    pass_caches: bool = False
    rebuilt: bool = False
    apart: bool = False

    @property
    def launches(self) -> list[list[BoundProgram]]:
        """The programs of each launch of a chunk, in the order in which they run. The first launch makes the
        latents."""
        made = [self.begin, *self.denoise]
        if self.context is None or self.rebuilt:
            return [made]
        return [made, [self.context]] if self.apart else [[*made, self.context]]

    @property
    def cache_writers(self) -> Sequence[BoundProgram]:
        """The programs that write a chunk of known latents to the KV cache."""
        return self.denoise if self.pass_caches else (self.context or self.denoise[-1],)

    @property
    def every_engine(self) -> list[BoundProgram]:
        """The fewest programs that call every engine of a chunk at least once. Since all denoise passes call the same
        engines, one denoise program suffices."""
        return [self.begin, self.denoise[0], self.context or self.denoise[-1]]


def chunk_programs(
    manifest: VideoManifest, bound: Mapping[str, Sequence[BoundProgram]]
) -> dict[ChunkCall, ChunkPrograms]:
    """Return the programs of a chunk for each kind of launch.

    The passes of a first chunk run programs of their own if there are any, and otherwise the same programs as other
    passes; passes of their own take other entries of the tables.
    """
    stream, schedule = manifest.workload.stream, manifest.workload.schedule
    # layers of an offloaded cache are copied ahead over all passes of a launch
    apart = manifest.decode_parts > 1 and not manifest.offloads_cache
    kinds = (manifest.pass_caches, stream.rebuilt, apart)
    # a first chunk may find a full cache only if the cache holds no more than it
    fills = stream.reference_frames + stream.chunk_frames >= stream.cache_frames
    buckets: dict[int, int | None] = {manifest.state_rows: None}
    if manifest.pool is not None:
        buckets = {bucket: bucket for bucket in manifest.pool.buckets}
    chunk = {}
    for rows, bucket in buckets.items():
        for full in (False, True):
            denoise = bound.get(ProgramKey("denoise", bucket, full).name)
            if denoise is None:
                continue
            (begin,) = bound[ProgramKey("begin", bucket).name]
            context = bound[ProgramKey("context", bucket, full).name] if manifest.has_context else ()
            last = next(iter(context), None)
            chunk[ChunkCall(rows, full)] = ChunkPrograms(
                begin, tuple(denoise[: schedule.denoise_passes]), last, *kinds
            )
            if not manifest.first_apart or (full and not fills):
                continue
            own = ProgramKey("denoise", bucket, first=True).name
            if own in bound:
                denoise = bound[own]
                last = next(iter(bound.get(ProgramKey("context", bucket, first=True).name, ())), None)
            passes = denoise[schedule.denoise_passes :] if schedule.first_timesteps else denoise
            chunk[ChunkCall(rows, full, first=True)] = ChunkPrograms(begin, tuple(passes), last, *kinds)
    return chunk


def variant_starts(manifest: VideoManifest) -> tuple[int, ...]:
    """Return the numbers of the chunks with which a stream begins another launch variant, ascending.

    Rows of different launch variants never share a launch. A variant says whether a chunk runs on the engines for full
    caches or on the engines with a mask, and whether it is a first chunk, if first chunks have passes or programs of
    their own. The result is empty if all chunks have one variant, or if each call of an engine carries all rows.
    """
    if manifest.pool is None:
        return ()
    stream, starts = manifest.workload.stream, set()
    if manifest.first_apart:
        starts.add(1)
    if any(
        ProgramKey("denoise", bucket, full=True).name in manifest.programs for bucket in manifest.pool.buckets
    ):
        ring = ring_of(stream)
        starts.add(-(-(ring.cache_frames - ring.valid_frames(0)) // stream.chunk_frames))
    return tuple(sorted(starts - {0}))
