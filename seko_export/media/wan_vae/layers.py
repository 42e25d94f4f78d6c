"""Layers of the Wan VAEs, and the caches of frames that these layers keep from call to call.

A layer that looks back in time (`Streamed`) takes earlier frames from a `FrameCaches` and stores the frames for the
next call there. No layer of the VAE writes in place, so a call is a pure function. Activations of the VAE are [B, C, T,
H, W] in channels-last memory. Caches are [B, t, H, W, C] contiguous: a buffer table can state this shape without
strides, and the order of the bytes is that of channels-last memory. The attributes of the layers have the names of the
original checkpoint. The maths of the layers is from Wan 2.1 (arXiv 2503.20314).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from seko_export.media.row_split import RowSplit

CONV_HISTORY = 2  # earlier frames that a causal kernel of size 3 reads
# Numbers of channels for which cuDNN's 3D convolution is as fast as a 2D convolution for each tap, and needs no sum
# (docs/adr/0028).
CHANNELS_IN_TIME = 192
FEWEST_FILTERS = 8  # number of output channels from which cuDNN has a fast kernel
# Number of float32 values, counted without columns, up to which torch convolves one row in 3D on a CPU without oneDNN.
# It then copies each pixel once for each tap, which took 3 to 20 times as long as a 2D convolution.
MOST_WITHOUT_ONEDNN = 20480
FUSED_HEAD = 256  # most channels of a head in torch's fused attention on CUDA
NORM_BEFORE = {2: 0, 6: 3}  # numbers of a residual block's convolutions, each with the number of its norm


class FrameCaches:
    """The frames that `Streamed` layers keep from call to call, in the order in which the layers run.

    Parameters
    ----------
    earlier : sequence of Tensor or None
        Caches that the previous call returned (`kept`), each [B, t, H, W, C] contiguous. None at the start of a stream,
        where every earlier frame is zeros.
    split : RowSplit, optional
        Division of the pixel rows, if several ranks (GPUs) share a picture. Activations and caches then have the rows
        of one rank only.
    """

    def __init__(self, earlier: Sequence[Tensor] | None, split: RowSplit | None = None) -> None:
        self._earlier = earlier
        self.split = split
        self.kept: list[Tensor] = []

    @property
    def starts(self) -> bool:
        """Return whether this call is the first of its stream."""
        return self._earlier is None

    def before(self, x: Tensor, frames: int) -> Tensor:
        """Return the ``frames`` frames before ``x`` [B, C, T, H, W] from the next cache, as [B, C, frames, H, W]."""
        if self._earlier is None:
            batch, channels, _, height, width = x.shape
            cached_frames = x.new_zeros((batch, frames, height, width, channels))
        else:
            cached_frames = self._earlier[len(self.kept)]
        return cached_frames.permute(0, 4, 1, 2, 3)

    def keep(self, x: Tensor) -> None:
        """Store a copy of ``x`` [B, C, t, H, W] as the next cache.

        A view in place of a copy would keep the whole activation in memory. torch's compiler removes a plain copy if
        the strides agree. The copy is therefore made by a clamp whose bounds change no number, which the compiler does
        not remove. ``x`` should be a part of the result of ``torch.cat``, never of its inputs. torch 2.13's compiler
        computes the inputs of ``torch.cat`` inside the memory of the result. A copy of the size of an input stays in
        this memory even after the memory was reused. A CPU engine with two frames a call once returned caches of other
        layers because of such reused memory.
        """
        self.kept.append(x.permute(0, 2, 3, 4, 1).clamp(min=-torch.inf).contiguous())


class Streamed(nn.Module):
    """A layer whose ``forward(x, caches)`` takes frames of earlier calls, or has parts that do.

    ``keeps`` states whether the layer itself, and not only a part of it, stores a cache for the next call.
    """

    keeps = False


def run(layers: Iterable[nn.Module], x: Tensor, caches: FrameCaches) -> Tensor:
    """Run layers one after the other on ``x`` [B, C, T, H, W]; some of the layers may be `Streamed`."""
    for layer in layers:
        x = layer(x, caches) if isinstance(layer, Streamed) else layer(x)
    return x


class CausalConv3d(Streamed):
    """A causal 3D convolution: over a frame and the two frames before it, padded in height and width."""

    keeps = True

    def __init__(self, channels_in: int, channels_out: int, side: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels_out, channels_in, 1 + CONV_HISTORY, side, side))
        self.bias = nn.Parameter(torch.empty(channels_out))
        self._beside = side // 2

    def forward(self, x: Tensor, caches: FrameCaches) -> Tensor:
        """Return the result [B, channels_out, T, H, W] for ``x`` [B, channels_in, T, H, W]."""
        joined = torch.cat((caches.before(x, CONV_HISTORY), x), dim=2)
        padding, own = (self._beside, self._beside), joined
        if caches.split is not None and self._beside:
            joined = caches.split.with_neighbours(joined)
            padding, own, x = (0, self._beside), joined[:, :, :, 1:-1], joined[:, :, CONV_HISTORY:]
        caches.keep(own[:, :, -CONV_HISTORY:])
        if caches.starts and x.shape[2] == 1:
            # Only the last tap in time reads anything but zeros, which saves two thirds of the work.
            return self._convolved(x, self.weight[:, :, -1:], padding)
        return self._convolved(joined, self.weight, padding)

    def with_residual(self, x: Tensor, caches: FrameCaches, residual: Tensor) -> Tensor:
        """Return the convolution of ``x`` plus ``residual`` [B, channels_out, T, H, W]."""
        y: Tensor = self(x, caches)
        return residual + y

    def _convolved(self, x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
        """Return the convolution of the frames in ``x`` [B, channels_in, T', H', W], which includes the cached frames.

        ``padding`` is the number of rows and columns of zeros on either side. cuDNN is used only where it is fast: a
        convolution with few filters is a matmul instead, and most convolutions in time are a 2D convolution for each
        tap. On a CPU a small convolution is one 2D convolution.
        """
        if not by_cudnn(x):
            if weight.shape[-1] > 1 and x.shape[0] == 1 and without_onednn(x):
                return self._taps_as_channels(x, weight, padding)
            return F.conv3d(x, weight, self.bias, padding=(0, *padding))
        if len(weight) < FEWEST_FILTERS:
            return conv_of_few_filters(x, weight, self.bias, padding)
        in_time = weight.shape[2] == 1 or weight.shape[1] == CHANNELS_IN_TIME
        if in_time or x.shape[0] > 1 or weight.shape[-1] == 1:
            return F.conv3d(x, weight, self.bias, padding=(0, *padding))
        return self._tap_by_tap(x, weight, padding)

    def _tap_by_tap(self, x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
        """Compute the convolution of one row as a sum of 2D convolutions, one for each tap in time, which is mostly
        faster in cuDNN.

        The sum is fused with the following ops. On a CPU this is slower than oneDNN's 3D convolution. The taps' windows
        are views made with strides, because torch's compiler copies a slice of a tensor that is not computed yet.
        """
        _, channels, frames, height, width = x.shape
        memory = x.permute(0, 2, 3, 4, 1).contiguous()
        size = (frames - CONV_HISTORY, channels, height, width)
        strides = (height * width * channels, 1, width * channels, channels)
        taps = [
            F.conv2d(
                memory.as_strided(size, strides, at * strides[0]),
                weight[:, :, at],
                padding=padding,
            )
            for at in range(1 + CONV_HISTORY)
        ]
        return as_clip(sum(taps[1:], taps[0]) + self.bias.view(-1, 1, 1), 1)

    def _taps_as_channels(self, x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
        """Compute the convolution of one row as one 2D convolution, whose input channels are those of all frames that a
        result reads."""
        pictures, taps = as_images(x), weight.shape[2]
        frames = len(pictures) - taps + 1
        windows = torch.cat([pictures[at : at + frames] for at in range(taps)], dim=1)
        return as_clip(F.conv2d(windows, weight.transpose(1, 2).flatten(1, 2), self.bias, padding=padding), 1)


class RmsNorm(nn.Module):
    """RMSNorm over the channels (axis 1), x / |x| * sqrt(C) * gamma, in float32 or wider."""

    def __init__(self, channels: int, axes: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(channels, *(1,) * axes))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised ``x``, in the shape of ``x`` [B, C, ...] with ``axes`` axes after the channels."""
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = self.gamma.to(wide) * x.shape[1] ** 0.5
        y: Tensor = F.normalize(x.to(wide), dim=1) * scale
        return y.to(x.dtype)


