"""ABot-World's transformer as its description has it; no tests.

It shares nothing with `seko_export`: one row, the checkpoint's own names, Python lists of what each layer has cached
before RoPE, positions inside the window, and the reference tokens in front of the first block's own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

EPS, THETA = 1e-6, 10_000.0
REFERENCES, SLOT_DISTANCE, REPEATS = 5, 256, 4


class NaiveAbot:
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
        self.weights, self.heads, self.ring, self.side, self.unshuffle = weights, heads, ring, side, unshuffle
        self.layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
        inner = F.gelu(self.linear("text_embedding.0", text), approximate="tanh")
        self.text = self.linear("text_embedding.2", inner)
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
        patches = F.conv3d(
            latents[None],
            self.weights["patch_embedding.weight"],
            self.weights["patch_embedding.bias"],
            stride=(1, 2, 2),
        )[0]  # [d, F, rows, columns]
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
            q, k = (self.rms(f"{at}.self_attn.norm_{n}", self.linear(f"{at}.self_attn.{n}", y)) for n in "qk")
            q, k, v = (self.split(each) for each in (q, k, self.linear(f"{at}.self_attn.v", y)))
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

            y = layer_norm(x) * self.weights[f"{at}.norm3.weight"] + self.weights[f"{at}.norm3.bias"]
            q = self.rms(f"{at}.cross_attn.norm_q", self.linear(f"{at}.cross_attn.q", y))
            k = self.rms(f"{at}.cross_attn.norm_k", self.linear(f"{at}.cross_attn.k", self.text))
            v = self.linear(f"{at}.cross_attn.v", self.text)
            x = x + self.linear(f"{at}.cross_attn.o", attend(self.split(q), self.split(k), self.split(v)))

            y = layer_norm(x) * (1 + e[4]) + e[3]
            y = self.linear(f"{at}.ffn.2", F.gelu(self.linear(f"{at}.ffn.0", y), approximate="tanh"))
            x = x + y * e[5]

        x, embedded = x[references:], embedded[references:]
        e = (self.weights["head.modulation"] + embedded[:, None]).unbind(1)
        y = self.linear("head.head", layer_norm(x) * (1 + e[1]) + e[0])
        y = y.view(frames, rows, columns, 2, 2, -1)
        return torch.einsum("fhwpqc->cfhpwq", y).reshape(-1, frames, 2 * rows, 2 * columns)

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

    def turns(self, time: int, rows: int, columns: int) -> Tensor:
        """Return the rotations [rows*columns, D/2] of a frame at a position along time."""
        size = self.weights["blocks.0.self_attn.q.weight"].shape[0] // self.heads
        side = 2 * (size // 6)
        angles = []
        for row in range(rows):
            for column in range(columns):
                for place, channels in ((time, size - 2 * side), (row, side), (column, side)):
                    step = torch.arange(0, channels, 2, dtype=torch.float64) / channels
                    angles.append(place / THETA**step)
        whole = torch.cat(angles).view(rows * columns, -1)
        return torch.polar(torch.ones_like(whole), whole).to(self.text.dtype.to_complex())

    def time(self, times: Tensor) -> Tensor:
        """Return the embedding [T, d] of times [T] float64."""
        half = self.weights["time_embedding.0.weight"].shape[1] // 2
        angle = times[:, None] * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        waves = torch.cat((angle.cos(), angle.sin()), -1).to(self.text.dtype)
        return self.linear("time_embedding.2", F.silu(self.linear("time_embedding.0", waves)))

    def split(self, x: Tensor) -> Tensor:
        """Return [T, H, D]."""
        return x.view(x.shape[0], self.heads, -1)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Return the layer's result."""
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def conv(self, name: str, x: Tensor, **how: int) -> Tensor:
        """Return the convolution's result."""
        return F.conv2d(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], **how)

    def rms(self, name: str, x: Tensor) -> Tensor:
        """Return x over its root mean square, times the weight."""
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.weights[f"{name}.weight"]


def layer_norm(x: Tensor) -> Tensor:
    """Return x without mean, over its deviation."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + EPS).rsqrt()


def turn(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate the interleaved pairs of x [T, H, D] by [T, D/2]."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return [T, H*D] of q [T, H, D] over k, v [N, H, D]."""
    weight = torch.softmax(torch.einsum("thd,nhd->htn", q, k) / q.shape[-1] ** 0.5, -1)
    return torch.einsum("htn,nhd->thd", weight, v).flatten(1)
