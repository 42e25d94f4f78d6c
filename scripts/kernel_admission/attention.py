"""Admission of the tile sizes of attention kernels, and of the 16-bit kernel, which has one size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from scripts.kernel_admission.attention_cases import (
    Case,
    cases,
    expected,
    expected_bf16,
    make_case,
    make_case_bf16,
)
from scripts.kernel_admission.judge import Admission, Prepared, judge
from seko_kernels import hopper_attention_bf16
from seko_kernels.attention import OwnTokens, attention_fp8
from seko_kernels.attention_bf16 import attention_bf16
from seko_kernels.hopper_attention import KEY_GROUP
from seko_kernels.tuned import AttentionTiles

Arguments = tuple[Tensor, ...]


def admit(
    tiles: AttentionTiles | None,
    head_dim: int = 128,
    device: str = "cuda",
    full: tuple[int, int, int] | None = None,
) -> Admission:
    """Run the 8-bit attention kernel on every test case, and `judge` it.

    Parameters
    ----------
    tiles : AttentionTiles or None
        Tile sizes to check; None: the tile sizes that the attention op chooses by itself.
    head_dim : int
        Number of channels of a head, D.
    device : str
        Torch device on which the check runs; on a CPU the torch reference runs instead of the kernel.
    full : tuple of int, optional
        Numbers of heads, query tokens and cache tokens of the attention that is tuned. `full` adds test cases of this
        size.
    """
    unit = KEY_GROUP if tiles and tiles.specialised else 1

    def run(
        q: Tensor, k: Tensor, k_scale: Tensor, v_t: Tensor, v_scale: Tensor, valid: Tensor, *own: Tensor
    ) -> Tensor:
        return attention_fp8(q, k, k_scale, v_t, v_scale, valid, OwnTokens(*own), tiles)

    every = (
        replace(case, cache_tokens=-(-case.cache_tokens // unit) * unit) for case in cases(head_dim, full)
    )
    return judge(_prepared(case, run, make_case, expected, head_dim, device) for case in every)


def admit_bf16(device: str = "cuda", full: tuple[int, int, int] | None = None) -> Admission:
    """Run the 16-bit attention kernel on every test case; parameters and result are described in `admit`."""
    head_dim = hopper_attention_bf16.HEAD_DIM

    def run(*arguments: Tensor) -> Tensor:
        return attention_bf16(*arguments)

    return judge(
        _prepared(case, run, make_case_bf16, expected_bf16, head_dim, device)
        for case in cases(head_dim, full)
    )


def _prepared(
    case: Case,
    run: Callable[..., Tensor],
    make: Callable[[Case, int, str], Arguments],
    expect: Callable[..., tuple[Tensor, Tensor]],
    head_dim: int,
    device: str,
) -> Prepared:
    arguments, truth, rounded = _made(make, expect, case, head_dim, device)

    def run_over_nan() -> Tensor:
        # Freed memory of the output's size, so that elements that the kernel does not write are noticed.
        shape = (len(case.valid_tokens), case.query_tokens, case.heads * head_dim)
        torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
        return run(*arguments)

    return Prepared(case.name, run_over_nan, truth, rounded, by_row=True)


@lru_cache(maxsize=16)
def _made(
    make: Callable[[Case, int, str], Arguments],
    expect: Callable[..., tuple[Tensor, Tensor]],
    case: Case,
    head_dim: int,
    device: str,
) -> tuple[Arguments, Tensor, Tensor]:
    """Return the arguments and both expected results of a test case, which take longer than the kernel."""
    arguments = make(case, head_dim, device)
    return arguments, *expect(*arguments)
