"""Names that checkpoints give to Wan's tensors: Wan's own names, or diffusers' names. Translating names reads no
file."""

from __future__ import annotations

import re

from seko_export.checkpoints.key_table import Naming, translate

# Wan's module -> diffusers' module, outside the blocks. Source: state dicts of Wan 2.1 and of
# diffusers.WanTransformer3DModel; the test compares with the class itself.
OUTER_MODULES: dict[str, str] = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
}

# Wan's module -> diffusers' module, inside a block. Beware: Wan's affine norm3 is the second norm of a block, which
# diffusers calls norm2; diffusers' norm3 has no weights.
BLOCK_MODULES: dict[str, str] = {
    **{
        f"{wan}.{inner}": f"{diffusers}.{other}"
        for wan, diffusers in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for inner, other in (
            ("q", "to_q"),
            ("k", "to_k"),
            ("v", "to_v"),
            ("o", "to_out.0"),
            ("norm_q", "norm_q"),
            ("norm_k", "norm_k"),
        )
    },
    "cross_attn.k_img": "attn2.add_k_proj",
    "cross_attn.v_img": "attn2.add_v_proj",
    "cross_attn.norm_k_img": "attn2.norm_added_k",
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}

# Whole names of parameters that are not the weight or bias of a module, outside and inside a block.
OUTER_PARAMETERS: dict[str, str] = {
    "head.modulation": "scale_shift_table",
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
}
BLOCK_PARAMETERS: dict[str, str] = {"modulation": "scale_shift_table"}

_LEAVES = ("weight", "bias")


def wan_to_diffusers(name: str) -> str:
    """Translate one Wan key to diffusers' name.

    Parameters
    ----------
    name : str
        A key of Wan's table, as the families' shapes list them.

    Returns
    -------
    str
        The key of the same tensor in ``diffusers.WanTransformer3DModel``.

    Raises
    ------
    KeyError
        If the table of key names does not contain ``name``.
    """
    return translate(name, OUTER_TO_DIFFUSERS, BLOCK_TO_DIFFUSERS)


def diffusers_to_wan(name: str) -> str:
    """Translate one diffusers key to Wan's name: the inverse of `wan_to_diffusers`.

    Parameters
    ----------
    name : str
        A key of ``diffusers.WanTransformer3DModel``.

    Returns
    -------
    str
        Wan's key of the same tensor.

    Raises
    ------
    KeyError
        If the table of key names does not contain ``name``.
    """
    return translate(name, OUTER_TO_WAN, BLOCK_TO_WAN)


def _with_leaves(modules: dict[str, str], parameters: dict[str, str]) -> dict[str, str]:
    leaves = {f"{wan}.{leaf}": f"{other}.{leaf}" for wan, other in modules.items() for leaf in _LEAVES}
    # RMSNorm has no bias: a key such as norm_q.bias is unknown, not translated.
    return {
        wan: other for wan, other in leaves.items() if not re.search(r"norm_[qk](_img)?\.bias$", wan)
    } | parameters


OUTER_TO_DIFFUSERS = _with_leaves(OUTER_MODULES, OUTER_PARAMETERS)
BLOCK_TO_DIFFUSERS = _with_leaves(BLOCK_MODULES, BLOCK_PARAMETERS)
OUTER_TO_WAN = {other: wan for wan, other in OUTER_TO_DIFFUSERS.items()}
BLOCK_TO_WAN = {other: wan for wan, other in BLOCK_TO_DIFFUSERS.items()}


DIFFUSERS = Naming(
    "diffusers",
    diffusers_to_wan,
    wan_to_diffusers,
    ("condition_embedder.", ".attn1.", "scale_shift_table"),
    "safetensors",
)
WAN = Naming("wan", str, str)

ENTRIES = ("generator_ema", "generator", "model", "state_dict")
