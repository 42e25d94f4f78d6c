"""A session: one stream of video, which occupies one row of a pool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import flag, iterates, mapping_of, shown, whole_number
from seko_runtime.controls import Controls, controls_of
from seko_runtime.controls.pictures import MADE_OF_PICTURE
from seko_runtime.controls.recording import CHANGES, CHUNK_INPUTS, Entry, Recording
from seko_runtime.controls.registry import checked_controls
from seko_runtime.errors import UsageError
from seko_runtime.sessions.session import PendingResult, RowSession, SharedRows
from seko_runtime.video.chunk import NO_VIDEO, Chunk, SessionStats
from seko_runtime.video.contract import picture_input, without_kinds
from seko_runtime.video.inputs import Inputs
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.rows import Beginning, VideoRows
from seko_runtime.video.video_stream import QueuedChunks, VideoStream


class SharedStreams(SharedRows, Protocol):
    """The interface of a pool, as far as a session uses the pool."""

    _rows: VideoRows

    def run(self, sessions: Sequence[Session], inputs: Sequence[Inputs | None] | None = None) -> list[Chunk]:
        """Make the next chunk of some sessions in one engine call."""


class Session(RowSession):
    """One stream of video, which a caller runs chunk by chunk. `VideoArtifact.open_session` returns a session with a
    pool of its own, `Pool.open_session` a session of a shared pool.

    Use a session as a context manager, or call `close`. Any thread may call the session's methods, also at the same
    time as other calls of its pool: one call runs, the others wait.

    The parameters are those of `RowSession`. All sessions of a ``tenant`` share cached prompts; without a tenant the
    session uses only its own cached prompts.
    """

    _pool: SharedStreams

    def __init__(self, pool: SharedStreams, name: str, lease_s: float | None, tenant: str | None) -> None:
        super().__init__(pool, name, lease_s, tenant)
        self._ahead = QueuedChunks()  # chunks that `stream` has queued and not yielded yet
        self.controls = controls_of(pool._rows.manifest)
        self.beginning: Beginning | None = None  # of the stream, if it restarted now; None after a restore
        self._recording: Recording | None = None
        # what the next chunk alone is given: as a replayed recording says, and as last asked for
        self._replayed_inputs: Inputs | None = None
        self._own_inputs: Inputs | None = None

    @property
    def controls(self) -> Controls:
        """The controls of the session, by name: what a person steers it with. ``session.controls[NAME].take(event)``
        takes effect with the next chunk that is queued. `restart` resets the controls. A snapshot does not contain
        their state: save `Controls.state` beside it."""
        return self._controls

    @controls.setter
    def controls(self, controls: Controls) -> None:
        checked_controls(controls).owned(self._pool._call_lock.take)
        self._controls = controls

    def record(self, **begin: Any) -> Recording:
        """Record what happens to the session from now on, before its first chunk: what it was opened with, pictures and
        other arrays included, events of its controls, changes of prompt, text, inputs and seed, and the inputs that a
        chunk alone was given.

        Parameters
        ----------
        **begin
            Further facts of the beginning, for whoever replays the recording.

        Raises
        ------
        UsageError
            If the session has made a chunk, was restored or has a mixed prompt, so that its beginning is not known.
        SessionClosedError
            If the session is closed.
        """
        with self._pool._call_lock.take():
            if self._pool._rows.next_frame(self._running_row()):
                raise UsageError(f"session {self.name!r} has made chunks: record it before its first one")
            if self.beginning is None:
                raise UsageError(
                    f"session {self.name!r} was restored or has a mixed prompt: record one right after it was opened"
                )
            begin |= {**vars(self.beginning), "controls": self._controls.state()}
            recording = self._recording = Recording(begin)
            self._controls.recorded(recording)
        return recording

    def replay(self, entry: Entry) -> None:
        """Do what an entry of a recording says: `Recording.entries` or `read_recording` gives them. An entry is due
        when as many chunks were made as it has.

        Raises
        ------
        UsageError
            If the entry does not fit the artifact.
        """
        if not isinstance(entry, Entry) or not isinstance(entry.event, Mapping):
            raise UsageError(f"entry is {shown(entry)}, expected one of a recording's entries")
        if entry.what == "event":
            self._controls[entry.control].take(entry.event)
        elif entry.what == "begin":
            if "controls" in entry.event:  # else as a session begins
                self._controls.load(entry.event["controls"])
        elif entry.what == CHUNK_INPUTS:
            self._replayed_inputs = entry.event
        elif entry.what in CHANGES:
            try:
                getattr(self, CHANGES[entry.what])(**entry.event)
            except TypeError as fault:
                raise UsageError(f"a recording's {entry.what} has other arguments: {fault}") from None
        elif entry.what != "end":
            raise UsageError(f"entry is of the kind {shown(entry.what)}, which no recording has")

    def _note(self, what: str, **event: Any) -> None:
        if self._recording is not None:
            self._recording.note(what, event)

    def _begins(self, **changed: Any) -> None:
        if self.beginning is not None:
            self.beginning = replace(self.beginning, **changed)

    def chunk_inputs(self, given: Inputs | None) -> Inputs | None:
        """Return the inputs of the next chunk: those that are given, for the rest those that a replayed recording gave
        it, and those of the controls."""
        replayed = self._replayed_inputs
        self._own_inputs = {**replayed, **mapping_of(given, "inputs")} if replayed else given
        return self._controls.inputs(self._own_inputs)

    def _advance(self, result: Chunk) -> Chunk:
        if self._recording is not None:
            if self._own_inputs:
                self._recording.note(CHUNK_INPUTS, self._own_inputs)
            self._recording.chunks += 1
        self._replayed_inputs = self._own_inputs = None
        heard_at = self._controls.heard_at()
        self._controls.advance()
        return result if heard_at is None else replace(result, heard_at=heard_at)

    def _restored(self, row: int) -> None:
        self._controls.go_to(self._pool._rows.next_frame(row))

    def run_chunk(self, inputs: Inputs | None = None) -> Chunk:
        """Make the next chunk of this session alone; see `Pool.run`.

        Parameters
        ----------
        inputs : mapping of str to array, optional
            Inputs that the caller supplies for this chunk, by name: [*shape] in the input's dtype (float32 for
            bfloat16). The session's controls give the inputs that are left out.

        Returns
        -------
        Chunk
            The new chunk, whose latents the session's next chunk overwrites.

        Raises
        ------
        UsageError
            If an input of the chunk is invalid, or a required input is missing; the message lists the artifact's
            inputs. Also if each call of the artifact carries several sessions.
        SessionClosedError
            If the session is closed.
        """
        return self._pool.run([self], [inputs])[0]

    def request_chunk(self, due: float, inputs: Inputs | None = None) -> PendingResult:
        """Request the next chunk by a due time; `Pool.serve_next` makes the chunk. A second request replaces the due
        time and the inputs of the first.

        Parameters
        ----------
        due : float
            Time by which the chunk should be ready, in seconds of the pool's clock: `time.monotonic` by default.
        inputs : mapping, optional
            Inputs that the caller supplies for the chunk, by name; see `run_chunk`. What the session's controls give is
            asked for when the chunk is queued.

        Returns
        -------
        PendingResult
            The requested chunk; the same object for each request until the chunk is queued.

        Raises
        ------
        UsageError
            If the due time is not finite, or an input is invalid or missing.
        SessionClosedError
            If the session is paused or has ended.
        """
        return self._ask(due, inputs)

    def stream(
        self,
        prompt: str | None = None,
        *,
        chunks: int | None = None,
        recache: bool = False,
        inputs: Iterable[Inputs] | None = None,
    ) -> Iterator[NDArray[np.uint8]]:
        """Yield video frames chunk by chunk as they become ready.

        If the device decodes a chunk while it computes the next chunk, one chunk is always queued ahead. If the loop is
        left early, the next call of `stream` yields the queued chunk first.

        Parameters
        ----------
        prompt : str, optional
            A new prompt, used from the next queued chunk on; see `set_prompt`.
        chunks : int, optional
            Number of chunks to make; default: endless.
        recache : bool
            Whether to recompute the cached keys and values with the new prompt; see `set_prompt`.
        inputs : iterable of mappings, optional
            Inputs of each chunk, as `run_chunk` takes them. A chunk's inputs are read when the chunk is queued. If
            decoding runs beside the next chunk, a chunk is queued before the previous chunk is yielded: to react to
            keys at once, call `run_chunk`. The stream ends when the iterable ends.

        Yields
        ------
        numpy.ndarray
            Video frames of a chunk, uint8 [1, T, H, W, 3], owned by the caller.

        Raises
        ------
        UsageError
            If the artifact makes no video frames, only latents.
        SessionClosedError
            If the session is closed.
        """
        if chunks is not None:
            chunks = whole_number(chunks, "chunks", 0)
        if isinstance(inputs, str | bytes | Mapping) or (inputs is not None and not iterates(inputs)):
            raise UsageError(
                f"inputs are a {type(inputs).__name__}, expected a mapping for each chunk, in a list"
            )
        recache = flag(recache, "recache")
        with self._pool._call_lock.take():
            self._pool._rows.check_open()
            if self.manifest.workload.video is None:
                raise UsageError(NO_VIDEO)
            ahead = int(self.overlaps_decoding)
            if prompt is not None:
                self.set_prompt(prompt, recache=recache)
            elif recache:
                raise UsageError("recache without a prompt does nothing; give both, or neither")
        return VideoStream(self.run_chunk, self._ahead, ahead, chunks, inputs)

    def set_prompt(self, prompt: str, *, recache: bool = False, weight: float = 1.0) -> None:
        """Set the prompt to a sentence, from the next chunk on, or mix it with the one before.

        Parameters
        ----------
        prompt : str
            The new prompt, a sentence.
        recache : bool
            Whether to recompute the keys and values of the cached frames with the new prompt; otherwise old keys and
            values stay until they are evicted.
        weight : float
            The sentence's share of the new text embeddings, above 0 and at most 1; the rest are the embeddings so far.
            With 1/n, 1/(n-1), ..., 1 before n chunks the video fades evenly to the new prompt.

        Raises
        ------
        UsageError
            If the artifact takes no sentences or cannot rebuild its KV cache, the sentence is too long, or the weight
            is out of range.
        EnvironmentLacksError, ArtifactError
            If the prompt cannot be tokenised: the library `tokenizers` is missing, or the artifact's tokenizer file is
            invalid.
        SessionClosedError
            If the session is closed.
        """
        with self._pool._call_lock.take():
            self._pool._rows.set_prompt(self._running_row(), prompt, recache=recache, weight=weight)
            if weight == 1:
                self._begins(prompt=prompt, text=None)
            else:
                self.beginning = None  # no prompt and no embeddings of the caller's are those of the row
            mixed = {} if weight == 1 else {"weight": weight}
            self._note("prompt", prompt=prompt, recache=recache, **mixed)

    def check_prompt(self, prompt: str, *, recache: bool = False) -> None:
        """Raise the error that `set_prompt` would raise for a prompt; the session does not change.

        The parameters and errors are those of `set_prompt`.
        """
        with self._pool._call_lock.take():
            self._pool._rows.check_prompt(self._running_row(), prompt, recache=recache)

    def set_text(self, text: object, *, recache: bool = False) -> None:
        """Set the prompt to text embeddings, from the next chunk on.

        Parameters
        ----------
        text : array or tensor
            Text embeddings, [1, tokens, text_dim]: the text encoder's output, converted to the buffer's dtype.
        recache : bool
            Whether to recompute the cached keys and values with the new prompt; see `set_prompt`.

        Raises
        ------
        UsageError
            If the embeddings have a wrong shape, or ``recache`` is true and the artifact cannot rebuild its KV cache.
        SessionClosedError
            If the session is closed.
        """
        with self._pool._call_lock.take():
            self._pool._rows.set_text(self._running_row(), text, recache=recache)
            self._begins(prompt=None, text=text)
            self._note("text", text=text, recache=recache)

    def set_inputs(self, inputs: Inputs) -> None:
        """Set inputs that the caller supplies once for a session or prompt, from the next chunk on.

        Parameters
        ----------
        inputs : mapping of str to array
            Array [*shape] of each input, by name. Inputs that are left out keep their values.

        Raises
        ------
        UsageError
            If an input is unknown, or its array has a wrong shape, dtype or value; the message lists the artifact's
            inputs.
        SessionClosedError
            If the session is closed.
        """
        with self._pool._call_lock.take():
            row = self._running_row()
            self._set_inputs(row, inputs)
            self._note("inputs", inputs=inputs)

    def cut(self, *, frames: int = 8) -> None:
        """Begin another scene with the next chunk, as LongLive-2 does at a cut.

        The positions that RoPE counts jump by ``frames`` before the next chunk, and noise is drawn for the new
        positions. The cache keeps the next chunk, beside the sink, until the next cut; without a cut, the oldest chunks
        are evicted. Usually `set_prompt` is called to give the new scene a prompt. After a cut the session refuses
        ``recache``, and `rewind` cannot go back. In an artifact built with ``--window-positions``, positions count the
        frames in the cache and do not jump.

        Parameters
        ----------
        frames : int
            Latent frames that the positions jump, from 0; LongLive-2: 8.

        Raises
        ------
        UsageError
            If the session has made no chunk since it began or since the last cut; if sink and ring are not whole
            chunks; if the layers have rings of several sizes; if the stream leads to a last picture; or if `stream` has
            queued a chunk that was not yielded yet.
        SessionClosedError
            If the session is closed.
        """
        with self._pool._call_lock.take():
            row = self._running_row()
            self._check_idle()
            self._pool._rows.cut(row, frames)
            self._note("cut", frames=frames)
            self._controls.go_to(self._pool._rows.next_frame(row))

    def rewind(self, chunk: int) -> None:
        """Go back to the state before chunk number ``chunk`` was made. The next chunk that the session makes has the
        number ``chunk`` again, and is made from the same noise.

        `rewind` restores the KV cache, the inputs of the chunks, the VAE's caches, the place in the voice, the actions
        before the chunk and where the camera stood. The prompt, inputs per session and what controls have taken keep
        their present values after `rewind`. Until the cache evicts its first frame, `rewind` can reach any chunk. After
        the first eviction `rewind` can reach only the last chunk, and no chunk if the last chunk failed. `rewind` can
        reach no chunk after a cut to another scene, or after a rebuild of the cache that left out evicted frames.
        `rewind` restores the VAE's caches by decoding all earlier chunks again, so an artifact that decodes video can
        go back only while the latents of all chunks are kept.

        Parameters
        ----------
        chunk : int
            Number of the first chunk to replace, which is also the number of chunks to keep.

        Raises
        ------
        UsageError
            If the session cannot go back so far, or `stream` has queued a chunk that it has not yielded yet.
        SessionClosedError
            If the session is closed.
        """
        with self._pool._call_lock.take():
            row = self._running_row()
            self._check_idle()
            self._pool._rows.rewind(row, chunk)
            self._note("rewind", chunk=chunk)
            self._controls.go_to(self._pool._rows.next_frame(row))

    def restart(self, *, seed: int | None = None, image: object = None, reference: object = None) -> None:
        """Restart the stream at frame 0 with an empty cache and the same prompt.

        A chunk that `stream` has queued and not yielded is dropped, with the inputs that were read for it.

        Parameters
        ----------
        seed : int, optional
            New seed of the noise; default: the stream keeps its seed.
        image : array, optional
            Start picture, uint8 [H, W, 3]; default: that of the control of pictures, else a picture that is a condition
            of the model stays, and the stream begins without conditioning frames.
        reference : array, optional
            New reference frames; default: the stream keeps its reference frames.

        Raises
        ------
        UsageError
            If the seed, the picture or a reference frame is invalid; the stream is not changed.
        SessionClosedError
            If the session is closed.
        """
        with self._pool._call_lock.take():
            row = self._running_row()
            opening, changed = self._controls.opening(), {"image": image, "reference": reference}
            changed = {name: opening.get(name) if own is None else own for name, own in changed.items()}
            self._pool._rows.restart(row, seed=seed, **changed)
            began = {name: value for name, value in {"seed": seed, **changed}.items() if value is not None}
            # a first frame is dropped, and a condition of the model stays
            dropped = {} if picture_input(self.manifest) is not None else {"image": None}
            self._begins(conditioning_latents=None, **{**dropped, **began})
            inputs = opening.get("inputs", {})
            if image is not None:  # of which the rows have made what follows from a picture
                inputs = without_kinds(self.manifest, inputs, MADE_OF_PICTURE)
                if self.beginning is not None:
                    began_with = self.beginning.inputs or {}
                    self._begins(inputs=without_kinds(self.manifest, began_with, MADE_OF_PICTURE))
            if inputs:
                self._set_inputs(row, inputs)
            self._controls.reset()
            self._ahead.clear()
            self._replayed_inputs = None
            given = {"seed": seed, "image": image, "reference": reference}
            self._note("restart", **{name: value for name, value in given.items() if value is not None})

    def _set_inputs(self, row: int, inputs: Inputs) -> None:
        self._pool._rows.set_inputs(row, inputs)
        if self.beginning is not None:
            self._begins(inputs={**(self.beginning.inputs or {}), **mapping_of(inputs, "inputs")})

    @property
    def manifest(self) -> VideoManifest:
        """The artifact's manifest, with the number of denoise passes that this session uses."""
        return self._pool._rows.manifest

    @property
    def stats(self) -> SessionStats:
        """Counters of the session's pool."""
        return self._pool._rows.stats

    @property
    def overlaps_decoding(self) -> bool:
        """Whether a chunk is decoded while the next one is computed."""
        return self._pool._rows.overlaps_decoding

    def _check_idle(self) -> None:
        if self._ahead:
            raise UsageError(
                f"session {self.name!r} has a chunk that `stream` has not given out; take it first"
            )

    def _ended(self) -> None:
        self._ahead.clear()
