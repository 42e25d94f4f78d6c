"""Pictures and sound of strangers: what is read, what is refused, and that no file leads to another."""

from __future__ import annotations

import struct
import subprocess
import sys
import wave
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seko_runtime.errors import InputFileError, UsageError
from seko_runtime.format.manifest import MAX_PIXELS
from seko_runtime.media_files.arrays import load_array
from seko_runtime.media_files.containers import picture_format, sound_format
from seko_runtime.media_files.picture_heads import picture_head, turned_upright
from seko_runtime.media_files.pictures import load_image
from seko_runtime.media_files.sound import VOICE_RATE, load_sound

av: Any = pytest.importorskip("av")
PLAYLISTS = {
    "ffconcat": "ffconcat version 1.0\nfile '{}'\n",
    "m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n",
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=audio 9 RTP/AVP 0\n",
    "mpd": '<?xml version="1.0"?><MPD><Period><AdaptationSet><Representation><BaseURL>{}</BaseURL>'
    "</Representation></AdaptationSet></Period></MPD>",
    "svg": '<svg xmlns="http://www.w3.org/2000/svg"><image href="{}"/></svg>',
}
SIDE = 16


def picture(side: int = SIDE) -> np.ndarray:
    """Return a picture of smooth colours."""
    ramp = np.linspace(0, 255, side, dtype=np.uint8)
    return np.stack(np.broadcast_arrays(ramp[:, None], ramp[None], np.uint8(128)), -1)


def write_picture(path: Path, form: str, codec: str, pixels: str) -> None:
    """Write a picture in a format of FFmpeg's."""
    with av.open(str(path), "w", format=form) as container:
        stream = container.add_stream(codec, rate=1)
        stream.width = stream.height = SIDE
        stream.pix_fmt = pixels
        frame = av.VideoFrame.from_ndarray(picture(), format="rgb24").reformat(format=pixels)
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def write_sound(path: Path, form: str, codec: str, channels: np.ndarray, rate: int = VOICE_RATE) -> None:
    """Write sound, float32 [channels, N], in a format of FFmpeg's."""
    layout = "mono" if len(channels) == 1 else "stereo"
    with av.open(str(path), "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(channels), format="fltp", layout=layout)
        frame.sample_rate = rate
        resampler = av.AudioResampler(
            format=stream.format.name, layout=layout, rate=rate, frame_size=stream.frame_size or None
        )
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))


