"""What is common to the bodies of requests for new sessions and videos."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from seko_serve.errors import ServeError, check_fields
from seko_serve.media import uploads

# Bytes of a body: a picture, and a voice for each of a few speakers, in base64, beside the other fields.
MAX_OPENING_BYTES = (uploads.MAX_PICTURE_BYTES + uploads.MAX_SOUND_BYTES) // 3 * 4 + (1 << 20)


def check_opening(table: dict[str, Any], fields: Collection[str], name: str) -> None:
    """Check that the JSON object of a request has no field other than ``fields``, and that its ``model``, if any, is
    the server's model ``name``; ServeError otherwise."""
    check_fields(table, fields)
    if table.get("model", name) != name:
        raise ServeError("not_found", f"this server has the model {name}", field="model")
