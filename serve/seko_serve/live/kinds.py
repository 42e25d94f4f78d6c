"""The workloads that can be served: the content class of each workload, and the description of a model for clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seko_runtime.errors import ArtifactError
from seko_runtime.format.tokenizer_file import tokenizers_library
from seko_runtime.speech.manifest import SpeechManifest
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.text import ftfy_library
from seko_serve.live.content import Content, Opening, SpeechOpening
from seko_serve.live.speech import SpeechContent, described_speech
from seko_serve.live.video import VideoContent, described

Served = VideoManifest | SpeechManifest


def check_served(manifest: object) -> None:
    """Check that an artifact can be served by what is installed here.

    A library that only some texts need is asked for at once: a server that starts without it would refuse these texts
    for as long as it runs.

    Raises
    ------
    ArtifactError
        If no machine can serve the artifact; the message states the reason.
    LibraryMissingError
        If a library that the artifact's texts need is not installed.
    """
    if isinstance(manifest, SpeechManifest):
        if manifest.workload.tokenizer is not None:
            tokenizers_library()
        return
    if not isinstance(manifest, VideoManifest):
        raise ArtifactError("this artifact makes neither video nor speech, and nothing else is served")
    if manifest.workload.video is None:
        raise ArtifactError("this artifact has no VAE and makes no video; rebuild it with --vae")
    if manifest.pool is None and manifest.rows > 1:
        raise ArtifactError(
            f"each engine call of this artifact makes chunks for all {manifest.rows} rows together, so a single "
            f"viewer would get none; rebuild it with --sessions {manifest.rows}"
        )
    if manifest.workload.text is not None:
        tokenizers_library()
        ftfy_library()


def content_of(manifest: Served, opening: Opening | SpeechOpening) -> Content:
    """Return a new session's content for an artifact; TypeError if the opening is for another workload."""
    if isinstance(manifest, SpeechManifest) and isinstance(opening, SpeechOpening):
        return SpeechContent(manifest, opening)
    if isinstance(manifest, VideoManifest) and isinstance(opening, Opening):
        return VideoContent(manifest, opening)
    raise TypeError(f"a {type(opening).__name__} for a {type(manifest).__name__}")


def usual_period_s(manifest: Served) -> float:
    """Return the seconds in which a viewer plays one chunk, if the viewer chooses no frame rate of its own."""
    if isinstance(manifest, SpeechManifest):
        return manifest.workload.patch.seconds
    table = manifest.workload.video
    assert table is not None  # else the server does not start
    return table.chunk_frames / manifest.workload.stream.fps


def content_of_state(manifest: Served, state: Mapping[str, Any]) -> Content:
    """Return a content object for a session that continues from ``state``, a value that `Content.state` returned; the
    caller then passes ``state`` to `Content.load`. KeyError, TypeError or ValueError if ``state`` is not such a value.
    """
    if isinstance(manifest, SpeechManifest):
        return SpeechContent(manifest, SpeechOpening())  # its voice and seed are part of the state
    return VideoContent(manifest, Opening.of_state(state["opening"]))


def facts_of(manifest: Served) -> dict[str, object]:
    """Return the facts about a model that a web page needs before the page opens a session."""
    return described_speech(manifest) if isinstance(manifest, SpeechManifest) else described(manifest)
