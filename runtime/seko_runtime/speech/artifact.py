"""An open speech artifact, which opens sessions and pools and verifies recorded results."""

from __future__ import annotations

from typing import cast

from seko_runtime.errors import UsageError
from seko_runtime.host.faults import machine_faults
from seko_runtime.sessions.artifact import OpenArtifact, OpenedFiles
from seko_runtime.sessions.call_lock import under_lock
from seko_runtime.sessions.engines import Engines
from seko_runtime.sessions.snapshot import checked_key
from seko_runtime.speech.golden import StepError, replay
from seko_runtime.speech.local_rows import LocalSpeechRows
from seko_runtime.speech.manifest import SpeechManifest
from seko_runtime.speech.pool import SpeechPool
from seko_runtime.speech.session import SpeechSession


class SpeechArtifact(OpenArtifact[SpeechManifest]):
    """A speech artifact with loaded engines and weights on the device; its sessions share both.

    `open_artifact` returns a `SpeechArtifact` for an artifact of the speech workload. Use a speech artifact as a
    context manager, or call `close()`. Any thread may call the artifact's methods: opening and closing wait for each
    other.

    Parameters
    ----------
    files, engines
        The files and engines of the opened artifact; see `OpenArtifact`.
    """

    def __init__(self, files: OpenedFiles[SpeechManifest], engines: Engines) -> None:
        super().__init__(files, engines)
        self._golden = files.golden

    @machine_faults()
    @under_lock
    def open_session(
        self, *, seed: int = 0, guidance: float | None = None, temperature: float | None = None
    ) -> SpeechSession:
        """Open a session with a pool of its own, whose cache has all positions of the artifact. The session lives until
        its own `close()` or the artifact's `close()`. For several sessions use `open_pool`: the sessions of one pool
        share memory and engine calls.

        The parameters and errors are those of `SpeechPool.open_session`. To choose a session's voice, assign the result
        of `SpeechSession.encode_voice` to its ``voice``.
        """
        pool = self._open_pool(None)
        return self._alone(
            pool,
            lambda: pool.open_session(
                seed=seed,
                guidance=guidance,
                temperature=temperature,
                positions=self.manifest.workload.positions,
            ),
        )

    @machine_faults()
    @under_lock
    def open_pool(self, *, snapshot_key: bytes | None = None) -> SpeechPool:
        """Open a pool, whose sessions share the memory and engine calls of the artifact. The pool lives until its own
        `close` or the artifact's `close`.

        Parameters
        ----------
        snapshot_key : bytes, optional
            A secret of at least 32 bytes. Snapshots then end in the HMAC-SHA256 of their content, and only snapshots
            with the same key are restored. Without a key, only snapshots without one are restored.

        Raises
        ------
        UsageError
            If ``snapshot_key`` is shorter than 32 bytes or not bytes.
        DeviceMemoryError
            If the pool does not fit on the device; nothing was allocated.
        SessionClosedError
            If the artifact is closed.
        """
        pool = self._open_pool(checked_key(snapshot_key))
        self._keep(pool)
        return pool

    def _open_pool(self, key: bytes | None) -> SpeechPool:
        rows = cast(LocalSpeechRows, self.engines.open_rows({}))
        return SpeechPool(rows, digest=self.digest, snapshot_key=key)

    def verify(self) -> list[StepError]:
        """Replay the recorded prefill, steps and voice of the golden, and compare the results.

        Raises
        ------
        UsageError
            If the artifact has no golden.
        SessionClosedError
            If the artifact is closed.
        """
        golden = self.manifest.workload.golden
        if golden is None:
            raise UsageError("this artifact holds no golden to verify against; rebuild it")
        with self.open_pool() as pool:
            return [*replay(pool, golden, self._golden)]


def speech_artifact(artifact: OpenArtifact[SpeechManifest]) -> SpeechArtifact:
    """Return an open artifact typed as a `SpeechArtifact`; UsageError if the artifact's workload is not speech."""
    if not isinstance(artifact, SpeechArtifact):
        raise UsageError(f"the artifact's workload is {artifact.manifest.workload.kind!r}, expected 'speech'")
    return artifact
