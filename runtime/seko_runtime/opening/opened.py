"""An open artifact: opens sessions and pools, and verifies goldens. `artifact` makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import whole_number
from seko_runtime.backends.base import Backend
from seko_runtime.backends.memory import Engine, Memory, Tensor
from seko_runtime.errors import ArtifactError, DeviceMemoryError, UsageError
from seko_runtime.executor.resolved import Programs
from seko_runtime.host.faults import machine_faults
from seko_runtime.opening.checked_artifact import CheckedArtifact
from seko_runtime.opening.golden import ChunkError
from seko_runtime.opening.recording import Recording
from seko_runtime.video.call_lock import CallLock, under_lock
from seko_runtime.video.contract import TEXT_BUFFER, made_of, resolve_video, text_vocabulary
from seko_runtime.video.inputs import Inputs
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.memory_advice import memory_advice
from seko_runtime.video.pool import Pool
from seko_runtime.video.prompts import PROMPT_CACHE
from seko_runtime.video.rank_place import ALONE, RankPlace
from seko_runtime.video.reference_frames import with_portrait
from seko_runtime.video.schedule import rescheduled
from seko_runtime.video.session import Session
from seko_runtime.video.snapshot import checked_key
from seko_runtime.video.streams import Streams
from seko_runtime.video.text import PromptIds


class Opening(NamedTuple):
    """What `OpenArtifact.open_session` was asked for, by its parameters' names."""

    seeds: Sequence[int] | None
    text: object
    prompt: str | Sequence[str] | None
    steps: int | None
    shift: float | None
    image: object
    conditioning_latents: object
    reference: object
    inputs: Inputs | None
    prompt_cache: int
    overlap: bool


