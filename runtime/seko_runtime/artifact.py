"""Opening an artifact: every check in order, then its weights and engines, then sessions and verification."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from seko_runtime.artifact_files import ArtifactFiles
from seko_runtime.backends import Backend, check_backend, open_backend
from seko_runtime.buffers_check import TEXT_BUFFER
from seko_runtime.errors import SessionClosedError, UsageError
from seko_runtime.golden import ChunkError, cache_tensor, relative_error, worst_cache_error
from seko_runtime.host import check_cpu, check_device, check_torch
from seko_runtime.manifest import Buffer, Golden, Manifest, TensorSpec
from seko_runtime.manifest_reader import parse_manifest
from seko_runtime.memory import Engine, Memory, Tensor
from seko_runtime.programs_check import Programs, resolve_programs
from seko_runtime.safetensors_map import MappedTensor, check_tensor, map_safetensors
from seko_runtime.session import Session


def open_artifact(path: str | Path, device: str = "auto") -> OpenArtifact:
    """Check an artifact and load it.

    Parameters
    ----------
    path : str or Path
        Its folder.
    device : str
        ``auto`` (the kind it was built for), ``cpu``, ``cuda`` or ``cuda:N``.

    Returns
    -------
    OpenArtifact
        A context manager.

    Raises
    ------
    ArtifactError
        By its subclass: what is wrong. No native code of the artifact has been loaded then, except for
        EngineLoadError and, where a package contradicts the manifest, EngineSignatureError.
    BackendMissingError, DeviceMissingError
        If this machine lacks what it needs.
    """
    checked = check_artifact(path, device)
    backend = open_backend(checked.manifest.backend, checked.device)
    try:
        memory = backend.memory()
        weights = memory.upload(checked.weights)
        engines = backend.load_engines(checked.manifest, checked.files)
    except BaseException:
        backend.close()
        raise
    return OpenArtifact(checked, backend, engines, weights, memory)


@dataclass(frozen=True)
class CheckedArtifact:
    """An artifact whose manifest, files, hashes and headers are right, with no native code loaded yet."""

    manifest: Manifest
    digest: str
    device: str
    programs: Programs
    files: Mapping[str, memoryview]
    weights: Mapping[str, MappedTensor]
    golden: Mapping[str, MappedTensor]


def read_manifest(path: str | Path) -> tuple[Manifest, str]:
    """Read and check an artifact's manifest alone; return it with its digest (SHA-256, hexadecimal).

    Raises
    ------
    ArtifactError
        By its subclass.
    """
    files = ArtifactFiles(Path(path))
    try:
        document = files.read_manifest()
    finally:
        files.close()
    return parse_manifest(document), hashlib.sha256(document).hexdigest()


def check_artifact(path: str | Path, device: str = "auto", *, fits_here: bool = True) -> CheckedArtifact:
    """Run every check that needs no native code of the artifact, cheapest first; see `open_artifact`.

    Without ``fits_here`` the machine is left out of it: the artifact may be for another one.
    """
    folder = ArtifactFiles(Path(path))
    try:
        document = folder.read_manifest()
        manifest = parse_manifest(document)
        programs = resolve_programs(manifest)
        device = check_device(manifest.target, device)
        if fits_here:
            check_cpu(manifest.target)
        folder.open_all(manifest.files)
        if fits_here:
            check_backend(manifest.backend)  # before torch's version: without torch there is none
            check_torch(manifest.target, device)
        mapped = frozenset(weight.file for weight in manifest.weights)
        files = folder.verified(manifest.files, mapped)
    finally:
        folder.close()
    return CheckedArtifact(
        manifest=manifest,
        digest=hashlib.sha256(document).hexdigest(),
        device=device,
        programs=programs,
        files=files,
        weights=_place_weights(manifest, files),
        golden=_place_golden(manifest, files),
    )


class OpenArtifact:
    """An artifact whose engines are loaded and whose weights are on the device; sessions share both.

    Made by `open_artifact`. Use it as a context manager, or call `close()`.
    """

    def __init__(
        self,
        checked: CheckedArtifact,
        backend: Backend,
        engines: Mapping[str, Engine],
        weights: Mapping[str, Tensor],
        memory: Memory,
    ) -> None:
        self.manifest = checked.manifest
        self.digest = checked.digest
        self.device = checked.device
        self._checked = checked
        self._backend = backend
        self._engines = dict(engines)
        self._weights = dict(weights)
        self._memory = memory  # of the weights
        self._sessions: list[Session] = []
        self._closed = False

    def open_session(self, seeds: Sequence[int] | None = None, text: object = None) -> Session:
        """Open a session, which lives until its own `close()` or the artifact's.

        Parameters
        ----------
        seeds : Sequence[int], optional
            One per row; 0, 1, ... without it.
        text : array or tensor, optional
            [B, tokens, text_dim], the text encoder's output; the golden's without it.

        Raises
        ------
        UsageError
            If seeds or text do not fit, or the artifact has no golden text and none is given.
        SessionClosedError
            If the artifact is closed.
        """
        if self._closed:
            raise SessionClosedError("the artifact is closed; open it again with open_artifact()")
        takes_text = any(buffer.name == TEXT_BUFFER for buffer in self.manifest.buffers)
        if text is None and takes_text:
            text = self.golden_text()
        session = Session(
            self.manifest,
            self._engines,
            self._weights,
            self._backend.memory(),
            seeds=list(range(self.manifest.stream.batch)) if seeds is None else seeds,
            text=text,
            programs=self._checked.programs,
        )
        self._sessions = [one for one in self._sessions if not one.closed] + [session]
        return session

    def golden_text(self) -> NDArray[np.generic]:
        """Text embeddings that the golden was recorded with.

        Raises
        ------
        UsageError
            If the artifact has none.
        """
        golden = self.manifest.golden
        if golden is None or golden.text is None:
            raise UsageError(
                "this artifact holds no text to fall back on; give the text encoder's output as text"
            )
        return self._checked.golden[golden.text].to_numpy()

    def verify(self) -> list[ChunkError]:
        """Replay the golden's chunks and compare.

        Returns
        -------
        list[ChunkError]
            One per recorded chunk; the caller judges by `within`.

        Raises
        ------
        UsageError
            If the artifact has no golden.
        SessionClosedError
            If the artifact is closed.
        """
        golden = self.manifest.golden
        if golden is None:
            raise UsageError("this artifact holds no golden to verify against; rebuild it")
        errors = []
        with self.open_session(seeds=golden.seeds) as session:
            for number in range(golden.chunks[-1] + 1):
                chunk = session.run_chunk()
                if number in golden.chunks:
                    sample = session.cache_sample(golden.cache_step) if golden.cache_step else None
                    errors.append(self.chunk_error(number, chunk.to_host(), sample))
        return errors

    def chunk_error(
        self,
        number: int,
        latents: NDArray[np.float32],
        cache: Mapping[str, NDArray[np.float32]] | None = None,
    ) -> ChunkError:
        """Compare chunk ``number``, made with the golden's seeds and text, with what was recorded.

        Parameters
        ----------
        number : int
            Of the chunk.
        latents : numpy.ndarray
            float32 [B, C, F, h, w], as `Chunk.to_host` gives them.
        cache : mapping of str to numpy.ndarray, optional
            What `Session.cache_sample` gave after that chunk.

        Raises
        ------
        UsageError
            If that chunk was not recorded.
        """
        golden, tensors = self.manifest.golden, self._checked.golden
        if golden is None or number not in golden.chunks:
            raise UsageError(f"chunk {number} is not in this artifact's golden")
        exact = tensors.get(f"exact.{number}")
        return ChunkError(
            chunk=number,
            golden=relative_error(latents, tensors[f"latents.{number}"].to_numpy()),
            exact=None if exact is None else relative_error(latents, exact.to_numpy()),
            tolerance=golden.tolerance,
            cache=None if cache is None else worst_cache_error(cache, tensors, number, self.manifest.buffers),
            cache_tolerance=golden.cache_tolerance,
        )

    @property
    def stats(self) -> Mapping[str, int]:
        """Counters of the backend, such as recompiles."""
        return self._backend.stats()

    def close(self) -> None:
        """Close all sessions, then let go of engines and weights; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for session in self._sessions:
            session.close()
        self._sessions.clear()
        self._engines.clear()
        self._weights.clear()
        self._backend.close()
        self._memory.close()

    def __enter__(self) -> OpenArtifact:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _place_weights(manifest: Manifest, files: Mapping[str, memoryview]) -> dict[str, MappedTensor]:
    headers = {
        path: map_safetensors(files[path], path) for path in {weight.file for weight in manifest.weights}
    }
    return {
        weight.name: check_tensor(headers[weight.file], weight, weight.file) for weight in manifest.weights
    }


