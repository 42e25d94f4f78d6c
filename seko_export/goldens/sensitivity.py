"""What rounding alone does to a stream with a lossy cache: the bound that its goldens can be held to.

A number next to the border of two codes falls to either side by its last bit. The code that it becomes is another
kind of step: it moves all that reads it, so that more codes fall otherwise, pass by pass. With random weights this dies
out. A trained model decides between pictures: measured with a sample model before its distillation, one last bit in
its input moved chunk 0 by a third. No engine can be asked to be nearer to the eager model than it is to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_SEED = 0


def perturbed(
    embed: Callable[[list[Tensor]], Sequence[Tensor]],
) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """Return the piece `embed` with the last bit of its hidden state at random, the same way each time."""
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
