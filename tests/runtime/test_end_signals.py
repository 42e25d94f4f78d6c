"""A signal ends any command of the runtime with one sentence and 128 plus its number, and no file half written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from seko_export.artifact.packing import pack_artifact
from seko_runtime.host import end_signals
from seko_runtime.host.end_signals import AskedToEnd, until_ended
from tests.support.tiers import first_is_fast

from . import toy_whole

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120
PROGRESS = r"(opening .*: \d+ s|\d+ frames .* chunk \d+ of 1000000)"  # a line every eight seconds
SAID = "error: interrupted; nothing was left behind\n"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# The command line with engines that do nothing, which saves the seconds in which torch is imported. It sends itself a
# signal when it comes to a moment, if one is named.
COMMAND = """
import os, runpy, signal, sys
number, moment = int(sys.argv[1]), sys.argv[2]
sys.argv = ["seko_runtime", *sys.argv[3:]]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored

def strike():
    os.kill(os.getpid(), number)

def hook(event, arguments):
    if f"{event} {os.path.basename(str(arguments[0])) if arguments else ''}" == moment:
        strike()

sys.addaudithook(hook)
if not moment.startswith(("import", "open")):
    import seko_runtime.opening.artifact, seko_runtime.video.lockstep
    from tests.runtime.idle_backend import IdleBackend

    def opened(*_):
        if moment == "engines":
            strike()
        return IdleBackend()

    seko_runtime.opening.artifact.open_backend = opened
    run_chunk, chunks = seko_runtime.video.lockstep.Lockstep.run_chunk, []

    def chunk_run(session, *arguments):
        chunks.append(session)
        if moment == "chunk" and len(chunks) == 2:
            strike()
        return run_chunk(session, *arguments)

    seko_runtime.video.lockstep.Lockstep.run_chunk = chunk_run
runpy.run_module("seko_runtime", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def heard():
    """Handlers that may raise: what runs the tests may have SIGINT ignored, as a shell's background job has."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def started(number: int, moment: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMMAND, str(int(number)), moment, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def assert_ended(
    process: subprocess.Popen[str], number: int, wanted: str = "", said: str = re.escape(SAID)
) -> None:
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert re.fullmatch(rf"({PROGRESS}\n)*{said}", stderr), stderr
    assert process.returncode == 128 + number
    assert stdout == wanted


@pytest.mark.parametrize(
    ("number", "suffix"),
    first_is_fast(
        [
            (signal.SIGTERM, ".y4m"),
            (signal.SIGHUP, ".npy"),
            (signal.SIGINT, ".mp4"),
        ]
    ),
)
def test_a_signal_from_outside_ends_a_run_between_its_chunks(whole, tmp_path, number, suffix):
    if suffix == ".mp4":
        pytest.importorskip("av")
    """What was finished is there, whole; a file that was there before gives way to it."""
    goal = tmp_path / f"out{suffix}"
    goal.write_bytes(b"old")
    process = started(0, "never", "run", whole, "--chunks", 1_000_000, "-o", goal)
    deadline = time.monotonic() + PATIENCE_S
    while not any(path.stat().st_size > 20_000 for path in tmp_path.rglob("*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "waited in vain"
        assert goal.read_bytes() == b"old"
        time.sleep(0.02)
    process.send_signal(number)
    message = rf"error: interrupted; kept (\d+) of 1000000 chunks in {re.escape(str(goal))}\n"
    assert_ended(process, number, said=message)
    assert list(tmp_path.iterdir()) == [goal]
    assert frames_of(goal) > 0


def frames_of(path: Path) -> int:
    """Frames, or of .npy chunks, of a file that is as whole as any."""
    if path.suffix == ".npy":
        latents = np.load(path)
        assert np.isfinite(latents).all()
        assert np.abs(latents[-1]).max() > 0
        return len(latents)
    if path.suffix == ".y4m":
        _, _, content = path.read_bytes().partition(b"\n")
        size = len(b"FRAME\n") + 3 * toy_whole.HEIGHT * toy_whole.WIDTH
        assert len(content) % size == 0
        frames = len(content) // size
    else:
        av = pytest.importorskip("av")
        with av.open(str(path)) as container:
            frames = sum(1 for _ in container.decode(video=0))
    assert (frames - toy_whole.FIRST_FRAMES) % toy_whole.CHUNK_VIDEO == 0
    return frames


@pytest.mark.parametrize(
    ("number", "moment", "command"),
    first_is_fast(
        [
            (signal.SIGINT, "import numpy", "info"),
            (signal.SIGTERM, "engines", "run"),
            (signal.SIGTERM, "open manifest.json", "info"),
            (signal.SIGINT, "import torch.torch_version", "run"),
            (signal.SIGTERM, "chunk", "verify"),
            (signal.SIGINT, "open golden.safetensors", "unpack"),
        ],
        2,
    ),
)
def test_a_signal_at_any_moment_ends_any_command(whole, built_whole, tmp_path, number, moment, command):
    goal = tmp_path / "out"
    options = {"info": [], "verify": [], "unpack": ["-o", goal], "run": ["-o", goal.with_suffix(".npy")]}
    source = built_whole if "torch" in moment else whole
    if command == "unpack":
        source = tmp_path.parent / f"{tmp_path.name}.tar"
        pack_artifact(whole, source)
    process = started(number, moment, command, source, *options[command], "--json")
    said = {"error": "interrupted; nothing was left behind", "exit": 128 + number}
    assert_ended(process, number, json.dumps(said) + "\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", ENDING)
def test_it_raises_inside_and_the_handlers_are_those_of_before(number):
    before = [signal.getsignal(signal_number) for signal_number in ENDING]
    messages: list[str] = []
    assert until_ended(lambda: 7, messages.append) == 7
    assert messages == []
    assert until_ended(lambda: signal.raise_signal(number) or 7, messages.append) == 128 + number
    assert len(messages) == 1
    assert [signal.getsignal(signal_number) for signal_number in ENDING] == before


@pytest.mark.usefixtures("heard")
def test_another_signal_does_not_cut_cleaning_up_short():
    """The second Ctrl-C of an impatient user, while the first is being unwound, also inside of an error of its own."""
    cleaned = []

    def command() -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGTERM)
            try:
                raise OSError
            except OSError:
                signal.raise_signal(signal.SIGINT)
            cleaned.append(True)
        return 0

    assert until_ended(command, lambda _: signal.raise_signal(signal.SIGTERM)) == 128 + signal.SIGINT
    assert cleaned == [True]


@pytest.mark.usefixtures("heard")
def test_one_that_was_swallowed_does_not_make_the_process_deaf():
    def command() -> int:
        with contextlib.suppress(AskedToEnd):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        return 0

    assert until_ended(command, print) == 128 + signal.SIGTERM


@pytest.mark.usefixtures("heard")
def test_ignored_signals_stay_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert until_ended(lambda: os.kill(os.getpid(), signal.SIGHUP) or 7, print) == 7
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_beside_the_main_thread_a_command_just_runs():
    codes = []
    thread = threading.Thread(target=lambda: codes.append(until_ended(lambda: 7, print)))
    thread.start()
    thread.join()
    assert codes == [7]


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("fails", [False, True])
def test_held_signals_come_when_the_block_ends(fails):
    """Also when it ends with an error."""
    past = []

    def command() -> int:
        with end_signals.held_signals():
            signal.raise_signal(signal.SIGTERM)
            past.append(True)
            if fails:
                raise OSError
        return 0

    assert until_ended(command, print) == 128 + signal.SIGTERM
    assert past == [True]
