"""The kinds of attention over the KV cache that ``--attention`` names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """A kind of attention over the KV cache.

    Parameters
    ----------
    name : str
        Name of the attention on the command line and in the manifest.
    help : str
        Description of the attention in the help of ``--attention``; may be empty.
    own_kernel : bool
        Whether the attention runs in one of Seko's kernels, which need fused layers.
    past_in_8_bits : bool
        Whether cached frames are expanded to 8 bits. An attention to frames in 8 bits needs further constants, and
        allows a resident window.
    fp8_numbers : bool
        Whether the attention computes with fp8 numbers, which not every GPU supports.
    arch : str or None
        The only GPU architecture that the kernel supports; None for any.
    head_dim : int or None
        The only width of a head that the kernel supports on a GPU; None: see `VideoBuild.no_attention`.
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