def _place_golden(manifest: Manifest, files: Mapping[str, memoryview]) -> dict[str, MappedTensor]:
    """Tensors of the golden file, those that `verify` needs with the shape that it needs."""
    golden: Golden | None = manifest.golden
    if golden is None:
        return {}
    found = map_safetensors(files[golden.file], golden.file)
    shape = next(buffer.shape for buffer in manifest.buffers if buffer.name == manifest.output)
    for chunk in golden.chunks:
        check_tensor(found, TensorSpec(f"latents.{chunk}", shape, "float32"), golden.file)
        if f"exact.{chunk}" in found:
            check_tensor(found, TensorSpec(f"exact.{chunk}", shape, "float32"), golden.file)
        if golden.cache_step:
            for buffer in manifest.buffers:
                if buffer.role == "cache":
                    _check_cache_sample(found, buffer, chunk, golden)
    if golden.text is not None:
        text = next((buffer for buffer in manifest.buffers if buffer.name == TEXT_BUFFER), None)
        dtype = found[golden.text].dtype if golden.text in found else "float32"  # any dtype that converts
        if text is not None:
            check_tensor(found, TensorSpec(golden.text, text.shape, dtype), golden.file)
    return found


def _check_cache_sample(
    found: Mapping[str, MappedTensor], buffer: Buffer, chunk: int, golden: Golden
) -> None:
    axis = int(buffer.layered)
    shape = list(buffer.shape)
    shape[axis] = -(-shape[axis] // golden.cache_step)
    name = cache_tensor(buffer.name, chunk)
    dtype = found[name].dtype if name in found else buffer.dtype  # any dtype that converts
    check_tensor(found, TensorSpec(name, tuple(shape), dtype), golden.file)
