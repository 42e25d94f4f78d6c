"""One variant of `compare`: trains in a folder of its own, then prints its line. `compare` starts it.

All that it is told comes as one JSON argument. torchrun's parser looks at every word that begins with a dash, also
behind the module's name, and refuses what could be short for two of its own options (``--run`` is).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from scripts.train_sample import ranks, train_dit
from scripts.train_sample.latent_pool import LAYOUTS
from scripts.train_sample.probe import probe
from scripts.train_sample.progress import LOSSES
from scripts.train_sample.train_vae import FrozenVae

LAST_SHARE = 0.2


def train_and_probe(folder: Path, vae: Path, seconds: float, device: str, variant: list[str]) -> None:
    """Be one variant: train in the folder, then print its line."""
    arguments = ["--folder", str(folder), "--vae", str(vae), "--device", device, "--resume"]
    arguments += ["--more", str(seconds / 60), *variant]
    options, began = train_dit.read_options(arguments), time.monotonic()
    with ranks.joined(device) as own:
        encode_video = FrozenVae(vae, own).encode
        rows = {"rows": 2, "draws": 1, "pool_size": 8} if "--rehearse" in variant else {}
        before = probe(folder, encode_video, own, **rows) if ranks.is_first() else {}
        options.device = own
        first = train_dit.run_with(options).leg
        if not ranks.is_first():
            return
        after = probe(folder, encode_video, own, **rows)
    print(json.dumps({"steps": first["steps"], "minutes": first["minutes"], "wall_s": round(time.monotonic() - began),
                      **summary(folder / LOSSES, first["first_step"]), "probe": after, "before": before}))  # fmt: skip


def summary(log: Path, first_step: int) -> dict[str, Any]:
    """Return milliseconds a step over the log's second half, and each layout's mean loss over its last fifth.

    Parameters
    ----------
    log : Path
        The loss log.
    first_step : int
        Lines of earlier steps are left out.

    Returns
    -------
    dict
        ``ms_a_step`` (None where the log is too short to say), ``loss`` by layout.
    """
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line["step"] >= first_step]
    late = lines[len(lines) // 2 :]
    steps = late[-1]["step"] - late[0]["step"] if late else 0
    spent = 1000 * (late[-1]["seconds"] - late[0]["seconds"]) / steps if steps else None
    losses = {}
    for layout in LAYOUTS:
        values = [line[layout] for line in lines if layout in line]
        last = values[-max(1, round(LAST_SHARE * len(values))) :]
        losses[layout] = round(sum(last) / len(last), 5) if last else None
    return {"ms_a_step": None if spent is None else round(spent, 2), "loss": losses}


def main(arguments: list[str] | None = None) -> int:
    """Train one variant as `compare` asks."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("told", help="JSON: folder, vae, seconds, device, and options of train_dit")
    told = json.loads(parser.parse_args(arguments).told)
    train_and_probe(Path(told["folder"]), Path(told["vae"]), told["seconds"], told["device"], told["options"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
