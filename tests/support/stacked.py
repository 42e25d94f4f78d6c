"""Sessions that advance together behind one object, with arrays of all rows; rows over plain callables. No tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from seko_export.video import recording
from seko_runtime.backends.memory import Memory
from seko_runtime.executor.resolved import Programs
from seko_runtime.sessions.loaded import Loaded, TokenIds
from seko_runtime.sessions.rank_place import ALONE, RankPlace
from seko_runtime.video.artifact import VideoArtifact
from seko_runtime.video.chunk import Chunk, SessionStats
from seko_runtime.video.contract import resolve_video
from seko_runtime.video.local_rows import LocalVideoRows
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.opened_rows import open_video_rows
from seko_runtime.video.options import VideoOptions
from seko_runtime.video.pool import Pool
from seko_runtime.video.rows import VideoRows
from seko_runtime.video.session import Session
from seko_runtime.video.video_stream import QueuedChunks, VideoStream
from tests.support.rows import rows_of

Engines = Mapping[str, Callable[[list[Any]], Sequence[Any]]]


class StackedChunk:
    """The chunks of one call, one a row."""

    def __init__(self, rows: Sequence[Chunk]) -> None:
        self.rows = rows
        self.index, self.serial, self.maker = rows[0].index, rows[0].serial, rows[0].maker
        self.frames = np.concatenate([chunk.frames for chunk in rows])
        self.latents = rows[0].latents if len(rows) == 1 else None

    def to_host(self) -> np.ndarray:
        return np.concatenate([chunk.to_host() for chunk in self.rows])

    def video(self) -> np.ndarray:
        return np.concatenate([chunk.video() for chunk in self.rows])

    def video_parts(self) -> list[np.ndarray]:
        parts = zip(*(chunk.video_parts() for chunk in self.rows), strict=True)
        return [np.concatenate(rows) for rows in parts]

    def video_rows(self) -> list[np.ndarray]:
        return [chunk.video()[0] for chunk in self.rows]

    @property
    def heard_at(self) -> float | None:
        return self.rows[0].heard_at

    def late_s(self) -> float | None:
        return self.rows[0].late_s()


class Stacked:
    """Sessions of a pool, one for each row of its largest call, that advance together."""

    def __init__(self, pool: Pool, sessions: Sequence[Session]) -> None:
        self.pool, self.sessions = pool, sessions
        self._ahead: Any = QueuedChunks()

    @property
    def _rows(self) -> Any:
        return rows_of(self.pool)

    @property
    def manifest(self) -> VideoManifest:
        return self.pool.manifest

    @property
    def stats(self) -> SessionStats:
        return self.pool.stats

    @property
    def overlaps_decoding(self) -> bool:
        return self._rows.overlaps_decoding

    @property
    def closed(self) -> bool:
        return self.pool.closed

    def run_chunk(self, inputs: Mapping[str, Any] | None = None) -> StackedChunk:
        """Make the next chunk of every row; inputs are [*shape] for all, or [B, *shape]."""
        each = None if inputs is None else [_of_row(self.manifest, inputs, row) for row in self._all]
        return StackedChunk(self.pool.run(self.sessions, each))

    def take(self, control: str, event: Mapping[str, Any]) -> None:
        """Give an event to a control of every row."""
        for session in self.sessions:
            session.controls[control].take(event)

    def stream(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        chunks: int | None = None,
        recache: bool = False,
        inputs: Iterable[Mapping[str, Any]] | None = None,
    ) -> Iterator[np.ndarray]:
        """Yield the frames of all rows, uint8 [B, T, H, W, 3]."""
        if len(self.sessions) == 1 and not self._ahead:
            return self.sessions[0].stream(prompt, chunks=chunks, recache=recache, inputs=inputs)
        ahead = int(self._rows.overlaps_decoding)
        if prompt is not None:
            self.set_prompt(prompt, recache=recache)
        return VideoStream(self.run_chunk, self._ahead, ahead, chunks, inputs)  # type: ignore[arg-type]

    def set_prompt(self, prompt: Any, *, recache: bool = False) -> None:
        """Set one prompt for all rows, or one each."""
        for row, session in enumerate(self.sessions):
            session.set_prompt(prompt if isinstance(prompt, str) else prompt[row], recache=recache)

    def set_text(self, text: Any, *, recache: bool = False) -> None:
        """Set the rows' embeddings [B, tokens, dim]."""
        for row, session in enumerate(self.sessions):
            session.set_text(_text_of(text, row), recache=recache)

    def set_inputs(self, inputs: Any) -> None:
        """Set the rows' inputs per session or prompt, [*shape] for all or [B, *shape]."""
        for row, session in enumerate(self.sessions):
            session.set_inputs(_of_row(self.manifest, inputs, row))

    def rewind(self, chunk: int, *, row: int | None = None) -> None:
        for session in self._of(row):
            session.rewind(chunk)

    def push_audio(
        self, samples: Any, *, row: int | None = None, at: int | None = None, last: bool = False
    ) -> None:
        for session in self._of(row):
            push(session, samples, at=at, last=last)

    def restart_row(self, row: int, **more: Any) -> None:
        self.sessions[row].restart(**more)

    def cache_sample(self, step: int) -> dict[str, np.ndarray]:
        return self.pool.cache_sample(step)

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        self.pool.close()

    def __enter__(self) -> Stacked:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _all(self) -> range:
        return range(len(self.sessions))

    def _of(self, row: int | None) -> Sequence[Session]:
        return self.sessions if row is None else [self.sessions[row]]


