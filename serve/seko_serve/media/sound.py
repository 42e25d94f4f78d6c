"""Encoders of sound, which take any number of samples at a time and return packets of a fixed number of samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from fractions import Fraction

import av
import numpy as np
from numpy.typing import NDArray

from seko_serve.errors import ServeError
from seko_serve.protocol import SOUND_CODECS, Codec

Samples = NDArray[np.float32]


class SoundEncoder(ABC):
    """An encoder of one channel of sound, which takes samples in order.

    Parameters
    ----------
    rate : int
        Samples per second of the sound to be encoded.
    """

    codec: Codec

    def __init__(self, rate: int) -> None:
        self.rate = rate

    @abstractmethod
    def encode(self, samples: Samples) -> list[tuple[bytes, int]]:
        """Encode sound samples to packets.

        Parameters
        ----------
        samples : numpy.ndarray
            The samples, float32 [n] in -1..1; values outside this range are clipped.

        Returns
        -------
        list of (bytes, int)
            The complete packets, each with its number of samples at `packet_rate`.
        """

    @abstractmethod
    def finish(self) -> list[tuple[bytes, int]]:
        """Return the packets of the remaining samples, padded with silence."""

    @property
    def packet_rate(self) -> int:
        """Samples per second in the packets; an encoder's library may use another rate than the input's."""
        return self.rate

    @property
    def delay(self) -> int:
        """Number of samples, at `packet_rate`, that a decoder returns before the first sample of the input."""
        return 0


class PcmEncoder(SoundEncoder):
    """The encoder of uncompressed sound: signed 16-bit samples, little endian."""

    codec = Codec.PCM

    def encode(self, samples: Samples) -> list[tuple[bytes, int]]:
        """Return the samples as one packet; see `SoundEncoder.encode`."""
        if not samples.size:
            return []
        whole = np.rint(np.clip(samples, -1.0, 1.0) * 32767).astype("<i2")
        return [(whole.tobytes(), whole.size)]

    def finish(self) -> list[tuple[bytes, int]]:
        """Return no packets, because this encoder holds no samples back."""
        return []


class _LibraryEncoder(SoundEncoder):
    """A sound encoder of FFmpeg's libraries, with the resampling that it needs."""

    _name: str
    _layout = "mono"
    _bit_rate: int

    def __init__(self, rate: int) -> None:
        super().__init__(rate)
        context = av.CodecContext.create(self._name, "w")
        if not isinstance(context, av.AudioCodecContext):  # pragma: no cover - the names are of sound codecs
            raise TypeError(self._name)
        context.layout, context.bit_rate = self._layout, self._bit_rate
        context.sample_rate = self.packet_rate
        context.format = self._format
        context.time_base = Fraction(1, self.packet_rate)
        context.open()
        self._context = context
        self._resampler = av.AudioResampler(self._format, self._layout, self.packet_rate, context.frame_size)
        self._samples_encoded = 0

    @property
    def _format(self) -> str:
        return "fltp"

    def encode(self, samples: Samples) -> list[tuple[bytes, int]]:
        """Encode sound samples; see `SoundEncoder.encode`."""
        if not samples.size:
            return []
        clipped = np.clip(np.ascontiguousarray(samples, np.float32), -1.0, 1.0)[None]
        frame = av.AudioFrame.from_ndarray(clipped, format="fltp", layout=self._layout)
        frame.sample_rate, frame.time_base, frame.pts = (
            self.rate,
            Fraction(1, self.rate),
            self._samples_encoded,
        )
        self._samples_encoded += samples.size
        return list(self._packets(self._resampler.resample(frame)))

    def finish(self) -> list[tuple[bytes, int]]:
        """Return the packets of the remaining samples; see `SoundEncoder.finish`."""
        packets = list(self._packets(self._resampler.resample(None)))
        return [
            *packets,
            *(
                (self._packed(bytes(packet)), self._context.frame_size)
                for packet in self._context.encode(None)
            ),
        ]

    def _packets(self, frames: list[av.AudioFrame]) -> Iterator[tuple[bytes, int]]:
        for frame in frames:
            for packet in self._context.encode(frame):
                yield self._packed(bytes(packet)), self._context.frame_size

    def _packed(self, payload: bytes) -> bytes:
        return payload


class OpusEncoder(_LibraryEncoder):
    """The encoder of Opus sound at 48 kHz, in packets of 20 ms."""

    codec = Codec.OPUS
    _name, _bit_rate = "libopus", 48_000

    @property
    def _format(self) -> str:
        return "flt"

    @property
    def packet_rate(self) -> int:
        """Sample rate of the packets: 48 kHz, the only rate of Opus here."""
        return 48_000

    @property
    def delay(self) -> int:
        """Number of samples that a decoder drops at the beginning: the pre-skip of the Opus header."""
        header = self._context.extradata
        return 0 if header is None else int.from_bytes(header[10:12], "little")


class AacEncoder(_LibraryEncoder):
    """The encoder of AAC-LC sound, in packets of 1,024 samples, each with an ADTS header, so that a decoder can begin
    with any packet."""

    codec = Codec.AAC
    _name, _bit_rate = "aac", 96_000
    _RATES = (96_000, 88_200, 64_000, 48_000, 44_100, 32_000, 24_000, 22_050, 16_000, 12_000, 11_025, 8_000)

    def __init__(self, rate: int) -> None:
        if rate not in self._RATES:
            raise ServeError("unsupported", f"AAC has no rate of {rate} samples a second")
        super().__init__(rate)

    @property
    def delay(self) -> int:
        """Number of samples that a decoder returns before the sound: the transform's window begins one packet
        earlier."""
        return self._context.frame_size

    def _packed(self, payload: bytes) -> bytes:
        size, rate = len(payload) + 7, self._RATES.index(self.rate)
        # Sync word and MPEG-4 without a checksum; LC profile, rate, one channel; size; a full buffer; one block.
        bits = 0xFFF1 << 40 | 1 << 38 | rate << 34 | 1 << 30 | size << 13 | 0x7FF << 2
        return bits.to_bytes(7, "big") + payload


ENCODERS: dict[Codec, type[SoundEncoder]] = {
    encoder.codec: encoder for encoder in (PcmEncoder, OpusEncoder, AacEncoder)
}


def chosen_codec(offered: tuple[str, ...]) -> Codec:
    """Return the first sound codec of a client's list that the server can encode; ServeError if there is none."""
    for name in offered:
        codec = SOUND_CODECS.get(name)
        if codec in ENCODERS:
            return codec
    known = ", ".join(SOUND_CODECS)
    raise ServeError("unsupported", f"none of the client's sound codecs is known, expected one of {known}")


def facts(codec: Codec, rate: int) -> dict[str, object]:
    """Return the facts about a codec that a client needs: samples per second of the packets, and the decoder's delay
    in samples.
    """
    encoder = ENCODERS[codec](rate)
    return {"rate": encoder.packet_rate, "delay": encoder.delay, "channels": 1}
