"""Writes sound as it comes: to a file that appears complete or not at all, or to a pipe."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import DiskError, UsageError, VideoWriterError
from seko_runtime.format.whole_files import check_file_place, disk_faults, whole_file
from seko_runtime.host.end_signals import held_signals
from seko_runtime.host.faults import told
from seko_runtime.video.pipes import Pipe, is_pipe, open_pipe

SOUND_FORMS = ("wav", "mp3", "flac", "raw")
STDOUT = Path("-")
_CODECS = {"mp3": "libmp3lame", "flac": "flac"}  # of PyAV
_UNKNOWN = 0xFFFFFFFF  # size in the header of a wav that is written to a pipe
_HEADER_BYTES = 44
_PATIENCE_S = 1.0  # with who reads a pipe, once a signal has ended the run


class SoundWriter:
    """Writes one channel of sound in 16 bits.

    A file appears when the ``with`` block ends without an error. If a signal ends the block (`KeyboardInterrupt`) after
    sound was written, the file appears with the sound so far, and the exception gets a note that says so. After any
    other exception there is no new file, and an existing one is kept. A pipe gets the sound as it comes.

    Parameters
    ----------
    path : Path
        The output: a file, a named pipe or a device. With ``descriptor`` it is only the name in messages.
    rate : int
        Samples a second.
    form : str, optional
        One of `SOUND_FORMS`; default: see `sound_form`.
    descriptor : int, optional
        An open pipe or file that is written like a pipe; it stays open.

    Attributes
    ----------
    samples : int
        Samples written so far.

    Raises
    ------
    UsageError
        If the format is unknown; on entry if ``path`` is something that cannot be written to.
    VideoWriterError
        If the encoder is missing.
    DiskError
        If the disk is full or the file cannot be written.
    BrokenPipeError
        If the reader has closed the pipe.
    """

    def __init__(
        self, path: Path, rate: int, *, form: str | None = None, descriptor: int | None = None
    ) -> None:
        self.form = sound_form(path, form)
        self.samples = 0
        self._path, self._rate, self._descriptor = path, rate, descriptor
        self._name = "stdout" if path == STDOUT else str(path)
        self._pipe: Pipe | None = None

    def write(self, samples: NDArray[np.float32]) -> None:
        """Append samples [n] in -1..1; values outside this range are clipped. Signals are delayed until the samples
        are in the file.
        """
        whole = np.rint(np.clip(samples, -1.0, 1.0) * 32767).astype("<i2")
        signals = held_signals() if self._pipe is None else contextlib.nullcontext()
        with signals, self._disk_errors():
            self._sink.write(whole)
            self._file.flush()
            self.samples += len(whole)

    def __enter__(self) -> SoundWriter:
        self._opened = contextlib.ExitStack()
        try:
            with self._disk_errors():
                self._file = self._open()
                self._sink = _open_sink(self.form, self._file, self._rate)
            return self
        except BaseException:
            with self._opened:
                raise

    def __exit__(
        self, _kind: type[BaseException] | None, fault: BaseException | None, _trace: TracebackType | None
    ) -> None:
        keeps = isinstance(fault, KeyboardInterrupt) and self.samples > 0
        signals = held_signals() if self._pipe is None else contextlib.nullcontext()
        try:
            with signals, self._disk_errors(), self._opened:
                if self._pipe is not None and fault is not None:
                    self._pipe.hurry(_PATIENCE_S)
                hides = contextlib.suppress(OSError, VideoWriterError) if fault else contextlib.nullcontext()
                with hides:
                    self._sink.close()
                if fault is not None and not keeps:
                    raise fault
        except BaseException:  # perhaps a signal, before they were held
            with self._opened:
                raise
        if keeps and fault is not None:
            done = f"{self.samples / self._rate:.2f} s"
            fault.add_note(f"wrote {done} to {self._name}" if self._pipe else f"kept {done} in {self._name}")

    def _open(self) -> BinaryIO:
        if self._descriptor is not None:
            self._pipe = Pipe(os.dup(self._descriptor))
        elif is_pipe(self._path):
            self._pipe = open_pipe(self._path)
        if self._pipe is not None:
            return cast(BinaryIO, self._opened.enter_context(self._pipe))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with held_signals():  # else it could be there and not known
            return self._opened.enter_context(whole_file(self._path, "writing", replace=True))

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


def sound_form(path: Path, asked: str | None = None) -> str:
    """Return the format of an output, one of `SOUND_FORMS`: the requested one, else by suffix; raw for a pipe.

    Raises
    ------
    UsageError
        If neither the option nor the suffix names a format.
    """
    known = ", ".join(SOUND_FORMS)
    if asked is not None:
        if asked not in SOUND_FORMS:
            raise UsageError(f"the format is {asked!r}, expected one of {known} for sound")
        return asked
    if path.suffix[1:] in SOUND_FORMS[:-1]:
        return path.suffix[1:]
    if path == STDOUT or is_pipe(path):
        return "raw"
    ending = f"has the suffix {path.suffix}" if path.suffix else "has no suffix"
    raise UsageError(
        f"-o {path} {ending}: expected .wav, .mp3 or .flac for sound; or name the format by --format"
    )


def check_sound_output(path: Path, asked: str | None = None) -> None:
    """Check format, path and encoder of an output before any sound is made; raises as `SoundWriter`."""
    form = sound_form(path, asked)
    if path != STDOUT:
        if not is_pipe(path):
            check_file_place(path)
        elif not os.access(path, os.W_OK):
            raise DiskError(f"{path} cannot be written (Permission denied): choose another -o")
    if form in _CODECS:
        _import_av(form)


class _Sink(Protocol):
    def write(self, samples: NDArray[np.int16]) -> None: ...

    def close(self) -> None: ...


class _RawSink:
    """Samples alone, little endian."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, samples: NDArray[np.int16]) -> None:
        self._file.write(samples.tobytes())

    def close(self) -> None:
        pass


