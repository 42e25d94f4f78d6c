"""Speaking of a whole text by a session of its own, for the routes that have one text a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import numpy as np

from seko_runtime.errors import LibraryMissingError, UsageError
from seko_runtime.speech.manifest import SpeechManifest
from seko_runtime.speech.normaliser import normalised
from seko_runtime.speech.voice import Voice
from seko_serve.errors import ServeError
from seko_serve.live.admission import LATEST_S
from seko_serve.live.connection import Connection
from seko_serve.live.manager import SessionManager
from seko_serve.live.session import LiveSession
from seko_serve.media.sound_files import SoundFile
from seko_serve.protocol import JOIN, Codec, Control, Media
from seko_serve.speech.content import MAX_LETTERS_AHEAD, SpeechContent
from seko_serve.speech.fields import DEFAULT_VOICE, STOCK_VOICES, is_stock_model
from seko_serve.speech.opening import FIELDS as OPENING
from seko_serve.speech.opening import SpeechOpening, speech_opening_of
from seko_serve.speech.voices import KeptVoices

VOICES_PATH = "/v1/audio/voices"
LOOK_S = 0.05  # between two looks whether a request that waits gets a row
AHEAD = 8  # patches that are made before they are sent
_RECORDINGS = frozenset({"ref_audio", "reference"})  # fields


class Speaker:
    """What speaks texts, each by a session of its own.

    Parameters
    ----------
    manager : SessionManager
        The live sessions.

    Attributes
    ----------
    voices : KeptVoices
        The voices that clients keep.
    """

    def __init__(self, manager: SessionManager) -> None:
        self._manager, self.voices = manager, KeptVoices(manager.shelf)
        self._closing: set[asyncio.Task[None]] = set()

    def manifest(self) -> SpeechManifest:
        """Return the artifact's manifest; ServeError if its workload is not speech."""
        manifest = self._manager.device.manifest
        if not isinstance(manifest, SpeechManifest):
            raise ServeError("unsupported", "this artifact makes video and does not speak")
        return manifest

    async def named(
        self, values: dict[str, Any], tenant: str, manifest: SpeechManifest
    ) -> tuple[Voice | None, list[str]]:
        """Return the kept voice that a request names, if any, and what the client is told of names that stand for
        others."""
        notes, name = [], values.get("voice", DEFAULT_VOICE)
        if is_stock_model(values.get("model")):
            notes.append(f"model {values.pop('model')} is {manifest.name}")
        kept = await self.voices.look(tenant, name)
        if kept is None and name in STOCK_VOICES:
            notes.append(f"voice {name} is {'ref_audio' if 'ref_audio' in values else DEFAULT_VOICE}")
        elif kept is None and name != DEFAULT_VOICE:
            raise ServeError(
                "not_found",
                f"voice is not known, expected {DEFAULT_VOICE}, one of {', '.join(STOCK_VOICES)}, or one that "
                f"was sent to {VOICES_PATH}; a recording may also be sent as ref_audio",
                field="voice",
            )
        elif kept is not None and (recording := _RECORDINGS & values.keys()):
            raise ServeError(
                "bad_request", f"voice and {min(recording)} are both recordings: give one", field="voice"
            )
        if "language" in values:
            notes.append("language follows the text")
        heard = kept is not None or "ref_audio" in values
        if values.get("task_type", "Base" if heard else "CustomVoice") != (
            "Base" if heard else "CustomVoice"
        ):
            raise ServeError(
                "bad_request",
                "task_type is Base for a recording or a kept voice, and CustomVoice without",
                field="task_type",
            )
        return None if kept is None else await self.voices.encoded(tenant, kept), notes

    async def opening(
        self, values: dict[str, Any], manifest: SpeechManifest, kept: Voice | None
    ) -> SpeechOpening:
        """Return the conditions with which a request's session begins; ServeError if a sentence would not fit."""
        await self._check_text(values["input"], SpeechOpening())  # before the sound of a voice is decoded
        opening = await opening_of(values if kept is None else {**values, "ref_audio": kept}, manifest)
        if any(opening.voice_patches(manifest).values()):
            await self._check_text(values["input"], opening)
        return opening

    async def _check_text(self, text: str, opening: SpeechOpening) -> None:
        """Raise the ServeError with which a sentence of the text would end the speech."""
        patches = opening.voice_patches(self.manifest())

        def check(pool: Any) -> None:
            pool.check_text(text, voice_text=opening.voice_text, **patches)

        try:
            await self._manager.device.in_background(check)
        except UsageError as error:
            raise ServeError("bad_request", str(error)) from None

    async def opened(
        self, tenant: str, opening: SpeechOpening, gone: Callable[[], Awaitable[bool]]
    ) -> LiveSession:
        """Return a session, which a request waits for in the queue until ``gone`` returns True; ServeError if the queue
        is full, or the client is gone."""
        token = JOIN
        try:
            while True:
                try:
                    return await self._manager.open(tenant, opening, token, resumable=False)
                except ServeError as refused:
                    token = str(refused.facts.get("queue_token", ""))
                    if not token:
                        raise
                while not self._admitted(tenant, token):
                    if await gone():
                        raise ServeError("bad_request", "the client left before its text was spoken")
                    await asyncio.sleep(LOOK_S)
        finally:
            self._manager.leave_queue(tenant, token)

    def _admitted(self, tenant: str, token: str) -> bool:
        """Return whether a request that waits would get a row now; ServeError if it has lost its place, such as to a
        request of another key while the queue is full, or the server stops."""
        self._manager.check_takes()
        try:
            return bool(self._manager.place(tenant, token)["admitted"])
        except ServeError:
            raise ServeError("full", "no row is free, and the queue is full", retry_after=LATEST_S) from None

    async def parts(self, session: LiveSession, speech: Speech) -> AsyncGenerator[bytes]:
        """Yield the parts of the sound file while the text is spoken, then end the session."""
        async with self.closing(session):
            connection = session.viewer.enter()
            session.attach(connection, lambda: "", None, AHEAD, (Codec.PCM,))
            session.control(Control("text", "", {"text": speech.text, "last": True}))
            async for media in _heard(connection):
                if part := speech.take(np.frombuffer(media.payload, "<i2")):
                    yield part
                if media.last:
                    break
                if speech.over:
                    speech.cut = True
                    break
                session.control(Control("ack", "", {"chunk": media.chunk}))
            speech.cut |= cast(SpeechContent, session.content).cut
            if part := speech.file.close():
                yield part

    @asynccontextmanager
    async def closing(self, session: LiveSession) -> AsyncIterator[None]:
        """Context manager at whose end a session ends."""
        try:
            yield
        finally:  # in a task of its own: a client that leaves cancels this one, at each of its waits
            closing = asyncio.create_task(self._manager.close(session))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            await asyncio.shield(closing)


