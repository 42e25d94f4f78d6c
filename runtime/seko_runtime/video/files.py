"""Output of a run, written chunk by chunk to a pipe, or to a file that appears complete or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import DiskError, UsageError
from seko_runtime.format.whole_files import check_file_place, disk_faults, whole_file
from seko_runtime.host.end_signals import held_signals
from seko_runtime.video.manifest import Stream, Video
from seko_runtime.video.pipes import Pipe, is_pipe, open_pipe
from seko_runtime.video.preview import preview_frames
from seko_runtime.video.sinks import FORMS, import_av, open_sink

SUFFIXES = (".npy", ".y4m", ".mp4")
STDOUT = Path("-")
PATIENCE_S = 1.0  # seconds to wait for the reader of a pipe, once a signal has ended the run


class ChunkWriter:
    """Writes the chunks of a run to its output.

    The output file appears when the ``with`` block ends without an error. If a signal ends the block
    (`KeyboardInterrupt`) after a chunk was written, the file appears with the chunks so far, and the exception gets a
    note that says so. After any other exception there is no new file, and an existing one is kept. A pipe gets the
    chunks as they come.

    Parameters
    ----------
    path : Path
        The output: a file, a named pipe or a device. With ``descriptor`` the path is only its name in messages.
    stream : Stream
        Layout of the chunks.
    chunks : int
        Number of chunks that will be written.
    video : Video, optional
        The manifest's table of decoded pictures. Without it a preview of the latents is written instead of frames.
    rows : int
        Rows of each chunk.
    form : str, optional
        One of `FORMS`; default: see `output_form`.
    sound : numpy.ndarray, optional
        float32 [N] at 16 kHz, the sound of an .mp4; other formats have no sound.
    descriptor : int, optional
        Descriptor of an open pipe or file, which is written like a pipe and stays open.

    Raises
    ------
    UsageError
        If the format is unknown; at the start of the ``with`` block if ``path`` cannot be written to.
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
        self.form = output_form(path, form)
        self._name = "stdout" if path == STDOUT else str(path)
        self._path = path
        self._stream, self._rows = stream, rows
        self._chunks = chunks
        self._video = video
        self._descriptor, self._sound = descriptor, sound
        self._written = 0
        self._pipe: Pipe | None = None
        self._incomplete = False  # whether a chunk was written to the pipe only in part
        self.is_preview = self.form != "npy" and video is None
        self.takes_frames = self.form != "npy" and video is not None

    def write(self, chunk: NDArray[np.generic]) -> None:
        """Append one chunk: frames uint8 [B, T, H, W, 3] if `takes_frames`, otherwise latents float32 [B, C, F, h,
        w].

        Signals are delayed until the chunk is in the file. For a pipe they are not, because its reader may be slow.
        """
        self._incomplete = self._pipe is not None
        signals = held_signals() if self._pipe is None else contextlib.nullcontext()
        with signals, self._disk_errors():
            if self.takes_frames:
                self._sink.write(side_by_side(chunk.astype(np.uint8, copy=False)))
            elif self.is_preview:
                self._sink.write(preview_frames(chunk.astype(np.float32, copy=False), self._stream))
            else:
                self._sink.write([chunk])
            self._file.flush()
            self._written += 1
        self._incomplete = False

    def __enter__(self) -> ChunkWriter:
        self._opened = contextlib.ExitStack()
        try:
            with self._disk_errors():
                self._file = self._open()
                self._sink = open_sink(
                    self.form, self._file, self._stream, self._rows, self._chunks, self._video, self._sound
                )
            return self
        except BaseException:
            with self._opened:
                raise

    def __exit__(
        self, _kind: type[BaseException] | None, fault: BaseException | None, _trace: TracebackType | None
    ) -> None:
        keeps = isinstance(fault, KeyboardInterrupt) and self._written > 0
        try:
            with self._ending(), self._disk_errors(), self._opened:
                if keeps:
                    self._sink.cut()
                self._finish(
                    whole=(fault is None or keeps) and not self._incomplete, interrupted=fault is not None
                )
                if fault is not None and not keeps:
                    raise fault
        except BaseException:  # possibly a signal that came before signals were delayed
            with self._opened:
                raise
        if keeps and fault is not None:
            done = f"{self._written} of {self._chunks} chunks"
            fault.add_note(f"wrote {done} to {self._name}" if self._pipe else f"kept {done} in {self._name}")

    def _open(self) -> BinaryIO:
        if self._descriptor is not None:
            self._pipe = Pipe(os.dup(self._descriptor))
        elif is_pipe(self._path):
            self._pipe = open_pipe(self._path)
        if self._pipe is not None:
            return cast(BinaryIO, self._opened.enter_context(self._pipe))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with held_signals():  # otherwise the file could exist without the caller's knowledge
            return self._opened.enter_context(whole_file(self._path, "writing", replace=True))

    def _finish(self, *, whole: bool, interrupted: bool) -> None:
        if self._pipe is None or not interrupted:
            self._sink.close(whole=whole)
            return
        self._pipe.hurry(PATIENCE_S)
        with contextlib.suppress(OSError):  # the signal ended the reader, too, or it has stopped reading
            self._sink.close(whole=whole)

    def _ending(self) -> contextlib.AbstractContextManager[None]:
        return held_signals() if self._pipe is None else contextlib.nullcontext()

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Turn the system's write errors into a DiskError."""
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as fault:
            if self._pipe is None:
                with contextlib.suppress(OSError), disk_faults(self._path):
                    raise
            raise DiskError(
                f"{self._name} cannot be written ({fault.strerror or fault}): choose another -o"
            ) from fault


def output_form(path: Path, asked: str | None = None) -> str:
    """Return the format of an output, one of `FORMS`: the requested one, otherwise by the path's suffix; y4m for a
    pipe.

    Raises
    ------
    UsageError
        If neither option nor suffix names a format.
    """
    if asked is not None:
        if asked not in FORMS:
            raise UsageError(f"the format is {asked!r}, expected one of {', '.join(FORMS)}")
        return asked
    if path.suffix in SUFFIXES:
        return path.suffix[1:]
    if path == STDOUT or is_pipe(path):
        return "y4m"
    ending = f"has the suffix {path.suffix}" if path.suffix else "has no suffix"
    raise UsageError(
        f"-o {path} {ending}: expected one of {', '.join(SUFFIXES)}; or name the format by --format, one of "
        f"{', '.join(FORMS)}"
    )


def check_output(path: Path, asked: str | None = None) -> None:
    """Check format, path and encoder of an output before any chunk is made.

    Raises
    ------
    UsageError, VideoWriterError, DiskError
        In the cases in which `ChunkWriter` raises these errors.
    """
    form = output_form(path, asked)
    if path != STDOUT:
        if not is_pipe(path):
            check_file_place(path)
        elif not os.access(path, os.W_OK):
            raise DiskError(f"{path} cannot be written (Permission denied): choose another -o")
    if form == "mp4":
        import_av()


def side_by_side(frames: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    """Yield pictures uint8 [H, B * W, 3] from decoded frames [B, T, H, W, 3], the batch's rows side by side."""
    for pictures in frames.swapaxes(0, 1):
        yield np.concatenate(list(pictures), axis=1)
