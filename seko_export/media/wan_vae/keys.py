"""Key table of the Wan VAEs, with Wan's names and shapes, and diffusers' names for the same tensors.

The exporter uses Wan's names, with the shapes of the modules, so the table always matches the code. Rules translate
Wan's names to diffusers' names; diffusers' shapes are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from seko_export.checkpoints.key_table import Naming
from seko_export.checkpoints.keycheck import compare_keys
from seko_export.checkpoints.sources import OpenedFiles, TensorSource
from seko_export.media.wan_vae.config import VAE_PRESETS, WanVaeConfig

# Wan's module -> diffusers' module, outside the lists of blocks. Source: state dicts of Wan2.1_VAE.pth and of
# diffusers.AutoencoderKLWan; the test compares with the class itself.
OUTER_MODULES: dict[str, str] = {
    "conv1": "quant_conv",
    "conv2": "post_quant_conv",
    **{
        f"{half}.{wan}": f"{half}.{diffusers}"
        for half in ("encoder", "decoder")
        for wan, diffusers in (
            ("conv1", "conv_in"),
            ("middle.0", "mid_block.resnets.0"),
            ("middle.1", "mid_block.attentions.0"),
            ("middle.2", "mid_block.resnets.1"),
            ("head.0", "norm_out"),
            ("head.2", "conv_out"),
        )
    },
}
# The same inside a residual block; modules that are not listed have the same name in both.
BLOCK_MODULES: dict[str, str] = {
    "residual.0": "norm1",
    "residual.2": "conv1",
    "residual.3": "norm2",
    "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}
# Keys that only the levels of Wan 2.2 have, in either naming.
RESIDUAL_SIGNS = (
    "encoder.downsamples.0.downsamples.",
    "decoder.upsamples.0.upsamples.",
    "encoder.down_blocks.0.resnets.",
    "decoder.up_blocks.0.upsampler.",
)

# Of Matrix-Game's LightVAE: layers that only its training used.
_UNUSED = "dynamic_feature_projection_heads."


def vae_shapes(config: WanVaeConfig, half: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a checkpoint of this VAE holds, by Wan's names.

    Parameters
    ----------
    config : WanVaeConfig
        The VAE's dimensions.
    half : str
        Half of the VAE, one of `media.vae.HALVES`: the tensors for decoding, for encoding, or both.

    Returns
    -------
    dict[str, tuple[int, ...]]
        Shape of each tensor by name. The statistics of the latents are in the config, not in the checkpoint.
    """
    import torch

    from seko_export.media.wan_vae.modules import VaeDecode, VaeEncode, latent_statistics

    with torch.device("meta"):
        modules = {
            "decoder": VaeDecode(config, first=True, frames=1),
            "encoder": VaeEncode(config, first=True, frames=1),
        }
    statistics = latent_statistics(config, torch.float32)
    return {
        name: tuple(parameter.shape)
        for key, module in modules.items()
        if half in (key, "both")
        for name, parameter in module.named_parameters()
        if name not in statistics
    }


def vae_diffusers_names(config: WanVaeConfig) -> dict[str, str]:
    """Return the name in ``diffusers.AutoencoderKLWan`` of every tensor, by Wan's name."""
    return {name: _in_diffusers(name, config) for name in vae_shapes(config, "both")}


