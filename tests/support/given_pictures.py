"""Pictures of tests, as a session of an artifact takes them. No tests."""

from __future__ import annotations

from typing import Any

from seko_runtime.controls import controls_of
from seko_runtime.video.manifest import VideoManifest


def opening_with(manifest: VideoManifest, chunks: int = 4, **event: Any) -> dict[str, Any]:
    """What `open_session` is given of pictures: ``image`` or ``reference``, and ``inputs``."""
    controls = controls_of(manifest)
    (control,) = controls.of_kind("pictures")
    control.take(event)
    control.check_lasts(chunks)
    return controls.opening()
