"""Encoders of video frames: each frame becomes one packet, without waiting for later frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from typing import ClassVar

import av
import numpy as np
from av.video.reformatter import Interpolation, VideoReformatter
from numpy.typing import NDArray
from PIL import Image

from seko_serve.errors import ServeError
from seko_serve.media import fmp4
from seko_serve.protocol import VIDEO_CODECS, Codec

Frame = NDArray[np.uint8]
_STILLS: Mapping[str, Mapping[str, int]] = {
    "webp": {"method": 0},
    "jpeg": {"subsampling": 0},
}  # fast; full colours
MICROSECONDS = 1_000_000
# Each colour is the mean of four pixels: nearer to it than FFmpeg's default, which takes two thirds longer.
_CHROMA = Interpolation.AREA | Interpolation.FULL_CHR_H_INP
GOP = 1 << 16  # frames between key frames that nobody asked for: a key frame costs ten others
SOURCE_GOP = 1 << 8  # ... for a MediaSource, which can forget what it showed only from key frame to key frame


@dataclass(frozen=True)
class Packet:
    """One encoded video frame.

    Parameters
    ----------
    payload : bytes
        The encoded bytes of the frame.
    key : bool
        Whether a decoder can begin with this frame (a key frame).
    """

    payload: bytes
    key: bool


class VideoEncoder(ABC):
    """An encoder of video frames for one viewer, which takes frames in order.

    Parameters
    ----------
    width, height : int
        Size of the video frames in pixels; both even.
    fps : Fraction or int
        Number of video frames in a second.
    """

    codec: Codec

    def __init__(self, width: int, height: int, fps: Fraction | int) -> None:
        self.width, self.height, self.fps = width, height, fps
        self._number = 0
        self._wants_key = True

    def request_key(self) -> None:
        """Make the next frame a key frame, for a viewer that joins or whose decoder lost messages."""
        self._wants_key = True

    def encode(self, frame: Frame) -> Packet:
        """Encode one video frame to a packet.

        Parameters
        ----------
        frame : numpy.ndarray
            The video frame, uint8 [height, width, 3], RGB.
        """
        if frame.shape != (self.height, self.width, 3) or frame.dtype != np.uint8:
            raise ValueError(
                f"a frame is {frame.dtype} {list(frame.shape)}, expected uint8 [{self.height}, {self.width}, 3]"
            )
        key, self._wants_key = self._wants_key, False
        packet = self._encode(np.ascontiguousarray(frame), key)
        self._number += 1
        return packet

    @abstractmethod
    def _encode(self, frame: Frame, key: bool) -> Packet:
        """Encode a video frame, as a key frame if requested."""


class _LibraryEncoder(VideoEncoder):
    """A video encoder of FFmpeg's libraries."""

    _name: str
    _options: ClassVar[dict[str, str]]
    _gop = GOP

    def __init__(self, width: int, height: int, fps: Fraction | int) -> None:
        super().__init__(width, height, fps)
        context = av.CodecContext.create(self._name, "w")
        if not isinstance(context, av.VideoCodecContext):  # pragma: no cover - the names are of video codecs
            raise TypeError(self._name)
        context.width, context.height, context.pix_fmt = width, height, "yuv420p"
        context.time_base, context.framerate = Fraction(1, fps), Fraction(fps)
        context.gop_size, context.max_b_frames, context.thread_count = self._gop, 0, 1
        context.options = dict(self._options)
        self._context = context
        self._reformatter = VideoReformatter()

    def _encode(self, frame: Frame, key: bool) -> Packet:
        picture = _in_planes(self._reformatter, frame, "yuv420p")
        picture.pts, picture.time_base = self._number, Fraction(1, self.fps)
        picture.pict_type = av.video.frame.PictureType.I if key else av.video.frame.PictureType.NONE
        packets = list(self._context.encode(picture))
        if len(packets) != 1:
            raise RuntimeError(f"{self._name} gave {len(packets)} packets for a frame, expected one at once")
        return Packet(bytes(packets[0]), packets[0].is_keyframe)


