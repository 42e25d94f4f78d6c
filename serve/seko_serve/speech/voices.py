"""Voices that clients keep: recordings that are encoded once, by API key and name."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from seko_runtime.speech.voice import Voice
from seko_serve.errors import ServeError

MAX_VOICES, MAX_EVERY = 32, 1024  # of an API key, and of all
ID = "voice_"


@dataclass(frozen=True)
class KeptVoice:
    """A voice that a client keeps.

    Parameters
    ----------
    name : str
        Its name, which the client chose.
    voice : Voice
        The encoded recording.
    """

    name: str
    voice: Voice
    id: str = field(default_factory=lambda: ID + secrets.token_urlsafe(12))
    created: float = field(default_factory=time.time)

    def facts(self) -> dict[str, object]:
        """Return the voice in the form of OpenAI's API."""
        return {
            "id": self.id,
            "object": "audio.voice",
            "name": self.name,
            "type": "audio_sample",
            "created_at": int(self.created),
        }


class KeptVoices:
    """The kept voices of a server, until its process ends. Only the event loop's thread may call the methods."""

    def __init__(self) -> None:
        self._voices: dict[str, dict[str, KeptVoice]] = {}  # by tenant and name

    def of(self, tenant: str) -> list[KeptVoice]:
        """Return the voices of a tenant, oldest first."""
        return list(self._voices.get(tenant, {}).values())

    def look(self, tenant: str, name: str) -> KeptVoice | None:
        """Return a tenant's voice by name or id; None if there is none."""
        own = self._voices.get(tenant, {})
        return own.get(name) or next((voice for voice in own.values() if voice.id == name), None)

    def find(self, tenant: str, name: str) -> KeptVoice:
        """Return a tenant's voice by name or id; ServeError if there is none."""
        voice = self.look(tenant, name)
        if voice is None:
            raise ServeError("not_found", "there is no such voice")
        return voice

    def check_room(self, tenant: str, name: str) -> None:
        """Raise a ServeError if a tenant may keep no further voice of this name."""
        own = self._voices.get(tenant, {})
        if name in own:
            return
        if len(own) >= MAX_VOICES:
            raise ServeError("full", f"{MAX_VOICES} voices of this API key are kept; delete one")
        if sum(map(len, self._voices.values())) >= MAX_EVERY:
            raise ServeError("full", "the server keeps no further voice")

    def keep(self, tenant: str, voice: KeptVoice) -> None:
        """Keep a voice, in place of another one of its name; ServeError as in `check_room`."""
        self.check_room(tenant, voice.name)
        self._voices.setdefault(tenant, {})[voice.name] = voice

    def remove(self, tenant: str, voice: KeptVoice) -> None:
        """Forget a voice."""
        self._voices.get(tenant, {}).pop(voice.name, None)
