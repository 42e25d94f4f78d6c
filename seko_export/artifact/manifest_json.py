"""Conversion of a manifest to JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from seko_runtime.format.manifest import Manifest

LINE_LETTERS = 120
MOST_NESTED = 3  # deeper values, such as a call, are one line of any length


def manifest_json(manifest: Manifest) -> bytes:
    """Return a manifest as UTF-8 JSON with every field and sorted keys; equal manifests give equal bytes.

    A call of a program is written as one line, and so is every value that is short enough.
    """
    return (_written(dataclasses.asdict(manifest), 0) + "\n").encode("utf-8")


def _written(value: Any, depth: int) -> str:
    line = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
    if not value or not isinstance(value, dict | list | tuple) or depth == MOST_NESTED:
        return line
    if depth and depth + len(line) <= LINE_LETTERS:
        return line
    if isinstance(value, dict):
        parts = [
            f"{json.dumps(key, ensure_ascii=False)}: {_written(value[key], depth + 1)}"
            for key in sorted(value)
        ]
    else:
        parts = [_written(part, depth + 1) for part in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    indent = "\n" + " " * (depth + 1)
    return f"{begin}{indent}{(',' + indent).join(parts)}{indent[:-1]}{end}"
