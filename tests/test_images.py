"""The server's image for CPUs, built as its Dockerfile stands on a base of Debian's own, and used as its user would.

    SEKO_IMAGES=/var/tmp/images bash scripts/test.sh --all tests/test_images.py

The folder takes the base and the images, 3 GB; what is there already is not built again. Debian's mirror and pip's
index must be in reach.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Built
from tests.support import container

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
NAME = "seko-cpu-serve"
Image = tuple[Path, dict[str, Any]]
PROBE = """
import errno, json, os, shutil, socket
from seko_serve.client import Client
from seko_serve.protocol import Media

def refusal(act):
    try:
        act()
    except OSError as fault:
        return errno.errorcode[fault.errno]

def media():
    with Client("http://127.0.0.1:8000", os.environ["SEKO_SERVE_API_KEY"]) as client:
        client.open(codecs=["rgb24"], prompt="walk", seed=3)
        for received in client.messages():
            if isinstance(received, Media):
                return len(received.payload)
            if received["type"] == "chunk":
                client.send("ack", chunk=received["chunk"])

print(json.dumps({
    "user": [os.getuid(), os.getgid()],
    "read-only": [refusal(lambda: open(f"{folder}/new", "w")) for folder in ("", "/opt/seko", "/artifact")],
    "network": refusal(lambda: socket.create_connection(("192.0.2.1", 80), 5)),
    "compilers": [name for name in ("g++", "gcc", "cc", "clang", "ld") if shutil.which(name)],
    "media": media(),
    "state": os.access("/state", os.W_OK),
}))
"""


@pytest.fixture(scope="session")  # as `fp4`, which is built after it, or not at all
def image() -> Iterator[Image]:
    """The folder of its files, and what it says of itself in Docker's words."""
    store = os.environ.get("SEKO_IMAGES")
    if store is None:
        pytest.skip("SEKO_IMAGES names no folder for images")
    if reason := container.why_not():
        pytest.skip(reason)
    for program in ("buildah", "debootstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    command = ["bash", ROOT / "scripts/container/build.sh", store]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert re.findall(r"^[\d.]+ [MG]B +localhost/(\S+)$", done.stdout, re.MULTILINE) == [NAME]

    def buildah(*words: str) -> str:
        there = ["buildah", "--root", f"{store}/images", "--runroot", f"{store}/run"]
        return subprocess.run([*there, *words], capture_output=True, text=True, check=True).stdout.strip()

    inside = buildah("from", "--pull-never", f"localhost/{NAME}")
    try:
        said = json.loads(buildah("inspect", "--type", "image", f"localhost/{NAME}"))
        yield Path(buildah("mount", inside)), said["Docker"]["config"]
    finally:
        buildah("umount", inside)
        buildah("rm", inside)


def test_the_server_s_image_streams_in_a_closed_box(image: Image, fp4: Built) -> None:
    """To its user without root, from a root that cannot be written to; the health check holds and SIGTERM ends it."""
    found = container.run(*image, {"/artifact": fp4.folder}, {"SEKO_SERVE_API_KEY": "k" * 32}, PROBE)
    assert found["health"] > 0, found["said"]
    assert isinstance(found["probe"], dict), found["probe"]
    assert found["probe"] == {
        "user": [1000, 1000],
        "read-only": ["EROFS"] * 3,
        "network": "ENETUNREACH",
        "compilers": [],
        "media": found["probe"]["media"],
        "state": True,
    }
    assert found["probe"]["media"] > 0
    assert found["code"] == 0, found["said"]


def test_the_server_s_image_does_not_start_without_a_key(image: Image, fp4: Built) -> None:
    found = container.run(*image, {"/artifact": fp4.folder}, {})
    assert found["code"] == 2
    assert "SEKO_SERVE_API_KEY" in found["said"]
