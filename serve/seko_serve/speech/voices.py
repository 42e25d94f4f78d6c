"""Voices that clients keep: recordings that are encoded once, by API key and name."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field

from seko_runtime.speech.voice import Voice
from seko_serve.errors import ServeError
from seko_serve.live.shelf import Shelf, no_room

MAX_VOICES = 32  # of an API key
ID = "voice_"


@dataclass(frozen=True)
class KeptVoice:
    """A voice that a client keeps.

    Parameters
    ----------
    name : str
        Its name, which the client chose.
    """

    name: str
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
    """The kept voices of a server, or of all servers of its artifact in a fleet.

    Parameters
    ----------
    shelf : Shelf
        Where they are kept, by tenant and name.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    async def of(self, tenant: str) -> list[KeptVoice]:
        """Return the voices of a tenant, oldest first."""
        labels = await self._shelf.labels(tenant)
        voices = (KeptVoice(name, **json.loads(label)) for name, label in labels.items())
        return sorted(voices, key=lambda voice: voice.created)

    async def look(self, tenant: str, name: str) -> KeptVoice | None:
        """Return a tenant's voice by name or id; None if there is none."""
        own = await self.of(tenant)
        named = [voice for voice in own if voice.name == name] or [voice for voice in own if voice.id == name]
        return named[0] if named else None

    async def find(self, tenant: str, name: str) -> KeptVoice:
        """Return a tenant's voice by name or id; ServeError if there is none."""
        voice = await self.look(tenant, name)
        if voice is None:
            raise ServeError("not_found", "there is no such voice")
        return voice

    async def encoded(self, tenant: str, voice: KeptVoice) -> Voice:
        """Return a tenant's voice as the model takes it; ServeError if it was removed meanwhile."""
        content = await self._shelf.content(tenant, voice.name)
        if content is None:
            raise ServeError("not_found", "there is no such voice")
        return Voice.of_content(content)

    async def check_room(self, tenant: str, name: str) -> None:
        """Raise a ServeError if a tenant may keep no further voice of this name."""
        labels = await self._shelf.labels(tenant)
        if name not in labels and len(labels) >= MAX_VOICES:
            raise no_room(MAX_VOICES)

    async def keep(self, tenant: str, voice: KeptVoice, encoded: Voice) -> None:
        """Keep a voice, in place of another one of its name; ServeError as in `check_room`."""
        label = json.dumps({"id": voice.id, "created": voice.created})
        await self._shelf.keep(tenant, voice.name, label, encoded.content(), MAX_VOICES)

    async def remove(self, tenant: str, voice: KeptVoice) -> None:
        """Forget a voice."""
        await self._shelf.remove(tenant, voice.name)
