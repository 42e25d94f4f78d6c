"""Write docs/evidence.md: for each feature the best that was shown of it, from the marks of tests and measured rows.

    python -m scripts.evidence

A test that shows a feature carries ``@pytest.mark.shows("FEATURE")``. A test that builds what nothing here can run says
``shows("FEATURE", "built")``, and one of code whose builder is not to be had ``shows("FEATURE", "written")``. Rows of
docs/benchmarks from a GPU show a feature at full size if their figure fits one of the feature's patterns. A feature
without evidence is an error, as is a mark that names no feature.
"""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence.md"
LEVELS = ("real", "full size", "tiny", "built", "written")  # best first
TINY, BUILT, WRITTEN = LEVELS[2:]


@dataclass(frozen=True)
class Feature:
    """A feature, and the figures of `docs/benchmarks` that a GPU gives of it.

    Parameters
    ----------
    name : str
        Name in the marks of tests.
    what : str
        Description for the page.
    figures : tuple of str
        Patterns of the figures that show it, ``*`` stands for anything; the first one that has a row is the page's.
    """

    name: str
    what: str
    figures: tuple[str, ...] = ()


AREAS: Mapping[str, tuple[Feature, ...]] = {
    "Models": (
        Feature("wan", "Wan 2.1, text to video: Self-Forcing, LongLive, 1.3B and 14B", ("s1_exact_vs_b3",)),
        Feature("wan-5b", "Wan 2.2 5B", ("fps_5b_704p",)),
        Feature("input-video", "input video: any Wan text model turns one into another", ("v2v_fps_1p3b",)),
        Feature("streamdiffusion-v2", "StreamDiffusionV2: video to video"),
        Feature("wan_i2v", "image to video, 14B", ("i2v_step_vs_t2v",)),
        Feature("flf2v", "first and last picture"),
        Feature("abot", "ABot-World: picture and keys", ("abot_fps_704", "abot_fps_480")),
        Feature("lingbot", "lingbot-world: picture and camera", ("lingbot_v2_chunk_ms",)),
        Feature("matrix_game", "Matrix-Game 2.0: picture, keys and mouse", ("mg2_fps",)),
        Feature("minwm", "minWM: text and camera", ("minwm_fps",)),
        Feature("seko_talk", "Seko-Talk: portrait and voice", ("talk_step_vs_compiled",)),
        Feature("voxcpm2", "VoxCPM2: speech", ("vox_step_ms",)),
    ),
    "Caches and arithmetic": (
        Feature("fp4-kv", "KV cache in FP4", ("s1_fp4_vs_b3",)),
        Feature("kv-formats", "other KV formats of 4 to 8 bits"),
        Feature("fp8", "matmuls in fp8, resident window", ("s1_fp4_fp8_vs_b3",)),
        Feature("pass-caches", "a cache for each pass", ("sessions_fit_1p3b_fp4",)),
        Feature("sink-average", "a sink that averages evicted chunks (Reward Forcing)"),
        Feature("rolling", "several chunks in a pass (Rolling Forcing)", ("rolling_fps",)),
        Feature("context-rebuild", "a cache made again before each chunk (Krea)", ("krea14_fps",)),
        Feature(
            "context-reuse", "no context pass: the last denoise pass's cache", ("context_reuse_vs_pass",)
        ),
        Feature("past-share", "attention to a share of the cached keys", ("fps_14b_one_gpu",)),
        Feature("offload", "KV cache on the host", ("layer_streaming", "offload_bandwidth_share")),
    ),
    "Media": (
        Feature("wan-vae", "Wan 2.1 VAE", ("vae_vs_eager",)),
        Feature("wan-vae-2.2", "Wan 2.2 VAE", ("vae22_vs_eager",)),
        Feature("vae-fp8", "decoders in fp8", ("vae_fp8_vs_eager",)),
        Feature("taehv", "tiny decoders (TAEHV)", ("tiny_decoder_ms",)),
        Feature("umt5", "text encoder umT5"),
        Feature("clip", "image encoder CLIP"),
        Feature("hubert", "audio encoder HuBERT", ("talk_audio_ms",)),
    ),
    "Checkpoints": (
        Feature("lora", "LoRAs merged at build", ("build_lora_s",)),
        Feature("gguf", "GGUF files"),
        Feature("quantised", "8-bit safetensors"),
    ),
    "Sessions": (
        Feature("pools", "sessions that share calls, each with its own bytes", ("batch4_s1",)),
        Feature("snapshots", "pause, snapshot and restart of a session"),
        Feature("recache", "a prompt changed mid-stream, cache rebuilt"),
        Feature("ranks", "a chunk on several GPUs", ("sp4_s1", "sp2_s1")),
    ),
    "Backends": (
        Feature("aoti", "AOTInductor", ("first_chunk_s",)),
        Feature("compile", "torch.compile when opened"),
        Feature("onnx", "ONNX"),
        Feature("tensorrt", "TensorRT"),
        Feature("tensorrt-rtx", "TensorRT for RTX"),
    ),
    "Serving": (
        Feature("live", "live video to browsers and clients", ("serve_misses",)),
        Feature("videos", "/v1/videos"),
        Feature("live-speech", "live speech and /v1/audio/speech"),
        Feature("saved", "sessions that outlive the server"),
        Feature("fleet", "many boxes behind one address: Redis, Ray"),
        Feature("page", "the web page in a browser"),
    ),
}


