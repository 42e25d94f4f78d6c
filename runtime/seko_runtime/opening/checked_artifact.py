"""All checks of an artifact that load none of its native code, cheapest first. `artifact` opens it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from seko_runtime.arguments import path_of
from seko_runtime.backends import runtime_backend
from seko_runtime.backends.host import check_cpu, check_device, free_host_bytes
from seko_runtime.errors import HostMemoryError
from seko_runtime.executor.resolved import Programs
from seko_runtime.format.artifact_files import ArtifactFiles
from seko_runtime.format.budgets import MAX_HELD_BYTES, Budget
from seko_runtime.format.manifest import CACHE_KEY, PLUGINS_KEY, Buffer, TensorSpec, Weight
from seko_runtime.format.safetensors_map import MappedTensor, check_tensor, map_safetensors
from seko_runtime.format.trust import check_signature
from seko_runtime.host.faults import machine_faults
from seko_runtime.opening.golden import cache_tensor, input_tensor, video_tensor
from seko_runtime.video.contract import TEXT_BUFFER, resolve_video
from seko_runtime.video.manifest import Golden, VideoManifest, parse_video_manifest


@dataclass(frozen=True)
class CheckedArtifact:
    """An artifact whose manifest, files, hashes and headers are right; no native code is loaded yet."""

    manifest: VideoManifest
    document: bytes  # of manifest.json
    signature: bytes | None  # of manifest.sig
    digest: str
    device: str
    programs: Programs
    files: Mapping[str, memoryview]
    weights: Mapping[str, MappedTensor]
    golden: Mapping[str, MappedTensor]


@machine_faults()
def read_manifest(path: str | Path, *, trust: str | Path | None = None) -> tuple[VideoManifest, str]:
    """Read and check only an artifact's manifest; see `seko_runtime.read_manifest`."""
    files = ArtifactFiles(path_of(path, "path"))
    try:
        document = files.read_manifest()
        check_signature(document, files.read_signature(), trust)
    finally:
        files.close()
    return parse_video_manifest(document), hashlib.sha256(document).hexdigest()


@machine_faults()
def read_file(path: str | Path, manifest: VideoManifest, name: str) -> memoryview:
    """Read one file of an artifact, checked against its hash in the manifest from `read_manifest`.

    Raises
    ------
    ArtifactError
        A subclass for the cause.
    """
    files = ArtifactFiles(path_of(path, "path"))
    try:
        files.open_all(manifest.files)
        return files.verified({name: manifest.files[name]}, frozenset({name}))[name]
    finally:
        files.close()


@machine_faults()
def check_artifact(
    path: str | Path,
    device: str = "auto",
    *,
    fits_here: bool = True,
    trust: str | Path | None = None,
    may_be_unsigned: bool = False,
    copy_weights: bool = False,
) -> CheckedArtifact:
    """Run every check that loads no native code of the artifact, cheapest first; see `open_artifact`.

    Without ``fits_here`` the machine is not checked: the artifact may be for another one. With ``may_be_unsigned``
    the trust file is not checked, for the tool that signs. ``copy_weights`` is as in `open_artifact`.
    """
    folder = ArtifactFiles(path_of(path, "path"))
    try:
        document, signature = folder.read_manifest(), folder.read_signature()
        if not may_be_unsigned:
            check_signature(document, signature, trust)
        manifest = parse_video_manifest(document)
        programs = resolve_video(manifest)
        held = _held_files(manifest)
        device = check_device(manifest.target, device)
        backend = runtime_backend(manifest.backend) if fits_here else None
        if backend is not None and backend.fits_one_cpu:
            check_cpu(manifest.target)
        folder.open_all(manifest.files)
        if backend is not None:
            backend.check_library()  # before its version: without it there is none
            backend.check_target(manifest.target, device)
        if copy_weights:
            held |= {weight.file for weight in manifest.weights}
        _check_host_memory(sum(manifest.files[path].size for path in held), copy_weights)
        files = folder.verified(manifest.files, held)
    finally:
        folder.close()
    return CheckedArtifact(
        manifest=manifest,
        document=document,
        signature=signature,
        digest=hashlib.sha256(document).hexdigest(),
        device=device,
        programs=programs,
        files=files,
        weights=_place_weights(manifest, files),
        golden=_place_golden(manifest, files),
    )


def _held_files(manifest: VideoManifest) -> frozenset[str]:
    """Return the files that are read into memory before they are hashed: code, files parsed as such, and the
    golden.
    """
    held = {engine.file for engine in manifest.engines}
    if manifest.workload.golden is not None:
        held.add(manifest.workload.golden.file)
    if manifest.workload.text is not None:
        held.add(manifest.workload.text.tokenizer)
    held |= {manifest.extra[key] for key in (CACHE_KEY, PLUGINS_KEY) if key in manifest.extra} & {
        *manifest.files
    }
    needed = sum(manifest.files[path].size for path in held)
    Budget(MAX_HELD_BYTES, "bytes").take(needed, "what is read into memory")
    return frozenset(held)


