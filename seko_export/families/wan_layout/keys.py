"""Key names, shapes and config.json of checkpoints with Wan's layers, which several families share. The names and
shapes of keys are listed without reading a file."""

from __future__ import annotations

from seko_export.checkpoints.key_table import Dimension, KeyTable, linear_shapes, norm_shapes, plain_spread
from seko_export.config.model import ModelConfig
from seko_export.config.stream import PATCH

# Facts about a model that shapes determine.
DIMENSIONS = (
    Dimension("dim", "patch_embedding.weight", 0),
    Dimension("in_channels", "patch_embedding.weight", 1),
    Dimension("out_channels", "head.head.weight", 0, per=PATCH * PATCH),
    Dimension("ffn_dim", "blocks.0.ffn.0.weight", 0),
    Dimension("text_dim", "text_embedding.0.weight", 1),
    Dimension("freq_dim", "time_embedding.0.weight", 1),
)
PROJECTION = "img_emb.proj"  # of the features of an image encoder
# Prefixes that tools add to all keys; a key may have several.
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", "model.", "module.")
# Keys of other models, with the model's name for messages. Sources: diffusers' `single_file_utils.py`, ComfyUI's
# `model_detection.py`.
OTHER_MODELS = (
    (("vace_blocks.", "vace_patch_embedding"), "VACE"),
    (("control_adapter.conv",), "Wan Fun with a camera"),
    (("ref_conv.",), "Wan Fun with control"),
    (("casual_audio_encoder.", "audio_injector."), "Wan 2.2 S2V"),
    (("audio_proj.audio_proj_glob_1",), "HuMo"),
    (("face_adapter.", "motion_encoder.", "pose_patch_embedding"), "Wan 2.2 Animate"),
    (("patch_embedding_pose",), "SCAIL"),
    (("patch_embedding_mask",), "SCAIL-2"),
    (("patch_embedding_global", "music_injector."), "WanDancer"),
    (("audio_cross_attn", "audio_proj.proj1"), "MultiTalk"),
    (("fps_embedding.", "fps_projection."), "SkyReels-V2"),
    (("action_model.",), "another Matrix-Game than the distilled models of 2.0"),
    (("cam_self_attn.",), "DreamX-World"),
    (("patch_short.", "patch_mid.", "patch_long."), "Helios"),
    (("to_gate_compress",), "FastWan with VSA"),
    (("txt_in.individual_token_refiner.",), "HunyuanVideo"),
    (("av_ca_a2v_gate_adaln_single.", "vae.per_channel_statistics."), "LTX-2"),
    (("patchify_proj.",), "LTX"),
    (("x_embedder.proj.1",), "Cosmos"),
    (("attn.qkv_x",), "Mochi"),
    (("cross_attn.kv_linear",), "SANA"),
    (("double_blocks.0.img_attn",), "Flux"),
    (("single_stream_modulation.lin",), "Flux.2"),
    (("txtfusion.projector",), "Krea-2, which makes pictures"),
    (("input_blocks.", "conditioner.embedders."), "Stable Diffusion"),
)
# Other keys of other models, with words for messages.
TELLTALES = (
    (
        ("weight_scale", "scale_weight"),
        "these are scales of quantised weights without their matrices; take the bfloat16 checkpoint",
    ),
    *((parts, f"these are the keys of {name}, which is not built") for parts, name in OTHER_MODELS),
)


def projection_shapes(width: int, dim: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the projection of an image encoder's features, of ``width`` numbers, to the model's."""
    return {
        **norm_shapes(f"{PROJECTION}.0", width),
        **linear_shapes(f"{PROJECTION}.1", width, width),
        **linear_shapes(f"{PROJECTION}.3", dim, width),
        **norm_shapes(f"{PROJECTION}.4", dim),
    }


def picture_attention_shapes(layer: int, dim: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what a layer's cross-attention has for a picture beside the text."""
    attention = f"blocks.{layer}.cross_attn"
    return {
        **linear_shapes(f"{attention}.k_img", dim, dim),
        **linear_shapes(f"{attention}.v_img", dim, dim),
        f"{attention}.norm_k_img.weight": (dim,),
    }


def wan_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a checkpoint of this model, by Wan's names.

    diffusers stores the same shapes, so the returned table serves Wan's and diffusers' naming.

    Parameters
    ----------
    config : ModelConfig
        The model's dimensions.

    Returns
    -------
    dict[str, tuple[int, ...]]
        Shape of each tensor by name: outer tensors first, then block by block.
    """
    d, ffn = config.dim, config.ffn_dim
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embedding.weight": (d, config.in_channels, 1, PATCH, PATCH),
        "patch_embedding.bias": (d,),
        **linear_shapes("text_embedding.0", d, config.text_dim),
        **linear_shapes("text_embedding.2", d, d),
        **linear_shapes("time_embedding.0", d, config.freq_dim),
        **linear_shapes("time_embedding.2", d, d),
        **linear_shapes("time_projection.1", 6 * d, d),
        **linear_shapes("head.head", PATCH * PATCH * config.out_channels, d),
        "head.modulation": (1, 2, d),
    }
    for layer in range(config.layers):
        block = f"blocks.{layer}"
        shapes[f"{block}.modulation"] = (1, 6, d)
        for attention in ("self_attn", "cross_attn"):
            for projection in ("q", "k", "v", "o"):
                shapes |= linear_shapes(f"{block}.{attention}.{projection}", d, d)
            shapes[f"{block}.{attention}.norm_q.weight"] = (d,)
            shapes[f"{block}.{attention}.norm_k.weight"] = (d,)
        shapes[f"{block}.norm3.weight"] = (d,)
        shapes[f"{block}.norm3.bias"] = (d,)
        shapes |= linear_shapes(f"{block}.ffn.0", ffn, d)
        shapes |= linear_shapes(f"{block}.ffn.2", d, ffn)
    return shapes


def spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return the mean and the standard deviation of the random values of a weight. For a modulation, the two numbers
    are those of Wan's initialisation. For any other weight, `plain_spread` computes them."""
    return (0.0, shape[-1] ** -0.5) if name.endswith("modulation") else plain_spread(name, shape)


# What the key tables of all families with Wan's layers have; each replaces formats, shapes and namings by its own.
WAN_KEYS = KeyTable(
    formats="",
    shapes=wan_shapes,
    namings=(),
    dimensions=DIMENSIONS,
    landmark="patch_embedding.weight",
    prefixes=PREFIXES,
    telltales=TELLTALES,
    spread=spread,
)
