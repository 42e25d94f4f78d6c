"""Makes a seeded random checkpoint of a preset in any format the loader reads; ends in one JSON line."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from seko_export.errors import ExportError
from seko_export.families.model_files import write_random_checkpoint
from seko_export.families.registry import families, family_named, presets
from seko_export.families.voxcpm2.presets import PRESETS as SPEECH
from seko_export.families.voxcpm2.random_files import stored_tensors, write_random_voxcpm2

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main(arguments: list[str] | None = None) -> int:
    """Write the checkpoint that the options ask for; return the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    drawn = {"seed": options.seed, "dtype": DTYPES[options.dtype], "device": options.device}
    started = time.monotonic()
    try:
        if options.preset in SPEECH:
            if options.format is not None:
                parser.error(f"--format: {options.preset} has one, a folder; leave it out")
            form, count = "folder", stored_tensors(SPEECH[options.preset])
            write_random_voxcpm2(options.output, SPEECH[options.preset], **drawn)
        else:
            config = presets()[options.preset].model
            keys = family_named(config.family).keys
            form, count = options.format or next(iter(keys.random_forms)), len(keys.shapes(config))
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
        "preset": options.preset,
        "seed": options.seed,
        "dtype": options.dtype,
        "seconds": round(time.monotonic() - started, 3),
    }
    print(json.dumps(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Make a seeded random checkpoint.")
    forms = dict.fromkeys(form for family in families().values() for form in family.keys.random_forms)
    parser.add_argument("--preset", choices=sorted({*presets(), *SPEECH}), default="tiny")
    parser.add_argument("--format", choices=forms, help="default: the first one of the preset's family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--device", default="cpu", help="where to draw; cuda draws other numbers than cpu")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file or folder; must not exist yet")
    return parser


if __name__ == "__main__":
    sys.exit(main())
