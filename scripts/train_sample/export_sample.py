"""Writes the shipped sample from the runs: bfloat16 safetensors by checkpoint names, tokenizer, config."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from scripts.train_sample.progress import read_ema, write_state
from scripts.train_sample.shipped import require_shapes, write_checkpoint
from scripts.train_sample.text import make_tokenizer, text_config
from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.families.wan_layout.keys import wan_shapes

LARGEST = 25_000_000  # bytes of all shipped files together


def average(runs: list[Path], folder: Path) -> dict[str, Any]:
    """Write a run whose EMA is the mean of those of students that began alike.

    Trained from one start in different ways they lie in one valley, and its middle is better than its sides ("model
    soup", arXiv 2203.05482).
    """
    weights, facts = zip(*(read_ema(run) for run in runs), strict=True)
    mean: dict[str, Tensor] = {name: sum(w[name] for w in weights) / len(weights) for name in weights[0]}
    write_state(folder, {"ema": mean}, {"distillation": facts[0]["distillation"]})
    return {"runs": len(runs)}


def export(vae: Path, teacher: Path, student: Path, output_path: Path) -> dict[str, Any]:
    """Write the sample's folder; return its bytes and hashes.

    Parameters
    ----------
    vae, teacher, student : Path
        Folders of the three runs; the text encoder comes from the teacher's.
    output_path : Path
        The folder to write.

    Raises
    ------
    ValueError
        If names or shapes are not the checkpoint's, or everything together is too large.
    """
    vae_weights, vae_facts = read_ema(vae)
    taught, taught_facts = read_ema(teacher)
    dit, student_facts = read_ema(student)
    training = taught_facts["training"]
    model = ModelConfig(**training["model"])
    require_shapes(dit, wan_shapes(model))
    distilled = student_facts["distillation"]
    steps = tuple(1000.0 * (1 - i / distilled["passes"]) for i in range(distilled["passes"]))
    config = {
        "format_version": 1,
        "model": training["model"],
        "stream": training["stream"],
        "schedule": {
            "timesteps": Schedule.warped(steps, distilled["shift"]).timesteps,
            "shift": distilled["shift"],
        },
        "vae": {
            "base_dim": vae_facts["training"]["base_dim"],
            "latents_mean": vae_facts["latents_mean"],
            "latents_std": vae_facts["latents_std"],
        },
        "text": text_config(model.text_dim, training["text_layers"]).to_diff_dict(),
    }
    output_path.mkdir(parents=True, exist_ok=True)
    text = {name.removeprefix("text."): t for name, t in taught.items() if name.startswith("text.")}
    for name, tensors in (("dit", dit), ("vae", vae_weights), ("text", text)):
        write_checkpoint(output_path / f"{name}.safetensors", tensors)
    make_tokenizer().save(str(output_path / "tokenizer.json"))
    (output_path / "config.json").write_text(
        json.dumps(config, indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )
    files = sorted(output_path.iterdir())
    total = sum(file.stat().st_size for file in files)
    if total > LARGEST:
        raise ValueError(f"the sample has {total} bytes, at most {LARGEST} ship; train a smaller model")
    return {
        "bytes": total,
        "sha256": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
    }
