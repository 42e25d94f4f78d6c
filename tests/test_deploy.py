"""The twelve lines of docs/deploy.md, run one after another on the tiny model."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.support.lone_runtime import link_distribution

pytest.importorskip("cryptography", reason="the library cryptography is not installed: nothing can be signed")

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
BUILD, COPY, INSTALL, COMPARE = (
    "seko-export build --preset tiny --fp4-kv --target cpu -o tiny",
    "rsync -a tiny.tar maker.pub runtime user@box:seko/",
    "pip install './runtime[aoti,trust]' torch==VERSION",
    "echo 'FINGERPRINT  maker.pub' | sha256sum --check",
)


def blocks() -> list[list[str]]:
    return [block.strip().splitlines() for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)]


def run(lines: list[str], folder: Path, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """One shell for a box, as one person would type there."""
    environ = {name: value for name, value in os.environ.items() if name not in ("SEKO_TRUST", "PYTHONPATH")}
    environ |= {"PATH": f"{path}{os.pathsep}{os.environ['PATH']}", **environment}
    script = "set -euo pipefail\n" + "\n".join(lines)
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


def test_there_are_twelve_lines_on_two_boxes():
    here, there = blocks()
    assert len(here) + len(there) == 12
    special = [BUILD, COPY, INSTALL, COMPARE]
    assert [line for line in here + there if line in special] == special
    trusting = [number for number, line in enumerate(there) if "maker.pub" in line]
    assert there[trusting[0]] == COMPARE


def test_the_lines_lead_from_a_build_to_a_video(fp4, lone_python, tmp_path):
    """Stand-ins: an artifact that the first line's command has built already, `cp`, a Python made of links, `sed`."""
    here, there = blocks()
    build_box, inference_box = tmp_path / "build", tmp_path / "seko"
    build_box.mkdir()
    inference_box.mkdir()
    shutil.copytree(fp4.folder, build_box / "tiny")
    scripts = Path(sysconfig.get_path("scripts"))
    lines = [line for line in here if line not in (BUILD, COPY)]
    done = run(lines, build_box, scripts, PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    assert done.returncode == 0, done.stderr
    (fingerprint,) = [line.split()[0] for line in done.stdout.splitlines() if line.endswith("  maker.pub")]
    for name in ("tiny.tar", "maker.pub"):
        shutil.copy(build_box / name, inference_box)
    site = tmp_path / "site"
    site.mkdir()
    link_distribution("cryptography", site)
    lines = [line.replace("FINGERPRINT", fingerprint) for line in there if line != INSTALL]
    done = run(lines, inference_box, lone_python.parent, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    assert (inference_box / "out.y4m").read_bytes().startswith(b"YUV4MPEG2 ")
    assert sorted(path.name for path in inference_box.iterdir()) == [
        "maker.pub",
        "out.y4m",
        "tiny",
        "tiny.tar",
    ]
    # With another's key beside a tar that he signed, the lines end before the key is trusted.
    (inference_box / "maker.pub").rename(tmp_path / "maker.pub")
    (inference_box / "maker.pub").write_text("ed25519 " + "0" * 64 + " maker\n")
    (inference_box / "out.y4m").unlink()
    shutil.rmtree(inference_box / "tiny")
    done = run(lines, inference_box, lone_python.parent, PYTHONPATH=str(site))
    assert (done.returncode, "maker.pub: FAILED" in done.stdout) == (1, True)
    assert not (inference_box / "tiny").exists()
    (tmp_path / "maker.pub").replace(inference_box / "maker.pub")
    # And without the signature the same lines end at the first that asks for it.
    (build_box / "tiny" / "manifest.sig").unlink()
    repack = "seko-export pack tiny -o tiny.tar --force"
    done = run([repack], build_box, scripts, PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    assert done.returncode == 0, done.stderr
    shutil.copy(build_box / "tiny.tar", inference_box)
    done = run(lines, inference_box, lone_python.parent, PYTHONPATH=str(site))
    assert done.returncode == 4
    assert "is not signed" in done.stderr
    assert not (inference_box / "tiny").exists()
