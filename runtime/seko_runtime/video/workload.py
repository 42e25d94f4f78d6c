"""The video workload: chunk-wise autoregressive video models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from seko_runtime.executor.contract import Contract
from seko_runtime.executor.programs_check import resolve_programs
from seko_runtime.executor.resolved import Programs
from seko_runtime.format.manifest import Buffer, TensorSpec
from seko_runtime.format.safetensors_map import MappedTensor, check_tensor
from seko_runtime.sessions.artifact import OpenedFiles
from seko_runtime.sessions.engines import Engines
from seko_runtime.sessions.loaded import Loaded, TokenIds
from seko_runtime.sessions.workload import RuntimeWorkload
from seko_runtime.video.artifact import VideoArtifact
from seko_runtime.video.contract import ENCODER_PROGRAMS, TEXT_BUFFER, text_vocabulary, video_contract
from seko_runtime.video.device import state_bytes
from seko_runtime.video.golden import cache_tensor, input_tensor, video_tensor
from seko_runtime.video.manifest import CHECKS, KIND, Golden, VideoManifest
from seko_runtime.video.opened_rows import open_video_rows
from seko_runtime.video.options import VideoOptions
from seko_runtime.video.row_numbers import STATE_FORM
from seko_runtime.video.rows import VideoRows
from seko_runtime.video.schedule import rescheduled
from seko_runtime.video.text import PromptIds

Tensors = Mapping[str, MappedTensor]


class VideoWorkloadKind(RuntimeWorkload[VideoManifest]):
    """The video workload (the code for chunk-wise video models) as the runtime uses it."""

    kind = KIND
    manifest_type = VideoManifest
    manifest_checks = CHECKS
    first_rank_programs = ENCODER_PROGRAMS
    rows = VideoRows
    form = STATE_FORM

    def contract(self, manifest: VideoManifest) -> Contract:
        """Return the contract: the programs and buffers that the manifest of a video artifact must have."""
        return video_contract(manifest)

    def golden_file(self, manifest: VideoManifest) -> str | None:
        """Return the path of the artifact's file of recorded chunks."""
        golden = manifest.workload.golden
        return None if golden is None else golden.file

    def check_golden(self, manifest: VideoManifest, golden: Tensors) -> None:
        """Check the shapes of recorded latents, caches, frames, inputs, text and reference frames."""
        table = manifest.workload.golden
        if table is not None:
            _check_chunks(manifest, table, golden)
            _check_beginning(manifest, table, golden)

    def tokens(self, manifest: VideoManifest, files: Mapping[str, memoryview]) -> TokenIds | None:
        """Return the tokenizer of an artifact with a text encoder."""
        spec = manifest.workload.text
        return None if spec is None else PromptIds(spec, files[spec.tokenizer], text_vocabulary(manifest))

    def open_rows(self, loaded: Loaded[VideoManifest], options: Mapping[str, Any]) -> VideoRows:
        """Return the streams of a pool in this process."""
        return open_video_rows(loaded, VideoOptions(**options))

    def pool_manifest(self, manifest: VideoManifest, options: Mapping[str, Any]) -> VideoManifest:
        """Return the manifest of a pool's streams, with the pool's own passes and timesteps."""
        chosen = VideoOptions(**options)
        return rescheduled(manifest, chosen.steps, chosen.shift)[0]

    def artifact(self, files: OpenedFiles[VideoManifest], engines: Engines) -> VideoArtifact:
        """Return the artifact as a `VideoArtifact`, with opened engines."""
        return VideoArtifact(files, engines)

    def described(self, manifest: VideoManifest) -> tuple[Sequence[str], Mapping[str, object]]:
        """Return a description of an artifact's stream, cache, video and text."""
        workload = manifest.workload
        stream, kv, text, video = workload.stream, workload.kv, workload.text, workload.video
        reference = f"reference {stream.reference_frames}, " if stream.reference_frames else ""
        lines = [
            f"stream   {stream.width}x{stream.height} at {stream.fps} fps, chunk {stream.chunk_frames} latent frames,",
            f"         {reference}sink {stream.sink_frames}, ring {stream.ring_frames}",
            f"KV pool  {kv.pool_bytes} bytes ({kv.scheme}), in bf16 {kv.bf16_pool_bytes}",
        ]
        at_once = workload.schedule.chunks_at_once
        if at_once > 1:
            lines += [
                f"passes   {at_once} chunks at once: a stream's first chunk takes {at_once} passes, and what steers a "
                "stream shows",
                f"         in part in the next chunk, and whole {at_once - 1} chunks later",
            ]
        if manifest.offloads_cache:
            lines.append(
                f"         on the host, offloaded layer by layer; {manifest.device_pool_bytes} bytes on the device"
            )
        size = None if manifest.offloads_cache else state_bytes(manifest, self._programs(manifest))
        if size is not None:
            lines.append(f"session  {size} bytes when it is paused or saved")
        if manifest.ranks > 1 and video is not None:
            shared = "a part of the pictures" if manifest.shares_decoding else "all pictures"
            lines.append(f"         each rank has such a KV pool and decodes {shared}")
        if video is not None:
            lines.append(
                f"video    {video.width}x{video.height}, {video.first_frames} frames, then {video.chunk_frames} a chunk"
            )
            if video.decoder:
                lines.append(f"         decoded by a {video.decoder}")
        if text is not None:
            lines.append(f"text     sentences of up to {text.tokens} tokens")
        facts: dict[str, object] = {
            "kv": {
                "scheme": kv.scheme,
                "pool_bytes": kv.pool_bytes,
                "device_bytes": manifest.device_pool_bytes,
            },
            "session_bytes": size,
            "chunks_at_once": at_once,
            "text": None if text is None else {"tokens": text.tokens, "truncate": text.truncate},
            "video": None if video is None else asdict(video),
        }
        return lines, facts

    def _programs(self, manifest: VideoManifest) -> Programs:
        return resolve_programs(manifest, self.contract(manifest))