class H264Encoder(_LibraryEncoder):
    """The encoder of H.264 video as Annex B, with parameter sets in each key frame."""

    codec = Codec.H264
    _name = "libx264"
    _options: ClassVar = {
        "preset": "superfast",
        "tune": "zerolatency",
        "profile": "baseline",
        "crf": "21",
        "forced-idr": "1",
        # partitions: a quarter of the time on grain, and no more bytes
        "x264-params": "repeat-headers=1:annexb=1:scenecut=0:partitions=none",
    }


class Vp8Encoder(_LibraryEncoder):
    """The encoder of VP8 video in real time."""

    codec = Codec.VP8
    _name = "libvpx"
    _options: ClassVar = {
        "deadline": "realtime",
        "cpu-used": "8",
        "lag-in-frames": "0",
        "error-resilient": "1",
        "b": "2M",
        "crf": "12",
    }


class RawEncoder(VideoEncoder):
    """The encoder of uncompressed video frames, 3 bytes a pixel."""

    codec = Codec.RGB24

    def _encode(self, frame: Frame, key: bool) -> Packet:
        del key
        return Packet(frame.tobytes(), True)


class MjpegEncoder(VideoEncoder):
    """The encoder of video as one JPEG for each frame."""

    codec = Codec.MJPEG

    def _encode(self, frame: Frame, key: bool) -> Packet:
        del key
        context = av.CodecContext.create("mjpeg", "w")
        if not isinstance(context, av.VideoCodecContext):  # pragma: no cover - it is a video codec
            raise TypeError("mjpeg")
        context.width, context.height, context.pix_fmt = self.width, self.height, "yuvj420p"
        context.time_base, context.options = Fraction(1, self.fps), {"qmin": "3", "qmax": "3"}
        picture = _in_planes(VideoReformatter(), frame, "yuvj420p")
        return Packet(b"".join(bytes(packet) for packet in _all_packets(context, picture)), True)


class Fmp4Encoder(H264Encoder):
    """Segments of fragmented MP4 with H.264, for MediaSource, which also works on pages without HTTPS.

    Each key frame's segment comes after an initialisation segment, so that a player can begin there.
    """

    codec = Codec.FMP4
    _gop = SOURCE_GOP

    def _encode(self, frame: Frame, key: bool) -> Packet:
        packet = super()._encode(frame, key)
        segment = fmp4.media_segment(packet.payload, self._number, self.fps, key=packet.key)
        begin = fmp4.init_segment(packet.payload, self.width, self.height, self.fps) if packet.key else b""
        return Packet(begin + segment, packet.key)


ENCODERS: dict[Codec, type[VideoEncoder]] = {
    encoder.codec: encoder for encoder in (H264Encoder, Vp8Encoder, RawEncoder, MjpegEncoder, Fmp4Encoder)
}


def chosen_codec(offered: tuple[str, ...]) -> Codec:
    """Return the first video codec of a client's list that the server can encode; ServeError if there is none."""
    for name in offered:
        codec = VIDEO_CODECS.get(name)
        if codec in ENCODERS:
            return codec
    raise ServeError(
        "unsupported",
        f"none of the client's video codecs is known, expected one of {', '.join(VIDEO_CODECS)}",
    )


def still(frame: Frame, form: str, quality: int) -> bytes:
    """Return a video frame as a picture: a file of WebP or JPEG.

    Parameters
    ----------
    frame : numpy.ndarray
        The video frame, uint8 [height, width, 3], RGB.
    form : str
        ``webp`` or ``jpeg``.
    quality : int
        The picture's quality, 1 to 100.
    """
    written = BytesIO()
    Image.fromarray(frame).save(written, form, quality=quality, **_STILLS[form])
    return written.getvalue()


def pts_us(frame: int, fps: float) -> int:
    """Return the time at which a video frame is shown, in microseconds from the stream's start."""
    return int(frame * MICROSECONDS // fps)


def _in_planes(reformatter: VideoReformatter, frame: Frame, planes: str) -> av.VideoFrame:
    """Return an RGB frame as the planes that an encoder takes, made by this thread alone."""
    picture = av.VideoFrame.from_numpy_buffer(frame, format="rgb24")
    return reformatter.reformat(picture, format=planes, interpolation=_CHROMA, threads=1)


def _all_packets(
    context: av.VideoCodecContext, picture: av.VideoFrame
) -> Iterator[av.Packet[av.VideoStream]]:
    yield from context.encode(picture)
    yield from context.encode(None)
