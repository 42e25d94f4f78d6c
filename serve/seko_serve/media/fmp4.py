"""Fragmented MP4 with one segment for each H.264 frame, for the browser's MediaSource. Times in the fragmented MP4 are
counted in parts of a second of which a frame takes a whole number: at 7.5 frames a second, two of fifteen."""

from __future__ import annotations

import re
import struct
from fractions import Fraction
from itertools import pairwise

_START = re.compile(b"\0\0\0?\1")  # before each NAL unit of Annex B
_SPS, _PPS = 7, 8  # types of NAL units
_MATRIX = struct.pack(">9I", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
_KEY_FLAGS, _DELTA_FLAGS = (
    0x0200_0000,
    0x0101_0000,
)  # depends on no sample; depends on others and is no sync sample


def nal_units(annex_b: bytes) -> list[bytes]:
    """Return the NAL units (H.264's packets) of a frame in the format Annex B."""
    marks = [(match.start(), match.end()) for match in _START.finditer(annex_b)]
    return [annex_b[begin:end] for (_, begin), (end, _) in pairwise([*marks, (len(annex_b), 0)])]


def init_segment(frame: bytes, width: int, height: int, fps: Fraction | int) -> bytes:
    """Return the initialisation of a stream whose key frame ``frame``, in Annex B, has the parameter sets."""
    units = {unit[0] & 31: unit for unit in nal_units(frame)}
    sps, pps = units[_SPS], units[_PPS]
    configuration = _box(
        b"avcC",
        bytes((1, *sps[1:4], 0xFF, 0xE1)) + _sized(sps, ">H") + b"\1" + _sized(pps, ">H"),
    )
    size = struct.pack(">HH", width, height)
    sample = struct.pack(">6xH16x", 1) + size + struct.pack(">IIIH32xHh", 72 << 16, 72 << 16, 0, 1, 24, -1)
    description = _full(b"stsd", struct.pack(">I", 1) + _box(b"avc1", sample + configuration))
    tables = b"".join(_full(name, bytes(4)) for name in (b"stts", b"stsc", b"stco")) + _full(
        b"stsz", bytes(8)
    )
    reference = _full(b"dref", struct.pack(">I", 1) + _full(b"url ", b"", flags=1))
    information = _box(
        b"minf",
        _full(b"vmhd", bytes(8), flags=1) + _box(b"dinf", reference) + _box(b"stbl", description + tables),
    )
    media = _box(
        b"mdia",
        _full(b"mdhd", struct.pack(">8xI4xH2x", fps.numerator, 0x55C4))  # no language
        + _full(b"hdlr", struct.pack(">4x4s13x", b"vide"))
        + information,
    )
    track = _full(  # enabled and part of the movie
        b"tkhd", struct.pack(">8xI24x", 1) + _MATRIX + struct.pack(">II", width << 16, height << 16), flags=3
    )
    movie = _full(
        b"mvhd",
        struct.pack(">8xI4xIH10x", fps.numerator, 1 << 16, 1 << 8) + _MATRIX + struct.pack(">24xI", 2),
    )
    extends = _box(b"mvex", _full(b"trex", struct.pack(">IIIII", 1, 1, 0, 0, 0)))
    return _box(b"ftyp", b"isom\0\0\2\0isomiso5avc1") + _box(
        b"moov", movie + _box(b"trak", track + media) + extends
    )


def media_segment(frame: bytes, number: int, fps: Fraction | int, *, key: bool) -> bytes:
    """Return the media segment of one H.264 frame, which is given in Annex B and has the number ``number`` in the
    stream."""
    sample = b"".join(_sized(unit, ">I") for unit in nal_units(frame) if unit[0] & 31 not in (_SPS, _PPS))

    def fragment(offset: int) -> bytes:
        run = struct.pack(
            ">IiIII", 1, offset, fps.denominator, len(sample), _KEY_FLAGS if key else _DELTA_FLAGS
        )  # one sample of one frame's length
        track = (
            _full(b"tfhd", struct.pack(">I", 1), flags=0x02_0000)  # offsets count from the fragment
            + _full(b"tfdt", struct.pack(">Q", number * fps.denominator), version=1)
            + _full(b"trun", run, flags=0x701)
        )
        return _box(b"moof", _full(b"mfhd", struct.pack(">I", number + 1)) + _box(b"traf", track))

    return fragment(len(fragment(0)) + 8) + _box(b"mdat", sample)


def _box(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content) + 8) + name + content


def _full(name: bytes, content: bytes, *, flags: int = 0, version: int = 0) -> bytes:
    return _box(name, struct.pack(">I", version << 24 | flags) + content)


def _sized(unit: bytes, form: str) -> bytes:
    return struct.pack(form, len(unit)) + unit