def _in_diffusers(name: str, config: WanVaeConfig) -> str:
    """Translate one of Wan's names to diffusers'. In Wan 2.1 a decoder level is consecutive entries of Wan's flat list,
    the upsampling last."""
    module, leaf = name.rsplit(".", 1)
    inner = ""
    for wan, diffusers in BLOCK_MODULES.items():
        if module.endswith(f".{wan}"):
            module, inner = module.removesuffix(f".{wan}"), f".{diffusers}"
    if module in OUTER_MODULES:
        return f"{OUTER_MODULES[module]}{inner}.{leaf}"
    parts = module.split(".")
    if config.is_residual and parts[1] in ("downsamples", "upsamples"):
        way, blocks = (
            ("down", config.num_res_blocks) if parts[0] == "encoder" else ("up", config.num_res_blocks + 1)
        )
        place = f"{way}sampler" if int(parts[4]) == blocks else f"resnets.{parts[4]}"
        parts[1:5] = [f"{way}_blocks", parts[2], place]
    elif parts[1] == "downsamples":
        parts[1] = "down_blocks"
    elif parts[1] == "upsamples":
        block, entry = divmod(int(parts[2]), config.num_res_blocks + 2)
        place = "upsamplers.0" if entry == config.num_res_blocks + 1 else f"resnets.{entry}"
        parts[1:3] = ["up_blocks", str(block), place]
    else:  # inside the attention: middle.1.to_qkv
        parts[:3] = [OUTER_MODULES[".".join(parts[:3])]]
    return f"{'.'.join(parts)}{inner}.{leaf}"


def match_vae_sources(
    path: Path, opened: OpenedFiles, config: WanVaeConfig, half: str
) -> tuple[str, Mapping[str, TensorSource]]:
    """Find the stored tensor of every key of the VAE, or of one half; any difference is an error.

    Parameters
    ----------
    path, opened, config
        The parameters of `match_sources` with the same names.
    half : str
        Half of the VAE: ``decoder``, ``encoder`` or ``both``. The other half may be present in any shape, or missing; a
        key of neither half is unknown.

    Returns
    -------
    str, Mapping[str, TensorSource]
        As `match_sources` returns them, with Wan's keys in the order of `vae_shapes`.
    """
    used = tuple(source for source in opened.sources if not source.key.startswith(_UNUSED))
    opened = replace(opened, sources=used)
    names = vae_diffusers_names(config)
    signs = ("mid_block.", "quant_conv.", "up_blocks.", "down_blocks.")
    ours = {theirs: name for name, theirs in names.items()}
    naming = Naming("diffusers", ours.__getitem__, names.__getitem__, signs)
    if not naming.fits(opened):
        naming = Naming("wan", str, str)
    sources = compare_keys(
        f"{path} ({naming.name} names) does not hold the weights of a VAE of base_dim {config.base_dim} "
        f"(asked for: {half}):",
        opened,
        naming,
        vae_shapes(config, half),
        hints=lambda: _vae_hints(opened, naming, config),
        passed_over=names,
    )
    return naming.name, sources


def widths_in(shapes: Mapping[str, tuple[int, ...]], dim_mult: tuple[int, ...]) -> dict[str, int]:
    """Return ``base_dim`` and ``decoder_base_dim``, as far as shapes in either naming determine them.

    ``base_dim`` is the number of outputs of the encoder's first convolution, and ``decoder_base_dim`` the number of
    inputs of the decoder's last convolution.
    """
    widths = {}
    for width, axis, factor, keys in (
        ("base_dim", 0, 1, ("encoder.conv1.weight", "encoder.conv_in.weight")),
        ("decoder_base_dim", 1, dim_mult[0], ("decoder.head.2.weight", "decoder.conv_out.weight")),
    ):
        for key in keys:
            if len(shapes.get(key, ())) > axis:
                widths[width] = shapes[key][axis] // factor
    return widths


def _vae_hints(opened: OpenedFiles, naming: Naming, config: WanVaeConfig) -> list[str]:
    expected = {
        "base_dim": config.base_dim,
        "decoder_base_dim": config.decoder_base_dim or config.base_dim,
    }
    for width, size in widths_in(naming.shapes_in(opened), config.dim_mult).items():
        if size != expected[width]:
            presets = [name for name, preset in VAE_PRESETS.items() if preset.base_dim == size]
            known = f": the VAE {presets[0]!r}" if presets else ""
            return [f"the file's VAE has {width} {size} (expected {expected[width]}){known}"]
    return []
