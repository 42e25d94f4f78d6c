"""Encoders: a decoder sees the video, a key frame comes where one is asked for, nothing waits."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

from seko_serve.errors import ServeError
from seko_serve.media.video import ENCODERS, SOURCE_GOP, VideoEncoder, chosen_codec, pts_us, still
from seko_serve.protocol import Codec

WIDTH, HEIGHT, FPS = 96, 64, 16
DECODERS = {Codec.H264: "h264", Codec.VP8: "vp8", Codec.MJPEG: "mjpeg"}


def frames(count: int) -> list[np.ndarray]:
    """A bright square that moves over a grey ramp."""
    ramp = np.repeat(np.linspace(40, 120, WIDTH, dtype=np.uint8)[None, :, None], HEIGHT, 0).repeat(3, 2)
    pictures = []
    for number in range(count):
        picture = ramp.copy()
        picture[20:40, 4 * number : 4 * number + 20] = (230, 60, 60)
        pictures.append(picture)
    return pictures


def decoded(codec: Codec, packets: list[bytes]) -> list[np.ndarray]:
    """Pictures of a decoder that is given the packets one by one and asked for no end."""
    if codec is Codec.RGB24:
        return [np.frombuffer(packet, np.uint8).reshape(HEIGHT, WIDTH, 3) for packet in packets]
    if codec is Codec.FMP4:
        with av.open(io.BytesIO(b"".join(packets))) as container:
            return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    context = av.CodecContext.create(DECODERS[codec], "r")
    pictures = []
    for packet in packets:
        pictures += [frame.to_ndarray(format="rgb24") for frame in context.decode(av.Packet(packet))]
    if codec is Codec.H264:  # FFmpeg's decoder keeps frames until it knows that none is to be shown earlier
        pictures += [frame.to_ndarray(format="rgb24") for frame in context.decode(None)]
    return pictures


@pytest.fixture(params=sorted(ENCODERS), ids=lambda codec: codec.name)
def encoder(request: pytest.FixtureRequest) -> VideoEncoder:
    return ENCODERS[request.param](WIDTH, HEIGHT, FPS)


def test_a_decoder_sees_the_video_and_every_frame_is_a_packet(encoder: VideoEncoder) -> None:
    wanted = frames(12)
    packets = [encoder.encode(frame) for frame in wanted]
    assert packets[0].key
    assert all(packet.payload for packet in packets)
    seen = decoded(encoder.codec, [packet.payload for packet in packets])
    assert len(seen) == len(wanted)
    for picture, frame in zip(seen, wanted, strict=True):
        error = np.abs(picture.astype(int) - frame).mean()
        assert error < 6, error


def test_a_viewer_that_joins_begins_with_the_key_frame_that_is_asked_for(encoder: VideoEncoder) -> None:
    wanted = frames(10)
    packets = []
    for number, frame in enumerate(wanted):
        if number == 6:
            encoder.request_key()
        packets.append(encoder.encode(frame))
    assert packets[6].key
    if encoder.codec in (Codec.H264, Codec.VP8, Codec.FMP4):
        assert [number for number, packet in enumerate(packets) if packet.key] == [0, 6]
    seen = decoded(encoder.codec, [packet.payload for packet in packets[6:]])
    assert len(seen) == 4
    assert np.abs(seen[0].astype(int) - wanted[6]).mean() < 6


@pytest.mark.parametrize("fps", [FPS, Fraction(15, 2), Fraction(30_000, 1001)])
def test_segments_of_mp4_tell_the_time_of_their_frame(fps: Fraction | int) -> None:
    encoder = ENCODERS[Codec.FMP4](WIDTH, HEIGHT, fps)
    packets = [encoder.encode(frame).payload for frame in frames(5)]
    with av.open(io.BytesIO(b"".join(packets))) as container:
        assert (container.streams.video[0].width, container.streams.video[0].height) == (WIDTH, HEIGHT)
        seen = [
            (packet.pts * packet.time_base, packet.is_keyframe) for packet in container.demux() if packet.size
        ]
    assert seen == [(number / Fraction(fps), number == 0) for number in range(5)]


def test_segments_of_mp4_have_key_frames_from_which_a_player_can_keep_them() -> None:
    encoder, (frame,) = ENCODERS[Codec.FMP4](WIDTH, HEIGHT, FPS), frames(1)
    packets = [encoder.encode(frame) for _ in range(2 * SOURCE_GOP + 1)]
    assert [number for number, packet in enumerate(packets) if packet.key] == [0, SOURCE_GOP, 2 * SOURCE_GOP]


def test_h264_is_annex_b_with_parameter_sets_in_the_key_frame() -> None:
    packet = ENCODERS[Codec.H264](WIDTH, HEIGHT, FPS).encode(frames(1)[0])
    kinds = [
        packet.payload[at + 4] & 31
        for at in range(len(packet.payload) - 4)
        if packet.payload[at : at + 4] == b"\0\0\0\1"
    ]
    assert kinds[:2] == [7, 8]
    profile = packet.payload[packet.payload.index(b"\0\0\0\1") + 5]
    assert profile == 66  # baseline, as the page asks its decoder for


def test_a_frame_of_another_size_is_refused() -> None:
    for codec in ENCODERS:
        with pytest.raises(ValueError, match="expected uint8"):
            ENCODERS[codec](WIDTH, HEIGHT, FPS).encode(np.zeros((HEIGHT, WIDTH + 2, 3), np.uint8))


def test_the_first_known_codec_of_the_client_is_taken() -> None:
    assert chosen_codec(("av1", "vp8", "h264")) is Codec.VP8
    with pytest.raises(ServeError, match="none of the client's video codecs"):
        chosen_codec(("av1", "opus"))


def test_frames_are_shown_at_their_rate() -> None:
    assert [pts_us(frame, 16) for frame in (0, 1, 16)] == [0, 62_500, 1_000_000]


@pytest.mark.parametrize("form", ["webp", "jpeg"])
def test_a_still_is_a_picture_of_the_frame_whose_quality_is_a_choice(form: str) -> None:
    (frame,) = frames(1)
    sizes = []
    for quality in (20, 95):
        file = still(frame, form, quality)
        with Image.open(io.BytesIO(file)) as picture:
            assert (picture.format, picture.size) == (form.upper(), (WIDTH, HEIGHT))
            seen = np.asarray(picture.convert("RGB")).astype(int)
        assert np.abs(seen - frame).mean() < 6
        sizes.append(len(file))
    assert sizes[0] < sizes[1]
