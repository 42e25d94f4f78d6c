"""minWM's transformer as its description has it; no tests.

It shares nothing with `seko_export`: one row, the checkpoint's own names, Python lists of what each layer has cached:
keys after RoPE and values of the ordinary attention, and in a second cache keys and values under each frame's own
inverse matrix, of the world in which the poses stand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

EPS, THETA = 1e-6, 10_000.0


class NaiveMinwm:
    """One stream's model, in float64.

    Parameters
    ----------
    weights : mapping of str to Tensor
        A checkpoint by the original's names.
    heads, window : int
        Attention heads, and latent frames of the window, which includes the chunk and has no sink.
    text : Tensor
        [text tokens, text width], zero-padded.
    """

    def __init__(self, weights: Mapping[str, Tensor], heads: int, window: int, text: Tensor) -> None:
        self.weights = {name: weight.double() for name, weight in weights.items()}
        self.heads, self.window = heads, window
        self.layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
        inner = F.gelu(self.linear("text_embedding.0", text.double()), approximate="tanh")
        self.text = self.linear("text_embedding.2", inner)
        # of each layer, oldest first: keys and values of a latent frame, [n, H, D] each
        self.ordinary: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.layers)]
        self.camera: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.layers)]

    @torch.no_grad()
    def step(
        self,
        latents: Tensor,
        time: float,
        start: int,
        cameras: Sequence[np.ndarray] | None,
        *,
        commit: bool = False,
    ) -> Tensor:
        """Return the velocity [16, F, h, w] of a chunk.

        Parameters
        ----------
        latents : Tensor
            [16, F, h, w].
        time : float
            The time of all its latent frames.
        start : int
            Number of the chunk's first latent frame.
        cameras : sequence of numpy.ndarray or None
            The matrix [4, 4] of each latent frame's camera; None: the second attention is left out.
        commit : bool
            Whether this is the chunk's last pass, whose keys and values are cached.
        """
        patches = F.conv3d(
            latents[None].double(),
            self.weights["patch_embedding.weight"],
            self.weights["patch_embedding.bias"],
            stride=(1, 2, 2),
        )[0]  # [d, F, rows, columns]
        d, frames, rows, columns = patches.shape
        n = rows * columns
        x = patches.permute(1, 2, 3, 0).reshape(frames * n, d)
        half = self.weights["time_embedding.0.weight"].shape[1] // 2
        angle = time * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        wave = torch.cat((angle.cos(), angle.sin()))
        embedded = self.linear("time_embedding.2", F.silu(self.linear("time_embedding.0", wave)))  # [d]
        modulation = self.linear("time_projection.1", F.silu(embedded)).view(6, d)
        turns = torch.cat([self.turns(start + i, rows, columns, d // self.heads) for i in range(frames)])

        for layer in range(self.layers):
            at = f"blocks.{layer}"
            e = (self.weights[f"{at}.modulation"][0] + modulation).unbind(0)
            y = layer_norm(x) * (1 + e[1]) + e[0]
            q, k = (self.rms(f"{at}.self_attn.norm_{n}", self.linear(f"{at}.self_attn.{n}", y)) for n in "qk")
            q, k, v = (self.split(each) for each in (q, k, self.linear(f"{at}.self_attn.v", y)))
            seen = self.cached(
                self.ordinary, layer, [*zip(turn(k, turns).split(n), v.split(n), strict=True)], commit
            )
            added = self.linear(f"{at}.self_attn.o", attend(turn(q, turns), *seen))
            if cameras is not None:
                added = added + self.by_camera(
                    layer, q, k, v, [torch.from_numpy(each) for each in cameras], commit
                )
            x = x + added * e[2]

            y = layer_norm(x) * self.weights[f"{at}.norm3.weight"] + self.weights[f"{at}.norm3.bias"]
            q = self.rms(f"{at}.cross_attn.norm_q", self.linear(f"{at}.cross_attn.q", y))
            k = self.rms(f"{at}.cross_attn.norm_k", self.linear(f"{at}.cross_attn.k", self.text))
            v = self.linear(f"{at}.cross_attn.v", self.text)
            x = x + self.linear(f"{at}.cross_attn.o", attend(self.split(q), self.split(k), self.split(v)))

            y = layer_norm(x) * (1 + e[4]) + e[3]
            y = self.linear(f"{at}.ffn.2", F.gelu(self.linear(f"{at}.ffn.0", y), approximate="tanh"))
            x = x + y * e[5]

        shift, scale = (self.weights["head.modulation"][0] + embedded).unbind(0)
        y = self.linear("head.head", layer_norm(x) * (1 + scale) + shift)
        y = y.view(frames, rows, columns, 2, 2, -1)
        return torch.einsum("fhwpqc->cfhpwq", y).reshape(-1, frames, 2 * rows, 2 * columns)

    def by_camera(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, matrices: Sequence[Tensor], commit: bool
    ) -> Tensor:
        """Return the camera's attention [T, d], of q, k and v [T, H, D] before RoPE."""
        n = len(q) // len(matrices)
        q = torch.cat([grouped(p.T, part) for p, part in zip(matrices, q.split(n), strict=True)])
        inverses = [p.inverse() for p in matrices]
        own = [
            (grouped(inverse, keys), grouped(inverse, values))
            for inverse, keys, values in zip(inverses, k.split(n), v.split(n), strict=True)
        ]
        y = self.split(attend(q, *self.cached(self.camera, layer, own, commit)))
        y = torch.cat([grouped(p, part) for p, part in zip(matrices, y.split(n), strict=True)])
        return self.linear(f"blocks.{layer}.self_attn.prope_o", y.flatten(1))

    def cached(
        self,
        cache: list[list[tuple[Tensor, Tensor]]],
        layer: int,
        own: list[tuple[Tensor, Tensor]],
        commit: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values [N, H, D] of the window, which ends with the chunk's own frames."""
        window = [*cache[layer], *own][-self.window :]
        if commit:
            cache[layer] = window
        return torch.cat([k for k, _ in window]), torch.cat([v for _, v in window])

    def turns(self, frame: int, rows: int, columns: int, size: int) -> Tensor:
        """Return the rotations [rows*columns, D/2] of a latent frame."""
        side = 2 * (size // 6)
        angles = []
        for row in range(rows):
            for column in range(columns):
                for place, channels in ((frame, size - 2 * side), (row, side), (column, side)):
                    step = torch.arange(0, channels, 2, dtype=torch.float64) / channels
                    angles.append(place / THETA**step)
        whole = torch.cat(angles).view(rows * columns, -1)
        return torch.polar(torch.ones_like(whole), whole)

    def split(self, x: Tensor) -> Tensor:
        """Return [T, H, D]."""
        return x.reshape(x.shape[0], self.heads, -1)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Return the layer's result."""
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def rms(self, name: str, x: Tensor) -> Tensor:
        """Return x over its root mean square, times the weight."""
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.weights[f"{name}.weight"]


def camera_matrix(pose: np.ndarray, fx: float, fy: float) -> np.ndarray:
    """Return the lens times camera-from-world, [4, 4] float64, of a pose [3, 4] or [4, 4], camera to world, and focal
    lengths in sizes of the picture."""
    whole = np.vstack((np.asarray(pose, np.float64)[:3], [0.0, 0.0, 0.0, 1.0]))
    return np.diag([fx, fy, 1.0, 1.0]) @ np.linalg.inv(whole)


def walked(keys: Sequence[str]) -> list[np.ndarray]:
    """Return the poses [4, 4], camera to world, of latent frames for each of which one key is held, "" for none; the
    first frame is the identity, before any key."""
    degrees = np.pi / 180
    moves = {
        "w": (0, 0, 1),
        "s": (0, 0, -1),
        "d": (1, 0, 0),
        "a": (-1, 0, 0),
        "u": (0, -1, 0),
        "dn": (0, 1, 0),
    }
    turn, place = np.eye(3), np.zeros(3)
    poses = [np.eye(4)]
    for key in keys:
        if key in ("j", "l"):
            angle = 3 * degrees * (1 if key == "l" else -1)
            c, s = np.cos(angle), np.sin(angle)
            turn = turn @ np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]])
        elif key in ("i", "k"):
            angle = 3 * degrees * (1 if key == "i" else -1)
            c, s = np.cos(angle), np.sin(angle)
            turn = turn @ np.array([[1, 0, 0], [0, c, -s], [0, s, c]])
        elif key:
            place = place + turn @ (0.08 * np.array(moves[key], float))
        pose = np.eye(4)
        pose[:3, :3], pose[:3, 3] = turn, place
        poses.append(pose)
    return poses


def grouped(matrix: Tensor, x: Tensor) -> Tensor:
    """Return x [n, H, D] with each group of four channels multiplied by a matrix [4, 4]."""
    return torch.einsum("ij,nhgj->nhgi", matrix, x.unflatten(-1, (-1, 4))).flatten(-2)


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
