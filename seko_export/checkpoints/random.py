"""Seeded random weights of any model, drawn when they are read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from seko_export.checkpoints.key_table import plain_spread
from seko_export.checkpoints.load import Checkpoint
from seko_export.checkpoints.sources import TensorSource

Spread = Callable[[str, tuple[int, ...]], tuple[float, float]]
_NAMED = "random weights"  # in place of a path and of a format
# Numbers that one generator draws, one after another: a larger weight is drawn by several threads.
_SLAB = 1 << 22


def random_checkpoint(
    config: object,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    seed: int,
    spread: Spread = plain_spread,
    dtype: torch.dtype = torch.bfloat16,
) -> Checkpoint:
    """Return random weights of a model, each of which depends only on seed, name and shape.

    Parameters
    ----------
    config : object
        The config of the model.
    shapes : mapping of str to tuple of int
        Shape of every weight, by the exporter's names.
    seed, spread, dtype
        The parameters of `random_weight` with these names.
    """
    sources = {
        name: TensorSource(
            name,
            name,
            shape,
            str(dtype),
            str(dtype).removeprefix("torch."),
            partial(random_weight, name, shape, seed=seed, dtype=dtype, spread=spread),
        )
        for name, shape in shapes.items()
    }
    return Checkpoint(Path(_NAMED), config, _NAMED, {"name": _NAMED}, None, sources)


def random_weight(
    name: str,
    shape: tuple[int, ...],
    *,
    seed: int,
    dtype: torch.dtype,
    device: str = "cpu",
    spread: Spread = plain_spread,
) -> torch.Tensor:
    """Draw one weight, scaled so that activations stay near 1 at any depth.

    Parameters
    ----------
    name : str
        Key of the weight, by the exporter's names.
    shape : tuple[int, ...]
        Shape of the weight.
    seed : int
        Seed of the random weights, any integer.
    dtype : torch.dtype
        Dtype of the result; numbers are drawn in float32.
    device : str
        Device on which the random numbers are drawn.
    spread : callable
        Function that returns mean and standard deviation of a weight by name and shape.

    Returns
    -------
    torch.Tensor
        The weight, of shape ``shape``, on the CPU.
    """
    weight = torch.empty(shape, dtype=torch.float32, device=device)
    slabs = weight.view(-1).split(_SLAB)

    def draw(number: int) -> None:
        digest = hashlib.sha256(f"{seed} {name}{f' {number}' * (number > 0)}".encode()).digest()
        # A CPU generator keeps 32 bits of its seed; more would only look like more.
        generator = torch.Generator(weight.device).manual_seed(int.from_bytes(digest[:4], "little"))
        slabs[number].normal_(generator=generator)

    if len(slabs) == 1:
        draw(0)
    else:
        with ThreadPoolExecutor(min(len(slabs), os.cpu_count() or 1)) as threads:
            list(threads.map(draw, range(len(slabs))))
    mean, deviation = spread(name, shape)
    weight *= deviation
    if mean:
        weight += mean
    return weight.to(dtype).cpu()
