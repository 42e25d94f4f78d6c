"""Make artifacts/format-1-sample: the smallest real artifact, committed so that old formats stay readable.

Its engines are exported programs (`--backend compile`) without a compiler cache: graphs as JSON, no native code. A
test opens it with every check and replays its golden. Run this only when format 1 gains a field.

    python scripts/make_format_sample.py artifacts/format-1-sample
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from seko_export.build_steps import build_artifact
from seko_export.config.build import BuildConfig
from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.families.model_files import write_random_checkpoint

MODEL = ModelConfig(
    name="format-sample", layers=2, dim=32, heads=2, ffn_dim=48, in_channels=4, out_channels=4,
    text_dim=16, text_tokens=4, freq_dim=16,
)  # fmt: skip
STREAM = StreamConfig(height=32, width=48, chunk_frames=2, sink_frames=1, ring_frames=3)


def main() -> None:
    """Build the sample and print its digest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("goal", type=Path)
    goal = parser.parse_args().goal
    config = BuildConfig(MODEL, STREAM, Schedule.warped(), "fp4", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "sample.pt")
        write_random_checkpoint(checkpoint, MODEL, format="self-forcing", seed=0, dtype=torch.float32)
        result = build_artifact(
            config, checkpoint, goal, backend="compile", compiler_cache=False, replace=True
        )
    print(json.dumps({"artifact": str(goal), "digest": result.digest}))


if __name__ == "__main__":
    main()
