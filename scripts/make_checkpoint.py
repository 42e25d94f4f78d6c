"""Makes a seeded random checkpoint, LoRA, VAE, tiny decoder, CLIP or text encoder in any format the loader reads; ends
in one JSON line."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, its folder stands there

from scripts.quantised_files import FORMS as QUANTISED
from scripts.quantised_files import write_quantised
from scripts.random_checkpoint import FORMS, write_random_checkpoint
from scripts.random_clip import FORMS as CLIP_FORMS
from scripts.random_clip import SIZES as CLIPS
from scripts.random_clip import write_random_clip
from scripts.random_lora import FORMS as LORAS
from scripts.random_lora import random_pairs, write_lora
from scripts.random_speech import stored_tensors, write_random_voxcpm2
from scripts.random_text import SIZES as TEXTS
from scripts.random_text import write_random_text
from scripts.random_vae import FORMS as VAE_FORMS
from scripts.random_vae import SIZES as VAES
from scripts.random_vae import write_random_vae
from seko_export.checkpoints.random import random_weight
from seko_export.config.model import ModelConfig
from seko_export.errors import ExportError, UsageError
from seko_export.families.registry import family_named, presets
from seko_export.families.voxcpm2.presets import PRESETS as SPEECH

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main(arguments: list[str] | None = None) -> int:
    """Write the checkpoint that the options ask for; return the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    drawn = {"seed": options.seed, "dtype": DTYPES[options.dtype], "device": options.device}
    started = time.monotonic()
    try:
        if options.vae is not None:
            form = options.format or VAE_FORMS[0]
            count = write_random_vae(options.output, VAES[options.vae], form, **drawn)
        elif options.clip is not None:
            form = options.format or CLIP_FORMS[0]
            count = write_random_clip(options.output, CLIPS[options.clip], form, **drawn)
        elif options.text is not None:
            form, count = "transformers", write_random_text(options.output, TEXTS[options.text], **drawn)
        elif options.preset in SPEECH:
            if options.format is not None:
                parser.error(f"--format: {options.preset} has one, a folder; leave it out")
            form, count = "folder", stored_tensors(SPEECH[options.preset])
            write_random_voxcpm2(options.output, SPEECH[options.preset], **drawn)
        else:
            config = presets()[options.preset].model
            keys = family_named(config.family).keys
            form, count = options.format or next(iter(FORMS[config.family])), len(keys.shapes(config))
            if form in QUANTISED or options.lora:
                form, count = _write_other(options, config)
            else:
                write_random_checkpoint(options.output, config, format=form, **drawn)
    except ExportError as fault:
        print(fault, file=sys.stderr)
        return fault.exit_code
    files = [options.output] if options.output.is_file() else sorted(options.output.rglob("*"))
    report = {
        "path": str(options.output),
        "format": form,
        "bytes": sum(file.stat().st_size for file in files if file.is_file()),
        "keys": count,
        "preset": options.vae or options.clip or options.text or options.preset,
        "seed": options.seed,
        "dtype": options.dtype,
        "seconds": round(time.monotonic() - started, 3),
    }
    print(json.dumps(report))
    return 0


def _write_other(options: argparse.Namespace, model: ModelConfig) -> tuple[str, int]:
    """Write what the exporter only reads: a LoRA, or weights in 8 bits; return its form and number of tensors."""
    if options.output.exists():
        raise UsageError(f"{options.output} exists; remove it or name another path")
    if options.lora:
        pairs = random_pairs(model, rank=options.rank, seed=options.seed, dtype=DTYPES[options.dtype])
        write_lora(options.output, pairs, options.lora, float(options.rank))
        return f"lora {options.lora}", 2 * len(pairs)
    keys = family_named(model.family).keys
    shapes = keys.shapes(model)
    state = {
        name: random_weight(
            name,
            shape,
            seed=options.seed,
            dtype=DTYPES[options.dtype],
            device=options.device,
            spread=keys.spread,
        )
        for name, shape in shapes.items()
    }
    write_quantised(options.output, state, options.format)
    return options.format, len(shapes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Make a seeded random checkpoint.")
    forms = dict.fromkeys(form for forms in FORMS.values() for form in forms)
    parser.add_argument("--preset", choices=sorted({*presets(), *SPEECH}), default="tiny")
    parser.add_argument(
        "--format",
        choices=[*forms, *QUANTISED],
        help=f"default: the first one of the preset's family; of a VAE and of CLIP {' or '.join(VAE_FORMS)}",
    )
    parser.add_argument(
        "--lora", choices=LORAS, help="a LoRA of the preset in these key names, not its weights"
    )
    parser.add_argument("--vae", choices=sorted(VAES), help="a VAE or tiny decoder, not the preset's weights")
    parser.add_argument("--clip", choices=CLIPS, help="a CLIP image encoder, not the preset's weights")
    parser.add_argument("--text", choices=TEXTS, help="a text encoder, not the preset's weights")
    parser.add_argument("--rank", type=int, default=16, help="of the LoRA")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--device", default="cpu", help="where to draw; cuda draws other numbers than cpu")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file or folder; must not exist yet")
    return parser


if __name__ == "__main__":
    sys.exit(main())
