"""Output formats of a run: latents as .npy; pictures as .y4m, .mp4 or raw bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import UsageError, VideoWriterError
from seko_runtime.host.faults import fault_text
from seko_runtime.media_files.sound import VOICE_RATE as RATE
from seko_runtime.video.manifest import Stream, Video
from seko_runtime.video.preview import LABEL

FORMS = ("npy", "y4m", "mp4", "raw")
CRF = "17"  # rate factor of x264 for decoded video; low, since small pictures have no detail to lose
# Matrix from RGB to YCbCr, BT.601 full range, as in JPEG and y4m's C444: rows are Y, Cb, Cr.
RGB_TO_YCBCR = np.array([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]])
# Options for a fragmented MP4 without an index at the end: a header, then a fragment for each second. The header waits
# for the first fragment, because it holds the delays of the encoders; without them a video would not begin at 0.
FRAGMENTS = {"movflags": "frag_keyframe+delay_moov+default_base_moof", "frag_duration": "1000000"}


class Sink(Protocol):
    """The interface of a writer of video chunks in one file format."""

    def write(self, pictures: Iterable[NDArray[Any]]) -> None:
        """Append a chunk: pictures uint8 [H, W, 3], or latents for `NpySink`."""

    def cut(self) -> None:
        """Correct the file's header if fewer chunks were written than announced; called before `close`."""

    def close(self, *, whole: bool) -> None:
        """Write buffered data if ``whole`` is true. The file itself stays open."""


@contextlib.contextmanager
def _encoder_faults(pictures: str) -> Iterator[None]:
    """Turn the encoder's errors about picture size or rate into a VideoWriterError."""
    try:
        yield
    except (OSError, MemoryError):  # an OSError of the file is no fault of the encoder
        raise
    except Exception as fault:
        raise VideoWriterError(
            f"the encoder of .mp4, which takes even sizes, refuses {pictures}: {fault_text(fault)}; write a "
            ".y4m or .npy"
        ) from fault


def open_sink(
    form: str,
    file: BinaryIO,
    stream: Stream,
    rows: int,
    chunks: int,
    video: Video | None,
    sound: NDArray[np.float32] | None = None,
) -> Sink:
    """Return a writer of chunks to an open file, in one of the formats `FORMS`. The caller closes the file. Only the
    format mp4 has sound."""
    if form == "npy":
        return NpySink(file, stream, rows, chunks)
    size = (stream.height, stream.width) if video is None else (video.height, video.width)
    height, width = size[0], size[1] * rows
    if form == "raw":
        return RawSink(file)
    if form == "y4m":
        return Y4mSink(file, height, width, stream.fps, preview=video is None)
    return Mp4Sink(file, height, width, stream.fps, preview=video is None, sound=sound)


class NpySink:
    """Writer of .npy files: latents as float32 [chunks, B, C, F, h, w], written chunk by chunk, so that a full disk
    is an error and not a crash."""

    def __init__(self, file: BinaryIO, stream: Stream, batch: int, chunks: int) -> None:
        channels, rows, columns = stream.latent_shape
        self._file = file
        self._left = chunks
        self._chunks = chunks
        self._shape = (batch, channels, stream.chunk_frames, rows, columns)
        self._write_header(chunks)

    def write(self, pictures: Iterable[NDArray[Any]]) -> None:
        for latents in pictures:
            if latents.shape != self._shape or not self._left:
                raise UsageError(
                    f"a chunk is {list(latents.shape)} with {self._left} expected, each {list(self._shape)}"
                )
            self._file.write(np.ascontiguousarray(latents, np.float32).data)
            self._left -= 1

    def cut(self) -> None:
        if self._left and self._file.seekable():
            end = self._file.tell()
            self._file.seek(0)
            self._write_header(
                self._chunks - self._left
            )  # numpy pads headers, so the corrected one is as long as the first
            self._file.seek(end)
        self._left = 0

    def _write_header(self, chunks: int) -> None:
        formats: Any = np.lib.format  # numpy's function has no types
        descr = formats.dtype_to_descr(np.dtype(np.float32))
        header = {"descr": descr, "fortran_order": False, "shape": (chunks, *self._shape)}
        formats.write_array_header_1_0(self._file, header)

    def close(self, *, whole: bool) -> None:
        if whole and self._left:
            raise UsageError(f"{self._left} chunks fewer were written than announced")


