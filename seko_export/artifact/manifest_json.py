"""Serialises a manifest."""

from __future__ import annotations

import dataclasses
import json

from seko_runtime.format.manifest import Manifest


def manifest_json(manifest: Manifest) -> bytes:
    """Return a manifest as UTF-8 JSON with every field and sorted keys; equal manifests give equal bytes."""
    table = dataclasses.asdict(manifest)
    text = json.dumps(table, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8") + b"\n"
