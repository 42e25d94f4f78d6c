"""Byte-level facts of the quantised formats and the records that name a format's tensors. No computation."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

# --- e2m1 (OCP Microscaling Formats 1.0): sign, 2 exponent bits, 1 mantissa bit

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitude of codes 0..7; bit 3 is the sign
E2M1_MAX = 6.0
# Midpoints between neighbours, each with whether a tie goes up: it does where the upper code is even.
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
# The code that a block's largest magnitude may fall on. 4 leaves no gap below the top (e2m1 has no 5), 6 uses the
# whole range; each block takes the one whose squared error is less, 6 where they are equal ("four over six").
NVFP4_TOPS = (6.0, 4.0)
# The two errors are compared in whole numbers, so that no order of summation can change the choice: parts of the
# power of two at or below the block's largest magnitude. 16 squares of them stay far below 2**31.
NVFP4_ERROR_PARTS = 1024.0
# A calibrated head's largest block gets a scale of at most this: 8 times more than the calibration saw still
# fits below E4M3_MAX.
NVFP4_CALIBRATED_SCALE = 56.0
# Exponents a global scale may have. Within them no product of the format's arithmetic is subnormal or
# overflows in fp32, so a CPU that flushes subnormals to zero gives the same bytes.
NVFP4_GLOBAL_EXPONENTS = (-100, 100)

# --- keys stored before RoPE: what a read multiplies

# Significant bits of a key and of a cosine or sine before they are multiplied: their product is then exact in fp32
# (24 bits), so a compiler that fuses product and sum gives the same bits as one that does not.
ROTARY_FACTOR_BITS = 12


@dataclass(frozen=True)
class CacheTensor:
    """One tensor of a layer's KV cache, without its leading token axis.

    Parameters
    ----------
    name : str
        Name inside the format: ``"k"``, ``"v_codes"``, …
    token_shape : tuple of int
        Shape behind the token axis; ``(heads, head_dim // 2)`` for packed 4-bit codes.
    dtype : torch.dtype
        Element type.
    """

    name: str
    token_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes that one token of one layer takes."""
        return prod(self.token_shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ScaleTensor:
    """One constant of a layer's KV format: calibrated at build, shipped as a weight.

    Parameters
    ----------
    name : str
        Name inside the format: ``"k_global_scale"``, …
    shape : tuple of int
        Whole shape.
    dtype : torch.dtype
        Element type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
