"""The network that all peers share, with the way a cache is held left open. Maths and weights are the package's.

Times, positions, head and prompt are its modules; a block is written here once more, because peers differ inside it:
q, k and v as one matmul or three, rotation by complex or real numbers, and what attention does with the cache. The
residual of the feed-forward is added by the next block, so that a compiler which sees one block at a time can merge
it with the norm that follows, as it would if it saw the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from seko_export.checkpoints.random import random_weight
from seko_export.config.model import ModelConfig
from seko_export.config.video import VideoBuild
from seko_export.engines.piece import on_meta
from seko_export.engines.weight_source import WeightSource
from seko_export.families.layers.block import attention, gated_residual, modulate
from seko_export.families.layers.causal_dit import Embed, Head, Prompt, PromptKv
from seko_export.families.layers.pieces import make_pieces
from seko_export.families.layers.rotary import rotate
from seko_export.families.layers.sampler import gaussian
from seko_export.families.layers.weights import model_weights
from seko_export.families.wan_layout.keys import spread, wan_shapes

WEIGHT_SEED = 0  # what scripts/make_checkpoint.py takes if not told otherwise
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [B, T, H, D] to [B, T, H*D]


class RandomWan:
    """The tensors of scripts/make_checkpoint.py, drawn when asked for instead of read from a file.

    Parameters
    ----------
    model : ModelConfig
        The model.
    device : str
        Where they are drawn: a GPU draws others than a CPU.
    """

    def __init__(self, model: ModelConfig, device: str) -> None:
        self._shapes, self._device = wan_shapes(model), device

    def __getitem__(self, name: str) -> Tensor:
        """Return one tensor by Wan's name, bf16, on the CPU."""
        return random_weight(
            name,
            self._shapes[name],
            seed=WEIGHT_SEED,
            dtype=torch.bfloat16,
            device=self._device,
            spread=spread,
        )


def device_weights(config: VideoBuild, wan: WeightSource) -> dict[str, Tensor]:
    """Return the artifact's weights and schedule tables by name, on the build's device."""
    weights = {
        name: tensor.to(config.target.device) for name, tensor in model_weights(make_pieces(config), wan)
    }
    return weights | {
        n: t.to(config.target.device)
        for n, t in config.workload.schedule.tables(config.workload.stream).items()
    }


class Layer(NamedTuple):
    """Tensors of one block: weights as the artifact names them, and the prompt's keys and values."""

    modulation: Tensor  # [1, 6, d]
    qkv_weight: Tensor  # [3d, d]
    qkv_bias: Tensor
    norm_q: Tensor
    norm_k: Tensor
    o_weight: Tensor
    o_bias: Tensor
    norm3_weight: Tensor
    norm3_bias: Tensor
    cross_q_weight: Tensor
    cross_q_bias: Tensor
    cross_norm_q: Tensor
    cross_o_weight: Tensor
    cross_o_bias: Tensor
    up_weight: Tensor
    up_bias: Tensor
    down_weight: Tensor
    down_bias: Tensor
    text_k: Tensor  # [B, text tokens, H, D]
    text_v: Tensor


_LAYER_NAMES = (
    *("modulation", "self_attn.qkv.weight", "self_attn.qkv.bias", "self_attn.norm_q.weight"),
    *("self_attn.norm_k.weight", "self_attn.o.weight", "self_attn.o.bias", "norm3.weight", "norm3.bias"),
    *("cross_attn.q.weight", "cross_attn.q.bias", "cross_attn.norm_q.weight", "cross_attn.o.weight"),
    *("cross_attn.o.bias", "ffn.0.weight", "ffn.0.bias", "ffn.2.weight", "ffn.2.bias"),
)


class PassInputs(NamedTuple):
    """What every block of a pass needs."""

    modulation: Tensor  # [B, F, 6, d] float32
    turns: tuple[Tensor, ...]  # (cos, sin), or one complex table; each [B, T, D/2]


class Pending(NamedTuple):
    """What the last feed-forward adds to the hidden state, once the next block begins."""

    y: Tensor  # [B, T, d]
    gate: Tensor  # [B, F, 1, d] float32


@dataclass(frozen=True)
class Network:
    """Modules, layers and tables of one stream on one device.

    Parameters
    ----------
    config : VideoBuild
        The exact build.
    embed, head : nn.Module
        The package's.
    layers : tuple of Layer
        All blocks.
    times, sigma, sigma_next : Tensor
        [P+1, B, F], [P, 1], [P, 1] float32: as `Schedule.tables` lays them out.
    context_time : Tensor
        [1] float32.
    """

    config: VideoBuild
    embed: nn.Module
    head: nn.Module
    layers: tuple[Layer, ...]
    times: Tensor
    sigma: Tensor
    sigma_next: Tensor
    context_time: Tensor

    @property
    def passes(self) -> int:
        """Denoise passes of a chunk, without the context pass."""
        return len(self.times) - 1

    def noise(self, seeds: list[int], first_frame: int) -> Tensor:
        """Return [P+1, B, C, F, h, w] float32: every draw of a chunk, equal to an engine's."""
        s, device = self.config.workload.stream, self.config.target.device
        frames = torch.arange(first_frame, first_frame + s.chunk_frames, device=device)
        latent = (self.config.model.in_channels, s.latent_height, s.latent_width)
        rows = torch.tensor(seeds, device=device)
        draws = [torch.tensor([draw], device=device) for draw in range(self.passes + 1)]
        return torch.stack([gaussian(rows, frames.expand(s.batch, -1), draw, latent) for draw in draws])


