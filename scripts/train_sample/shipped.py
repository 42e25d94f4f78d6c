"""The folder of a sample as trainers read and write it: its transformer, in bfloat16, and the sampler it is for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.train_sample.causal_training import CausalDit
from scripts.train_sample.progress import fill
from seko_export.options.sample import read_sample

CHECKPOINT, REPORT = "dit.safetensors", "judged.json"
PASSES, SHIFT = 4, 5.0


def load_student(
    sample: Path, device: str, layers: int | None = None, checkpoint: Path | None = None
) -> CausalDit:
    """Return the transformer of a sample's folder, or its first layers, with the weights of another file if given."""
    facts = read_sample(sample)
    model = dataclasses.replace(facts.model, layers=layers or facts.model.layers)
    student = CausalDit(model, facts.stream)
    weights = load_file(checkpoint or facts.checkpoint)
    fill(
        dict(student.named_parameters()),
        {
            name: t.float()
            for name, t in weights.items()
            if not name.startswith("blocks.") or int(name.split(".")[1]) < model.layers
        },
    )
    return student.to(device)


def require_shapes(weights: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a ValueError if names or shapes are not those of a model's checkpoint."""
    shapes = {name: tuple(t.shape) for name, t in weights.items()}
    if odd := sorted(set(shapes.items()) ^ set(wanted.items())):
        raise ValueError(f"no checkpoint of its model, first difference {odd[:2]}")


def write_checkpoint(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write weights as they ship: bfloat16, readable by all, whole or not at all."""
    fresh = path.with_name(f".{path.name}")
    rounded = {name: t.to(torch.bfloat16).cpu().contiguous() for name, t in weights.items()}
    save_file(rounded, fresh, metadata={"format": "pt", "licence": "Apache-2.0"})
    fresh.chmod(0o644)  # safetensors writes for its owner alone
    fresh.replace(path)
