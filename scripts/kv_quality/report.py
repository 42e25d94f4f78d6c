"""Output of measurements as rows of docs/benchmarks."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from scripts.bench.rows import append_row
from scripts.kv_quality.compare import WINDOW_CHUNKS, Judged
from scripts.kv_quality.measures import spread
from seko_kernels.kv_formats import KvFormat

PSNR_BAR, PSNR_BAR_CHUNKS = 30.0, 7  # dB against the exact stream, at least
FOLLOWING_BAR = 0.5  # points below the exact stream, at most
_PLACES = 5

Activations = dict[str, list[float]]  # relative errors a layer: of k, v, attention


def append_activations(file: Path, form: KvFormat, measured: Activations, chunk: int, rows: int) -> None:
    """Append the row of one format's errors on captured activations."""
    layers = measured["attention"]
    append_row(
        file,
        "kv_attention_error",
        f"sample, {form.name}",
        sum(layers) / len(layers),
        "relative error of the attention's output, mean of layers",
        None,
        layers=_rounded(layers),
        k_error=_rounded(measured["k"]),
        v_error=_rounded(measured["v"]),
        bits_per_number=round(form.bits_per_number, 4),
        captured=f"exact stream, chunk {chunk}, all passes, {rows} prompts",
    )


def append_streams(
    file: Path,
    exact: str,
    after: dict[str, dict[int, Tensor]],
    judged: dict[str, Judged],
    bits: dict[str, float],
) -> None:
    """Append the rows of every stream; of the exact one how many prompts it follows."""
    for name, by_count in after.items():
        for count, measured in by_count.items():
            if name == exact:
                continue
            pictures = spread(measured)
            append_row(
                file, "kv_psnr", f"sample, {name}, after {count} chunks", pictures["mean"],
                "dB against exact, mean of prompts", PSNR_BAR if count == PSNR_BAR_CHUNKS else None,
                spread=_rounded(pictures), prompts=len(measured), window_chunks=min(count, WINDOW_CHUNKS),
                bits_per_number=bits[name],
            )  # fmt: skip
        for end in ("start", "end"):
            mine, true = judged[name][end], judged[exact][end]
            shape, share = f"sample, {name}, {end} of the stream", 100 * sum(mine) / len(mine)
            append_row(file, "kv_following", shape, share, "% of prompts followed", None, prompts=len(mine))
            if name != exact:
                flips = {
                    "lost": sum(b and not a for a, b in zip(mine, true, strict=True)),
                    "won": sum(a and not b for a, b in zip(mine, true, strict=True)),
                }
                append_row(file, "kv_following_loss", shape, 100 * sum(true) / len(true) - share,
                           "points below exact", FOLLOWING_BAR, prompts=len(mine), **flips)  # fmt: skip


def _rounded(values: list[float] | dict[str, float]) -> list[float] | dict[str, float]:
    if isinstance(values, dict):
        return {name: round(value, _PLACES) for name, value in values.items()}
    return [round(value, _PLACES) for value in values]
