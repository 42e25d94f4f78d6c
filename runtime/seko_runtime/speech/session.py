"""A session of speech: a voice, and a row of the pool, which speaks one text after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from seko_runtime.arguments import iterates, shown, whole_number
from seko_runtime.errors import SekoRuntimeError, UsageError
from seko_runtime.sessions.session import PendingResult, RowSession, SharedRows
from seko_runtime.sessions.snapshot import Snapshot
from seko_runtime.speech.local_rows import LocalSpeechRows, Patch
from seko_runtime.speech.manifest import SpeechManifest
from seko_runtime.speech.prompts import Floats, SpeechPrompt, assemble, checked_patches, checked_prompt
from seko_runtime.speech.sentences import sentences_of
from seko_runtime.speech.texts import joined, spoken_text
from seko_runtime.speech.voice import NO_VOICE, Voice, check_voice

AHEAD = 4  # patches that are made before they are taken


@dataclass(frozen=True)
class Said:
    """What a session has said, for the next sentence to go on in its voice.

    Parameters
    ----------
    text : str
        The last text that the model has ended; "" if there is none.
    patches : array or None
        The patches [n, P, C] float32 of that text.
    present : str
        The present text, if it has not ended.
    known : array or None
        The patches [n, P, C] float32 of the present text so far; None if there are none.
    """

    text: str = ""
    patches: Floats | None = None
    present: str = ""
    known: Floats | None = None

    def __post_init__(self) -> None:
        for name in ("patches", "known"):
            patches = getattr(self, name)
            if patches is not None:
                object.__setattr__(self, name, checked_patches(patches, f"said.{name}"))
        if (self.patches is None) != (not self.text):
            raise UsageError(
                "a text that was said has no patches, or patches have no text: give both or neither"
            )


class SharedSpeech(SharedRows, Protocol):
    """The interface of a speech pool, as far as a session uses the pool."""

    _rows: LocalSpeechRows

    def encode_voice(self, reference: object = None, *, continued: object = None, text: str = "") -> Voice:
        """Return a voice for sessions to speak with; see `SpeechPool.encode_voice`."""

    def check_text(
        self,
        text: str,
        *,
        voice_text: str = "",
        reference: int = 0,
        continued: int = 0,
        positions: int | None = None,
    ) -> None:
        """Raise the error that a session would raise for a sentence of a text; see `SpeechPool.check_text`."""

    def serve(self, session: SpeechSession) -> None:
        """Queue the next engine call, if the session needs a patch."""


class SpeechSession(RowSession):
    """A session that speaks texts, one after another. `SpeechArtifact.open_session` returns a session with a pool of
    its own, `SpeechPool.open_session` a session of a shared pool.

    Use a session as a context manager, or call `close`. Any thread may call the methods of a speech session. Threads
    that use sessions of one pool share engine calls: each call carries all sessions that wait for a patch.

    A text ends when the model ends it, when `finish` or `close` is called, at the text's limit of patches, or when the
    session's lease runs out. The parameters are those of `RowSession`.

    Attributes
    ----------
    voice : Voice
        The voice of the texts that begin from now on. A snapshot of the session does not contain the voice.
    continues : bool
        Whether the present text goes on in the voice of the sentence before; see `begin`.
    """

    _pool: SharedSpeech

    def __init__(self, pool: SharedSpeech, name: str, lease_s: float | None, tenant: str | None) -> None:
        super().__init__(pool, name, lease_s, tenant)
        self._voice = NO_VOICE
        self._said = Said()
        self.continues = False
        self._text = 0  # number of the present text
        self._began = 0.0  # when it began, on the pool's clock
        # how many patches of it are made before they are taken; None: nobody iterates over its sound
        self._ahead: int | None = None
        self._ready: dict[int, Patch] = {}  # patches of it that were made and not taken, by number
        self._taken = 0  # patches of it that were taken
        self._refusal: SekoRuntimeError | None = None  # of its last request

    def speak(
        self, text: str | Iterable[str], *, patches: int | None = None, ahead: int = AHEAD
    ) -> Iterator[Floats]:
        """Yield the sound of a text, patch by patch, as soon as each patch is made.

        Parameters
        ----------
        text : str or iterable of str
            A text, or an iterable of its pieces, cut anywhere: the sound is that of the whole text. Its sentences are
            spoken one after another, each in the voice of the one before (see `begin`). The iterable is asked for the
            next piece when the sentences before have been spoken, so that the text may still be written meanwhile.
        patches : int, optional
            Largest number of patches of each sentence; default: the model's limit for the sentence's length.
        ahead : int
            Number of patches that may be made before the caller takes them. With 0 the device waits while a patch is
            read, and no patch is left over when the session is saved.

        Yields
        ------
        numpy.ndarray
            Samples of a patch, float32 [n] in -1..1, `Patch.seconds` long at the manifest's `Patch.sample_rate`; the
            caller owns the array. If the loop is left early, the text is finished.

        Raises
        ------
        UsageError
            If ``text`` is not a text, has nothing to say, or has a letter that no tokenizer takes; if one of its
            sentences and the voice are too long for the session's positions. Of a whole text each sentence is checked
            before the first one is spoken.
        SessionClosedError
            If the session is paused or has ended.
        """
        if not isinstance(text, str) and (isinstance(text, bytes) or not iterates(text)):
            raise UsageError(f"the text is {shown(text)}, expected a string or strings")
        ahead = whole_number(ahead, "ahead", 0)
        if isinstance(text, str):
            self.check_text(text)
        return self._spoken(sentences_of(text), patches, ahead)

    def _spoken(self, sentences: Iterable[str], patches: int | None, ahead: int) -> Iterator[Floats]:
        for number, sentence in enumerate(sentences):
            self.begin(sentence, patches=patches, continues=number > 0)
            yield from self.sound(ahead=ahead)

    def check_text(self, text: str) -> None:
        """Raise the UsageError that `speak` would raise for a whole text; see `SpeechPool.check_text`."""
        with self._pool._call_lock.take():
            positions = self._pool._rows.row(self._running_row()).positions
        voice = self.voice
        reference, continued = (
            0 if part is None else len(part) for part in (voice.reference, voice.continued)
        )
        self._pool.check_text(
            text, voice_text=voice.text, reference=reference, continued=continued, positions=positions
        )

    def begin(self, text: str, *, patches: int | None = None, continues: bool = False) -> None:
        """Begin to speak a text as one prompt; patches of the previous text that were not spoken are dropped.

        To get the sound, use `sound`, or `request_patch` and `SpeechPool.serve_next` for each patch, or
        `SpeechPool.step`.

        Parameters
        ----------
        text : str
            The text, whose runs of white space are read as one blank.
        patches : int, optional
            Largest number of patches; default: the model's limit for the text's length.
        continues : bool
            Whether the text goes on in the voice of the last text that the model ended in this session. The model then
            gets that text and its patches as the recording that it continues, behind the voice of the session. If the
            session has too few positions for that and all patches of the text, the text begins without, and the
            attribute ``continues`` is False.

        Raises
        ------
        UsageError, SessionClosedError
            As of `speak`.
        """
        text, rows = spoken_text(text), self._pool._rows
        limit = self.manifest.workload.limits.patches(len(rows.token_ids(text)))
        if patches is not None:
            limit = min(limit, whole_number(patches, "patches", 1))
        prompt, said, carried = self._prompt(self.voice, text), self.said if continues else Said(), False
        if said.patches is not None:
            before = self.voice.then(said.text, said.patches)
            longer = self._prompt(before, joined(said.text, text)[len(said.text) :])
            with self._pool._call_lock.take():
                carried = len(longer.ids) + limit <= rows.row(self._running_row()).positions
            prompt = longer if carried else prompt
        self._begin(prompt, limit, Said(said.text, said.patches, text), continues=carried)

    def _prompt(self, voice: Voice, text: str) -> SpeechPrompt:
        workload = self.manifest.workload
        return assemble(
            self._pool._rows.token_ids(voice.text + text),
            workload.patch.shape,
            reference=voice.reference,
            continued=voice.continued,
            marks=workload.marks,
        )

    def begin_prompt(self, prompt: SpeechPrompt, limit: int) -> None:
        """Begin to speak a prompt that is already tokenised, with at most ``limit`` patches; see `begin`.

        Raises
        ------
        UsageError
            If ``prompt`` is no prompt of this model, ``limit`` is no whole number of at least 1, or the prompt is too
            long for the session's positions.
        SessionClosedError
            If the session is paused or has ended.
        """
        workload = self.manifest.workload
        checked = checked_prompt(prompt, workload.patch.shape, workload.vocabulary)
        self._begin(checked, whole_number(limit, "limit", 1), Said(), continues=False)

    def _begin(self, prompt: SpeechPrompt, limit: int, said: Said, *, continues: bool) -> None:
        with self._pool._call_lock.take():
            row = self._running_row()
            self._pool._rows.begin_text(row, prompt, limit)
            self._drop_text()
            self._said, self.continues = said, continues
            self._began = self._pool._clock()
            self.renew()

    @property
    def voice(self) -> Voice:
        """The voice of the texts that begin from now on; UsageError for one of another model."""
        return self._voice

    @voice.setter
    def voice(self, voice: Voice) -> None:
        check_voice(voice, self.manifest.workload.patch.shape)
        self._voice = voice

    @property
    def said(self) -> Said:
        """What the next text can continue. A snapshot of the session does not contain it: a caller that saves a session
        between the sentences of a text keeps it, and assigns it to the restored session.

        Raises
        ------
        SessionClosedError
            If the session is paused or has ended.
        """
        with self._pool._call_lock.take():
            row = self._pool._rows.row(self._running_row())
            whole = row.said_whole if self._said.present else None
            if whole is not None:
                self._said = Said(self._said.present, whole)
            known = [row.said[number] for number in sorted(row.said)] if self._said.present else []
            return replace(self._said, known=np.stack(known)) if known else self._said

    @said.setter
    def said(self, said: Said) -> None:
        if not isinstance(said, Said):
            raise UsageError(
                f"said is {shown(said)}, expected what another session of this artifact has said"
            )
        for patches in (said.patches, said.known):
            check_voice(Voice(patches), self.manifest.workload.patch.shape)
        with self._pool._call_lock.take():
            row = self._pool._rows.row(self._running_row())
            self._said = said
            row.said = {} if said.known is None else dict(enumerate(said.known))

    def pause(self) -> None:
        """Move the session's state to the host and free the session's row; what was said stays with the session."""
        with self._pool._call_lock.take():
            self._said = self.said  # with the patches that only the row has
            super().pause()

    def resume(self) -> None:
        """Load the session's state into a free row of the pool; see `RowSession.resume`."""
        with self._pool._call_lock.take():
            super().resume()
            self.said = self._said

    def sound(self, *, ahead: int = AHEAD) -> Iterator[Floats]:
        """Yield the rest of the present text's sound, for example after `begin` or `SpeechPool.restore`.

        The text is over when the iterator ends or is closed. The parameters and errors are those of `speak`.
        """
        with self._pool._call_lock.take():
            row = self._running_row()
            self._ahead = whole_number(ahead, "ahead", 0)
            text = self._text
            if not self._ready:
                self._taken = self._pool._rows.row(row).patches
        whole = False
        try:
            while (patch := self._next(text)) is not None:
                yield patch.samples()
            whole = True
        finally:
            if not whole and self._text == text and not self.closed and not self.paused:
                self.finish()

    def finish(self) -> None:
        """End the present text: patches that were not taken are dropped. After `finish` the session may speak another
        text.

        Raises
        ------
        SessionClosedError
            If the session is paused or has ended.
        """
        with self._pool._call_lock.take():
            row = self._running_row()
            self._drop_text()
            self._said = replace(self.said, present="", known=None)
            self._pool._rows.end_text(row)

    def request_patch(self, due: float) -> PendingResult:
        """Request the next patch of the present text by a due time. `SpeechPool.serve_next` makes the patch, after the
        calls that run over the text's prompt. A second request replaces the due time of the first.

        Parameters
        ----------
        due : float
            Time by which the patch should be ready, in seconds of the pool's clock, `time.monotonic` by default.

        Raises
        ------
        UsageError
            If the session has no text, or its text has been spoken.
        SessionClosedError
            If the session is paused or has ended.
        """
        return self._ask(due, None)

    @property
    def speaks(self) -> bool:
        """Whether patches of the present text are still to be made; reading `speaks` waits for the last queued patch.

        Raises
        ------
        SessionClosedError
            If the session is paused or has ended.
        """
        with self._pool._call_lock.take():
            return self._pool._rows.row(self._running_row()).speaks

    @property
    def cut(self) -> bool:
        """Whether the present text has ended at its limit, or at the session's last position, before the model ended
        the text.

        Raises
        ------
        SessionClosedError
            If the session is paused or has ended.
        """
        with self._pool._call_lock.take():
            row = self._pool._rows.row(self._running_row())
            return 0 < row.limit == row.patches and not row.stopped

    def snapshot(self) -> Snapshot:
        """Return the session's whole present state, without its voice, as a `Snapshot`; `save` writes the snapshot to a
        file.

        Raises
        ------
        UsageError
            If patches were made and not taken; take the patches, or call `speak` with ``ahead`` 0.
        """
        with self._pool._call_lock.take():
            if self._ready:
                raise UsageError(
                    f"session {self.name!r} has {len(self._ready)} patches that were not taken, which no file holds: "
                    "take them first, or ask for patches one by one"
                )
        return super().snapshot()

    def encode_voice(self, reference: object = None, *, continued: object = None, text: str = "") -> Voice:
        """Return a voice to speak with, to be assigned to ``voice``; see `SpeechPool.encode_voice`."""
        return self._pool.encode_voice(reference, continued=continued, text=text)

    @property
    def manifest(self) -> SpeechManifest:
        """The artifact's manifest."""
        return self._pool._rows.manifest

    @property
    def listened(self) -> bool:
        """Whether a thread iterates over the session's present text."""
        return self._ahead is not None

    @property
    def needs(self) -> bool:
        """Whether the session has requested a patch and no patch is ready; False while the session is paused."""
        return self._pending is not None and self._row is not None and not self._ready

    def _next(self, text: int) -> Patch | None:
        """Return the next patch, which is made if necessary; None after the text's last patch."""
        while True:
            with self._pool._call_lock.take():
                row = self._running_row()
                if self._text != text:  # another one has begun
                    return None
                refusal, self._refusal = self._refusal, None
                if refusal is not None:
                    raise refusal
                patch = self._ready.pop(self._taken, None)
                if patch is None and not self._pool._rows.row(row).speaks:
                    return None
                self._taken += patch is not None
                if patch is None or self._ahead:
                    self._ask_for_more(row)
            # without the lock: other sessions' calls are queued meanwhile
            if patch is None or self._ahead:
                self._pool.serve(self)
            if patch is not None:
                return None if patch.surplus() else patch

    def take(self, patch: Patch) -> None:
        """Take a patch whose engine call is queued; the pool calls this method under its lock."""
        self._pending = None
        if self._ahead is not None and self._row is not None:
            self._ready[patch.number] = patch
            if len(self._ready) < self._ahead:
                self._ask_for_more(self._row)

    def refuse(self, error: SekoRuntimeError) -> bool:
        """If a thread waits for the requested patch, drop the request, pass the error to that thread and return True;
        otherwise return False.
        """
        if self._ahead is not None:
            self._pending, self._refusal = None, error
        return self._ahead is not None

    def _ask_for_more(self, row: int) -> None:
        """Request the next patch, unless the text is known to be over."""
        speech_row = self._pool._rows.row(row)
        if self._pending is None and speech_row.may_speak:
            due = self._began + speech_row.patches * self.manifest.workload.patch.seconds
            # not by `request_patch`: its checks read the last flag, which may not be there
            self._pending = PendingResult(None, due, self._pool._clock(), next(self._pool._turns))

    def _drop_text(self) -> None:
        self._text += 1
        self._pending = self._refusal = None
        self._ahead, self._taken = None, 0
        self._ready.clear()

    def _ended(self) -> None:
        self._drop_text()
