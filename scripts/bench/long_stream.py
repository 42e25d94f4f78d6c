"""Memory of a long stream: the sample for 10,000 video frames, the process's and the GPU's memory as a plot.

python scripts/bench/long_stream.py ARTIFACT --rows docs/benchmarks/cpu.jsonl --picture docs/images/long-stream.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rows import append_row

from seko_runtime import open_artifact

SETTLED = 0.1  # of the stream: before it libraries still fetch their workspaces


def main() -> None:
    """Stream, sample memory after every chunk, append a row and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--picture", type=Path, required=True)
    parser.add_argument("--frames", type=int, default=10_000, help="video frames")
    options = parser.parse_args()
    with open_artifact(options.artifact) as artifact:
        manifest = artifact.manifest
        with artifact.open_session() as session:
            shown, seen = 0, []  # video frames; (frames, process MB, GPU MB)
            for frames in session.stream():
                shown += frames.shape[1]
                gpu = torch.cuda.memory_allocated() / 1e6 if torch.cuda.is_available() else 0.0
                seen.append((shown, _resident_mb(), gpu))
                if shown >= options.frames:
                    break
    settled = seen[int(SETTLED * len(seen))]
    shape = f"{manifest.name}, {shown} video frames"
    append_row(
        options.rows, "long_stream_growth_mb", shape, seen[-1][1] - settled[1], "MB of the process's memory", None,
        settled=settled, last=seen[-1],
    )  # fmt: skip
    draw(options.picture, seen, manifest.name)


def draw(path: Path, seen: list[tuple[int, float, float]], name: str) -> None:
    """Plot memory over video frames."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 2.6))
    axes.plot([s[0] for s in seen], [s[1] for s in seen], label="process, resident")
    if seen[-1][2]:
        axes.plot([s[0] for s in seen], [s[2] for s in seen], label="GPU, allocated")
    axes.set(xlabel="video frames", ylabel="MB", title=name, ylim=(0, None))
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def _resident_mb() -> float:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1e3
    raise SystemExit("this system does not say how much memory a process holds")


if __name__ == "__main__":
    main()
