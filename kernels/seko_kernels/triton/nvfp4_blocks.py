"""Conversion of blocks of sixteen NVFP4 numbers to int8 keys and e4m3 values, in PTX assembly, a word at a time.

A block's codes are one 64-bit word, with its channels in rising order. One byte permutation looks up four codes in a
table of the eight magnitudes. The signs are set afterwards. In the table for keys, a byte is the high half of an fp16
number whose low half is zero. In the table for values, which is made from a block's scale, a byte is an e4m3 number.
With INTEGER the same bytes are computed one number at a time, for Triton's interpreter.

A *pair* is a key's even and odd channel, which are rotated together. An int32 holds two fp16 numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from seko_kernels.triton.e4m3_cast import to_e4m3
from seko_kernels.triton.e4m3_scale import e4m3_scale_decode


def _looked_up(word: str, first: str, second: str) -> str:
    """Return assembly that looks up the bytes of the eight codes in `word` in the table ``{lo, hi}`` of magnitudes,
    and sets the signs."""
    return f"""
        and.b32 m, {word}, 0x77777777;
        prmt.b32 {first}, lo, hi, m;
        shr.u32 m, m, 16;
        prmt.b32 {second}, lo, hi, m;
        shl.b32 m, {word}, 4;
        prmt.b32 s, m, {word}, 0xD9C8;
        and.b32 s, s, 0x80808080;
        or.b32 {first}, {first}, s;
        prmt.b32 s, m, {word}, 0xFBEA;
        and.b32 s, s, 0x80808080;
        or.b32 {second}, {second}, s;"""


# For two pairs: x = e * cos - o * sin, y = e * sin + o * cos; adding 1.5 * 2**10 rounds to whole numbers.
_TURN = """
        fma.rn.f16x2 e, e, $3, {even};
        fma.rn.f16x2 o, o, $3, {odd};
        mul.rn.f16x2 t, o, {sin};
        neg.f16x2 t, t;
        fma.rn.f16x2 x, e, {cos}, t;
        mul.rn.f16x2 t, o, {cos};
        fma.rn.f16x2 y, e, {sin}, t;
        add.rn.f16x2 x, x, c;
        add.rn.f16x2 y, y, c;"""
_TAKE = """
        fma.rn.f16x2 x, e, $3, c;
        fma.rn.f16x2 y, o, $3, c;"""


def _keys(turned: bool) -> str:
    """Return the assembly of `rotated_codes` or `plain_codes`, which make int8 keys."""
    text = """
        .reg .b32 m, s, lo, hi, low, high, w<4>, e, o, t, x, y, c;
        mov.b32 lo, 0x3E3C3800;
        mov.b32 hi, 0x46444240;
        mov.b32 c, 0x66006600;
        mov.b64 {low, high}, $2;"""
    text += _looked_up("low", "w0", "w1") + _looked_up("high", "w2", "w3")
    for two in range(4):
        text += f"prmt.b32 e, w{two}, 0, 0x2404; prmt.b32 o, w{two}, 0, 0x3414;"
        even, odd, cos, sin = (f"${4 + 4 * kind + two}" for kind in range(4))
        text += _TURN.format(even=even, odd=odd, cos=cos, sin=sin) if turned else _TAKE
        text += f"prmt.b32 w{two}, x, y, 0x6240;"
    return text + "mov.b64 $0, {w0, w1}; mov.b64 $1, {w2, w3};"


def _values() -> str:
    """Return the assembly of `value_words`: a table for each token, its bytes, and a transposition of four tokens'
    bytes."""
    text = ".reg .b32 m, s, a, b, lo, hi, low, high, w<16>, t<4>; .reg .b16 x, y;"
    for token in range(4):
        text += f"mov.b64 {{low, high}}, ${16 + token};"
        for table, first, second in (("lo", 0x38000000, 0x3E003C00), ("hi", 0x42004000, 0x46004400)):
            text += f"""
        mov.b32 a, {first:#x};
        mul.rn.f16x2 a, a, ${20 + token};
        cvt.rn.satfinite.e4m3x2.f16x2 x, a;
        mov.b32 b, {second:#x};
        mul.rn.f16x2 b, b, ${20 + token};
        cvt.rn.satfinite.e4m3x2.f16x2 y, b;
        mov.b32 {table}, {{x, y}};"""
        text += _looked_up("low", f"w{token}", f"w{4 + token}")
        text += _looked_up("high", f"w{8 + token}", f"w{12 + token}")
    for four in range(0, 16, 4):
        text += f"""
        prmt.b32 t0, w{four}, w{four + 1}, 0x5140;
        prmt.b32 t1, w{four + 2}, w{four + 3}, 0x5140;
        prmt.b32 t2, w{four}, w{four + 1}, 0x7362;
        prmt.b32 t3, w{four + 2}, w{four + 3}, 0x7362;
        prmt.b32 ${four}, t0, t1, 0x5410;
        prmt.b32 ${four + 1}, t0, t1, 0x7632;
        prmt.b32 ${four + 2}, t2, t3, 0x5410;
        prmt.b32 ${four + 3}, t2, t3, 0x7632;"""
    return text


def _scope(text: str) -> tl.constexpr:
    """Return assembly in a scope of its own, as one line, because torch's compiler copies such a string without
    escapes."""
    return tl.constexpr("{ " + " ".join(text.split()) + " }")


_KEYS_TURNED = _scope(_keys(turned=True))
_KEYS_PLAIN = _scope(_keys(turned=False))
_VALUES = _scope(_values())


@triton.jit  # type: ignore[untyped-decorator]
def _code(word, channel: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return one of the sixteen e2m1 codes of a word as fp16; for the interpreter."""
    bits = (word >> (4 * channel)).to(tl.int16)
    return (((bits & 7) << 9) | ((bits & 8) << 12)).to(tl.float16, bitcast=True) * 16384.0


@triton.jit  # type: ignore[untyped-decorator]
def _lane(pair, lane: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return one of the two fp16 numbers of an int32; for the interpreter."""
    return (pair >> (16 * lane)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _fma(a, b, c):  # type: ignore[no-untyped-def]
    """Return ``a * b + c`` of fp16 numbers with one rounding; for the interpreter."""
    return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float16)


@triton.jit  # type: ignore[untyped-decorator]
def _with_byte(low, high, x, channel: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return two words of eight bytes, in which the byte of one channel is set to the low bits of an fp16 number; for
    the interpreter."""
    byte = x.to(tl.int16, bitcast=True).to(tl.int64) & 0xFF
    if channel < 8:
        return low | (byte << (8 * channel)), high
    return low, high | (byte << (8 * (channel - 8)))


@triton.jit
def _packed(first, second):  # type: ignore[no-untyped-def]
    """Return two fp32 numbers as fp16 in an int32, the first in the low half; for the interpreter."""
    low = first.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (second.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit  # type: ignore[untyped-decorator]
def two_pairs(address, factor, INTEGER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the even and the odd numbers (see `_packed`) of the two fp32 pairs at `address` (int64, aligned to 16
    bytes), times `factor`."""
    if INTEGER:
        at = address.to(tl.pointer_type(tl.float32))
        even, next_even = tl.load(at) * factor, tl.load(at + 2) * factor
        odd, next_odd = tl.load(at + 1) * factor, tl.load(at + 3) * factor
        return _packed(even, next_even), _packed(odd, next_odd)
    # The load is written in assembly as a load of constant data, which may be moved before earlier stores.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .f32 a, b, c, d;
        ld.global.nc.v4.f32 {a, b, c, d}, [$2];
        mul.rn.f32 a, a, $3;
        mul.rn.f32 b, b, $3;
        mul.rn.f32 c, c, $3;
        mul.rn.f32 d, d, $3;
        cvt.rn.f16x2.f32 $0, c, a;
        cvt.rn.f16x2.f32 $1, d, b;
        }
        """,
        "=r,=r,l,f",
        [address, factor],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def rotated_codes(word, scale, even, odd, cos, sin, INTEGER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sixteen int8 codes of a block of keys in two int64; `seko_kernels.fused_reference.key_codes` is the
    definition.

    Parameters
    ----------
    word : int64
        The e2m1 codes of the block.
    scale : int32
        Scale of the block from `block_scale`, divided by the int8 scale.
    even, odd : tuple of four int32
        Means of even and odd channels from `two_pairs`, divided by the int8 scale.
    cos, sin : tuple of four int32
        Cosines and sines of the angles, from `two_pairs`.
    """
    if INTEGER:
        factor = _lane(scale, 0)
        low, high = word & 0, word & 0
        for pair in tl.static_range(8):
            two, lane = pair // 2, pair % 2
            e = _fma(_code(word, 2 * pair), factor, _lane(even[two], lane))
            o = _fma(_code(word, 2 * pair + 1), factor, _lane(odd[two], lane))
            c, s = _lane(cos[two], lane), _lane(sin[two], lane)
            low, high = _with_byte(low, high, _fma(e, c, -(o * s)) + 1536.0, 2 * pair)
            low, high = _with_byte(low, high, _fma(e, s, o * c) + 1536.0, 2 * pair + 1)
        return low, high
    return tl.inline_asm_elementwise(
        _KEYS_TURNED,
        "=l,=l,l,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [word, scale, even[0], even[1], even[2], even[3], odd[0], odd[1], odd[2], odd[3],
         cos[0], cos[1], cos[2], cos[3], sin[0], sin[1], sin[2], sin[3]],
        dtype=(tl.int64, tl.int64),
        is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def plain_codes(word, scale, INTEGER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the int8 codes of a block of keys that are not rotated; see `rotated_codes`."""
    if INTEGER:
        low, high = word & 0, word & 0
        for channel in tl.static_range(16):
            x = _fma(_code(word, channel), _lane(scale, 0), tl.full((), 1536.0, tl.float16))
            low, high = _with_byte(low, high, x, channel)
        return low, high
    return tl.inline_asm_elementwise(
        _KEYS_PLAIN, "=l,=l,l,r", [word, scale], dtype=(tl.int64, tl.int64), is_pure=True, pack=1
    )


@triton.jit  # type: ignore[untyped-decorator]
def value_words(words, scales, INTEGER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the e4m3 numbers of four tokens' blocks as sixteen int32: one for each channel, with a byte for each
    token.

    The product of a code and a scale (`block_scale`) has six significant bits, so the product is exact in fp16, except
    products so small that their e4m3 number is 0.
    """
    if INTEGER:
        out = ()
        for channel in tl.static_range(16):
            word = words[0].to(tl.int32) & 0
            for token in tl.static_range(4):
                number = _code(words[token], channel).to(tl.float32) * _lane(scales[token], 0).to(tl.float32)
                byte = to_e4m3(number, True).to(tl.uint8, bitcast=True).to(tl.int32)
                word |= byte << (8 * token)
            out = (*out, word)  # type: ignore[assignment]
        return out
    return tl.inline_asm_elementwise(
        _VALUES,
        "=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,l,l,l,l,r,r,r,r",
        [words[0], words[1], words[2], words[3], scales[0], scales[1], scales[2], scales[3]],
        dtype=(tl.int32,) * 16,
        is_pure=True,
        pack=1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def block_scale(byte, factor, INTEGER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a block's scale times `factor`, clamped to fp16's largest number, twice in an int32 (see `_packed`)."""
    # Above fp16's range e4m3 saturates as well, and infinity times a code of zero would be NaN.
    scale = tl.minimum(e4m3_scale_decode(byte) * factor, 65504.0)
    if INTEGER:
        return _packed(scale, scale)
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [scale], dtype=tl.int32, is_pure=True, pack=1
    )
