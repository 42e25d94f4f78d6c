"""The table of cases that `python -m scripts.bench` runs.

The function `run` of a case's module builds what is measured, measures it and appends the rows. It takes the options
here as attributes, beside those that every case has: `work`, `rows`, `seconds`, `prepare`, `trial` and `eager`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "kernels" / "seko_kernels"


@dataclass(frozen=True)
class Case:
    """One case.

    Parameters
    ----------
    what : str
        The rows or tables that it writes.
    module : str
        Its module, in `scripts.bench` unless it has a dot.
    options : mapping
        What is measured.
    trial : mapping or None
        In place of some options, what a CPU tries in minutes; None: nothing without a GPU.
    builds : bool
        Whether it builds something ahead (``--prepare``).
    folder : str
        Of its builds in the work folder; cases with the same share them. Default: the case's name.
    reserve_s : float
        Seconds of the budget that are kept for what ends after it.
    rows : str
        Name of the file of docs/benchmarks for its rows, if it is not this machine's.
    """

    what: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    trial: Mapping[str, Any] | None = None
    builds: bool = True
    folder: str = ""
    reserve_s: float = 0.0
    rows: str = ""


PEERS = {"peers": ("B3",), "engines": ("fp4_fp8_resident",), "extras": (), "chunks": 20}
PEERS_TRIAL = {"shapes": ("S0",), "peers": ("B0",), "engines": (), "extras": (), "chunks": 2}
VAE = {"height": None, "width": None, "fp8": False, "repeats": 20}
LINGBOT = {"preset": "lingbot-v2-fast", "chunks": 8, "latencies": 100, "openings": 5, "camera_720p": "chunk"}
LINGBOT_TRIAL = {"preset": "lingbot-tiny", "chunks": 2, "latencies": 2, "openings": 1}
# Chunks of two viewers at 480x832, where 1,200 are 480 s of video, and of all who are admitted at 320x576.
SERVE = {"preset": "self-forcing-1.3b", "misses_of": 1_200, "misses_s3_of": 3_000, "sessions_s3": 8}
SERVE |= {"overhead_seconds": 20.0}
SERVE_TRIAL = {"preset": "tiny", "misses_s3_of": 4}
WORLDS = {"chunks": 20, "presses": 50, "keys_from": 8, "sessions": 4, "misses_of": 2_000}
TINY_WORLDS = ("matrix-game-tiny", "minwm-tiny", "abot-tiny", "lingbot-tiny")
# Held-out prompts of the sample. What is on a CPU runs by the kernels' references.
QUALITY = {"sample": ROOT / "seko_export" / "sample", "device": "cpu", "prompts": 8}


def _quality(what: str, module: str, trial: Mapping[str, Any], **options: Any) -> Case:
    module = f"scripts.kv_quality.{module}"
    return Case(what, module, QUALITY | options, trial, builds=False, rows="kv-quality")


RANKS = {"preset": "wan-14b", "ranks": 2, "layers": 0, "chunks": 20, "steady": 6, "busy": 0}

CASES: Mapping[str, Case] = {
    # A pass beside the same by hand
    "peers": Case(
        "s1_*_vs_b3, e2e_s1_vs_b3, batch4_s1", "comparison",
        PEERS | {"shapes": ("S1",), "peers": ("B0", "B3"), "extras": ("batch4", "e2e"),
                 "engines": ("exact", "fp4", "fp4_fp8", "fp4_fp8_resident")},
        PEERS_TRIAL, reserve_s=20,
    ),
    "peers_tiny": Case(
        "e2e_s1_tiny_vs_b3", "comparison", PEERS | {"shapes": ("S1",), "extras": ("tiny",)}, reserve_s=20
    ),
    "peers_vae_fp8": Case(
        "e2e_s1_vae_fp8_vs_b3; wants fp8 tiles of `vae_kernels`", "comparison",
        PEERS | {"shapes": ("S1",), "extras": ("e2e", "e2e_fp8")}, reserve_s=20,
    ),
    "peers3": Case(
        "s3_vs_eager, batch4_s3", "comparison",
        PEERS | {"shapes": ("S3",), "peers": ("B0", "B3"), "extras": ("batch4",),
                 "engines": ("exact", "fp4", "fp4_fp8", "fp4_fp8_resident")},
        reserve_s=20,
    ),
    "peers14": Case(
        "s5_fp4_fp8_vs_b3", "comparison",
        PEERS | {"shapes": ("S5",), "engines": ("fp4_fp8", "fp4_fp8_resident"), "chunks": 8}, reserve_s=20,
    ),
    "peers5": Case(
        "s6_fp4_fp8_vs_b3", "comparison",
        PEERS | {"shapes": ("S6",), "engines": ("fp4_fp8", "fp4_fp8_resident"), "chunks": 8}, reserve_s=20,
    ),
    "real_peers": Case(
        "s1_vs_flashdreams, cold_vs_flashdreams; wants flashdreams and what it needs", "real_peers", {"chunks": 16}
    ),
    # From a checkpoint to frames
    "first_chunk": Case("build_s, engine_mb, first_chunk_s", "first_chunk"),
    "pipeline": Case(
        "first_frame_s, overlap_vs_none, real_time_factor", "pipeline",
        {"models": ("sample", "1.3b"), "chunks": 60, "small": False},
        {"models": ("1.3b",), "chunks": 2, "small": True},
    ),
    "fps5": Case(
        "fps_5b_704p, real_time_factor", "pipeline", {"models": ("5b",), "chunks": 20, "small": False},
        folder="pipeline5",
    ),
    "fps5_tiny": Case(
        "the same with a tiny decoder", "pipeline", {"models": ("5b-tiny",), "chunks": 20, "small": False},
        folder="pipeline5",
    ),
    "fps14": Case(
        "fps_14b_one_gpu, real_time_factor", "pipeline", {"models": ("14b",), "chunks": 20, "small": False},
        {"models": ("14b",), "chunks": 2, "small": True}, folder="pipeline14",
    ),
    "v2v": Case(
        "v2v_fps_1p3b with a tiny codec", "pipeline", {"models": ("v2v",), "chunks": 20, "small": False},
        {"models": ("v2v",), "chunks": 2, "small": True},
    ),
    "video_encode": Case(
        "taehv_encode_ms, vae_encode_ms", "video_encode",
        {"vaes": ("taew2_1", "wan-2.1"), "height": 480, "width": 832, "latents": 3, "repeats": 20},
        {"vaes": ("taew2_1", "wan-2.1-tiny"), "height": 32, "width": 48, "latents": 2, "repeats": 2},
    ),
    "abot": Case(
        "abot_fps_480, abot_fps_704", "pipeline", {"models": ("abot-480", "abot-704"), "chunks": 20, "small": False}
    ),
    "fit": Case(
        "sessions_fit_1p3b_*", "sessions_fit", {"preset": "self-forcing-1.3b", "kv": ("fp4", "bf16"), "most": 1000},
        builds=False,
    ),
    "fit14": Case(
        "sessions_fit_14b_fp4", "sessions_fit", {"preset": "wan-14b", "kv": ("fp4",), "most": 1000}, builds=False
    ),
    "small_gpus": Case(
        "fits_8gb_1p3b, fits_12gb_1p3b, fits_16gb_5b, fits_24gb_14b, fits_24gb_lingbot", "small_gpus",
        {"parts": ("8gb_1p3b", "12gb_1p3b", "16gb_5b", "24gb_14b", "24gb_lingbot"), "chunks": 12},
        {"chunks": 2},
    ),
    "threads": Case(
        "thread_soak_mismatches", "thread_soak",
        {"build": ("--preset", "sample", "--no-text", "--fp4-kv"), "chunks": 20_000, "threads": 8, "seed": 0},
        builds=False,
    ),
    # VAEs
    "vae": Case("vae_vs_eager, vae_difference", "vae", VAE | {"vae": "wan-2.1"}),
    "vae_fp8": Case("vae_fp8_vs_eager, vae_fp8_psnr", "vae", VAE | {"vae": "wan-2.1", "fp8": True}),
    "vae22": Case("vae22_vs_eager, vae_difference", "vae", VAE | {"vae": "wan-2.2"}),
    "vae22_fp8": Case("vae22_fp8_vs_eager, vae_fp8_psnr", "vae", VAE | {"vae": "wan-2.2", "fp8": True}),
    # Families at full size
    "lingbot": Case(
        "lingbot_v2_chunk_ms, lingbot_vs_compiled, lingbot_camera_share", "lingbot",
        LINGBOT | {"parts": ("chunk", "compiled", "share")},
        LINGBOT_TRIAL | {"parts": ("chunk", "compiled", "share", "key", "first_picture", "fits")},
    ),
    "lingbot_key": Case("lingbot_key_to_frame", "lingbot", LINGBOT | {"parts": ("key",)}, folder="lingbot"),
    "lingbot_picture": Case(
        "world_first_picture_s", "lingbot", LINGBOT | {"parts": ("first_picture",)}, folder="lingbot"
    ),
    "lingbot_720p": Case("lingbot_720p_fits", "lingbot", LINGBOT | {"parts": ("fits",)}, folder="lingbot"),
    "seko_talk": Case(
        "talk_*", "seko_talk",
        {"preset": "seko-talk-14b", "chunks": 8, "parts": ("step", "audio", "launches", "fits", "hybrid")},
        {"preset": "seko-talk-tiny", "chunks": 2},
    ),
    "voxcpm2": Case(
        "vox_*", "voxcpm2", {"preset": "voxcpm2", "parts": ("peers", "step", "talk", "fp8"), "first_sounds": 103},
        builds=False,
    ),
    "matrix_game": Case(
        "mg2_fps, mg2_step_vs_compiled, serve_key_to_picture, serve_key_to_shown", "worlds",
        WORLDS | {"preset": "matrix-game-2-universal", "parts": ("fps", "fps_parts", "compiled", "key", "played")},
        {"preset": "matrix-game-tiny", "chunks": 1, "presses": 2, "keys_from": 1, "sessions": 2, "misses_of": 4,
         "parts": ("fps", "fps_parts", "compiled", "key", "played", "sessions")},
    ),
    "matrix_game_kernels": Case(
        "no row: where the time of a chunk goes, by kernels", "worlds",
        WORLDS | {"preset": "matrix-game-2-universal", "parts": ("kernels",)},
        {"preset": "matrix-game-tiny", "chunks": 2}, folder="matrix_game",
    ),
    "minwm": Case(
        "minwm_fps", "worlds", WORLDS | {"preset": "minwm-camera-1.3b", "parts": ("fps",)},
        {"preset": "minwm-tiny", "chunks": 2},
    ),
    "liveframe": Case(
        "liveframe_failures, of tiny models of random weights on any machine; wants liveframe[world]", "liveframe",
        {"models": TINY_WORLDS}, {}, builds=False,
    ),
    "worlds_sessions": Case(
        "worlds_sessions, worlds_misses", "worlds",
        WORLDS | {"preset": "matrix-game-2-universal", "parts": ("sessions",)},
        folder="matrix_game",
    ),
    "loops": Case(
        "context_reuse_vs_pass, v2v_fps_1p3b with Wan's VAE, rolling_fps, krea14_fps", "loops",
        {"preset": "self-forcing-1.3b", "chunks": 20, "parts": ("reuse", "video_in", "rolling", "krea")},
        {"preset": "tiny", "chunks": 2},
    ),
    # The server
    "serve": Case(
        "serve_overhead, serve_misses, serve_misses_s3, serve_encode_cores, of fewer chunks", "serve_full",
        SERVE | {"parts": ("overhead", "misses", "s3", "encode"), "misses_of": 350, "misses_s3_of": 800},
        SERVE_TRIAL | {"parts": ("s3", "encode")},
    ),
    "serve_misses": Case("serve_misses", "serve_full", SERVE | {"parts": ("misses",)}, folder="serve"),
    "serve_s3": Case("serve_misses_s3", "serve_full", SERVE | {"parts": ("s3",)}, folder="serve"),
    "serve_encode": Case(
        "serve_encode_cores, on any machine", "serve_full", SERVE | {"parts": ("encode",)}, builds=False
    ),
    # Several GPUs
    "ranks": Case(
        "spN_s1, spN_s1_rank_skew_ms, sp_equal, sp_busy_p99: of ONE and SEVERAL in the work folder", "ranks",
        RANKS | {"parts": ("artifacts",)}, builds=False, folder="ranks",
    ),
    "ranks_drawn": Case(
        "spN_s5, spN_s5_rank_skew_ms, sp_equal", "ranks", RANKS | {"parts": ("drawn",)},
        {"preset": "tiny", "steady": 2}, folder="ranks",
    ),
    "ranks_video": Case(
        "spN_14b_fps", "ranks", RANKS | {"parts": ("video",)}, {"preset": "tiny", "steady": 2}, folder="ranks",
    ),
    "ranks_lingbot": Case(
        "lingbot_fps_Ngpu", "ranks", RANKS | {"preset": "lingbot-v2-fast", "parts": ("lingbot",)},
        {"preset": "lingbot-tiny", "steady": 2}, folder="ranks",
    ),
    "ranks_talk": Case(
        "talk_realtime_Ngpu", "ranks", RANKS | {"preset": "seko-talk-14b", "parts": ("talk",)},
        {"preset": "seko-talk-tiny", "steady": 2}, folder="ranks",
    ),
    "ranks_exchange": Case(
        "spN_exchange", "ranks", RANKS | {"parts": ("exchange",)}, {}, builds=False, folder="ranks",
    ),
    "ranks_decode": Case(
        "spN_vae", "ranks", RANKS | {"parts": ("decode",), "vae": "wan-2.1", "height": 480, "width": 832},
        {"vae": "wan-2.1-tiny", "height": 32, "width": 64, "steady": 2}, folder="ranks",
    ),
    # What is lost by rounding, on the sample
    "quality": _quality(
        "kv_*, and the pictures of docs/kv-quality.md", "caches",
        {"device": "cpu", "prompts": 1, "chunks": (2, 4), "kv": ("fp4",), "captured_prompts": 1, "captured_chunk": 4,
         "pictures": None},
        device="cuda", prompts=200, batch=200, chunks=(7, 20, 100), kv=None, captured_prompts=8, captured_chunk=19,
        pictures=ROOT / "docs" / "images",
    ),
    "quality_fused": _quality(
        "fused_step_error, fused_psnr_loss, fused_following", "fp8_attention", {"prompts": 2, "chunks": 2},
        prompts=72, chunks=7,
    ),
    "quality_reuse": _quality(
        "context_latent_error, context_following", "context_reuse", {"prompts": 1, "chunks": 5}, chunks=20
    ),
    "quality_past": _quality(
        "past_step_error, past_following", "sparse_past", {"prompts": 1, "chunks": 9}, prompts=3, chunks=10
    ),
    "quality_sink": _quality(
        "averaged_sink_*", "averaged_sink", {"prompts": 1, "chunks": 4}, prompts=4, chunks=20
    ),
    "quality_vae_fp8": _quality(
        "vae_fp8_psnr of the sample's decoder", "fp8_vae", {"prompts": 1, "chunks": 1}, prompts=4, chunks=2
    ),
    # Tables of tile sizes, which builds read
    "kernels": Case(
        "attn_*_vs_cudnn; tuned_attention.json, tuned_attention_bf16.json", "kernels", {"shapes": ("S1", "S5", "S3")},
        builds=False, reserve_s=60,
    ),
    "vae_kernels": Case(
        "tuned_conv.json; before `vae`, whose engines read it", "vae_kernels",
        {"vae": "wan-2.1", "height": 480, "width": 832, "latents": 3, "calls": ("steady", "first"), "fp8": True,
         "tiles": 12, "admit": TABLES / "tuned_conv.json"},
        {"vae": "lightvae", "height": 8, "width": 8, "latents": 1, "calls": ("steady",), "fp8": False, "tiles": 1,
         "admit": None},
        builds=False, reserve_s=40,
    ),
    "voxcpm2_kernels": Case(
        "tuned_rows.json", "voxcpm2_kernels", {"admit": TABLES / "tuned_rows.json"}, builds=False, reserve_s=310
    ),
    # This checkout on a CPU
    "import": Case(
        "import_ms, first_line_ms", "import_time", {"runs": 40, "command_runs": 5}, {"runs": 1, "command_runs": 1},
        builds=False,
    ),
    "suite": Case("quickstart_s, test_s, test_per_quickstart", "suite_time", {"tiers": ("fast", "all")}, builds=False),
}  # fmt: skip