class Y4mSink:
    """Writer of uncompressed YUV4MPEG2 (.y4m) video files, 4:4:4, full range."""

    def __init__(self, file: BinaryIO, height: int, width: int, fps: int, *, preview: bool) -> None:
        self._file = file
        comment = f" XSEKO={LABEL.replace(' ', '_')}" if preview else ""
        header = f"YUV4MPEG2 W{width} H{height} F{fps}:1 Ip A1:1 C444 XCOLORRANGE=FULL{comment}\n"
        self._file.write(header.encode("ascii"))

    def write(self, pictures: Iterable[NDArray[Any]]) -> None:
        for picture in pictures:
            planes = np.einsum("hwk,pk->phw", picture.astype(np.float64), RGB_TO_YCBCR)
            planes[1:] += 128
            self._file.write(b"FRAME\n" + np.clip(planes.round(), 0, 255).astype(np.uint8).tobytes())

    def cut(self) -> None:
        pass

    def close(self, *, whole: bool) -> None:
        pass


class RawSink:
    """Writer of raw bytes: uint8 [H, W, 3] of each picture (red, green, blue), without a header."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, pictures: Iterable[NDArray[Any]]) -> None:
        for picture in pictures:
            self._file.write(np.ascontiguousarray(picture, np.uint8).data)

    def cut(self) -> None:
        pass

    def close(self, *, whole: bool) -> None:
        pass


class Mp4Sink:
    """Writer of MP4 files with H.264 through PyAV, in fragments, so that a player can read the file while it grows.

    ``sound``, float32 [N] at 16 kHz, is written as AAC for the duration of the pictures.
    """

    def __init__(
        self,
        file: BinaryIO,
        height: int,
        width: int,
        fps: int,
        *,
        preview: bool,
        sound: NDArray[np.float32] | None = None,
    ) -> None:
        av = import_av()
        self._av = av
        self._sound, self._fps = sound, fps
        self._pictures = self._heard = 0  # pictures written so far, and samples of the sound
        self._description = f"pictures of {width}x{height} at {fps} fps"
        with _encoder_faults(self._description):
            self._container: Any = av.open(file, mode="w", format="mp4", options=FRAGMENTS)
            if preview:
                self._container.metadata["comment"] = LABEL
            options = {} if preview else {"crf": CRF}
            self._video: Any = self._container.add_stream("libx264", rate=Fraction(fps), options=options)
            self._video.width, self._video.height = width, height
            self._video.pix_fmt = "yuv420p"
            if sound is not None:
                self._audio: Any = self._container.add_stream("aac", rate=RATE, layout="mono")

    def write(self, pictures: Iterable[NDArray[Any]]) -> None:
        for picture in pictures:
            with _encoder_faults(self._description):
                frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
                self._container.mux(self._video.encode(frame))
            self._pictures += 1
        self._write_sound()

    def _write_sound(self) -> None:
        if self._sound is None:
            return
        end = min(len(self._sound), self._pictures * RATE // self._fps)
        if end == self._heard:
            return
        part = np.ascontiguousarray(self._sound[None, self._heard : end])
        with _encoder_faults("sound"):
            frame = self._av.AudioFrame.from_ndarray(part, format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = RATE, self._heard, Fraction(1, RATE)
            self._container.mux(self._audio.encode(frame))
        self._heard = end

    def cut(self) -> None:
        pass

    def close(self, *, whole: bool) -> None:
        if whole:
            with _encoder_faults(self._description):
                self._container.mux(self._video.encode(None))
                if self._sound is not None:
                    self._container.mux(self._audio.encode(None))
                self._container.close()
            return
        # Otherwise PyAV would close the container when it is freed, after its file was closed.
        with contextlib.suppress(OSError, VideoWriterError), _encoder_faults(self._description):
            self._container.close()


def import_av() -> Any:
    """Return PyAV; VideoWriterError if it is not installed."""
    try:
        import av
    except ImportError:
        raise VideoWriterError(
            "writing .mp4 needs PyAV, which is not installed; write a .y4m, or pip install av"
        ) from None
    return av
