"""ABot-World's transformer as its description has it; no tests.

It shares nothing with `seko_export`: one row, the checkpoint's own names, Python lists of what each layer has cached
before RoPE, positions inside the window, and the reference tokens in front of the first block's own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from tests.truth.naive_wan import NaiveWan, attend, layer_norm, turn

REFERENCES, SLOT_DISTANCE, REPEATS = 5, 256, 4


class NaiveAbot(NaiveWan):
    """One stream's model.

    Parameters
    ----------
    weights : mapping of str to Tensor
        A checkpoint by the original's names.
    heads, ring : int
        Attention heads, and latent frames of the window, which has no sink.
    side : int
        Tokens of a reference picture along a side.
    unshuffle : int
        Pixels along a side that the adapter of keys takes together.
    text : Tensor
        [text tokens, text width], zero-padded.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], heads: int, ring: int, side: int, unshuffle: int, text: Tensor
    ) -> None:
        super().__init__(weights, heads, text)
        self.ring, self.side, self.unshuffle = ring, side, unshuffle
        # of each layer: the cached frames' keys before RoPE and values, oldest first; and the reference tokens'
        self.cached: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.layers)]
        self.front: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def step(
        self, latents: Tensor, times: Sequence[float], start: int, keys: Tensor, *, commit: bool = False
    ) -> Tensor:
        """Return the velocity [48, F, h, w] of a block.

        Parameters
        ----------
        latents : Tensor
            [48, F, h, w].
        times : sequence of float
            The time of each latent frame.
        start : int
            Number of the block's first latent frame.
        keys : Tensor
            [F, 8], the pressed keys W A S D I J K L of each latent frame.
        commit : bool
            Whether this is the block's last pass, whose keys and values are cached.
        """
        patches = self.patches(latents)
        d, frames, rows, columns = patches.shape
        x = patches.permute(1, 2, 3, 0).flatten(0, 2) + self.actions(keys, rows, columns)
        token_times = [time for time in times for _ in range(rows * columns)]
        references = REFERENCES * self.side**2 if start == 0 else 0
        x = torch.cat((torch.zeros(references, d, dtype=x.dtype), x))
        embedded = self.time(torch.tensor([0.0] * references + token_times, dtype=torch.float64))
        modulation = self.linear("time_projection.1", F.silu(embedded)).unflatten(-1, (6, d))  # [T, 6, d]

        for layer in range(self.layers):
            at = f"blocks.{layer}"
            e = (self.weights[f"{at}.modulation"] + modulation).unbind(1)
            y = layer_norm(x) * (1 + e[1]) + e[0]
            q, k, v = self.queries_keys_values(layer, y)
            front = (k[:references], v[:references]) if references else self.front[layer]
            own = [
                (k[references:][i : i + rows * columns], v[references:][i : i + rows * columns])
                for i in range(0, frames * rows * columns, rows * columns)
            ]
            window = [*self.cached[layer], *own][-self.ring :]
            grid = [self.turns(place, rows, columns) for place in range(len(window))]
            before = torch.cat([self.turns(time, self.side, self.side) for time in self.reference_times()])
            queries = torch.cat(([before] if references else []) + grid[-frames:])
            turns = torch.cat([before, *grid])
            seen_k = turn(torch.cat([front[0], *(pair[0] for pair in window)]), turns)
            seen_v = torch.cat([front[1], *(pair[1] for pair in window)])
            y = attend(turn(q, queries), seen_k, seen_v)
            if commit:
                self.cached[layer] = window
                if references:
                    self.front.append(front)
            x = x + self.linear(f"{at}.self_attn.o", y) * e[2]
            x = self.rest_of_layer(layer, x, *e[3:])

        x, embedded = x[references:], embedded[references:]
        e = (self.weights["head.modulation"] + embedded[:, None]).unbind(1)
        return self.head(x, *e, (frames, rows, columns))

    def actions(self, keys: Tensor, rows: int, columns: int) -> Tensor:
        """Return what the keys [F, 8] add to the tokens, [F*rows*columns, d]."""
        cell = 2 * self.unshuffle
        maps = keys.to(self.text.dtype).repeat_interleave(REPEATS, 1)[..., None, None]
        pixels = maps * torch.ones(rows * cell, columns * cell, dtype=maps.dtype)
        x = F.pixel_unshuffle(pixels, self.unshuffle)
        x = self.conv("act_control_adapter.conv", x, stride=2)
        y = F.relu(self.conv("act_control_adapter.residual_blocks.0.conv1", x, padding=1))
        x = x + self.conv("act_control_adapter.residual_blocks.0.conv2", y, padding=1)
        return x.permute(0, 2, 3, 1).flatten(0, 2)

    def reference_times(self) -> list[int]:
        """Return the position along time of each reference picture."""
        return [-(REFERENCES - i) * max(SLOT_DISTANCE, self.side**2) for i in range(REFERENCES)]

    def conv(self, name: str, x: Tensor, **how: int) -> Tensor:
        """Return the convolution's result."""
        return F.conv2d(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], **how)
