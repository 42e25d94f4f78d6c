"""Write measured figures into pages, from docs/benchmarks: a page repeats rows, it holds none.

    python scripts/bench/table.py

A block between ``<!-- figures:NAME PATTERN ... -->`` and ``<!-- /figures -->`` gets the newest row of each figure and
shape of docs/benchmarks/NAME.jsonl whose figure fits one of the patterns (``*`` stands for anything; ``FIGURE@SHAPE``
also chooses shapes, with ``*`` for blanks). Each line says when its row was measured, at which commit, and whether the
measured code has changed since (`measured`).

A block between ``<!-- plain:NAME -->`` and ``<!-- /plain -->`` gets one of the tables in plain words (`PLAIN`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
# Begins a row's `reference` if Seko's own modules stood in for a package that was missing.
OWN_MODULES = "own modules"
BLOCK = re.compile(
    r"(?P<head><!-- figures:(?P<name>[\w-]+) (?P<patterns>[^>]+) -->\n).*?(?P<foot><!-- /figures -->)",
    re.DOTALL,
)

_NAMED = re.compile(r"^(S\d): .*?, ring \d+")  # a shape that docs/performance.md names
PLAIN_BLOCK = re.compile(r"(?P<head><!-- plain:(?P<name>\w+) -->\n).*?(?P<foot><!-- /plain -->)", re.DOTALL)

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
        "lingbot-v2-fast: time of a chunk; compiled and captured by hand = 1",
        "{:.3f}",
        (("h200", "lingbot_vs_compiled", f"{WORLD}, camera once a chunk"),),
    ),
    (
        "the 14B model on one GPU (480x832, Wan's VAE; FP4 cache, fp8, the last pass's cache kept, 0.4 of the past): "
        "video frames a second",
        "{:.1f}",
        (("h200", "fps_14b_one_gpu", FAST_14B),),
    ),
    (
        "Seko-Talk: time of a step; compiled and captured by hand = 1",
        "{:.3f}",
        (("h200", "talk_step_vs_compiled", TALK),),
    ),
    (
        "cores that encode eight viewers' H.264",
        "{:.2f}",
        (("h200", "serve_encode_cores", "8 viewers, 480x832, 16 fps, H.264 superfast"),),
    ),
    (
        "small videos (1.3B, 320x576, window 12): time of a pass, eager PyTorch = 1, at best",
        "{:.2f}",
        (("h200", "s3_vs_eager", f"{SMALL}, fp4_fp8"),),
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
    "talk_sessions_fit",
    "talk_hybrid_sessions_fit",
}


def main() -> None:
    """Rewrite the blocks of each page that has some."""
    for page in pages():
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


def pages() -> list[Path]:
    """Return README and the pages of docs that have a block."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {page: page.read_text(encoding="utf-8") for page in every}
    return [page for page in every if BLOCK.search(texts[page]) or PLAIN_BLOCK.search(texts[page])]


def with_tables(text: str, benchmarks: Path = BENCHMARKS) -> str:
    """Return a page with its blocks written anew.

    Raises
    ------
    ValueError
        If a block's patterns fit no row.
    """

    def written(block: re.Match[str]) -> str:
        lines = (benchmarks / f"{block['name']}.jsonl").read_text(encoding="utf-8").splitlines()
        return f"{block['head']}\n{table(map(json.loads, lines), block['patterns'].split())}\n{block['foot']}"

    def in_words(block: re.Match[str]) -> str:
        return f"{block['head']}\n{PLAIN[block['name']]()}\n{block['foot']}"

    return PLAIN_BLOCK.sub(in_words, BLOCK.sub(written, text))


def table(rows: Any, patterns: list[str]) -> str:
    """Return the newest rows of the figures that fit as Markdown, in the order in which they first came."""
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        shape = measured_on(row)
        for figures, _, shapes in (pattern.partition("@") for pattern in patterns):
            if fnmatchcase(row["figure"], figures) and fnmatchcase(shape, shapes or "*"):
                newest[row["figure"], shape] = row
    if not newest:
        raise ValueError(f"no row's figure fits {' '.join(patterns)}")
    return _markdown(newest)


def _markdown(newest: Mapping[tuple[str, str], dict[str, Any]]) -> str:
    """Return rows as a table. What all have in common stands in its head, or below it."""
    columns: dict[str, list[str]] = {name: [] for name in ("figure", "measured on", "value", "goal", "when")}
    units = {row["unit"] for row in newest.values()}
    for (figure, shape), row in newest.items():
        goal = goal_of(row)
        value = f"{row['value']:.4g}" if len(units) == 1 else f"{row['value']:.4g} {row['unit']}"
        cells = (
            f"`{figure}`",
            _NAMED.sub(r"\1", shape),
            value,
            "" if goal is None else f"{goal:g}",
            measured(row),
        )
        for column, cell in zip(columns.values(), cells, strict=True):
            column.append(cell)
    names = {name: name for name in columns}
    whens = set(columns["when"])
    if len(units) == 1:
        names["value"] += f", {units.pop()}"
    if len(set(columns["figure"])) == 1:
        names["value"] = names["value"].replace("value", columns.pop("figure")[0])
    if not any(columns["goal"]):
        del columns["goal"]
    if len(whens) == 1:
        del columns["when"]
    head = [f"| {' | '.join(names[name] for name in columns)} |", "|---" * len(columns) + "|"]
    lines = [f"| {' | '.join(cells)} |" for cells in zip(*columns.values(), strict=True)]
    example = list(newest.values())[-1]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(example["versions"].items()))
    when = f", {whens.pop()}," if len(whens) == 1 else ""
    return "\n".join([*head, *lines, "", f"Measured on {example['gpu']}{when} with {versions}.", ""])


