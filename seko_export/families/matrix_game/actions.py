"""The action modules of Matrix-Game 2.0: keyboard and mouse, to which the first layers attend over time.

In shapes B is the number of rows, F the number of latent frames of the chunk, n the number of tokens of a latent frame,
N the number of latent frames in the cache, A the number of action heads, d the model's width. T is F*n.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from seko_export.config.stream import StreamConfig
from seko_export.config.video import VideoBuild
from seko_export.families.layers.block import Recall
from seko_export.families.layers.rotary import axis_angles
from seko_export.families.matrix_game.model import HEAD, MOUSE, TURNED, MatrixGameModel
from seko_kernels.over_time import attention_over_time, normed_and_turned, over_time_reference

KEYBOARD_INPUT, MOUSE_INPUT = (
    "keyboard",
    "mouse",
)  # names of the caller's inputs, [history + own video frames, numbers]
COS, SIN, KEYS, MOVES = "action_cos", "action_sin", "action_keys", "action_moves"
KEY_K, KEY_V = "action_key_k", "action_key_v"
MOUSE_K_CACHE, MOUSE_V_CACHE, KEY_K_CACHE, KEY_V_CACHE = "mouse_k", "mouse_v", "key_k", "key_v"


def history_frames(config: VideoBuild) -> int:
    """Return the number of video frames before the chunk's own in the inputs."""
    return MatrixGameModel.of(config.model).seen_latents * config.workload.stream.temporal_stride


def input_frames(config: VideoBuild) -> int:
    """Return the number of video frames in the inputs of a chunk."""
    s = config.workload.stream
    return history_frames(config) + s.chunk_frames * s.temporal_stride


