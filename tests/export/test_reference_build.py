"""An artifact with reference frames: built and verified by the real command, run with the golden's and with others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from seko_runtime import open_artifact
from seko_runtime.__main__ import main
from tests.conftest import Built, build_tiny

LAYOUT = ("--height", "32", "--width", "48", "--reference-frames", "2", "--kv", "int4-hadamard-int4-sink")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """References are two of a chunk of three frames; keys rotated, pinned frames apart."""
    return build_tiny(tmp_path_factory.mktemp("reference") / "artifact", *LAYOUT)


def test_run_takes_latents_and_falls_back_on_the_goldens(built: Built, tmp_path: Path) -> None:
    golden = load_file(built.folder / "golden/golden.safetensors")["reference"]
    assert golden.shape == (1, 16, 2, 4, 6)
    np.save(tmp_path / "same.npy", golden)
    np.save(tmp_path / "other.npy", -golden[0])
    np.save(tmp_path / "wide.npy", golden.astype(np.float64))

    def run(*options: str) -> bytes:
        goal = tmp_path / "out.npy"
        assert main(["run", str(built.folder), "--chunks", "5", *options, "-o", str(goal)]) == 0
        return goal.read_bytes()

    plain = run()
    assert run("--reference", str(tmp_path / "same.npy")) == plain
    assert run("--reference", str(tmp_path / "other.npy")) != plain
    refused = [
        "run",
        str(built.folder),
        "--reference",
        str(tmp_path / "wide.npy"),
        "-o",
        str(tmp_path / "no.npy"),
    ]
    assert main(refused) == 2


def test_info_and_the_session_know_them(built: Built, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(built.folder)]) == 0
    assert "reference 2, sink 1, ring 6" in capsys.readouterr().out
    with open_artifact(built.folder) as artifact:
        assert artifact.manifest.format_version == 4
        assert all(error.within for error in artifact.verify())