def push(session: Session, samples: Any, *, at: int | None = None, last: bool = False) -> None:
    """Give samples to a session's voice."""
    session.controls["voice"].take({"samples": samples, "last": last} | ({} if at is None else {"at": at}))


def needed(session: Session) -> tuple[int, int]:
    """The samples that a session's next chunk hears."""
    voice: Any = session.controls["voice"]
    return voice.needed


def _of_row(manifest: VideoManifest, inputs: Any, row: int) -> Any:
    """One row's part of inputs; what is no mapping, no input or of another shape stays as it is, to be refused."""
    if not isinstance(inputs, Mapping):
        return inputs
    shapes = {spec.name: (manifest.call_rows, *spec.shape) for spec in manifest.caller_inputs}
    return {
        name: value[row] if np.shape(value) == shapes.get(name) else value for name, value in inputs.items()
    }


def _text_of(text: Any, row: int) -> Any:
    return text[row : row + 1] if len(getattr(text, "shape", ())) == 3 and text.shape[0] > 1 else text


def _part(value: Any, row: int, axes: int) -> Any:
    """One row's part of what has so many axes in a batch."""
    return value[row] if np.ndim(value) == axes else value


def _prompt_of(prompt: Any, row: int) -> Any:
    return prompt if prompt is None or isinstance(prompt, str) else prompt[row]


def stacked(rows: VideoRows, seeds: Sequence[int] | None = None, **begun: Any) -> Stacked:
    """Open a session on each row of a call; ``begun`` is as `Beginning` has it, of all rows."""
    pool = Pool(rows)
    each = {"image": 4, "conditioning_latents": 5, "reference": 5}
    sessions = []
    try:
        for row, seed in enumerate(range(rows.manifest.call_rows) if seeds is None else seeds):
            own = {name: _part(begun.get(name), row, axes) for name, axes in each.items()}
            session = pool.open_session(
                seed=seed,
                tenant="stacked",
                text=_text_of(begun.get("text"), row),
                prompt=_prompt_of(begun.get("prompt"), row),
                inputs=_of_row(rows.manifest, begun.get("inputs"), row),
                **own,
            )
            sessions.append(session)
    except BaseException:
        for session in sessions:
            session.close()
        pool.close()
        raise
    return Stacked(pool, sessions)


def open_rows(
    manifest: VideoManifest,
    engines: Engines,
    weights: Mapping[str, Any],
    memory: Memory,
    *,
    programs: Programs | None = None,
    prompt_ids: TokenIds | None = None,
    digest: str = "",
    rank: RankPlace = ALONE,
    **options: Any,
) -> LocalVideoRows:
    """The rows of a video artifact; ``options`` are those of `VideoOptions`."""
    try:
        programs = resolve_video(manifest) if programs is None else programs
        loaded = Loaded(manifest, programs, engines, weights, lambda: memory, prompt_ids, digest, rank)
        return open_video_rows(loaded, VideoOptions(**options))
    except BaseException:
        memory.close()
        raise


def stacked_session(
    manifest: VideoManifest,
    engines: Engines,
    weights: Mapping[str, Any],
    memory: Memory,
    *,
    seeds: Sequence[int],
    text: object = None,
    prompt: str | Sequence[str] | None = None,
    image: object = None,
    conditioning_latents: object = None,
    reference: object = None,
    inputs: Mapping[str, object] | None = None,
    **opening: Any,
) -> Stacked:
    """Sessions of all rows; ``opening`` is as `open_rows` takes it."""
    rows = open_rows(manifest, engines, weights, memory, **opening)
    return stacked(
        rows,
        seeds,
        text=text,
        prompt=prompt,
        image=image,
        conditioning_latents=conditioning_latents,
        reference=reference,
        inputs=inputs,
    )


def open_stacked(
    artifact: VideoArtifact, seeds: Sequence[int] | None = None, text: Any = None, **more: Any
) -> Stacked:
    """Sessions of all rows of an artifact, each with its row of the golden for what is not given."""
    names = ("steps", "shift", "prompt_cache", "overlap")
    pool = artifact.open_pool(**{name: more.pop(name) for name in names if name in more})
    sessions = []
    try:
        for row, seed in enumerate(range(artifact.manifest.call_rows) if seeds is None else seeds):
            image = _part(more.get("image"), row, 4)
            inputs = more.get("inputs")
            begun = artifact.beginning(
                row,
                _text_of(text, row),
                _prompt_of(more.get("prompt"), row),
                image,
                _part(more.get("reference"), row, 5),
                None if inputs is None else _of_row(artifact.manifest, inputs, row),
            )
            latents = _part(more.get("conditioning_latents"), row, 5)
            sessions.append(
                pool.open_session(
                    seed=seed, tenant="stacked", image=image, conditioning_latents=latents, **begun
                )
            )
    except BaseException:
        for session in sessions:
            session.close()
        pool.close()
        raise
    return Stacked(pool, sessions)


@contextmanager
def eager_session(*arguments: Any, reference: Any = None, **named: Any) -> Iterator[Stacked]:
    """`recording.eager_session`, with what only tests ask of it; a reference may be [C, R, h, w], of one row."""
    if reference is not None and reference.ndim == 4:
        reference = reference[None]
    with recording.eager_session(*arguments, reference=reference, **named) as together:
        yield Stacked(together.pool, together.sessions)
