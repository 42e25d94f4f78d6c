"""An open video artifact: opens sessions and pools, and verifies goldens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import whole_number
from seko_runtime.errors import UsageError
from seko_runtime.host.faults import machine_faults
from seko_runtime.sessions.artifact import OpenArtifact, OpenedFiles
from seko_runtime.sessions.call_lock import under_lock
from seko_runtime.sessions.engines import Engines
from seko_runtime.sessions.snapshot import checked_key
from seko_runtime.video.contract import TEXT_BUFFER, made_of
from seko_runtime.video.golden import ChunkError
from seko_runtime.video.inputs import Inputs
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.memory_advice import memory_advice
from seko_runtime.video.options import PROMPT_CACHE, VideoOptions
from seko_runtime.video.pool import Pool
from seko_runtime.video.recording import Recording
from seko_runtime.video.reference_frames import with_portrait
from seko_runtime.video.rows import Beginning, VideoRows
from seko_runtime.video.session import Session


class VideoArtifact(OpenArtifact[VideoManifest]):
    """A video artifact with loaded engines and weights on the device; its sessions share both.

    Made by `open_artifact`. Use it as a context manager, or call `close()`. Any thread may call it: opening and
    closing wait for each other.

    Parameters
    ----------
    files, engines
        As `OpenArtifact` takes them.
    """

    def __init__(self, files: OpenedFiles[VideoManifest], engines: Engines) -> None:
        super().__init__(files, engines)
        self._recording = Recording(files.manifest, files.golden)

    @memory_advice()
    @machine_faults()
    @under_lock
    def open_session(
        self,
        seeds: Sequence[int] | None = None,
        text: object = None,
        *,
        prompt: str | Sequence[str] | None = None,
        steps: int | None = None,
        shift: float | None = None,
        image: object = None,
        conditioning_latents: object = None,
        reference: object = None,
        inputs: Inputs | None = None,
        prompt_cache: int = PROMPT_CACHE,
        overlap: bool = True,
    ) -> Session:
        """Open a session, which lives until its own `close()` or the artifact's.

        Parameters
        ----------
        seeds : Sequence[int], optional
            One for each row; default: 0, 1, ...
        text : array or tensor, optional
            [B, tokens, text_dim], the text encoder's output; default without ``prompt``: the golden's.
        prompt : str or Sequence[str], optional
            One sentence for all rows, or one for each.
        steps : int, optional
            Denoise passes of this session; default: the artifact's.
        shift : float, optional
            Warp of their timesteps; default: the artifact's.
        image : array, optional
            uint8 [H, W, 3] or [B, H, W, 3]: each stream begins with this picture.
        conditioning_latents : array, optional
            Instead of ``image``: float32 [C, n, h, w] or [B, C, n, h, w], n up to F.
        reference : array, optional
            Reference frames, if the artifact has some (see `reference_frames.set_reference`); default: the golden's.
        inputs : mapping of str to array, optional
            The caller's inputs per session or prompt; default: the golden's, but for one that is made of ``image``.
        prompt_cache : int
            Capacity of the prompt cache.
        overlap : bool
            Whether decoding runs at the same time as the chunks, if the device can.

        Raises
        ------
        UsageError
            If an argument does not fit, or there is neither text nor a golden text.
        EnvironmentLacksError, ArtifactError
            If ``prompt`` cannot be tokenised.
        SessionClosedError
            If the artifact is closed.
        """
        options = VideoOptions(steps, shift, prompt_cache, overlap)
        manifest = self.manifest
        takes_text = any(buffer.name == TEXT_BUFFER for buffer in manifest.buffers)
        if text is None and prompt is None and takes_text:
            if manifest.workload.text is not None:
                prompt = self._recording.prompt
            text = self.golden_text() if prompt is None else None
        if reference is None and manifest.workload.stream.reference_frames:
            reference = self._recording.reference()
        if inputs is None:
            inputs = {**self._recording.inputs(None), **with_portrait(manifest, None, reference)}
            inputs.pop(made_of(manifest, image), None)
        seeds = list(range(manifest.call_rows)) if seeds is None else seeds
        beginning = Beginning(seeds, prompt, text, image, conditioning_latents, reference, inputs)
        session = Session(self._open_rows(options), beginning)
        self._keep(session)
        return session

    @memory_advice()
    @machine_faults()
    @under_lock
    def open_pool(
        self,
        *,
        steps: int | None = None,
        shift: float | None = None,
        prompt_cache: int = PROMPT_CACHE,
        overlap: bool = True,
        snapshot_key: bytes | None = None,
    ) -> Pool:
        """Open the pool of an artifact that was built with ``--sessions``. It lives until its `close` or the
        artifact's.

        Parameters
        ----------
        steps, shift, prompt_cache, overlap
            As in `open_session`, for all sessions of the pool.
        snapshot_key : bytes, optional
            A secret of at least 32 bytes: snapshots end in the HMAC-SHA256 of their content, and only those with the
            same key are restored. Without it, only snapshots without a key are restored.

        Raises
        ------
        UsageError
            If the artifact has no pool, or ``steps``, ``shift`` or ``snapshot_key`` do not fit.
        DeviceMemoryError
            If the pool does not fit on the device; nothing was allocated.
        SessionClosedError
            If the artifact is closed.
        """
        self._check_pool()
        key = checked_key(snapshot_key)
        rows = self._open_rows(VideoOptions(steps, shift, prompt_cache, overlap))
        pool = Pool(rows, digest=self.digest, snapshot_key=key)
        self._keep(pool)
        return pool

    def _open_rows(self, options: VideoOptions) -> VideoRows:
        return cast(VideoRows, self.engines.open_rows(vars(options)))

    @machine_faults()
    def golden_text(self) -> NDArray[np.generic]:
        """Text embeddings with which the golden was recorded.

        Raises
        ------
        UsageError
            If the artifact has none.
        """
        return self._recording.text()

    def golden_inputs(self, chunk: int | None) -> dict[str, NDArray[np.generic]]:
        """Return the golden's values of the caller's inputs by name, [B, ...]; empty without such inputs.

        ``chunk`` None: inputs per session or prompt. A number: inputs per chunk or pass; after the last recorded chunk
        they repeat from the first, so that a stream of any length has some.
        """
        return self._recording.inputs(None if chunk is None else whole_number(chunk, "chunk", 0))

    def verify(self) -> list[ChunkError]:
        """Replay the golden's chunks and compare.

        Returns
        -------
        list[ChunkError]
            One for each recorded chunk; the caller checks `within`.

        Raises
        ------
        UsageError
            If the artifact has no golden.
        SessionClosedError
            If the artifact is closed.
        """
        golden = self.manifest.workload.golden
        if golden is None:
            raise UsageError("this artifact holds no golden to verify against; rebuild it")
        errors = []
        with self.open_session(seeds=golden.seeds) as session:
            for number in range(golden.chunks[-1] + 1):
                chunk = session.run_chunk(self.golden_inputs(number))
                if number in golden.chunks:
                    sample = session.cache_sample(golden.cache_step) if golden.cache_step else None
                    video = chunk.video() if golden.video_step else None
                    errors.append(self.chunk_error(number, chunk.to_host(), sample, video))
        return errors

    @machine_faults()
    def chunk_error(
        self,
        number: int,
        latents: NDArray[np.float32],
        cache: Mapping[str, NDArray[np.float32]] | None = None,
        video: NDArray[np.uint8] | None = None,
    ) -> ChunkError:
        """Compare chunk ``number``, made with the golden's seeds and text, with the recorded one.

        Parameters
        ----------
        number : int
            The chunk's number.
        latents : numpy.ndarray
            float32 [B, C, F, h, w], from `Chunk.to_host`.
        cache : mapping of str to numpy.ndarray, optional
            Result of `Session.cache_sample` after that chunk.
        video : numpy.ndarray, optional
            uint8 [B, T, H, W, 3], from `Chunk.video`.

        Raises
        ------
        UsageError
            If that chunk was not recorded.
        """
        return self._recording.chunk_error(number, latents, cache, video)


def video_artifact(artifact: OpenArtifact[Any]) -> VideoArtifact:
    """Return an open artifact as one that makes video; UsageError if its workload is another."""
    if not isinstance(artifact, VideoArtifact):
        raise UsageError(f"the artifact's workload is {artifact.manifest.workload.kind!r}, expected 'video'")
    return artifact