def make_network(config: VideoBuild, weights: Mapping[str, Tensor], text: Tensor) -> Network:
    """Return the network for one text [B, text tokens, text_dim].

    Parameters
    ----------
    config : VideoBuild
        The exact build.
    weights : mapping of str to Tensor
        From `device_weights`.
    text : Tensor
        Any float dtype, any device.
    """
    m, s, dtype = config.model, config.workload.stream, config.target.dtype
    prompt = _filled(lambda: Prompt(m, dtype), weights, "")
    context = prompt(text.to(config.target.device, dtype))
    layers = []
    for number in range(m.layers):
        prefix = f"blocks.{number}."
        text_k, text_v = _filled(lambda: PromptKv(m, dtype), weights, f"{prefix}cross_attn.")(context)
        own = (weights[prefix + name] for name in _LAYER_NAMES)
        layers.append(Layer._make((*own, text_k, text_v)))
    return Network(
        config,
        _filled(lambda: Embed(m, s, dtype, key_rotary=False), weights, ""),
        _filled(lambda: Head(m, s), weights, "head."),
        tuple(layers),
        *(weights[f"schedule.{name}"] for name in ("timestep", "sigma", "sigma_next", "context_timestep")),
    )


def run_block(
    model: ModelConfig,
    layer: Layer,
    hidden: Tensor,
    pending: Pending | None,
    inputs: PassInputs,
    attend: Attend,
    *,
    fused_qkv: bool,
) -> tuple[Tensor, Pending]:
    """Advance the hidden state [B, T, d] by one layer, but for the residual of its feed-forward."""
    if pending is not None:
        hidden = gated_residual(hidden, *pending)
    dtype, heads = hidden.dtype, (model.heads, model.head_dim)
    per_frame = (layer.modulation.unsqueeze(0) + inputs.modulation).unsqueeze(3)
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = per_frame.unbind(2)  # each [B, F, 1, d]

    def norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return F.layer_norm(x.float(), (model.dim,), weight, bias, model.norm_eps)

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (model.dim,), weight, model.norm_eps)

    x = modulate(norm(hidden), shift_1, scale_1).to(dtype)
    if fused_qkv:
        q, k, v = F.linear(x, layer.qkv_weight, layer.qkv_bias).chunk(3, dim=-1)
    else:
        parts = zip(layer.qkv_weight.chunk(3), layer.qkv_bias.chunk(3), strict=True)
        q, k, v = (F.linear(x, weight, bias) for weight, bias in parts)
    q = turn(rms(q, layer.norm_q).unflatten(-1, heads), inputs.turns).to(dtype)  # [B, T, H, D]
    k = turn(rms(k, layer.norm_k).unflatten(-1, heads), inputs.turns).to(dtype)
    y = F.linear(attend(q, k, v.unflatten(-1, heads)), layer.o_weight, layer.o_bias)
    hidden = gated_residual(hidden, y, gate_1)

    x = norm(hidden, layer.norm3_weight, layer.norm3_bias).to(dtype)
    q = rms(F.linear(x, layer.cross_q_weight, layer.cross_q_bias), layer.cross_norm_q).to(dtype)
    y = attention(q.unflatten(-1, heads), layer.text_k, layer.text_v, bias=None)
    hidden = hidden + F.linear(y, layer.cross_o_weight, layer.cross_o_bias)

    x = modulate(norm(hidden), shift_2, scale_2).to(dtype)
    x = F.gelu(F.linear(x, layer.up_weight, layer.up_bias), approximate="tanh")
    return hidden, Pending(F.linear(x, layer.down_weight, layer.down_bias), gate_2)


def nothing_pending(hidden: Tensor, modulation: Tensor) -> Pending:
    """Return zeros for the first block, laid out as a block leaves them: for a compiler, the same graph."""
    return Pending(torch.zeros_like(hidden), torch.zeros_like(modulation).unsqueeze(3).unbind(2)[-1])


def turn(x: Tensor, turns: tuple[Tensor, ...]) -> Tensor:
    """Rotate channel pairs of x [B, T, H, D] float32: by (cos, sin), or by one complex table."""
    if len(turns) == 2:
        return rotate(x, *turns)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())  # [B, T, H, D/2]
    return torch.view_as_real(pairs * turns[0].unsqueeze(2)).flatten(-2)


def advance(latents: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, noise: Tensor) -> Tensor:
    """Return the next latents [B, C, F, h, w]: the package's update rule with noise from outside."""
    return (1 - sigma_next) * (latents - sigma * velocity) + sigma_next * noise


def _filled(make: Callable[[], nn.Module], weights: Mapping[str, Tensor], prefix: str) -> nn.Module:
    module = on_meta(make)
    state = {name: weights[prefix + name] for name in module.state_dict()}
    module.load_state_dict(state, assign=True)
    return module.requires_grad_(False)
