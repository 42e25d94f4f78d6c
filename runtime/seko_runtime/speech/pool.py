"""A pool of speech sessions, which speak at the same time and share engine calls."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from seko_runtime.arguments import real_number, whole_number
from seko_runtime.errors import SekoRuntimeError, UsageError
from seko_runtime.format.manifest import MAX_SEED
from seko_runtime.sessions.call_times import CallTimes
from seko_runtime.sessions.pool import QueuedCall, RowPool
from seko_runtime.sessions.session import PendingResult, RowSession, SharedRows
from seko_runtime.sessions.snapshot import content_digest
from seko_runtime.speech.local_rows import PREFILL, LocalSpeechRows, Patch, RowSettings
from seko_runtime.speech.manifest import MAX_GUIDANCE, MAX_TEMPERATURE, SpeechManifest
from seko_runtime.speech.prompts import Floats, check_room, pad_voice, prompt_tokens
from seko_runtime.speech.sentences import sentences_of
from seko_runtime.speech.session import SpeechSession
from seko_runtime.speech.texts import checked_text
from seko_runtime.speech.voice import NO_VOICE, Voice, check_voice, check_words

MAX_VOICE_S = 600


class SpeechPool(RowPool[SpeechSession, None, Patch | None]):
    """A pool of a speech artifact: memory for a fixed number of sessions, which share engine calls.

    All methods of a pool and its sessions may be called from any thread: one call is queued at a time, and the others
    wait. In a process forked from the process that opened the pool, the methods raise a ForkedProcessError.

    Parameters
    ----------
    rows : LocalSpeechRows
        The rows of the pool, ready to run. The pool owns these rows and closes them.
    digest : str
        SHA-256 of the artifact, which the pool's snapshots contain.
    clock, snapshot_key
        The parameters of `RowPool` with the same names.
    """

    manifest: SpeechManifest
    _rows: LocalSpeechRows

    def __init__(
        self,
        rows: LocalSpeechRows,
        *,
        digest: str = "",
        clock: Callable[[], float] = time.monotonic,
        snapshot_key: bytes | None = None,
    ) -> None:
        digests = digest, speech_content(rows.manifest) or digest
        super().__init__(rows, SpeechSession, digests=digests, clock=clock, snapshot_key=snapshot_key)
        self.call_times = CallTimes(
            self._buckets, proportional=False
        )  # a step reads the same weights for any rows
        self._turn = threading.Lock()  # held by the thread that serves all
        # the last call that it queued, with its patches, and when the one before that ended
        self._before: tuple[QueuedCall[SpeechSession, Patch | None], list[Patch | None]] | None = None
        self._ended = -math.inf
        self._encoding = threading.Lock()  # held while a voice is encoded, stretch by stretch

    def open_session(
        self,
        *,
        voice: Voice = NO_VOICE,
        seed: int = 0,
        guidance: float | None = None,
        temperature: float | None = None,
        positions: int | None = None,
        name: str = "",
        lease_s: float | None = None,
        tenant: str | None = None,
    ) -> SpeechSession:
        """Open a session of speech on a free row of the pool.

        Parameters
        ----------
        voice : Voice
            The voice of the session, from `encode_voice`; default: the model chooses a voice by text and seed.
        seed : int
            Seed of the noise, 0 to 2**62 - 1. A text spoken again with the same seed sounds the same.
        guidance : float, optional
            Strength of classifier-free guidance towards text and voice, 0 to `MAX_GUIDANCE`; default: the artifact's
            setting.
        temperature : float, optional
            Standard deviation of the noise, 0 to `MAX_TEMPERATURE`; default: the artifact's setting.
        positions : int, optional
            Largest number of positions of the session: tokens of a text, patches of its voice and generated patches
            together; default: an equal share of the cache's places. A session with fewer positions leaves more places
            to other sessions.
        name, lease_s, tenant
            Name of the session in error messages, lease in seconds, and name of the session's owner. The session ends
            if it is neither run nor renewed for the time of the lease.

        Raises
        ------
        PoolFullError
            If every row of the pool belongs to a session, or too few consecutive cache places are free.
        UsageError
            If an argument of the session is invalid.
        SessionClosedError
            If the pool is closed.
        """
        workload, solver = self.manifest.workload, self.manifest.workload.solver
        check_voice(voice, workload.patch.shape)
        settings = RowSettings(
            positions=self.manifest.session_positions
            if positions is None
            else whole_number(positions, "positions", 2, workload.positions),
            seed=whole_number(seed, "seed", 0, MAX_SEED),
            guidance=solver.guidance
            if guidance is None
            else real_number(guidance, "guidance", most=MAX_GUIDANCE),
            temperature=solver.temperature
            if temperature is None
            else real_number(temperature, "temperature", most=MAX_TEMPERATURE),
        )
        session = self._open(lambda row: self._rows.begin(row, settings), name, lease_s, tenant)
        session.voice = voice
        return session

    def encode_voice(self, reference: object = None, *, continued: object = None, text: str = "") -> Voice:
        """Return a voice for sessions to speak with. Engine calls of other sessions run between the parts of the
        voice's recording.

        Parameters
        ----------
        reference : array, optional
            A recording [n] of the voice to imitate: float32 in -1..1, at `VoiceEncoder.sample_rate` of the manifest.
        continued : array, optional
            A recording [n] in the format of ``reference``, which the spoken text continues; ``text`` has the words of
            the recording.
        text : str
            The words that are spoken in ``continued``.

        Raises
        ------
        UsageError
            If a recording has a wrong shape or dtype, is empty, or is longer than `MAX_VOICE_S` seconds; if only one of
            ``continued`` and ``text`` is passed.
        SessionClosedError
            If the pool is closed.
        """
        parts = self.encode_voice_in_parts(reference, continued=continued, text=text)
        while True:
            try:
                next(parts)
            except StopIteration as end:
                voice: Voice = end.value
                return voice

    def encode_voice_in_parts(
        self, reference: object = None, *, continued: object = None, text: str = ""
    ) -> Generator[None, None, Voice]:
        """Return a generator that encodes a voice, for a thread that has other calls to make meanwhile. Each ``next``
        runs one call of the voice encoder and waits for it; the generator's return value is the voice.

        Only one voice of a pool is encoded at a time: a second generator waits in its first ``next`` until the first
        one has ended or is closed, so a thread must not begin a second one before. Parameters and errors are those of
        `encode_voice`; the UsageErrors are raised at once.
        """
        check_words(continued, text)
        rate = self.manifest.workload.voice.sample_rate
        return self._encoding_parts(
            None if reference is None else _checked_sound(reference, "reference", rate),
            None if continued is None else _checked_sound(continued, "continued", rate),
            text,
        )

    def _encoding_parts(
        self, reference: Floats | None, continued: Floats | None, text: str
    ) -> Generator[None, None, Voice]:
        with self._encoding:
            patches = None if reference is None else (yield from self._encoded(reference, continued=False))
            return Voice(
                patches,
                None if continued is None else (yield from self._encoded(continued, continued=True)),
                text,
            )

    def check_text(
        self,
        text: str,
        *,
        voice_text: str = "",
        reference: int = 0,
        continued: int = 0,
        positions: int | None = None,
    ) -> None:
        """Raise the error that a session would raise for a sentence of a text when that sentence begins, so that a text
        can be refused before its first sound. Any thread may call this; it does not wait for engine calls.

        Parameters
        ----------
        text : str
            The whole text.
        voice_text : str
            The words of the voice that the text continues.
        reference, continued : int
            Number of patches of the reference voice, and of the voice that the text continues; 0 for no voice.
        positions : int, optional
            The session's number of positions; default as in `open_session`.

        Raises
        ------
        UsageError
            If the text has nothing to say or a letter that no tokenizer takes, or a sentence and the voice are too long
            for the session's positions.
        """
        most = self.manifest.workload.positions
        own = (
            self.manifest.session_positions
            if positions is None
            else whole_number(positions, "positions", 2, most)
        )
        for sentence in sentences_of(checked_text(text, "the text")):
            count = len(self._rows.token_ids(checked_text(voice_text, "the voice's text") + sentence))
            check_room(prompt_tokens(count, reference=reference, continued=continued), own, most)

    def text_tokens(self, text: str) -> int:
        """Return the number of tokens of a text's sentences. Any thread may call this; it does not wait for engine
        calls."""
        whole = checked_text(text, "the text")
        return sum(len(self._rows.token_ids(sentence)) for sentence in sentences_of(whole))

    def step(self, sessions: Sequence[SpeechSession]) -> list[Floats | None]:
        """Make the next patch of some sessions in one engine call, and wait for it. If the prompt of a session is not
        yet in the cache, the model runs over the prompt first.

        Parameters
        ----------
        sessions : sequence of SpeechSession
            Distinct sessions of this pool, at most as many as the largest call carries, each with a text to speak.

        Returns
        -------
        list of array or None
            Sound samples [n] float32 for each session; None if the session's text ended with the previous patch.

        Raises
        ------
        UsageError
            If there are too many sessions for one engine call, or a session has no text to speak.
        SessionClosedError
            If a session is paused or has ended.
        """
        for session in sessions if isinstance(sessions, Sequence) else ():
            while isinstance(session, SpeechSession) and self._fills(session):
                self._run([session], None)
        patches = self._run(sessions, None)
        return [None if patch is None or patch.surplus() else patch.samples() for patch in patches]

    def serve_next(
        self,
        now: float | None = None,
        *,
        among: Collection[RowSession] | None = None,
        in_one: bool = False,
        queued: Callable[[Sequence[tuple[SpeechSession, Patch | None]]], None] | None = None,
    ) -> list[tuple[SpeechSession, Patch | None]]:
        """Run the engine call that the scheduler chooses among the sessions that have requested a patch, and wait for
        the end of the call.

        The call either makes a patch for the sessions that are due, or runs the model over a part of one session's
        prompt. After a part of a prompt the next call is a step, if a session waits for a step. After a call for a part
        of a session's prompt, the session still waits for its patch.

        The parameters and errors are those of `RowPool.serve_next`.

        Returns
        -------
        list of (session, Patch or None)
            The sessions that the call carried, sorted by due time, and their patches; None for a session whose call ran
            over a part of its prompt. The list is empty if no session waits, or if the call failed and threads are
            iterating over the sound of its sessions: these threads then get the error.
        """
        served = super().serve_next(now, among=among, in_one=in_one)
        _read_flags([patch for _, patch in served])
        if queued is not None:
            queued(served)
        return served

    def serve(self, session: SpeechSession) -> None:
        """If ``session`` needs a patch, queue the next engine call for all sessions that wait, and wait for the
        previous call.

        The device thus has an engine call to run while the caller reads the sound of the previous call. The model's
        stop flag of a patch is read only after the next step was queued. One thread queues calls for all sessions; the
        other threads find their patches ready.
        """
        with self._turn:
            if not session.needs:
                return
            # patches that others requested by `request_patch` are theirs to serve
            listened = {session for session in self.sessions if session.listened}
            queued = self._queue_next(among=listened)
            before, self._before = self._before, None
            if (
                queued is not None
            ):  # without its sessions, which are no business of the pool when they are dropped
                self._before = replace(queued, results=[]), [patch for _, patch in queued.results]
            if before is not None:
                self._ended = self._await(before[0], self._ended)
                _read_flags(before[1])

    @property
    def free_positions(self) -> int:
        """Largest number of positions that a new session can have now."""
        with self._call_lock.take():
            self._rows.keep(self._sessions_by_row())
            return self._rows.free_positions

    def _fills(self, session: SpeechSession) -> bool:
        """Return whether a session's next engine call runs over a part of its prompt."""
        with self._call_lock.take():
            row = session._running_row(cast(SharedRows, self))
            return self._rows.variants([row]) == [PREFILL]

    def _eligible(
        self, requests: list[tuple[int, SpeechSession, PendingResult]]
    ) -> list[tuple[int, SpeechSession, PendingResult]]:
        """Return the sessions among which the next engine call is chosen: all sessions that wait for a step, or the
        single session whose prompt is due first.
        """
        waiting = [entry for entry in requests if self._may_go_on(*entry[:2])]
        kinds = self._rows.variants([row for row, _, _ in waiting])
        steps = [entry for entry, kind in zip(waiting, kinds, strict=True) if kind != PREFILL]
        prompts = [entry for entry, kind in zip(waiting, kinds, strict=True) if kind == PREFILL]
        prompts.sort(key=lambda entry: entry[2].due)
        if not prompts:
            return steps
        first_step = min((request.due for _, _, request in steps), default=None)
        if first_step is None or (not self._rows.prefilled_last and prompts[0][2].due <= first_step):
            return prompts[:1]
        return steps

    def _may_go_on(self, row: int, session: SpeechSession) -> bool:
        """Return whether a session that has requested a patch can be served. Drop the request if the session's text is
        over, or if the session's error can be passed to a waiting thread.
        """
        if not self._rows.row(row).may_speak:
            session._pending = None
            return False
        try:
            self._rows.check([row], [None])
        except SekoRuntimeError as error:
            return not session.refuse(error)
        return True

    def _deliver_error(self, sessions: Sequence[SpeechSession], error: SekoRuntimeError) -> bool:
        refused = [session.refuse(error) for session in sessions]
        return all(refused)

    def _served(self, session: SpeechSession, result: Patch | None) -> None:
        if result is not None:
            session.take(result)

    def _free_row(self, tenant: str | None) -> int:
        self._rows.keep(self._sessions_by_row())  # the others' places are free
        return super()._free_row(tenant)

    def _encoded(self, samples: Floats, *, continued: bool) -> Generator[None, None, Floats]:
        """Encode a voice recording, one stretch for each ``next``; return the patches [n, P, C]."""
        spec, patch = self.manifest.workload.voice, self.manifest.workload.patch
        whole = pad_voice(samples, spec.patch_samples, continued=continued)
        count = len(whole) // spec.patch_samples
        stretches = pad_voice(whole, spec.samples, continued=False).reshape(-1, spec.samples)
        latents: list[Floats] = []
        for number, stretch in enumerate(stretches):
            with self._call_lock.take():
                self._rows.check_open()
                read = self._rows.encode(stretch, first=number == 0)
            latents.append(read())
            yield
        return np.concatenate(latents).reshape(-1, *patch.shape)[:count].copy()


