"""A video job, which makes a video chunk by chunk into a file while the live sessions leave time."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime import Chunk, VideoManifest
from seko_runtime.errors import UsageError
from seko_runtime.sessions.session import PendingResult
from seko_runtime.video.sinks import Mp4Sink
from seko_serve import tracing
from seko_serve.errors import ServeError
from seko_serve.live.content import answer_to
from seko_serve.video.content import VideoContent
from seko_serve.video.opening import Opening

NO_SPACE = errno.ENOSPC, errno.EDQUOT
LATER_S = 3600.0  # nobody waits for its chunks
AHEAD = 2  # chunks that are made and not yet written
_LOG = logging.getLogger("seko_serve")


class VideoFile:
    """An mp4 file of mode 0600, which gets its name only when it is complete.

    Parameters
    ----------
    path : Path
        Path that the file gets when it is complete.
    manifest : VideoManifest
        The manifest of a video artifact.
    opening : Opening
        The conditions with which the video begins, of which the voice is used.
    """

    def __init__(self, path: Path, manifest: VideoManifest, opening: Opening) -> None:
        table = manifest.workload.video
        assert table is not None  # else the server does not start
        self._path, self._hidden = path, path.with_name(f".{path.name}.writing")
        descriptor = os.open(self._hidden, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        self._file = os.fdopen(descriptor, "wb")
        sound = None if opening.voice is None else np.clip(opening.voice.sum(0), -1, 1).astype(np.float32)
        try:
            self._sink = Mp4Sink(
                self._file,
                table.height,
                table.width,
                manifest.workload.stream.fps,
                preview=False,
                sound=sound,
            )
        except BaseException:
            self._file.close()
            self._hidden.unlink()
            raise

    def write(self, frames: NDArray[np.uint8]) -> None:
        """Append video frames [T, H, W, 3]."""
        self._sink.write(frames)

    def close(self, *, whole: bool) -> None:
        """Close the file. If ``whole`` is true, the file gets its final name; otherwise the file is removed."""
        try:
            try:
                self._sink.close(whole=whole)
            finally:
                self._file.close()  # on a full disk it fails, too
            if whole:
                os.replace(self._hidden, self._path)
        finally:
            self._hidden.unlink(missing_ok=True)


class BackgroundVideo:
    """A video that is made and written in the background; the device's thread runs it as its `BackgroundStream`.

    Parameters
    ----------
    name, tenant : str
        Id of the video, and name of the tenant that requested it.
    manifest : VideoManifest
        The artifact's manifest.
    opening : Opening
        The conditions with which the video begins.
    frames : int
        Number of video frames of the whole video.
    path : Path
        Path of the video's file.
    workers : Executor
        A thread pool of one thread that encodes frames. A thread of each chunk reads the chunk's frames, so that the
        device's thread never waits for the encoder.
    report : callable
        Function that any thread calls with the number of frames written so far, whether the video has ended, and the
        error or None.
    wake : callable
        Function that tells the device's thread that the next chunk may be requested.
    trace : Parent
        The span of the request for the video.
    """

    def __init__(
        self,
        name: str,
        tenant: str,
        manifest: VideoManifest,
        opening: Opening,
        frames: int,
        path: Path,
        workers: Executor,
        report: Callable[[int, bool, ServeError | None], None],
        wake: Callable[[], None],
        trace: tracing.Parent = None,
    ) -> None:
        self._name, self._tenant, self._manifest, self._opening = name, tenant, manifest, opening
        self._content = VideoContent(manifest, opening)
        self._frames, self._path, self._workers = frames, path, workers
        self._report, self._wake = report, wake
        self.row: Any = None
        self.trace = trace
        self.pending: PendingResult | None = None
        self._file: VideoFile | None = None
        self._written = 0
        self._chunks_made = 0  # counted by the device's thread
        self._chunks_done = 0  # counted by the worker
        self._idle = threading.Event()  # no chunk is being read: the row may be moved
        self._idle.set()
        self._over = False  # no further chunk is made
        self._filed = False  # the file is whole, or gone

    # -- the device's thread -----------------------------------------------------------------------------------

    @property
    def holds_row(self) -> bool:
        """Whether the video has a row of the pool."""
        return self.row is not None and not self.row.paused

    def ready(self) -> bool:
        """Return whether the video's next chunk may be made now."""
        return not self._over and self._idle.is_set() and self._chunks_made - self._chunks_done < AHEAD

    def take_row(self, pool: Any) -> None:
        """Take a free row of the pool; after `yield_row`, continue from the stored state. The method raises errors of
        the runtime unchanged.
        """
        if self.row is not None:
            self.row.resume()
            return
        self._file = VideoFile(self._path, self._manifest, self._opening)
        self.row = self._content.open(pool, self._name, self._tenant)

    def yield_row(self) -> None:
        """Move the video's state to the host and free the row, for a live session."""
        self._idle.wait()
        self.row.pause()

    def request(self, now: float) -> None:
        """Request the video's next chunk from the pool."""
        self.pending = self._content.ask(self.row, now + LATER_S)

    def accept_chunk(self, chunk: Chunk) -> None:
        """Accept a chunk, and begin to read its frames."""
        self.pending = None
        self._content.accept_chunk(chunk)
        self._chunks_made += 1
        self._idle.clear()
        try:
            threading.Thread(target=self._read, args=(chunk,), name="seko-video-read", daemon=True).start()
        except BaseException:
            self._idle.set()
            raise

    def failed(self, error: Exception) -> None:
        """End the video with an error: a chunk cannot be made, or the video was removed."""
        self._over = True
        self._workers.submit(self._end, error)

    def close(self) -> None:
        """Free the video's row of the pool; a second call does nothing."""
        self._idle.wait()
        self._over = True
        row, self.row, self.pending = self.row, None, None
        if row is not None:
            row.close()

    # -- a thread of the chunk ---------------------------------------------------------------------------------

    def _read(self, chunk: Chunk) -> None:
        try:
            work = partial(self._write, chunk.video()[0])
        except Exception as error:
            work = partial(self._end, error)
        with suppress(RuntimeError):  # the worker has ended, because the device is lost
            self._workers.submit(work)
        self._idle.set()  # after `submit`: the next chunk is written after this one
        self._wake()

    # -- the worker --------------------------------------------------------------------------------------------

    def _write(self, frames: NDArray[np.uint8]) -> None:
        if self._filed:
            return
        try:
            assert self._file is not None  # made with the row
            self._file.write(frames[: self._frames - self._written])
            self._written = min(self._frames, self._written + len(frames))
            if self._written == self._frames:
                self._end(None)
            else:
                self._report(self._written, False, None)
        except Exception as error:
            self._end(error)
        self._chunks_done += 1
        self._wake()

    def _end(self, error: Exception | None) -> None:
        if self._filed:
            return
        self._over = self._filed = True
        try:
            if self._file is not None:
                self._file.close(whole=error is None)
        except Exception as fault:
            error = error or fault
        if error is None:
            self._report(self._written, True, None)
            return
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            _LOG.error("a video's file cannot be written: %s", error.strerror, extra={"video": self._name})
            error = ServeError("full", "the server has no space for the video's file")
        elif not isinstance(error, ServeError):
            if not isinstance(error, UsageError):
                _LOG.error("a video failed", extra={"video": self._name}, exc_info=error)
            error = answer_to(error, "the video could not be made")
        self._report(self._written, True, error)
