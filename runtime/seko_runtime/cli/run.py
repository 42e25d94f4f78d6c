"""The command `run`: chunks of one session into a file, written as they come. Options are parsed in `__main__`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.cli.output import Report
from seko_runtime.errors import ManifestError, UsageError, VideoWriterError
from seko_runtime.format.json_fields import Fields, as_items, as_number, as_text, parse_json
from seko_runtime.format.manifest import Manifest
from seko_runtime.opening.artifact import OpenArtifact, open_artifact
from seko_runtime.opening.golden import ChunkError, error_row
from seko_runtime.video.chunk import Chunk
from seko_runtime.video.files import ChunkWriter, check_suffix
from seko_runtime.video.session import Session

MAX_SCHEDULE_BYTES = 1 << 20


@dataclass(frozen=True)
class PromptAt:
    """One line of a prompt schedule: from the first chunk that begins at ``at_s`` or later, in seconds of video."""

    at_s: float
    prompt: str
    recache: bool = False


def run(options: argparse.Namespace) -> Report:
    """Make chunks, write them, and return the report.

    Raises
    ------
    SekoRuntimeError
        By its subclass; the file is then not there.
    """
    check_suffix(options.output)
    prompts = _prompts_of(options)
    text = None if options.text is None else _load_text(options.text)
    image = None if options.image is None else load_image(options.image)
    reference = None if options.reference is None else load_reference(options.reference)
    began = time.perf_counter()
    with open_artifact(
        options.artifact, device=options.device, trust=options.trust, copy_weights=options.copy_weights
    ) as artifact:
        manifest = artifact.manifest
        stream = replace(manifest.stream, batch=manifest.call_rows)
        seeds = [options.seed + row for row in range(stream.batch)]
        starts = bool(prompts) and prompts[0].at_s == 0
        with (
            artifact.open_session(
                seeds=seeds,
                text=text,
                prompt=prompts[0].prompt if starts else None,
                steps=options.steps,
                shift=options.shift,
                image=image,
                reference=reference,
            ) as session,
            ChunkWriter(options.output, stream, options.chunks, artifact.manifest.video) as writer,
        ):
            skipped = _not_compared(options, artifact, seeds)
            compared = frozenset() if skipped else frozenset(_golden_chunks(artifact))
            job = _Job(artifact, session, writer, options.chunks, compared, began)
            job.run(deque(prompts[int(starts) :]))
        report = job.report()
    result: dict[str, object] = {
        "artifact": str(options.artifact),
        "output": str(options.output.resolve()),
        "seed": options.seed,
        **report,
    }
    return Report(result, _lines(result, job.errors, skipped, artifact.manifest))


@dataclass
class _Job:
    """Chunks from a session to a writer, with the times at which they came."""

    artifact: OpenArtifact
    session: Session
    writer: ChunkWriter
    chunks: int
    compared: frozenset[int]
    began: float
    opened: float = field(default_factory=time.perf_counter)
    errors: list[ChunkError] = field(default_factory=list)
    came: list[float] = field(default_factory=list)
    video_frames: int = 0

    def run(self, prompts: deque[PromptAt]) -> None:
        """Make all chunks; where decoding runs beside them, one is queued before the last one's frames are written."""
        stream = self.artifact.manifest.stream
        queued: deque[Chunk] = deque()
        ahead = int(self.writer.takes_frames and self.session.decodes_beside)
        frames = 0
        for number in range(self.chunks):
            due = None
            while prompts and prompts[0].at_s * stream.fps <= frames:
                due = prompts.popleft()
            if due is not None:
                self.session.set_prompt(due.prompt, recache=due.recache)
                self.compared = frozenset()
            chunk = self.session.run_chunk(self.artifact.golden_inputs(number))
            frames += _video_frames(self.artifact.manifest, number)
            latents = None if self.writer.takes_frames else chunk.to_host()
            if number in self.compared:
                self.errors.append(
                    self.artifact.chunk_error(number, chunk.to_host() if latents is None else latents)
                )
            if latents is not None:
                self._write(latents)
                continue
            queued.append(chunk)
            if len(queued) > ahead:
                self._write(queued.popleft().video())
        while queued:
            self._write(queued.popleft().video())
        if sys.stderr.isatty():
            print(file=sys.stderr)

    def report(self) -> dict[str, object]:
        """What was made and how fast, as JSON takes it."""
        manifest, stats = self.artifact.manifest, self.session.stats
        first = self.came[0] - self.opened
        rate = (len(self.came) - 1) / (self.came[-1] - self.came[0]) if len(self.came) > 1 else 1 / first
        fps = rate * _video_frames(manifest, 1)
        return {
            "digest": self.artifact.digest,
            "preview": self.writer.is_preview,
            "chunks": self.chunks,
            "passes": self.session.manifest.schedule.denoise_passes,
            "open_s": self.opened - self.began,
            "first_chunk_s": first,
            "first_frame_s": self.came[0] - self.began if self.writer.takes_frames else None,
            "chunks_per_s": rate,
            "video_frames": self.video_frames,
            "fps": fps,
            "realtime_factor": fps / manifest.stream.fps,
            "prompt_cache": {"hits": stats.prompt_cache_hits, "misses": stats.prompt_cache_misses},
            "kv": {
                "scheme": manifest.kv.scheme,
                "pool_bytes": manifest.kv.pool_bytes,
                "bf16_pool_bytes": manifest.kv.bf16_pool_bytes,
            },
            "errors": [error_row(error) for error in self.errors],
        }

    def _write(self, made: NDArray[Any]) -> None:
        self.came.append(time.perf_counter())
        manifest, number = self.artifact.manifest, len(self.came) - 1
        self.video_frames += _video_frames(manifest, number)
        self.writer.write(made)
        if sys.stderr.isatty():
            passed = time.perf_counter() - self.opened
            fps = self.video_frames / passed
            print(
                f"\r{self.video_frames} frames  {fps:.1f} fps  {fps / manifest.stream.fps:.2f} x real time  "
                f"KV {manifest.kv.pool_bytes} bytes ",
                end="",
                file=sys.stderr,
                flush=True,
            )


