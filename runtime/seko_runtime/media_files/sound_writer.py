"""Writer of sound while it is made: to a file that appears complete or not at all, or to a pipe."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import UsageError, VideoWriterError
from seko_runtime.format.outputs import STDOUT, OutputWriter, check_place
from seko_runtime.format.pipes import is_pipe
from seko_runtime.host.faults import fault_text

SOUND_FORMS = ("wav", "mp3", "flac", "raw")
_CODECS = {"mp3": "libmp3lame", "flac": "flac"}  # of PyAV
UNKNOWN_BYTES = 0xFFFFFFFF  # size in the header of a wav that is written to a pipe
_HEADER_BYTES = 44


class SoundWriter(OutputWriter):
    """Writes one channel of sound with 16 bits a sample; see `OutputWriter` for when the file appears.

    Parameters
    ----------
    path : Path
        The output: a file, a named pipe or a device. With ``descriptor`` the path is only a name for error messages.
    rate : int
        Number of sound samples in a second.
    form : str, optional
        Format of the output, one of `SOUND_FORMS`; default: see `sound_form`.
    descriptor : int, optional
        Descriptor of a pipe or file that is already open. The descriptor is written like a pipe and stays open.

    Attributes
    ----------
    samples : int
        Number of samples written so far.

    Raises
    ------
    UsageError
        If the sound format is unknown; on entry if ``path`` cannot be written to.
    VideoWriterError
        If the encoder of the sound format is missing.
    DiskError
        If the disk is full or the file cannot be written.
    BrokenPipeError
        If the reader has closed the pipe.
    """

    def __init__(
        self, path: Path, rate: int, *, form: str | None = None, descriptor: int | None = None
    ) -> None:
        super().__init__(path, descriptor)
        self.form = sound_form(path, form)
        self.samples = 0
        self._rate = rate

    def write(self, samples: NDArray[np.float32]) -> None:
        """Append sound samples [n] in -1..1; values outside this range are clipped. Signals are delayed until the
        samples are in the file.
        """
        whole = np.rint(np.clip(samples, -1.0, 1.0) * 32767).astype("<i2")
        with self._output.signals(), self._output.disk_errors():
            self._sink.write(whole)
            self._file.flush()
            self.samples += len(whole)

    def _begin(self, file: BinaryIO) -> None:
        self._sink = _open_sink(self.form, file, self._rate)

    def _finish(self, *, interrupted: bool, keeps: bool) -> None:
        del keeps  # an incomplete sound ends as a complete one
        with contextlib.suppress(*((OSError, VideoWriterError) if interrupted else ())):
            self._sink.close()

    def _amount(self) -> str:
        return f"{self.samples / self._rate:.2f} s" if self.samples else ""


def sound_form(path: Path, form: str | None = None) -> str:
    """Return the format of a sound output, one of `SOUND_FORMS`: the requested format, otherwise the format of the
    path's suffix; raw for a pipe.

    Raises
    ------
    UsageError
        If neither the option nor the path's suffix names a format.
    """
    known = ", ".join(SOUND_FORMS)
    if form is not None:
        if form not in SOUND_FORMS:
            raise UsageError(f"the format is {form!r}, expected one of {known} for sound")
        return form
    if path.suffix[1:] in SOUND_FORMS[:-1]:
        return path.suffix[1:]
    if path == STDOUT or is_pipe(path):
        return "raw"
    if path.is_dir():
        raise UsageError(f"-o {path} is a folder: name a file in it, such as {path / 'sound.wav'}")
    ending = f"has the suffix {path.suffix}" if path.suffix else "has no suffix"
    raise UsageError(
        f"-o {path} {ending}: expected .wav, .mp3 or .flac for sound; or name the format by --format"
    )


def check_sound_output(path: Path, form: str | None = None) -> None:
    """Check the format, path and encoder of a sound output before any sound is made; raises the errors of
    `SoundWriter`."""
    form = sound_form(path, form)
    check_place(path)
    if form in _CODECS:
        _import_av(form)


class _Sink(Protocol):
    def write(self, samples: NDArray[np.int16]) -> None: ...

    def close(self) -> None: ...


class _RawSink:
    """Writer of sound samples without a header, little endian."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, samples: NDArray[np.int16]) -> None:
        self._file.write(samples.tobytes())

    def close(self) -> None:
        pass


def wav_header(rate: int, sound_bytes: int) -> bytes:
    """Return the header of a wav file of one channel of 16 bits; a size that it cannot say, such as `UNKNOWN_BYTES`, is
    unknown."""
    whole, own = (min(size, UNKNOWN_BYTES) for size in (sound_bytes + _HEADER_BYTES - 8, sound_bytes))
    described = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", whole, b"WAVE") + described + struct.pack("<4sI", b"data", own)


class _WavSink(_RawSink):
    """Writer of wav files, whose header gets its sizes at the end; in a pipe, and beyond 4 GiB, the sizes stay unknown,
    which players take for an endless sound."""

    def __init__(self, file: BinaryIO, rate: int) -> None:
        super().__init__(file)
        self._rate = rate
        self._file.write(wav_header(rate, UNKNOWN_BYTES))

    def close(self) -> None:
        if self._file.seekable():
            size = self._file.seek(0, os.SEEK_END) - _HEADER_BYTES
            self._file.seek(0)
            self._file.write(wav_header(self._rate, size))
            self._file.seek(0, os.SEEK_END)


class _AvSink:
    """Writer of sound in a compressed format, through PyAV."""

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
                f"the encoder of .{self._form} refuses sound of {self._rate} samples a second: {fault_text(fault)}; "
                "write a .wav"
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