def _read_flags(patches: Sequence[Patch | None]) -> None:
    """Read the stop flags of patches whose engine call has run, so that sessions know whether their texts are over."""
    for patch in patches:
        if patch is not None:
            patch.ends()


def speech_content(manifest: SpeechManifest) -> str:
    """Return a SHA-256 of the weights and sizes on which a session's saved state depends. Pools of all sizes have the
    same SHA-256. The result is "" if the manifest has no hashes.
    """
    workload = manifest.workload
    return content_digest(
        manifest, [workload.positions, list(workload.patch.shape), workload.solver.steps, workload.kv.scheme]
    )


def _checked_sound(sound: Any, what: str, rate: int) -> Floats:
    """Return the sound samples of a voice recording; UsageError if the array does not hold sound samples."""
    wanted = f"expected float32 [n] in -1..1 at {rate} samples a second"
    if not isinstance(sound, np.ndarray | list | tuple):
        raise UsageError(f"{what} is a {type(sound).__name__}, {wanted}")
    try:
        samples = np.asarray(sound)
    except ValueError:  # lists of several lengths
        raise UsageError(f"{what} is no array, {wanted}") from None
    if samples.ndim != 1 or not len(samples) or samples.dtype.kind != "f":
        raise UsageError(f"{what} is {samples.dtype} {list(samples.shape)}, {wanted}")
    if len(samples) > MAX_VOICE_S * rate:
        raise UsageError(f"{what} has {len(samples)} samples, more than {MAX_VOICE_S} s at {rate}; cut it")
    with np.errstate(over="ignore"):
        narrowed = samples.astype(np.float32)  # large numbers become infinite
    if not np.isfinite(narrowed).all():
        raise UsageError(f"{what} holds numbers that are not finite; give sound in -1..1")
    return narrowed
