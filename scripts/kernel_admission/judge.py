"""Whether a kernel gives right results on this GPU: the rule by which tile sizes are admitted to a table.

Triton compiles some tile sizes to kernels that give wrong numbers without an error. Tile sizes are therefore measured,
and written to a table, only after they passed on the GPU for which they are meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SAME_DTYPE_FACTOR = 2.0  # FlashAttention's rule: at most twice the error of the same-dtype torch computation
RUNS = 3  # number of runs: a race between warps shows as results that differ


@dataclass(frozen=True)
class Admission:
    """The result of checking tile sizes on one GPU.

    Parameters
    ----------
    error : float
        Relative error in the 2-norm against float32, of the result that is closest to its bound.
    bound : float
        Largest allowed relative error of that result.
    refusal : str
        Reason for which the tiles are refused; empty if they are admitted.
    """

    error: float
    bound: float
    refusal: str = ""


class Prepared(NamedTuple):
    """A test case with its tensors made and its expected results computed.

    Parameters
    ----------
    name : str
        Name of the case.
    run : callable
        Function that runs the kernel; it leaves NaN where the kernel does not write.
    truth, rounded : Tensor
        The exact result, and the result computed with the kernel's roundings, whose error sets the bound.
    by_row : bool
        Whether each entry of the first axis has an error and a bound of its own.
    """

    name: str
    run: Callable[[], Tensor]
    truth: Tensor
    rounded: Tensor
    by_row: bool = False


def judge(every: Iterable[Prepared]) -> Admission:
    """Run every test case; return the first refusal, or the result that is closest to its bound.

    A kernel is refused if it does not compile or run, gives different results in two runs, returns NaN, or exceeds its
    error bound.
    """
    worst: Admission | None = None
    for case in every:
        try:
            runs = [case.run() for _ in range(RUNS)]
            if runs[0].is_cuda:
                torch.cuda.synchronize()
        except Exception as fault:  # any exception of a compiler is the result of the check
            lines = str(fault).strip().splitlines() or [""]
            return _refused(f"{case.name}: {type(fault).__name__}: {lines[0][:200]}")
        if any(not torch.equal(runs[0], run) for run in runs[1:]) and not bool(runs[0].isnan().any()):
            return _refused(f"{case.name}: two runs differ")
        tensors = runs[0], case.truth, case.rounded
        results = zip(*tensors, strict=True) if case.by_row else (tensors,)
        for number, (result, truth, rounded) in enumerate(results):
            error = distance(result, truth)
            bound = SAME_DTYPE_FACTOR * distance(rounded, truth)
            if not error <= bound:  # also true if the error is NaN
                where = f"{case.name}, row {number}" if case.by_row else case.name
                return Admission(error, bound, f"{where}: error {error:.4g} is above {bound:.4g}")
            if worst is None or error * worst.bound > worst.error * bound:
                worst = Admission(error, bound)
    return worst or _refused("no case")


def distance(actual: Tensor, truth: Tensor) -> float:
    """Return the relative error ``|actual - truth| / |truth|`` in the 2-norm; NaN if ``actual`` or ``truth`` has a
    NaN."""
    return float((actual.double() - truth.double()).norm() / truth.double().norm())


def _refused(why: str) -> Admission:
    return Admission(float("nan"), float("nan"), why)
