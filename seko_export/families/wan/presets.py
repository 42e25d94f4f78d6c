"""Wan's presets: published models with Wan's layers, each with its authors' stream layout and passes, and a tiny model
for tests."""

from __future__ import annotations

from dataclasses import replace

from seko_export.config.model import ModelConfig
from seko_export.config.schedule import USUAL_STEPS, Schedule
from seko_export.config.stream import REBUILD, StreamConfig
from seko_export.families.video import FOR_TESTS, NUMBERS_READ, Preset
from seko_export.families.wan_layout.recognise import USUAL_STREAM, USUAL_STREAM_2_2

# Rolling Forcing: attention sees 21 frames, the sink and the chunks of a pass among them.
_ROLLING_STREAM = replace(USUAL_STREAM, sink_frames=3, rolling=True)
# StreamDiffusionV2, as its fast configuration: a window of five frames, of which two stay
_VIDEO_TO_VIDEO_STREAM = replace(
    USUAL_STREAM,
    chunk_frames=1,
    sink_frames=2,
    ring_frames=3,
    pass_caches=True,
    strength=0.8,
    motion_strength=True,
)
_VIDEO_TO_VIDEO_PASSES = Schedule.trained((700.0, 500.0), 8.0)
_VIDEO_TO_VIDEO_NEEDS = "--vae Wan2.1_VAE.pth: a video as input, whose latents each chunk begins with"
_VIDEO_TO_VIDEO_UNVERIFIED = (
    f"{NUMBERS_READ}. Left out: a sink that takes new frames unlike it (sink 3 of 6), a jump of positions at frame 50, "
    "and the first chunk of two frames, which are two chunks here"
)


def _wan_1_3b(name: str) -> ModelConfig:
    return ModelConfig(name=name, layers=30, dim=1536, heads=12, ffn_dim=8960)


def _wan_14b(name: str) -> ModelConfig:
    return ModelConfig(name=name, layers=40, dim=5120, heads=40, ffn_dim=13824)


def _wan_5b(name: str) -> ModelConfig:
    return ModelConfig(
        name=name, layers=30, dim=3072, heads=24, ffn_dim=14336, in_channels=48, out_channels=48
    )


