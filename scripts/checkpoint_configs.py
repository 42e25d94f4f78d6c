"""Contents of config.json beside the weights of models of each family, as its authors or diffusers write them."""

from __future__ import annotations

from seko_export.config.media import TextEncoderConfig
from seko_export.config.model import ModelConfig
from seko_export.config.stream import PATCH
from seko_export.families.abot.model import AbotModel
from seko_export.families.lingbot.model import CONTROLS, LingbotModel
from seko_export.families.matrix_game.model import MatrixGameModel
from seko_export.families.seko_talk.model import SekoTalkModel
from seko_export.families.wan_i2v.model import WanI2vModel

_TYPES = {1: "i2v", 2: "flf2v"}  # `model_type` of Wan's config.json by the number of pictures


def wan_config(config: ModelConfig) -> dict[str, object]:
    """Return the content of config.json for a model: the arguments of Wan's own ``WanModel``."""
    return {
        "_class_name": "WanModel",
        "dim": config.dim,
        "eps": config.norm_eps,
        "ffn_dim": config.ffn_dim,
        "freq_dim": config.freq_dim,
        "in_dim": config.in_channels,
        "model_type": "t2v",
        "num_heads": config.heads,
        "num_layers": config.layers,
        "out_dim": config.out_channels,
        "text_dim": config.text_dim,
        "text_len": config.text_tokens,
    }


def wan_diffusers_config(config: ModelConfig) -> dict[str, object]:
    """Return the content of config.json for a Wan model: the arguments of ``diffusers.WanTransformer3DModel``."""
    return {
        "_class_name": "WanTransformer3DModel",
        "patch_size": [1, PATCH, PATCH],
        "num_attention_heads": config.heads,
        "attention_head_dim": config.head_dim,
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "text_dim": config.text_dim,
        "freq_dim": config.freq_dim,
        "ffn_dim": config.ffn_dim,
        "num_layers": config.layers,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": config.norm_eps,
    }


def i2v_config(config: ModelConfig) -> dict[str, object]:
    """Return the content of Wan's config.json for a model, with the number of a picture's features, which the shapes of
    tensors do not show."""
    model = WanI2vModel.of(config)
    return wan_config(config) | {"model_type": _TYPES[model.pictures], "image_tokens": model.image_tokens}


def i2v_diffusers_config(config: ModelConfig) -> dict[str, object]:
    """Return the content of config.json for this model: the arguments of ``diffusers.WanTransformer3DModel``."""
    model = WanI2vModel.of(config)
    branch = {"image_dim": model.image_dim, "added_kv_proj_dim": model.dim} if model.image_dim else {}
    count = model.pictures * model.image_tokens
    return (
        wan_diffusers_config(config) | branch | ({"pos_embed_seq_len": count} if model.last_picture else {})
    )


def stored_i2v_diffusers_config(config: ModelConfig) -> dict[str, object]:
    """Return the content of config.json in a random pipeline: diffusers' arguments, and the number of a picture's
    features, which shapes do not show."""
    return i2v_diffusers_config(config) | {"image_tokens": WanI2vModel.of(config).image_tokens}


def lingbot_config(config: ModelConfig) -> dict[str, object]:
    """Return the content of config.json for a lingbot-world model: the arguments of the authors' class."""
    controls = {width: name for name, width in CONTROLS.items()}
    control = controls[LingbotModel.of(config).control_channels]
    return wan_config(config) | {"model_type": "i2v", "control_type": control}


def abot_config(config: ModelConfig) -> dict[str, object]:
    """Return the content of config.json for an ABot-World model: the arguments of the authors' class, and the sizes
    that no shape shows."""
    model = AbotModel.of(config)
    references = {"references": model.references, "reference_side": model.reference_side}
    return wan_config(model) | {"model_type": "ci2v", **references}


def seko_talk_config(config: ModelConfig) -> dict[str, object]:
    """Return the content of config.json for a Seko-Talk model: Wan's fields, and properties that the shapes of tensors
    do not show."""
    m = SekoTalkModel.of(config)
    return wan_config(m) | {
        "_class_name": "SekoTalkModel",
        "model_type": "s2v",
        "use_image_encoder": bool(m.image_dim),
        "image_tokens": m.image_tokens,
        "ref_state": m.ref_state,
        "audio_frames": m.audio_frames,
        "audio_heads": m.audio_heads,
        "speakers": m.speakers,
        "audio_eps": m.audio_eps,
        "image_eps": m.image_eps,
    }


def matrix_game_config(config: ModelConfig) -> dict[str, object]:
    """Return the content of config.json: Wan's, with the number of a picture's features, which the shapes of tensors do
    not show."""
    model = MatrixGameModel.of(config)
    fields = {name: value for name, value in wan_config(config).items() if not name.startswith("text_")}
    return fields | {"model_type": "i2v", "image_tokens": model.image_tokens}


def stored_matrix_game_diffusers_config(config: ModelConfig) -> dict[str, object]:
    """Return the content of config.json in a random pipeline: diffusers' arguments, and the number of a picture's
    features, which shapes do not show."""
    fields = {
        name: value for name, value in wan_diffusers_config(config).items() if not name.startswith("text_")
    }
    return fields | {"image_tokens": MatrixGameModel.of(config).image_tokens}


def umt5_config(config: TextEncoderConfig) -> dict[str, object]:
    """Return the content of config.json for a text encoder: the arguments of ``transformers.UMT5Config``."""
    return {
        "model_type": "umt5",
        "vocab_size": config.vocab_size,
        "d_model": config.dim,
        "num_heads": config.heads,
        "d_kv": config.head_dim,
        "d_ff": config.ffn_dim,
        "num_layers": config.layers,
        "relative_attention_num_buckets": config.buckets,
        "relative_attention_max_distance": config.max_distance,
    }
