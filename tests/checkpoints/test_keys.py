"""The key table against diffusers' own class, and as a bijection for any model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.checkpoint_configs import wan_diffusers_config
from seko_export.config.model import ModelConfig
from seko_export.families.wan.presets import PRESETS
from seko_export.families.wan_layout.keys import wan_shapes
from seko_export.families.wan_layout.namings import diffusers_to_wan, wan_to_diffusers

configs = st.builds(
    lambda heads, head_dim, **dims: ModelConfig(name="any", dim=heads * head_dim, heads=heads, **dims),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([16, 32, 128]),
    layers=st.integers(1, 13),  # past ten: "1" is a prefix of "10"
    ffn_dim=st.integers(1, 99),
    in_channels=st.integers(1, 40),
    out_channels=st.integers(1, 40),
    text_dim=st.integers(1, 50),
    freq_dim=st.integers(1, 20).map(lambda half: 2 * half),
)


@given(configs)
def test_translation_is_a_bijection(config: ModelConfig) -> None:
    names = list(wan_shapes(config))
    translated = [wan_to_diffusers(name) for name in names]
    assert len(set(translated)) == len(names)
    assert [diffusers_to_wan(name) for name in translated] == names


@pytest.mark.parametrize(("heads", "layers"), [(1, 1), (2, 3)])
def test_table_is_diffusers_state_dict(heads: int, layers: int) -> None:
    from diffusers import WanTransformer3DModel

    config = ModelConfig(
        name="any", layers=layers, dim=16 * heads, heads=heads, ffn_dim=40, in_channels=5, out_channels=3,
        text_dim=24, freq_dim=18,
    )  # fmt: skip
    real = {
        name: tuple(tensor.shape)
        for name, tensor in WanTransformer3DModel.from_config(wan_diffusers_config(config))
        .state_dict()
        .items()
    }
    ours = wan_shapes(config)
    assert {wan_to_diffusers(name): shape for name, shape in ours.items()} == real
    assert {diffusers_to_wan(name): shape for name, shape in real.items()} == ours


def test_affine_norm3_is_diffusers_norm2() -> None:
    assert wan_to_diffusers("blocks.12.norm3.bias") == "blocks.12.norm2.bias"
    with pytest.raises(KeyError):
        diffusers_to_wan("blocks.12.norm3.bias")


@pytest.mark.parametrize(
    "name",
    ["", "blocks.0", "blocks.00.modulation", "blocks.-1.modulation", "blocks.\u0661.modulation", "head.head",
     "blocks.0.self_attn.norm_q.bias", "blocks.0.modulation.weight", "blocks.0.modulation\n", "proj_out.weight"],
)  # fmt: skip
def test_what_is_no_wan_key_is_not_translated(name: str) -> None:
    with pytest.raises(KeyError):
        wan_to_diffusers(name)


def test_parameter_count_of_the_published_models() -> None:
    # Wan 2.1 T2V: 1,418,996,800 and 14,288,491,584 parameters in the published safetensors.
    def count(preset: str) -> int:
        from math import prod

        return sum(map(prod, wan_shapes(PRESETS[preset].model).values()))

    assert count("self-forcing-1.3b") == 1_418_996_800
    assert count("wan-14b") == 14_288_491_584
