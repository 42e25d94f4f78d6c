"""Comparison of a compiled engine with its torch module, for engines that no recorded result covers.

Torch 2.13's CPU compiler has produced wrong results for graphs like the VAE's. If an output of the graph was also an
input of `torch.cat`, the output had the values of another layer (`media/wan_vae/layers.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from seko_export.engines.piece import FlatModule, Piece
from seko_export.errors import NumericError
from seko_runtime.executor.contract import RANK

# Largest |engine - module| / |module| of an output for random inputs: an engine sums in another order, in up to
# thirty layers.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1}
# Largest difference of uint8 outputs, as root mean square in levels of 255: values near a half may be rounded either
# way.
LEVELS = {torch.float32: 0.1, torch.bfloat16: 6.0}
_TOKENS = 64  # token ids are drawn below this number, and below the vocabulary size


def check_agrees(piece: Piece, package: Path, device: str) -> None:
    """Run a compiled engine and its module on random inputs and compare every output.

    Parameters
    ----------
    piece : Piece
        The engine, with its module on the meta device. The module must write no input in place.
    package : Path
        The compiled engine.
    device : str
        Device on which the engine runs: ``cpu`` or ``cuda``.

    Raises
    ------
    NumericError
        If an output differs by more than rounding.
    """
    with torch.no_grad():
        inputs = random_inputs(piece, device)
        wanted = FlatModule(piece)(*inputs)
        loader = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", True, 1, -1)
        results: Sequence[Tensor] = loader.boxed_run(list(inputs))
    dtype = next((a.dtype for a in piece.parameters if a.dtype == torch.bfloat16), torch.float32)
    for argument, ours, theirs in zip(piece.outputs, results, wanted, strict=True):
        difference = (ours.double() - theirs.double()).norm()
        if argument.dtype == torch.uint8:
            error, allowed = float(difference) / math.sqrt(theirs.numel()), LEVELS[dtype]
        else:
            size = theirs.double().norm()  # norm 0: a constant, such as the grey that an encoder keeps
            error, allowed = float(difference / size if size else difference), TOLERANCES[dtype]
        if not error <= allowed:
            raise NumericError(
                f"engine {piece.name!r}: its output {argument.name} differs from the module's by {error:.3g}, at most "
                f"{allowed:.3g} is rounding: this compiler makes wrong code of it; try another torch, or --backend "
                "compile"
            )


def random_inputs(piece: Piece, device: str) -> list[Tensor]:
    """Return seeded random inputs for an engine, chosen so that the engine's activations stay near 1."""
    generator = torch.Generator(device).manual_seed(0)
    vocabulary = min(
        (a.shape[0] for a in piece.parameters if a.name.endswith("embedding.weight")), default=_TOKENS
    )
    tensors = []
    for argument in piece.signature:
        shape, dtype = argument.shape, argument.dtype
        if not dtype.is_floating_point:
            high = 256 if dtype == torch.uint8 else min(_TOKENS, vocabulary)
            if argument.name == RANK:  # a rank number of 0 or 1, since there are at least two ranks
                high = 2
            tensors.append(torch.randint(0, high, shape, generator=generator, device=device, dtype=dtype))
            continue
        tensor = torch.randn(shape, generator=generator, device=device)
        if argument in piece.parameters:
            fan_in = math.prod(shape[1:])
            # Gains and standard deviations are drawn around 1; matrices and kernels are scaled so that each result
            # has variance 1.
            tensor = 1 + 0.1 * tensor if fan_in == 1 else tensor * fan_in**-0.5
        tensors.append(tensor.to(dtype))
    return tensors