WORKLOAD = VideoWorkloadKind()


def _check_chunks(manifest: VideoManifest, golden: Golden, tensors: Tensors) -> None:
    shape = next(buffer.shape for buffer in manifest.buffers if buffer.name == manifest.workload.output)
    for chunk in golden.chunks:
        check_tensor(tensors, TensorSpec(f"latents.{chunk}", shape, "float32"), golden.file)
        if f"exact.{chunk}" in tensors:
            check_tensor(tensors, TensorSpec(f"exact.{chunk}", shape, "float32"), golden.file)
        if golden.cache_step:
            for buffer in manifest.buffers:
                if buffer.role == "cache":
                    _check_cache_sample(tensors, manifest, golden, buffer, chunk)
        if golden.video_step:
            _check_video_sample(tensors, manifest, golden, chunk)


def _check_beginning(manifest: VideoManifest, golden: Golden, tensors: Tensors) -> None:
    for spec in manifest.caller_inputs:
        steady = spec.per in ("session", "prompt")
        shape = (manifest.call_rows, *spec.shape)
        wanted = TensorSpec("", shape, "uint8" if spec.dtype.startswith("float8") else spec.dtype)
        chunks = range(golden.chunks[-1] + 1)
        for name in [input_tensor(spec.name)] if steady else [input_tensor(spec.name, at) for at in chunks]:
            if spec.default == "required" or name in tensors:
                check_tensor(tensors, replace(wanted, name=name), golden.file)
    if golden.reference is not None:
        channels, *size = manifest.workload.stream.latent_shape
        reference_shape = (manifest.call_rows, channels, manifest.workload.stream.reference_frames, *size)
        check_tensor(tensors, TensorSpec(golden.reference, reference_shape, "float32"), golden.file)
    if golden.text is not None:
        text = next((buffer for buffer in manifest.buffers if buffer.name == TEXT_BUFFER), None)
        # the recorded dtype, because any dtype that can be converted is accepted
        dtype = tensors[golden.text].dtype if golden.text in tensors else "float32"
        if text is not None:
            shape = (manifest.call_rows, *text.shape[1:])
            check_tensor(tensors, TensorSpec(golden.text, shape, dtype), golden.file)


def _check_cache_sample(
    tensors: Tensors, manifest: VideoManifest, golden: Golden, buffer: Buffer, chunk: int
) -> None:
    axis = buffer.row_axis
    shape = list(buffer.shape)
    shape[axis] = -(-(shape[axis] // manifest.state_rows * manifest.call_rows) // golden.cache_step)
    if buffer.rank_axis:  # a manifest has the shape of one rank's part; the golden holds all ranks
        shape[buffer.rank_axis] *= manifest.ranks
    name = cache_tensor(buffer.name, chunk)
    # the recorded dtype, because any dtype that can be converted is accepted
    dtype = tensors[name].dtype if name in tensors else buffer.dtype
    check_tensor(tensors, TensorSpec(name, tuple(shape), dtype), golden.file)


def _check_video_sample(tensors: Tensors, manifest: VideoManifest, golden: Golden, chunk: int) -> None:
    video, step = manifest.workload.video, golden.video_step
    if video is None:
        return
    frames = video.chunk_frames if chunk else video.first_frames
    sides = (-(-video.height // step), -(-video.width // step))
    spec = TensorSpec(video_tensor(chunk), (manifest.call_rows, frames, *sides, 3), "uint8")
    check_tensor(tensors, spec, golden.file)
