"""Checks manifests that tests build against the JSON schema in the runtime's package. No tests."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

SCHEMA = Path(__file__).parents[1] / "runtime" / "seko_runtime" / "video" / "manifest.schema.json"


@lru_cache
def validator() -> Any:
    """The schema's validator."""
    from jsonschema import Draft202012Validator  # here: fixtures of tests that build nothing need none

    return Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))


def check_manifest(folder: Path) -> Path:
    """Return an artifact's folder, if its manifest is as the schema says."""
    validator().validate(json.loads((folder / "manifest.json").read_bytes()))
    return folder
