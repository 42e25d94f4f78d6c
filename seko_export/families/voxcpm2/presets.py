"""Presets of VoxCPM2: the public model, and a tiny one for tests."""

from __future__ import annotations

from dataclasses import replace

from seko_export.families.voxcpm2.config import LongRope, NetConfig, VoxCpm2Config
from seko_export.media.audio_vae.config import AudioVaeConfig

FULL, TINY = "voxcpm2", "voxcpm2-tiny"
# The public config.json, which has the same factors for short and long.
# fmt: off
_FACTORS = (
    0.9977997200264581, 1.014658295992452, 1.0349680404997148, 1.059429246056193,
    1.0888815016813513, 1.1243301355211495, 1.166977103606075, 1.2182568066927284,
    1.2798772354275727, 1.3538666751582975, 1.4426259039919596, 1.5489853358570191,
    1.6762658237220625, 1.8283407612492941, 2.0096956085876183, 2.225478927469756,
    2.481536379650452, 2.784415934557119, 3.1413289096347365, 3.560047844772632,
    4.048719380066383, 4.615569542115128, 5.2684819496549835, 6.014438591970396,
    6.858830049237097, 7.804668263503327, 8.851768731513417, 9.99600492938444,
    11.228766118181639, 12.536757560834843, 13.902257701387796, 15.303885189125953,
    16.717837610115794, 18.119465097853947, 19.484965238406907, 20.792956681060105,
    22.02571786985731, 23.16995406772833, 24.217054535738416, 25.16289275000465,
    26.007284207271347, 26.753240849586767, 27.40615325712662, 27.973003419175363,
    28.461674954469114, 28.880393889607006, 29.237306864684626, 29.540186419591297,
    29.79624387177199, 30.01202719065413, 30.193382037992453, 30.34545697551969,
    30.47273746338473, 30.579096895249787, 30.66785612408345, 30.741845563814174,
    30.80346599254902, 30.85474569563567, 30.897392663720595, 30.932841297560394,
    30.962293553185553, 30.986754758742034, 31.007064503249293, 31.02392307921529,
)
# fmt: on


_BASE = NetConfig(28, 2048, 6144, heads=16, kv_heads=2, head_dim=128, norm_eps=1e-5)
_LOCAL = NetConfig(12, 1024, 4096, heads=16, kv_heads=2, head_dim=128, norm_eps=1e-5)
_TINY_BASE = NetConfig(2, 64, 96, heads=4, kv_heads=2, head_dim=16, norm_eps=1e-5)
_TINY_LOCAL = NetConfig(2, 32, 48, heads=4, kv_heads=2, head_dim=16, norm_eps=1e-5)

PRESETS: dict[str, VoxCpm2Config] = {
    FULL: VoxCpm2Config(
        name=FULL,
        vocab_size=73_448,
        base=_BASE,
        residual=replace(_BASE, layers=8),
        encoder=_LOCAL,
        decoder=_LOCAL,
        rope=LongRope(10_000.0, _FACTORS, _FACTORS, max_positions=32_768, original_positions=32_768),
    ),
    TINY: VoxCpm2Config(
        name=TINY,
        vocab_size=512,
        base=_TINY_BASE,
        residual=_TINY_BASE,
        encoder=_TINY_LOCAL,
        decoder=_TINY_LOCAL,
        rope=LongRope(
            10_000.0,
            tuple(1 + pair / 16 for pair in range(8)),
            tuple(1 + pair / 8 for pair in range(8)),
            max_positions=2048,
            original_positions=2048,
        ),
        fsq_dim=16,
        max_length=2048,
        dtype="float32",
        vae=AudioVaeConfig(
            encoder_dim=4, encoder_rates=(2, 2), latent_dim=8, decoder_dim=16, decoder_rates=(2, 3)
        ),
    ),
}
