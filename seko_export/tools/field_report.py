"""What `seko-export report` writes: one archive about an artifact on this machine, to attach to an issue."""

from __future__ import annotations

import json
import platform
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seko_export.engines.kernel_table import examine_kernels
from seko_export.errors import ExportError
from seko_export.host import environment
from seko_export.host.child_process import run_child
from seko_export.tools.inspection import bench_artifact, inspect_artifact, verify_artifact
from seko_runtime.errors import SekoRuntimeError

REPORT, CLIP = "report.json", "clip.mp4"


def write_report(artifact: Path, output: Path, chunks: int) -> dict[str, Any]:
    """Describe this machine and an artifact, replay its goldens, time it and make a clip; write all into one archive.

    What fails stands in the report in place of its result. Paths, and the names of this machine and of its user, are
    left out.

    Parameters
    ----------
    artifact : Path
        Folder of the artifact.
    output : Path
        The zip archive; a file that is there is replaced. It gets `REPORT`, and `CLIP` if a video could be made.
    chunks : int
        Number of chunks to time, with a full cache.

    Returns
    -------
    dict
        What is in `REPORT`: ``machine``, ``artifact``, ``verify``, ``bench`` and ``clip``.

    Raises
    ------
    ArtifactError
        If the artifact is damaged or cannot be read; then nothing is written.
    """
    found: dict[str, Any] = {
        "machine": environment.report([*environment.examine(), examine_kernels()])
        | {"system": platform.platform(aliased=True), "processor": platform.machine()},
        "artifact": inspect_artifact(artifact),
        "verify": _told(lambda: verify_artifact(artifact)),
        "bench": _told(lambda: bench_artifact(artifact, chunks)),
    }
    with tempfile.TemporaryDirectory() as folder:
        clip = Path(folder, CLIP)
        made = run_child(
            "seko_runtime", "run", str(artifact), "--chunks", "4", "--seed", "0", "-o", str(clip)
        )
        found["clip"] = CLIP if made.returncode == 0 else {"error": made.stderr.strip().splitlines()[-1:]}
        text = _anonymous(json.dumps(found, indent=1, default=str), artifact, Path(folder))
        with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(REPORT, text)
            if made.returncode == 0:
                archive.write(clip, CLIP)
    result: dict[str, Any] = json.loads(text)
    return result


def _told(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return part()
    except (ExportError, SekoRuntimeError) as error:
        return {"error": str(error)}


def _anonymous(text: str, artifact: Path, temporary: Path) -> str:
    names = {
        str(artifact.absolute()): "ARTIFACT",
        str(artifact): "ARTIFACT",
        str(temporary): "TEMPORARY",
        str(Path.home()): "~",
        platform.node(): "MACHINE",
    }
    for name, stand_in in names.items():
        if len(name) > 1:  # a home can be /, which is nobody's
            text = text.replace(json.dumps(name)[1:-1], stand_in)
    return text
