"""Run what an image says, as ``docker run --read-only --tmpfs /tmp:exec --network none`` would. No tests.

The image's root, which is mounted here, becomes the root of a process of its own: read-only, with an empty /tmp, no
network but loopback, the image's user, variables, folder and command. As root. The part below ``__main__`` runs in it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STARTED_S, TRIES_S, STOPPED_S = 300, 1, 120  # a busy machine opens an artifact in a minute
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def why_not() -> str | None:
    """Say why no image can be built and entered here, None if one can."""
    if os.getuid() != 0:
        return "needs root"
    done = subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "mount", "-t", "tmpfs", "none", "/mnt"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    return None if done.returncode == 0 else f"a folder cannot be mounted: {done.stderr.strip()}"


def run(
    root: Path,
    config: dict[str, Any],
    given: dict[str, Path],
    environment: dict[str, str],
    probe: str = "",
) -> dict[str, Any]:
    """Run an image's command, with its health check and a probe beside it where there is one.

    Parameters
    ----------
    root : Path
        The image's files; nothing is written to them.
    config : dict
        What the image says of user, variables, folder, command and health check, in Docker's words.
    given : dict
        Folders or files of this machine by their place in there, read-only.
    environment : dict
        Variables beside the image's.
    probe : str
        A program for the image's Python, run when the health check holds; then the command is sent SIGTERM. Without one
        the command runs to its end.

    Returns
    -------
    dict
        ``code`` and ``said`` of the command; with a probe also ``health``, the tries that the health check took, and
        ``probe``, the JSON that it printed last, or the text of its error.
    """
    spec = {
        "root": str(root),
        "user": [int(number) for number in config["User"].split(":")],
        "environment": dict(line.split("=", 1) for line in config["Env"]) | environment,
        "folder": config["WorkingDir"],
        "command": [*config["Entrypoint"], *(config["Cmd"] or ())],
        "health": config["Healthcheck"]["Test"][1:],
        "given": {place: str(path) for place, path in given.items()},
        "probe": probe,
    }
    unshare = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"]
    done = subprocess.run([*unshare, sys.executable, "-I", __file__, json.dumps(spec)],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _inside(spec: dict[str, Any]) -> dict[str, Any]:
    _make_root(spec)
    os.chroot(spec["root"])
    os.chdir(spec["folder"])
    said = Path("/tmp/.said")  # of the command's
    with said.open("w") as out:
        command = subprocess.Popen(spec["command"], stdout=out, stderr=subprocess.STDOUT, **_as_user(spec))
    found: dict[str, Any] = {}
    if spec["probe"]:
        found["health"] = _healthy(spec, command)
        probe = subprocess.run(["python", "-c", spec["probe"]], capture_output=True, text=True, check=False,
                               **_as_user(spec))  # fmt: skip
        found["probe"] = json.loads(probe.stdout.splitlines()[-1]) if probe.returncode == 0 else probe.stderr
        command.terminate()
    found["code"] = command.wait(STOPPED_S if spec["probe"] else STARTED_S)
    return found | {"said": said.read_text()}


def _healthy(spec: dict[str, Any], command: subprocess.Popen[bytes]) -> int:
    """Return how many tries the image's health check took; -1 if it never held."""
    end, tries = time.monotonic() + STARTED_S, 0
    while time.monotonic() < end and command.poll() is None:
        tries += 1
        if subprocess.run(spec["health"], capture_output=True, check=False, **_as_user(spec)).returncode == 0:
            return tries
        time.sleep(TRIES_S)
    return -1


def _as_user(spec: dict[str, Any]) -> dict[str, Any]:
    user, group = spec["user"]
    return {
        "user": user,
        "group": group,
        "extra_groups": [],
        "env": spec["environment"],
        "cwd": spec["folder"],
    }


def _make_root(spec: dict[str, Any]) -> None:
    root = spec["root"]

    def mount(*arguments: str) -> None:
        subprocess.run(["mount", *arguments], check=True)

    mount("--make-rprivate", "/")
    mount("--bind", root, root)
    for place, path in spec["given"].items():
        target = Path(root + place)
        if not target.exists():  # in the image's own layer, which is thrown away
            target.mkdir() if os.path.isdir(path) else target.touch()
        mount("--bind", path, str(target))
        mount("-o", "remount,bind,ro", str(target))
    for device in ("null", "urandom"):
        Path(root, "dev", device).touch()
        mount("--bind", f"/dev/{device}", f"{root}/dev/{device}")
    mount("-o", "remount,bind,ro", root)
    mount("-t", "proc", "proc", f"{root}/proc")
    mount("-t", "tmpfs", "-o", "mode=1777", "tmp", f"{root}/tmp")
    state = Path(root, "state")
    if state.is_dir():  # a volume begins as the image's folder, with its owner and mode
        had = state.stat()
        options = f"uid={had.st_uid},gid={had.st_gid},mode={had.st_mode & 0o7777:o}"
        mount("-t", "tmpfs", "-o", options, "state", str(state))
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


if __name__ == "__main__":
    print(json.dumps(_inside(json.loads(sys.argv[1]))))
