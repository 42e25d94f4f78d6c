"""The rows of a pool of speech sessions in this process: each row's places in the caches, its present text, and the
number of patches made of the text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.device_tensor import to_floats
from seko_runtime.backends.memory import Memory
from seko_runtime.errors import PoolFullError, UsageError
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.host.faults import machine_faults
from seko_runtime.sessions.loaded import Loaded
from seko_runtime.sessions.row_state import RowLayout, RowState
from seko_runtime.sessions.rows import LocalRows, opened_rows
from seko_runtime.speech import contract
from seko_runtime.speech.device import SpeechDevice
from seko_runtime.speech.manifest import SpeechManifest
from seko_runtime.speech.places import free_start, gaps
from seko_runtime.speech.prompts import Floats, SpeechPrompt, check_room
from seko_runtime.speech.row_numbers import STATE_FORM, RowNumbers, check_numbers

PREFILL, STEP = "prefill", "step"  # kinds of a row's next call
Read = Callable[[], Mapping[str, NDArray[np.uint8]]]  # waits for the results of a call
_PENDING = ("pending.ids", "pending.is_audio", "pending.patches")  # arrays of a snapshot


class Ending:
    """The answer to the question whether a text ended with a certain patch. The model's stop flag is copied from the
    device only when the `Ending` is asked.

    Parameters
    ----------
    read : callable
        Function that waits for the patch's stop flag and returns it.
    before : Ending or None
        The `Ending` of the previous patch; None if there is no previous patch or its stop flag was read.
    """

    def __init__(self, read: Callable[[], bool], before: Ending | None = None) -> None:
        self._unread: tuple[Callable[[], bool], Ending | None] | None = (read, before)
        self._answer = False

    @property
    def known(self) -> bool:
        """Whether the text is known to have ended; reading `known` never waits."""
        before = self.before
        return self._answer or (before is not None and before.known)

    @property
    def before(self) -> Ending | None:
        """The `Ending` of the previous patch, if that patch's stop flag was not read yet."""
        unread = self._unread
        return None if unread is None else unread[1]

    def __call__(self) -> bool:
        """Return whether the text ended with this patch or an earlier one; any thread may ask."""
        unread = self._unread
        if unread is not None:
            read, before = unread
            self._answer = (before is not None and before()) or read()
            self._unread = None  # last: another thread may be here too
        return self._answer


@dataclass(frozen=True)
class Patch:
    """A patch: the short piece of sound that one step makes. The device may still be computing the patch. Any thread
    may read a `Patch`.

    Parameters
    ----------
    number : int
        The patch's number in the text, from 0.
    samples : callable
        Function that waits for the patch and returns its sound samples, float32 [n].
    ends : callable
        Function that waits for the patch and returns whether it is the last patch of the text.
    surplus : callable
        Function that waits for the previous patch and returns whether that patch was the text's last; if so, this patch
        is surplus and must be dropped.
    """

    number: int
    samples: Callable[[], Floats]
    ends: Callable[[], bool]
    surplus: Callable[[], bool]


@dataclass
class SpeechRow:
    """The host's state of one speech session; `RowNumbers` describes the numbers in the state."""

    start: int
    positions: int
    seed: int
    guidance: float
    temperature: float
    filled: int = 0
    pending: SpeechPrompt | None = None
    patches: int = 0
    limit: int = 0
    ending: Ending | None = None
    said: dict[int, Floats] = field(default_factory=dict)
    """Latents [P, C] of the present text's patches whose stop flags were read, by the patch's number."""

    @property
    def said_whole(self) -> Floats | None:
        """The patches [n, P, C] of a text that the model has ended; None before, and for a text of which some patches
        are not known. Reading `said_whole` waits for the session's last queued patch."""
        if not self.stopped or not self.said:
            return None
        count = max(self.said) + 1
        return np.stack([self.said[number] for number in range(count)]) if count == len(self.said) else None

    @property
    def speaks(self) -> bool:
        """Whether patches of the session's text are still to come; reading `speaks` waits for the session's last queued
        patch."""
        return self.patches < self.limit and not self.stopped

    @property
    def may_speak(self) -> bool:
        """Whether patches of the session's text may still be to come; reading `may_speak` does not wait for the
        device."""
        return self.patches < self.limit and not (self.ending is not None and self.ending.known)

    @property
    def stopped(self) -> bool:
        """Whether the model has ended the session's text; reading `stopped` waits for the session's last queued
        patch."""
        return self.ending is not None and self.ending()


