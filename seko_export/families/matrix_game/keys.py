"""Key names and shapes of Matrix-Game 2.0's checkpoints: Wan's keys without a text, one cross-attention, and action
modules in the first layers. Listing names and shapes reads no file."""

from __future__ import annotations

from dataclasses import replace

from seko_export.checkpoints.key_table import LAYER, Dimension, Naming, linear_shapes, norm_shapes
from seko_export.config.model import ModelConfig
from seko_export.families.matrix_game.model import HEAD, MOUSE, MatrixGameModel
from seko_export.families.matrix_game.presets import PRESETS
from seko_export.families.wan_layout.keys import (
    DIMENSIONS,
    PROJECTION,
    TELLTALES,
    WAN_KEYS,
    projection_shapes,
    wan_shapes,
)
from seko_export.families.wan_layout.namings import WAN, diffusers_to_wan, wan_to_diffusers

ACTION = "action_model"
VIDEO_PER_LATENT = 4
_TEXT = "text_embedding."


def matrix_game_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a checkpoint, by the authors' names without their prefix, layer by layer."""
    model = MatrixGameModel.of(config)
    shapes = {name: shape for name, shape in wan_shapes(config).items() if not name.startswith(_TEXT)}
    outer = projection_shapes(model.image_dim, config.dim)
    for layer in range(model.action_layers):
        shapes |= {f"blocks.{layer}.{ACTION}.{name}": shape for name, shape in action_shapes(model).items()}
    return outer | shapes


def action_shapes(model: MatrixGameModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an action module's tensors. The norms of queries and keys are stored, and not used."""
    d, a, h = model.dim, model.action_width, model.keyboard_width
    frames = VIDEO_PER_LATENT * model.seen_latents
    shapes: dict[str, tuple[int, ...]] = {
        **linear_shapes("keyboard_embed.0", h, model.keyboard),
        **linear_shapes("keyboard_embed.2", h, h),
        "key_attn_q_norm.weight": (HEAD,),
        "key_attn_k_norm.weight": (HEAD,),
        "mouse_attn_q.weight": (a, d),
        "keyboard_attn_kv.weight": (2 * a, frames * h),
        "proj_keyboard.weight": (d, a),
    }
    if model.mouse:
        shapes |= {
            **linear_shapes("mouse_mlp.0", a, d + frames * MOUSE),
            **linear_shapes("mouse_mlp.2", a, a),
            **norm_shapes("mouse_mlp.3", a),
            "t_qkv.weight": (3 * a, a),
            "img_attn_q_norm.weight": (HEAD,),
            "img_attn_k_norm.weight": (HEAD,),
            "proj_mouse.weight": (d, a),
        }
    return shapes


def _in_action(name: str) -> bool:
    match = LAYER.fullmatch(name)
    return match is not None and match[2].startswith(f"{ACTION}.")


# FastVideo's folders: diffusers' names, and the action modules' own.
DIFFUSERS = Naming(
    "diffusers",
    lambda name: name if _in_action(name) else diffusers_to_wan(name),
    lambda name: name if _in_action(name) else wan_to_diffusers(name),
    ("condition_embedder.", ".attn1.", "scale_shift_table"),
    "safetensors",
)

KEYS = replace(
    WAN_KEYS,
    formats="Matrix-Game 2.0's safetensors (a file), or diffusers safetensors (a file, or a folder)",
    shapes=matrix_game_shapes,
    namings=(DIFFUSERS, WAN),
    dimensions=(
        *(dimension for dimension in DIMENSIONS if dimension.field != "text_dim"),
        Dimension("image_dim", f"{PROJECTION}.1.weight", 0),
        Dimension("keyboard", f"blocks.0.{ACTION}.keyboard_embed.0.weight", 1),
        Dimension("keyboard_width", f"blocks.0.{ACTION}.keyboard_embed.0.weight", 0),
        Dimension("action_heads", f"blocks.0.{ACTION}.mouse_attn_q.weight", 0, per=HEAD),
    ),
    telltales=tuple(entry for entry in TELLTALES if f"{ACTION}." not in entry[0]),
    models={name: preset.model for name, preset in PRESETS.items()},
)
