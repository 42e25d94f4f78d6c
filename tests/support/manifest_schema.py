"""Checks manifests that tests build against the JSON schemas in the runtime's package. No tests."""

from __future__ import annotations

import json
import sys
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any

from seko_export.artifact import manifest_json as module
from seko_runtime.format.manifest import Manifest
from seko_runtime.opening.workloads import WORKLOADS

RUNTIME = Path(__file__).parents[2] / "runtime" / "seko_runtime"
BUILDER = "seko_export.build_steps"  # the module that writes the manifest of every build


def schema_file(kind: str) -> Path:
    """Return the file of the schema of a workload that is built in."""
    return RUNTIME / kind / "manifest.schema.json"


@lru_cache
def validator(kind: str) -> Any:
    """The validator of that schema."""
    from jsonschema import Draft202012Validator  # here: fixtures of tests that build nothing need none

    return Draft202012Validator(json.loads(schema_file(kind).read_text(encoding="utf-8")))


def check_document(document: bytes) -> None:
    """Check a manifest against the schema of its ``workload.kind``; workloads of tests have no schema.

    Raises
    ------
    jsonschema.ValidationError
        If it is not as the schema says.
    """
    table = json.loads(document)
    if table["workload"]["kind"] in WORKLOADS.own:
        validator(table["workload"]["kind"]).validate(table)


def check_manifest(folder: Path) -> Path:
    """Return an artifact's folder, if its manifest is as the schema says: what this process did not build."""
    check_document((folder / "manifest.json").read_bytes())
    return folder


def check_what_builds_write() -> None:
    """Have each build in this process check the manifest that it writes.

    The builder need not be imported for it, as it would import torch. Tests write manifests by the same function, wrong
    ones, too, so what others write is not checked.
    """
    written = module.manifest_json

    @wraps(written)
    def checked(manifest: Manifest) -> bytes:
        document = written(manifest)
        if sys._getframe(1).f_globals["__name__"] == BUILDER:
            check_document(document)
        return document

    module.manifest_json = checked
    if BUILDER in sys.modules:  # it has the function by its own name already
        vars(sys.modules[BUILDER])["manifest_json"] = checked
