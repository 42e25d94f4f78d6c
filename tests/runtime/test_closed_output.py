"""Stdout or stderr that is full, closed or read by nobody, and folders that may not be written: one sentence each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seko_export.artifact.packing import pack_artifact

from .test_end_signals import ROOT

FULL = "error: stdout cannot be written (No space left on device): send it elsewhere\n"
STOPPED = "error: whoever read the output stopped reading\n"
COMMAND = [sys.executable, "-m", "seko_runtime"]


def ended(stdout: int | None, *arguments: object, stderr: int = subprocess.PIPE) -> tuple[int, str]:
    """Exit code and stderr of a command whose stdout is a descriptor; None closes it."""
    closes = None if stdout is not None else lambda: os.close(1)
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        stdout=stdout,
        stderr=stderr,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=120,
        preexec_fn=closes,
    )
    return done.returncode, done.stderr


@pytest.fixture
def full():
    with open("/dev/full", "wb") as file:
        yield file.fileno()


@pytest.fixture
def unread():
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


@pytest.mark.parametrize("options", [["info"], ["--version"]])
def test_a_full_stdout_is_an_error_of_the_environment(whole, full, options):
    artifact = [whole] if "info" in options else []
    assert ended(full, *options, *artifact) == (5, FULL)


@pytest.mark.parametrize("options", [["info", "--json"], ["--help"]])
def test_a_closed_pipe_ends_a_command_in_one_sentence(whole, unread, options):
    artifact = [whole] if "info" in options else []
    assert ended(unread, *options, *artifact) == (1, STOPPED)


def test_a_failure_keeps_its_code_where_nobody_reads(tmp_path, unread, full):
    said = f"error: {tmp_path / 'nothing'} was not found; check the path\n"
    for stdout in (unread, full):
        assert ended(stdout, "info", tmp_path / "nothing", "--json") == (4, said)


def test_without_stdout_or_stderr_a_command_does_its_work(whole, full, unread, tmp_path):
    assert ended(None, "info", whole) == (0, "")
    assert ended(None, "run", whole, "-o", "-") == (
        2,
        "error: -o - writes to stdout, which is closed; choose another -o\n",
    )
    for stderr in (full, unread):
        assert ended(subprocess.DEVNULL, "info", tmp_path / "nothing", stderr=stderr)[0] == 4


def test_a_video_for_a_full_device(whole, full):
    """The artifact's engines do not load without their packages: what is checked before them is."""
    code, said = ended(full, "run", whole, "-o", "-", "--prompts", "missing.json")
    assert (code, said) == (3, "error: --prompts missing.json was not found\n")


def test_a_folder_on_a_read_only_file_system(whole, tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "none", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a read-only file system cannot be mounted here")
    archive = Path(f"{tmp_path}.tar")
    try:
        pack_artifact(whole, archive)
        for command in (
            ["run", whole, "-o", tmp_path / "a.npy"],
            ["unpack", archive, "-o", tmp_path / "folder"],
        ):
            code, said = ended(subprocess.DEVNULL, *command)
            assert code == 5
            assert said.endswith("cannot be written (Read-only file system): choose another place\n")
            assert said.count("\n") == 1
    finally:
        subprocess.run(["umount", tmp_path], check=True)
