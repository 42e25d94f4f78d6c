"""Matrix-Game 2.0's transformer the naive way, from its description: one stream, lists that grow, softmax and rotations
written out. No tests.

Nothing is shared with the code under test. Everything is computed in the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ACTION_HEAD = 64
TURNED = 8  # numbers of an action head that time turns
ACTION_THETA, THETA = 256.0, 10_000.0
SEEN, PER_LATENT = 12, 4  # video frames of actions that a latent frame sees, and that it covers
EPS, PICTURE_EPS, MLP_EPS = 1e-6, 1e-5, 1e-5


@dataclass
class Memory:
    """What one layer keeps, newest last: the frame, keys and values of self-attention [n, H, D], of the mouse [n, A,
    64] and of the keyboard [A, 64]."""

    frames: list[int] = field(default_factory=list)
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    mouse: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    keyboard: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def joined(self, other: Memory, most: int) -> Memory:
        """Return this and what came later, without the oldest beyond ``most`` frames."""
        return Memory(*(((getattr(self, n) + getattr(other, n))[-most:]) for n in vars(self)))


class NaiveMatrixGame:
    """One stream.

    Parameters
    ----------
    weights : mapping of str to Tensor
        The checkpoint by its own names.
    heads, local : int
        Heads of self-attention, and the latent frames that it sees, those of the chunk among them.
    features : Tensor
        CLIP's features of the picture, [N, width].
    picture : Tensor
        Latents [16, frames, h, w] of the picture and the grey that follows; the last one stands for all later.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], heads: int, local: int, features: Tensor, picture: Tensor
    ) -> None:
        self.weights, self.heads, self.local, self.picture = weights, heads, local, picture
        self.layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
        self.memory = [Memory() for _ in range(self.layers)]
        x = self.layer_norm(features, PICTURE_EPS, "img_emb.proj.0")
        x = self.linear("img_emb.proj.1", x)
        x = 0.5 * x * (1 + torch.erf(x / 2**0.5))
        self.context = self.layer_norm(self.linear("img_emb.proj.3", x), PICTURE_EPS, "img_emb.proj.4")

    @torch.no_grad()
    def velocity(
        self,
        latents: Tensor,
        time: float,
        first: int,
        keyboard: Sequence[Tensor],
        mouse: Sequence[Tensor] | None,
        *,
        commit: bool = False,
    ) -> Tensor:
        """Return the velocity [16, F, h, w] of a chunk whose first latent frame has the number ``first``.

        ``keyboard`` and ``mouse`` are the actions of every video frame since the stream's beginning.
        """
        w = self.weights
        frames = [first + at for at in range(latents.shape[1])]
        mask = torch.zeros(4, *latents.shape[1:], dtype=latents.dtype)
        grey = []
        for at, frame in enumerate(frames):
            mask[:, at] = 1.0 if frame == 0 else 0.0
            grey.append(self.picture[:, min(frame, self.picture.shape[1] - 1)])
        x = torch.cat((latents, mask, torch.stack(grey, 1)))
        d = w["patch_embedding.weight"].shape[0]
        rows, columns = x.shape[2] // 2, x.shape[3] // 2
        cut = x.reshape(x.shape[0], len(frames), rows, 2, columns, 2).permute(1, 2, 4, 0, 3, 5)
        x = cut.reshape(len(frames), rows * columns, -1) @ w["patch_embedding.weight"].reshape(d, -1).T
        x = x + w["patch_embedding.bias"]  # [F, n, d]

        width = w["time_embedding.0.weight"].shape[1] // 2
        turns = time * 10_000.0 ** (-torch.arange(width, dtype=torch.float64) / width)
        e = torch.cat((turns.cos(), turns.sin())).to(x.dtype)
        e = self.linear("time_embedding.2", silu(self.linear("time_embedding.0", e)))
        six = self.linear("time_projection.1", silu(e)).reshape(6, d)

        for layer in range(self.layers):
            block = f"blocks.{layer}"
            s = w[f"{block}.modulation"][0] + six
            new = Memory(frames=list(frames))
            x = (
                x
                + self.self_attention(layer, plain(x) * (1 + s[1]) + s[0], frames, (rows, columns), new)
                * s[2]
            )
            x = x + self.cross_attention(block, self.layer_norm(x, EPS, f"{block}.norm3"))
            if f"{block}.action_model.keyboard_embed.0.weight" in w:
                if mouse is not None:
                    x = x + self.mouse_branch(layer, x, frames, mouse, new)
                x = x + self.keyboard_branch(layer, x, frames, keyboard, new)
            y = self.linear(f"{block}.ffn.0", plain(x) * (1 + s[4]) + s[3])
            x = x + self.linear(f"{block}.ffn.2", gelu_tanh(y)) * s[5]
            if commit:
                self.memory[layer] = self.memory[layer].joined(new, self.local)

        s = w["head.modulation"][0] + e
        x = self.linear("head.head", plain(x) * (1 + s[1]) + s[0])
        channels = x.shape[-1] // 4
        x = x.reshape(len(frames), rows, columns, 2, 2, channels).permute(5, 0, 1, 3, 2, 4)
        return x.reshape(channels, len(frames), 2 * rows, 2 * columns)

    def self_attention(
        self, layer: int, x: Tensor, frames: Sequence[int], grid: tuple[int, int], new: Memory
    ) -> Tensor:
        """Return what the chunk's tokens [F, n, d] see of the window."""
        at = f"blocks.{layer}.self_attn"
        q, k = (self.rms_linear(f"{at}.{one}", f"{at}.norm_{one}", x) for one in "qk")
        v = self.split(self.linear(f"{at}.v", x))
        q, k = (
            torch.stack(
                [turned(part[i], place_angles(frame, grid, part.shape[-1])) for i, frame in enumerate(frames)]
            )
            for part in (q, k)
        )
        new.own = [(k[i], v[i]) for i in range(len(frames))]
        window = self.memory[layer].joined(new, self.local)
        keys, values = (torch.cat([pair[one] for pair in window.own]) for one in (0, 1))  # [N, H, D]
        seen = torch.stack([attend(row, keys, values) for row in q])
        return self.linear(f"{at}.o", seen)

    def cross_attention(self, at: str, x: Tensor) -> Tensor:
        """Return what the tokens see of the picture."""
        at = f"{at}.cross_attn"
        q = self.rms_linear(f"{at}.q", f"{at}.norm_q", x)
        k = self.rms_linear(f"{at}.k", f"{at}.norm_k", self.context)
        v = self.split(self.linear(f"{at}.v", self.context))
        return self.linear(f"{at}.o", torch.stack([attend(row, k, v) for row in q]))

    def mouse_branch(
        self, layer: int, x: Tensor, frames: Sequence[int], mouse: Sequence[Tensor], new: Memory
    ) -> Tensor:
        """Return the mouse's residual [F, n, d]: each position attends over time."""
        at = f"blocks.{layer}.action_model"
        u = []
        for i, frame in enumerate(frames):
            moves = torch.cat([mouse[shown].to(x.dtype) for shown in seen_video(frame)])  # [24]
            u.append(torch.cat((x[i], moves.expand(x.shape[1], -1)), -1))
        y = gelu_tanh(self.linear(f"{at}.mouse_mlp.0", torch.stack(u)))
        y = self.layer_norm(self.linear(f"{at}.mouse_mlp.2", y), MLP_EPS, f"{at}.mouse_mlp.3")
        y = y @ self.weights[f"{at}.t_qkv.weight"].T
        q, k, v = (part.unflatten(-1, (-1, ACTION_HEAD)) for part in y.chunk(3, -1))  # [F, n, A, 64]
        q, k = (
            torch.stack([turned(rms(part[i]), action_angles(frame)) for i, frame in enumerate(frames)])
            for part in (q, k)
        )
        new.mouse = [(k[i], v[i]) for i in range(len(frames))]
        window = self.memory[layer].joined(new, self.local).mouse
        residual = torch.zeros(*x.shape[:2], q.shape[2] * ACTION_HEAD, dtype=x.dtype)
        for place in range(x.shape[1]):
            keys, values = (
                torch.stack([pair[one][place] for pair in window]) for one in (0, 1)
            )  # [N, A, 64]
            residual[:, place] = attend(q[:, place], keys, values)
        return residual @ self.weights[f"{at}.proj_mouse.weight"].T

    def keyboard_branch(
        self, layer: int, x: Tensor, frames: Sequence[int], keyboard: Sequence[Tensor], new: Memory
    ) -> Tensor:
        """Return the keyboard's residual [F, n, d]: the keys are the same for all positions."""
        at = f"blocks.{layer}.action_model"
        for frame in frames:
            pressed = torch.stack([keyboard[shown].to(x.dtype) for shown in seen_video(frame)])  # [12, kd]
            y = self.linear(f"{at}.keyboard_embed.2", silu(self.linear(f"{at}.keyboard_embed.0", pressed)))
            both = y.flatten() @ self.weights[f"{at}.keyboard_attn_kv.weight"].T
            k, v = (part.unflatten(-1, (-1, ACTION_HEAD)) for part in both.chunk(2))
            new.keyboard.append((turned(rms(k), action_angles(frame)), v))
        window = self.memory[layer].joined(new, self.local).keyboard
        keys, values = (torch.stack([pair[one] for pair in window]) for one in (0, 1))
        q = (x @ self.weights[f"{at}.mouse_attn_q.weight"].T).unflatten(-1, (-1, ACTION_HEAD))
        seen = [
            attend(turned(rms(q[i]), action_angles(frame)), keys, values) for i, frame in enumerate(frames)
        ]
        return torch.stack(seen) @ self.weights[f"{at}.proj_keyboard.weight"].T

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Apply a linear layer of the checkpoint."""
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def layer_norm(self, x: Tensor, eps: float, name: str) -> Tensor:
        """Apply a LayerNorm of the checkpoint."""
        return plain(x, eps) * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def rms_linear(self, name: str, norm: str, x: Tensor) -> Tensor:
        """Return a linear layer's normed result, split into heads."""
        return self.split(rms(self.linear(name, x)) * self.weights[f"{norm}.weight"])

    def split(self, x: Tensor) -> Tensor:
        """Split the last axis into the heads of self-attention and cross-attention."""
        return x.reshape(*x.shape[:-1], self.heads, -1)