@dataclass(frozen=True)
class Evidence:
    """The evidence of one feature.

    Parameters
    ----------
    level : str
        One of `LEVELS`, the best.
    row : mapping or None
        The newest row of a GPU that shows it.
    tests : tuple of str
        Test files that show it, relative to the repository.
    """

    level: str
    row: Mapping[str, Any] | None
    tests: tuple[str, ...]


def marks(folder: Path = ROOT / "tests") -> dict[str, dict[str, set[str]]]:
    """Return the test files that show a feature, by feature and level, from the marks in their source."""
    shown: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for file in sorted(folder.rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        for feature, level in _marks_of(ast.parse(text)) if "mark.shows(" in text else ():
            shown[feature][level].add(file.relative_to(ROOT).as_posix())
    return shown


def _marks_of(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "shows":
            feature, level = (*(ast.literal_eval(argument) for argument in node.args), TINY)[:2]
            yield feature, level


def evidence() -> dict[str, Evidence]:
    """Return the evidence of each feature.

    Raises
    ------
    ValueError
        If a mark names no feature, or a feature has no evidence.
    """
    shown = marks()
    features = {feature.name: feature for area in AREAS.values() for feature in area}
    if unknown := {*shown} - {*features} or {level for by in shown.values() for level in by} - {
        TINY,
        BUILT,
        WRITTEN,
    }:
        raise ValueError(
            f"marks name {sorted(unknown)}; expected features of scripts/evidence.py, tiny or built"
        )
    rows = _gpu_rows()
    found = {name: _of_feature(feature, shown[name], rows) for name, feature in features.items()}
    if lacking := [name for name, best in found.items() if not best]:
        raise ValueError(f"nothing shows {lacking}: mark a test, or name a figure that has a row")
    return {name: best for name, best in found.items() if best}


def _of_feature(
    feature: Feature, shown: Mapping[str, set[str]], rows: list[dict[str, Any]]
) -> Evidence | None:
    row = None
    for pattern in feature.figures:
        fitting = [row for row in rows if fnmatchcase(row["figure"], pattern)]
        row = row or (fitting[-1] if fitting else None)
    by_level = {level: bool(shown.get(level)) for level in LEVELS}
    if row is not None:
        by_level["real" if row.get("weights") == "trained" else "full size"] = True
    best = next((level for level in LEVELS if by_level[level]), None)
    return None if best is None else Evidence(best, row, tuple(sorted(set().union(*shown.values()))))


def _gpu_rows() -> list[dict[str, Any]]:
    files = sorted((ROOT / "docs" / "benchmarks").glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["gpu"] != "cpu"]


HEAD = """\
# Evidence: what was shown of each feature

To look up how far a claim was tried. A script, `python -m scripts.evidence`, writes this page from the marks of tests
and the rows of [benchmarks/](benchmarks/); README's tables use the same words.

- **real**: trained weights of full size. Nobody has yet: no such file can be downloaded where Seko is developed.
- **full size**: random weights of the real shapes on a GPU, with the row.
- **tiny**: small models on a CPU, against an independent truth.
- **built**: made, and never run.
- **written**: code of which nothing was built, because its builder is not to be had where Seko is developed.
"""


def page() -> str:
    """Return the text of docs/evidence.md."""
    found, lines = evidence(), [HEAD]
    for area, features in AREAS.items():
        lines += [f"\n## {area}\n", "| feature | shown | newest row | tests |", "|---|---|---|---|"]
        for feature in features:
            best = found[feature.name]
            row = best.row
            measured = (
                "" if row is None else f"`{row['figure']}` {row['value']:.4g} {row['unit']}, {row['date']}"
            )
            tests = ", ".join(f"[{Path(test).stem}](../{test})" for test in best.tests)
            lines.append(f"| {feature.what} | {best.level} | {measured} | {tests} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
