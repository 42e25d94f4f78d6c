"""Sessions and rows over plain callables, without an artifact's files. No tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from seko_runtime.backends.memory import Memory
from seko_runtime.executor.resolved import Programs
from seko_runtime.sessions.loaded import Loaded, TokenIds
from seko_runtime.sessions.rank_place import ALONE, RankPlace
from seko_runtime.video.contract import resolve_video
from seko_runtime.video.local_rows import LocalVideoRows, open_video_rows
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.options import VideoOptions
from seko_runtime.video.rows import Beginning
from seko_runtime.video.session import Session

Engines = Mapping[str, Callable[[list[Any]], Sequence[Any]]]


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
) -> Session:
    """A session of all rows; ``opening`` is as `open_rows` takes it."""
    beginning = Beginning(seeds, prompt, text, image, conditioning_latents, reference, inputs)
    return Session(open_rows(manifest, engines, weights, memory, **opening), beginning)
