"""The encoder of one session's sound, which is encoded in order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from seko_serve.media import sound
from seko_serve.media.video import MICROSECONDS
from seko_serve.protocol import Codec, Media


class SoundTrack:
    """The sound packets of one session, whose times are those of the session's clock.

    Parameters
    ----------
    codec : Codec
        Codec of the packets.
    rate : int
        Samples per second of the sound to be encoded.
    """

    def __init__(self, codec: Codec, rate: int) -> None:
        self.codec, self.rate = codec, rate
        self._begin()
        self._position = 0  # with which the next packet begins, in samples at the packets' rate

    def _begin(self) -> None:
        self._encoder = sound.ENCODERS[self.codec](self.rate)
        self._begun = False

    def encode(self, samples: NDArray[np.float32], number: int, first: int) -> list[Media]:
        """Encode a chunk's samples, and return the packets that are now complete. The argument ``first`` is the number
        of the first sample in the session.
        """
        if not self._begun:
            self._position = max(self._position, first * self._encoder.packet_rate // self.rate)
        return self._media(self._encoder.encode(samples), number)

    def finish(self, number: int) -> list[Media]:
        """Return the remaining packets, padded with silence. The last packet that `finish` returns is marked as the
        last. Samples after `finish` begin a new stream of sound.

        `finish` always returns a last packet, which may be empty.
        """
        media = self._media(self._encoder.finish(), number)
        if not media:
            pts = self._position * MICROSECONDS // self._encoder.packet_rate
            media = [Media(self.codec, 0, number, self._position, pts, 0, b"", key=True)]
        self._begin()
        return [*media[:-1], replace(media[-1], last=True)]

    def _media(self, packets: list[tuple[bytes, int]], number: int) -> list[Media]:
        media = []
        for payload, count in packets:
            pts = self._position * MICROSECONDS // self._encoder.packet_rate
            new, self._begun = not self._begun, True
            media.append(
                Media(self.codec, 0, number, self._position, pts, count, payload, key=True, discontinuity=new)
            )
            self._position += count
        return media
