"""Constants of the quantised KV cache formats, and records that describe formats and the tensors of a cache. The module
does no computation on tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

# --- e2m1 (OCP Microscaling Formats 1.0): sign, 2 exponent bits, 1 mantissa bit

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitude of codes 0..7; bit 3 is the sign
E2M1_MAX = 6.0
# Midpoints between neighbouring magnitudes, each with a flag for rounding a tie up, which is set where the upper code
# is even.
E2M1_STEPS = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)

# --- e4m3 (OCP 8-bit floating point, "fn": no infinities, 0x7F and 0xFF are NaN)

E4M3_MAX = 448.0
E4M3_MIN_NORMAL = 2.0**-6
E4M3_SUBNORMAL_STEP = 2.0**-9

# --- NVFP4: e2m1 codes, one e4m3 scale per block of channels, one fp32 power of two per head

NVFP4_BLOCK = 16  # channels that share a scale byte
# Magnitudes to which a block's largest number may be scaled ("four over six"). With 4 there is no gap below the
# largest code (e2m1 has no 5); 6 uses the whole range. Each block takes the one with the smaller squared error, 6 if
# both are equal.
NVFP4_TOPS = (6.0, 4.0)
# The two errors are compared as integers, so that the choice does not depend on the order of summation. The unit is a
# part of the power of two at or below the block's largest magnitude; the sum of 16 squares stays far below 2**31.
NVFP4_ERROR_PARTS = 1024.0
# Largest scale of a block in a calibrated head, 56: numbers 8 times larger than in the calibration still have a scale
# below E4M3_MAX.
NVFP4_CALIBRATED_SCALE = 56.0
# Exponents that a global scale may have. Within this range no product of the format's arithmetic is subnormal or
# overflows in fp32, so that a CPU that flushes subnormals to zero computes the same bytes.
NVFP4_GLOBAL_EXPONENTS = (-100, 100)

# --- integer formats with groups: each group has an e4m3 step, times the head's power of two

INTEGER_GROUP = (
    # size of a group: channels of one token and head that share a step, so that writing a token never changes
    # another token's codes
    32
)
# Number of channels of one token and head that a Walsh-Hadamard transform mixes. After the transform no channel is
# systematically larger than the others, so that one step is good for all.
HADAMARD_CHANNELS = 128
# Factors of the transform when writing and reading. The matrix of 1 and -1 is its own inverse except for the factor
# 1/128, which is split into two powers of two, because these are exact; 1/sqrt(128), the factor of the normalised
# transform, would round.
HADAMARD_WRITE_FACTOR, HADAMARD_READ_FACTOR = 2.0**-4, 2.0**-3

# --- the 8-bit scratch that attention reads: int8 keys with an fp32 scale for each tile of tokens and head

KEY_TILE = (
    # tokens that share a key scale; every tile of the attention kernel lies within one such group, so that its
    # scores have one factor
    128
)

# --- keys stored before RoPE: precision of the factors when they are read

# Significant bits to which a key, and a cosine or sine, are rounded before they are multiplied. The product is then
# exact in fp32 (24 bits), so that fused and separate multiply and add give the same bits.
ROTARY_FACTOR_BITS = 12


@dataclass(frozen=True)
class CacheTensor:
    """One tensor of a layer's KV cache; its shape is given without the leading token axis.

    Parameters
    ----------
    name : str
        Name of the tensor inside the format: ``"k"``, ``"v_codes"``, …
    token_shape : tuple of int
        Shape of the entry of one token; ``(heads, head_dim // 2)`` for packed 4-bit codes.
    dtype : torch.dtype
        Dtype of the tensor.
    part : str
        Which cached tokens of a row the tensor holds: ``cache`` (all tokens), ``sink`` or ``ring``.
    """

    name: str
    token_shape: tuple[int, ...]
    dtype: torch.dtype
    part: str = "cache"

    @property
    def token_bytes(self) -> int:
        """Number of bytes that one token takes in this tensor, in one layer."""
        return prod(self.token_shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ScaleTensor:
    """One constant of a layer's KV format: calibrated during the build and stored as a weight.

    Parameters
    ----------
    name : str
        Name of the constant inside the format: ``"k_global_scale"``, …
    shape : tuple of int
        Shape of the constant.
    dtype : torch.dtype
        Dtype of the constant.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class NumberFormat:
    """A number format for cached keys or values. Code that writes a cache, code that reads a cache, and the manifest's
    table of buffers share this record.

    A stored number is ``code * scale``. The scale of a stored number is its head's calibrated power of two, times the
    e4m3 step of its group if the format has groups. A group has channels of one token and head only, so writing a token
    changes no other token's codes.

    Parameters
    ----------
    name : str
        Name of the format on the command line and in the manifest.
    code_dtype : torch.dtype
        Dtype of the codes: int8, or uint8 for two 4-bit codes with the even channel in the low nibble. fp8 codes are
        also stored as int8, because some GPUs have no fp8 dtype: an fp8 code has the e4m3 bits of the magnitude, and
        the number's sign.
    code_bits : int
        Number of bits of a code, 8 or 4.
    top : float
        Largest magnitude of a code. A group's step is the largest magnitude of the group's numbers divided by `top`.
    group : int
        Number of channels that share a step; 0: the format has no groups.
    zero_points : bool
        Whether each group also stores the code of 0 (a zero point), so that the range of the group need not be
        symmetric about 0.
    rotated : bool
        Whether a Walsh-Hadamard transform is applied to each group before rounding, and undone when the group is
        read.
    e2m1 : bool
        Whether codes are e2m1 numbers in NVFP4's blocks; otherwise they are integers, or fp8 if the format has no
        groups.
    """

    name: str
    code_dtype: torch.dtype
    code_bits: int
    top: float
    group: int = 0
    zero_points: bool = False
    rotated: bool = False
    e2m1: bool = False

    @property
    def most(self) -> int:
        """Largest magnitude of a code of an integer format; if the format has zero points, the largest code."""
        return int(2**self.code_bits - 1 if self.zero_points else 2 ** (self.code_bits - 1) - 1)

    @property
    def unit(self) -> int:
        """Number of channels that a kernel handles together; head_dim is a multiple of this number."""
        return self.group or NVFP4_BLOCK

    @property
    def bits(self) -> float:
        """Average number of stored bits for each number, steps included."""
        return self.code_bits + (8 * (1 + self.zero_points) / self.group if self.group else 0)

    def codes_shape(self, heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one token's codes."""
        return (heads, head_dim * self.code_bits // 8)

    def scales_shape(self, heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one token's uint8 scales: the steps of the token's groups and, if the format has zero points, the
        zero points of the groups behind them."""
        return (heads, (1 + self.zero_points) * head_dim // self.group)


FP8 = NumberFormat("fp8", torch.int8, 8, top=1.0)
INT8 = NumberFormat("int8", torch.int8, 8, top=127.0, group=INTEGER_GROUP)
INT4 = NumberFormat("int4", torch.uint8, 4, top=7.5, group=INTEGER_GROUP, zero_points=True)
INT4_HADAMARD = NumberFormat(
    "int4-hadamard", torch.uint8, 4, top=7.5, group=HADAMARD_CHANNELS, zero_points=True, rotated=True
)
FP4 = NumberFormat("fp4", torch.uint8, 4, top=E2M1_MAX, group=NVFP4_BLOCK, e2m1=True)
NUMBER_FORMATS = {form.name: form for form in (FP8, INT8, INT4, INT4_HADAMARD, FP4)}
