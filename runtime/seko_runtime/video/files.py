"""Output of `seko-run run`, written chunk by chunk to a pipe, or to a file that appears complete or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import UsageError
from seko_runtime.format.outputs import STDOUT, OutputWriter, check_place
from seko_runtime.format.pipes import is_pipe
from seko_runtime.video.manifest import Stream, Video
from seko_runtime.video.preview import preview_frames
from seko_runtime.video.sinks import FORMS, import_av, open_sink

SUFFIXES = (".npy", ".y4m", ".mp4")


class ChunkWriter(OutputWriter):
    """Writes the chunks of a run to its output; see `OutputWriter` for when the file appears.

    Parameters
    ----------
    path : Path
        The output: a file, a named pipe or a device. With ``descriptor`` the path is only a name for error messages.
    stream : Stream
        Layout of the video stream: sizes of its chunks.
    chunks : int
        Number of chunks that will be written to the output.
    video : Video, optional
        The manifest's sizes of decoded pictures. Without ``video`` a preview of the latents is written instead of
        frames.
    rows : int
        Number of video streams in each chunk, which are written side by side.
    form : str, optional
        Format of the output, one of `FORMS`; default: see `output_form`.
    sound : numpy.ndarray, optional
        The sound of an .mp4, float32 [N] at 16 kHz; other formats have no sound.
    descriptor : int, optional
        Descriptor of a pipe or file that is already open. The descriptor is written like a pipe and stays open.

    Raises
    ------
    UsageError
        If the output format is unknown; at the start of the ``with`` block if ``path`` cannot be written to.
    VideoWriterError
        If the encoder is missing, or refuses the picture size or frame rate.
    DiskError
        If the disk is full or the file cannot be written.
    BrokenPipeError
        If the reader has closed the pipe.
    """

    def __init__(
        self,
        path: Path,
        stream: Stream,
        chunks: int,
        video: Video | None = None,
        *,
        rows: int = 1,
        form: str | None = None,
        descriptor: int | None = None,
        sound: NDArray[np.float32] | None = None,
    ) -> None:
        super().__init__(path, descriptor)
        self.form = output_form(path, form)
        self._stream, self._rows = stream, rows
        self._chunks = chunks
        self._video = video
        self._sound = sound
        self._written = 0
        self._incomplete = False  # whether a chunk was written to the pipe only in part
        self.is_preview = self.form != "npy" and video is None
        self.takes_frames = self.form != "npy" and video is not None

    def write(self, chunk: NDArray[np.generic]) -> None:
        """Append one chunk: frames uint8 [B, T, H, W, 3] if `takes_frames`, otherwise latents float32 [B, C, F, h,
        w].

        While a chunk is written to a file, signals are delayed. For a pipe signals are not delayed, because its reader
        may be slow.
        """
        self._incomplete = self._output.pipe is not None
        with self._output.signals(), self._output.disk_errors():
            if self.takes_frames:
                self._sink.write(side_by_side(chunk.astype(np.uint8, copy=False)))
            elif self.is_preview:
                self._sink.write(preview_frames(chunk.astype(np.float32, copy=False), self._stream))
            else:
                self._sink.write([chunk])
            self._file.flush()
            self._written += 1
        self._incomplete = False

    def _begin(self, file: BinaryIO) -> None:
        self._sink = open_sink(
            self.form, file, self._stream, self._rows, self._chunks, self._video, self._sound
        )

    def _finish(self, *, interrupted: bool, keeps: bool) -> None:
        if keeps:
            self._sink.cut()
        # the signal ended the reader of a pipe, too, or it has stopped reading
        hidden = (OSError,) if interrupted and self._output.pipe is not None else ()
        with contextlib.suppress(*hidden):
            self._sink.close(whole=(keeps or not interrupted) and not self._incomplete)

    def _amount(self) -> str:
        return f"{self._written} of {self._chunks} chunks" if self._written else ""


def output_form(path: Path, form: str | None = None) -> str:
    """Return the format of an output file, one of `FORMS`: the requested format, otherwise the format of the path's
    suffix; y4m for a pipe.

    Raises
    ------
    UsageError
        If neither the option nor the path's suffix names a format.
    """
    if form is not None:
        if form not in FORMS:
            raise UsageError(f"the format is {form!r}, expected one of {', '.join(FORMS)}")
        return form
    if path.suffix in SUFFIXES:
        return path.suffix[1:]
    if path == STDOUT or is_pipe(path):
        return "y4m"
    if path.is_dir():
        raise UsageError(f"-o {path} is a folder: name a file in it, such as {path / 'video.mp4'}")
    ending = f"has the suffix {path.suffix}" if path.suffix else "has no suffix"
    raise UsageError(
        f"-o {path} {ending}: expected one of {', '.join(SUFFIXES)}; or name the format by --format, one of "
        f"{', '.join(FORMS)}"
    )


def check_output(path: Path, form: str | None = None) -> None:
    """Check the format, path and encoder of an output file before any chunk is made.

    Raises
    ------
    UsageError, VideoWriterError, DiskError
        In the same cases as `ChunkWriter`: bad format or path, missing encoder, full disk.
    """
    form = output_form(path, form)
    check_place(path)
    if form == "mp4":
        import_av()


def side_by_side(frames: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    """Yield pictures uint8 [H, B * W, 3] from decoded frames [B, T, H, W, 3], with the B streams side by side."""
    for pictures in frames.swapaxes(0, 1):
        yield np.concatenate(list(pictures), axis=1)