class _WavSink(_RawSink):
    """A wav, whose header gets its sizes at the end; in a pipe they stay unknown, which players take for no end."""

    def __init__(self, file: BinaryIO, rate: int) -> None:
        super().__init__(file)
        self._rate = rate
        self._file.write(self._header(_UNKNOWN))

    def close(self) -> None:
        if self._file.seekable():
            size = self._file.seek(0, os.SEEK_END) - _HEADER_BYTES
            self._file.seek(0)
            self._file.write(self._header(size))
            self._file.seek(0, os.SEEK_END)

    def _header(self, size: int) -> bytes:
        whole = min(size + _HEADER_BYTES - 8, _UNKNOWN)
        described = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, self._rate, 2 * self._rate, 2, 16)
        return struct.pack("<4sI4s", b"RIFF", whole, b"WAVE") + described + struct.pack("<4sI", b"data", size)


class _AvSink:
    """A compressed format, through PyAV."""

    def __init__(self, form: str, file: BinaryIO, rate: int) -> None:
        self._av, self._form, self._rate, self._written = _import_av(form), form, rate, 0
        with self._faults():
            self._container: Any = self._av.open(file, mode="w", format=form)
            self._stream: Any = self._container.add_stream(_CODECS[form], rate=rate, layout="mono")

    def write(self, samples: NDArray[np.int16]) -> None:
        with self._faults():
            frame = self._av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
            frame.sample_rate, frame.pts = self._rate, self._written
            frame.time_base = Fraction(1, self._rate)
            self._container.mux(self._stream.encode(frame))
        self._written += len(samples)

    def close(self) -> None:
        with self._faults():
            self._container.mux(self._stream.encode(None))
            self._container.close()

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except (OSError, MemoryError):  # not the encoder's
            raise
        except Exception as fault:
            raise VideoWriterError(
                f"the encoder of .{self._form} refuses sound of {self._rate} samples a second: {told(fault)}; write a "
                ".wav"
            ) from fault


def _open_sink(form: str, file: BinaryIO, rate: int) -> _Sink:
    if form == "raw":
        return _RawSink(file)
    return _WavSink(file, rate) if form == "wav" else _AvSink(form, file, rate)


def _import_av(form: str) -> Any:
    try:
        import av
    except ImportError:
        raise VideoWriterError(
            f"writing .{form} needs PyAV, which is not installed; write a .wav, or pip install av"
        ) from None
    return av
