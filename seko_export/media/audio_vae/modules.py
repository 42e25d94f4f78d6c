"""AudioVAE V2 as modules that are pure functions of a chunk and of the states that convolutions keep between chunks.

Every convolution of the audio VAE is causal: it is padded on the left alone. A causal convolution needs its last inputs
of the previous chunk, and zeros before the first chunk. A stream of sound starts with states of zeros, so its first
call runs the same code as all later calls. Attribute names of these modules are those of the checkpoint, with each
weight norm folded into one ``weight``.

In shapes B is the number of rows, C the number of channels, T the number of samples or latents of a chunk, and S the
number of values in a row's states. All tensors of the audio VAE are float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from seko_export.media.audio_vae.config import AudioVaeConfig

KERNEL = 7  # of the depthwise convolutions
DILATIONS = (1, 3, 9)  # of a block's residual units
_SNAKE_EPS = 1e-9
_SHORT_ROW = 16  # inputs of a transposed convolution; with fewer, rows are joined


class States:
    """The convolution states of one call, in the order in which the convolutions use them.

    Parameters
    ----------
    packed : Tensor
        States of all convolutions side by side, [B, S].
    shapes : list of tuple
        Number of channels and number of inputs in the state of each convolution.
    """

    def __init__(self, packed: Tensor, shapes: list[tuple[int, int]]) -> None:
        parts = packed.split([math.prod(shape) for shape in shapes], dim=1)
        self._old: Iterator[Tensor] = iter(
            [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]
        )
        self._new: list[Tensor] = []

    def before(self, x: Tensor, count: int) -> Tensor:
        """Return ``x`` [B, C, T] with the next convolution's state [B, C, count] in front, and store the last ``count``
        inputs as the new state.
        """
        joined = torch.cat((next(self._old), x), dim=-1)
        self._new.append(joined[..., joined.shape[-1] - count :])
        return joined

    def packed(self) -> Tensor:
        """Return the new states of all convolutions side by side, [B, S]."""
        return torch.cat([state.flatten(1) for state in self._new], dim=1)


class CausalConv(nn.Module):
    """A convolution that is padded on the left, so that T inputs give T / stride outputs."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, *, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride
        self.state = (in_channels, kernel - stride)
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, kernel))
        self.bias = nn.Parameter(torch.empty(out_channels))

    def forward(self, x: Tensor, states: States) -> Tensor:
        """Return the convolution's result [B, C_out, T / stride] for ``x`` [B, C_in, T]."""
        count = self.state[1]
        joined = states.before(x, count) if count else x
        return F.conv1d(joined, self.weight, self.bias, self.stride)


class DepthwiseConv(nn.Module):
    """A convolution of each channel with its own taps, padded on the left, as a sum of one product for each tap.

    torch's compiler fuses the sum with the activations around it. Libraries run a depthwise convolution of float32
    as a kernel of its own, which for 64 rows takes ten times as long as reading its input.
    """

    def __init__(self, channels: int, *, dilation: int = 1) -> None:
        super().__init__()
        self.dilation = dilation
        self.state = (channels, (KERNEL - 1) * dilation)
        self.weight = nn.Parameter(torch.empty(channels, 1, KERNEL))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor, states: States) -> Tensor:
        """Return the convolution's result, in the shape of ``x`` [B, C, T]."""
        joined = states.before(x, self.state[1])
        # a view by strides: torch's compiler stores what it reads, so the activation is computed once, not for each tap
        strides = joined.stride()
        taps = joined.as_strided((KERNEL, *x.shape), (self.dilation * strides[-1], *strides))
        y = self.bias[:, None]
        for tap in range(KERNEL):
            y = y + self.weight[:, :, tap] * taps[tap]
        return y


