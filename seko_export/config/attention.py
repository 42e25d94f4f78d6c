"""The attentions that a build's layers can have over the cache, as ``--attention`` names them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """One attention over the cache.

    Parameters
    ----------
    name : str
        As the command line and the manifest spell it.
    help : str
        What the help of ``--attention`` says of it; empty: the name says all.
    own_kernel : bool
        Whether it is a kernel of Seko's, which fused layers alone have.
    past_in_8_bits : bool
        Whether cached frames are expanded to 8 bits, which takes constants of its own, and can stay so for all passes.
    fp8_numbers : bool
        Whether it computes with fp8 numbers, which a GPU may lack.
    arch : str or None
        The one GPU architecture that its kernel is for; None: any.
    head_dim : int or None
        The one width of a head that its kernel takes on a GPU; None: see `VideoBuild.no_attention`.
    """

    name: str
    help: str = ""
    own_kernel: bool = False
    past_in_8_bits: bool = False
    fp8_numbers: bool = False
    arch: str | None = None
    head_dim: int | None = None


TORCH = Attention("torch")
BF16 = Attention("bf16", "Seko's kernel for Hopper GPUs", own_kernel=True, arch="sm_90", head_dim=128)
FP8 = Attention(
    "fp8",
    "cached frames in 8 bits, read from an FP4 cache",
    own_kernel=True,
    past_in_8_bits=True,
    fp8_numbers=True,
)
ATTENTIONS = {attention.name: attention for attention in (TORCH, BF16, FP8)}