class Speech:
    """A text that is spoken into a file.

    Parameters
    ----------
    text : str
        The text.
    file : SoundFile
        The file.
    manifest : SpeechManifest
        The artifact's manifest.
    most_patches : int, optional
        Largest number of patches.

    Attributes
    ----------
    text_tokens : int
        Number of tokens of the text.
    cut : bool
        Whether a limit ended the text, or a sentence of it.
    """

    def __init__(
        self, text: str, file: SoundFile, manifest: SpeechManifest, most_patches: int | None = None
    ) -> None:
        self.text, self.file, self.text_tokens, self.cut = text, file, 0, False
        self._patch = manifest.workload.patch.samples
        self._most = None if most_patches is None else most_patches * self._patch
        self._made = 0

    def tokens_in(self, pool: Any) -> int:
        """Return the number of tokens that the text has in a pool."""
        return int(pool.text_tokens(self.text))

    @property
    def over(self) -> bool:
        """Whether the text has its largest number of patches."""
        return self._most is not None and self._made >= self._most

    def take(self, samples: Any) -> bytes:
        """Return the next part of the file, from samples [n] int16."""
        kept = samples if self._most is None else samples[: self._most - self._made]
        self._made += len(kept)
        self.cut |= len(kept) < len(samples)
        return self.file.write(kept)

    def told(self) -> dict[str, object]:
        """Return what the client is told at the end."""
        patches = -(-self._made // self._patch)
        usage = {"input_tokens": self.text_tokens, "output_tokens": patches}
        return {"usage": {**usage, "total_tokens": self.text_tokens + patches}, "cut": self.cut}


def with_words(text: str, language: str) -> str:
    """Return a text with numbers as words; ServeError if the library is missing, or the text becomes too long."""
    try:
        words = "".join(normalised(text, language, "input"))
    except LibraryMissingError as error:
        raise ServeError("not_installed", str(error), field="normalize") from None
    except UsageError as error:
        raise ServeError("bad_request", str(error), field="normalize") from None
    if len(words) > MAX_LETTERS_AHEAD:
        raise ServeError(
            "too_large",
            f"input has {len(words)} letters with numbers as words, at most {MAX_LETTERS_AHEAD} are taken",
            field="input",
        )
    return words


async def opening_of(
    values: dict[str, Any], manifest: SpeechManifest, sound: str = "ref_audio"
) -> SpeechOpening:
    """Return the opening of a request's fields; ``sound`` is the field of the recording."""
    fields = {"voice": sound, "voice_text": "ref_text"}
    opened = {name: values[field] for name in OPENING if (field := fields.get(name, name)) in values}
    return await asyncio.to_thread(speech_opening_of, opened, manifest, sound, "ref_text")


async def _heard(connection: Connection) -> AsyncIterator[Media]:
    """Yield the sound of a session as soon as the sound is made. If the session ends before its text is spoken, or
    refuses the text, a ServeError follows the yielded sound."""
    while connection.end is None or connection.outbox:
        for waiting in await connection.messages():
            if isinstance(waiting, bytes):
                yield Media.parse(waiting)
            elif waiting and (told := json.loads(waiting))["type"] == "rejected":
                raise ServeError.of_body(told)
    raise connection.end