@dataclass(frozen=True)
class RowSettings:
    """The numbers with which a session begins: seed, guidance, temperature and positions, as in `RowNumbers`."""

    positions: int
    seed: int
    guidance: float
    temperature: float


class LocalSpeechRows(LocalRows[SpeechManifest, SpeechDevice]):
    """The rows of a pool of speech sessions in this process. Call `prepare` before the first text.
    The parameters are those of `LocalRows`.

    Attributes
    ----------
    prefilled_last : bool
        Whether the last engine call was a prefill.
    launches : int
        Number of captured CUDA graphs launched so far.
    """

    @machine_faults()
    def __init__(self, loaded: Loaded[SpeechManifest], memory: Memory) -> None:
        super().__init__(loaded, memory, STATE_FORM)
        self._tokens = loaded.tokens
        self.prefilled_last = False
        self.launches = 0
        self._speech_rows: dict[int, SpeechRow] = {}
        self._open(lambda: SpeechDevice(loaded, memory, self._filled))

    def keep(self, rows: Collection[int]) -> None:
        """Free the cache places of all rows except ``rows``, to which sessions belong."""
        for row in [row for row in self._speech_rows if row not in rows]:
            del self._speech_rows[row]

    @property
    def free_positions(self) -> int:
        """Largest number of positions that the next session can have: the longest run of consecutive cache places that
        are free."""
        workload = self.manifest.workload
        longest = max((count for _, count in gaps(self._taken(), workload.places - 1)), default=0)
        return min(workload.positions, longest)

    def begin(self, row: int, settings: RowSettings) -> None:
        """Reserve consecutive cache places for the positions of a row; PoolFullError if too few are free."""
        self._speech_rows[row] = SpeechRow(self._start(settings.positions), **vars(settings))

    def token_ids(self, text: str) -> NDArray[np.int64]:
        """Return the token ids [n] of a text; UsageError if the artifact has no tokenizer."""
        if self._tokens is None:
            raise UsageError(
                "this artifact has no tokenizer: give token ids by begin_prompt(), or rebuild it with a tokenizer"
            )
        return self._tokens.ids(text)

    @machine_faults()
    def begin_text(self, row: int, prompt: SpeechPrompt, limit: int) -> None:
        """Begin to speak a text on a row; the row's previous text is ended.

        Parameters
        ----------
        row : int
            Number of a row that belongs to a session.
        prompt : SpeechPrompt
            The text and its voice, as tokens and patches.
        limit : int
            Largest number of patches of the text.

        Raises
        ------
        UsageError
            If the row has too few positions for the prompt and one patch.
        """
        device, speech_row, count = self.device(), self._speech_rows[row], len(prompt.ids)
        check_room(count, speech_row.positions, self.manifest.workload.positions)
        self.inconsistent.add(row)
        with self.settled([row]):
            self.launches += device.begin(row, prompt.context)
        speech_row.filled, speech_row.pending = 0, prompt
        speech_row.patches, speech_row.ending, speech_row.said = 0, None, {}
        speech_row.limit = min(limit, speech_row.positions - count)
        self.inconsistent.discard(row)

    def end_text(self, row: int) -> None:
        """End the present text of a session's row."""
        speech_row = self._speech_rows[row]
        speech_row.pending, speech_row.ending, speech_row.said = None, None, {}
        speech_row.filled = speech_row.patches = speech_row.limit = 0

    def row(self, row: int) -> SpeechRow:
        """Return the host's state of a row that belongs to a session."""
        return self._speech_rows[row]

    def variants(self, rows: Sequence[int]) -> list[Hashable]:
        """Return for each row whether its session's next call is a prefill or a step."""
        return [STEP if self._speech_rows[row].pending is None else PREFILL for row in rows]

    def check(self, rows: Sequence[int], inputs: Sequence[None]) -> None:
        """Raise the error that `run` would raise for these rows before it queues work; otherwise do nothing."""
        del inputs
        self.check_whole(rows)
        for row in rows:
            speech_row = self._speech_rows[row]
            if speech_row.ending is not None and speech_row.ending.before is not None:
                speech_row.ending.before()  # read one step late
            if not speech_row.may_speak:
                raise UsageError(
                    f"row {row} has no text to speak, or has spoken it after {speech_row.patches} patches; begin "
                    "another"
                )

    @machine_faults()
    def run(self, rows: Sequence[int], inputs: Sequence[None] | None = None) -> list[Patch | None]:
        """Make the next patch of some sessions, or run the model over the next part of one session's prompt.

        A patch's stop flag is read when it is needed, at the latest before the session's second step after that patch.
        A text may therefore be followed by one surplus patch. An error in a step leaves the sessions' rows
        inconsistent, because the state of a decoder is changed in place.

        Parameters
        ----------
        rows : sequence of int
            Distinct row numbers, at most as many as the largest call carries; or a single row, if the model has not yet
            run over its whole prompt.
        inputs : sequence of None, optional
            Not used: a call of speech has no inputs from the caller.

        Returns
        -------
        list of Patch or None
            A patch for each row; None for a row whose call ran over a part of its prompt.

        Raises
        ------
        UsageError
            If a row has no text to speak.
        TornStreamError
            If an earlier error left a row's state unknown; beginning another text resets the row.
        SessionClosedError
            If `close` was called.
        """
        self.check(rows, inputs or ())
        self.prefilled_last = any(self._speech_rows[row].pending is not None for row in rows)
        if not self.prefilled_last:
            return [*self._step(rows)]
        if len(rows) > 1:
            raise UsageError(
                "a call fills in the prompt of one row; give it alone until it has its first patch"
            )
        self._prefill(rows[0])
        return [None]

    @machine_faults()
    def encode(self, stretch: Floats, *, first: bool) -> Callable[[], Floats]:
        """Queue the encoding of the next stretch [n] of a voice recording; return a function that waits for the latents
        [l, C] and returns them.

        The stretches of a voice must be encoded one after another, without stretches of another voice between them.
        """
        device, voice, patch = self.device(), self.manifest.workload.voice, self.manifest.workload.patch
        with self.memory.ordered():
            launches, buffers = device.encode(stretch, first=first)
        self.launches += launches
        read = self.read_later(buffers)
        shape = (voice.patches * patch.latents, patch.channels)
        return lambda: read()[contract.VOICE_LATENTS].view(np.float32).reshape(shape).copy()

    def begin_owner(self, row: int, tenant: str | None) -> None:
        """Do nothing, because sessions of one owner share no state in speech."""

    def reserve(self, row: int) -> None:
        """Do nothing: a row of speech needs no further host memory."""

    def layout(self) -> RowLayout:
        """Return the name, shape and dtype of each tensor in the largest state of a row. `RowLayout.of` of the result
        returns the layout of a smaller state.
        """
        most = self.manifest.workload.positions
        forms, patch = self.device().forms, self.manifest.workload.patch.shape

        def sized(numbers: RowNumbers) -> RowLayout:
            return RowLayout(forms(numbers.filled), _pending_forms(numbers.pending, patch))

        return replace(RowLayout(forms(most), _pending_forms(most, patch)), sized=sized)

    def load(self, row: int, state: RowState) -> None:
        """Reserve cache places for a stored state in a row, and queue copies of the state into it.

        Raises
        ------
        SnapshotError
            If the state is not a possible state of this artifact.
        PoolFullError
            If too few consecutive cache places are free.
        """
        self._check_load(state)
        numbers = state.numbers
        self.begin(row, RowSettings(numbers.positions, numbers.seed, numbers.guidance, numbers.temperature))
        self._speech_rows[row].filled = numbers.filled
        super().load(row, state)

    def _step(self, rows: Sequence[int]) -> list[Patch]:
        speech_rows = [self._speech_rows[row] for row in rows]
        numbers: dict[str, list[int | float]] = {
            contract.ROWS: [*rows],
            contract.STARTS: [row.start for row in speech_rows],
            contract.FIRST: [row.filled for row in speech_rows],
            contract.COUNT: [1] * len(rows),
            contract.SEEDS: [row.seed for row in speech_rows],
            contract.PATCH_NUMBERS: [row.patches for row in speech_rows],
            contract.TEMPERATURE: [row.temperature for row in speech_rows],
            contract.GUIDANCE: [row.guidance for row in speech_rows],
        }
        with self.counted(rows):
            with self.settled(rows):
                launches, buffers = self.device().step(numbers)
            self.launches += launches
            read = self.read_later(buffers)
            return [self._patch(row, batch_index, read) for batch_index, row in enumerate(speech_rows)]

    def _patch(self, speech_row: SpeechRow, batch_index: int, read: Read) -> Patch:
        """Count a new patch of a session, and return the `Patch` at one batch index of a call's results."""
        workload, number, before = self.manifest.workload, speech_row.patches, speech_row.ending
        last, said = number + 1 == speech_row.limit, speech_row.said
        dtype = next(spec.dtype for spec in self.manifest.buffers if spec.name == contract.PATCH)

        def stops() -> bool:
            results = read()
            said[number] = to_floats(results[contract.PATCH], dtype, (-1, *workload.patch.shape))[
                batch_index
            ].copy()
            return bool(results[contract.STOP][batch_index]) and number + 1 >= workload.limits.least_patches

        def samples() -> Floats:
            sound: Floats = read()[contract.SAMPLES].view(np.float32).reshape(-1, workload.patch.samples)
            copy: Floats = sound[batch_index].copy()
            return copy

        ending = Ending(stops, before)
        speech_row.patches, speech_row.filled, speech_row.ending = number + 1, speech_row.filled + 1, ending
        return Patch(number, samples, lambda: last or ending(), before or (lambda: False))

    def _prefill(self, row: int) -> None:
        speech_row = self._speech_rows[row]
        assert speech_row.pending is not None, "called for a row whose prompt is not filled in"
        part, rest = speech_row.pending.split(self.manifest.workload.prefill_tokens[-1])
        with self.settled([row]):
            self.launches += self.device().prefill(row, speech_row.start, speech_row.filled, part)
        with self.counted([row]):
            speech_row.filled += len(part.ids)
            speech_row.pending = rest if len(rest.ids) else None

    def _start(self, positions: int) -> int:
        start = free_start(self._taken(), positions, self.manifest.workload.places - 1)
        if start is None:
            raise PoolFullError(
                f"the session asks for {positions} positions, at most {self.free_positions} are free side by side: ask "
                "for fewer, close a session, or rebuild with more places"
            )
        return start

    def _taken(self) -> list[tuple[int, int]]:
        return [(speech_row.start, speech_row.positions) for speech_row in self._speech_rows.values()]

    def _filled(self, row: int) -> tuple[int, int] | None:
        speech_row = self._speech_rows.get(row)
        return None if speech_row is None else (speech_row.start, speech_row.filled)

    def _begin(self, row: int) -> None:
        self._speech_rows.pop(row, None)

    def _save(self, row: int) -> tuple[Any, Mapping[str, NDArray[np.uint8]]]:
        speech_row, pending = self._speech_rows[row], self._speech_rows[row].pending
        numbers = RowNumbers(
            positions=speech_row.positions,
            filled=speech_row.filled,
            pending=0 if pending is None else len(pending.ids),
            patches=speech_row.patches,
            limit=speech_row.limit,
            stopped=speech_row.stopped,
            seed=speech_row.seed,
            guidance=speech_row.guidance,
            temperature=speech_row.temperature,
        )
        arrays = {} if pending is None else dict(zip(_PENDING, pending.arrays, strict=True))
        flat = {
            name: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for name, array in arrays.items()
        }
        return numbers, flat

    def _check_load(self, state: RowState) -> None:
        check_numbers(state.numbers, self.manifest)

    def _load(self, row: int, state: RowState) -> None:
        numbers, speech_row = state.numbers, self._speech_rows[row]
        speech_row.patches, speech_row.limit = numbers.patches, numbers.limit
        speech_row.ending = Ending(lambda: True) if numbers.stopped else None
        if numbers.pending:
            forms = _pending_forms(numbers.pending, self.manifest.workload.patch.shape)
            speech_row.pending = SpeechPrompt(
                *(
                    state.arrays[name].view(spec.dtype).reshape(spec.shape).copy()
                    for name, spec in forms.items()
                )
            )


def _pending_forms(tokens: int, patch: tuple[int, int]) -> dict[str, TensorSpec]:
    """Return the name, shape and dtype of the arrays in a snapshot that hold the rest of a prompt of so many tokens."""
    if not tokens:
        return {}
    shapes = ((tokens,), (tokens,), (tokens, *patch))
    dtypes = ("int64", "bool", "float32")
    return {
        name: TensorSpec(name, shape, dtype)
        for name, shape, dtype in zip(_PENDING, shapes, dtypes, strict=True)
    }


def open_speech_rows(loaded: Loaded[SpeechManifest]) -> LocalSpeechRows:
    """Return the rows of a pool of speech sessions in this process, ready to run.

    Raises
    ------
    DeviceMemoryError
        If the tensors of the pool do not fit on the device; nothing was allocated.
    """
    return opened_rows(loaded, lambda memory: LocalSpeechRows(loaded, memory))