def seen_video(frame: int) -> list[int]:
    """Return the video frames whose actions a latent frame sees; before the stream there is its first frame."""
    return [max(0, PER_LATENT * frame - SEEN + at) for at in range(SEEN)]


def place_angles(frame: int, grid: tuple[int, int], size: int) -> Tensor:
    """Return the angles [n, 1, D/2] of a latent frame's tokens: time, row, column."""
    side = 2 * (size // 6)
    axes = ((frame, size - 2 * side), (0, side), (0, side))
    angles = []
    for row in range(grid[0]):
        for column in range(grid[1]):
            each = [
                place * THETA ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
                for place, (_, channels) in zip((frame, row, column), axes, strict=True)
            ]
            angles.append(torch.cat(each))
    return torch.stack(angles)[:, None]


def action_angles(frame: int) -> Tensor:
    """Return the angles [32] of an action head: time turns its first numbers, the others stay."""
    turns = frame * ACTION_THETA ** (-torch.arange(0, TURNED, 2, dtype=torch.float64) / TURNED)
    return torch.cat((turns, torch.zeros((ACTION_HEAD - TURNED) // 2, dtype=torch.float64)))


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs of neighbouring numbers."""
    real, imaginary = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), -1).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return [tokens, H*D] of q [tokens, H, D] over k and v [N, H, D]."""
    scores = (q[:, None] * k[None]).sum(-1) / q.shape[-1] ** 0.5  # [tokens, N, H]
    parts = torch.exp(scores - scores.max(1, keepdim=True).values)
    parts = parts / parts.sum(1, keepdim=True)
    return (parts[..., None] * v[None]).sum(1).flatten(1)


def plain(x: Tensor, eps: float = EPS) -> Tensor:
    """Return a LayerNorm without weights."""
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rms(x: Tensor) -> Tensor:
    """Return the numbers divided by their root mean square."""
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def silu(x: Tensor) -> Tensor:
    """Return x times its logistic function."""
    return x / (1 + torch.exp(-x))


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU in its form with a hyperbolic tangent."""
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
