"""What the tests of the peers share: small streams on the CPU, and the naive reference run chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from scripts.bench.peers.network import Network, advance, device_weights, make_network
from seko_export.config.video import VideoBuild
from tests.truth.eager_stream import random_text, random_wan_weights
from tests.truth.naive_dit import ShiftingDit

SEED = 3
CHUNKS = 12  # at least; past the wrap of every layout below


def small_network(config: VideoBuild) -> tuple[Network, Mapping[str, Tensor], Tensor]:
    """Return the peers' network with the checkpoint and the text that it is made of."""
    wan, text = random_wan_weights(config.model), random_text(config.model, config.workload.stream.batch)
    return make_network(config, device_weights(config, wan), text), wan, text


def naive_chunks(network: Network, wan: Mapping[str, Tensor], text: Tensor, chunks: int) -> list[Tensor]:
    """Return the latents [C, F, h, w] of every chunk of row 0, by the naive reference with its own loop of passes."""
    config, count = network.config, network.config.workload.stream.chunk_frames
    naive = ShiftingDit(config.model, config.workload.stream, wan, text[0])
    chunks_of_latents = []
    for first in range(0, chunks * count, count):
        noise = network.noise([SEED], first)[:, 0]
        latents = noise[0]
        for number in range(network.passes):
            velocity = naive.step(latents, float(network.times[number, 0, 0]), first, commit=False)
            sigmas = network.sigma[number], network.sigma_next[number]
            latents = advance(latents, velocity, *sigmas, noise[number + 1])
        naive.step(latents, 0.0, first, commit=True)
        chunks_of_latents.append(latents)
    return chunks_of_latents


def peer_chunks(stream, network: Network, chunks: int) -> list[Tensor]:
    """Return the latents [C, F, h, w] of every chunk of a peer, from the same noise."""
    count = network.config.workload.stream.chunk_frames
    with torch.no_grad():
        stream.prepare()
        return [
            stream.run_chunk(network.noise([SEED], first))[0].clone()
            for first in range(0, chunks * count, count)
        ]
