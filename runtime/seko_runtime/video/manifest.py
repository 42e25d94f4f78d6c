"""The manifest of a video artifact: the tables that manifests of all workloads have, and the object ``workload`` with
layout, schedule and goldens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from seko_runtime.controls.derived import IMAGE, LAST_PICTURE_LEVELS, PICTURE_LEVELS, derived_controls
from seko_runtime.errors import ManifestError, UsageError
from seko_runtime.format.budgets import Budget
from seko_runtime.format.manifest import (
    MAX_PIXELS,
    MAX_SEED,
    UNKNOWN_WORD,
    ControlSpec,
    Count,
    FilePath,
    InputSpec,
    KvPool,
    Manifest,
    Name,
    Workload,
    as_shape,
)
from seko_runtime.format.manifest_reader import parse_manifest
from seko_runtime.format.program_key import ProgramKey
from seko_runtime.format.records import Check, Limit, Mark, OneOf, Within

KIND = "video"
PICTURES = (IMAGE, PICTURE_LEVELS, LAST_PICTURE_LEVELS)  # buffers
# cache buffer with a mark for each layer and slot, in artifacts whose sink averages evicted frames
SINK_AVERAGED = "sink.averaged"
# cache buffer with the latents of chunks that are not finished, in artifacts whose passes have several chunks
ROLLING_BANKS = "rolling.banks"
# How often an input may change. Axis 0 of an input per pass counts the denoise passes of a chunk.
PERIODS = ("session", "prompt", "chunk", "pass")
DECODE_LATENTS = "decode.latents"  # buffer [B, C, F, h, w] that a decode program reads
MAX_PASSES = 1024  # largest number of denoise passes in a manifest
MAX_EXAMPLES = 64  # largest number of a viewer's prompts, and of his pictures


def as_latent_shape(value: object, where: str) -> tuple[int, ...]:
    """Parse channels, rows and columns of a latent frame."""
    shape = as_shape(value, where)
    if len(shape) != 3:
        raise ManifestError(f"{where} has {len(shape)} sizes, expected channels, rows, columns")
    return shape


@dataclass(frozen=True)
class Stream:
    """Layout of the video stream that the artifact makes.

    Parameters
    ----------
    chunk_frames : int
        Number of latent frames of a chunk.
    sink_frames : int
        Number of latent frames at the stream's start that are never evicted from the cache.
    ring_frames : int
        Number of slots behind the sink, which later frames reuse.
    frame_tokens : int
        Number of tokens of a latent frame.
    latent_shape : tuple of int
        Channels, rows and columns of a latent frame.
    height, width, video_frames_per_latent, fps : int
        Sizes of the video, for rates and previews.
    rings : mapping of str to int
        Ring size of each layer group with a ring smaller than ``ring_frames``, by the group's name.
    reference_frames : int
        Number of frames that lie in the cache before the sink, are never evicted, and are not part of the video.
    rebuilt : bool
        Whether the context pass runs before each chunk but the first instead of after each, over the latents of the
        last chunk, whose first frame is encoded again from the video.
    """

    chunk_frames: Count
    sink_frames: Annotated[int, Within(0, 1 << 31)]
    ring_frames: Count
    frame_tokens: Count
    latent_shape: Annotated[tuple[int, int, int], as_latent_shape]
    height: Count
    width: Count
    video_frames_per_latent: Annotated[int, Within(1, 1 << 16)]
    fps: Count
    rings: Annotated[Mapping[str, int], Limit("MAX_ENTRIES", "entries")] = field(default_factory=dict)
    reference_frames: Annotated[int, Within(0, 1 << 16)] = 0
    rebuilt: bool = False

    @property
    def cache_frames(self) -> int:
        """Number of latent frames that the cache holds."""
        return self.reference_frames + self.sink_frames + self.ring_frames


@dataclass(frozen=True)
class Schedule:
    """The denoise passes of a chunk, described for people and tools. Engines read timesteps and noise levels from
    weights, not from this table.

    Parameters
    ----------
    denoise_passes : int
        Number of denoise passes of a chunk.
    timesteps, sigmas : tuple of float
        Timestep and noise level of each pass.
    context_timestep : float
        Timestep of the context pass.
    sampler : str
        Name of the sampler; a session with its own ``steps`` computes its tables by it.
    shift : float or None
        The warp of the timesteps, if any. A session with its own ``steps`` uses the same warp.
    first_timesteps, first_sigmas : tuple of float
        The values of a stream's first chunk, if the first chunk has passes of its own.
    scaled_passes : int
        Number of passes, from the first one on, whose timesteps and noise levels the strength of an input video scales;
        0 for an artifact that takes no video.
    chunks_at_once : int
        Number of chunks that a pass denoises, each at its own time; if it is above 1, ``first_timesteps`` are these
        times, and a chunk is finished that many passes after it has begun.
    """

    denoise_passes: Annotated[int, Within(1, MAX_PASSES)]
    timesteps: tuple[float, ...]
    sigmas: tuple[float, ...]
    context_timestep: float
    sampler: Name
    shift: float | None = None
    first_timesteps: tuple[float, ...] = ()
    first_sigmas: tuple[float, ...] = ()
    scaled_passes: Annotated[int, Within(0, MAX_PASSES)] = 0
    chunks_at_once: Annotated[int, Within(1, MAX_PASSES)] = 1

    @property
    def table_passes(self) -> int:
        """Number of denoise passes in the tables: the passes of a chunk and, if a stream's first chunk has passes of
        its own, the passes of the first chunk."""
        return self.denoise_passes + len(self.first_timesteps)


@dataclass(frozen=True)
class Text:
    """The tokenizer whose token ids the program ``text`` takes, and the limits of a prompt.

    Parameters
    ----------
    tokenizer : str
        Path in the artifact of a JSON file of the library `tokenizers`.
    tokens : int
        Number of token ids that the text encoder takes; shorter prompts are padded with ``pad_id``.
    pad_id : int
        Token id of padding.
    truncate : bool
        Whether a prompt of more than ``tokens`` tokens is cut, keeping its last id (the end mark). Otherwise a prompt
        that is too long is refused.
    """

    tokenizer: FilePath
    tokens: Annotated[int, Within(1, 1 << 20)]
    pad_id: Annotated[int, Within(0, 1 << 31)]
    truncate: bool


@dataclass(frozen=True)
class Video:
    """Size of the decoded video.

    Parameters
    ----------
    first_frames, chunk_frames : int
        Number of video frames of a stream's first chunk, and of every later one.
    height, width : int
        Size of a video frame in pixels.
    decoder : str
        Name of the decoder, for people.
    """

    first_frames: Count
    chunk_frames: Count
    height: Count
    width: Count
    decoder: str = ""


@dataclass(frozen=True)
class GoldenBound:
    """Bounds for the errors of a replayed chunk.

    Parameters
    ----------
    latents, cache : float
        Largest accepted relative errors of the chunk's latents, and of the cache after the chunk.
    video : float
        Largest accepted error of the video, in pixel levels of 0 to 255.
    """

    latents: float
    cache: Annotated[float, Mark.REQUIRED] = 0.0
    video: Annotated[float, Mark.REQUIRED] = 0.0


@dataclass(frozen=True)
class Golden:
    """Recorded chunks with which a replay is compared: tensors ``latents.{chunk}``, optionally ``exact.{chunk}``, and
    their text input.

    The caller's inputs are tensors ``input.{name}.{chunk}`` if they are per chunk or pass, otherwise ``input.{name}``.

    Parameters
    ----------
    file : str
        Path of the safetensors file.
    seeds : tuple of int
        Seed of each row of a call.
    chunks : tuple of int
        Numbers of the recorded chunks, ascending.
    tolerance : float
        Largest relative error of the latents of all chunks, if there are no ``bounds``.
    text : str or None
        Name of the tensor with the text embeddings.
    cache_step : int
        If not 0, there are tensors ``cache.{buffer}.{chunk}``: every ``cache_step``-th entry of the row axis of each
        cache buffer, after the chunk.
    video_step : int
        If not 0, there are tensors ``video.{chunk}``, uint8: every ``video_step``-th pixel of the chunk's frames in
        both directions.
    prompt : str or None
        The sentence that was encoded, if known.
    bounds : tuple of GoldenBound
        One entry for each of ``chunks``, or none.
    reference : str or None
        Name of the tensor with the latents of the reference frames, if there are any.
    """

    file: FilePath
    seeds: tuple[Annotated[int, Within(-MAX_SEED, MAX_SEED)], ...]
    chunks: tuple[Annotated[int, Within(0, 100_000)], ...]
    tolerance: float
    text: Name | None = None
    cache_step: int = 0
    video_step: int = 0
    prompt: str | None = None
    bounds: tuple[GoldenBound, ...] = ()
    reference: Name | None = None

    def bound(self, chunk: int) -> GoldenBound:
        """Return the error bound of a recorded chunk."""
        return self.bounds[self.chunks.index(chunk)] if self.bounds else GoldenBound(self.tolerance)


@dataclass(frozen=True)
class ViewerPicture:
    """A picture that comes with the artifact, to begin a video with.

    Parameters
    ----------
    file : str
        Path of the picture, PNG or JPEG.
    caption : str
        What the picture shows.
    """

    file: FilePath
    caption: str = ""


@dataclass(frozen=True)
class Viewer:
    """What a person who meets the model is shown, in the words of its maker.

    Parameters
    ----------
    help : str
        A sentence on what the model does.
    prompts : tuple of str
        Sentences that the model knows; the first one is the default.
    pictures : tuple of ViewerPicture
        Pictures to begin with; the first one is the default and belongs to the first prompt.
    """

    help: str = ""
    prompts: tuple[str, ...] = ()
    pictures: tuple[ViewerPicture, ...] = ()


@dataclass(frozen=True)
class VideoWorkload(Workload):
    """The video workload's part of a manifest.

    Parameters
    ----------
    kind : str
        ``video``.
    stream : Stream
        Layout of the stream.
    kv : KvPool
        Format and size of the KV caches.
    schedule : Schedule
        The denoise passes of a chunk.
    output : str
        Name of the ``state`` buffer with a finished chunk's latents, float32 [rows, channels, frames, height, width].
    golden : Golden or None
        The recorded chunks with which `verify` compares; None if nothing was recorded.
    text : Text or None
        The tokenizer, exactly if there is a program ``text``.
    video : Video or None
        Size of the decoded video, exactly if there is a program ``decode``.
    viewer : Viewer or None
        What a person is shown.
    """

    kind: Annotated[str, OneOf((KIND,), complaint=UNKNOWN_WORD)]
    stream: Stream
    kv: KvPool
    schedule: Schedule
    output: Name
    golden: Golden | None = None
    text: Text | None = None
    video: Video | None = None
    viewer: Viewer | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the workload's own files in the artifact: recorded chunks, tokenizer and pictures."""
        golden = () if self.golden is None else (self.golden.file,)
        tokenizer = () if self.text is None else (self.text.tokenizer,)
        pictures = () if self.viewer is None else tuple(picture.file for picture in self.viewer.pictures)
        return (*golden, *tokenizer, *pictures)


