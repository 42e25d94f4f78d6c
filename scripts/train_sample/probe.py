"""The loss of a teacher on a fixed held-out batch with fixed noise and times: the same question for every run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from scripts.train_sample.latent_pool import LAYOUTS, LatentPool
from scripts.train_sample.progress import autocast, step_generator
from scripts.train_sample.text import encode, make_tokenizer
from scripts.train_sample.train_dit import flow_loss, layout_mask, load_teacher

PROBE_SEED = 4242
POOL = 256  # held-out samples


@torch.no_grad()
def probe(
    folder: Path,
    encode_video: Callable[[Tensor], Tensor],
    device: str,
    rows: int = 128,
    draws: int = 4,
    pool_size: int = POOL,
) -> dict[str, float]:
    """Return the velocity loss of a run's EMA weights in each layout.

    Parameters
    ----------
    folder : Path
        Of the teacher's run.
    encode_video : callable
        As `LatentPool` takes it.
    device : str
        Where to work; results compare on one kind of device only, as random numbers are its own.
    rows, draws : int
        Of a batch; batches of each layout.
    pool_size : int
        Held-out samples to draw from, a multiple of 32.

    Returns
    -------
    dict of str to float
        By layout; captions are never dropped here.
    """
    both, config = load_teacher(folder, device)
    pool = LatentPool(
        pool_size,
        config.stream,
        encode_video,
        make_tokenizer(),
        config.model.text_tokens,
        device,
        PROBE_SEED,
        held_out=True,
    )
    found = {}
    for layout in LAYOUTS:
        mask, losses = layout_mask(layout, config.stream, device), []
        for draw in range(draws):
            generator = step_generator(device, PROBE_SEED, draw)
            batch = pool.draw(layout, rows, generator)
            with autocast(device):
                text = encode(both.text, batch.ids).float()
                losses.append(flow_loss(both.dit, batch, layout, text, mask, config, generator))
        found[layout] = round(float(torch.stack(losses).mean()), 5)
    return found
