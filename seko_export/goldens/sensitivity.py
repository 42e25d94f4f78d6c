"""The effect of rounding on a stream with a quantised cache, from which the error bounds of its recorded results
follow.

For a number near the border between two codes of a quantised cache, the last bit decides the code. If rounding flips a
code, the other code is a full step away and changes all results computed from it, so that more codes flip with each
pass. With random weights the effect of a flipped code dies out. A trained model amplifies the effect: in a sample model
before distillation, one last bit of the input changed the first call's result by a third. An engine that rounds
differently therefore cannot be closer to the eager model than two runs of the eager model whose inputs differ in the
last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_SEED = 0


def perturbed(
    embed: Callable[[list[Tensor]], Sequence[Tensor]],
) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """Return the module `embed` with the last bit of its hidden state changed at random, the same way in every run."""
    generator: torch.Generator | None = None

    def run(inputs: list[Tensor]) -> Sequence[Tensor]:
        nonlocal generator
        hidden, *rest = embed(inputs)
        if generator is None:
            generator = torch.Generator(hidden.device).manual_seed(_SEED)
        step = torch.finfo(hidden.dtype).eps / 2
        noise = torch.rand(hidden.shape, generator=generator, device=hidden.device) * 2 - 1
        return ((hidden.float() * (1 + step * noise)).to(hidden.dtype), *rest)

    return run
