"""The modules of the camera: its matrices, and the attention that sees them (PRoPE; minWM's report is arXiv
2605.30263).

Shapes use the letters that `layers.causal_dit` defines; S is the number of slots of a row's cache. A camera's matrix P
[4, 4] maps points of the world to its picture: the lens (focal lengths only) times the inverse of its pose. The
channels of a head are groups of four numbers, which the matrices multiply.

The authors keep a second cache with the keys and values of each frame under its own P^-1, whose numbers grow as the
camera moves away from the stream's origin. Only P_q P_k^-1 counts, so the keys and values that self-attention has
cached before RoPE serve here, too, and only the matrices of the cached frames are kept. Matrices are multiplied in
float32 and relative to the chunk's first camera.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from seko_export.config.model import ModelConfig
from seko_export.config.video import VideoBuild
from seko_export.families.layers.block import Recall, Unturned
from seko_export.families.layers.choice import INTRINSICS, POSES
from seko_export.families.layers.ring_positions import rows_of

MATRIX, INVERSE = "camera_matrix", "camera_inverse"  # of each latent frame, [4, 4] float32
KEPT = "camera_inverse"  # of each cached latent frame
_GROUP = 4


class CameraMatrices(nn.Module):
    """The module that computes the matrices of a chunk's cameras. It has no weights."""

    groups = ("conditioning",)

    def __init__(self, config: VideoBuild) -> None:
        super().__init__()
        self.height, self.width = config.workload.stream.height, config.workload.stream.width

    def forward(self, conditioning: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return P and P^-1, [B, F, 4, 4] each, from poses [B, F, 3, 4], camera to world, and intrinsics [B, F, 4] in
        pixels of the video, of which the centre is not used."""
        poses, (fx, fy, _, _) = conditioning[POSES], conditioning[INTRINSICS].unbind(-1)
        lens = torch.stack((fx / self.width, fy / self.height, torch.ones_like(fx), torch.ones_like(fx)), -1)
        turn, place = poses[..., :3], poses[..., 3:]
        back = turn.mT
        view = _with_last_row(torch.cat((back, -(back * place.mT).sum(-1, keepdim=True)), -1))
        return lens.unsqueeze(-1) * view, _with_last_row(poses) / lens.unsqueeze(-2)


class CameraTurn:
    """The matrices under which the second attention sees keys and values; see `layers.block.Turn`.

    Parameters
    ----------
    slots : int
        Number of slots of a row's cache.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots

    def of_slots(self, conditioning: Mapping[str, Tensor], recall: Recall) -> Tensor:
        """Return P_0 P_k^-1 of the cached frames k and the chunk's first camera P_0, [B, S, 4, 4]."""
        cache = recall.caches[KEPT]
        of_call = cache if recall.rows is None else rows_of(cache, recall.rows, self.slots)
        return product(conditioning[MATRIX].narrow(1, 0, 1), of_call.unflatten(0, (-1, self.slots)))

    def turned(self, of_frames: Tensor, x: Tensor) -> Tensor:
        """Return x [B, T, H, D] under the matrices [B, F, 4, 4] of its frames."""
        return by_frame(of_frames, x)


class CameraAttention(nn.Module):
    """The attention of a layer that sees cameras and neither positions nor time, and its projection."""

    fp8_linears = ("prope_o",)

    def __init__(self, model: ModelConfig, turn: CameraTurn, dtype: torch.dtype) -> None:
        super().__init__()
        self.turn = turn
        self.prope_o = nn.Linear(model.dim, model.dim, dtype=dtype)

    def forward(self, seen: Unturned, conditioning: Mapping[str, Tensor], recall: Recall) -> Tensor:
        """Return what is added to self-attention, [B, T, d], and keep the chunk's cameras."""
        matrix, inverse = conditioning[MATRIX], conditioning[INVERSE]  # [B, F, 4, 4]
        recall.keep({KEPT: inverse}, self.turn.slots)
        forth = product(matrix, inverse.narrow(1, 0, 1))  # P_q P_0^-1, of the chunk's first camera P_0
        y = seen.attend(by_frame(forth.mT, seen.q), self.turn.of_slots(conditioning, recall))
        y = by_frame(forth, y.unflatten(-1, seen.q.shape[2:]))
        added: Tensor = self.prope_o(y.flatten(2))
        return added


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of matrices [..., 4, 4], written out, so that they are in float32 on every GPU."""
    result: Tensor = (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)
    return result


def by_frame(matrices: Tensor, x: Tensor) -> Tensor:
    """Return x [B, T, H, D] with each group of four channels multiplied by the matrix of its frame, [B, F, 4, 4], in
    the dtype of ``x``."""
    groups = (
        x.float().unflatten(-1, (-1, _GROUP)).unflatten(1, (matrices.shape[1], -1))
    )  # [B, F, n, H, D/4, 4]
    columns = matrices.unflatten(1, (-1, 1, 1, 1)).unbind(-1)  # each [B, F, 1, 1, 1, 4]
    # written out: a sum over an axis of four would be a reduction of its own on a GPU
    terms = [column * number.unsqueeze(-1) for column, number in zip(columns, groups.unbind(-1), strict=True)]
    y = (terms[0] + terms[1]) + (terms[2] + terms[3])
    result: Tensor = y.flatten(1, 2).flatten(-2).to(x.dtype)
    return result


def _with_last_row(upper: Tensor) -> Tensor:
    """Return matrices [..., 4, 4] of which ``upper`` [..., 3, 4] are the first rows, over 0, 0, 0, 1."""
    last = torch.zeros_like(upper[..., :1, :])
    last[..., 3] = 1
    return torch.cat((upper, last), -2)
