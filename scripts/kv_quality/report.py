"""Output of measurements as rows of docs/benchmarks and as printed tables."""

from __future__ import annotations

from pathlib import Path

from scripts.bench.rows import append_row
from scripts.kv_quality.compare import WINDOW_CHUNKS, After, Judged
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
    after: dict[str, dict[int, After]],
    judged: dict[str, Judged],
    bits: dict[str, float],
) -> None:
    """Append the rows of every stream but the exact one's errors, which are zero."""
    for name, by_count in after.items():
        for count, measured in by_count.items():
            if name == exact:
                continue
            shape = f"sample, {name}, after {count} chunks"
            more: dict[str, float] = {
                "prompts": len(measured.psnr),
                "window_chunks": min(count, WINDOW_CHUNKS),
            }
            more["bits_per_number"] = bits[name]
            latents, so_far = spread(measured.latent_error), spread(measured.latent_error_so_far)
            append_row(file, "kv_latent_error", shape, latents["mean"], "relative error, mean of prompts", None,
                       spread=_rounded(latents), so_far=_rounded(so_far), **more)  # fmt: skip
            pictures = spread(measured.psnr)
            bar = PSNR_BAR if count == PSNR_BAR_CHUNKS else None
            append_row(file, "kv_psnr", shape, pictures["mean"], "dB against exact, mean of prompts", bar,
                       spread=_rounded(pictures), **more)  # fmt: skip
            alike = spread(measured.ssim)
            append_row(file, "kv_ssim", shape, alike["mean"], "SSIM against exact, mean of prompts", None,
                       spread=_rounded(alike), **more)  # fmt: skip
        for end in ("start", "end"):
            mine, true = judged[name].followed(end), judged[exact].followed(end)
            shape, share = f"sample, {name}, {end} of the stream", 100 * sum(mine) / len(mine)
            append_row(file, "kv_following", shape, share, "% of prompts followed", None, prompts=len(mine))
            if name != exact:
                flips = {
                    "lost": sum(b and not a for a, b in zip(mine, true, strict=True)),
                    "won": sum(a and not b for a, b in zip(mine, true, strict=True)),
                }
                append_row(file, "kv_following_loss", shape, 100 * sum(true) / len(true) - share,
                           "points below exact", FOLLOWING_BAR, prompts=len(mine), **flips)  # fmt: skip


def print_tables(
    activations: dict[str, tuple[float, Activations]],
    after: dict[str, dict[int, After]],
    judged: dict[str, Judged],
    exact: str,
) -> None:
    """Print both tables as Markdown."""
    print("\n| on captured activations | bits | K | V | attention | worst layer |\n|---|---|---|---|---|---|")
    for name, (bits, figures) in activations.items():
        k, v, out = (sum(figures[part]) / len(figures[part]) for part in ("k", "v", "attention"))
        print(f"| {name} | {bits:.2f} | {k:.4f} | {v:.4f} | {out:.4f} | {max(figures['attention']):.4f} |")
    print("\n| stream | after chunks | latents | PSNR mean (p10) | SSIM | followed at start, end |")
    print("|---|---|---|---|---|---|")
    for name, by_count in after.items():
        ends = " / ".join(
            f"{100 * sum(judged[name].followed(end)) / len(judged[name].followed(end)):.1f}"
            for end in ("start", "end")
        )
        for count, stream_figures in by_count.items():
            latents, pictures, alike = map(
                spread, (stream_figures.latent_error, stream_figures.psnr, stream_figures.ssim)
            )
            quality = f"{pictures['mean']:.1f} ({pictures['p10']:.1f})" if name != exact else "exact"
            print(
                f"| {name} | {count} | {latents['mean']:.4f} | {quality} | {alike['mean']:.4f} | {ends} % |"
            )


def _rounded(values: list[float] | dict[str, float]) -> list[float] | dict[str, float]:
    if isinstance(values, dict):
        return {name: round(value, _PLACES) for name, value in values.items()}
    return [round(value, _PLACES) for value in values]
