"""Live speech: one session of a speech artifact, which speaks the text that its client writes, patch by patch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.controls.recording import of_json
from seko_runtime.errors import UsageError
from seko_runtime.sessions.session import PendingResult
from seko_runtime.speech.local_rows import Patch
from seko_runtime.speech.manifest import SpeechManifest
from seko_runtime.speech.pool import SpeechPool
from seko_runtime.speech.sentences import Sentences
from seko_runtime.speech.session import Said, SpeechSession
from seko_runtime.speech.texts import NOTHING_TO_SAY, checked_text
from seko_runtime.speech.voice import NO_VOICE, Voice
from seko_serve.errors import ServeError
from seko_serve.live.track import SoundTrack
from seko_serve.media import sound
from seko_serve.protocol import Codec, Control, Media
from seko_serve.speech.opening import SpeechOpening

MAX_LETTERS_AHEAD = 20_000


def described_speech(manifest: SpeechManifest) -> dict[str, object]:
    """Return the facts about a speech model that a page needs before it opens a session."""
    return {
        "kind": manifest.workload.kind,
        "rate": manifest.workload.patch.sample_rate,
        "takes": {"text": True, "voice": 1},
    }


def encoded_in_parts(pool: SpeechPool, opening: SpeechOpening) -> Generator[None, None, Voice]:
    """Return the encoded voice of an opening, one call of the voice encoder for each part."""
    return (yield from pool.encode_voice_in_parts(**opening.recordings(), text=opening.voice_text))


class SpeechContent:
    """The speech of one session; see `Content` for its methods.

    Parameters
    ----------
    manifest : SpeechManifest
        The artifact's manifest.
    opening : SpeechOpening
        The conditions with which the session begins.
    """

    def __init__(self, manifest: SpeechManifest, opening: SpeechOpening) -> None:
        self.manifest, self.opening = manifest, opening
        self.sound: SoundTrack | None = None
        self._text = Sentences()
        self._voice = opening.encoded
        self._row: SpeechSession | None = None
        self._speaking = False  # whether patches of a sentence are still to come
        self.cut = False  # whether a limit has ended a sentence

    @property
    def rate(self) -> float:
        """Number of samples per second of the sound."""
        return float(self.manifest.workload.patch.sample_rate)

    @property
    def period_s(self) -> float:
        """Duration of a patch's sound in seconds."""
        return self.manifest.workload.patch.seconds

    # -- the event loop ----------------------------------------------------------------------------------------

    def check(self, control: Control) -> None:
        """Raise a ServeError for a control that speech does not support."""
        if control.type not in ("text", "restart"):
            raise ServeError("unsupported", f"this artifact speaks: {control.type} is for video; send text")
        if control.type != "text":
            return
        try:
            checked_text(control.fields["text"], "text.text")
        except UsageError as error:
            raise ServeError("bad_request", str(error)) from None

    def codecs(self, hello: Control) -> tuple[Codec, ...]:
        """Return the codec of the sound."""
        return (sound.chosen_codec(hello.fields.get("audio", ())),)

    def attach(self, codecs: Sequence[Codec]) -> None:
        """Begin or continue the sound with this codec."""
        (codec,) = codecs
        if self.sound is None or self.sound.codec is not codec:
            self.sound = SoundTrack(codec, self.manifest.workload.patch.sample_rate)

    def ready(self, codecs: Sequence[Codec]) -> dict[str, object]:
        """Return the sound's codec and sample rate for the message ``ready``."""
        (codec,) = codecs
        rate = self.manifest.workload.patch.sample_rate
        return {
            "audio": {"codec": codec.name.lower(), **sound.facts(codec, rate)},
            "chunk_samples": self.manifest.workload.patch.samples,
            "takes": described_speech(self.manifest)["takes"],
        }

    def preparation(self) -> Callable[[SpeechPool], Generator[None, None, None]] | None:
        """Return the encoding of the voice that the client sent, one call of the voice encoder for each part."""
        return None if self.opening.voice is None else self._encode_voice

    def facts(self) -> dict[str, object]:
        """Return nothing."""
        return {}

    def recording(self) -> str:
        """Raise a ServeError: speech takes no events of controls."""
        raise ServeError("unsupported", "this artifact speaks, and its sessions are not recorded")

    # -- the device's thread -----------------------------------------------------------------------------------

    def _encode_voice(self, pool: SpeechPool) -> Generator[None, None, None]:
        self._voice = yield from encoded_in_parts(pool, self.opening)

    def open(self, pool: SpeechPool, name: str, tenant: str) -> SpeechSession:
        """Open a session of the pool with the voice that `preparation` encoded."""
        opening = self.opening
        self._row = pool.open_session(
            voice=self._voice,
            seed=opening.seed,
            guidance=opening.guidance,
            temperature=opening.temperature,
            name=name,
            tenant=tenant,
        )
        return self._row

    def check_with(self, row: SpeechSession, control: Control) -> None:
        """Do nothing. Only when a sentence begins is it known whether the session can speak the sentence."""

    def apply(self, row: SpeechSession, control: Control) -> str | None:
        """Append to the text that is to be spoken; for the control ``restart``, drop the text that was not spoken yet.
        The result says so if nothing is spoken because of a text. ServeError if too much would wait: only now the texts
        before it have come, too."""
        if control.type == "text":
            if self._text.letters + len(control.fields["text"]) > MAX_LETTERS_AHEAD:
                raise ServeError("too_large", f"more than {MAX_LETTERS_AHEAD} letters wait to be spoken")
            self._text.write(control.fields["text"])
            said_nothing = not self._text.says_something
            if control.fields.get("last", False):
                self._text.write("", last=True)
            return f"the text has {NOTHING_TO_SAY}" if said_nothing and not self._speaking else None
        self._text.clear()
        if self._speaking:
            row.finish()
            self._speaking = False
        row.said = Said()
        return None

    def starved(self) -> bool:
        """Return whether there is no sentence to speak, so that the client must send more text."""
        return not self._speaking and not self._text

    def ask(self, row: SpeechSession, due: float) -> PendingResult:
        """Request the next patch from the pool: a patch of the present sentence, or the first patch of the next
        sentence."""
        if not self._speaking and (sentence := self._text.next()) is not None:
            row.begin(sentence, continues=True)
            self._speaking = True
        return row.request_patch(due)

    def accept_chunk(self, result: Patch) -> SpeechPiece:
        """Accept a finished patch of sound, and record whether the patch's sentence is over."""
        surplus = result.surplus()
        self._speaking = not surplus and self._row is not None and self._row.speaks
        if not surplus and not self._speaking and self._row is not None:
            self.cut |= self._row.cut
        return SpeechPiece(self, None if surplus else result, last=self.starved())

    def state(self) -> dict[str, Any]:
        """Return the waiting text and the voice, which a snapshot of the row lacks."""
        voice = NO_VOICE if self._row is None else self._row.voice
        said = Said() if self._row is None else self._row.said
        latents = {"reference": voice.reference, "continued": voice.continued}
        of_said = {"patches": said.patches, "known": said.known}
        return {
            "text": self._text.state(),
            "speaking": self._speaking,
            "voice": {name: array for name, array in latents.items() if array is not None},
            "voice_text": voice.text,
            "said": {name: array for name, array in of_said.items() if array is not None},
            "said_texts": [said.text, said.present],
        }

    def load(self, row: SpeechSession, state: Mapping[str, Any]) -> None:
        """Continue from a value that `state` returned."""
        row.voice = Voice(**of_json(state["voice"]), text=str(state["voice_text"]))
        said, present = state["said_texts"]
        row.said = Said(**of_json(state["said"]), text=str(said), present=str(present))
        self._text.load(state["text"])
        self._row, self._speaking = row, bool(state["speaking"])


class SpeechPiece:
    """A patch of sound that is to be sent to the listener; see `Piece`.

    Parameters
    ----------
    content : SpeechContent
        The content of the session to which the patch belongs.
    patch : Patch or None
        The patch; None for a surplus patch, which was made before the previous patch's stop flag was read and is
        dropped.
    last : bool
        Whether all text received so far has been spoken after this patch.
    """

    def __init__(self, content: SpeechContent, patch: Patch | None, *, last: bool) -> None:
        self._content, self._patch, self._last = content, patch, last
        self._samples: NDArray[np.float32] = np.zeros(0, np.float32)

    def read(self) -> int:
        """Wait for the patch's sound samples, and return their number."""
        if self._patch is not None:
            self._samples = self._patch.samples()
        return len(self._samples)

    def encode(self, number: int, first: int) -> list[Media]:
        """Return the complete sound packets. At the end of the text the result also has the last packet, padded with
        silence; see `Piece.encode`."""
        track = self._content.sound
        if track is None:
            raise RuntimeError("a patch was made for a session that nobody hears")
        media = track.encode(self._samples, number, first)
        return [*media, *track.finish(number)] if self._last else media
