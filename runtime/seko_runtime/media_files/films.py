"""Reader of the video frames of a film, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import DecodingError, InputFileError
from seko_runtime.format.manifest import MAX_PIXELS
from seko_runtime.media_files.containers import (
    PICTURE_FORMATS,
    opened,
    picture_format,
    read_head,
    sound_format,
)
from seko_runtime.media_files.pictures import WHITE, odd_colours, opaque

_NO_TIME = 1 / 25  # seconds of a frame whose file says no times


class Film:
    """A film in a file, whose frames are decoded one by one and not held. A picture is a film of one frame.

    Parameters
    ----------
    path : Path
        The file: MP4, WebM and pictures, by PyAV.
    option : str
        The option that named the file, for messages.

    Attributes
    ----------
    duration_s : float or None
        Length of the film in seconds, if the file says it; 0 for a picture.
    fault : str
        Why the film ended before its end; empty if it did not.

    Raises
    ------
    InputFileError
        If the file cannot be read, holds no video, or has HDR colours.
    VideoWriterError
        If PyAV is not installed.
    """

    def __init__(self, path: Path, option: str = "--video") -> None:
        self.path, self.fault = path, ""
        self._what = f"{option} {path}"
        head = read_head(path, self._what)
        if not head:
            raise InputFileError(f"{self._what} is empty: it has 0 bytes")
        form = picture_format(head)
        if form is None:
            if sound_format(head) is not None:
                raise InputFileError(f"{self._what} holds sound and no video; give a film, such as an MP4")
            raise InputFileError(
                f"{self._what} is no film: its first bytes are of none of {PICTURE_FORMATS}; convert it"
            )
        self._form, self._without_av = form, f"{option} needs it: pip install av"
        with self._opened() as container:
            stream = container.streams.video[0]
            frame = next(container.decode(video=0))
            if colours := odd_colours(frame, form):
                raise InputFileError(f"{self._what} has {colours} colours; convert it to sRGB")
            known = stream.duration and stream.time_base
            self.duration_s = float(stream.duration * stream.time_base) if known else _length(container)

    def frames(self, height: int, width: int) -> Iterator[tuple[float, NDArray[np.uint8]]]:
        """Yield the time of each frame, in seconds from the first one, and the frame, uint8 [rows, columns, 3]: resized
        so that it just covers a picture of this size. A film that cannot be decoded to its end ends early, with
        `fault`."""
        first, before = None, -_NO_TIME
        try:
            with self._opened() as container:
                for frame in container.decode(video=0):
                    time = before + _NO_TIME if frame.time is None else float(frame.time)
                    first = time if first is None else first
                    # times that fall are those of a file that was cut or joined
                    before = max(before, time - first)
                    quarters = frame.rotation // 90
                    sides = (width, height) if quarters % 2 else (height, width)
                    picture = opaque(covering(frame, *sides), WHITE)
                    yield before, np.ascontiguousarray(np.rot90(picture, quarters))
        except DecodingError as fault:
            if first is None:
                raise
            self.fault = str(fault)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        no_film = f"{self._what} is no film with frames of at most {MAX_PIXELS} pixels"
        with opened(self.path, self._form, no_film, self._without_av) as container:
            if not container.streams.video:
                raise InputFileError(f"{self._what} holds sound and no video; give a film with pictures")
            yield container


def covering(frame: Any, height: int, width: int) -> Any:
    """Return a frame that PyAV decoded, resized to the smallest size that covers a picture."""
    scale = max(width / frame.width, height / frame.height)
    size = {"width": round(frame.width * scale), "height": round(frame.height * scale)}
    return frame.reformat(**size, interpolation="AREA" if scale < 1 else "BICUBIC")


def _length(container: Any) -> float | None:
    return None if container.duration is None else container.duration / 1_000_000
