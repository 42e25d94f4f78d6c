"""The command `run`: makes the chunks of one session and writes each chunk when it is finished."""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import mapping_of, shown
from seko_runtime.cli.options import given
from seko_runtime.cli.output import Report, note, stdout_for_video
from seko_runtime.cli.progress import Progress
from seko_runtime.cli.video.conditioning import (
    Conditioning,
    PromptAt,
    check_conditioning,
    read_conditioning,
    with_own_picture,
)
from seko_runtime.cli.video.controls import control_options, fed_controls, read_controls
from seko_runtime.cli.video.input_files import RunInputs, fit_inputs, read_inputs
from seko_runtime.cli.video.options import OPTIONS, VIDEO
from seko_runtime.controls.base import INPUTS, MEDIA
from seko_runtime.controls.recording import Entry, read_recording
from seko_runtime.errors import UsageError
from seko_runtime.format.outputs import STDOUT
from seko_runtime.media_files.sound import VOICE_RATE as RATE
from seko_runtime.opening.artifact import open_artifact
from seko_runtime.video.artifact import VideoArtifact, video_artifact
from seko_runtime.video.clocks import checked_seed
from seko_runtime.video.files import ChunkWriter, check_output
from seko_runtime.video.golden import ChunkError
from seko_runtime.video.lockstep import Lockstep, RowChunks, opened_in_lockstep
from seko_runtime.video.manifest import VideoManifest


def run(options: argparse.Namespace, manifest: VideoManifest) -> Report:
    """Make the chunks of a run, write them, and return the report.

    Raises
    ------
    SekoRuntimeError
        If the run fails; the subclass tells the cause. A failed run leaves no new file.
    KeyboardInterrupt
        If a signal ends the run; finished chunks are kept, see `ChunkWriter`.
    """
    check_output(options.output, options.format)
    streams = options.output == STDOUT
    if streams:
        _check_stdout(options)
    entries = _recorded(options)
    conditions, arrays = read_conditioning(options), read_inputs(options.input)
    events = read_controls(options)
    if not entries:
        image = options.image
        conditions = with_own_picture(conditions, options, manifest, arrays)
        if options.image != image:
            events = read_controls(options)
    controls = fed_controls(options, manifest, events, arrays, entries)
    check_conditioning(conditions, options, manifest, controls)
    inputs = fit_inputs(arrays, options, manifest, controls, entries)
    _tell_late_prompts(conditions.prompts, manifest, options.chunks)
    if not streams:
        return _run(options, manifest, conditions, inputs, None)
    with stdout_for_video() as descriptor:
        return _run(options, manifest, conditions, inputs, descriptor)


def _recorded(options: argparse.Namespace) -> list[Entry]:
    """Return the recording of ``--events``, and set the run's seed, prompt and number of chunks to those of the
    recording; nothing without this option.

    Raises
    ------
    UsageError
        If the recording cannot be read, or another option says the same.
    """
    if options.events is None:
        return []
    said = {"--text", "--prompt", "--prompts", "--control", *(option.name for option in control_options())}
    others = [name for name in given(options, OPTIONS) if name in said]
    others += ["--seed"] if options.seed else []  # 0 is also that of a command line without it
    if others:
        raise UsageError(f"--events and {others[0]} both say what happens; give one")
    entries = read_recording(options.events, "--events")
    begin = entries[0].event
    options.seed, options.prompt = checked_seed(begin.get("seed", options.seed)), begin.get("prompt")
    if not isinstance(options.prompt, str | None):
        raise UsageError(
            f"--events {options.events} begins with the prompt {shown(options.prompt)}, expected a text"
        )
    options.chunks = options.chunks or entries[-1].chunk
    if not options.chunks:
        raise UsageError(f"--events {options.events} is the recording of no chunk: give --chunks")
    return entries


