"""Video jobs of the server. Jobs wait, and run one after another while the live sessions leave time. The files of
finished jobs expire."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from seko_serve import tracing
from seko_serve.errors import ServeError
from seko_serve.live.device import Device, DeviceEndedError
from seko_serve.store.base import StoreError
from seko_serve.store.own_folder import OwnFolder
from seko_serve.video.background import BackgroundVideo
from seko_serve.video.facts import video_manifest
from seko_serve.video.opening import Opening

MAX_FOLDER_BYTES = 1 << 30
KEPT_S = 3600.0  # from a video's end to its removal
REAP_S = 5.0
AGAIN_S = 1.0  # after which a client asks again for the file of a video that is being made
NICE = 10  # niceness of the thread that encodes videos: encoders of live sessions go first
ID = "video_"  # first letters of every id
_FILE = "seko-serve-"  # and of every file, before the id: cameras and people also write video_SOMETHING.mp4
_OWN = re.compile(rf"\.?{_FILE}{ID}[\w-]{{16}}\.mp4(?:\.writing)?", re.ASCII)
_LOG = logging.getLogger("seko_serve")


@dataclass
class Video:
    """A video that a client requested.

    Parameters
    ----------
    id, tenant : str
        Id of the video, and name of the tenant that requested it.
    opening : Opening
        The prompt, seed, picture and other conditions with which the video begins.
    frames : int
        Number of video frames of the whole video.
    created : float
        Time at which the video was requested, in seconds since 1970.
    """

    id: str
    tenant: str
    opening: Opening
    frames: int
    created: float
    status: str = "queued"
    """queued, in_progress, completed or failed."""
    written: int = 0
    """Number of video frames in the video's file."""
    ended: float | None = None
    """Time at which the video was completed or failed, in seconds since 1970."""
    error: ServeError | None = None
    """The error with which the video failed."""
    trace: tracing.Parent = field(default_factory=tracing.current)
    """The span of the request for the video."""

    @property
    def expires(self) -> float | None:
        """Time at which the video's file is removed, in seconds since 1970; None before the video is finished."""
        return None if self.ended is None else self.ended + KEPT_S


@dataclass(frozen=True)
class _Current:
    """The video that is being made, and the event that is set when its job has ended."""

    video: Video
    stream: BackgroundVideo
    over: asyncio.Event