# Of models with the same sizes, the first is taken where neither the file's name nor its config.json tells them apart.
PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        ModelConfig(
            name="tiny", layers=2, dim=256, heads=2, ffn_dim=512, text_dim=64, text_tokens=32, freq_dim=64
        ),
        StreamConfig(height=64, width=96, chunk_frames=3, sink_frames=1, ring_frames=6),
        source=FOR_TESTS,
    ),
    "wan-5b-tiny": Preset(
        ModelConfig(
            name="wan-5b-tiny",
            layers=2,
            dim=384,
            heads=3,
            ffn_dim=512,
            in_channels=48,
            out_channels=48,
            text_dim=64,
            text_tokens=32,
            freq_dim=64,
        ),
        replace(USUAL_STREAM_2_2, height=64, width=96, chunk_frames=2, sink_frames=2, ring_frames=4),
        source="for tests of latents of Wan 2.2; it has no weights but random ones",
    ),
    "self-forcing-1.3b": Preset(
        _wan_1_3b("self-forcing-1.3b"),
        USUAL_STREAM,
        entry="generator_ema",
        files=("self_forcing_dmd.pt",),
        source="gdhe17/Self-Forcing, checkpoints/self_forcing_dmd.pt; code guandeh17/Self-Forcing",
        unverified=NUMBERS_READ,
    ),
    "infinity-rope-1.3b": Preset(
        _wan_1_3b("infinity-rope-1.3b"),
        replace(USUAL_STREAM, sink_frames=1, ring_frames=5, window_positions=True),
        entry="generator_ema",
        source="code yesiltepe-hidir/infinity-rope (Apache-2.0), which runs Self-Forcing's weights",
        needs="--preset infinity-rope-1.3b with self_forcing_dmd.pt, or --entry generator with Causal-Forcing's",
        unverified=f"{NUMBERS_READ}; its cuts, which leave three frames in the cache, are not built",
    ),
    "causvid-1.3b": Preset(
        _wan_1_3b("causvid-1.3b"),
        USUAL_STREAM,
        Schedule.trained((1000.0, 757.0, 522.0), 8.0),
        entry="generator",
        files=("autoregressive_checkpoint/model.pt",),
        source="tianweiy/CausVid, autoregressive_checkpoint/model.pt (CC BY-NC-SA 4.0)",
        unverified=NUMBERS_READ,
    ),
    "causal-forcing-1.3b": Preset(
        _wan_1_3b("causal-forcing-1.3b"),
        USUAL_STREAM,
        entry="generator",
        files=("chunkwise/causal_forcing.pt",),
        source="zhuhz22/Causal-Forcing, chunkwise/causal_forcing.pt; code thu-ml/Causal-Forcing (Apache-2.0)",
        unverified=NUMBERS_READ,
    ),
    "causal-forcing-framewise-1.3b": Preset(
        _wan_1_3b("causal-forcing-framewise-1.3b"),
        replace(USUAL_STREAM, chunk_frames=1),
        entry="generator_ema",
        files=("framewise/causal_forcing.pt",),
        source="zhuhz22/Causal-Forcing, framewise/causal_forcing.pt; code thu-ml/Causal-Forcing (Apache-2.0)",
        unverified=NUMBERS_READ,
    ),
    "causal-forcing-pp-1.3b": Preset(
        _wan_1_3b("causal-forcing-pp-1.3b"),
        replace(USUAL_STREAM, chunk_frames=1),
        Schedule.warped((1000.0, 500.0), first_steps=USUAL_STEPS),
        entry="generator_ema",
        files=("causal-forcing++/framewise-2step.pt",),
        source="zhuhz22/Causal-Forcing, causal-forcing++/framewise-2step.pt (Apache-2.0)",
        unverified=NUMBERS_READ,
    ),
    "causal-forcing-pp-1step-1.3b": Preset(
        _wan_1_3b("causal-forcing-pp-1step-1.3b"),
        replace(USUAL_STREAM, chunk_frames=1),
        Schedule.warped((1000.0,), first_steps=USUAL_STEPS),
        entry="generator_ema",
        files=("causal-forcing++/framewise-1step.pt",),
        source="zhuhz22/Causal-Forcing, causal-forcing++/framewise-1step.pt (Apache-2.0)",
        unverified=NUMBERS_READ,
    ),
    "longlive-1.3b": Preset(
        _wan_1_3b("longlive-1.3b"),
        replace(USUAL_STREAM, sink_frames=3, ring_frames=9),
        entry="generator",
        files=("longlive_base.pt",),
        source="Efficient-Large-Model/LongLive-1.3B, models/longlive_base.pt; code NVlabs/LongLive v1.0 (Apache-2.0)",
        needs="--lora models/lora.pt of the same repository",
        lora="lora.pt",
        unverified=f"{NUMBERS_READ}; MemFlow's files have the same keys",
    ),
    "memflow-1.3b": Preset(
        _wan_1_3b("memflow-1.3b"),
        replace(USUAL_STREAM, sink_frames=3, ring_frames=9),
        entry="generator",
        files=("MemFlow/base.pt",),
        source="KlingTeam/MemFlow, base.pt and lora.pt (Apache-2.0)",
        unverified=NUMBERS_READ,
        missing="a bank of three frames in the cache, which attention's scores for the prompt choose from evicted ones",
    ),
    "reward-forcing-1.3b": Preset(
        _wan_1_3b("reward-forcing-1.3b"),
        replace(USUAL_STREAM, sink_frames=3, ring_frames=6, window_positions=True, sink_average=0.001),
        entry="generator_ema",
        files=("rewardforcing.pt",),
        source="rewardforcing.pt, as daydreamlive/scope loads it; code JaydenLyh/Reward-Forcing (Apache-2.0)",
        unverified=NUMBERS_READ,
    ),
    "rolling-forcing-1.3b": Preset(
        _wan_1_3b("rolling-forcing-1.3b"),
        _ROLLING_STREAM,
        Schedule.warped((1000.0,), first_steps=(1000.0, 800.0, 600.0, 400.0, 200.0)),
        entry="generator_ema",
        files=("rolling_forcing_dmd.pt",),
        source="TencentARC/RollingForcing, rolling_forcing_dmd.pt; code of the same name (academic use)",
        unverified=NUMBERS_READ,
    ),
    "causal-forcing-long-1.3b": Preset(
        _wan_1_3b("causal-forcing-long-1.3b"),
        _ROLLING_STREAM,
        Schedule.warped((1000.0,), first_steps=USUAL_STEPS),
        entry="generator_ema",
        files=("chunkwise/longvideo.pt",),
        source="zhuhz22/Causal-Forcing, chunkwise/longvideo.pt; code thu-ml/Causal-Forcing, long_video (academic use)",
        unverified=NUMBERS_READ,
    ),
    "streamdiffusion-v2-1.3b": Preset(
        _wan_1_3b("streamdiffusion-v2-1.3b"),
        _VIDEO_TO_VIDEO_STREAM,
        _VIDEO_TO_VIDEO_PASSES,
        entry="generator",
        files=("wan_causal_dmd_v2v/model.pt",),
        source="jerryfeng/StreamDiffusionV2, wan_causal_dmd_v2v/model.pt (code Apache-2.0)",
        needs=_VIDEO_TO_VIDEO_NEEDS,
        unverified=_VIDEO_TO_VIDEO_UNVERIFIED,
    ),
    "wan-5b": Preset(
        _wan_5b("wan-5b"),
        USUAL_STREAM_2_2,
        source="Wan-AI/Wan2.2-TI2V-5B (Apache-2.0)",
        unverified="a good video: it was not trained for chunks",
    ),
    "longlive-2-5b": Preset(
        _wan_5b("longlive-2-5b"),
        USUAL_STREAM_2_2,
        Schedule.unipc(),
        entry="generator",
        files=("model_bf16.pt",),
        source="Efficient-Large-Model/LongLive-2.0-5B, model_bf16.pt; code NVlabs/LongLive (Apache-2.0)",
        unverified=NUMBERS_READ,
    ),
    "wan-14b": Preset(
        _wan_14b("wan-14b"),
        USUAL_STREAM,
        source="Wan-AI/Wan2.1-T2V-14B (Apache-2.0), or a causal model with its keys",
        unverified="a good video: it was not trained for chunks. Causal models of this size have streams of their own",
    ),
    "streamdiffusion-v2-14b": Preset(
        _wan_14b("streamdiffusion-v2-14b"),
        _VIDEO_TO_VIDEO_STREAM,
        _VIDEO_TO_VIDEO_PASSES,
        entry="generator",
        files=("wan_causal_dmd_v2v_14b/model.pt",),
        source="jerryfeng/StreamDiffusionV2, wan_causal_dmd_v2v_14b/model.pt (code Apache-2.0)",
        needs=_VIDEO_TO_VIDEO_NEEDS,
        unverified=_VIDEO_TO_VIDEO_UNVERIFIED,
    ),
    "krea-14b": Preset(
        _wan_14b("krea-14b"),
        replace(USUAL_STREAM, sink_frames=3, ring_frames=3, window_positions=True, context=REBUILD),
        Schedule.trained((1000.0, 937.0, 833.0, 625.0), 5.0),
        files=("krea-realtime-video-14b.safetensors",),
        source="krea/krea-realtime-video, krea-realtime-video-14b.safetensors (CC BY-NC-SA 4.0)",
        needs="--vae Wan2.1_VAE.pth, which encodes a frame of the video again before each chunk",
        unverified=NUMBERS_READ,
    ),
}
