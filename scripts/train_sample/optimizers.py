"""Optimizers of the training: AdamW, alone or with Muon for the blocks' matrices. Their state on disk is elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

OPTIMIZERS = ("adamw", "muon")
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.01
MOMENTUM = 0.95
# Quintic of Newton-Schulz, steepest at 0 (Jordan et al., "Muon: an optimizer for hidden layers", 2024): after five
# rounds singular values lie between 0.7 and 1.2, which trains as well as exact ones.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_ROUNDS = 5
ADAMW_RMS = 0.2  # what AdamW's updates come to, in learning rates (arXiv 2502.16982, section 2.2)
_BLOCK_MATRIX = re.compile(r"(.*\.)?blocks\.[0-9]+\..*weight")


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal, as many of one shape at once; weight decay apart from it.

    The update is scaled to the RMS of AdamW's, so AdamW's rates apply.

    Parameters
    ----------
    parameters : iterable of Tensor
        Matrices, float32.
    learning_rate : float
        Peak rate.
    weight_decay, momentum : float
        Share of a weight that a rate of 1 takes away; share that momentum keeps of itself (Nesterov's form).

    Raises
    ------
    ValueError
        If a parameter is no matrix.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        learning_rate: float,
        weight_decay: float = WEIGHT_DECAY,
        momentum: float = MOMENTUM,
    ) -> None:
        parameters = list(parameters)
        odd = [tuple(p.shape) for p in parameters if p.ndim != 2]
        if odd:
            raise ValueError(f"Muon takes matrices, got a parameter of shape {odd[0]}; leave it to AdamW")
        super().__init__(
            parameters, {"lr": learning_rate, "weight_decay": weight_decay, "momentum": momentum}
        )
        self._stacks: list[tuple[list[Tensor], Tensor]] = []  # equal shapes [a, b], their momenta [N, a, b]
        for shape in sorted({p.shape for p in parameters}):
            alike = [p for p in parameters if p.shape == shape]
            momenta = torch.zeros(len(alike), *shape, dtype=torch.float32, device=alike[0].device)
            self._stacks.append((alike, momenta))
            for p, own in zip(alike, momenta, strict=True):
                self.state[p]["momentum_buffer"] = own  # a view: filled in place when a run resumes

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override] # nobody passes a closure
        """Take one step.

        Raises
        ------
        ValueError
            If a parameter has no gradient: its whole stack would wait.
        """
        (group,) = self.param_groups
        rate, decay, keep = group["lr"], group["weight_decay"], group["momentum"]
        for alike, momenta in self._stacks:
            gradients = [p.grad for p in alike if p.grad is not None]
            if len(gradients) < len(alike):
                raise ValueError(f"{len(alike) - len(gradients)} matrices of Muon's have no gradient")
            gradient = torch.stack(gradients)
            momenta.lerp_(gradient, 1 - keep)
            update = orthogonal(gradient.lerp_(momenta, keep)).float()
            scale = ADAMW_RMS * max(update.shape[1:]) ** 0.5
            torch._foreach_mul_(alike, 1 - rate * decay)
            torch._foreach_sub_(alike, list(update.mul_(rate * scale).unbind()))


def orthogonal(matrices: Tensor) -> Tensor:
    """Return bfloat16 matrices [N, a, b] with the singular vectors of the given ones and singular values near 1."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)  # no singular value above 1
    for _ in range(NEWTON_SCHULZ_ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def make_optimizers(
    kind: str, parameters: Mapping[str, Tensor], learning_rate: float
) -> list[torch.optim.Optimizer]:
    """Return what trains named parameters.

    Parameters
    ----------
    kind : str
        ``adamw``, or ``muon``: the matrices of ``blocks.N`` by Muon, all else by AdamW.
    parameters : mapping of str to Tensor
        By name.
    learning_rate : float
        Peak rate of both.

    Raises
    ------
    ValueError
        If ``kind`` is unknown, or no parameter is a block's matrix.
    """
    if kind not in OPTIMIZERS:
        raise ValueError(f"optimizer {kind!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
    matrices = {
        name: p
        for name, p in parameters.items()
        if kind == "muon" and p.ndim == 2 and _BLOCK_MATRIX.fullmatch(name)
    }
    rest = [p for name, p in parameters.items() if name not in matrices]
    if kind == "adamw":
        return [adamw(rest, learning_rate)]
    if not matrices:
        raise ValueError("muon has nothing to train: no parameter is a matrix of blocks.N; use adamw")
    return [adamw(rest, learning_rate), Muon(matrices.values(), learning_rate)]


def adamw(parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.AdamW:
    """Return the optimiser of every run; one fused kernel on a GPU."""
    parameters = list(parameters)
    return torch.optim.AdamW(
        parameters,
        lr=learning_rate,
        betas=BETAS,
        weight_decay=WEIGHT_DECAY,
        fused=parameters[0].device.type == "cuda",
    )


def set_rate(optimizers: Sequence[torch.optim.Optimizer], rate: float) -> None:
    """Give every group this learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def descend(loss: Tensor, optimizers: Sequence[torch.optim.Optimizer], parameters: Iterable[Tensor]) -> None:
    """Take one step down a loss, its gradient clipped to norm 1."""
    parameters = list(parameters)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for optimizer in optimizers:
        optimizer.step()


def moments_of(optimizers: Sequence[torch.optim.Optimizer], parameter: Tensor) -> dict[str, Any]:
    """Return one parameter's state; empty before its first step."""
    state: dict[str, Any] = {}
    for optimizer in optimizers:
        if parameter in optimizer.state:
            state = optimizer.state[parameter]
    return state
