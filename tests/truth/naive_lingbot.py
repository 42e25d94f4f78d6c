"""lingbot-world's transformer over a whole sequence at once, written from its description; no tests.

It shares nothing with `seko_export`: one row, the checkpoint's own names, every frame since the start of the stream in
one masked forward, no cache. A frame sees what its chunk saw: the sink, and the last ring frames up to the end of that
chunk. Frames of earlier chunks stand clean at time 0, which is how the context pass cached them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

EPS = 1e-6


@dataclass(frozen=True)
class Window:
    """Chunk, sink and ring in latent frames."""

    chunk: int
    sink: int
    ring: int

    def sees(self, frame: int, other: int) -> bool:
        """Tell whether the chunk of a frame saw another frame."""
        end = (frame // self.chunk + 1) * self.chunk
        return other < end and (other < self.sink or other >= end - self.ring)


class NaiveLingbot:
    """One stream's model.

    Parameters
    ----------
    weights : mapping of str to Tensor
        A checkpoint, by the original's names.
    heads : int
        Attention heads.
    window : Window
        What a frame sees.
    text : Tensor
        [text tokens, text width], zero-padded.
    """

    def __init__(self, weights: Mapping[str, Tensor], heads: int, window: Window, text: Tensor) -> None:
        self.weights, self.heads, self.window = weights, heads, window
        self.dtype = weights["patch_embedding.weight"].dtype
        self.layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
        inner = F.gelu(self.linear("text_embedding.0", text), approximate="tanh")
        self.text = self.linear("text_embedding.2", inner)

    @torch.no_grad()
    def velocity(self, latents: Tensor, times: Tensor, condition: Tensor, plucker: Tensor | None) -> Tensor:
        """Return the velocity [16, frames, h, w] of all frames.

        Parameters
        ----------
        latents : Tensor
            [16, frames, h, w].
        times : Tensor
            [frames].
        condition : Tensor
            [20, frames, h, w].
        plucker : Tensor or None
            [frames, 6, 8*h, 8*w]; without it the layers have no camera.
        """
        x = torch.cat((latents, condition))[None]
        patches = F.conv3d(
            x, self.weights["patch_embedding.weight"], self.weights["patch_embedding.bias"], stride=(1, 2, 2)
        )
        _, d, frames, rows, columns = patches.shape
        n = rows * columns
        x = patches[0].permute(1, 2, 3, 0).reshape(frames * n, d)
        camera = None if plucker is None else self.camera_tokens(plucker)

        half = self.weights["time_embedding.0.weight"].shape[1] // 2
        angle = torch.outer(times.double(), 10000.0 ** (-torch.arange(half).double() / half))
        wave = torch.cat((angle.cos(), angle.sin()), 1).to(self.dtype)
        e = self.linear("time_embedding.2", F.silu(self.linear("time_embedding.0", wave)))  # [frames, d]
        e0 = self.linear("time_projection.1", F.silu(e)).reshape(frames, 6, d).repeat_interleave(n, 0)
        e = e.repeat_interleave(n, 0)

        turn = self.rotations(frames, rows, columns, d // self.heads)
        seen = torch.tensor(
            [[self.window.sees(query, other) for other in range(frames)] for query in range(frames)]
        )
        mask = torch.zeros(seen.shape, dtype=self.dtype).masked_fill(~seen, -torch.inf)
        mask = mask.repeat_interleave(n, 0).repeat_interleave(n, 1)
        for layer in range(self.layers):
            x = self.block(f"blocks.{layer}", x, e0, camera, turn, mask)
        shift, scale = (self.weights["head.modulation"][0] + e[:, None]).unbind(1)
        y = self.linear("head.head", F.layer_norm(x, (d,), eps=EPS) * (1 + scale) + shift)
        y = y.reshape(frames, rows, columns, 2, 2, -1)  # row and column in the patch, then channels
        return y.permute(5, 0, 1, 3, 2, 4).reshape(-1, frames, 2 * rows, 2 * columns)

    def block(
        self, at: str, x: Tensor, e0: Tensor, camera: Tensor | None, turn: Tensor, mask: Tensor
    ) -> Tensor:
        """Return one layer's output [tokens, d]."""
        d = x.shape[-1]
        m = (self.weights[f"{at}.modulation"][0] + e0).unbind(1)
        y = F.layer_norm(x, (d,), eps=EPS) * (1 + m[1]) + m[0]
        q, k = (self.normed(f"{at}.self_attn.{part}", f"{at}.self_attn.norm_{part}", y) for part in "qk")
        q, k = (
            torch.view_as_real(torch.view_as_complex(tensor.unflatten(-1, (-1, 2))) * turn).flatten(-2)
            for tensor in (q, k)
        )
        y = attend(q, k, self.split(self.linear(f"{at}.self_attn.v", y)), mask)
        x = x + self.linear(f"{at}.self_attn.o", y) * m[2]
        if camera is not None:
            u = self.linear(f"{at}.cam_injector_layer1", camera)
            u = self.linear(f"{at}.cam_injector_layer2", F.silu(u)) + camera
            x = (1 + self.linear(f"{at}.cam_scale_layer", u)) * x + self.linear(f"{at}.cam_shift_layer", u)
        y = F.layer_norm(x, (d,), self.weights[f"{at}.norm3.weight"], self.weights[f"{at}.norm3.bias"], EPS)
        q = self.normed(f"{at}.cross_attn.q", f"{at}.cross_attn.norm_q", y)
        k = self.normed(f"{at}.cross_attn.k", f"{at}.cross_attn.norm_k", self.text)
        y = attend(q, k, self.split(self.linear(f"{at}.cross_attn.v", self.text)), None)
        y = y + self.extra_text(at, q)
        x = x + self.linear(f"{at}.cross_attn.o", y)
        y = F.layer_norm(x, (d,), eps=EPS) * (1 + m[4]) + m[3]
        y = F.gelu(self.linear(f"{at}.ffn.0", y), approximate="tanh")
        return x + self.linear(f"{at}.ffn.2", y) * m[5]

    def extra_text(self, at: str, q: Tensor) -> Tensor:
        """Return what a layer's queries [tokens, H, D] see beside the text, [tokens, d]."""
        del at
        return torch.zeros_like(q.flatten(1))

    def camera_tokens(self, plucker: Tensor) -> Tensor:
        """Return [tokens, d]: unshuffled by 8, then patches of 2 x 2, then three linear layers."""
        cells = F.pixel_unshuffle(plucker, 8)  # [frames, 384, h, w], index c*64 + row*8 + column
        patches = F.unfold(
            cells, kernel_size=2, stride=2
        )  # [frames, 384*4, n], index channel*4 + row*2 + column
        p = self.linear("patch_embedding_wancamctrl", patches.transpose(1, 2).flatten(0, 1))
        inner = F.silu(self.linear("c2ws_hidden_states_layer1", p))
        return p + self.linear("c2ws_hidden_states_layer2", inner)

    def rotations(self, frames: int, rows: int, columns: int, width: int) -> Tensor:
        """Return [tokens, 1, width/2] complex: pairs for time, then row, then column."""
        side = width // 6
        parts = []
        place = torch.cartesian_prod(torch.arange(frames), torch.arange(rows), torch.arange(columns)).double()
        for axis, pairs in enumerate((width // 2 - 2 * side, side, side)):
            frequency = 10000.0 ** (-torch.arange(pairs).double() / pairs)
            parts.append(torch.outer(place[:, axis], frequency))
        angle = torch.cat(parts, 1)
        return torch.polar(torch.ones_like(angle), angle).to(self.dtype.to_complex())[:, None]

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Apply a linear layer of the checkpoint."""
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def normed(self, name: str, norm: str, x: Tensor) -> Tensor:
        """Return heads [tokens, H, D] of a linear layer with an RMSNorm over the whole width."""
        y = self.linear(name, x)
        return self.split(
            y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * self.weights[f"{norm}.weight"]
        )

    def split(self, x: Tensor) -> Tensor:
        """Return [tokens, H, D]."""
        return x.unflatten(-1, (self.heads, -1))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return [tokens, d] of q over k and v, each [tokens, H, D]."""
    score = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    weight = torch.softmax(score if mask is None else score + mask, -1)
    return torch.einsum("hqk,khd->qhd", weight, v).flatten(1)


def naive_plucker(poses: np.ndarray, intrinsics: np.ndarray, height: int, width: int) -> Tensor:
    """Return [frames, 6, H, W] float32 of framewise poses [frames, 3, 4] and intrinsics [frames, 4], pixel by pixel in
    float64.
    """
    out = np.zeros((len(poses), 6, height, width))
    for frame, (pose, (fx, fy, cx, cy)) in enumerate(
        zip(poses.astype(float), intrinsics.astype(float), strict=True)
    ):
        for j in range(height):
            for i in range(width):
                forward = np.array([(i + 0.5 - cx) / fx, (j + 0.5 - cy) / fy, 1.0])
                out[frame, :3, j, i] = pose[:, 3]
                out[frame, 3:, j, i] = pose[:, :3] @ (forward / np.linalg.norm(forward))
    return torch.from_numpy(out).float()