def load_schedule(path: Path) -> list[PromptAt]:
    """Read a prompt schedule: ``[{"at_s": 0, "prompt": "..."}, {"at_s": 6.5, "prompt": "...", "recache": true}]``.

    Raises
    ------
    UsageError
        If it is none, or its times do not rise.
    """
    try:
        document = path.read_bytes()
        lines = list(as_items(parse_json(document, str(path), MAX_SCHEDULE_BYTES), "it", _prompt_at))
    except (OSError, ManifestError) as error:
        raise UsageError(f"--prompts {path} is no schedule of prompts: {str(error)[:200]}") from None
    times = [line.at_s for line in lines]
    if not lines or times[0] < 0 or times != sorted(set(times)):
        raise UsageError(f"--prompts {path} has the times {times[:8]}, expected rising ones from 0 on")
    return lines


def load_reference(path: Path) -> NDArray[Any]:
    """Read reference frames: a picture as `load_image` does, or an array file of pictures or float32 latents.

    Raises
    ------
    UsageError, VideoWriterError
        As `load_image`.
    """
    if path.suffix != ".npy":
        return load_image(path, "--reference")
    array = _load_array(path, "--reference")
    if array.dtype not in (np.uint8, np.float32):
        raise UsageError(
            f"--reference {path} is {array.dtype} {list(array.shape)}, expected uint8 pictures or float32 latents"
        )
    return array


def load_image(path: Path, option: str = "--image") -> NDArray[np.uint8]:
    """Read a picture, uint8 [H, W, 3]: an array file, or whatever PyAV reads.

    Raises
    ------
    UsageError
        If the file is none.
    VideoWriterError
        If it needs PyAV, which is not installed.
    """
    if path.suffix == ".npy":
        array = _load_array(path, option)
        if array.dtype != np.uint8 or array.ndim not in (3, 4):
            raise UsageError(
                f"{option} {path} is {array.dtype} {list(array.shape)}, expected uint8 [rows, columns, 3]"
            )
        return array.astype(np.uint8, copy=False)
    try:
        import av
    except ImportError:
        raise VideoWriterError(
            f"{option} {path.name} needs PyAV, which is not installed; give a .npy, or "
            "pip install 'seko-runtime[video]'"
        ) from None
    library: Any = av
    try:
        with library.open(str(path)) as container:
            picture: NDArray[np.uint8] = next(container.decode(video=0)).to_ndarray(format="rgb24")
    except (
        OSError,
        ValueError,
        IndexError,
        StopIteration,
    ) as error:  # PyAV's errors are these two of Python's
        raise UsageError(f"{option} {path} is no picture: {str(error)[:120]}") from None
    return picture


