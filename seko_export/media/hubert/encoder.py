"""The HuBERT audio encoder: from windows of samples to the features of their middle frames.

The encoder is written in this module instead of imported from transformers, because an engine must not change with a
library's internals. A test checks that this encoder and that of transformers give equal results. Attribute names of the
modules are those of transformers. Only the layout of the large models is supported: a LayerNorm in every convolution,
and norms before the layers' residual sums.

In shapes N is the number of windows, T the number of frames of a window, and d the width. The maths of the
audio encoder is from HuBERT (arXiv 2106.07447), wav2vec 2.0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from seko_export.config.media import HubertConfig


class HubertFeatures(nn.Module):
    """The last hidden state of the encoder, cut to ``count`` frames in the middle of each window."""

    def __init__(self, config: HubertConfig, count: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.count = config.first_frame(count), count
        self.feature_extractor = _Convolutions(config, dtype)
        self.feature_projection = _Projection(config, dtype)
        self.encoder = _Encoder(config, dtype)

    def forward(self, windows: Tensor) -> Tensor:
        """Return features [N, count, d] in the weights' dtype, of windows [N, samples] float32."""
        x = self.feature_extractor(windows.to(self.feature_projection.projection.weight.dtype)[:, None])
        x = self.encoder(self.feature_projection(x.transpose(1, 2)))
        features: Tensor = x[:, self.first : self.first + self.count]
        return features


class _Convolutions(nn.Module):
    def __init__(self, config: HubertConfig, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = zip(
            (1, *config.conv_dims), config.conv_dims, config.conv_kernels, config.conv_strides, strict=False
        )
        self.conv_layers = nn.ModuleList(_Convolution(*size, config.conv_bias, dtype) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolutions' result [N, channels, T] for samples [N, 1, samples]."""
        for layer in self.conv_layers:
            x = layer(x)
        return x


class _Convolution(nn.Module):
    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel, stride, bias=bias, dtype=dtype)
        self.layer_norm = nn.LayerNorm(out_channels, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.layer_norm(self.conv(x).transpose(1, 2))).transpose(1, 2)


class _Projection(nn.Module):
    def __init__(self, config: HubertConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(config.conv_dims[-1], config.norm_eps, dtype=dtype)
        self.projection = nn.Linear(config.conv_dims[-1], config.dim, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.projection(self.layer_norm(x))
        return projected


class _Encoder(nn.Module):
    def __init__(self, config: HubertConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.pos_conv_embed = _Positions(config, dtype)
        self.layers = nn.ModuleList(_Layer(config, dtype) for _ in range(config.layers))
        self.layer_norm = nn.LayerNorm(config.dim, config.norm_eps, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.pos_conv_embed(x)
        for layer in self.layers:
            x = layer(x)
        hidden: Tensor = self.layer_norm(x)
        return hidden


class _Positions(nn.Module):
    """Encoding of positions as a convolution over the frames. Its weight is stored as a direction and a length; see
    `keys`."""

    def __init__(self, config: HubertConfig, dtype: torch.dtype) -> None:
        super().__init__()
        kernel = config.position_kernel
        self.conv = nn.Conv1d(
            config.dim, config.dim, kernel, padding=kernel // 2, groups=config.position_groups, dtype=dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)


class _Layer(nn.Module):
    def __init__(self, config: HubertConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_norm, self.final_layer_norm = (
            nn.LayerNorm(config.dim, config.norm_eps, dtype=dtype) for _ in range(2)
        )
        self.attention = _Attention(config, dtype)
        self.feed_forward = _FeedForward(config, dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.layer_norm(x))
        hidden: Tensor = x + self.feed_forward(self.final_layer_norm(x))
        return hidden


class _Attention(nn.Module):
    def __init__(self, config: HubertConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, d = config.heads, config.dim
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(d, d, dtype=dtype) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        result: Tensor = self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return result


class _FeedForward(nn.Module):
    def __init__(self, config: HubertConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.intermediate_dense = nn.Linear(config.dim, config.ffn_dim, dtype=dtype)
        self.output_dense = nn.Linear(config.ffn_dim, config.dim, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.output_dense(F.gelu(self.intermediate_dense(x)))
        return result
