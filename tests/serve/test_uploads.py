"""Uploads: a picture's size is read before it is decoded, and what is too large or damaged is refused by a word."""

from __future__ import annotations

import zlib
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seko_serve.errors import ServeError
from seko_serve.media import uploads

PIXEL_FORMATS = {"png": "rgb24", "mjpeg": "yuvj444p", "libwebp": "bgra"}


def coded(picture: np.ndarray, codec: str) -> bytes:
    """A file of one picture, by PyAV."""
    context = av.CodecContext.create(codec, "w")
    assert isinstance(context, av.VideoCodecContext)
    context.height, context.width = picture.shape[:2]
    context.pix_fmt, context.time_base = PIXEL_FORMATS[codec], Fraction(1)
    frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format=context.pix_fmt)
    return b"".join(bytes(packet) for packet in [*context.encode(frame), *context.encode(None)])


@pytest.mark.parametrize("codec", PIXEL_FORMATS)
@pytest.mark.parametrize("size", [(16, 48), (131, 77)])
def test_a_picture_is_decoded_in_the_size_that_its_header_says(codec: str, size: tuple[int, int]) -> None:
    rows, columns = np.mgrid[: size[0], : size[1]]
    picture = np.stack((rows, columns, rows + columns), -1).astype(np.uint8)
    data = coded(picture, codec)
    decoded = uploads.decoded_picture(data)
    assert decoded.shape == picture.shape
    assert np.abs(decoded.astype(int) - picture).mean() < 12


@pytest.mark.parametrize("codec", ["png", "mjpeg"])
def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytearray(coded(np.zeros((16, 16, 3), np.uint8), codec))
    at = 16 if codec == "png" else data.index(b"\xff\xc0") + 5
    size = (60_000).to_bytes(4 if codec == "png" else 2)
    data[at : at + 2 * len(size)] = size * 2
    if codec == "png":
        data[29:33] = zlib.crc32(data[12:29]).to_bytes(4)
    monkeypatch.setattr(uploads, "load_image", None)  # calling it fails
    with pytest.raises(ServeError, match="60000 x 60000 pixels") as refused:
        uploads.decoded_picture(bytes(data))
    assert refused.value.kind.code == "too_large"


def test_a_picture_that_cannot_be_taken_is_refused_with_the_readers_reason() -> None:
    reason = "^last_image has 48 x 4 pixels, expected at least 8 along each side$"
    with pytest.raises(ServeError, match=reason):
        uploads.decoded_picture(coded(np.zeros((4, 48, 3), np.uint8), "png"), "last_image")


@given(
    st.sampled_from([b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"RIFF....WEBPVP8X", b"RIFF....WEBPVP8 ", b""]),
    st.binary(),
)
def test_no_header_breaks_the_reading_of_its_size(head: bytes, rest: bytes) -> None:
    with pytest.raises(ServeError) as refused:
        uploads.decoded_picture(head + rest)
    assert refused.value.kind.code in ("bad_request", "too_large")


@pytest.mark.parametrize("codec", PIXEL_FORMATS)
def test_a_damaged_picture_is_refused_without_the_names_of_files(codec: str) -> None:
    data = coded(np.zeros((64, 64, 3), np.uint8), codec)[:60]
    with pytest.raises(ServeError, match="image is no picture") as refused:
        uploads.decoded_picture(data)
    assert "/" not in refused.value.message


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_picture_of_broken_data_is_refused_without_words_of_the_decoder(damage: str) -> None:
    """Its header is whole. The decoder has a limit of its own, and names its functions."""
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    data = coded(noise, "png")
    half = len(data) // 2
    broken = data[:half] + (bytes(byte ^ 0x5A for byte in data[half:]) if damage == "flipped" else b"")
    with pytest.raises(ServeError) as refused:
        uploads.decoded_picture(broken)
    assert refused.value.message == "image is no picture that can be decoded: expected PNG, JPEG or WebP"
    assert refused.value.kind.code == "bad_request"


def test_a_damaged_sound_is_refused_without_the_names_of_files() -> None:
    with pytest.raises(ServeError, match="ref_audio is no sound") as refused:
        uploads.decoded_sound(b"RIFF....WAVE", "ref_audio")
    assert "/" not in refused.value.message


def test_long_sounds_and_large_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    head = b"RIFF\xff\xff\xff\x7fWAVEfmt \x10\0\0\0\x01\0\x01\0\x80\x3e\0\0\0\x7d\0\0\x02\0\x10\0data\xff\xff\xff\x7f"
    assert len(uploads.decoded_sound(head + bytes(31_800), max_s=1)) == 15_900
    with pytest.raises(ServeError, match=r"^voice is longer than 1 s"):
        uploads.decoded_sound(head + bytes(33_000), max_s=1)
    monkeypatch.setattr(uploads, "MAX_SOUND_BYTES", 100)
    with pytest.raises(ServeError, match="at most 100 are taken"):
        uploads.decoded_sound(head + bytes(64))
    with pytest.raises(ServeError, match="more than 100 bytes"):
        uploads.data_of("A" * 140, "voice", 100)


@given(st.binary(max_size=200), st.booleans())
def test_uploads_are_base64_with_or_without_the_head_of_a_data_url(data: bytes, url: bool) -> None:
    import base64

    text = base64.b64encode(data).decode()
    assert uploads.data_of("data:image/png;base64," + text if url else text, "image", 200) == data


@pytest.mark.parametrize(
    "table",
    [
        None,
        {"dtype": "float64", "shape": [1], "data": ""},
        {"dtype": "float32", "shape": [-1], "data": ""},
        {"dtype": "float32", "shape": [1 << 40, 1 << 40], "data": ""},
        {"dtype": "float32", "shape": [True], "data": "AAAAAA=="},
        {"dtype": "float32", "shape": [2], "data": "AAAAAA=="},
    ],
)
def test_arrays_that_are_none_are_refused(table: object) -> None:
    with pytest.raises(ServeError, match=r"inputs\.x"):
        uploads.array_of(table, "inputs.x")


def test_an_array_is_read_as_it_is_given() -> None:
    array = uploads.array_of({"dtype": "float32", "shape": [1, 2], "data": "AACAPwAAAEA="}, "inputs.x")
    assert array.tolist() == [[1.0, 2.0]]


def test_an_upload_for_which_there_is_no_space_may_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> object:
        return open("/dev/full", "wb")

    monkeypatch.setattr(uploads.tempfile, "NamedTemporaryFile", full)
    with pytest.raises(ServeError, match="no space for image") as refused:
        uploads.decoded_picture(coded(np.zeros((16, 16, 3), np.uint8), "png"))
    assert (refused.value.kind.code, refused.value.kind.retryable) == ("full", True)