def _prompts_of(options: argparse.Namespace) -> list[PromptAt]:
    given = [name for name in ("prompt", "prompts", "text") if getattr(options, name) is not None]
    if len(given) > 1:
        raise UsageError(f"--{' and --'.join(given)} exclude each other; give one")
    if options.prompt is not None:
        return [PromptAt(0.0, options.prompt)]
    return [] if options.prompts is None else load_schedule(options.prompts)


def _prompt_at(value: object, where: str) -> PromptAt:
    fields = Fields(value, where)
    surplus = set(fields.names()) - {"at_s", "prompt", "recache"}
    if surplus:
        raise ManifestError(f"{where} has the unknown {sorted(surplus)[:4]}")
    return PromptAt(
        as_number(fields.value("at_s"), f"{where}.at_s"),
        as_text(fields.value("prompt"), f"{where}.prompt"),
        fields.flag("recache", default=False),
    )


def _video_frames(manifest: Manifest, number: int) -> int:
    """Video frames of chunk ``number`` of a stream, decoded or as a preview shows them."""
    if manifest.video is not None:
        return manifest.video.chunk_frames if number else manifest.video.first_frames
    return manifest.stream.chunk_frames * manifest.stream.video_frames_per_latent


def _golden_chunks(artifact: OpenArtifact) -> tuple[int, ...]:
    golden = artifact.manifest.golden
    return () if golden is None else golden.chunks


def _not_compared(options: argparse.Namespace, artifact: OpenArtifact, seeds: Sequence[int]) -> str:
    """Say why this run's chunks are not those that were recorded; nothing if they are."""
    golden = artifact.manifest.golden
    if golden is None:
        return "the artifact has no recorded chunks"
    asked = [name for name in ("prompt", "prompts", "text") if getattr(options, name) is not None]
    if asked or list(golden.seeds) != list(seeds):
        return "another prompt or seed"
    others = [name for name in ("steps", "shift", "image", "reference") if getattr(options, name) is not None]
    return f"--{others[0]} was given" if others else ""


def _load_text(path: Path) -> NDArray[np.float32]:
    text = _load_array(path, "--text")
    if text.dtype.kind not in "fiu":
        raise UsageError(f"--text {path} holds no array of numbers")
    return text.astype(np.float32)


def _load_array(path: Path, option: str) -> NDArray[Any]:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"{option} {path} is no .npy file of numbers: {str(error)[:120]}") from None
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{option} {path} holds no array of numbers")
    return array


def _lines(
    result: dict[str, Any], errors: Sequence[ChunkError], skipped: str, manifest: Manifest
) -> tuple[str, ...]:
    kind = "latents"
    if result["preview"]:
        kind = "a linear preview of the latents, not decoded video"
    elif result["first_frame_s"] is not None:
        kind = f"{result['video_frames']} video frames, the first after {result['first_frame_s']:.2f} s"
    kv = manifest.kv
    ratio = kv.pool_bytes / max(kv.bf16_pool_bytes, 1)
    checks = [f"check    {error}{'' if error.within else ': missed'}" for error in errors]
    return (
        f"wrote    {result['output']} ({kind})",
        f"speed    {result['chunks_per_s']:.2f} chunks/s, {result['realtime_factor']:.2f} x real time "
        f"at {manifest.stream.fps} fps",
        f"KV pool  {kv.pool_bytes} bytes ({kv.scheme}), {ratio:.4f} of bf16",
        *(checks or [f"check    skipped ({skipped})"]),
    )
