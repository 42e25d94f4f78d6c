"""An artifact whose cache or weights are streamed, anew with them on the device: the manifest alone differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from seko_export.artifact.manifest_json import manifest_json
from seko_runtime.video.manifest import parse_video_manifest


def resident_copy(streamed: Path, output_path: Path) -> Path:
    """Link an artifact's files into a folder, beside a manifest of the same without ``--offload-cache``,
    ``--offload-text`` and ``--offload-layers``.

    Parameters
    ----------
    streamed : Path
        The artifact.
    output_path : Path
        A folder on the same disk that does not exist.

    Returns
    -------
    Path
        ``output_path``.
    """
    output_path.mkdir(parents=True)
    for path in sorted(streamed.rglob("*")):
        target = output_path / path.relative_to(streamed)
        if path.is_dir():
            target.mkdir()
        elif path.name != "manifest.json":
            target.hardlink_to(path)
    manifest = parse_video_manifest((streamed / "manifest.json").read_bytes())
    buffers = tuple(replace(buffer, device_layers=0) for buffer in manifest.buffers)
    weights = tuple(replace(weight, on_host=False) for weight in manifest.weights)
    resident = replace(manifest, buffers=buffers, weights=weights)
    (output_path / "manifest.json").write_bytes(manifest_json(resident))
    return output_path