def measured(row: dict[str, Any]) -> str:
    """Return a row's date and commit, and what the measured code has had since, such as `before rooms`.

    That is said in ``dated.json`` beside the rows: by patterns of figures and shapes until a day, else by commits (an
    empty one is of rows that have none). A newer row loses the mark by its date.
    """
    marks = json.loads((BENCHMARKS / "dated.json").read_text(encoding="utf-8"))
    commit = row.get("commit") or ""
    shown = commit[:12] + "+" * commit.endswith("+")
    when = f"{row['date']} {shown}".strip()
    for mark in marks["by_figure"]:
        named = any(fnmatchcase(row["figure"], pattern) for pattern in mark["figures"])
        if named and fnmatchcase(row["shape"], mark["shapes"]) and row["date"] <= mark["until"]:
            return f"{when}, {mark['words']}"
    for mark in marks["by_commit"]:
        if commit.removesuffix("+") in mark["commits"]:
            return f"{when}, {mark['words']}"
    return when


def newest_rows() -> dict[tuple[str, str, str], dict[str, Any]]:
    """The newest row of each file, figure and shape."""
    return {
        (page.stem, row["figure"], measured_on(row)): row
        for page in sorted(BENCHMARKS.glob("*.jsonl"))
        for row in map(json.loads, page.read_text(encoding="utf-8").splitlines())
    }


def measured_on(row: dict[str, Any]) -> str:
    """Return a row's shape, with a note if Seko's own modules stood in for a missing package."""
    return f"{row['shape']}, beside {OWN_MODULES}" if OWN_MODULES in _judge(row) else row["shape"]


def _judge(row: dict[str, Any]) -> str:
    """Return what a row of a decoder was measured against; empty: it is none of a decoder."""
    return str(row.get("reference") or row.get("decoder") or "")


def goal_of(row: dict[str, Any]) -> float | None:
    """Return a row's goal, or None if the row has none, as a ratio to a stand-in."""
    return None if OWN_MODULES in _judge(row) else row["bar"]


def missed(row: dict[str, Any]) -> bool:
    """Whether a row's value is on the wrong side of its goal."""
    if (goal := goal_of(row)) is None:
        return False
    return bool(row["value"] < goal if row["figure"] in MORE_IS_BETTER else row["value"] > goal)


def figure_lines() -> str:
    """The table of README's figures."""
    newest = newest_rows()
    lines = [
        f"| {text} | {form.format(*(newest[source]['value'] for source in sources))} |"
        for text, form, sources in FIGURES
    ]
    return "\n".join(["| what | figure |", "|---|---|", *lines]) + "\n"


def absolute_lines() -> str:
    """The table of README's absolute figures."""
    newest = newest_rows()
    lines = [f"| {text} | {show(newest[source])} |" for text, show, source in ABSOLUTE]
    return "\n".join(["| what | figure |", "|---|---|", *lines]) + "\n"


def dated_lines() -> str:
    """The first table of docs/performance.md: README's figures and more, and when each was measured."""
    newest = newest_rows()
    lines = []
    for text, form, sources in (*FIGURES, *MORE):
        rows = [newest[source] for source in sources]
        figures = ", ".join(dict.fromkeys(f"`{row['figure']}`" for row in rows))
        dates = "; ".join(dict.fromkeys(measured(row) for row in rows))
        lines.append(f"| {text} | {form.format(*(row['value'] for row in rows))} | {figures} | {dates} |")
    return "\n".join(["| what | figure | row | date, commit |", "|---|---|---|---|", *lines]) + "\n"


def _side(figure: str) -> str:
    return "at least" if figure in MORE_IS_BETTER else "at most"


def missed_lines() -> str:
    """The table of what docs/performance.md says first was missed."""
    newest = newest_rows()
    lines = [
        f"| {text} | {form.format(newest[source]['value'])} | {_side(source[1])} {newest[source]['bar']:g} |"
        for text, form, (source,) in MISSED
    ]
    return "\n".join(["| what | figure | goal |", "|---|---|---|", *lines]) + "\n"


PLAIN: dict[str, Callable[[], str]] = {
    "absolute": absolute_lines,
    "figures": figure_lines,
    "dated": dated_lines,
    "missed": missed_lines,
}


if __name__ == "__main__":
    main()
