"""What transformers of Wan's kind have in common, written from their description; no tests.

It shares nothing with `seko_export`: one row, and the checkpoint's own names.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

EPS, THETA = 1e-6, 10_000.0


class NaiveWan:
    """One stream's model, but for what its self-attention sees.

    Parameters
    ----------
    weights : mapping of str to Tensor
        A checkpoint by the original's names.
    heads : int
        Attention heads.
    text : Tensor
        [text tokens, text width], zero-padded, of the weights' type.
    """

    def __init__(self, weights: Mapping[str, Tensor], heads: int, text: Tensor) -> None:
        self.weights, self.heads = weights, heads
        self.layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
        inner = F.gelu(self.linear("text_embedding.0", text), approximate="tanh")
        self.text = self.linear("text_embedding.2", inner)

    def patches(self, latents: Tensor) -> Tensor:
        """Return [d, F, rows, columns] of latents [C, F, h, w]."""
        weight, bias = (self.weights[f"patch_embedding.{part}"] for part in ("weight", "bias"))
        return F.conv3d(latents[None], weight, bias, stride=(1, 2, 2))[0]

    def queries_keys_values(self, layer: int, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of self-attention before RoPE, [T, H, D] each."""
        at = f"blocks.{layer}.self_attn"
        q, k = (self.rms(f"{at}.norm_{n}", self.linear(f"{at}.{n}", y)) for n in "qk")
        return self.split(q), self.split(k), self.split(self.linear(f"{at}.v", y))

    def rest_of_layer(self, layer: int, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        """Return x [T, d] behind the layer's attention to the text and its feed-forward part."""
        at = f"blocks.{layer}"
        y = layer_norm(x) * self.weights[f"{at}.norm3.weight"] + self.weights[f"{at}.norm3.bias"]
        q = self.rms(f"{at}.cross_attn.norm_q", self.linear(f"{at}.cross_attn.q", y))
        k = self.rms(f"{at}.cross_attn.norm_k", self.linear(f"{at}.cross_attn.k", self.text))
        v = self.linear(f"{at}.cross_attn.v", self.text)
        x = x + self.linear(f"{at}.cross_attn.o", attend(self.split(q), self.split(k), self.split(v)))
        y = layer_norm(x) * (1 + scale) + shift
        y = self.linear(f"{at}.ffn.2", F.gelu(self.linear(f"{at}.ffn.0", y), approximate="tanh"))
        return x + y * gate

    def head(self, x: Tensor, shift: Tensor, scale: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Return the velocity [C, F, h, w] of tokens [F*rows*columns, d]; ``grid`` is frames, rows and columns."""
        frames, rows, columns = grid
        y = self.linear("head.head", layer_norm(x) * (1 + scale) + shift)
        y = y.view(frames, rows, columns, 2, 2, -1)
        return torch.einsum("fhwpqc->cfhpwq", y).reshape(-1, frames, 2 * rows, 2 * columns)

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
        return x.reshape(x.shape[0], self.heads, -1)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Return the layer's result."""
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

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