class ResidualBlock(Streamed):
    """Norm, SiLU and causal convolution, twice, with a shortcut.

    With ``fp8``, a build may let the convolutions multiply e4m3 numbers; see `own_convolution`.
    """

    def __init__(self, channels_in: int, channels_out: int, *, fp8: bool = False) -> None:
        super().__init__()
        self.fp8 = fp8
        self.residual = nn.Sequential(
            RmsNorm(channels_in, axes=3),
            nn.SiLU(),
            CausalConv3d(channels_in, channels_out, side=3),
            RmsNorm(channels_out, axes=3),
            nn.SiLU(),
            nn.Identity(),  # stands for the dropout of training, which counts in the checkpoint's numbering
            CausalConv3d(channels_out, channels_out, side=3),
        )
        same = channels_in == channels_out
        self.shortcut = nn.Identity() if same else nn.Conv3d(channels_in, channels_out, 1)

    def forward(self, x: Tensor, caches: FrameCaches) -> Tensor:
        """Return the result [B, channels_out, T, H, W] for ``x`` [B, channels_in, T, H, W]."""
        shortcut: Tensor = self.shortcut(x)
        norm, silu, convolution, *behind = self.residual
        x = convolution(silu(norm(x)), caches)
        norm, silu, _, convolution = behind
        y: Tensor = convolution.with_residual(silu(norm(x)), caches, shortcut)  # type: ignore[operator]
        return y


def residual_blocks(
    channels_in: int, channels_out: int, count: int, *, fp8: bool = False
) -> list[ResidualBlock]:
    """Return residual blocks in sequence. The first block changes the number of channels."""
    widths = [channels_in, *[channels_out] * (count - 1)]
    return [ResidualBlock(width, channels_out, fp8=fp8) for width in widths]


class AttentionBlock(Streamed):
    """Self-attention with one head over the pixels of each frame separately."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = RmsNorm(channels, axes=2)
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, caches: FrameCaches) -> Tensor:
        """Return the result, in the shape of ``x`` [B, C, T, H, W]."""
        frames = as_images(x)  # [B*T, C, H, W]
        qkv = self.to_qkv(self.norm(frames)).flatten(2).mT  # [B*T, H*W, 3*C]
        q, kv = qkv.split((x.shape[1], 2 * x.shape[1]), dim=-1)
        if caches.split is not None:
            kv = caches.split.every_place(kv)
        y = _attention(*(part.unsqueeze(1) for part in (q, *kv.chunk(2, dim=-1))))  # [B*T, 1, H*W, C]
        y = y.squeeze(1).mT.reshape(frames.shape)
        return x + as_clip(self.proj(y), x.shape[0])


class Upsample(Streamed):
    """The layer that doubles rows and columns. If ``temporal``, it also doubles the frames except the first frame of a
    stream."""

    def __init__(self, channels: int, channels_out: int, *, temporal: bool) -> None:
        super().__init__()
        self.resample = nn.Sequential(
            nn.Upsample(scale_factor=2.0, mode="nearest-exact"),
            nn.Conv2d(channels, channels_out, 3, padding=1),
        )
        self.time_conv = CausalConv3d(channels, 2 * channels, side=1) if temporal else None

    def forward(self, x: Tensor, caches: FrameCaches) -> Tensor:
        """Return the upsampled frames [B, channels_out, T', 2*H, 2*W] for ``x`` [B, channels, T, H, W].

        The first frame of a stream stays one frame, and the time convolution of `Upsample` reads zeros in its place.
        """
        if self.time_conv is not None:
            if not caches.starts:
                x = _interleaved(self.time_conv(x, caches))
            elif x.shape[2] == 1:
                caches.keep(caches.before(x, CONV_HISTORY))
            else:
                x = torch.cat((x[:, :, :1], _interleaved(self.time_conv(x[:, :, 1:], caches))), dim=2)
        enlarge, convolve = self.resample
        if isinstance(convolve, Streamed):
            return convolve(as_clip(enlarge(as_images(x)), x.shape[0]), caches)  # type: ignore[no-any-return]
        if caches.split is None:
            return as_clip(convolve(enlarge(as_images(x))), x.shape[0])
        weight, bias = convolve.parameters()
        # Each neighbour's row becomes two rows, of which the adjacent one is needed.
        whole = enlarge(as_images(caches.split.with_neighbours(x)))[:, :, 1:-1]
        y = F.conv2d(whole, weight, bias, padding=(0, 1))
        return as_clip(y, x.shape[0])


class Downsample(Streamed):
    """The layer that halves rows and columns. If ``temporal``, it also halves the number of frames after the first
    frame of a stream."""

    def __init__(self, channels: int, *, temporal: bool) -> None:
        super().__init__()
        self.resample = nn.Sequential(
            nn.ZeroPad2d((0, 1, 0, 1)),  # padded only right and below, as in training
            nn.Conv2d(channels, channels, 3, stride=2),
        )
        self.time_conv = HalvingTimeConv(channels) if temporal else None

    def forward(self, x: Tensor, caches: FrameCaches) -> Tensor:
        """Return the downsampled frames [B, C, T', H/2, W/2] for ``x`` [B, C, T, H, W]."""
        x = as_clip(self.resample(as_images(x)), x.shape[0])
        return x if self.time_conv is None else run((self.time_conv,), x, caches)


class HalvingTimeConv(Streamed):
    """A convolution over three frames at every second frame, which halves the number of frames after the first frame of
    a stream.

    The first frame of a stream passes unchanged, and is also an input of the first convolution.
    """

    keeps = True

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, channels, 3, 1, 1))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor, caches: FrameCaches) -> Tensor:
        """Return the frames [B, C, T/2, H, W] for ``x`` [B, C, T, H, W]. At the start of a stream there are 1 + (T -
        1)/2 frames."""
        window = (
            x if caches.starts else torch.cat((caches.before(x, 1), x), dim=2)
        )  # windows overlap by a frame
        caches.keep(window[:, :, -1:])
        if window.shape[2] == 1:
            return x
        y = F.conv3d(window, self.weight, self.bias, stride=(2, 1, 1))
        return torch.cat((x[:, :, :1], y), dim=2) if caches.starts else y


def by_cudnn(x: Tensor) -> bool:
    """Return whether cuDNN convolves ``x``. Tests override `by_cudnn` on a CPU, to compare the cuDNN variants with
    plain maths.
    """
    return x.is_cuda


def without_onednn(x: Tensor) -> bool:
    """Return whether torch convolves one row ``x`` [1, C, T, H, W] on a CPU without oneDNN, which is slow in 3D."""
    return x.dtype == torch.float32 and x.shape[:-1].numel() <= MOST_WITHOUT_ONEDNN


def conv_of_few_filters(
    x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int] | None = None
) -> Tensor:
    """Compute a convolution with few filters as one matmul of all taps with all pixels, and a sum of shifted rows.
    cuDNN has no fast kernel for few filters. On an H200 the VAE's last convolution (96 channels to 3 at 480x832) in
    cuDNN took 3.7 ms for 12 frames, and changing the memory layout for cuDNN took 1.5 ms. Reading ``x``
    takes 0.25 ms at the memory's bandwidth.

    The matmul's result has taps * O numbers for each pixel, fewer than ``x`` has if O is 3 and C is 96. Each number of
    the matmul's result is read once, in memory order: a row of the result belongs to one tap of one filter. The
    compiler fuses the sum of shifted rows with the ops that come after it. Zeros around a frame are conditions on the
    reads of the matmul's result, and need no padded copy.

    Parameters
    ----------
    x : Tensor
        Frames with the cached frames in front, [B, C, T + t - 1, H, W], in channels-last memory; frames in any other
        layout are copied first.
    weight : Tensor
        Weight of the convolution, [O, C, t, r, c], with the dtype of ``x``; r and c odd.
    bias : Tensor
        Bias of the convolution, [O].
    padding : tuple of int, optional
        Number of rows and columns of zeros on either side of each frame, as in ``F.conv3d``; default: r // 2 and c //
        2.

    Returns
    -------
    Tensor
        Result of the convolution, [B, O, T, H', W'], with the dtype of ``x``. With the default padding H' and W' are H
        and W. In half precision each tap is rounded once, and the sum is in float32 and rounded once.
    """
    filters, channels, *taps = weight.shape
    batch, _, in_frames, height, width = x.shape
    above, beside = (taps[1] // 2, taps[2] // 2) if padding is None else padding
    frames, rows, columns = (
        in_frames - taps[0] + 1,
        height + 2 * above - taps[1] + 1,
        width + 2 * beside - taps[2] + 1,
    )
    places = x.permute(0, 2, 3, 4, 1).contiguous().view(-1, channels)  # [B*(T+t-1)*H*W, C]
    filter_taps = weight.permute(2, 3, 4, 0, 1).reshape(-1, channels)  # [t*r*c*O, C]
    products = torch.mm(filter_taps, places.mT).view(-1, filters, batch, in_frames, height, width)
    padded = F.pad(products, (beside, beside, above, above))
    wide = torch.promote_types(x.dtype, torch.float32)
    y = bias.to(wide).view(-1, 1, 1, 1, 1)
    for tap, (t, r, c) in zip(padded, product(*map(range, taps)), strict=True):
        y = y + tap[:, :, t : t + frames, r : r + rows, c : c + columns].to(wide)
    return y.to(x.dtype).transpose(0, 1)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention [..., N, C] of queries, keys and values of that shape. If no fused kernel supports the size,
    the function avoids torch's computation in float32, which is ten times slower."""
    if not q.is_cuda or q.shape[-1] <= FUSED_HEAD:
        return F.scaled_dot_product_attention(q, k, v)
    weights = ((q * q.shape[-1] ** -0.5) @ k.mT).softmax(-1, torch.promote_types(q.dtype, torch.float32))
    y: Tensor = weights.to(v.dtype) @ v
    return y


def channels_last(x: Tensor) -> Tensor:
    """Return ``x`` [B, C, T, H, W] in the memory order in which every layer works."""
    return x.contiguous(memory_format=torch.channels_last_3d)


def as_images(x: Tensor) -> Tensor:
    """Return frames [B*T, C, H, W] as pictures, from ``x`` [B, C, T, H, W]; no copy in channels-last memory."""
    return x.transpose(1, 2).flatten(0, 1)


def as_clip(x: Tensor, batch: int) -> Tensor:
    """Return pictures [B*T, C, H, W] as frames [B, C, T, H, W]; no copy."""
    frames: Tensor = x.unflatten(0, (batch, -1))
    return frames.transpose(1, 2)


def _interleaved(x: Tensor) -> Tensor:
    """Return [B, C, 2*T, H, W] from [B, 2*C, T, H, W]: the two halves of each frame's channels become two frames."""
    halves: Tensor = x.permute(0, 2, 3, 4, 1).unflatten(4, (2, -1))  # [B, T, H, W, 2, C]
    # For a single frame, flatten would return a view with a memory order that no layer uses.
    return halves.permute(0, 1, 4, 2, 3, 5).flatten(1, 2).contiguous().permute(0, 4, 1, 2, 3)
