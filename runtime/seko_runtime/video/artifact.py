"""An open video artifact: opens sessions and pools, and verifies goldens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import mapping_of, whole_number
from seko_runtime.controls import Controls
from seko_runtime.controls.pictures import OF_PICTURE
from seko_runtime.errors import UsageError
from seko_runtime.host.faults import machine_faults
from seko_runtime.sessions.artifact import OpenArtifact, OpenedFiles
from seko_runtime.sessions.call_lock import under_lock
from seko_runtime.sessions.engines import Engines
from seko_runtime.sessions.snapshot import checked_key
from seko_runtime.video.contract import TEXT_BUFFER, without_kinds
from seko_runtime.video.golden import ChunkError
from seko_runtime.video.inputs import Inputs
from seko_runtime.video.lockstep import Lockstep, opened_in_lockstep
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.memory_advice import memory_advice
from seko_runtime.video.options import PROMPT_CACHE, VideoOptions
from seko_runtime.video.pool import Pool, opening_of
from seko_runtime.video.recording import Recording
from seko_runtime.video.reference_frames import with_portrait
from seko_runtime.video.rows import VideoRows
from seko_runtime.video.session import Session


class VideoArtifact(OpenArtifact[VideoManifest]):
    """A video artifact with loaded engines and weights on the device; its sessions share both.

    `open_artifact` returns a `VideoArtifact` for an artifact of the video workload. Use the artifact as a context
    manager, or call `close()`. Any thread may call the artifact's methods: opening and closing wait for each other.

    Parameters
    ----------
    files, engines
        The files and engines of the opened artifact; see `OpenArtifact`.
    """

    def __init__(self, files: OpenedFiles[VideoManifest], engines: Engines) -> None:
        super().__init__(files, engines)
        self._recording = Recording(files.manifest, files.golden)

    @memory_advice()
    @machine_faults()
    @under_lock
    def open_session(
        self,
        seed: int = 0,
        text: object = None,
        *,
        prompt: str | None = None,
        steps: int | None = None,
        shift: float | None = None,
        image: object = None,
        conditioning_latents: object = None,
        reference: object = None,
        inputs: Inputs | None = None,
        controls: Controls | None = None,
        prompt_cache: int = PROMPT_CACHE,
        overlap: bool = True,
    ) -> Session:
        """Open a session with a pool of its own. The session lives until its own `close()` or the artifact's `close()`.

        For several sessions that share the memory and the calls of one pool, use `open_pool`.

        Parameters
        ----------
        seed : int
            Seed of the random noise from which the video is made.
        text : array or tensor, optional
            The text encoder's output, [1, tokens, text_dim]. Default without ``prompt``: the text with which the
            artifact's golden (its recorded chunks) was made.
        prompt : str, optional
            The prompt of the video, a sentence.
        steps : int, optional
            Number of denoise passes for each chunk; default: the number that the artifact was built with.
        shift : float, optional
            Warp of the timesteps (see `warped_timesteps`); default: the warp that the artifact was built with.
        image : array, optional
            Start picture, uint8 [H, W, 3]: the first frame of the stream.
        conditioning_latents : array, optional
            Latents of the first n latent frames, instead of ``image``: float32 [C, n, h, w], with n at most the number
            F of latent frames in a chunk.
        reference : array, optional
            Reference frames, for an artifact built with reference frames (see `reference_frames.set_reference`);
            default: the recorded reference frames of the golden.
        inputs : mapping of str to array, optional
            Model inputs that the caller supplies once for each session or prompt, by name; default: the recorded inputs
            of the golden, but with ``image`` none that describe its picture: what the artifact does not compute from
            ``image`` is then required.
        controls : Controls, optional
            The controls of the session, of `controls_of`, which may have taken events before; default: new ones.
        prompt_cache : int
            Largest number of encoded prompts that the pool keeps for reuse.
        overlap : bool
            Whether decoding runs at the same time as the chunks, if the device can.

        Raises
        ------
        UsageError
            If an argument is invalid, if there is neither a prompt nor a recorded text, or if each call of the artifact
            carries several sessions.
        EnvironmentLacksError, ArtifactError
            If ``prompt`` cannot be tokenised: the library `tokenizers` is missing, or the artifact's tokenizer file is
            invalid.
        SessionClosedError
            If the artifact is closed.
        """
        if self.manifest.pool is None and self.manifest.rows > 1:
            raise UsageError(
                f"this artifact was built with --batch {self.manifest.rows} and without --sessions, so all "
                f"{self.manifest.rows} rows run together in each call: open_pool() and a session on each, or rebuild "
                "with --sessions"
            )
        opening = opening_of(controls, image, reference)
        image, reference = opening.get("image", image), opening.get("reference", reference)
        begun = self.beginning(0, text, prompt, image, reference, inputs)
        if "inputs" in opening:
            own = mapping_of(inputs, "inputs")
            begun["inputs"] = {**mapping_of(begun["inputs"], "inputs"), **opening["inputs"], **own}
        pool = self._open_pool(VideoOptions(steps, shift, prompt_cache, overlap), None)

        def open_session() -> Session:
            session = pool.open_session(
                seed=seed, image=image, conditioning_latents=conditioning_latents, **begun
            )
            if controls is not None:
                session.controls = controls
            return session

        return self._alone(pool, open_session)

    def beginning(
        self,
        row: int,
        text: object = None,
        prompt: str | None = None,
        image: object = None,
        reference: object = None,
        inputs: Inputs | None = None,
    ) -> dict[str, Any]:
        """Return text, prompt, reference frames and inputs of a new session as `Pool.open_session` takes them. Recorded
        values of the golden replace missing arguments.

        Parameters
        ----------
        row : int
            Number of the recorded stream in the golden from which missing arguments are taken.
        text, prompt, image, reference, inputs
            The arguments of `open_session` with these names.

        Raises
        ------
        UsageError
            If neither a text is passed nor one was recorded.
        """
        manifest, recording, row = self.manifest, self._recording, self._recorded_row(row)
        takes_text = any(buffer.name == TEXT_BUFFER for buffer in manifest.buffers)
        if text is None and prompt is None and takes_text:
            if manifest.workload.text is not None:
                prompt = recording.prompt
            text = recording.text(row) if prompt is None else None
        if reference is None and manifest.workload.stream.reference_frames:
            reference = recording.reference(row)
        if inputs is None:
            inputs = {**recording.inputs(None, row), **with_portrait(manifest, None, reference)}
            if image is not None:  # the golden's inputs say what another picture shows
                inputs = without_kinds(manifest, inputs, OF_PICTURE)
        return {"text": text, "prompt": prompt, "reference": reference, "inputs": inputs}

    @contextmanager
    def open_together(
        self, *, prompt: str | None = None, image: NDArray[np.uint8] | None = None
    ) -> Iterator[Lockstep]:
        """Context manager that opens a new pool with as many sessions as the artifact's largest engine call carries.

        Parameters
        ----------
        prompt, image
            Prompt and start picture of all sessions. Session number n, from 0, gets every other argument from the
            golden's recorded stream number n. For an artifact without a golden, the seed of session number n is n.
        """
        golden = self.manifest.workload.golden
        seeds = range(self.manifest.call_rows) if golden is None else golden.seeds
        beginnings = (
            {"seed": seed, "image": image, **self.beginning(row, prompt=prompt, image=image)}
            for row, seed in enumerate(seeds)
        )
        with self.open_pool() as pool, opened_in_lockstep(pool, beginnings) as sessions:
            yield sessions

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
        """Open a pool: the memory and programs of several sessions that share engine calls. The pool lives until its
        own `close` or the artifact's `close`.

        If the artifact was built with ``--sessions``, an engine call makes the next chunk of some of the pool's
        sessions; otherwise each call makes a chunk for every session.

        Parameters
        ----------
        steps, shift, prompt_cache, overlap
            The arguments of `open_session` with these names, for all sessions of the pool.
        snapshot_key : bytes, optional
            A secret of at least 32 bytes. Snapshots then end in the HMAC-SHA256 of their content, and only snapshots
            with the same key are restored. Without a key, only snapshots without one are restored.

        Raises
        ------
        UsageError
            If ``steps`` or ``shift`` is impossible for this artifact, or ``snapshot_key`` is shorter than 32 bytes.
        DeviceMemoryError
            If the pool does not fit on the device; nothing was allocated.
        SessionClosedError
            If the artifact is closed.
        """
        key = checked_key(snapshot_key)
        pool = self._open_pool(VideoOptions(steps, shift, prompt_cache, overlap), key)
        self._keep(pool)
        return pool

    def _open_pool(self, options: VideoOptions, key: bytes | None) -> Pool:
        rows = cast(VideoRows, self.engines.open_rows(vars(options)))
        return Pool(rows, digest=self.digest, snapshot_key=key)

    @machine_faults()
    def golden_text(self, row: int = 0) -> NDArray[np.generic]:
        """Text embeddings [1, tokens, text_dim] with which a stream of the golden was recorded.

        Raises
        ------
        UsageError
            If the golden has no text embeddings.
        """
        return self._recording.text(self._recorded_row(row))

    def golden_inputs(self, chunk: int | None, row: int | None = 0) -> dict[str, NDArray[np.generic]]:
        """Return the recorded values of the inputs that the caller supplies, by name; empty for a model without inputs
        from the caller.

        With ``chunk`` None the result has the inputs that are set once for a session or prompt, otherwise the inputs of
        the numbered chunk. Chunks after the last recorded chunk take the recorded inputs again, from the first chunk
        on. With ``row`` None each input is an array [B, *shape], with one entry for each recorded stream.
        """
        number = None if chunk is None else whole_number(chunk, "chunk", 0)
        return self._recording.inputs(number, None if row is None else self._recorded_row(row))

    def _recorded_row(self, row: int) -> int:
        return whole_number(row, "row", 0, self.manifest.call_rows - 1)

    def verify(self) -> list[ChunkError]:
        """Replay the chunks that were recorded at build (the golden) and measure how far the new results differ.

        Returns
        -------
        list[ChunkError]
            The numeric error of each recorded chunk. The caller checks `ChunkError.within`.

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
        with self.open_together() as sessions:
            for number in range(golden.chunks[-1] + 1):
                chunk = sessions.run_chunk(self.golden_inputs(number, None))
                if number in golden.chunks:
                    sample = sessions.cache_sample(golden.cache_step) if golden.cache_step else None
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
        """Return the difference between a newly made chunk and the recorded chunk of the same number; both must have
        the same seeds and text.

        Parameters
        ----------
        number : int
            Number of the chunk in its stream, from 0.
        latents : numpy.ndarray
            Latents of the chunk, float32 [B, C, F, h, w]: `Chunk.to_host` of the sessions of `open_together`, stacked.
        cache : mapping of str to numpy.ndarray, optional
            Sampled tokens of the KV cache: the result of `Pool.cache_sample` after the chunk was made.
        video : numpy.ndarray, optional
            Video frames of the chunk, uint8 [B, T, H, W, 3]: `Chunk.video` of the sessions, stacked.

        Raises
        ------
        UsageError
            If no chunk of this number was recorded.
        """
        return self._recording.chunk_error(number, latents, cache, video)


def video_artifact(artifact: OpenArtifact[Any]) -> VideoArtifact:
    """Return an open artifact typed as a `VideoArtifact`; UsageError if its workload is not video."""
    if not isinstance(artifact, VideoArtifact):
        raise UsageError(f"the artifact's workload is {artifact.manifest.workload.kind!r}, expected 'video'")
    return artifact
