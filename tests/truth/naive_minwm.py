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

from tests.truth.naive_wan import NaiveWan, attend, layer_norm, turn


class NaiveMinwm(NaiveWan):
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
        exact = {name: weight.double() for name, weight in weights.items()}
        super().__init__(exact, heads, text.double())
        self.window = window
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
        patches = self.patches(latents.double())
        d, frames, rows, columns = patches.shape
        n = rows * columns
        x = patches.permute(1, 2, 3, 0).reshape(frames * n, d)
        embedded = self.time(torch.tensor([time], dtype=torch.float64))[0]
        modulation = self.linear("time_projection.1", F.silu(embedded)).view(6, d)
        turns = torch.cat([self.turns(start + i, rows, columns) for i in range(frames)])

        for layer in range(self.layers):
            at = f"blocks.{layer}"
            e = (self.weights[f"{at}.modulation"][0] + modulation).unbind(0)
            y = layer_norm(x) * (1 + e[1]) + e[0]
            q, k, v = self.queries_keys_values(layer, y)
            seen = self.cached(
                self.ordinary, layer, [*zip(turn(k, turns).split(n), v.split(n), strict=True)], commit
            )
            added = self.linear(f"{at}.self_attn.o", attend(turn(q, turns), *seen))
            if cameras is not None:
                added = added + self.by_camera(
                    layer, q, k, v, [torch.from_numpy(each) for each in cameras], commit
                )
            x = x + added * e[2]
            x = self.rest_of_layer(layer, x, *e[3:])

        shift, scale = (self.weights["head.modulation"][0] + embedded).unbind(0)
        return self.head(x, shift, scale, (frames, rows, columns))

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