def tone(seconds: float = 0.5, rate: int = VOICE_RATE, loud: float = 0.5) -> np.ndarray:
    """Return a tone of 440 Hz, [N]."""
    return (loud * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


@pytest.mark.parametrize(
    ("form", "codec", "pixels", "near"),
    [
        ("image2", "png", "rgb24", 0),
        ("image2", "mjpeg", "yuvj444p", 8),
        ("image2", "bmp", "bgr24", 0),
        ("image2", "tiff", "rgb24", 0),
        ("gif", "gif", "rgb8", 90),
        ("mp4", "libx264", "yuv420p", 20),
    ],
)
def test_pictures_of_known_formats_are_read_whatever_they_are_called(
    tmp_path: Path, form: str, codec: str, pixels: str, near: int
) -> None:
    written, called = tmp_path / "made", tmp_path / "picture.m3u8"
    write_picture(written, form, codec, pixels)
    written.rename(called)
    error = np.abs(load_image(called).astype(int) - picture().astype(int))
    assert error.max() <= near


@pytest.mark.parametrize(
    ("form", "codec"),
    [
        ("wav", "pcm_s16le"),
        ("wav", "pcm_f32le"),
        ("flac", "flac"),
        ("ogg", "libopus"),
        ("mp3", "libmp3lame"),
        ("adts", "aac"),
        ("ipod", "aac"),
        ("aiff", "pcm_s16be"),
        ("webm", "libopus"),
    ],
)
def test_sound_of_known_formats_is_read_at_the_models_rate(tmp_path: Path, form: str, codec: str) -> None:
    path, rate = tmp_path / "voice.ffconcat", 48_000
    write_sound(path, form, codec, np.stack([tone(rate=rate)] * 2), rate)
    heard = load_sound(path)
    assert heard.dtype == np.float32
    assert abs(len(heard) - VOICE_RATE // 2) < VOICE_RATE // 8
    middle = heard[VOICE_RATE // 8 : 3 * VOICE_RATE // 8]
    assert 0.45 < middle.max() < 0.55


@pytest.mark.parametrize("name", PLAYLISTS)
@pytest.mark.parametrize("read", [load_image, load_sound])
def test_a_playlist_reads_no_other_file(tmp_path: Path, name: str, read: Any) -> None:
    """Not even one of its own folder, whatever the playlist is called."""
    secret = tmp_path / "secret.png"
    write_picture(secret, "image2", "png", "rgb24")
    write_sound(tmp_path / "secret.wav", "wav", "pcm_s16le", tone()[None], 48_000)
    other = "secret.png" if read is load_image else "secret.wav"
    for called in (f"innocent.{name}", "innocent.png", "innocent.wav"):
        path = tmp_path / called
        path.write_text(PLAYLISTS[name].format(other))
        with pytest.raises(UsageError, match="its first bytes are of none of"):
            read(path)


def test_numbered_files_are_not_found(tmp_path: Path) -> None:
    """FFmpeg's own name for a series of pictures is a file like any other here."""
    write_picture(tmp_path / "1.png", "image2", "png", "rgb24")
    with pytest.raises(UsageError, match="was not found"):
        load_image(tmp_path / "%d.png")


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a part of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int) -> bytes:
    """Return a black picture that compresses to almost nothing."""
    packer, row = zlib.compressobj(9), bytes(1 + width // 8 + (width % 8 > 0))
    packed = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


PEAK = """
import resource, sys
from pathlib import Path
from seko_runtime.errors import UsageError
from seko_runtime.media_files.pictures import load_image
import av, numpy
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    load_image(Path(sys.argv[1]))
except UsageError as fault:
    print(fault)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize("name", ["bomb.png", "sparse.npy"])
def test_a_picture_that_is_too_large_is_refused_before_it_takes_memory(tmp_path: Path, name: str) -> None:
    path, side = tmp_path / name, 20_000
    if name.endswith("png"):
        path.write_bytes(png_of(side, side))
    else:
        with path.open("wb") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": (2 * side, 2 * side, 3)}
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + 12 * side * side)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PEAK, str(path)], capture_output=True, text=True, check=True
    )
    said, peak = done.stdout.splitlines()
    assert str(MAX_PIXELS) in said or "at most" in said
    assert int(peak) < 50 << 20


@pytest.mark.parametrize("loud", [0.9, 0.3])
def test_channels_become_one_voice_by_their_mean(tmp_path: Path, loud: float) -> None:
    path = tmp_path / "stereo.wav"
    same, silent = tone(loud=loud), np.zeros(VOICE_RATE // 2, np.float32)
    for channels, expected in ((np.stack([same, same]), loud), (np.stack([same, silent]), loud / 2)):
        write_sound(path, "wav", "pcm_f32le", channels)
        assert np.abs(load_sound(path)).max() == pytest.approx(expected, abs=1e-3)


def write_wav(path: Path, channels: np.ndarray, rate: int = VOICE_RATE) -> None:
    """Write a sound, float32 [channels, N], as int16."""
    with wave.open(str(path), "wb") as file:
        file.setparams((len(channels), 2, rate, 0, "NONE", ""))
        file.writeframes((channels.T * 32767).astype("<i2").tobytes())


@pytest.mark.parametrize("channels", [1, 2, 3, 6, 7, 8, 9, 16, 64])
@pytest.mark.parametrize("rate", [VOICE_RATE, 48_000])
def test_any_number_of_channels_is_read(tmp_path: Path, channels: int, rate: int) -> None:
    """The mean of a tone in one channel and silence in all others."""
    path = tmp_path / "many.wav"
    sound = np.zeros((channels, rate // 2), np.float32)
    sound[-1] = tone(rate=rate, loud=0.9)
    write_wav(path, sound, rate)
    heard = load_sound(path)
    assert len(heard) == pytest.approx(VOICE_RATE // 2, abs=32)
    middle = heard[VOICE_RATE // 8 : 3 * VOICE_RATE // 8]
    assert np.abs(middle).max() == pytest.approx(0.9 / channels, rel=0.02, abs=1e-4)


def test_sound_of_a_rate_that_makes_very_many_samples_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "slow.wav"
    write_wav(path, np.zeros((1, 4096), np.float32), rate=1)  # an hour, in 8 kB
    with pytest.raises(UsageError, match="has 1 samples a second, expected at least 4000"):
        load_sound(path)


def test_files_without_what_is_asked_for(tmp_path: Path) -> None:
    film, song = tmp_path / "film.mp4", tmp_path / "song.mp4"
    write_picture(film, "mp4", "libx264", "yuv420p")
    write_sound(song, "ipod", "aac", tone()[None])
    with pytest.raises(UsageError, match="holds no sound"):
        load_sound(film)
    with pytest.raises(UsageError, match="holds no picture"):
        load_image(song)


def test_sound_that_is_too_long_is_refused_while_it_is_read(tmp_path: Path) -> None:
    packed, plain = tmp_path / "a.flac", tmp_path / "a.wav"
    write_sound(packed, "flac", "flac", tone(1.5)[None])
    with wave.open(str(plain), "wb") as file:
        file.setparams((1, 2, VOICE_RATE, 0, "NONE", ""))
        file.writeframes(bytes(2 * VOICE_RATE + 2))
    for path in (packed, plain):
        with pytest.raises(UsageError, match="is longer than 1 s"):
            load_sound(path, max_s=1)


def test_array_files_that_promise_more_than_they_hold(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((100, 100), np.float32))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UsageError, match="ends before its 40000 bytes"):
        load_array(path, "--text")
    np.save(path, np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(UsageError, match="expected an array of numbers"):
        load_array(path, "--text")


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("descr", ["<m8[s/0]", r"<m8\x5bs/0]", "[('a', '<m8[s/0]')]", "<f4"])
def test_array_files_whose_unit_is_a_part_of_nothing(version: int, descr: str, tmp_path: Path) -> None:
    """numpy divides by 0 for these, which ends the process."""
    path = tmp_path / "a.npy"
    shown = descr if descr.startswith("[") else f"'{descr}'"
    header = f"{{'descr': {shown}, 'fortran_order': False, 'shape': (2,)}}".encode()
    length = len(header).to_bytes(2 if version == 1 else 4, "little")
    path.write_bytes(b"\x93NUMPY" + bytes((version, 0)) + length + header + b"[\\" * 4)
    if descr == "<f4":
        assert load_array(path, "--text").dtype == np.float32  # whatever the numbers' bytes are
        return
    with pytest.raises(UsageError, match="expected an array of numbers"):
        load_array(path, "--text")


@given(st.binary(max_size=64))
def test_any_first_bytes_are_a_known_format_or_none(head: bytes) -> None:
    known = {
        *("png_pipe", "jpeg_pipe", "webp_pipe", "gif", "bmp_pipe", "tiff_pipe", "mov", "matroska"),
        *("wav", "flac", "ogg", "aiff", "caf", "au", "mp3", "aac", None),
    }
    assert {picture_format(head), sound_format(head)} <= known


@pytest.mark.parametrize("background", [255, 0])
@pytest.mark.parametrize(
    ("mode", "suffix"), [("RGBA", "png"), ("LA", "png"), ("P", "png"), ("RGBA", "webp"), ("RGBA", "tiff")]
)
def test_what_is_transparent_shows_the_background(
    tmp_path: Path, mode: str, suffix: str, background: int
) -> None:
    """Its colours are no part of the picture; programs that cut out a portrait leave what was there."""
    image = pytest.importorskip("PIL.Image")
    layers = np.concatenate([picture(), np.arange(SIDE * SIDE, dtype=np.uint8).reshape(SIDE, SIDE, 1)], -1)
    drawn = image.fromarray(layers)
    if mode == "P":
        drawn = image.fromarray(layers[:, :, :3]).quantize(16)
        drawn.info["transparency"] = bytes(range(0, 256, 16))
    elif mode == "LA":
        drawn = drawn.convert("LA")
    path = tmp_path / f"a.{suffix}"
    drawn.save(path, **{"lossless": True, "exact": True} if suffix == "webp" else {})
    opened = image.open(path).convert("RGBA")
    wanted = image.alpha_composite(image.new("RGBA", opened.size, (background,) * 3 + (255,)), opened)
    read = load_image(path, background=background).astype(int)
    assert np.abs(read - np.asarray(wanted)[:, :, :3]).max() <= 1
    assert np.ptp(read) > 100


def png_with(kind: bytes, data: bytes) -> bytes:
    """Return a picture of `png_of` with another chunk behind its header."""
    plain, header = png_of(SIDE, SIDE), 8 + 25
    return plain[:header] + chunk(kind, data) + plain[header:]


UNREADABLE = "is no picture of at most 67108864 pixels: [A-Z][a-z ]+$"  # without the decoder's functions


def broken_png() -> bytes:
    """Return a picture whose compressed data is damaged."""
    plain = png_of(SIDE, SIDE)
    start = plain.index(b"IDAT") + 4
    return plain[:start] + bytes(byte ^ 0x5A for byte in plain[start:])


def write_cmyk(path: Path, form: str) -> None:
    """Write a picture of four inks."""
    pillow = pytest.importorskip("PIL.Image")
    pillow.fromarray(picture()).convert("CMYK").save(path, form)


def late_animation() -> bytes:
    """An animated PNG with 70 kB of text before it says so."""
    content = png_with(b"tEXt", b"Comment\0" + b"x" * 70_000)
    pixels = content.index(b"IDAT") - 4
    return content[:pixels] + chunk(b"acTL", struct.pack(">II", 2, 0)) + content[pixels:]


def write_pages(path: Path, form: str) -> None:
    """Write two pictures with Pillow."""
    pillow = pytest.importorskip("PIL.Image")
    first, second = (pillow.fromarray(shade) for shade in (picture(), 255 - picture()))
    first.save(path, form, save_all=True, append_images=[second])


@pytest.mark.parametrize("more", [[], [1], [1, 1]])
def test_a_picture_of_one_page_is_read(tmp_path: Path, more: list[int]) -> None:
    """Beside it may be smaller copies, which cameras and scanners store."""
    pillow = pytest.importorskip("PIL.Image")
    pages = [pillow.fromarray(picture()) for _ in range(1 + len(more))]
    for page in pages[1:]:
        page.encoderinfo = {"tiffinfo": {254: 1}}
    pages[0].save(tmp_path / "a.tif", save_all=True, append_images=pages[1:])
    assert (load_image(tmp_path / "a.tif") == picture()).all()
    pages[0].save(tmp_path / "b.tif", save_all=True, append_images=[pages[0]])
    with pytest.raises(InputFileError, match="is animated"):
        load_image(tmp_path / "b.tif")


def avif_brands(major: bytes, *compatible: bytes) -> bytes:
    """The first box of an AVIF, with its brands."""
    brands = major + bytes(4) + b"".join(compatible)
    return struct.pack(">I", 8 + len(brands)) + b"ftyp" + brands + bytes(64)


@pytest.mark.parametrize("option", ["--image", "--last-image"])
@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda path: path.write_bytes(b""), "is empty: it has 0 bytes"),
        (lambda path: write_cmyk(path, "JPEG"), "has CMYK colours; convert it to sRGB"),
        (lambda path: write_cmyk(path, "TIFF"), "has CMYK colours; convert it to sRGB"),
        (lambda path: path.write_bytes(png_with(b"cICP", bytes([9, 16, 0, 1]))), "has HDR colours"),
        (lambda path: path.write_bytes(png_with(b"acTL", struct.pack(">II", 2, 0))), "is animated"),
        (lambda path: path.write_bytes(late_animation()), "is animated"),
        (lambda path: write_pages(path, "TIFF"), "is animated; give one of its pictures"),
        (lambda path: path.write_bytes(avif_brands(b"avif", b"mif1", b"avis")), "is animated"),
        (lambda path: path.write_bytes(avif_brands(b"avis", b"mif1")), "is animated"),
        (lambda path: write_pages(path, "WEBP"), "is animated"),
        (lambda path: write_pages(path, "GIF"), "is animated; give one of its pictures"),
        (lambda path: path.write_bytes(png_of(1, 1)), "has 1 x 1 pixels, expected at least 8 along each"),
        (lambda path: path.write_bytes(png_of(10_000, 10_000)), "is no picture of at most 67108864 pixels"),
        (lambda path: path.write_bytes(png_of(SIDE, SIDE).replace(b"IDAT", b"IDAX")), UNREADABLE),
        (lambda path: path.write_bytes(broken_png()), UNREADABLE),
    ],
    ids=[
        "empty",
        "cmyk-jpeg",
        "cmyk-tiff",
        "hdr",
        "apng",
        "late-apng",
        "tiff",
        "avis",
        "avis-first",
        "webp",
        "gif",
        "one-pixel",
        "100-megapixel",
        "no-data",
        "broken",
    ],
)
def test_pictures_that_are_refused_by_a_sentence(tmp_path: Path, write: Any, said: str, option: str) -> None:
    path = tmp_path / "first.png"
    write(path)
    with pytest.raises(InputFileError, match=f"^{option} {path} {said}") as caught:
        load_image(path, option)
    assert caught.value.exit_code == 3


def test_a_picture_of_colours_that_only_its_header_names_is_read(tmp_path: Path) -> None:
    """sRGB by name, and the first picture of a film."""
    (tmp_path / "a.png").write_bytes(png_with(b"cICP", bytes([1, 13, 0, 1])))
    assert load_image(tmp_path / "a.png").shape == (SIDE, SIDE, 3)


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize(
    ("name", "options"),
    [("a.jpg", {"quality": 95}), ("a.png", {}), ("a.webp", {"lossless": True}), ("a.tif", {})],
)
def test_a_picture_that_a_camera_stored_turned_or_mirrored_is_upright(
    tmp_path: Path, name: str, options: dict[str, Any], orientation: int
) -> None:
    """Also orientations that EXIF does not know, 0 and 9."""
    pillow, ops = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageOps")
    stored = np.zeros((32, 64, 3), np.uint8)
    stored[:16, :32], stored[16:, :32] = 255, 80  # no two corners are alike
    exif = pillow.Exif()
    exif[0x112] = orientation
    pillow.fromarray(stored).save(tmp_path / name, exif=exif, **options)
    with pillow.open(tmp_path / name) as file:
        upright = np.asarray(ops.exif_transpose(file)).astype(int)
    loaded = load_image(tmp_path / name)
    assert loaded.shape == upright.shape
    assert np.abs(loaded - upright).max() <= (8 if name == "a.jpg" else 0)


LETTER = np.arange(6).reshape(2, 3, 1)  # 0 1 2 above 3 4 5
STORED = {  # by orientation: rows that a camera stored of it
    1: "012 345",
    2: "210 543",
    3: "543 210",
    4: "345 012",
    5: "03 14 25",
    6: "25 14 03",
    7: "52 41 30",
    8: "30 41 52",
}


@pytest.mark.parametrize(("orientation", "rows"), STORED.items())
def test_orientations_are_turned_upright_as_exif_says(orientation: int, rows: str) -> None:
    stored = np.array([[[int(letter)] * 3 for letter in row] for row in rows.split()], np.uint8)
    assert np.array_equal(turned_upright(stored, orientation)[..., :1], LETTER)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_file_cut_off_anywhere_has_a_head_or_none(form: str) -> None:
    """Its orientation is that of the whole file or none."""
    pillow = pytest.importorskip("PIL.Image")
    exif, file = pillow.Exif(), BytesIO()
    exif[0x112] = 7
    pillow.fromarray(picture()).save(file, form, exif=exif)
    whole, name = file.getvalue(), {"TIFF": "tiff_pipe"}.get(form, f"{form.lower()}_pipe")
    assert picture_head(BytesIO(whole), name, SIDE**2).orientation == 7
    for size in range(len(whole)):
        head = picture_head(BytesIO(whole[:size]), name, SIDE**2)
        assert head is None or head.orientation in (1, 7)


def test_a_png_says_its_orientation_behind_the_picture(tmp_path: Path) -> None:
    plain, field = png_of(SIDE, SIDE), b"II" + struct.pack("<HIHHHIHxxI", 42, 8, 1, 0x112, 3, 1, 7, 0)
    (tmp_path / "a.png").write_bytes(plain[:-12] + chunk(b"eXIf", field) + plain[-12:])
    assert picture_head(tmp_path / "a.png", "png_pipe", SIDE**2).orientation == 7