def _check_stdout(options: argparse.Namespace) -> None:
    if sys.stdout is None:
        raise UsageError("-o - writes to stdout, which is closed; choose another -o")
    if options.json:
        raise UsageError("-o - and --json both write to stdout; give one")
    if sys.stdout.isatty():
        raise UsageError(
            "-o - writes to stdout, which is a terminal; pipe it into a player, or choose another -o"
        )


def _tell_late_prompts(prompts: Sequence[PromptAt], manifest: VideoManifest, chunks: int) -> None:
    """Print to stderr which prompts of a schedule no chunk of the run uses, because its last chunk begins before
    them."""
    stream, last = manifest.workload.stream, chunks - 1
    before = _video_frames(manifest, 0) + (last - 1) * _video_frames(manifest, 1) if last else 0
    late = [prompt for prompt in prompts if not prompt.due(stream, last * stream.chunk_frames, before)]
    if late:
        first = late[0]
        place = f"{first.at_s:g} s" if first.at_frame is None else f"video frame {first.at_frame}"
        more = f" and {len(late) - 1} behind it are" if len(late) > 1 else " is"
        note(f"warning: the prompt at {place}{more} not used: the last of {chunks} chunks begins before it")


def _run(
    options: argparse.Namespace,
    manifest: VideoManifest,
    conditioning: Conditioning,
    inputs: RunInputs,
    descriptor: int | None,
) -> Report:
    prompts = conditioning.prompts
    began = time.perf_counter()
    if options.output.is_fifo():
        note(f"writing to the pipe {options.output}, which waits for whoever reads it")
    with (
        Progress(f"opening {options.artifact}", manifest.workload.stream.fps, options.chunks) as progress,
        open_artifact(
            options.artifact, device=options.device, trust=options.trust, copy_weights=options.copy_weights
        ) as opened,
    ):
        artifact = video_artifact(opened)
        manifest = artifact.manifest
        stream, rows = manifest.workload.stream, len(inputs.controls)
        seeds = [options.seed + row for row in range(rows)]
        starts = bool(prompts) and prompts[0].due(stream, 0, 0)
        prompt = prompts[0].prompt if starts else None
        sound = inputs.sound_track(options.chunks * _video_frames(manifest, 1) * RATE // stream.fps)
        with (
            artifact.open_pool(steps=options.steps, shift=options.shift) as pool,
            opened_in_lockstep(pool, _beginnings(artifact, seeds, prompt, conditioning, inputs)) as sessions,
            ChunkWriter(
                options.output,
                stream,
                options.chunks,
                artifact.manifest.workload.video,
                rows=rows,
                form=options.format,
                descriptor=descriptor,
                sound=sound,
            ) as writer,
        ):
            skipped = _not_compared(options, artifact, seeds)
            compared = frozenset() if skipped else frozenset(_golden_chunks(artifact))
            job = _Job(artifact, sessions, writer, inputs, sound, options.chunks, compared, progress, began)
            progress.opened()
            job.run(deque(prompts[int(starts) :]))
        report = job.report()
    result: dict[str, object] = {
        "artifact": str(options.artifact),
        "output": str(options.output if options.output == STDOUT else options.output.resolve()),
        "format": writer.form,
        "seed": options.seed,
        **report,
    }
    lines = _lines(result, job.errors, skipped, artifact.manifest, rows)
    return Report(result, lines, aside=descriptor is not None)


@dataclass
class _Job:
    """Writes the chunks of some sessions side by side, and records the time of each chunk."""

    artifact: VideoArtifact
    sessions: Lockstep
    writer: ChunkWriter
    inputs: RunInputs
    sound: NDArray[np.float32] | None
    chunks: int
    compared: frozenset[int]
    progress: Progress
    began: float
    opened: float = field(default_factory=time.perf_counter)
    errors: list[ChunkError] = field(default_factory=list)
    came: list[float] = field(default_factory=list)
    video_frames: int = 0

    def run(self, prompts: deque[PromptAt]) -> None:
        """Make all chunks; if decoding runs at the same time as chunks, each chunk is queued before the previous
        chunk's frames are written.
        """
        stream = self.artifact.manifest.workload.stream
        queued: deque[RowChunks] = deque()
        ahead = int(self.writer.takes_frames and self.sessions.sessions[0].overlaps_decoding)
        frames, entries = 0, deque(self.inputs.entries[1:])  # the controls have the first one's
        for number in range(self.chunks):
            while entries and entries[0].chunk == number:
                self._replay(entries.popleft())
            due = None
            while prompts and prompts[0].due(stream, number * stream.chunk_frames, frames):
                due = prompts.popleft()
            if due is not None:
                self.sessions.set_prompt(due.prompt, recache=due.recache)
                self.compared = frozenset()
            recorded = {}
            if not self.inputs.replays:
                recorded = self.inputs.recorded(self.artifact.golden_inputs(number, None))
            chunk = self.sessions.run_chunk(recorded | self.inputs.of_chunk(number))
            first = int(chunk.rows[0].frames[0, 0])  # 0 again after a restart
            if self.sound is not None:
                self.inputs.hear(self.sound, frames * RATE // stream.fps, first)
            frames += _video_frames(self.artifact.manifest, first)
            latents = None if self.writer.takes_frames else chunk.to_host()
            if number in self.compared:
                latents_on_host = chunk.to_host() if latents is None else latents
                self.errors.append(self.artifact.chunk_error(number, latents_on_host))
            if latents is not None:
                self._write(latents)
                continue
            queued.append(chunk)
            if len(queued) > ahead:
                self._write(queued.popleft().video())
        while queued:
            self._write(queued.popleft().video())

    def _replay(self, entry: Entry) -> None:
        """Do for every session what an entry of a recording says; restarts give each row a seed of its own."""
        self.compared = frozenset()
        for row, session in enumerate(self.sessions.sessions):
            seed = entry.event.get("seed") if entry.what == "restart" else None
            session.replay(
                entry
                if seed is None
                else replace(entry, event={**entry.event, "seed": checked_seed(seed) + row})
            )

    def report(self) -> dict[str, object]:
        """Return the number of chunks and frames made and the speed, as a dict for JSON."""
        manifest, stats = self.artifact.manifest, self.sessions.stats
        first = self.came[0] - self.opened
        rate = (len(self.came) - 1) / (self.came[-1] - self.came[0]) if len(self.came) > 1 else 1 / first
        fps = rate * _video_frames(manifest, 1)
        late = self.inputs.lateness([self.opened, *self.came])
        return {
            "live_late_s": max(late, default=None),
            "digest": self.artifact.digest,
            "preview": self.writer.is_preview,
            "chunks": self.chunks,
            "passes": self.sessions.manifest.workload.schedule.denoise_passes,
            "open_s": self.opened - self.began,
            "first_chunk_s": first,
            "first_frame_s": self.came[0] - self.began if self.writer.takes_frames else None,
            "chunks_per_s": rate,
            "video_frames": self.video_frames,
            "fps": fps,
            "realtime_factor": fps / manifest.workload.stream.fps,
            "prompt_cache": {"hits": stats.prompt_cache_hits, "misses": stats.prompt_cache_misses},
            "kv": {
                "scheme": manifest.workload.kv.scheme,
                "pool_bytes": manifest.workload.kv.pool_bytes,
                "bf16_pool_bytes": manifest.workload.kv.bf16_pool_bytes,
            },
            "errors": [error.row() for error in self.errors],
            "counts": self.inputs.counts,
        }

    def _write(self, pictures: NDArray[Any]) -> None:
        self.came.append(time.perf_counter())
        manifest, number = self.artifact.manifest, len(self.came) - 1
        taken = self.writer.takes_frames
        self.video_frames += pictures.shape[1] if taken else _video_frames(manifest, number)
        self.writer.write(pictures)
        self.progress.show(self.video_frames, number + 1)


def _beginnings(
    artifact: VideoArtifact,
    seeds: Sequence[int],
    prompt: str | None,
    conditioning: Conditioning,
    inputs: RunInputs,
) -> Iterator[dict[str, Any]]:
    """Yield the arguments of `Pool.open_session` for each seed, with the caller's conditions. Conditions that the
    caller left out are those that the golden recorded."""
    for row, seed in enumerate(seeds):
        controls = inputs.controls[row]
        opening = controls.opening()
        steady = inputs.recorded(artifact.golden_inputs(None, row))
        of_files = {name: array[row] for name, array in inputs.steady.items()}
        steady |= of_files
        text = None if conditioning.text is None else conditioning.text[row : row + 1]
        image, reference = opening.get("image"), opening.get("reference")
        begun = artifact.beginning(row, text, prompt, image, reference, steady)
        if inputs.entries:
            begun |= inputs.entries[0].opening
            begun["inputs"] = {**mapping_of(begun["inputs"], "inputs"), **of_files}
        if opening.keys() & {"image", "reference"}:
            begun = {name: value for name, value in begun.items() if name not in ("image", "reference")}
        yield {**begun, "seed": seed, "controls": controls}


def _video_frames(manifest: VideoManifest, first: int) -> int:
    """Return the video frames of a chunk whose first latent frame is ``first``, decoded or as a preview."""
    if manifest.workload.video is not None:
        return manifest.workload.video.chunk_frames if first else manifest.workload.video.first_frames
    return manifest.workload.stream.chunk_frames * manifest.workload.stream.video_frames_per_latent


def _size(manifest: VideoManifest, rows: int) -> tuple[int, int]:
    """Return width and height of a written picture, in which the run's rows are side by side."""
    shown = manifest.workload.stream if manifest.workload.video is None else manifest.workload.video
    return shown.width * rows, shown.height


def _golden_chunks(artifact: VideoArtifact) -> tuple[int, ...]:
    golden = artifact.manifest.workload.golden
    return () if golden is None else golden.chunks


def _not_compared(options: argparse.Namespace, artifact: VideoArtifact, seeds: Sequence[int]) -> str:
    """Return the reason for which this run's chunks differ from the recorded chunks; empty if run and recording have
    equal conditions."""
    golden = artifact.manifest.workload.golden
    if golden is None:
        return "the artifact has no recorded chunks"
    prompts = [name for name in ("prompt", "prompts", "text") if getattr(options, name) is not None]
    if prompts or list(golden.seeds) != list(seeds):
        return "another prompt or seed"
    others = [name for name in given(options, OPTIONS, VIDEO, MEDIA, INPUTS) if name != "--chunks"]
    return f"{others[0]} was given" if others else ""


def _lines(
    result: dict[str, Any], errors: Sequence[ChunkError], skipped: str, manifest: VideoManifest, rows: int
) -> tuple[str, ...]:
    kind = "latents"
    if result["preview"]:
        kind = "a linear preview of the latents, not decoded video"
    elif result["first_frame_s"] is not None:
        kind = f"{result['video_frames']} video frames, the first after {result['first_frame_s']:.2f} s"
    if result["format"] == "raw":
        kind += "; rgb24 pictures, {}x{}".format(*_size(manifest, rows))
    kv = manifest.workload.kv
    ratio = kv.pool_bytes / max(kv.bf16_pool_bytes, 1)
    late = result["live_late_s"]
    counts = result["counts"].items()
    counted = [f"{name:8} {', '.join(f'{n} {word}' for word, n in own.items())}" for name, own in counts]
    checks = [f"check    {error}{'' if error.within else ': missed'}" for error in errors]
    return (
        f"wrote    {result['output']} ({kind})",
        f"speed    {result['chunks_per_s']:.2f} chunks/s, {result['realtime_factor']:.2f} x real time "
        f"at {manifest.workload.stream.fps} fps",
        f"KV pool  {kv.pool_bytes} bytes ({kv.scheme}), {ratio:.4f} of bf16",
        *([] if late is None else [f"live     chunks at most {late:.2f} s behind what they hear"]),
        *counted,
        *(checks or [f"check    skipped ({skipped})"]),
    )
