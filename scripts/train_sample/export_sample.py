"""Writes the shipped sample from the runs: bfloat16 safetensors by checkpoint names, tokenizer, config."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path

from scripts.train_sample.progress import read_ema
from scripts.train_sample.shipped import write_checkpoint
from scripts.train_sample.text import save_tokenizer, text_config
from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.families.wan_layout.keys import wan_shapes

LARGEST = 25_000_000  # bytes of all shipped files together


def export(vae: Path, teacher: Path, student: Path, output_path: Path) -> int:
    """Write the sample's folder and return its bytes.

    Parameters
    ----------
    vae, teacher, student : Path
        Folders of the three runs; the text encoder comes from the teacher's.
    output_path : Path
        The folder to write; must not exist.

    Raises
    ------
    FileExistsError
        If ``output_path`` exists.
    ValueError
        If names or shapes are not the checkpoint's, or everything together is too large.
    """
    if output_path.exists():
        raise FileExistsError(f"{output_path} exists; remove it first, or choose another folder")
    vae_weights, vae_facts = read_ema(vae)
    taught, taught_facts = read_ema(teacher)
    dit, student_facts = read_ema(student)
    training = taught_facts["training"]
    model = ModelConfig(**training["model"])
    shapes = {name: tuple(t.shape) for name, t in dit.items()}
    if shapes != wan_shapes(model):
        odd = sorted(set(shapes.items()) ^ set(wan_shapes(model).items()))
        raise ValueError(f"the student is no checkpoint of its config, first difference {odd[:2]}")
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
    fresh = output_path.with_name(f".{output_path.name}.fresh")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    text = {name.removeprefix("text."): t for name, t in taught.items() if name.startswith("text.")}
    for name, tensors in (("dit", dit), ("vae", vae_weights), ("text", text)):
        write_checkpoint(fresh / f"{name}.safetensors", tensors)
    save_tokenizer(fresh / "tokenizer.json")
    (fresh / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    total = sum(file.stat().st_size for file in fresh.iterdir())
    if total > LARGEST:
        raise ValueError(f"the sample has {total} bytes, at most {LARGEST} ship; train a smaller model")
    fresh.rename(output_path)
    return total


def main(arguments: list[str] | None = None) -> int:
    """Write the sample's folder from finished runs."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    for name in ("vae", "teacher", "student"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--output-path", type=Path, default=Path("seko_export/sample"))
    options = parser.parse_args(arguments)
    total = export(options.vae, options.teacher, options.student, options.output_path)
    digests = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in options.output_path.iterdir()
    }
    print(json.dumps({"stage": "export", "bytes": total, "sha256": digests}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
