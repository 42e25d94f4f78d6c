"""A pool of video streams; each engine call makes the next chunk of some of the streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import mapping_of, whole_number
from seko_runtime.controls import Controls
from seko_runtime.controls.registry import checked_controls
from seko_runtime.errors import UsageError
from seko_runtime.sessions.pool import RowPool
from seko_runtime.sessions.session import SessionLeakWarning
from seko_runtime.video.chunk import Chunk, SessionStats
from seko_runtime.video.clocks import checked_seed
from seko_runtime.video.inputs import Inputs, check_call
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.row_numbers import stream_content
from seko_runtime.video.rows import Beginning, VideoRows
from seko_runtime.video.session import Session

__all__ = ["Pool", "Session", "SessionLeakWarning"]

MAX_STEP = 1 << 31  # a cache sample takes every so many-th token


class Pool(RowPool[Session, Inputs | None, Chunk]):
    """A pool of a video artifact: memory for a fixed number of sessions, which share engine calls.

    If the artifact was built with ``--sessions``, an engine call makes the next chunk of some of the sessions;
    otherwise each call makes a chunk for every session.

    All methods of a pool, its sessions and their chunks may be called from any thread: one call runs at a time, and the
    others wait. In a process forked from the process that opened the pool, the methods raise a ForkedProcessError.

    Parameters
    ----------
    rows : VideoRows
        The streams of the pool, ready to run. The pool owns these streams and closes them.
    digest : str
        SHA-256 of the artifact, which the pool's snapshots contain.
    clock, snapshot_key
        The parameters of `RowPool` with the same names.
    """

    manifest: VideoManifest
    _rows: VideoRows

    def __init__(
        self,
        rows: VideoRows,
        *,
        digest: str = "",
        clock: Callable[[], float] = time.monotonic,
        snapshot_key: bytes | None = None,
    ) -> None:
        digests = digest, stream_content(rows.manifest) or digest
        super().__init__(rows, Session, digests=digests, clock=clock, snapshot_key=snapshot_key)

    def open_session(
        self,
        *,
        seed: int = 0,
        prompt: str | None = None,
        text: object = None,
        image: object = None,
        conditioning_latents: object = None,
        reference: object = None,
        inputs: Inputs | None = None,
        controls: Controls | None = None,
        name: str = "",
        lease_s: float | None = None,
        tenant: str | None = None,
    ) -> Session:
        """Open a session on a free row of the pool; nothing of the row's last session remains.

        Parameters
        ----------
        seed : int
            Seed of the random noise from which the video is made.
        prompt, text
            The prompt, as a sentence or as text embeddings [1, tokens, text_dim]. An artifact that takes text needs
            either ``prompt`` or ``text``.
        image, conditioning_latents
            A picture uint8 [H, W, 3], or latents [C, n, h, w], with which the stream begins.
        reference
            The reference frames, required if the artifact was built with reference frames; see
            `reference_frames.set_reference`.
        inputs
            Model inputs that the caller supplies once for a session or prompt; see `Session.set_inputs`.
        controls : Controls, optional
            The controls of the session, of `controls_of`, which may have taken events before; default: new ones.
        name : str
            Name of the session in error messages; default: a number.
        lease_s : float, optional
            Lease of the session in seconds, finite and above 0. A running or paused session ends if it is neither run
            nor renewed for ``lease_s`` seconds.
        tenant : str, optional
            Name of the session's owner. Sessions of one tenant share cached prompts, which other tenants never see. A
            session without a tenant uses only its own cached prompts.

        Raises
        ------
        PoolFullError
            If every row of the pool belongs to a session.
        UsageError
            If an argument is invalid; the row stays free.
        SessionClosedError
            If the pool is closed.
        """
        seed = checked_seed(seed)
        if controls is not None:
            opening = opening_of(controls, image, reference)
            image, reference = opening.get("image", image), opening.get("reference", reference)
            inputs = {**opening.get("inputs", {}), **mapping_of(inputs, "inputs")}
        beginning = Beginning(seed, prompt, text, image, conditioning_latents, reference, inputs)

        def prepare(session: Session) -> None:
            session.beginning = beginning
            if controls is not None:
                session.controls = controls

        return self._open(lambda row: self._rows.begin(row, beginning), name, lease_s, tenant, prepare)

    def check_prompt(self, prompt: str) -> None:
        """Raise the error that `open_session` would raise for a prompt. A sentence that is too long is an error; any
        sentence is an error if the artifact has no text encoder.

        Raises
        ------
        UsageError
            If the artifact takes no sentences, or the sentence is too long.
        EnvironmentLacksError, ArtifactError
            If the prompt cannot be tokenised; see `Session.set_prompt`.
        SessionClosedError
            If the pool is closed.
        """
        with self._call_lock.take():
            self._rows.check_prompt(None, prompt)

    def run(self, sessions: Sequence[Session], inputs: Sequence[Inputs | None] | None = None) -> list[Chunk]:
        """Make the next chunk of several sessions in one call.

        The sessions of a call may differ in prompt, in the number of their chunk and in how full their caches are. If
        the artifact has separate engines for full caches, a call with full and filling caches takes two launches,
        otherwise one launch. If the call fails, no session has advanced, and the same call again gives the same bytes.

        Parameters
        ----------
        sessions : sequence of Session
            Distinct sessions of this pool, at most as many as the largest engine call carries; if the artifact was
            built without ``--sessions``, all sessions of the pool.
        inputs : sequence of mappings, optional
            Inputs that the caller supplies for the chunk of each session, in the order of ``sessions``; see
            `Session.run_chunk`.

        Returns
        -------
        list of Chunk
            The new chunk of each session, valid until the session's next chunk.

        Raises
        ------
        UsageError
            If there are too many sessions for one engine call, or an input is invalid.
        SessionClosedError
            If one of the sessions has ended.
        """
        return self._run(sessions, inputs)

    def _inputs_of(self, sessions: Sequence[Session], inputs: Any) -> list[Inputs | None]:
        given = [None] * len(sessions) if inputs is None else inputs
        check_call(sessions, given)
        return [session.chunk_inputs(own) for session, own in zip(sessions, given, strict=True)]

    def cache_sample(self, step: int) -> dict[str, NDArray[np.float32]]:
        """Copy every ``step``-th token of the KV cache buffers to the host; waits for the last call.

        Parameters
        ----------
        step : int
            Distance between sampled tokens, at least 1; see `Golden.cache_step`.

        Returns
        -------
        dict of str to numpy.ndarray
            The sample of each KV cache buffer: float32, or integers for one-byte codes. The sample covers as many of
            the first rows as the largest engine call carries.

        Raises
        ------
        SessionClosedError
            If the pool is closed.
        UsageError
            If ``step`` is less than 1.
        """
        step = min(whole_number(step, "step", 1), MAX_STEP)
        with self._call_lock.take():
            return self._rows.cache_sample(step)

    @property
    def stats(self) -> SessionStats:
        """Counters of all sessions of the pool together."""
        return self._rows.stats


def opening_of(controls: Controls | None, image: object, reference: object) -> dict[str, Any]:
    """Return the arguments of `Pool.open_session` that follow from the events of a session's controls so far; empty
    without controls.

    Raises
    ------
    UsageError
        If ``controls`` are none of `controls_of`, or the caller gives ``image`` or ``reference`` beside a control's.
    """
    if controls is None:
        return {}
    opening = checked_controls(controls).opening()
    given = image is not None or reference is not None
    if given and {"image", "reference"} & set(opening):
        raise UsageError("found pictures as arguments and as events of a control; give them once")
    return opening