class VideoJobs:
    """The video jobs of a server. Only the event loop's thread may call the methods of `VideoJobs`.

    Parameters
    ----------
    device : Device
        The thread that owns the device and its pool.
    most : int
        Largest number of videos that are waiting, running or finished at a time; 0: requests for videos are refused.
    folder : Path, optional
        Folder of the video files; default: a temporary folder, which `stop` removes.
    tenants : int
        Number of tenants of the server. If there are several, each has at most half of the videos, rounded up, and
        half of the folder.
    """

    def __init__(self, device: Device, most: int, folder: Path | None = None, *, tenants: int = 1) -> None:
        self._device, self._most = device, most
        self._shares = 2 if tenants > 1 else 1
        self._folder = OwnFolder(folder, "seko-serve-videos-", "--video-folder", _OWN)
        self._videos: dict[str, Video] = {}
        self._worker = ThreadPoolExecutor(
            1, thread_name_prefix="seko-video", initializer=partial(os.nice, NICE)
        )
        self._turns: dict[
            str, int
        ] = {}  # by tenant: number of the last turn, counted over all tenants, that made a video of it
        self._current: _Current | None = None
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Make the folder of the video files, and begin to run jobs.

        Raises
        ------
        StoreError
            If the folder of the video files cannot be made, another process uses it, or it holds other files.
        """
        self._folder.claim()  # without the files of an earlier process, which alone knew whose they are
        self._tasks = [asyncio.create_task(self._make_all()), asyncio.create_task(self._reap())]

    async def stop(self) -> None:
        """End the running job, and remove a temporary folder."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._current is not None:
            await self._free(self._current.stream)
        await asyncio.to_thread(self._worker.shutdown)
        self._folder.close()

    def add(self, tenant: str, opening: Opening, frames: int) -> Video:
        """Queue a requested video.

        Raises
        ------
        ServeError
            If there are too many videos, if the video files fill the folder, or if the artifact cannot make such a
            video.
        """
        manifest = self._device.manifest
        if not self._most:
            raise ServeError("unsupported", "this server makes no videos (--videos 0)")
        if manifest.offloads_cache:
            raise ServeError(
                "unsupported",
                "sessions of this artifact (--offload-cache) cannot give their row to others: it makes no videos",
            )
        try:
            folder = self._folder.path()  # what removes old temporary files may have removed it
        except StoreError as error:
            _LOG.error("no video can be made: %s", error)
            raise ServeError("full", "the server cannot keep a video's file") from None
        self._check_space(self.of(tenant), folder)
        video = Video(ID + secrets.token_urlsafe(12), tenant, opening, frames, time.time())
        if not self._turns:  # before the first one
            self._worker.submit(self._folder.remove_left)
        self._videos[video.id] = video
        self._news.set()
        return video

    def _check_space(self, own: list[Video], folder: Path) -> None:
        """Raise a ServeError if the server, or the tenant of these videos, has as many videos as allowed, or if their
        files are as large as allowed."""
        every = list(self._videos.values())
        if len(every) >= self._most or _bytes_in(folder) >= MAX_FOLDER_BYTES:
            raise _too_many(every, "too many videos wait or are kept; delete some")
        size = sum(_bytes_of(self._path(video)) for video in own)
        if len(own) >= -(-self._most // self._shares) or size >= MAX_FOLDER_BYTES // self._shares:
            raise _too_many(own, "too many videos of this API key wait or are kept; delete some")

    @property
    def count(self) -> int:
        """Number of videos that wait, are made, or are kept."""
        return len(self._videos)

    def find(self, name: str, tenant: str) -> Video:
        """Return the video with an id; ServeError if there is no such video, or the video is another tenant's."""
        video = self._videos.get(name)
        if video is None or video.tenant != tenant:
            raise ServeError("not_found", "there is no such video")
        return video

    def of(self, tenant: str) -> list[Video]:
        """Return the videos of a tenant, newest first."""
        return [video for video in reversed(self._videos.values()) if video.tenant == tenant]

    def file(self, video: Video) -> Path:
        """Return the path of a video's file; ServeError if the video is not completed, or its file is gone."""
        if video.status != "completed":
            again = AGAIN_S if video.status in ("queued", "in_progress") else None
            raise ServeError("conflict", f"the video is {video.status}", retry_after=again)
        path = self._path(video)
        if not path.is_file():
            raise ServeError("not_found", "the video's file was removed on the server")
        return path

    async def remove(self, video: Video) -> None:
        """Remove a video and its file; a running job ends."""
        self._videos.pop(video.id, None)
        if self._current is not None and self._current.video is video:
            self._current.over.set()
            await self._free(self._current.stream)
        await self._remove_file(video)

    async def _remove_file(self, video: Video) -> None:
        """Remove a video's file in the thread that writes it, so that the file does not get its name afterwards."""
        remove = partial(self._path(video).unlink, missing_ok=True)
        await asyncio.get_running_loop().run_in_executor(self._worker, remove)

    def _path(self, video: Video) -> Path:
        return self._folder.path() / f"{_FILE}{video.id}.mp4"

    def _next(self) -> Video | None:
        """Return the video that is made next: the oldest video of the tenant that has waited longest for its turn."""
        waiting = [video for video in self._videos.values() if video.status == "queued"]
        return min(waiting, key=lambda video: self._turns.get(video.tenant, 0), default=None)

    async def _make_all(self) -> None:
        """Make the videos one after another. An error of one video does not end the loop."""
        turn = 0
        while True:
            video = self._next()
            if video is None:
                self._news.clear()
                await self._news.wait()
                continue
            turn += 1
            self._turns[video.tenant] = turn
            try:
                await self._make(video)
            except Exception:
                _LOG.exception("a video cannot be made", extra={"video": video.id})
                if video.ended is None:
                    error = ServeError("internal", "the video could not be made")
                    self._note(video, video.written, asyncio.Event(), error)
            self._current = None

    async def _make(self, video: Video) -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def report(written: int, ended: bool, error: ServeError | None) -> None:
            loop.call_soon_threadsafe(self._note, video, written, over if ended else None, error)

        stream = BackgroundVideo(
            video.id,
            video.tenant,
            video_manifest(self._device.manifest),
            video.opening,
            video.frames,
            self._path(video),
            self._worker,
            report,
            self._device.wake,
            video.trace,
        )
        self._current = _Current(video, stream, over)
        await self._device.call(lambda _: self._device.run_in_background(stream))
        await over.wait()
        await self._free(stream)
        if video.id not in self._videos:  # it was removed meanwhile
            await self._remove_file(video)

    def _note(self, video: Video, written: int, over: asyncio.Event | None, error: ServeError | None) -> None:
        """Record how much of a video is written; with ``over``, the event of its job, also that it has ended."""
        video.status, video.written = "in_progress", written
        if over is None:
            return
        video.status, video.error = ("completed" if error is None else "failed"), error
        video.ended = time.time()
        _LOG.info("video ended", extra={"video": video.id, "status": video.status})
        over.set()

    async def _free(self, stream: BackgroundVideo) -> None:
        """Free the row of a video's stream, if the stream has not ended by itself."""

        def close(_: object) -> None:
            self._device.remove(stream)
            stream.failed(ServeError("conflict", "the video was removed"))
            stream.close()

        with suppress(DeviceEndedError):  # the pool ended with the device
            await self._device.call(close)

    async def _reap(self) -> None:
        """Remove the videos whose files have expired. An error of one video does not end the loop."""
        while True:
            await asyncio.sleep(REAP_S)
            await self._remove_expired()

    async def _remove_expired(self) -> None:
        """Remove the videos whose files have expired. A method of its own, so that no video is kept while `_reap`
        sleeps."""
        now = time.time()
        for video in list(self._videos.values()):
            if video.expires is None or video.expires > now:
                continue
            try:
                await self.remove(video)
            except Exception:
                _LOG.exception("an expired video's file cannot be removed", extra={"video": video.id})


def _too_many(videos: list[Video], message: str) -> ServeError:
    """Return the error that asks to come back when the first of these videos has expired."""
    expiries = [video.expires for video in videos if video.expires is not None]
    return ServeError(
        "full", message, retry_after=max(1.0, min(expiries) - time.time()) if expiries else 60.0
    )


def _bytes_in(folder: Path) -> int:
    """Return the size of all files in a folder."""
    return sum(map(_bytes_of, folder.iterdir()))


def _bytes_of(file: Path) -> int:
    """Return the size of a file; 0 if the file does not exist, as when another thread has renamed or removed it."""
    with suppress(FileNotFoundError):
        return file.stat().st_size
    return 0