@dataclass(frozen=True)
class VideoManifest(Manifest):
    """The manifest of a video artifact."""

    workload: VideoWorkload

    @property
    def control_specs(self) -> tuple[ControlSpec, ...]:
        """The controls of the artifact; for a manifest without the field, those that its inputs make possible."""
        if self.controls is not None:
            return self.controls
        pictures = {buffer.name: buffer.shape for buffer in self.buffers if buffer.name in PICTURES}
        table = self.workload.video
        lacking = 0 if table is None else max(0, table.chunk_frames - table.first_frames)
        return derived_controls(self.caller_inputs, self.workload.stream, self.programs, pictures, lacking)

    @property
    def has_context(self) -> bool:
        """Whether each chunk ends with a context pass, which writes the KV cache. Without a context pass, each denoise
        pass has a cache of its own (`pass_caches`), or the keys and values of a chunk's last denoise pass stay."""
        return any(ProgramKey.parse(name).role == "context" for name in self.programs)

    @property
    def takes_video(self) -> bool:
        """Whether each chunk starts from the frames of an input video."""
        return any(ProgramKey.parse(name).role == "encode_video" for name in self.programs)

    @property
    def pass_caches(self) -> bool:
        """Whether each denoise pass has a KV cache of its own: cache buffers then have an axis of passes before the
        axis of layers."""
        return any(buffer.role == "cache" and buffer.row_axis > 1 for buffer in self.buffers)

    @property
    def averages_sink(self) -> bool:
        """Whether the frames that a chunk evicts are averaged into the sink."""
        return any(buffer.name == SINK_AVERAGED for buffer in self.buffers)

    @property
    def no_rebuild(self) -> str:
        """The reason why a row's cache cannot be rebuilt from its kept chunks; empty if it can."""
        if self.workload.schedule.chunks_at_once > 1:
            return "this artifact denoises several chunks at once, and a rebuilt cache would be of one of them alone"
        if self.averages_sink:
            return "this artifact averages chunks into its sink whose latents are no longer kept"
        if self.has_context:
            return ""
        kept = (
            "a cache for each pass"
            if self.pass_caches
            else "what a chunk's last denoise pass wrote in its cache"
        )
        return f"this artifact has {kept} and no context pass that could rebuild it"

    @property
    def first_apart(self) -> bool:
        """Whether the first chunk of a stream has passes or programs of its own, so that it never shares a launch with
        later chunks."""
        keys = map(ProgramKey.parse, self.programs)
        return bool(self.workload.schedule.first_timesteps) or any(
            key.first and key.role == "denoise" for key in keys
        )

    @property
    def decode_parts(self) -> int:
        """Number of equal parts in which a chunk's latents are decoded, by a run of a decode program each."""
        frames = self.workload.stream.chunk_frames
        parts = (
            buffer.shape[2]
            for buffer in self.buffers
            if buffer.name == DECODE_LATENTS and len(buffer.shape) > 2
        )
        part = next(parts, frames)
        return frames // part if part and not frames % part else 1

    @property
    def shares_decoding(self) -> bool:
        """Whether each rank (process of a GPU) decodes some pixel rows of every picture. If the ranks do not share
        decoding, one rank decodes whole pictures."""
        return any(buffer.rank_axis and buffer.role == "lane" for buffer in self.buffers)