class CausalTransposedConv(nn.Module):
    """A transposed convolution of 2 * stride taps, so that T inputs give T * stride outputs. An output depends on two
    inputs: the input at its place and the input before. The transposed convolution is therefore a matrix product over
    the channels of both inputs, with ``stride`` outputs for each channel. `as_matrix` makes the matrix from the
    transposed convolution's weight. Libraries run a transposed convolution as the gradient of an ordinary one, in
    float32 without tensor cores. Rows of few inputs are joined to one long row, because cuDNN computes rows of four
    inputs at a fiftieth of the speed of tensor cores.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.state = (in_channels, 1)
        self.weight = nn.Parameter(torch.empty(out_channels * stride, 2 * in_channels, 1))
        self.bias = nn.Parameter(torch.empty(out_channels))

    def forward(self, x: Tensor, states: States) -> Tensor:
        """Return the convolution's result [B, C_out, T * stride] for ``x`` [B, C_in, T]."""
        joined = states.before(x, 1)
        pairs = torch.cat((joined[..., :-1], joined[..., 1:]), dim=1)
        # a convolution of one tap: as a matmul it would not use the tensor cores' float32
        if x.shape[-1] < _SHORT_ROW:
            y = F.conv1d(pairs.transpose(0, 1).flatten(1)[None], self.weight)[0]
            y = y.unflatten(1, (-1, x.shape[-1])).transpose(0, 1)
        else:
            y = F.conv1d(pairs, self.weight)
        interleaved: Tensor = y.unflatten(1, (-1, self.stride)).transpose(2, 3).flatten(2)
        return interleaved + self.bias[:, None]


def as_matrix(weight: Tensor) -> Tensor:
    """Return the weight [out * stride, 2 * in, 1] of `CausalTransposedConv` for the weight [in, out, 2 * stride] of a
    transposed convolution.

    Output ``r`` of an input's ``stride`` outputs is the sum of two products: the previous input times tap ``stride +
    r``, and the input times tap ``r``.
    """
    same, before = weight.unflatten(2, (2, -1)).unbind(2)  # [in, out, stride]
    matrices = [part.permute(1, 2, 0).flatten(0, 1) for part in (before, same)]
    return torch.cat(matrices, dim=1).unsqueeze(2)


class Snake(nn.Module):
    """Snake activation, ``x + sin(alpha * x)**2 / alpha``, with an alpha for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1, channels, 1))

    def forward(self, x: Tensor, states: States) -> Tensor:
        """Return the module's result, in the shape of ``x`` [B, C, T]."""
        del states
        return x + (self.alpha + _SNAKE_EPS).reciprocal() * torch.sin(self.alpha * x).square()


class Chain(nn.Module):
    """Modules that run one after the other, with the attribute name ``block``."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.block = nn.ModuleList(modules)

    def forward(self, x: Tensor, states: States) -> Tensor:
        """Return the last module's result for the input ``x`` [B, C, T]."""
        for module in self.block:
            x = module(x, states)
        return x


class ResidualUnit(Chain):
    """A depthwise convolution and a convolution with a single tap, each after a Snake activation; the result is added
    to the input."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__(
            Snake(channels),
            DepthwiseConv(channels, dilation=dilation),
            Snake(channels),
            CausalConv(channels, channels, 1),
        )

    def forward(self, x: Tensor, states: States) -> Tensor:
        """Return the module's result, in the shape of ``x`` [B, C, T]."""
        return x + super().forward(x, states)


