"""Reads the small JSON files that lie beside weights: an index of shards, a config."""

from __future__ import annotations

import json
from pathlib import Path

MAX_JSON_BYTES = 4 << 20  # the index of a model of 14B has 0.1 MB


def read_json(file: Path) -> object:
    """Return what a JSON file says.

    Parameters
    ----------
    file : Path
        A regular file, or a link to one; untrusted.

    Raises
    ------
    ValueError
        If it is no regular file, has more than `MAX_JSON_BYTES`, or is no JSON, with the reason.
    OSError
        If it cannot be read.
    """
    if file.exists() and not file.is_file():
        raise ValueError("it is no regular file")
    with file.open("rb") as opened:
        content = opened.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"it has more than {MAX_JSON_BYTES} bytes")
    try:
        told: object = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return told
