"""The toy family the naive way: one row, a shifting cache, the sampler written out. No tests."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from seko_export.config.video import VideoBuild
from seko_export.families.layers.sampler import gaussian
from tests.toy_family.family import CAMERA, WORDS
from tests.truth.naive_dit import ShiftingDit


class NaiveToy(ShiftingDit):
    """One stream of the toy family.

    Parameters
    ----------
    config : VideoBuild
        Its sizes and times.
    checkpoint : mapping of str to Tensor
        By the toy's own names.
    text : Tensor
        [text tokens, text_dim].
    """

    def __init__(self, config: VideoBuild, checkpoint: Mapping[str, Tensor], text: Tensor) -> None:
        shared = {own: word for word, own in WORDS.items()}
        wan: dict[str, Tensor] = {}
        for own, tensor in checkpoint.items():
            name = ".".join(shared.get(word, word) for word in own.split("."))
            if ".qkv." in name:
                wan |= {name.replace("qkv", x): part for x, part in zip("qkv", tensor.chunk(3), strict=True)}
            else:
                wan[name] = tensor
        d, channels = config.model.dim, config.model.in_channels
        wan["patch_embedding.weight"] = wan["patch_embedding.weight"].reshape(d, channels, 1, 2, 2)
        super().__init__(config.model, config.workload.stream, wan, text)
        self.tables_of_passes = config.workload.schedule.tables(config.workload.stream)
        self.camera = torch.zeros(config.workload.stream.chunk_frames, CAMERA)

    @torch.no_grad()
    def chunk(self, seed: int, number: int, camera: Tensor) -> Tensor:
        """Return the latents [C, F, h, w] of the next chunk, with its camera [F, CAMERA]."""
        s, t = self.stream, self.tables_of_passes
        shape = (self.model.out_channels, s.latent_height, s.latent_width)
        first = number * s.chunk_frames
        frames = torch.arange(first, first + s.chunk_frames)[None]
        self.camera = camera

        def noise(draw: Tensor) -> Tensor:
            return gaussian(torch.tensor([seed]), frames, draw.reshape(1), shape)[0]

        x = noise(t["schedule.first_draw"])
        for at, (sigma, after) in enumerate(zip(t["schedule.sigma"], t["schedule.sigma_next"], strict=True)):
            velocity = self.step(
                self.with_extra_channels(x),
                float(t["schedule.timestep"][at].flatten()[0]),
                first,
                commit=False,
            )
            x = (1 - after) * (x - sigma * velocity) + after * noise(t["schedule.draw"][at])
        self.step(
            self.with_extra_channels(x), float(t["schedule.timestep"][-1].flatten()[0]), first, commit=True
        )
        return x

    def with_extra_channels(self, latents: Tensor) -> Tensor:
        """Return the latents with the camera as further channels."""
        each = [torch.full_like(latents[:1], 0.0) for _ in range(CAMERA)]
        for channel, plane in enumerate(each):
            for frame in range(latents.shape[1]):
                plane[0, frame] = self.camera[frame, channel]
        return torch.cat([latents, *each])

    def tail(self, layer: int, x: Tensor) -> Tensor:
        """Attend to the camera, one head at a time."""
        at, width = f"blocks.{layer}.tail", self.model.head_dim
        q = self._linear(f"{at}.query", x)
        k, v = self._linear(f"{at}.pose", self.camera).chunk(2, -1)
        heads = [slice(i * width, (i + 1) * width) for i in range(self.model.heads)]
        seen = [torch.softmax(q[:, h] @ k[:, h].T / width**0.5, -1) @ v[:, h] for h in heads]
        return x + self._linear(f"{at}.out", torch.cat(seen, -1))
