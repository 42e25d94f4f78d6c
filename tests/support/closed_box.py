"""Run a program in a root of its own: folders and files read-only, a tmpfs, no network, no root, no home. No tests.

`enter` runs inside `unshare --map-root-user --mount --net`, through this file as a script.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

USER = 1000  # who the program is in there
TMPFS_BYTES = 256 << 20
DEVICES = ("/dev/null", "/dev/urandom")  # torch opens the second when it is imported
_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 4096, 16384, 1 << 18
_DETACH, _NEWUSER, _PIVOT_ROOT = 2, 0x10000000, {"x86_64": 155, "aarch64": 41}
# What a mount has must be kept when it is bound read-only: statvfs's flags, and mount's for the same.
_KEPT = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}


def why_not(root: Path) -> str | None:
    """Say why no box can be made here, None if one can: tried with the smallest one."""
    try:
        done = run(root, ["/bin/true"], [Path("/bin"), Path("/lib"), Path("/lib64"), Path("/usr")], {})
    except FileNotFoundError:
        return "there is no unshare command"
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def run(
    root: Path, command: list[str], folders: list[Path], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command in a box made of ``folders`` or files, at their own places, read-only; /tmp is an empty tmpfs."""
    spec = {
        "root": str(root),
        "command": command,
        "folders": [str(folder) for folder in folders if folder.exists()],
        "environment": environment,
    }
    unshare = ["unshare", "--map-root-user", "--mount", "--net"]
    return subprocess.run(
        [*unshare, sys.executable, "-I", __file__, json.dumps(spec)],
        capture_output=True,
        text=True,
        check=False,
    )


def enter(spec: dict) -> None:
    """Make the root, go there for good, become `USER`, and become the command."""
    root = spec["root"]
    mount("none", "/", flags=_REC | _PRIVATE)
    mount("box", root, "tmpfs")
    for name in ("tmp", "proc", "old"):
        os.mkdir(f"{root}/{name}")
    mount("tmp", f"{root}/tmp", "tmpfs", data=f"size={TMPFS_BYTES}")
    mount("/proc", f"{root}/proc", flags=_BIND | _REC)
    for folder in spec["folders"]:
        if os.path.isdir(folder):
            os.makedirs(root + folder, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(root + folder), exist_ok=True)
            Path(root + folder).touch()
        mount(folder, root + folder, flags=_BIND)
        had = os.statvfs(folder).f_flag
        flags_set = sum(mounts for stat, mounts in _KEPT.items() if had & stat)
        mount("none", root + folder, flags=_REMOUNT | _BIND | _RDONLY | flags_set)
    for device in DEVICES:
        os.makedirs(os.path.dirname(root + device), exist_ok=True)
        Path(root + device).touch()
        mount(device, root + device, flags=_BIND)
    mount("none", root, flags=_REMOUNT | _RDONLY)
    os.chdir(root)
    libc = ctypes.CDLL(None, use_errno=True)
    check(libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"old"), "pivot_root")
    check(libc.umount2(b"/old", _DETACH), "umount")
    os.chdir("/tmp")
    check(libc.unshare(_NEWUSER), "unshare the user")
    for name, line in (("setgroups", "deny"), ("uid_map", f"{USER} 0 1"), ("gid_map", f"{USER} 0 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    os.execve(spec["command"][0], spec["command"], spec["environment"])


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.mount(
        source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None
    )
    check(done, f"mount {target}")


def check(result: int, what: str) -> None:
    if result:
        sys.exit(f"{what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    enter(json.loads(sys.argv[1]))