class OpenArtifact:
    """An artifact with loaded engines and weights on the device; its sessions share both.

    Made by `open_artifact`. Use it as a context manager, or call `close()`. Any thread may call it: opening and
    closing wait for each other.
    """

    def __init__(
        self,
        checked: CheckedArtifact,
        backend: Backend,
        engines: Mapping[str, Engine],
        weights: Mapping[str, Tensor],
        memory: Memory,
        rank: RankPlace = ALONE,
    ) -> None:
        self.manifest = checked.manifest
        self.digest = checked.digest
        self.device = checked.device
        # Not all of `checked`: on a GPU nothing needs the weights' bytes of the host any more, and their maps go.
        self._programs = checked.programs
        self._recording = Recording(checked.manifest, checked.golden)
        self._backend = backend
        self._engines = dict(engines)
        self._weights = dict(weights)
        self._memory = memory  # of the weights
        self._rank = rank
        self._sessions: list[Session] = []
        self._pools: list[Pool] = []
        self._captures = True
        self._closed = False
        self._call_lock = CallLock("the artifact is closed; open it again with open_artifact()", waits=True)
        spec = self.manifest.workload.text
        if spec is None:
            self._prompt_ids = None
        else:
            document = checked.files[spec.tokenizer]
            self._prompt_ids = PromptIds(spec, document, text_vocabulary(self.manifest))

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
        reference : array, optional
            Reference frames, if the artifact has some (see `reference_frames.set_reference`); default: the golden's.
        inputs : mapping of str to array, optional
            The caller's inputs per session or prompt; default: the golden's, but for one that is made of ``image``.
        image, conditioning_latents, prompt_cache, overlap
            As in `Session`.

        Raises
        ------
        UsageError
            If an argument does not fit, or there is neither text nor a golden text.
        TokenizerMissingError, TokenizerError
            If ``prompt`` cannot be tokenised.
        SessionClosedError
            If the artifact is closed.
        """
        return self._opened(
            Opening(
                *(
                    seeds,
                    text,
                    prompt,
                    steps,
                    shift,
                    image,
                    conditioning_latents,
                    reference,
                    inputs,
                    prompt_cache,
                    overlap,
                )
            )
        )

    def _opened(self, asked: Opening) -> Session:
        """Return the session that was asked for."""
        text, prompt, image, reference = asked.text, asked.prompt, asked.image, asked.reference
        inputs = asked.inputs
        takes_text = any(buffer.name == TEXT_BUFFER for buffer in self.manifest.buffers)
        if text is None and prompt is None and takes_text:
            if self._prompt_ids is not None:
                prompt = self._recording.prompt
            text = self.golden_text() if prompt is None else None
        if reference is None and self.manifest.workload.stream.reference_frames:
            reference = self._recording.reference()
        if inputs is None:
            inputs = {**self._recording.inputs(None), **with_portrait(self.manifest, None, reference)}
            inputs.pop(made_of(self.manifest, image), None)
        memory, manifest, programs, weights = self._scheduled(asked.steps, asked.shift)
        session = Session(
            manifest,
            self._engines,
            weights,
            memory,
            seeds=list(range(manifest.call_rows)) if asked.seeds is None else asked.seeds,
            text=text,
            prompt=prompt,
            image=image,
            conditioning_latents=asked.conditioning_latents,
            reference=reference,
            inputs=inputs,
            programs=programs,
            prompt_ids=self._prompt_ids,
            digest=self.digest,
            prompt_cache=asked.prompt_cache,
            overlap=asked.overlap,
            rank=self._rank,
        )
        self._sessions = [one for one in self._sessions if not one.closed] + [session]
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
        if self.manifest.pool is None:
            raise UsageError("this artifact was built without a pool; rebuild it with --sessions N")
        key = checked_key(snapshot_key)
        streams = self._pool_streams(steps, shift, prompt_cache, overlap)
        pool = Pool(streams, digest=self.digest, snapshot_key=key)
        self._pools = [one for one in self._pools if not one._streams.closed] + [pool]
        return pool

    def _pool_streams(
        self, steps: int | None, shift: float | None, prompt_cache: int, overlap: bool
    ) -> Streams:
        """Return the streams of a pool, prepared; parameters as `open_pool`."""
        memory, manifest, programs, weights = self._scheduled(steps, shift)
        try:
            _admit(manifest, memory)
        except BaseException:
            memory.close()
            raise
        streams = Streams(
            manifest,
            self._engines,
            weights,
            memory,
            programs=programs,
            prompt_ids=self._prompt_ids,
            digest=self.digest,
            prompt_cache=prompt_cache,
            overlap=overlap,
            rank=self._rank,
        )
        try:
            streams.prepare()
        except BaseException:
            streams.close()
            raise
        return streams

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

    def _scheduled(
        self, steps: int | None, shift: float | None
    ) -> tuple[Memory, VideoManifest, Programs, Mapping[str, Tensor]]:
        """Return a new memory, and manifest, programs and weights for the caller's passes or the artifact's."""
        manifest, programs, weights = self.manifest, self._programs, self._weights
        memory = self._backend.memory()
        memory.captures = memory.captures and self._captures
        if steps is not None or shift is not None:
            try:
                manifest, tables = rescheduled(manifest, steps, shift)
                programs = _resolved_anew(manifest)
                weights = weights | _uploaded(manifest, tables, memory)
            except BaseException:
                memory.close()
                raise
        return memory, manifest, programs, weights

    def wrap_engines(self, wrap: Callable[[str, Engine], Engine]) -> None:
        """Wrap each engine, for all sessions that are opened from now on; used by profilers.

        Parameters
        ----------
        wrap : callable
            Takes an engine's name and the engine; returns a replacement.
        """
        self._engines = {name: wrap(name, engine) for name, engine in self._engines.items()}

    @contextmanager
    def without_capture(self) -> Iterator[None]:
        """Context in which sessions are opened without captured graphs, so that they run call by call; used by
        profilers.
        """
        self._captures = False
        try:
            yield
        finally:
            self._captures = True

    @property
    def stats(self) -> Mapping[str, int]:
        """Counters of the backend, such as recompiles."""
        return self._backend.stats()

    @machine_faults()
    def close(self) -> None:
        """Close all sessions, then release engines and weights; a second call does nothing.

        It waits for running calls. In a forked process it does nothing.
        """
        if self._call_lock.forked:
            return
        with self._call_lock.last():
            if self._closed:
                return
            self._closed = True
            try:
                for session in self._sessions:
                    session.close()
                for pool in self._pools:
                    pool.close()
            finally:
                self._sessions.clear()
                self._pools.clear()
                self._release()

    def _release(self) -> None:
        """Release engines and weights."""
        self._engines.clear()
        self._weights.clear()
        self._backend.close()
        self._memory.close()

    def __enter__(self) -> OpenArtifact:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _admit(manifest: VideoManifest, memory: Memory) -> None:
    """Refuse a pool whose buffers alone do not fit on the device; engines need more while they run."""
    needed = sum(buffer.nbytes for buffer in manifest.buffers)
    free = memory.free_bytes()
    if needed > free:
        own = needed // manifest.state_rows
        raise DeviceMemoryError(
            f"a pool of {manifest.rows} sessions takes {needed} bytes, about {own} each; {free} are free: close what "
            f"else runs there, or rebuild with --sessions {max(0, free // own - 1)} or fewer"
        )


def _resolved_anew(manifest: VideoManifest) -> Programs:
    """Return the programs of a manifest with other passes; UsageError if anything else depends on their number."""
    try:
        return resolve_video(manifest)
    except ArtifactError as error:
        passes = manifest.workload.schedule.denoise_passes
        raise UsageError(f"this artifact cannot run {passes} denoise passes: {error}") from None


def _uploaded(
    manifest: VideoManifest, tables: Mapping[str, NDArray[np.generic]], memory: Memory
) -> dict[str, Tensor]:
    """Upload the tables that replace weights."""
    with memory.ordered():
        tensors = {
            weight.name: memory.allocate(weight) for weight in manifest.weights if weight.name in tables
        }
        for name, tensor in tensors.items():
            memory.write(tensor, tables[name])
    return tensors
