"""What `seko-export report` writes: one archive about an artifact on this machine, to attach to an issue."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seko_export.engines.kernel_table import examine_kernels
from seko_export.errors import ExportError, UsageError
from seko_export.host import environment
from seko_export.host.child_process import last_line, run_child
from seko_export.tools.inspection import bench_artifact, inspect_artifact, verify_artifact
from seko_runtime.errors import SekoRuntimeError
from seko_runtime.format.whole_files import check_file_place, is_inside, whole_file

REPORT, CLIP = "report.json", "clip.mp4"


def write_report(artifact: Path | Callable[[], Path], output: Path, chunks: int) -> dict[str, Any]:
    """Describe this machine and an artifact, replay its goldens, time it and make a clip; write all into one archive.

    What fails stands in the report in place of its result. Paths, and the names of this machine and of its user, are
    left out.

    Parameters
    ----------
    artifact : Path or callable
        Folder of the artifact, or what builds one and returns its folder.
    output : Path
        The zip archive; a file that is there is replaced. It gets `REPORT`, and `CLIP` if a video could be made.
    chunks : int
        Number of chunks to time, with a full cache.

    Returns
    -------
    dict
        What is in `REPORT`: ``machine``, ``artifact``, ``verify``, ``bench`` and ``clip``. ``build`` has the seconds of
        what was built for it, or an error; then the rest is missing.

    Raises
    ------
    ArtifactError
        If an artifact that was given is damaged or cannot be read; then nothing is written.
    UsageError
        If the archive is inside the artifact that was given, or a folder is at its path.
    DiskError
        If the archive cannot be written.
    """
    if isinstance(artifact, Path) and is_inside(output, artifact):
        raise UsageError(f"-o {output} lies inside the artifact, which it would spoil; choose another place")
    check_file_place(output)
    given = artifact if isinstance(artifact, Path) else None
    described = inspect_artifact(given) if given is not None else None
    found: dict[str, Any] = {
        "machine": environment.report([*environment.examine(), examine_kernels()]) | _machine()
    }
    with tempfile.TemporaryDirectory() as folder:
        clip = Path(folder, CLIP)
        if callable(artifact):
            begun = time.monotonic()
            try:
                given = artifact()
                found["build"] = {"seconds": round(time.monotonic() - begun, 1)}
            except (ExportError, SekoRuntimeError) as error:
                found["build"] = {"error": str(error)}
        if given is not None:
            found["artifact"] = described or inspect_artifact(given)
            _examine(found, given, clip, chunks)
        text = _anonymous(json.dumps(found, indent=1, default=str), _names(given, Path(folder)))
        with (
            whole_file(output, replace=True) as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            archive.writestr(REPORT, text)
            if clip.is_file():
                archive.write(clip, CLIP)
    result: dict[str, Any] = json.loads(text)
    return result


def _examine(found: dict[str, Any], artifact: Path, clip: Path, chunks: int) -> None:
    found["verify"] = _told(lambda: verify_artifact(artifact))
    found["bench"] = _told(lambda: bench_artifact(artifact, chunks))
    made = run_child("seko_runtime", "run", str(artifact), "--chunks", "4", "--seed", "0", "-o", str(clip))
    found["clip"] = CLIP if made.returncode == 0 else {"error": last_line(made)}


def _machine() -> dict[str, object]:
    """Return what `doctor` does not say: system, processor, cores, memory and the driver's version."""
    cpu = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": platform.platform(aliased=True),
        "processor": cpu[0].partition(": ")[2] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "nvidia_driver": next(iter(_lines("/sys/module/nvidia/version")), None),
    }


def _lines(file: str) -> list[str]:
    path = Path(file)
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _told(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return part()
    except (ExportError, SekoRuntimeError) as error:
        return {"error": str(error)}


def _names(artifact: Path | None, temporary: Path) -> dict[str, str]:
    """Return what is nobody's business, each with what stands in its place; a folder before one that it may lie in."""
    places = [("ARTIFACT", artifact)] if artifact else []
    places += [
        ("TEMPORARY", temporary),
        *([] if sys.prefix == sys.base_prefix else [("PYTHON", Path(sys.prefix))]),
        ("FOLDER", Path.cwd()),
        ("~", Path.home()),
    ]
    return {
        str(spelled): stand_in
        for stand_in, path in places
        for spelled in (path.resolve(), path.absolute(), path)
        if len(spelled.parts) > 1  # a name alone may be a word of the report
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name
        return str(os.getuid())


def _anonymous(text: str, names: dict[str, str]) -> str:
    for name, stand_in in (names | {platform.node() or " ": "MACHINE"}).items():
        whole = rf"(?<![\w.-]){re.escape(json.dumps(name)[1:-1])}(?![\w-])"
        text = re.sub(whole, stand_in, text)
    return text.replace(f"/{_user()}/", "/USER/")
