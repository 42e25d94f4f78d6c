"""Reader of the sound in a file as one voice: the mean of its channels, at the sample rate that models take."""

from __future__ import annotations

import wave
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import InputFileError
from seko_runtime.media_files.containers import SOUND_FORMATS, opened, read_head, sound_format

MAX_SOUND_S = 7200
VOICE_RATE = 16_000  # samples a second that models hear
MIN_FILE_RATE = 4000  # samples a second: of a lower rate a small file would become very many samples


def load_sound(
    path: Path, option: str = "--audio", max_s: float = MAX_SOUND_S, *, rate: int = VOICE_RATE
) -> NDArray[np.float32]:
    """Read a voice from a sound file, float32 [N] in -1..1 at ``rate`` Hz.

    A wav file with one channel, 16 bits and rate ``rate`` is read with the standard library, any other file with PyAV.

    Raises
    ------
    InputFileError
        If the file is missing, empty or not sound, or longer than ``max_s`` seconds.
    VideoWriterError
        If reading the file needs PyAV, and PyAV is not installed.
    """
    what = f"{option} {path}"
    form = sound_format(read_head(path, what))
    if form is None:
        raise InputFileError(
            f"{what} is no sound: its first bytes are of none of {SOUND_FORMATS}; convert it to a wav"
        )
    voice = _plain_wav(path, what, max_s, rate) if form == "wav" else None
    if voice is None:
        voice = _decoded(path, form, option, max_s, rate)
    if not len(voice):
        raise InputFileError(f"{what} holds no sample")
    return voice


def _too_long(what: str, max_s: float) -> InputFileError:
    return InputFileError(f"{what} is longer than {max_s:g} s, which is the most that is read; cut it")


def _plain_wav(path: Path, what: str, max_s: float, rate: int) -> NDArray[np.float32] | None:
    """Return the samples of a wav file that needs no conversion; None for any other file."""
    try:
        with wave.open(str(path), "rb") as file:
            if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, rate):
                return None
            # By what the file holds, not by what its header says: one that was cut off is read as far as it goes.
            if min(file.getnframes(), path.stat().st_size // 2) > max_s * rate:
                raise _too_long(what, max_s)
            frames = file.readframes(file.getnframes())
            samples = np.frombuffer(frames, "<i2", len(frames) // 2)  # half a sample where the file was cut
    except (wave.Error, EOFError, RuntimeError):  # the last: a chunk longer than its file
        return None
    return samples.astype(np.float32) / np.float32(32768)


def _decoded(path: Path, form: str, option: str, max_s: float, rate: int) -> NDArray[np.float32]:
    what = f"{option} {path}"
    advice = f"give a wav of one channel, 16 bits and {rate} Hz, or pip install av"
    parts: list[NDArray[np.float32]] = []
    length = 0
    with opened(path, form, f"{what} is no sound", f"for {option} {advice}") as container:
        import av  # there, since `opened` has it

        if not container.streams.audio:
            raise InputFileError(f"{what} holds no sound")
        library: Any = av
        # The file's own channels, side by side in one plane: PyAV crashes where a frame has eight planes.
        resampler = library.AudioResampler(format="flt", rate=rate)
        for frame in chain(container.decode(audio=0), [None]):  # None: what the resampler still holds
            if frame is not None and frame.sample_rate < MIN_FILE_RATE:
                raise InputFileError(
                    f"{what} has {frame.sample_rate} samples a second, expected at least {MIN_FILE_RATE}: convert it"
                )
            for resampled in resampler.resample(frame):
                samples = resampled.to_ndarray().reshape(resampled.samples, -1)  # [n, channels]
                parts.append(samples.mean(1, dtype=np.float32))
                length += len(parts[-1])
            if length > max_s * rate:
                raise _too_long(what, max_s)
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)
