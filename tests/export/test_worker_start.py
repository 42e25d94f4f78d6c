"""How the processes that compile engines are started."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import pytest

from seko_export.backends import export_backend, workers
from seko_export.errors import MachineError
from seko_export.host.child_process import last_line, run_child, waiting_child
from seko_export.host.compiler_cache import CACHE_VARIABLE
from tests.support.delivered_signal import deliver


@pytest.mark.parametrize(("length", "method"), [(75, "forkserver"), (76, "spawn")])
def test_a_long_folder_for_temporary_files_has_no_room_for_the_servers_socket(
    monkeypatch: pytest.MonkeyPatch, length: int, method: str
) -> None:
    """Linux takes 107 bytes; multiprocessing puts 32 behind the folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(Path("/", "x" * (length - 1))))
    monkeypatch.setattr(workers, "_settings_of_server", {})
    assert workers._started_by(export_backend("aoti")).get_start_method() == method


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_another_thread_takes_waits_until_all_workers_are_started(
    number: signal.Signals,
) -> None:
    begun, over = threading.Event(), threading.Event()

    def other() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        begun.set()
        over.wait()

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    reached: list[str] = []
    before = signal.signal(number, signal.default_int_handler)  # a job in the background ignores SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            _interrupted(thread, number, reached)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        over.set()
        thread.join()
        signal.signal(number, before)
    assert reached == ["the end of the block"]


def test_workers_inherit_that_sigint_alone_is_blocked() -> None:
    """A terminal sends it to the whole group; SIGTERM is what ends a worker."""
    with workers._workers_starting():
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} & blocked == {signal.SIGINT}
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


_SERVER = """
from multiprocessing import forkserver
from pathlib import Path
from seko_export.backends import export_backend, workers
workers.start_worker_server(export_backend("aoti"))
print(Path(f"/proc/{forkserver._forkserver._forkserver_pid}/status").read_text())
"""


def test_the_server_is_started_with_sigint_blocked() -> None:
    """In a new process, whose first server it is: what multiprocessing starts before unblocks signals."""
    done = subprocess.run([sys.executable, "-c", _SERVER], capture_output=True, text=True, check=True)
    blocked = int(re.findall(r"^SigBlk:\s*(\w+)$", done.stdout, re.MULTILINE)[0], 16)
    assert blocked & (1 << (signal.SIGINT - 1))


@pytest.mark.parametrize(
    ("name", "method"),
    [("CXX", "spawn"), ("AOTINDUCTOR_X", "spawn"), (CACHE_VARIABLE, "forkserver"), ("EDITOR", "forkserver")],
)
def test_a_server_is_not_used_once_what_its_modules_have_read_changes(
    monkeypatch: pytest.MonkeyPatch, name: str, method: str
) -> None:
    """The folder of the compiler's cache, which torch sets, too, is read for each engine."""
    monkeypatch.setattr(workers, "_settings_of_server", {})
    aoti = export_backend("aoti")
    assert workers._started_by(aoti).get_start_method() == "forkserver"
    monkeypatch.setenv(name, "/changed")
    assert workers._started_by(aoti).get_start_method() == method


def test_a_signal_waits_until_the_thread_that_starts_workers_has_ended() -> None:
    begun, over, ended = threading.Event(), threading.Event(), threading.Event()

    def start() -> None:
        begun.set()
        over.wait()
        ended.set()

    def interrupt() -> None:
        begun.wait()
        time.sleep(0.1)  # so that the block is left and waits
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.2)
        over.set()

    beside = threading.Thread(target=interrupt)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a job in the background ignores SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            _started_beside(start, beside)
        assert ended.is_set()
    finally:
        beside.join()
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "fault", [EOFError("unexpected EOF"), BrokenProcessPool("died"), OSError(12, "no memory")]
)
def test_workers_that_do_not_start_are_the_machines_fault(fault: Exception) -> None:
    with (
        pytest.raises(MachineError, match=r"did not start: .*(EOF|died|memory)"),
        workers._workers_starting(),
    ):
        raise fault


def test_a_full_disk_below_a_librarys_own_fault_is_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `torch.export.save` has it: `whole_folder` then says which disk, and how much of it is free."""

    def make(_config: object, _piece: object, _path: Path) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(workers, "graph_of", lambda _: SimpleNamespace(pieces={"step": None}))
    with pytest.raises(OSError, match="No space left") as caught:
        workers._make_and_move(make, SimpleNamespace(), "step", tmp_path / "place", tmp_path / "step.pt2")  # type: ignore[arg-type]
    assert caught.value.errno == errno.ENOSPC


def _started_beside(start: Callable[[], None], beside: threading.Thread) -> None:
    with workers._starter() as starter:
        starter(start)
        beside.start()


def _interrupted(thread: threading.Thread, number: signal.Signals, reached: list[str]) -> None:
    with workers._workers_starting():
        deliver(thread, number)
        reached.append("the end of the block")


def test_a_child_that_crashes_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crashes.py").write_text("import ctypes\ndef dive():\n    ctypes.string_at(0)\ndive()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = run_child("crashes")
    assert done.returncode == 128 + signal.SIGSEGV
    assert "ctypes" in last_line(done) or "in dive" in last_line(done)


def test_a_waiting_child_runs_its_module_when_it_is_told_to_and_else_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tells.py").write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "Path(sys.argv[1]).touch()\n"
        "sys.exit(print(__name__, 'json' in sys.modules, *sys.argv[1:]) or 7)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with waiting_child("tells", str(tmp_path / "untold"), imports="json"):
        pass
    with waiting_child("tells", str(tmp_path / "told"), imports="json") as run:
        done = run()
    assert (done.returncode, done.stdout) == (7, f"__main__ True {tmp_path / 'told'}\n")
    assert {path.name for path in tmp_path.glob("*told")} == {"told"}


def test_an_interrupted_process_lets_its_child_end_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal reaches this process alone, as that of a supervisor does."""
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    (tmp_path / "waiting.py").write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from seko_runtime.host.end_signals import until_ended\n"
        "def wait():\n"
        "    Path(sys.argv[1]).touch()\n"
        "    time.sleep(600)\n"
        "until_ended(wait, Path(sys.argv[2]).write_text)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def interrupt() -> None:
        while not begun.exists():
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run_child("waiting", str(begun), str(ended))
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert ended.read_text()