class EncoderBlock(Chain):
    """Three residual units, then a convolution that strides and doubles the channels."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__(
            *(ResidualUnit(channels, dilation) for dilation in DILATIONS),
            Snake(channels),
            CausalConv(channels, 2 * channels, 2 * stride, stride=stride),
        )


class DecoderBlock(Chain):
    """A transposed convolution that halves the channels, then three residual units."""

    def __init__(self, channels: int, stride: int) -> None:
        half = channels // 2
        super().__init__(
            Snake(channels),
            CausalTransposedConv(channels, half, stride),
            *(ResidualUnit(half, dilation) for dilation in DILATIONS),
        )


class RateCondition(nn.Module):
    """The decoder's condition on its sample rate: a scale and a bias for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return the module's result, in the shape of ``x`` [B, C, T]."""
        return x * self.scale[:, None] + self.bias[:, None]


class EncodeChunk(nn.Module):
    """The encoder of the audio VAE, from samples to latents. A latent is the mean of the distribution that the VAE
    predicts."""

    def __init__(self, config: AudioVaeConfig) -> None:
        super().__init__()
        blocks = zip(config.encoder_widths, config.encoder_rates, strict=False)
        self.block = nn.ModuleList(
            [
                CausalConv(1, config.encoder_dim, KERNEL),
                *(EncoderBlock(width, stride) for width, stride in blocks),
            ]
        )
        self.fc_mu = CausalConv(config.encoder_widths[-1], config.latent_dim, 3)
        self.state_shapes = state_shapes(self)

    def forward(self, samples: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Encode a chunk of sound samples to latents.

        Parameters
        ----------
        samples : Tensor
            Sound samples, [B, T] at ``sample_rate``, T a multiple of ``encoder_stride``.
        states : Tensor
            Convolution states that the previous chunk returned, [B, S]; zeros for the first chunk.

        Returns
        -------
        latents : Tensor
            Latents, [B, T / encoder_stride, latent_dim].
        states : Tensor
            Convolution states for the next chunk, [B, S].
        """
        carried = States(states, self.state_shapes)
        x = samples[:, None]
        for block in self.block:
            x = block(x, carried)
        return self.fc_mu(x, carried).transpose(1, 2), carried.packed()


class DecodeChunk(nn.Module):
    """The decoder of the audio VAE: latents to samples."""

    def __init__(self, config: AudioVaeConfig) -> None:
        super().__init__()
        widths, rates = config.decoder_widths, config.decoder_rates
        latents = config.latent_dim
        self.model = nn.ModuleList(
            [
                DepthwiseConv(latents),
                CausalConv(latents, config.decoder_dim, 1),
                *(DecoderBlock(width, rate) for width, rate in zip(widths, rates, strict=False)),
                Snake(widths[-1]),
                CausalConv(widths[-1], 1, KERNEL),
            ]
        )
        self.conditions = nn.ModuleDict(
            {str(2 + block): RateCondition(width) for block, width in enumerate(widths[:-1])}
        )
        self.state_shapes = state_shapes(self)

    def forward(self, latents: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Decode a chunk of latents to sound samples.

        Parameters
        ----------
        latents : Tensor
            Latents, [B, T, latent_dim] in any floating dtype.
        states : Tensor
            Convolution states that the previous chunk returned, [B, S]; zeros for the first chunk.

        Returns
        -------
        samples : Tensor
            Sound samples, [B, T * decoder_stride] at ``out_sample_rate``, in -1..1.
        states : Tensor
            Convolution states for the next chunk, [B, S].
        """
        carried = States(states, self.state_shapes)
        x = latents.float().transpose(1, 2)
        for number, module in enumerate(self.model):
            if str(number) in self.conditions:
                x = self.conditions[str(number)](x)
            x = module(x, carried)
        return torch.tanh(x).squeeze(1), carried.packed()


class DecodeRows(DecodeChunk):
    """The decoder for a call of some rows of a pool. The call reads and writes the convolution states of these rows."""

    def forward(self, latents: Tensor, rows: Tensor, states: Tensor) -> Tensor:  # type: ignore[override]
        """Return the samples [B, T * decoder_stride] of ``latents`` [B, T, latent_dim].

        ``rows`` [B] int64 are the rows of the pool that the call carries; ``states`` [R, S] are the states of all R
        rows of the pool, written in place.
        """
        samples, new_states = super().forward(latents, states.index_select(0, rows))
        states.index_copy_(0, rows, new_states)
        return samples


def state_shapes(module: nn.Module) -> list[tuple[int, int]]:
    """Return the numbers of channels and inputs in the state of each convolution, in the order of use."""
    shapes: list[tuple[int, int]] = [getattr(part, "state", (0, 0)) for part in module.modules()]
    return [shape for shape in shapes if shape[1]]


def state_size(module: EncodeChunk | DecodeChunk) -> int:
    """Return S, the number of values in the states of one row."""
    return sum(math.prod(shape) for shape in module.state_shapes)
