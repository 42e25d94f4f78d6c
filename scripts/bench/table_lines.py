"""What the tables in plain words say: of which rows, and in which words. `table.py` writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LARGE = "S1: self-forcing-1.3b, 480x832, chunk 3, ring 21"
HUGE = "S5: wan-14b, 480x832, chunk 3, ring 21"
FLASHDREAMS = "beside flashdreams 0.1.0"
SMALL = "S3: self-forcing-1.3b, 320x576, chunk 3, ring 12"
WORLD = "lingbot-v2-fast, 480x832, chunk 4, ring 12, sink 6, fp4 cache, fp8 matmuls, resident window"
FAST_14B = f"{HUGE}, B=1, fp4_fp8_resident, context reuse, past share 0.4, Wan VAE"
TALK = (
    "seko-talk-14b, 832x480, chunk 3, ring 20, sink 1, reference 1, 4 passes, fp4 cache, fp8 matmuls, fp8 attention, "
    "sessions 1"
)
FIT = "self-forcing-1.3b, --chunk-frames 3 --sink-frames 1 --ring-frames 21 --pass-caches"
# Figures in plain words, as README has them: text, format of the values, and (file, figure, shape) of each.
FigureLine = tuple[str, str, tuple[tuple[str, str, str], ...]]
FIGURES: tuple[FigureLine, ...] = (
    (
        "time of a chunk of the 1.3B model, exact cache; flashdreams = 1",
        "{:.2f}",
        (("h200", "s1_vs_flashdreams", f"{LARGE}, exact, {FLASHDREAMS}"),),
    ),
    (
        "the same over an FP4 cache, with fp8 matmuls and cached frames held in 8 bits during a chunk "
        "(`--fp8 --resident-window`)",
        "{:.2f}",
        (("h200", "s1_vs_flashdreams", f"{LARGE}, fp4_fp8_resident, {FLASHDREAMS}"),),
    ),
    (
        "video frames a second on four GPUs, over an FP4 cache, with fp8 matmuls and Wan's VAE: the 14B model, and "
        "lingbot-v2-fast",
        "{:.0f} and {:.0f}",
        (
            ("h200", "sp4_14b_fps", "wan-14b, FP4, fp8, resident window, Wan's VAE, 4 GPUs"),
            ("h200", "lingbot_fps_4gpu", "lingbot-v2-fast, FP4, fp8, resident window, Wan's VAE, 4 GPUs"),
        ),
    ),
    (
        "sessions of the 1.3B model that fit on the GPU, without VAE and text encoder, a cache for each of "
        "four passes: FP4, and bf16",
        "{:.0f} and {:.0f}",
        (
            ("h200", "sessions_fit_1p3b_fp4", f"{FIT}, fp4"),
            ("h200", "sessions_fit_1p3b_bf16", f"{FIT}, bf16"),
        ),
    ),
)
# Absolute figures of the same model and GPU: text, what makes the shown value of a row, and the row.
Shown = tuple[str, Callable[[dict[str, Any]], str], tuple[str, str, str]]
ABSOLUTE: tuple[Shown, ...] = (
    (
        "video frames a second, with Wan's VAE",
        lambda row: f"{12e3 / row['overlapped_ms']:.0f}",
        ("h200", "e2e_s1_vs_b3", f"{LARGE}, 12 video frames, fp4_fp8_resident"),
    ),
    (
        "ms for a chunk of 12 video frames",
        lambda row: f"{row['overlapped_ms']:.0f}",
        ("h200", "e2e_s1_vs_b3", f"{LARGE}, 12 video frames, fp4_fp8_resident"),
    ),
    (
        "ms from a new process (torch imported) to the first video frames on the host",
        lambda row: f"{1e3 * row['value']:.0f}",
        ("h200", "first_frame_s", "S1: 1.3B, 480x832, chunk 3, ring 21, B=1, fp4, Wan VAE"),
    ),
    (
        "seconds from the start of a process to its first chunk; flashdreams, which compiles then",
        lambda row: f"{row['own']['cold_s']:.1f}; {row['peer']['cold_s']:.0f}",
        ("h200", "cold_vs_flashdreams", f"{LARGE}, fp4_fp8_resident, {FLASHDREAMS}"),
    ),
    (
        "GB of KV cache a session; exact cache",
        lambda row: f"{row['engine_kv_bytes'] / 1e9:.1f}; {row['peer_kv_bytes'] / 1e9:.1f}",
        ("h200", "s1_fp4_fp8_vs_b3", f"{LARGE}, fp4_fp8_resident"),
    ),
)
# What docs/performance.md says in its first table besides.
MORE: tuple[FigureLine, ...] = (
    (
        "time of a pass of the 1.3B model, exact cache; by hand = 1",
        "{:.2f}",
        (("h200", "s1_exact_vs_b3", f"{LARGE}, exact"),),
    ),
    (
        "the same over an FP4 cache",
        "{:.2f}",
        (("h200", "s1_fp4_vs_b3", f"{LARGE}, fp4"),),
    ),
    (
        "the same with fp8 matmuls and cached frames held in 8 bits during a chunk (`--fp8 --resident-window`)",
        "{:.2f}",
        (("h200", "s1_fp4_fp8_vs_b3", f"{LARGE}, fp4_fp8_resident"),),
    ),
    (
        "the last line for the 14B model",
        "{:.2f}",
        (("h200", "s5_fp4_fp8_vs_b3", f"{HUGE}, fp4_fp8_resident"),),
    ),
    (
        "time of a chunk with its video frames by Wan's VAE, 1.3B, same options; by hand with an eager VAE = 1",
        "{:.2f}",
        (("h200", "e2e_s1_vs_b3", f"{LARGE}, 12 video frames, fp4_fp8_resident"),),
    ),
    (
        "seconds until the first chunk of the 1.3B model over an FP4 cache, after torch was imported",
        "{:.1f}",
        (("h200", "first_chunk_s", "S1: 1.3B, 480x832, chunk 3, ring 21, B=1, fp4"),),
    ),
    (
        "seconds of video in a second, the 1.3B model over an FP4 cache with Wan's VAE",
        "{:.1f}",
        (("h200", "real_time_factor", "S1: 1.3B, 480x832, chunk 3, ring 21, B=1, fp4, Wan VAE"),),
    ),
)
# Goals that were missed, the same way; the goal is the row's.
MISSED: tuple[FigureLine, ...] = (
    (
        "time of a pass of the 1.3B model over an FP4 cache, fp8 matmuls, no resident window; by hand = 1",
        "{:.3f}",
        (("h200", "s1_fp4_fp8_vs_b3", f"{LARGE}, fp4_fp8"),),
    ),
    (
        "the same with a resident window",
        "{:.3f}",
        (("h200", "s1_fp4_fp8_vs_b3", f"{LARGE}, fp4_fp8_resident"),),
    ),
    (
        "a chunk with its video frames, FP4 cache, fp8 matmuls, no resident window; by hand with an eager VAE = 1",
        "{:.3f}",
        (("h200", "e2e_s1_vs_b3", f"{LARGE}, 12 video frames, fp4_fp8"),),
    ),
    (
        "decoding a steady chunk by the VAE of Wan 2.2 5B, 704x1280; eager diffusers = 1",
        "{:.3f}",
        (("h200", "vae22_vs_eager", "Wan 2.2 VAE, 704x1280, 4 latents, bf16"),),
    ),
    (
        "seconds until the first chunk of the 1.3B model over an FP4 cache, after torch was imported",
        "{:.2f}",
        (("h200", "first_chunk_s", "S1: 1.3B, 480x832, chunk 3, ring 21, B=1, fp4"),),
    ),
    (
        "the same over an exact cache",
        "{:.2f}",
        (("h200", "first_chunk_s", "S1: 1.3B, 480x832, chunk 3, ring 21, B=1, bf16"),),
    ),
    (
        "MB of engines of the 1.3B model with an FP4 cache",
        "{:.1f}",
        (("h200", "engine_mb", "S1: 1.3B, 480x832, chunk 3, ring 21, B=1, fp4"),),
    ),
    (
        "the 14B model on one GPU (480x832, Wan's VAE; FP4 cache, fp8, the last pass's cache kept, 0.4 of the past): "
        "video frames a second",
        "{:.1f}",
        (("h200", "fps_14b_one_gpu", FAST_14B),),
    ),
    (
        "the same as seconds of video in a second",
        "{:.2f}",
        (("h200", "real_time_factor", FAST_14B),),
    ),
    (
        "Seko-Talk: time of a step; compiled and captured by hand = 1",
        "{:.3f}",
        (("h200", "talk_step_vs_compiled", TALK),),
    ),
    (
        "small videos (1.3B, 320x576, window 12): time of a pass, eager PyTorch = 1, at best",
        "{:.2f}",
        (("h200", "s3_vs_eager", f"{SMALL}, fp4_fp8"),),
    ),
    (
        "the same over an FP4 cache, with matmuls in bf16",
        "{:.2f}",
        (("h200", "s3_vs_eager", f"{SMALL}, fp4"),),
    ),
    (
        "the same over an exact cache",
        "{:.2f}",
        (("h200", "s3_vs_eager", f"{SMALL}, exact"),),
    ),
    (
        "seconds of video in a second, the 5B model (704x1280, 24 frames a second; FP4 cache, fp8 matmuls, resident "
        "window), with its own VAE",
        "{:.2f}",
        (
            (
                "h200",
                "real_time_factor",
                "S6: wan-5b, 704x1280, chunk 8, sink 8, ring 24, B=1, fp4_fp8_resident, Wan 2.2 VAE, 4 steps",
            ),
        ),
    ),
    (
        "four small videos in one call; four calls = 1",
        "{:.3f}",
        (("h200", "batch4_s3", f"{SMALL}, B=4, fp4_fp8_resident"),),
    ),
    (
        "PSNR that the sample loses by fp8 matmuls, dB",
        "{:.1f}",
        (("kv-quality", "fused_psnr_loss", "sample, fp4, 8-bit attention and fp8 matmuls, after 7 chunks"),),
    ),
    (
        "share of prompts that the sample no longer follows with an FP4 cache, at a stream's end, %",
        "{:.1f}",
        (("kv-quality", "kv_following_loss", "sample, fp4-before-rope, end of the stream"),),
    ),
    (
        "the same with an fp8 cache",
        "{:.1f}",
        (("kv-quality", "kv_following_loss", "sample, fp8-before-rope, end of the stream"),),
    ),
    (
        "the same with keys in fp8 behind RoPE",
        "{:.1f}",
        (("kv-quality", "kv_following_loss", "sample, fp8, end of the stream"),),
    ),
    (
        "the same with keys in FP4 behind RoPE, at a stream's start",
        "{:.1f}",
        (("kv-quality", "kv_following_loss", "sample, fp4, start of the stream"),),
    ),
    (
        "the same with a cache in int4 behind a Hadamard transform",
        "{:.1f}",
        (("kv-quality", "kv_following_loss", "sample, int4-hadamard-before-rope, end of the stream"),),
    ),
    (
        "share of prompts, changed after 3 s of a stream, that the quick start's artifact follows",
        "{:.2f}",
        (("cpu", "switches_followed", "sample, 100 held-out pairs of prompts, the cache rebuilt"),),
    ),
    (
        "a chunk of lingbot-v2-fast whose camera is computed in every pass, ms",
        "{:.0f}",
        (("h200", "lingbot_v2_chunk_ms", f"{WORLD}, camera once a pass"),),
    ),
    (
        "seconds from a new start picture to the first frames, lingbot-v2-fast",
        "{:.2f}",
        (("h200", "world_first_picture_s", f"{WORLD}, camera once a chunk"),),
    ),
    (
        "a step on one GPU divided by that on two: 1.3B, plain layers",
        "{:.2f}",
        (("h200", "sp2_s1", "self-forcing-1.3b-bf16-sm_90, 2 GPUs"),),
    ),
    (
        "the same for 14B, FP4 cache, fp8",
        "{:.3f}",
        (("h200", "sp2_s5", "wan-14b, 40 layers, FP4, fp8, resident window, 2 GPUs"),),
    ),
    (
        "a step on one GPU divided by that on four: 1.3B, plain layers",
        "{:.2f}",
        (("h200", "sp4_s1", "self-forcing-1.3b-bf16-sm_90, 4 GPUs"),),
    ),
    (
        "the same for 14B, FP4 cache, fp8",
        "{:.2f}",
        (("h200", "sp4_s5", "wan-14b, 40 layers, FP4, fp8, resident window, 4 GPUs"),),
    ),
    (
        "video frames a second of the 14B model on four GPUs, with Wan's VAE",
        "{:.1f}",
        (("h200", "sp4_14b_fps", "wan-14b, FP4, fp8, resident window, Wan's VAE, 4 GPUs"),),
    ),
    (
        "two GPUs beside busy cores: time of a chunk, 99 of 100; its median = 1",
        "{:.2f}",
        (("h200", "sp_busy_p99", "self-forcing-1.3b-bf16-sm_90, 2 GPUs"),),
    ),
    (
        "the same on four GPUs",
        "{:.2f}",
        (("h200", "sp_busy_p99", "self-forcing-1.3b-bf16-sm_90, 4 GPUs"),),
    ),
    (
        "speech, one row: time of a step; reading its weights once = 1",
        "{:.2f}",
        (("h200", "vox_step_vs_floor", "voxcpm2"),),
    ),
    (
        "the same; the step compiled and captured by hand = 1",
        "{:.2f}",
        (("h200", "vox_step_vs_compiled", "voxcpm2"),),
    ),
    (
        "the same with fp8 weights; in bf16 = 1",
        "{:.2f}",
        (("h200", "vox_fp8_step_vs_bf16", "voxcpm2"),),
    ),
    (
        "speech, 64 rows: time of a step; the captured step = 1",
        "{:.2f}",
        (("h200", "vox_b64_vs_captured", "voxcpm2"),),
    ),
    (
        "speech, one row: seconds for a second of sound",
        "{:.4f}",
        (("h200", "vox_rtf_b1", "voxcpm2"),),
    ),
    (
        "speech: first sound beside 32 sessions that speak, ms, 99 of 100",
        "{:.0f}",
        (("h200", "vox_first_audio_busy_ms", "voxcpm2"),),
    ),
    (
        "simulated fleet: points between the shares of chunks in time of the simulation and of three boxes",
        "{:.1f}",
        (
            (
                "cpu",
                "fleet_simulated_cpr",
                "three boxes of the toy model, 300 viewers, 1.5 a second, 6 s, 1 collected, 2 runs",
            ),
        ),
    ),
    (
        "the same for 60 viewers, one run, before the simulation knew variants of a launch",
        "{:.1f}",
        (
            (
                "cpu",
                "fleet_simulated_cpr",
                "three boxes of the toy model, 60 viewers, 0.6 a second, 20 s, 1 collected",
            ),
        ),
    ),
    (
        "processor time until `seko-export plan` prints its first line, ms",
        "{:.0f}",
        (("cpu", "first_line_ms", "seko-export plan"),),
    ),
    (
        "the same of `seko-export --help`, ms",
        "{:.0f}",
        (("cpu", "first_line_ms", "seko-export --help"),),
    ),
    (
        "all tests; the quick start = 1",
        "{:.1f}",
        (("cpu", "test_per_quickstart", "bash scripts/test.sh --all"),),
    ),
)
MORE_IS_BETTER = {
    "vae_fp8_psnr",
    "fleet_overhead",
    "prompts_followed",
    "switches_followed",
    "kv_psnr",
    "real_time_factor",
    "abot_fps_480",
    "abot_fps_704",
    "fps_14b_one_gpu",
    "krea14_fps",
    "mg2_fps",
    "minwm_fps",
    "v2v_fps_1p3b",
    "worlds_sessions",
    "serve_overhead",
    "sp2_s1",
    "sp4_s1",
    "sp2_s5",
    "sp4_s5",
    "sp4_vae",
    "sp4_14b_fps",
    "lingbot_fps_4gpu",
    "talk_realtime_4gpu",
    "talk_sessions_fit",
    "talk_hybrid_sessions_fit",
}
