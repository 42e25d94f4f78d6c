"""The outlines of Gluon kernels, what their parameters are, and what their twins should compile to."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import ModuleType

from triton.compiler import ASTSource

from seko_kernels import hopper_attention, hopper_attention_bf16, hopper_conv
from seko_kernels.outlines import Outline
from seko_kernels.tuned_conv import MARGIN_TILE

SOFTMAX_SCALE = 128**-0.5 * math.log2(math.e)


@dataclass(frozen=True)
class Shown:
    """An outline, what its parameters are, and what its twin should compile to."""

    module: ModuleType
    outline: Outline
    pointers: dict[str, str]
    constants: dict[str, float]
    warps: int  # those of the fetching warpgroup and of the others
    descriptors: int
    opcodes: set[str]
    most_spilt: int  # instructions, all before and behind the loops over whole tiles
    ones: tuple[str, ...]  # ints that may be 1, which torch's compiler makes constants of
    written: tuple[str, ...]

    def source(self, **ones: int) -> ASTSource:
        """The outline as torch's compiler would have it compiled."""
        constants = {**self.constants, **ones}
        names = self.outline.arg_names
        signature = {
            name: self.pointers.get(name, "constexpr" if name in constants else "i32") for name in names
        }
        divisible = {
            (place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name in self.pointers
        }
        return ASTSource(self.outline, signature, constants, divisible)


OUTPUTS = {"OUT": "*bf16", "PART_OUT": "*bf16", "PART_LSE": "*fp32"}
EIGHT_BITS = Shown(
    hopper_attention,
    hopper_attention.attention_hopper_outline,
    {
        "Q": "*bf16",
        "K": "*i8",
        "K_SCALE": "*fp32",
        "V_T": "*fp8e4nv",
        "K_OWN": "*bf16",
        "V_OWN": "*bf16",
        "V_SCALE": "*fp32",
        "VALID_TOKENS": "*i64",
        **OUTPUTS,
    },
    {
        "HEADS": 12,
        "SOFTMAX_SCALE": SOFTMAX_SCALE,
        "Q_STRIDE": 12 * 128,
        "K_OWN_STRIDE": 12 * 128,
        "OWN_N": hopper_attention.OWN_KEYS,
        "STAGES": hopper_attention.STAGES,
    },
    warps=16,
    descriptors=4,
    opcodes={"HGMMA", "IGMMA", "QGMMA"},
    most_spilt=40,
    ones=("tiles",),
    written=tuple(OUTPUTS),
)
SPARSE = replace(
    EIGHT_BITS,
    outline=hopper_attention.sparse_attention_hopper_outline,
    pointers={**EIGHT_BITS.pointers, "CHOSEN": "*i32"},
    constants={**EIGHT_BITS.constants, "CHOSEN_TILES": 88},
)
SIXTEEN_BITS = Shown(
    hopper_attention_bf16,
    hopper_attention_bf16.attention_bf16_outline,
    {"Q": "*bf16", "K": "*bf16", "V": "*bf16", "VALID_TOKENS": "*i64", **OUTPUTS},
    {
        "HEADS": 12,
        "SOFTMAX_SCALE": SOFTMAX_SCALE,
        "KEYS": hopper_attention_bf16.KEYS,
        "STAGES": hopper_attention_bf16.STAGES,
    },
    warps=12,
    descriptors=2,
    opcodes={"HGMMA"},
    most_spilt=10,
    ones=("tiles",),
    written=tuple(OUTPUTS),
)
_SIXTEEN_BIT_TENSORS = ("X", "EARLIER", "W", "SCALE", "BIAS", "RESIDUAL", "OUT")
CONVOLUTION = Shown(
    hopper_conv,
    hopper_conv.causal_conv_outline,
    dict.fromkeys(_SIXTEEN_BIT_TENSORS, "*bf16"),
    {
        "CHANNELS": 96,
        "FILTERS": 96,
        "TAPS_T": 3,
        "CACHED": True,
        "SCALED": False,
        "ADD": True,
        "BW": MARGIN_TILE[1],
        "BN": 64,
        "BN_MORE": 32,
        "BK": 32,
        "STAGES": 4,
        "REGISTERS": hopper_conv.REGISTERS,
    },
    warps=16,
    descriptors=4,
    opcodes={"HGMMA"},
    most_spilt=0,
    ones=("batch",),
    written=("OUT",),
)
