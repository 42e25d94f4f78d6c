"""The audio adapter. Once a chunk the audio adapter turns audio features into tokens, and the tokens into each layer's
keys and values. In each pass, layers attend to these keys and values of the audio.

Shapes use the letters that `layers.causal_dit` defines. S is the number of speakers, A the number of audio tokens of a
latent frame, and M the number of audio features of a latent frame. The tokens of a latent frame attend to the audio of
the same latent frame only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from seko_export.config.model import ModelConfig
from seko_export.config.video import VideoBuild
from seko_export.engines.weight_source import WeightSource
from seko_export.families.layers.causal_dit import sinusoid
from seko_export.families.layers.rank_split import Ranked
from seko_export.families.seko_talk.keys import TIME
from seko_export.families.seko_talk.model import SekoTalkModel
from seko_export.media.hubert.encoder import HubertFeatures

AUDIO, MASKS = "audio", "speaker_masks"  # inputs of the caller
HEARD = "audio_heard"  # features of the caller's windows, if the build has the audio encoder
TOKENS, GATE, TIMES = "audio_tokens", "audio_gate", "audio_times"
KEYS, VALUES = "audio_k", "audio_v"
DECODER_EPS = 1e-5  # epsilon of the norms in torch's decoder layer


class AudioFeatures(HubertFeatures):
    """The module that encodes the audio windows of a chunk's latent frames to features."""

    groups = ("conditioning",)

    def __init__(self, config: VideoBuild) -> None:
        if config.workload.audio is None:
            raise TypeError("a build without an audio encoder has no such engine")
        super().__init__(
            config.workload.audio, SekoTalkModel.of(config.model).audio_frames, config.target.dtype
        )

    def forward(self, conditioning: Mapping[str, Tensor]) -> Tensor:  # type: ignore[override]
        """Return features [B, S, F, M, audio_dim] of the audio windows ``audio`` [B, S, F, samples] float32."""
        windows = conditioning[AUDIO]
        features: Tensor = super().forward(windows.flatten(0, 2)).unflatten(0, windows.shape[:3])
        return features


