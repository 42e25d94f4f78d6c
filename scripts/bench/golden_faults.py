"""How far a planted fault moves the golden chunks of the tiny model: what `verify`'s tolerance can see. CPU, eager.

python scripts/bench/golden_faults.py docs/benchmarks/cpu.jsonl
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from rows import append_row

from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.layers.pieces import make_pieces
from seko_export.families.layers.weights import model_weights
from seko_export.families.model_files import load_checkpoint, write_random_checkpoint
from seko_export.families.wan.presets import PRESETS
from seko_export.host.progress import silent
from seko_export.video import recording as golden
from seko_export.video.bounds import difference
from seko_runtime.video.ring import Ring


def main() -> None:
    """Append two rows a fault and cache format: the larger errors of the two golden chunks."""
    preset = PRESETS["tiny"]
    slot = Ring.slot
    faults: dict[str, Callable[[Ring, int], int]] = {
        "slots off by one": lambda ring, frame: (
            0 if frame == 0 else 1 + slot(ring, frame) % (ring.cache_frames - 1)
        ),
        "stale ring": lambda ring, frame: min(slot(ring, frame), 3 + frame % 3),
    }
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "tiny.pt")
        write_random_checkpoint(checkpoint, preset.model, format="self-forcing", seed=0, dtype=torch.float32)
        for scheme in ("fp32", "fp4"):
            config = VideoBuild(
                preset.model, VideoConfig(preset.stream, Schedule.warped(), scheme), TargetConfig("cpu")
            )
            weights = dict(model_weights(make_pieces(config), load_checkpoint(checkpoint, preset.model)))
            weights |= config.workload.schedule.tables(config.workload.stream)
            record = golden.record(config, weights, silent)
            weights |= record.scales
            other = {"blocks.0.": "blocks.1.", "blocks.1.": "blocks.0."}
            swapped = {other.get(name[:9], name[:9]) + name[9:]: tensor for name, tensor in weights.items()}
            _row(config, "layers swapped", _errors(config, swapped, record))
            for fault, wrong in faults.items():
                with mock.patch.object(Ring, "slot", wrong):
                    _row(config, fault, _errors(config, weights, record))


def _errors(
    config: VideoBuild, weights: dict[str, torch.Tensor], record: golden.Record
) -> tuple[float, float]:
    """Errors of the latents and of the cache, as `verify` measures them."""
    results = golden.run_eager(config, weights, record.text, record.seeds, tuple(record.chunks), silent, None)
    apart = [difference(config, results[number], right) for number, right in record.chunks.items()]
    return max(gap.latents for gap in apart), max(gap.cache for gap in apart)


def _row(config: VideoBuild, fault: str, errors: tuple[float, float]) -> None:
    shape = f"tiny, {config.workload.kv_scheme}: {fault}"
    codes = config.workload.kv_scheme != config.exact_scheme
    append_row(Path(sys.argv[1]), "golden_fault_error", shape, errors[0], "relative error", None)
    unit = "share of a token's codes" if codes else "relative error of a token"
    append_row(Path(sys.argv[1]), "golden_fault_cache_error", shape, errors[1], unit, None)


if __name__ == "__main__":
    main()
