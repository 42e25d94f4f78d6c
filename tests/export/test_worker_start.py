"""How the processes that compile engines are started."""

from __future__ import annotations

import errno
import signal
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from seko_export.backends import export_backend, workers
from seko_export.host.child_process import last_line, run_child
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
