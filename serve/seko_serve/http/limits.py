"""The limits of a session, in the form of the object ``limits`` in the answers of ``POST /v1/sessions`` and
``/v1/models``."""

from __future__ import annotations

from seko_runtime.format.manifest import Manifest
from seko_serve import protocol
from seko_serve.http import access, openings
from seko_serve.http.workload import workload_of
from seko_serve.live.pace import CREDIT


def limits_of(manifest: Manifest) -> dict[str, int | float]:
    """Return the largest sizes, numbers and rates that the server takes of a session's client, by name.

    Limits of inputs that the artifact does not take, such as a voice, are left out.
    """
    per_s, at_once = access.MESSAGES
    return {
        "request_bytes": openings.MAX_OPENING_BYTES,
        "control_bytes": protocol.MAX_CONTROL_BYTES,
        "messages_per_s": per_s,
        "messages_at_once": at_once,
        "chunks_ahead": CREDIT,
        "buffer_chunks": protocol.MAX_BUFFER,
        **workload_of(manifest).limits_of(manifest),
    }
