"""File names in an artifact: plain relative paths that Python would not import."""

from __future__ import annotations

import re

from seko_runtime.errors import ArtifactError, ManifestError
from seko_runtime.format import budgets
from seko_runtime.format.json_fields import as_text

_MODULE_PATH = re.compile(r"[^/]*\.(?:py|pyc|so|pth)|[^/]+/__init__\.(?:[^/]+\.)?(?:py|pyc|so)")


def check_relative_path(path: str, where: str) -> str:
    """Return ``path`` if it is a plain relative path inside the artifact.

    Raises
    ------
    ManifestError
        If the path is absolute, empty, too long or too deep, or has a backslash, a control character, or an empty,
        ``.`` or ``..`` part.
    """
    parts = path.split("/")
    bad = len(path) > 1024 or len(parts) > budgets.MAX_PATH_PARTS
    bad = bad or any(part in ("", ".", "..") or len(part) > 255 for part in parts)
    if bad or "\\" in path or any(ord(letter) < 32 or ord(letter) == 127 for letter in path):
        raise ManifestError(
            f"{where} names the file {path[:80]!r}, expected a relative path inside the artifact "
            f"(at most {budgets.MAX_PATH_PARTS} parts joined by '/', none empty or '..'); do not open artifacts from "
            "this source"
        )
    return path


def check_no_module(path: str) -> None:
    """Refuse a file that Python would import if it were started in the artifact's folder.

    Raises
    ------
    ArtifactError
        If ``path``, relative to the artifact's folder, is a module, a path file (`.pth`) or the ``__init__`` of a
        package.
    """
    if _MODULE_PATH.fullmatch(path):
        raise ArtifactError(
            f"the artifact holds {path[:80]!r}, which Python would import if it were started there, and no artifact "
            "needs; do not open artifacts from this source"
        )


def as_path(value: object, where: str) -> str:
    """Read the name of a file in the artifact from JSON."""
    if not isinstance(value, str):
        return as_text(value, where)  # raises with the type that was found
    return as_text(check_relative_path(value, where), where)