def parse_video_manifest(document: bytes) -> VideoManifest:
    """Read the manifest of a video artifact; see `parse_manifest`."""
    return parse_manifest(document, VideoManifest, CHECKS)


def video_manifest(manifest: Manifest) -> VideoManifest:
    """Return a manifest typed as a `VideoManifest`; UsageError if its workload is not video."""
    if not isinstance(manifest, VideoManifest):
        raise UsageError(f"the artifact's workload is {manifest.workload.kind!r}, expected {KIND!r}")
    return manifest


def _check_stream(stream: Stream, where: str) -> None:
    Budget(MAX_PIXELS, "pixels").take(stream.height * stream.width, where)
    if stream.chunk_frames > stream.ring_frames:
        raise ManifestError(
            f"{where}.chunk_frames {stream.chunk_frames} is larger than ring_frames {stream.ring_frames}: "
            "two frames of one chunk would share a slot"
        )
    for kind, ring_frames in stream.rings.items():
        if not stream.chunk_frames <= ring_frames <= stream.ring_frames:
            raise ManifestError(
                f"{where}.rings.{kind} is {ring_frames}, expected {stream.chunk_frames} (chunk_frames) to "
                f"{stream.ring_frames} (ring_frames)"
            )

    sizes = {stream.chunk_frames, stream.sink_frames, stream.ring_frames}
    if stream.rebuilt and (len(sizes) != 1 or stream.reference_frames or stream.rings):
        raise ManifestError(
            f"{where}.rebuilt: expected a sink and a ring of {stream.chunk_frames} frames (chunk_frames), without "
            "reference_frames and rings"
        )


