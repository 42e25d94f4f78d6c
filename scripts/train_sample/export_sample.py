"""Writes the shipped sample from the runs: bfloat16 safetensors by checkpoint names, tokenizer, config, model card."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from scripts.train_sample.progress import read_ema
from scripts.train_sample.shipped import write_checkpoint
from scripts.train_sample.text import save_tokenizer, text_config
from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.families.wan_layout.keys import wan_shapes

LARGEST = 25_000_000  # bytes of all shipped files together
TEMPLATE = Path(__file__).with_name("MODEL.template.md")


def export(vae: Path, teacher: Path, student: Path, judged: dict[str, Any], output_path: Path) -> int:
    """Write the sample's folder and return its bytes.

    Parameters
    ----------
    vae, teacher, student : Path
        Folders of the three runs; the text encoder comes from the teacher's.
    judged : dict
        The JSON line of `evaluate.py`.
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
    (fresh / "MODEL.md").write_text(
        _card(
            fresh,
            total,
            [dit, vae_weights, text],
            (vae_facts, taught_facts, student_facts),
            judged,
        ),
        encoding="utf-8",
    )
    if total > LARGEST:
        raise ValueError(f"the sample has {total} bytes, at most {LARGEST} ship; train a smaller model")
    fresh.rename(output_path)
    return total


def _card(
    folder: Path,
    total: int,
    groups: list[dict[str, Tensor]],
    facts: tuple[dict[str, Any], ...],
    judged: dict[str, Any],
) -> str:
    """Fill the model card's template."""
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}
    parts = [_parts(run) for run in facts]
    counts = [f"{sum(t.numel() for t in group.values()) / 1e6:.2f} M" for group in groups]
    start, end = judged["start"], judged["end"]
    return TEMPLATE.read_text(encoding="utf-8").format(
        total=f"{total / 1e6:.1f}",
        dit=counts[0],
        vae=counts[1],
        text=counts[2],
        psnr=f"{facts[0]['psnr']:.1f}",
        psnr_worst=f"{facts[0]['psnr_worst']:.1f}",
        minutes=_sum([[f"{part['minutes']:.1f}" for part in stage] for stage in parts]),
        steps=_sum([[str(part["steps"]) for part in stage] for stage in parts]),
        method="`, then `".join(_methods(facts[2])),
        guidance=facts[2]["distillation"]["guidance"],
        averaged=_averaged(facts[2]),
        clips=start["clips"],
        followed=f"{100 * start['followed']:.1f}",
        followed_end=f"{100 * end['followed']:.1f}",
        attributes=", ".join(
            f"{n} {100 * v:.0f} %" for n, v in start.items() if n not in ("clips", "followed")
        ),
        video_seconds=judged["video_seconds"],
        digests="\n".join(f"    {digest}  {name}" for name, digest in digests.items()),
    )


def _parts(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the facts of a run behind those of the runs that it began from; of an average, those of its runs."""
    if "averaged" in run:
        first, *others = run["averaged"]
        return [*_parts(first), *others]
    before = _parts(run["began_from"]) if "began_from" in run else []
    return [*before, run]


def _methods(run: dict[str, Any]) -> list[str]:
    """Return by which ways a student was made, in their order, each once."""
    if "averaged" in run:
        return _methods(run["averaged"][0])
    before = _methods(run["began_from"]) if "began_from" in run else []
    return list(dict.fromkeys([*before, run["distillation"]["method"]]))


def _averaged(run: dict[str, Any]) -> str:
    """Return what the card says of an average; nothing of another student."""
    if "averaged" not in run:
        return ""
    ways = ", ".join(f"`{student['distillation']['optimizer']}`" for student in run["averaged"])
    return (
        f" The student is the mean of {len(run['averaged'])} that were trained side by side from one start"
        f" (optimisers {ways}); the last parts are theirs."
    )


def _sum(stages: list[list[str]]) -> str:
    """Return ``5.0 + (16.2 + 12.0) + 2.0``: a stage of several parts in brackets."""
    return " + ".join(parts[0] if len(parts) == 1 else f"({' + '.join(parts)})" for parts in stages)


def main(arguments: list[str] | None = None) -> int:
    """Write the sample's folder from finished runs."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    for name in ("vae", "teacher", "student"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument(
        "--judged", type=Path, required=True, help="file that ends in the JSON line of evaluate.py"
    )
    parser.add_argument("--output-path", type=Path, default=Path("seko_export/sample"))
    options = parser.parse_args(arguments)
    judged = json.loads(options.judged.read_text(encoding="utf-8").splitlines()[-1])
    total = export(options.vae, options.teacher, options.student, judged, options.output_path)
    print(json.dumps({"stage": "export", "output_path": str(options.output_path), "bytes": total}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
