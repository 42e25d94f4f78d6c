"""A step of VoxCPM2 in plain torch, run as other systems run it: the peers of `voxcpm2.py`. Random weights.

A peer's step has neither stop head nor audio VAE, so each does a little less than ours. Its cache is of a fixed size,
read whole under a mask, as the original's; q, k and v are one matrix, and so are gate and up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from seko_export.families.voxcpm2.config import NetConfig, VoxCpm2Config
from seko_export.families.voxcpm2.layers import rope_tables, rotary
from seko_export.families.voxcpm2.solver import solver_times, still_steps

EAGER, PUBLIC, CAPTURED, COMPILED = "eager", "public", "captured", "compiled"
_GUIDANCE = 2.0
_UNSEEN = -1e9


@dataclass(frozen=True)
class LayerWeights:
    """Matrices of one layer, and the weights of its norms."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    attention_norm: Tensor
    ffn_norm: Tensor


@dataclass(frozen=True)
class Projections:
    """Matrices between the nets."""

    fsq_in: Tensor
    fsq_out: Tensor
    fusion: Tensor
    lm_to_solver: Tensor
    residual_to_solver: Tensor
    embedding: Tensor
    patch_in: Tensor
    solver_in: Tensor
    solver_cond: Tensor
    solver_out: Tensor