def _check_schedule(schedule: Schedule, where: str) -> None:
    if {len(schedule.timesteps), len(schedule.sigmas)} != {schedule.denoise_passes}:
        raise ManifestError(
            f"{where} has {len(schedule.timesteps)} timesteps and {len(schedule.sigmas)} sigmas, "
            f"expected {schedule.denoise_passes} of each"
        )
    first, levels = len(schedule.first_timesteps), len(schedule.first_sigmas)
    if first != levels or schedule.table_passes > MAX_PASSES:
        raise ManifestError(
            f"{where} has {first} first_timesteps and {levels} first_sigmas, expected as many of each and at most "
            f"{MAX_PASSES} passes with the others"
        )
    if schedule.shift is not None and schedule.shift <= 0:
        raise ManifestError(f"{where}.shift is {schedule.shift}, expected a positive number")


def _check_golden(golden: Golden, where: str) -> None:
    chunks = golden.chunks
    if not chunks or list(chunks) != sorted(set(chunks)):
        raise ManifestError(f"{where}.chunks is {list(chunks)[:8]}, expected rising chunk numbers")
    if golden.bounds and len(golden.bounds) != len(chunks):
        raise ManifestError(
            f"{where}.bounds has {len(golden.bounds)} entries, expected one for each of the {len(chunks)} chunks"
        )


def _check_video(video: Video, where: str) -> None:
    Budget(MAX_PIXELS, "pixels").take(video.height * video.width, where)


def _check_viewer(viewer: Viewer, where: str) -> None:
    for name, entries in (("prompts", viewer.prompts), ("pictures", viewer.pictures)):
        Budget(MAX_EXAMPLES, name).take(len(entries), f"{where}.{name}")


def _check_input(spec: InputSpec, where: str) -> None:
    if spec.per not in PERIODS:
        raise ManifestError(f"{where}.per is {spec.per!r}, {UNKNOWN_WORD.format(', '.join(PERIODS))}")


CHECKS: Mapping[type, Check] = {
    InputSpec: _check_input,
    Stream: _check_stream,
    Schedule: _check_schedule,
    Golden: _check_golden,
    Video: _check_video,
    Viewer: _check_viewer,
}
