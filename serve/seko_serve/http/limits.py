"""The limits of a session, in the form of the object ``limits`` in the answers of ``POST /v1/sessions`` and
``/v1/models``."""

from __future__ import annotations

from typing import Any

from seko_runtime.controls.pictures import MAX_LAST_S
from seko_runtime.speech.manifest import SpeechManifest
from seko_serve import protocol
from seko_serve.http import access, openings
from seko_serve.live.kinds import Served, facts_of
from seko_serve.live.pace import CREDIT
from seko_serve.live.speech import MAX_LETTERS_AHEAD
from seko_serve.media import uploads


def limits_of(manifest: Served) -> dict[str, int | float]:
    """Return the largest sizes, numbers and rates that the server takes of a session's client, by name.

    Limits of inputs that the artifact does not take, such as a voice, are left out.
    """
    facts: Any = facts_of(manifest)
    takes = facts["takes"]
    per_s, at_once = access.MESSAGES
    limits: dict[str, int | float] = {
        "request_bytes": openings.MAX_OPENING_BYTES,
        "control_bytes": protocol.MAX_CONTROL_BYTES,
        "messages_per_s": per_s,
        "messages_at_once": at_once,
        "chunks_ahead": CREDIT,
        "buffer_chunks": protocol.MAX_BUFFER,
    }
    if isinstance(manifest, SpeechManifest):
        limits |= {"text_letters": protocol.MAX_PROMPT_LETTERS, "waiting_letters": MAX_LETTERS_AHEAD}
        return limits | {"voice_bytes": uploads.MAX_SOUND_BYTES, "voice_s": uploads.MAX_VOICE_S}
    limits["fps"] = openings.MAX_FPS
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
    return limits