def _check_host_memory(needed: int, copy_weights: bool) -> None:
    free = free_host_bytes()
    if needed <= free:
        return
    what, advice = "engines, golden and tokenizer", "free some"
    if copy_weights:
        what = f"{what} and the copy of the weights"
        advice += ", or open the artifact without that copy (copy_weights, --copy-weights)"
    raise HostMemoryError(f"{what} take {needed} bytes of this machine's memory, {free} are free: {advice}")


def _place_weights(manifest: VideoManifest, files: Mapping[str, memoryview]) -> dict[str, MappedTensor]:
    by_file: dict[str, list[Weight]] = {}
    for weight in manifest.weights:
        by_file.setdefault(weight.file, []).append(weight)
    placed: dict[str, MappedTensor] = {}
    for file, weights in by_file.items():  # one header at a time: a file may hold more than is asked of it
        found = map_safetensors(files[file], file)
        placed |= {weight.name: check_tensor(found, weight, file) for weight in weights}
    return placed


def _place_golden(manifest: VideoManifest, files: Mapping[str, memoryview]) -> dict[str, MappedTensor]:
    """Return the tensors of the golden file, after checking the shapes of those that `verify` needs."""
    golden: Golden | None = manifest.workload.golden
    if golden is None:
        return {}
    found = map_safetensors(files[golden.file], golden.file)
    shape = next(buffer.shape for buffer in manifest.buffers if buffer.name == manifest.workload.output)
    for chunk in golden.chunks:
        check_tensor(found, TensorSpec(f"latents.{chunk}", shape, "float32"), golden.file)
        if f"exact.{chunk}" in found:
            check_tensor(found, TensorSpec(f"exact.{chunk}", shape, "float32"), golden.file)
        if golden.cache_step:
            for buffer in manifest.buffers:
                if buffer.role == "cache":
                    _check_cache_sample(found, manifest, buffer, chunk)
        if golden.video_step and manifest.workload.video is not None:
            _check_video_sample(found, manifest, chunk, golden)
    for one in manifest.caller_inputs:
        steady = one.per in ("session", "prompt")
        shape = (manifest.call_rows, *one.shape)
        spec = TensorSpec("", shape, "uint8" if one.dtype.startswith("float8") else one.dtype)
        chunks = range(golden.chunks[-1] + 1)
        for name in [input_tensor(one.name)] if steady else [input_tensor(one.name, at) for at in chunks]:
            if one.default == "required" or name in found:
                check_tensor(found, replace(spec, name=name), golden.file)
    if golden.reference is not None:
        channels, *size = manifest.workload.stream.latent_shape
        held = (manifest.call_rows, channels, manifest.workload.stream.reference_frames, *size)
        check_tensor(found, TensorSpec(golden.reference, held, "float32"), golden.file)
    if golden.text is not None:
        text = next((buffer for buffer in manifest.buffers if buffer.name == TEXT_BUFFER), None)
        dtype = found[golden.text].dtype if golden.text in found else "float32"  # any dtype that converts
        if text is not None:
            shape = (manifest.call_rows, *text.shape[1:])
            check_tensor(found, TensorSpec(golden.text, shape, dtype), golden.file)
    return found


def _check_cache_sample(
    found: Mapping[str, MappedTensor], manifest: VideoManifest, buffer: Buffer, chunk: int
) -> None:
    golden, axis = manifest.workload.golden, buffer.row_axis
    if golden is None:
        return
    shape = list(buffer.shape)
    shape[axis] = -(-(shape[axis] // manifest.state_rows * manifest.call_rows) // golden.cache_step)
    if buffer.rank_axis:  # the golden holds the shares of all ranks
        shape[buffer.rank_axis] *= manifest.ranks
    name = cache_tensor(buffer.name, chunk)
    dtype = found[name].dtype if name in found else buffer.dtype  # any dtype that converts
    check_tensor(found, TensorSpec(name, tuple(shape), dtype), golden.file)


def _check_video_sample(
    found: Mapping[str, MappedTensor], manifest: VideoManifest, chunk: int, golden: Golden
) -> None:
    video, step = manifest.workload.video, golden.video_step
    if video is None:
        return
    frames = video.chunk_frames if chunk else video.first_frames
    sides = (-(-video.height // step), -(-video.width // step))
    spec = TensorSpec(video_tensor(chunk), (manifest.call_rows, frames, *sides, 3), "uint8")
    check_tensor(found, spec, golden.file)
