"""Admission of attention kernels: a check that a kernel's results are right on this GPU, before its tile sizes enter
the table of tuned tile sizes.

Triton compiles some tile sizes to kernels that give wrong numbers without an error (docs/adr/0012). Tile sizes are
therefore used only after they passed the admission check on the GPU for which they are meant. Opening an artifact never
runs the admission check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from seko_kernels import hopper_attention_bf16
from seko_kernels.admission_cases import (
    Case,
    cases,
    distance,
    expected,
    expected_bf16,
    make_case,
    make_case_bf16,
)
from seko_kernels.attention import OwnTokens, attention_fp8
from seko_kernels.attention_bf16 import attention_bf16
from seko_kernels.hopper_attention import KEY_GROUP
from seko_kernels.tuned import AttentionTiles

SAME_DTYPE_FACTOR = 2.0  # FlashAttention's rule: at most twice the error of the same-dtype torch computation
RUNS = 3  # number of runs: a race between warps shows as results that differ


Arguments = tuple[Tensor, ...]


@dataclass(frozen=True)
class Admission:
    """The result of checking the tile sizes of an attention kernel on one GPU.

    Parameters
    ----------
    error : float
        Relative error in the 2-norm against float32 attention on the same inputs, for the batch row whose error is
        closest to that row's bound.
    bound : float
        Largest allowed relative error of the batch row whose error is `error`.
    refusal : str
        Reason for which the tiles are refused; empty if they are admitted.
    """

    error: float
    bound: float
    refusal: str = ""


def admit(
    tiles: AttentionTiles | None,
    head_dim: int = 128,
    device: str = "cuda",
    full: tuple[int, int, int] | None = None,
) -> Admission:
    """Run the 8-bit attention kernel on every test case; compare the kernel's error with the error of the same
    arithmetic in torch.

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

    Returns
    -------
    Admission
        Error and bound, with a refusal if the kernel does not compile or run, gives different results in two runs,
        returns NaN, or exceeds its error bound.
    """
    unit = KEY_GROUP if tiles and tiles.specialised else 1

    def prepare(case: Case) -> Prepared:
        case = replace(case, cache_tokens=-(-case.cache_tokens // unit) * unit)
        arguments, truth, rounded = _prepared(make_case, expected, case, head_dim, device)
        q, k, k_scale, v_t, v_scale, valid, *own = arguments
        return Prepared(
            lambda: attention_fp8(q, k, k_scale, v_t, v_scale, valid, OwnTokens(*own), tiles), truth, rounded
        )

    return _judge(cases(head_dim, full), prepare, head_dim, device)


def admit_bf16(device: str = "cuda", full: tuple[int, int, int] | None = None) -> Admission:
    """Run the 16-bit attention kernel on every test case; parameters and result are described in `admit`."""
    head_dim = hopper_attention_bf16.HEAD_DIM

    def prepare(case: Case) -> Prepared:
        arguments, truth, rounded = _prepared(make_case_bf16, expected_bf16, case, head_dim, device)
        return Prepared(partial(attention_bf16, *arguments), truth, rounded)

    return _judge(cases(head_dim, full), prepare, head_dim, device)


class Prepared(NamedTuple):
    """A test case of attention with its tensors made and its expected results computed.

    Parameters
    ----------
    run : callable
        Function that computes the attention of the test case, ``[B, T, H * D]``: rows, query tokens, heads times
        channels.
    truth, rounded : Tensor
        The result in float32, and the result computed with the kernel's roundings, whose error sets the bound.
    """

    run: Callable[[], Tensor]
    truth: Tensor
    rounded: Tensor


def _judge(
    every: Iterable[Case], prepare: Callable[[Case], Prepared], head_dim: int, device: str
) -> Admission:
    """Run every test case; return the first refusal, or the result of the row closest to its error bound."""
    worst: Admission | None = None
    for case in every:
        run, truth, rounded = prepare(case)
        try:
            runs = []
            for _ in range(RUNS):
                _leave_nan_behind(case, head_dim, device)
                runs.append(run())
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception as fault:  # any exception of a compiler is the result of the check
            lines = str(fault).strip().splitlines() or [""]
            return Admission(
                float("nan"), float("nan"), f"{case.name}: {type(fault).__name__}: {lines[0][:200]}"
            )
        if any(not torch.equal(runs[0], run) for run in runs[1:]) and not bool(runs[0].isnan().any()):
            return Admission(float("nan"), float("nan"), f"{case.name}: two runs differ")
        for row in range(len(case.valid_tokens)):
            error = distance(runs[0][row], truth[row])
            bound = SAME_DTYPE_FACTOR * distance(rounded[row], truth[row])
            if not error <= bound:  # also true if the error is NaN
                refusal = f"{case.name}, row {row}: error {error:.4g} is above {bound:.4g}"
                return Admission(error, bound, refusal)
            if worst is None or error * worst.bound > worst.error * bound:
                worst = Admission(error, bound)
    return worst or Admission(float("nan"), float("nan"), "no case")


@lru_cache(maxsize=16)
def _prepared(
    make: Callable[[Case, int, str], Arguments],
    expect: Callable[..., tuple[Tensor, Tensor]],
    case: Case,
    head_dim: int,
    device: str,
) -> tuple[Arguments, Tensor, Tensor]:
    """Return the arguments and both expected results of a test case. The results are cached, because computing them
    takes longer than the kernel.
    """
    arguments = make(case, head_dim, device)
    return arguments, *expect(*arguments)


def _leave_nan_behind(case: Case, head_dim: int, device: str) -> None:
    """Allocate memory of the output's size, fill it with NaN and free it, so that output elements that the kernel
    does not write are noticed."""
    shape = (len(case.valid_tokens), case.query_tokens, case.heads * head_dim)
    torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
