"""Files of a run, written chunk by chunk: latents as .npy, decoded video or a labelled preview as .y4m or .mp4."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from seko_runtime.end_signals import held_signals
from seko_runtime.errors import DiskError, UsageError, VideoWriterError
from seko_runtime.faults import told
from seko_runtime.format.manifest import Stream, Video
from seko_runtime.format.whole_files import check_file_place, disk_faults, whole_file

SUFFIXES = (".npy", ".y4m", ".mp4")
LABEL = "LATENT PREVIEW"
CRF = "17"  # of x264, for decoded video: small pictures have no detail to lose
CONTRAST = 0.22  # of full scale per standard deviation: two of them reach from grey to black or white
# BT.601 full range, as JPEG and y4m's C444 use it: rows are Y, Cb, Cr.
RGB_TO_YCBCR = np.array([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]])
GLYPHS = {  # 3 x 5 pixels, rows from the top, the high bit on the left
    "A": (2, 5, 7, 5, 5),
    "E": (7, 4, 6, 4, 7),
    "I": (7, 2, 2, 2, 7),
    "L": (4, 4, 4, 4, 7),
    "N": (5, 7, 7, 7, 5),
    "P": (6, 5, 6, 4, 4),
    "R": (6, 5, 6, 5, 5),
    "T": (7, 2, 2, 2, 2),
    "V": (5, 5, 5, 5, 2),
    "W": (5, 5, 7, 7, 5),
    " ": (0, 0, 0, 0, 0),
}


class ChunkWriter:
    """Writes the chunks of a run to a file that appears, whole, when its ``with`` block ends without an error.

    Parameters
    ----------
    path : Path
        Goal; its suffix picks the format.
    stream : Stream
        Layout of the chunks.
    chunks : int
        How many will be written.
    video : Video, optional
        The manifest's: then ``.y4m`` and ``.mp4`` take decoded frames; without it they show a preview of the latents.

    Raises
    ------
    UsageError
        If the suffix is unknown; on entry if something stands at ``path`` that is no regular file.
    VideoWriterError
        If the encoder is missing, or refuses the size or the rate.
    DiskError
        From entry to exit, if the place is full or cannot be written.
    """

    def __init__(self, path: Path, stream: Stream, chunks: int, video: Video | None = None) -> None:
        check_suffix(path)
        self._path = path
        self._stream = stream
        self._chunks = chunks
        self._video = video
        self.is_preview = path.suffix != ".npy" and video is None
        self.takes_frames = path.suffix != ".npy" and video is not None

    def write(self, chunk: NDArray[np.generic]) -> None:
        """Append one chunk: uint8 [B, T, H, W, 3] if it `takes_frames`, else latents, float32 [B, C, F, h, w]."""
        with _disk_errors(self._path):
            if self.takes_frames:
                self._sink.write(side_by_side(chunk.astype(np.uint8, copy=False)))
            elif self.is_preview:
                self._sink.write(preview_frames(chunk.astype(np.float32, copy=False), self._stream))
            else:
                self._sink.write([chunk])

    def __enter__(self) -> ChunkWriter:
        self._opened = contextlib.ExitStack()
        try:
            with _disk_errors(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with held_signals():  # else it could be there and not known
                    file = self._opened.enter_context(whole_file(self._path, "writing", replace=True))
                self._sink = _open_sink(self._path.suffix, file, self._stream, self._chunks, self._video)
            return self
        except BaseException:
            with self._opened:
                raise

    def __exit__(
        self, _kind: type[BaseException] | None, fault: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            with held_signals(), _disk_errors(self._path), self._opened:
                self._sink.close(whole=fault is None)
                if fault is not None:
                    raise fault
        except BaseException:  # perhaps a signal, before they were held
            with self._opened:
                raise


class _Sink(Protocol):
    def write(self, pictures: Iterable[NDArray[Any]]) -> None: ...

    def close(self, *, whole: bool) -> None:
        """Write what is still to be written, unless the file is not to be ``whole``; it stays open."""
        ...


def check_output(path: Path) -> None:
    """Raise what `ChunkWriter` would, as far as that shows before there is a chunk: suffix, place, encoder.

    Raises
    ------
    UsageError, VideoWriterError, DiskError
        As `ChunkWriter`.
    """
    check_suffix(path)
    check_file_place(path)
    if path.suffix == ".mp4":
        _import_av()


def check_suffix(path: Path) -> None:
    """Raise UsageError unless a writer knows the suffix of ``path``."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path.name} ends in {path.suffix!r}, expected one of {', '.join(SUFFIXES)}")


