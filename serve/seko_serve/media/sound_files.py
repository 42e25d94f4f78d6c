"""Sound files that are sent while they are written, in the formats WAV, MP3, AAC, Opus, FLAC and samples without a
header."""

from __future__ import annotations

from abc import ABC, abstractmethod
from fractions import Fraction

import av
import numpy as np
from numpy.typing import NDArray

from seko_runtime.media_files.sound_writer import UNKNOWN_BYTES, wav_header
from seko_serve.errors import ServeError

OPUS_RATE = 48_000
# By name: content type, and FFmpeg's container and codec where it is not written here.
FORMS: dict[str, tuple[str, str, str]] = {
    "mp3": ("audio/mpeg", "mp3", "libmp3lame"),
    "opus": ("audio/ogg", "ogg", "libopus"),
    "aac": ("audio/aac", "adts", "aac"),
    "flac": ("audio/flac", "flac", "flac"),
    "wav": ("audio/wav", "", ""),
    "pcm": ("audio/pcm", "", ""),
}


class SoundFile(ABC):
    """A sound file with one channel, which is sent part by part while it is written."""

    @abstractmethod
    def write(self, samples: NDArray[np.int16]) -> bytes:
        """Add samples [n] to the sound file, and return the file's next bytes, which may be empty."""

    @abstractmethod
    def close(self) -> bytes:
        """Return the last bytes of the sound file."""

    def completed(self, content: bytes) -> bytes:
        """Return the whole sound file with the sizes that its header could not say before its end."""
        return content


class _Samples(SoundFile):
    """A sound file of signed 16-bit samples, little endian, after a WAV header or without a header."""

    def __init__(self, rate: int, *, header: bool) -> None:
        self._rate, self._has_header = rate, header
        self._head = self._header(UNKNOWN_BYTES)

    def _header(self, sound_bytes: int) -> bytes:
        return wav_header(self._rate, sound_bytes) if self._has_header else b""

    def write(self, samples: NDArray[np.int16]) -> bytes:
        head, self._head = self._head, b""
        return head + samples.astype("<i2").tobytes()

    def close(self) -> bytes:
        return self._head

    def completed(self, content: bytes) -> bytes:
        sound = content[len(self._header(0)) :]
        return self._header(len(sound)) + sound


class _Resampled(SoundFile):
    """A sound file of samples without a header, at another rate than those that are written."""

    def __init__(self, rate: int, to: int) -> None:
        self._rate, self._written = rate, 0
        self._resampler = av.AudioResampler(format="s16", layout="mono", rate=to)

    def write(self, samples: NDArray[np.int16]) -> bytes:
        if not len(samples):
            return b""
        frame = _frame(samples, self._rate, self._written)
        self._written += len(samples)
        return self._taken(frame)

    def close(self) -> bytes:
        return self._taken(None) if self._written else b""

    def _taken(self, frame: av.AudioFrame | None) -> bytes:
        frames = self._resampler.resample(frame)
        return b"".join(frame.to_ndarray().astype("<i2").tobytes() for frame in frames)


class _Pipe:
    """A pipe to which FFmpeg writes. FFmpeg cannot seek in the pipe, so FFmpeg completes no header at the end."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, part: bytes) -> int:
        self._parts.append(bytes(part))
        return len(part)

    def take(self) -> bytes:
        whole, self._parts = b"".join(self._parts), []
        return whole


class _Coded(SoundFile):
    """A sound file that FFmpeg encodes."""

    def __init__(self, rate: int, container: str, codec: str) -> None:
        self._rate, self._written, self._pipe = rate, 0, _Pipe()
        self._container = av.open(self._pipe, "w", format=container, options={"flush_packets": "1"})
        stream = self._container.add_stream(codec, rate=OPUS_RATE if codec == "libopus" else rate)
        if not isinstance(stream, av.AudioStream):  # pragma: no cover - the names are of sound codecs
            raise TypeError(codec)
        stream.layout = "mono"
        stream.codec_context.open()
        self._stream = stream

    def write(self, samples: NDArray[np.int16]) -> bytes:
        if len(samples):
            frame = _frame(samples, self._rate, self._written)
            self._written += len(samples)
            self._container.mux(self._stream.encode(frame))
        return self._pipe.take()

    def close(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._pipe.take()


def _frame(samples: NDArray[np.int16], rate: int, first: int) -> av.AudioFrame:
    """Return samples [n] as FFmpeg's frame; ``first`` is the number of samples before them."""
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples[None]), format="s16", layout="mono")
    frame.sample_rate, frame.time_base, frame.pts = rate, Fraction(1, rate), first
    return frame


def plain_samples(rate: int, to: int) -> SoundFile:
    """Return a writer of 16-bit samples without a header at ``to`` Hz, for samples at ``rate`` Hz."""
    return _Samples(rate, header=False) if rate == to else _Resampled(rate, to)


def sound_file(form: str, rate: int) -> SoundFile:
    """Return a writer of sound files in a format of `FORMS`, for samples at ``rate`` Hz.

    Raises
    ------
    ServeError
        If the format is not in `FORMS`, or does not support the sample rate.
    """
    if form not in FORMS:
        raise ServeError("unsupported", f"response_format is none of {', '.join(FORMS)}")
    _, container, codec = FORMS[form]
    if not container:
        return _Samples(rate, header=form == "wav")
    try:
        return _Coded(rate, container, codec)
    except (ValueError, OSError):
        raise ServeError("unsupported", f"{form} has no rate of {rate} samples a second; take wav") from None