class SeenActions(nn.Module):
    """The module that selects, for each latent frame of a chunk, the actions of the video frames that it sees, and
    computes the latent frames' rotary angles.

    The inputs begin with the history, so that with a stride of 4 the chunk's first latent frame f covers the video
    frames 4f-3 to 4f, and the inputs begin at 4f-15. Latent frame f sees the video frames 4f-12 to 4f-1.
    """

    groups = ("conditioning",)

    def __init__(self, config: VideoBuild) -> None:
        super().__init__()
        self.model, self.dtype = MatrixGameModel.of(config.model), config.target.dtype
        self.seen, self.stride = history_frames(config), config.workload.stream.temporal_stride

    def forward(
        self, conditioning: Mapping[str, Tensor], frames: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return cos and sin [B, F, 4] float32, the keyboard [B, F, seen, keys] and, with a mouse, its numbers [B, F,
        seen * 2], from the inputs [B, video frames, numbers] and the absolute latent-frame numbers [B, F] int64.
        """
        del rows  # the inputs are those of the call's rows
        angles = axis_angles(frames, TURNED, self.model.action_theta)
        tables = (angles.cos().float(), angles.sin().float(), self._seen(conditioning[KEYBOARD_INPUT]))
        return (*tables, self._seen(conditioning[MOUSE_INPUT]).flatten(2)) if self.model.mouse else tables

    def _seen(self, numbers: Tensor) -> Tensor:
        """Return [B, F, seen, numbers] of [B, video frames, numbers]."""
        windows = numbers[:, self.stride - 1 :].unfold(1, self.seen, self.stride)  # [B, F, numbers, seen]
        return windows.transpose(2, 3).to(self.dtype).contiguous()


class KeyboardKv(nn.Module):
    """The module that computes one layer's keys and values of the keyboard, once a chunk: they are the same in all
    passes and at all positions."""

    groups = ("conditioning",)

    def __init__(self, config: VideoBuild) -> None:
        super().__init__()
        model, dtype = MatrixGameModel.of(config.model), config.target.dtype
        width = model.keyboard_width
        self.keyboard_embed = nn.Sequential(
            nn.Linear(model.keyboard, width, dtype=dtype), nn.SiLU(), nn.Linear(width, width, dtype=dtype)
        )
        self.keyboard_attn_kv = nn.Linear(
            history_frames(config) * width, 2 * model.action_width, bias=False, dtype=dtype
        )

    def forward(self, conditioning: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys, normed and turned, and values of the chunk's latent frames, [B, F, A, 64] each."""
        seen: Tensor = self.keyboard_embed(conditioning[KEYS])  # [B, F, seen, width]
        k, v = self.keyboard_attn_kv(seen.flatten(2)).unflatten(-1, (2, -1, HEAD)).unbind(-3)
        return normed_and_turned(k, conditioning[COS], conditioning[SIN]), v.contiguous()


class ActionModule(nn.Module):
    """The residuals of mouse and keyboard behind a layer's cross-attention.

    Each position attends over time: to the mouse's keys and values of its own position, and to the keyboard's, which
    are the same for all positions. Frames of a chunk see each other both ways.

    Parameters
    ----------
    model, stream, dtype
        The model, its stream and the dtype of the weights.
    fused : bool
        Whether attention runs in Seko's kernel on a GPU.
    """

    def __init__(
        self, model: MatrixGameModel, stream: StreamConfig, dtype: torch.dtype, *, fused: bool
    ) -> None:
        super().__init__()
        d, a = model.dim, model.action_width
        self.model, self.stream = model, stream
        self.attend = attention_over_time if fused else over_time_reference
        self.fp8_linears: tuple[str, ...] = ("mouse_attn_q", "proj_keyboard")
        if model.mouse:
            self.fp8_linears += ("t_qkv", "proj_mouse")
            moves = MOUSE * model.seen_latents * stream.temporal_stride
            self.mouse_mlp = nn.Sequential(
                nn.Linear(d + moves, a, dtype=dtype),
                nn.GELU(approximate="tanh"),
                nn.Linear(a, a, dtype=dtype),
                nn.LayerNorm(a, 1e-5),
            )
            self.t_qkv = nn.Linear(a, 3 * a, bias=False, dtype=dtype)
            self.proj_mouse = nn.Linear(a, d, bias=False, dtype=dtype)
        self.mouse_attn_q = nn.Linear(d, a, bias=False, dtype=dtype)
        self.proj_keyboard = nn.Linear(a, d, bias=False, dtype=dtype)

    def forward(
        self, hidden: Tensor, conditioning: Mapping[str, Tensor], recall: Recall
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden state [B, T, d] with the mouse's residual, and the keyboard's residual, which is not added
        yet. The chunk's keys and values are written to the caches."""
        if self.model.mouse:
            wide = self._of_mouse(hidden, conditioning[MOVES])  # [B, T, 3, A, 64]
            _, k, v = wide.unflatten(1, (self.stream.chunk_frames, -1)).unbind(3)
            cos, sin = (conditioning[name].unsqueeze(2) for name in (COS, SIN))  # [B, F, 1, 4]
            new = {MOUSE_K_CACHE: normed_and_turned(k, cos, sin), MOUSE_V_CACHE: v}
            recall.keep(new, self.stream.cache_frames)
            hidden = hidden + self.proj_mouse(self._over_time(wide, conditioning, recall, *new))
        q = self.mouse_attn_q(hidden).unflatten(-1, (1, -1, HEAD))
        new = {KEY_K_CACHE: conditioning[KEY_K], KEY_V_CACHE: conditioning[KEY_V]}
        recall.keep(new, self.stream.cache_frames)
        return hidden, self.proj_keyboard(self._over_time(q, conditioning, recall, *new))

    def _of_mouse(self, hidden: Tensor, moves: Tensor) -> Tensor:
        """Return q, k and v of the mouse [B, T, 3, A, 64]. The columns of the first matrix that meet the mouse's
        numbers are the same for all positions, so each part has a product of its own."""
        first, act, second, norm = self.mouse_mlp
        weight, d = cast(Tensor, first.weight), self.model.dim
        of_moves = weight.narrow(1, d, moves.shape[-1])
        by_frame = F.linear(moves, of_moves, cast(Tensor, first.bias))  # [B, F, a]
        x = F.linear(hidden, weight.narrow(1, 0, d)).unflatten(1, (self.stream.chunk_frames, -1))
        x = second(act(x + by_frame.unsqueeze(2)).flatten(1, 2))  # [B, T, a]
        x = norm(x.float()).to(hidden.dtype)
        wide: Tensor = self.t_qkv(x).unflatten(-1, (3, -1, HEAD))
        return wide

    def _over_time(
        self, q: Tensor, conditioning: Mapping[str, Tensor], recall: Recall, keys: str, values: str
    ) -> Tensor:
        """Return the attention [B, T, a] of queries [B, T, parts, A, 64] to cached keys and values."""
        k, v = (recall.caches[name] for name in (keys, values))
        if not keys.startswith("mouse"):
            k, v = k.unsqueeze(1), v.unsqueeze(1)  # the same at all positions
        filled = recall.valid_tokens // self.stream.frame_tokens
        tables = (conditioning[COS], conditioning[SIN])
        seen: Tensor = self.attend(q, k, v, *tables, filled, recall.rows, self.stream.cache_frames)
        return seen