def side_by_side(frames: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    """Yield uint8 [H, B * W, 3] of decoded frames [B, T, H, W, 3]: the rows of the batch beside each other."""
    for pictures in frames.swapaxes(0, 1):
        yield np.concatenate(list(pictures), axis=1)


def preview_frames(latents: NDArray[np.float32], stream: Stream) -> Iterator[NDArray[np.uint8]]:
    """Picture latents by a fixed linear map of their channels to RGB; it is not what a decoder would show.

    Parameters
    ----------
    latents : numpy.ndarray
        float32 [B, C, F, h, w], about N(0, 1).
    stream : Stream
        Picture size, and how often a latent frame is repeated.

    Yields
    ------
    numpy.ndarray
        uint8 [height, B * width, 3], rows of the batch side by side, labelled.
    """
    rows, channels, frames, latent_rows, latent_columns = latents.shape
    angle = np.arange(channels)[:, None] * np.arange(1, 4)[None] / channels + np.arange(3)[None] / 3
    to_rgb = np.cos(2 * np.pi * angle) * np.sqrt(2 / channels)  # [C, 3], columns of unit length
    row_of = np.arange(stream.height) * latent_rows // stream.height
    column_of = np.arange(stream.width) * latent_columns // stream.width
    label = _label_mask(stream.height, rows * stream.width)
    for frame in range(frames):
        colour = np.einsum("bchw,ck->bhwk", np.nan_to_num(latents[:, :, frame]), to_rgb)
        pixels = np.clip((0.5 + CONTRAST * colour) * 255, 0, 255).round().astype(np.uint8)
        picture = np.concatenate(list(pixels[:, row_of][:, :, column_of]), axis=1)
        picture[: label.shape[0], : label.shape[1]][label] = 255
        for _ in range(stream.video_frames_per_latent):
            yield picture


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says against writing ``path`` into a DiskError."""
    try:
        with disk_faults(path):
            yield
    except OSError as fault:
        raise DiskError(f"{path} cannot be written ({fault.strerror or fault}): choose another -o") from fault


@contextlib.contextmanager
def _encoder_faults(pictures: str) -> Iterator[None]:
    """Turn what the encoder says against these pictures' size or rate into a VideoWriterError."""
    try:
        yield
    except (OSError, MemoryError):  # not the encoder's
        raise
    except Exception as fault:
        raise VideoWriterError(
            f"the encoder of .mp4, which takes even sizes, refuses {pictures}: {told(fault)}; write a .y4m or .npy"
        ) from fault


def _open_sink(suffix: str, file: BinaryIO, stream: Stream, chunks: int, video: Video | None) -> _Sink:
    if suffix == ".npy":
        return _NpySink(file, stream, chunks)
    size = (stream.height, stream.width) if video is None else (video.height, video.width)
    height, width = size[0], size[1] * stream.batch
    if suffix == ".y4m":
        return _Y4mSink(file, height, width, stream.fps, preview=video is None)
    return _Mp4Sink(file, height, width, stream.fps, preview=video is None)


class _NpySink:
    """Latents as float32 [chunks, B, C, F, h, w], written as they come: a full disk is an error, not a dead process."""

    def __init__(self, file: BinaryIO, stream: Stream, chunks: int) -> None:
        channels, rows, columns = stream.latent_shape
        self._file = file
        self._left = chunks
        self._shape = (stream.batch, channels, stream.chunk_frames, rows, columns)
        formats: Any = np.lib.format  # untyped
        descr = formats.dtype_to_descr(np.dtype(np.float32))
        header = {"descr": descr, "fortran_order": False, "shape": (chunks, *self._shape)}
        formats.write_array_header_1_0(file, header)

    def write(self, pictures: Iterable[NDArray[Any]]) -> None:
        for latents in pictures:
            if latents.shape != self._shape or not self._left:
                raise UsageError(
                    f"a chunk is {list(latents.shape)} with {self._left} expected, each {list(self._shape)}"
                )
            self._file.write(np.ascontiguousarray(latents, np.float32).data)
            self._left -= 1

    def close(self, *, whole: bool) -> None:
        if whole and self._left:
            raise UsageError(f"{self._left} chunks fewer were written than announced")


class _Y4mSink:
    """YUV4MPEG2, 4:4:4, full range."""

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

    def close(self, *, whole: bool) -> None:
        pass


class _Mp4Sink:
    """H.264 through PyAV."""

    def __init__(self, file: BinaryIO, height: int, width: int, fps: int, *, preview: bool) -> None:
        av = _import_av()
        self._av = av
        self._told = f"pictures of {width}x{height} at {fps} fps"
        with _encoder_faults(self._told):
            self._container: Any = av.open(file, mode="w", format="mp4")
            if preview:
                self._container.metadata["comment"] = LABEL
            options = {} if preview else {"crf": CRF}
            self._video: Any = self._container.add_stream("libx264", rate=Fraction(fps), options=options)
            self._video.width, self._video.height = width, height
            self._video.pix_fmt = "yuv420p"

    def write(self, pictures: Iterable[NDArray[Any]]) -> None:
        for picture in pictures:
            with _encoder_faults(self._told):
                frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
                self._container.mux(self._video.encode(frame))

    def close(self, *, whole: bool) -> None:
        if whole:
            with _encoder_faults(self._told):
                self._container.mux(self._video.encode(None))
                self._container.close()
            return
        # Else it would be closed when it is freed, after its file.
        with contextlib.suppress(OSError, VideoWriterError), _encoder_faults(self._told):
            self._container.close()


def _import_av() -> Any:
    try:
        import av
    except ImportError:
        raise VideoWriterError(
            "writing .mp4 needs PyAV, which is not installed; write a .y4m, or pip install 'seko-runtime[video]'"
        ) from None
    return av


def _label_mask(height: int, width: int) -> NDArray[np.bool_]:
    """Pixels of `LABEL` for the top left corner, cut to the picture."""
    scale = max(1, width // 160)
    bits = np.zeros((7, 1 + 4 * len(LABEL)), dtype=bool)
    for place, letter in enumerate(LABEL):
        for row, word in enumerate(GLYPHS[letter]):
            for column in range(3):
                bits[1 + row, 1 + 4 * place + column] = bool(word >> (2 - column) & 1)
    return bits.repeat(scale, axis=0).repeat(scale, axis=1)[:height, :width]