class Peer:
    """The model, and the buffers of a batch.

    Parameters
    ----------
    config : VoxCpm2Config
        Sizes.
    batch, held, length : int
        Rows, the positions that each holds, and the size of each row's cache.
    device : str
        Of everything.
    dtype : torch.dtype
        Of weights and activations.
    """

    def __init__(
        self,
        config: VoxCpm2Config,
        batch: int,
        cached_positions: int,
        length: int,
        device: str,
        dtype: torch.dtype,
    ) -> None:
        self.config, self.batch, self.device, self.dtype = config, batch, device, dtype
        d, width, latents = config.base.dim, config.decoder.dim, config.latent_dim
        self.nets = {
            name: [self._layer(getattr(config, name)) for _ in range(getattr(config, name).layers)]
            for name in ("base", "residual", "encoder", "decoder")
        }
        self.between = Projections(
            *(
                self._random(*shape)
                for shape in (
                    *((config.fsq_dim, d), (d, config.fsq_dim), (d, 2 * d), (width, d), (width, d)),
                    *((d, config.encoder.dim), (config.encoder.dim, latents)),
                    *((width, latents), (width, latents), (latents, width)),
                )
            )
        )
        moving = solver_times(10, torch.bfloat16)[still_steps(10) :]
        self.sizes = [float(size) for _, size in moving]
        self.times = self._random(len(moving), width)
        self.special = self._random(batch, 1, config.encoder.dim)
        rows, heads = batch, config.base.kv_heads
        layers = config.base.layers + config.residual.layers
        shape = (layers, rows, heads, length, config.base.head_dim)
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in "kv")
        self.position = torch.tensor([cached_positions], device=device)
        self.mask = torch.zeros(batch, 1, 1, length, device=device, dtype=dtype)
        self.mask[..., cached_positions + 1 :] = _UNSEEN
        inverse, frequencies = rope_tables(config.rope)
        angles = inverse * frequencies
        self.tables = {
            count: [
                table.to(device, dtype)
                for table in rotary(torch.arange(first, first + count)[:, None] * angles, 1.0)
            ]
            for first, count in ((cached_positions, 1), (0, config.patch_tokens), (0, config.solver_tokens))
        }
        self.inputs = (
            self._random(batch, d),
            self._random(batch, *config.patch_shape),
            self._random(batch, *config.patch_shape),
        )

    def step(self, embedded: Tensor, last_patch: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next embedding [B, d] and the patch [B, P, C]."""
        base = self.base(embedded)
        residual = self.residual(self.fused(base, embedded))
        patch = self.solved(base, residual, last_patch, noise)
        return self.embedded(patch), patch

    def base(self, hidden: Tensor) -> Tensor:
        """The base net over the next token, quantised."""
        b = self.between
        states = self._cached("base", hidden, 0)
        levels = torch.round(self.config.fsq_scale * torch.tanh(states @ b.fsq_in.T))
        return (levels / self.config.fsq_scale) @ b.fsq_out.T

    def fused(self, base: Tensor, embedded: Tensor) -> Tensor:
        """The residual net's input."""
        return torch.cat((base, embedded), -1) @ self.between.fusion.T

    def residual(self, hidden: Tensor) -> Tensor:
        """The residual net over the next token."""
        return self._cached("residual", hidden, self.config.base.layers)

    def solved(self, base: Tensor, residual: Tensor, last_patch: Tensor, noise: Tensor) -> Tensor:
        """The patch, by guided calls of the local transformer."""
        b, width = self.between, self.config.decoder.dim
        mu = torch.cat((base @ b.lm_to_solver.T, residual @ b.residual_to_solver.T), -1).view(-1, 2, width)
        mu = torch.cat((mu, torch.zeros_like(mu)))
        cond = (last_patch @ b.solver_cond.T).repeat(2, 1, 1)
        x = noise
        for number, size in enumerate(self.sizes):
            time = self.times[number].expand(2 * self.batch, 1, width)
            tokens = torch.cat((mu, time, cond, (x @ b.solver_in.T).repeat(2, 1, 1)), 1)
            velocity = self._local("decoder", tokens)[:, -self.config.patch_size :] @ b.solver_out.T
            with_mu, without = velocity.chunk(2)
            wide, free = with_mu.flatten(1).float(), without.flatten(1).float()
            share = (wide * free).sum(1) / ((free * free).sum(1) + 1e-8)
            without = share.view(-1, 1, 1).to(x.dtype) * without
            x = x - size * (without + _GUIDANCE * (with_mu - without))
        return x

    def embedded(self, patch: Tensor) -> Tensor:
        """The embedding of a patch."""
        b = self.between
        tokens = torch.cat((self.special, patch @ b.patch_in.T), 1)
        return self._local("encoder", tokens)[:, 0] @ b.embedding.T

    def _local(self, name: str, x: Tensor) -> Tensor:
        net: NetConfig = getattr(self.config, name)
        cos, sin = self.tables[x.shape[1]]
        for weights in self.nets[name]:
            q, k, v = self._projected(net, weights, x)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            attended = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            x = x + attended.transpose(1, 2).flatten(2) @ weights.o.T
            x = x + self._ffn(net, weights, x)
        return x

    def _cached(self, name: str, x: Tensor, first_layer: int) -> Tensor:
        net: NetConfig = getattr(self.config, name)
        cos, sin = self.tables[1]
        x = x[:, None]
        for number, weights in enumerate(self.nets[name], start=first_layer):
            q, k, v = self._projected(net, weights, x)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            self.keys[number].index_copy_(2, self.position, k)
            self.values[number].index_copy_(2, self.position, v)
            attended = F.scaled_dot_product_attention(
                q, self.keys[number], self.values[number], attn_mask=self.mask, enable_gqa=True
            )
            x = x + attended.transpose(1, 2).flatten(2) @ weights.o.T
            x = x + self._ffn(net, weights, x)
        return x[:, 0]

    def _projected(self, net: NetConfig, weights: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = _norm(x, weights.attention_norm, net.norm_eps) @ weights.qkv.T
        heads = qkv.unflatten(-1, (-1, net.head_dim)).transpose(1, 2)
        q, k, v = heads.split((net.heads, net.kv_heads, net.kv_heads), dim=1)
        return q, k, v

    def _ffn(self, net: NetConfig, weights: LayerWeights, x: Tensor) -> Tensor:
        gate, up = (_norm(x, weights.ffn_norm, net.norm_eps) @ weights.gate_up.T).chunk(2, -1)
        return (F.silu(gate) * up) @ weights.down.T

    def _layer(self, net: NetConfig) -> LayerWeights:
        ones = torch.ones(net.dim, device=self.device, dtype=self.dtype)
        return LayerWeights(
            self._random(net.attention_width + 2 * net.kv_width, net.dim),
            self._random(net.dim, net.attention_width),
            self._random(2 * net.ffn_dim, net.dim),
            self._random(net.dim, net.ffn_dim),
            ones,
            ones,
        )

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype) / math.sqrt(shape[-1])

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads."""
        calls = {"decoder": len(self.sizes)}
        return sum(
            calls.get(name, 1) * int(getattr(weights, field.name).nbytes)
            for name, layers in self.nets.items()
            for weights in layers
            for field in fields(LayerWeights)
        ) + sum(int(getattr(self.between, field.name).nbytes) for field in fields(Projections))


def runners(peer: Peer) -> Mapping[str, Callable[[], Callable[[], object]]]:
    """Return by peer's name a function that prepares it (captures, compiles) and returns a step of it."""
    return {
        EAGER: lambda: lambda: peer.step(*peer.inputs),
        PUBLIC: lambda: _public(peer),
        CAPTURED: lambda: captured(lambda: peer.step(*peer.inputs)),
        COMPILED: lambda: _compiled(peer),
    }


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of a captured graph of ``run``, which was run three times before."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _compiled(peer: Peer) -> Callable[[], object]:
    """torch.compile of the whole step, captured by hand."""
    step = torch.compile(peer.step, dynamic=False)
    step(*peer.inputs)
    return captured(lambda: step(*peer.inputs))


def _public(peer: Peer) -> Callable[[], object]:
    """As the public server captures it: base and residual net, inputs copied in and outputs copied out; rest eager."""

    def part(run: Callable[[Tensor], Tensor], tensor: Tensor) -> Callable[[Tensor], Tensor]:
        taken, result = tensor.clone(), torch.empty_like(tensor)
        replay = captured(lambda: result.copy_(run(taken)))

        def call(x: Tensor) -> Tensor:
            taken.copy_(x)
            replay()
            return result.clone()

        return call

    embedded, last_patch, noise = peer.inputs
    base, residual = part(peer.base, embedded), part(peer.residual, embedded)

    def step() -> object:
        states = base(embedded)
        patch = peer.solved(states, residual(peer.fused(states, embedded)), last_patch, noise)
        return peer.embedded(patch), patch

    return step


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin
