"""The convolutions of the module `causal_conv`, and `norm_silu`, in plain torch. The functions of this module define
the results of the kernels, and run on a CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from seko_kernels.fused_reference import e4m3_rows


def causal_conv(
    x: Tensor,
    earlier: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor,
    residual: Tensor | None,
) -> Tensor:
    """Return the convolution of `causal_conv.causal_conv`, summed in float32 or wider and rounded once."""
    past = weight.shape[0] - 1
    if earlier is None:
        earlier = x.new_zeros((x.shape[0], past, *x.shape[2:]))
    wide = torch.promote_types(bias.dtype, torch.float32)
    joined = torch.cat((earlier.to(wide), x.to(wide)), dim=1).permute(0, 4, 1, 2, 3)
    filters = weight.to(wide).permute(3, 4, 0, 1, 2)
    y = F.conv3d(joined, filters, padding=(0, weight.shape[1] // 2, weight.shape[2] // 2))
    y = y.permute(0, 2, 3, 4, 1)
    if scale is not None:
        y = y * scale
    y = y + bias.to(wide)
    if residual is not None:
        y = y + residual.to(wide)
    return y.to(bias.dtype).contiguous()


def doubled_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the convolution of `causal_conv.doubled_conv`, summed in float32 or wider and rounded once."""
    wide = torch.promote_types(bias.dtype, torch.float32)
    batch, frames, height, width, _ = x.shape
    pictures = F.pad(x.to(wide).flatten(0, 1).permute(0, 3, 1, 2), (1, 1, 1, 1))
    four = []
    for pixel, taps in enumerate(weight.to(wide).permute(0, 3, 4, 1, 2)):
        below, right = divmod(pixel, 2)
        window = pictures[:, :, below : below + height + 1, right : right + width + 1]
        four.append(F.conv2d(window, taps, bias.to(wide)))
    y = torch.stack(four, dim=-1).view(*four[0].shape, 2, 2).permute(0, 2, 4, 3, 5, 1)  # [B*T, H, 2, W, 2, N]
    return y.reshape(batch, frames, 2 * height, 2 * width, -1).to(bias.dtype)


def norm_silu(x: Tensor, gamma: Tensor) -> Tensor:
    """Return the result of `norm_silu.norm_silu`, computed in float32 or wider and rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = F.normalize(x.to(wide), dim=-1) * (gamma.to(wide) * x.shape[-1] ** 0.5)
    return F.silu(normed).to(x.dtype)


def e4m3_filters(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [t, r, c, N, C] as e4m3, and the scale of each filter, [N] float32."""
    rows = packed.permute(3, 0, 1, 2, 4)
    values, scale = e4m3_rows(rows.flatten(1))
    return values.view(rows.shape).permute(1, 2, 3, 0, 4).contiguous(), scale.squeeze(1)
