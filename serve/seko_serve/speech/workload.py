"""The workload speech, as the server uses it."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from seko_runtime.format.tokenizer_file import tokenizers_library
from seko_runtime.speech.local_rows import PREFILL
from seko_runtime.speech.manifest import SpeechManifest
from seko_runtime.speech.pool import SpeechPool
from seko_serve import protocol
from seko_serve.http.access import Access
from seko_serve.http.workload import ApiParts, Page, ServedWorkload, WorkloadRoutes
from seko_serve.live.manager import SessionManager
from seko_serve.media import uploads
from seko_serve.settings import Settings
from seko_serve.speech.api import api
from seko_serve.speech.calibration import measure, one_part_of_a_voice
from seko_serve.speech.content import MAX_LETTERS_AHEAD, SpeechContent, described_speech
from seko_serve.speech.fields import is_stock_model
from seko_serve.speech.opening import SpeechOpening, speech_opening_of
from seko_serve.speech.realtime import PATH as REALTIME
from seko_serve.speech.realtime import RealtimeRoutes
from seko_serve.speech.realtime_events import error_event
from seko_serve.speech.routes import PATH, SpeechRoutes
from seko_serve.speech.speaking import VOICES_PATH, Speaker
from seko_serve.speech.voices import KeptVoices


class SpeechWorkload(ServedWorkload[SpeechManifest]):
    """Live speech, and OpenAI's request for speech."""

    kind = "speech"
    page = Page("Seko speaks", Path(__file__).parent / "page")
    row_paths = (PATH,)
    kept_paths = (VOICES_PATH,)
    socket_paths = MappingProxyType({REALTIME: lambda error: json.dumps(error_event(error))})

    def check(self, manifest: SpeechManifest) -> None:
        """Check that the library for the artifact's texts is there."""
        if manifest.workload.tokenizer is not None:
            tokenizers_library()

    def content_of(self, manifest: SpeechManifest, opening: object) -> SpeechContent:
        """Return a new session's content."""
        if not isinstance(opening, SpeechOpening):
            raise TypeError(f"a {type(opening).__name__} for a speech artifact")
        return SpeechContent(manifest, opening)

    def content_of_state(self, manifest: SpeechManifest, state: Mapping[str, Any]) -> SpeechContent:
        """Return a content object for a session that continues; its voice and seed are part of the state."""
        del state
        return SpeechContent(manifest, SpeechOpening())

    def usual_period_s(self, manifest: SpeechManifest) -> float:
        """Return the seconds of a patch."""
        return manifest.workload.patch.seconds

    def measure(self, pool: SpeechPool, sessions: list[Any]) -> None:
        """Measure the calls while a short text is spoken."""
        measure(pool, sessions)

    def part_of_work(self) -> Callable[[SpeechPool], Generator[None, None, None]]:
        """Return the encoding of a voice of one part."""
        return one_part_of_a_voice

    def step_seconds(self, pool: SpeechPool) -> Mapping[int, float]:
        """Return the measured seconds of the calls that make patches. A call over a part of a prompt is not counted: it
        carries one session, whatever the number of rows, and occurs only once per sentence."""
        return pool.call_times.slowest(but=(PREFILL,))

    def opening_of(self, table: dict[str, Any], manifest: SpeechManifest) -> SpeechOpening:
        """Return the opening of a request."""
        return speech_opening_of(table, manifest)

    async def with_kept(self, table: dict[str, Any], tenant: str, manager: SessionManager) -> dict[str, Any]:
        """Return the fields of a request with the voice that ``{"id": NAME}`` names."""
        named = table.get("voice")
        if not isinstance(named, dict) or set(named) != {"id"} or not isinstance(named["id"], str):
            return table
        voices = KeptVoices(manager.shelf)
        return {**table, "voice": await voices.encoded(tenant, await voices.find(tenant, named["id"]))}

    def facts_of(self, manifest: SpeechManifest) -> dict[str, object]:
        """Return the facts about a speech model."""
        return described_speech(manifest)

    def limits_of(self, manifest: SpeechManifest) -> Mapping[str, int | float]:
        """Return the limits of a speech session's client."""
        del manifest
        return {
            "text_letters": protocol.MAX_PROMPT_LETTERS,
            "waiting_letters": MAX_LETTERS_AHEAD,
            "voice_bytes": uploads.MAX_SOUND_BYTES,
            "voice_s": uploads.MAX_VOICE_S,
        }

    def api(self) -> ApiParts:
        """Return the descriptions of the routes below ``/v1/audio/speech``."""
        return api()

    def stands_for(self, model: object) -> bool:
        """Return whether a name is that of one of OpenAI's models."""
        return is_stock_model(model)

    def routes(self, settings: Settings, manager: SessionManager, access: Access) -> Sequence[WorkloadRoutes]:
        """Return the routes below ``/v1/audio``, and the socket of OpenAI's realtime events."""
        del settings
        speaker = Speaker(manager)
        return SpeechRoutes(manager, access, speaker), RealtimeRoutes(manager, access, speaker)


WORKLOAD = SpeechWorkload()
