"""The workload video, as the server uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from seko_runtime import Pool, VideoManifest
from seko_runtime.controls.pictures import MAX_LAST_S
from seko_runtime.controls.registry import control_class, unsteered
from seko_runtime.errors import ArtifactError
from seko_runtime.format.tokenizer_file import tokenizers_library
from seko_runtime.video.chunk_programs import variant_starts
from seko_runtime.video.text import ftfy_library
from seko_serve import protocol
from seko_serve.http.access import Access
from seko_serve.http.workload import ApiParts, Page, ServedWorkload, WorkloadRoutes
from seko_serve.live.manager import SessionManager
from seko_serve.media import uploads
from seko_serve.settings import Settings
from seko_serve.video import opening as openings
from seko_serve.video.api import api
from seko_serve.video.calibration import measure
from seko_serve.video.content import VideoContent
from seko_serve.video.facts import described
from seko_serve.video.jobs import VideoJobs
from seko_serve.video.opening import Opening, opening_of
from seko_serve.video.pictures import PictureRoutes
from seko_serve.video.realtime import PATH as REALTIME
from seko_serve.video.realtime import RealtimeRoutes
from seko_serve.video.realtime_messages import error_message
from seko_serve.video.routes import VideoRoutes


class VideoWorkload(ServedWorkload[VideoManifest]):
    """Live video, video jobs, and the pictures that an artifact brings."""

    kind = "video"
    page = Page("Seko live", Path(__file__).parent / "page")
    socket_paths = MappingProxyType({REALTIME: lambda error: error_message(error.message)})

    def check(self, manifest: VideoManifest) -> None:
        """Check that the artifact makes video for single viewers, and that its controls and the libraries for its
        prompts are there."""
        if manifest.workload.video is None:
            raise ArtifactError("this artifact has no VAE and makes no video; rebuild it with --vae")
        if manifest.pool is None and manifest.rows > 1:
            raise ArtifactError(
                f"each engine call of this artifact makes chunks for all {manifest.rows} rows together, so a single "
                f"viewer would get none; rebuild it with --sessions {manifest.rows}"
            )
        for name, kind in unsteered(manifest).items():
            (spec,) = (spec for spec in manifest.caller_inputs if spec.name == name)
            if spec.default == "required":
                control_class(kind)  # says what to install
        if manifest.workload.text is not None:
            tokenizers_library()
            ftfy_library()

    def content_of(self, manifest: VideoManifest, opening: object) -> VideoContent:
        """Return a new session's content."""
        if not isinstance(opening, Opening):
            raise TypeError(f"a {type(opening).__name__} for a video artifact")
        return VideoContent(manifest, opening)

    def content_of_state(self, manifest: VideoManifest, state: Mapping[str, Any]) -> VideoContent:
        """Return a content object for a session that continues."""
        return VideoContent(manifest, Opening.of_state(state["opening"]))

    def usual_period_s(self, manifest: VideoManifest) -> float:
        """Return the seconds of a chunk at the model's own frame rate."""
        table = manifest.workload.video
        assert table is not None  # else the server does not start
        return table.chunk_frames / manifest.workload.stream.fps

    def measure(self, pool: Pool, sessions: list[Any]) -> None:
        """Measure the calls with full caches."""
        measure(pool, sessions)

    def variant_starts(self, manifest: VideoManifest) -> tuple[int, ...]:
        """Return the numbers of the chunks with which a stream begins another launch variant."""
        return variant_starts(manifest)

    def opening_of(self, table: dict[str, Any], manifest: VideoManifest) -> Opening:
        """Return the opening of a request."""
        return opening_of(table, manifest)

    def facts_of(self, manifest: VideoManifest) -> dict[str, object]:
        """Return the facts about a video model."""
        return described(manifest)

    def limits_of(self, manifest: VideoManifest) -> Mapping[str, int | float]:
        """Return the limits of a video session's client."""
        facts: Any = described(manifest)
        takes = facts["takes"]
        limits: dict[str, int | float] = {"fps": openings.MAX_FPS}
        if takes["prompt"]:
            limits["prompt_letters"] = protocol.MAX_PROMPT_LETTERS
        if takes["image"] != "no":
            limits |= {"image_bytes": uploads.MAX_PICTURE_BYTES, "image_pixels": uploads.MAX_PICTURE_PIXELS}
        if takes["last_image"]:
            limits["last_s"] = MAX_LAST_S
        for control in facts["controls"].values():
            limits |= control.get("limits", {})
        if takes["voice"]:
            limits |= {"voice_bytes": uploads.MAX_SOUND_BYTES, "voice_s": uploads.MAX_SOUND_S}
            limits["audio_bytes"] = protocol.MAX_AUDIO_BYTES
        if takes["video"]:
            limits["frame_bytes"] = protocol.MAX_FRAME_BYTES
        return limits

    def api(self) -> ApiParts:
        """Return the descriptions of the workload's routes."""
        return api()

    def routes(self, settings: Settings, manager: SessionManager, access: Access) -> Sequence[WorkloadRoutes]:
        """Return the routes below ``/v1/videos`` and ``/v1/realtime_video``, and of an artifact's pictures."""
        tenants = len(set(settings.keys))
        jobs = VideoJobs(manager.device, settings.videos, settings.video_folder, tenants=tenants)
        return (
            PictureRoutes(manager, access),
            VideoRoutes(manager, jobs, access),
            RealtimeRoutes(manager, access),
        )


WORKLOAD = VideoWorkload()