class AudioTokens(Ranked):
    """The module that turns a chunk's audio features into tokens, and computes the gate. The gate states which tokens
    of the picture attend to which speaker's audio.

    Attributes
    ----------
    split : RankSplit or None
        How ranks (GPUs) share a chunk. Each rank computes all audio tokens, and the gate of its own tokens of the
        picture.
    """

    groups = ("conditioning",)

    def __init__(self, config: VideoBuild) -> None:
        super().__init__()
        model, dtype, s = SekoTalkModel.of(config.model), config.target.dtype, config.workload.stream
        self.speakers, self.frame_tokens = model.speakers, s.frame_tokens
        self.features = AUDIO if config.workload.audio is None else HEARD
        self.proj_in = nn.Linear(model.audio_dim, model.audio_width, dtype=dtype)
        self.learnable_queries = nn.Parameter(
            torch.empty(1, model.audio_tokens, model.audio_width, dtype=dtype)
        )
        self.transformer_decoder = Decoder(model, dtype)

    def forward(
        self,
        conditioning: Mapping[str, Tensor],
        frames: Tensor,
        rows: Tensor | None = None,
        rank: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return a chunk's audio tokens and its gate, which selects the tokens of the picture that attend to each
        speaker's audio.

        Parameters
        ----------
        conditioning : mapping of str to Tensor
            Inputs by name: ``audio`` [B, S, F, M, audio_dim] float32, or with an audio encoder ``audio_heard``; with
            several speakers also ``speaker_masks`` [B, S, n] float32, which in a pool has all rows of the pool.
        frames : Tensor
            Absolute frame numbers, int64 [B, F]. Negative numbers belong to the reference picture, which has no audio.
        rows : Tensor, optional
            The row of the pool for each batch index, int64 [B]; only in a pool.
        rank : Tensor, optional
            Number of this rank, int64 [1]; only if several ranks (GPUs) share a chunk.

        Returns
        -------
        tokens : Tensor
            The audio tokens, [B, S, F, A, width].
        gate : Tensor
            Whether each token of the picture attends to each speaker's audio: 0 or 1, float32 [B, S, T]; with `split`
            [B, S, T/R].
        """
        features = conditioning[self.features]
        batch, speakers, count = features.shape[:3]
        memory = self.proj_in(features.flatten(0, 2).to(self.proj_in.weight.dtype))  # [B*S*F, M, width]
        tokens = self.learnable_queries.expand(memory.shape[0], -1, -1)
        tokens = self.transformer_decoder(tokens, memory)
        gate = (frames >= 0).float()[:, None, :, None].expand(-1, speakers, -1, self.frame_tokens)
        if self.speakers > 1:
            masks = conditioning[MASKS] if rows is None else conditioning[MASKS].index_select(0, rows)
            gate = gate * masks[:, :, None, :]
        gate = gate.flatten(2)
        if self.split is not None and rank is not None:
            gate = self.split.own_tokens(gate.flatten(0, 1), rank).unflatten(0, (batch, speakers))
        return tokens.unflatten(0, (batch, speakers, count)), gate.contiguous()


class Decoder(nn.Module):
    """The equivalent of torch's `nn.TransformerDecoder` without a last norm, with the same parameter names."""

    def __init__(self, model: SekoTalkModel, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = (model.audio_width, model.audio_heads, model.audio_ffn, dtype)
        self.layers = nn.ModuleList(DecoderLayer(*sizes) for _ in range(model.audio_layers))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Return the decoder's output [N, A, width] for queries [N, A, width] over memory [N, M, width]."""
        for layer in self.layers:
            x = layer(x, memory)
        return x


class DecoderLayer(nn.Module):
    """The equivalent of torch's `nn.TransformerDecoderLayer` with default settings (norms after the residuals, ReLU),
    with the same parameter names."""

    def __init__(self, width: int, heads: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.self_attn, self.multihead_attn = _Attention(width, dtype), _Attention(width, dtype)
        self.linear1 = nn.Linear(width, inner, dtype=dtype)
        self.linear2 = nn.Linear(inner, width, dtype=dtype)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width, DECODER_EPS, dtype=dtype) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Return the layer's output [N, A, width] for queries [N, A, width], which attend to themselves and to memory
        [N, M, width]."""
        x = self.norm1(x + self.self_attn(x, x, self.heads))
        x = self.norm2(x + self.multihead_attn(x, memory, self.heads))
        result: Tensor = self.norm3(x + self.linear2(F.relu(self.linear1(x))))
        return result


class _Attention(nn.Module):
    """The equivalent of torch's `nn.MultiheadAttention`, with the same parameter names."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width, dtype=dtype))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width, dtype=dtype))
        self.out_proj = nn.Linear(width, width, dtype=dtype)

    def forward(self, x: Tensor, memory: Tensor, heads: int) -> Tensor:
        """Return the attention [N, A, width] of x [N, A, width] to memory [N, M, width]."""
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(tensor, weight, bias).unflatten(-1, (heads, -1)).transpose(1, 2)
            for tensor, weight, bias in zip((x, memory, memory), weights, biases, strict=True)
        )
        result: Tensor = self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return result


class AudioKv(nn.Module):
    """The projections of one layer's keys and values of the chunk's audio."""

    groups = ("conditioning",)

    def __init__(self, config: VideoBuild) -> None:
        super().__init__()
        model, dtype = SekoTalkModel.of(config.model), config.target.dtype
        self.heads = (model.heads, model.head_dim)
        self.norm_kv = nn.LayerNorm(model.audio_width, model.audio_eps)
        self.to_kv = nn.Linear(model.audio_width, 2 * model.dim, dtype=dtype)

    def forward(self, conditioning: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values, [B, S, F, A, H, D] each, from the audio tokens [B, S, F, A, width]."""
        normed = self.norm_kv(conditioning[TOKENS].float()).to(self.to_kv.weight.dtype)
        k, v = self.to_kv(normed).chunk(2, -1)
        return k.unflatten(-1, self.heads).contiguous(), v.unflatten(-1, self.heads).contiguous()


class AudioAttention(nn.Module):
    """Attention of one layer to the chunk's audio, after the feed-forward, gated by the timestep of the pass."""

    fp8_linears = ("to_q", "to_out")

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, d = model, model.dim
        self.to_q = nn.Linear(d, d, dtype=dtype)
        self.to_out = nn.Linear(d, d, dtype=dtype)
        self.shift_scale_gate = nn.Parameter(torch.empty(1, 3, d))

    def forward(self, hidden: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        """Return the next hidden state [B, T, d], after attention to the audio; with several ranks T counts the rank's
        own tokens.

        Parameters
        ----------
        hidden : Tensor
            The hidden state, [B, T, d], in which all latent frames have equally many tokens.
        conditioning : mapping of str to Tensor
            Tensors by name: ``audio_k`` and ``audio_v`` from `AudioKv`, ``audio_gate`` from `AudioTokens`, and
            ``audio_times`` [3, d], the current pass's entry of `time_table`.
        """
        k, v, of_speaker = conditioning[KEYS], conditioning[VALUES], conditioning[GATE]
        batch, speakers, frames = k.shape[:3]
        modulation = conditioning[TIMES].float() + self.shift_scale_gate.squeeze(0)  # [3, d]
        shift, scale, gate = modulation.unbind(0)
        x = F.layer_norm(hidden.float(), (self.model.dim,), eps=1e-6) * (1 + scale) + shift
        q = self.to_q(x.to(hidden.dtype)).unflatten(1, (frames, -1))  # [B, F, n, d]
        q = q.flatten(0, 1).unflatten(-1, k.shape[-2:]).transpose(1, 2)  # [B*F, H, n, D]
        heard = torch.zeros_like(hidden, dtype=torch.float32)
        for speaker in range(speakers):
            own_k, own_v = (x[:, speaker].flatten(0, 1).transpose(1, 2) for x in (k, v))  # [B*F, H, A, D]
            attended = F.scaled_dot_product_attention(q, own_k, own_v)  # [B*F, H, n, D]
            attended = (
                self.to_out(attended.transpose(1, 2).flatten(2)).unflatten(0, (batch, frames)).flatten(1, 2)
            )
            heard = heard + attended.float() * of_speaker[:, speaker, :, None]
        return (hidden.float() + heard * gate).to(hidden.dtype)


def time_table(
    weights: WeightSource, model: ModelConfig, timesteps: tuple[float, ...], dtype: torch.dtype
) -> Tensor:
    """Return [passes, 3, d]: the adapter's time embedding of each pass's timestep, as shift, scale and gate."""
    times = sinusoid(torch.tensor(timesteps, dtype=torch.float32), SekoTalkModel.of(model).audio_freq_dim)
    for at, name in enumerate(("linear_1", "linear_2", "time_proj")):
        weight, bias = (weights[f"{TIME}.{name}.{leaf}"].to(dtype) for leaf in ("weight", "bias"))
        times = F.linear((F.silu(times) if at else times).to(dtype), weight, bias)
    table: Tensor = times.unflatten(-1, (3, model.dim)).contiguous()
    return table
