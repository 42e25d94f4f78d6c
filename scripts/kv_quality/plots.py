"""The pictures of docs/images: curves and frames. Equal numbers give equal bytes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from scripts.kv_quality.compare import WARMUP_CHUNKS, error_by_chunk
from scripts.kv_quality.report import PSNR_BAR, PSNR_BAR_CHUNKS
from scripts.kv_quality.sample import Sample, decoded

SHEET_PROMPTS = 4


def draw_streams(
    folder: Path, latents: dict[str, Tensor], exact: str, size: int, after: dict[str, dict[int, Tensor]]
) -> None:
    """Draw the latent error of every chunk (median over prompts) and PSNR after so many chunks."""
    with _figure(folder / "kv-streams.png", 2, 4.5, 3.4) as axes:
        counts = list(after[exact])
        for name, x in latents.items():
            if name == exact:
                continue
            errors = error_by_chunk(x, latents[exact], size).median(0).values
            axes[0].plot(range(1, len(errors) + 1), errors.numpy(), linewidth=1, label=name)
            axes[1].plot(
                counts, [float(after[name][n].mean()) for n in counts], "o-", linewidth=1, label=name
            )
        axes[0].legend(fontsize=6)
        axes[0].set(xlabel="chunk", title="latents against exact: median relative error", ylim=(0, None))
        axes[1].plot(PSNR_BAR_CHUNKS, PSNR_BAR, "k_", markersize=14, label="bar")
        axes[1].set(xlabel="chunks", title="frames against exact: mean PSNR, dB", xscale="log")
        axes[1].minorticks_off()
        axes[1].set_xticks(counts, list(map(str, counts)))


def draw_frames(
    folder: Path,
    sample: Sample,
    latents: dict[str, Tensor],
    names: Sequence[str],
    prompts: list[str],
    chunks: Sequence[int],
    device: str,
) -> None:
    """Draw the last frame after each count of chunks, a column each, of the formats, a row each, for some prompts."""
    size, shown = sample.stream.chunk_frames, min(SHEET_PROMPTS, len(prompts))
    strips = []
    for name in names:
        columns = []
        for count in chunks:
            begin = max(0, count - WARMUP_CHUNKS - 1) * size
            decode = sample.decoder(count * size - begin, device)
            frame = decoded(decode, latents[name][:shown, :, begin : count * size])[:, :, -1]
            columns.append(F.pad(frame, (1, 1, 1, 1), value=1.0))
        strips.append(torch.cat(columns, dim=3))  # [prompts, 3, H + 2, counts*(W + 2)]
    rows, counts = "; ".join(names), ", ".join(map(str, chunks))
    with _figure(folder / "kv-frames.png", shown, 2.1, 2.5) as axes:
        for prompt, axis in enumerate(axes):
            picture = (torch.cat([strip[prompt] for strip in strips], dim=1) + 1) / 2
            axis.imshow(picture.clamp(0, 1).permute(1, 2, 0).numpy(), interpolation="nearest")
            axis.set_title("\n".join(textwrap.wrap(prompts[prompt], 48)), fontsize=5)
            axis.axis("off")
        axes[0].figure.suptitle(f"rows: {rows}; columns: after {counts} chunks", fontsize=7)


@contextmanager
def _figure(path: Path, columns: int, width: float, height: float) -> Iterator[Any]:
    """Give the axes of a row, each of that many inches; then write the picture."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"font.size": 7, "axes.titlesize": 7}):
        figure, axes = plt.subplots(1, columns, figsize=(width * columns, height), squeeze=False)
        yield axes[0]
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100, metadata={"Software": None})  # whose version would change the bytes
        plt.close(figure)
