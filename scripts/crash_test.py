"""Kill and fail whatever writes whole files and folders at every change of the file system; look at what is left.

    python -m scripts.crash_test [--only NAME] [--step N] [--place FOLDER] [--artifact FOLDER]

Each run is a child process whose n-th call fails (`failing_os`), for n = 1, 2, ... until it comes to its end: killed,
with ENOSPC and with EIO. After each, the old one or the new one is there, whole; the next use succeeds and leaves
nothing behind. The last line is JSON: the calls of each scenario, how many runs there were, and the violations; with
one of those the exit code is 1. Torch is not imported: a small process forks faster.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from scripts.failing_os import FAULTS, KILL, Ending, run_failing
from seko_export.artifact.packing import pack_artifact
from seko_export.host.workshop import workshop
from seko_runtime.backends.memory import HostBytes
from seko_runtime.errors import UsageError
from seko_runtime.format import renames
from seko_runtime.format.own_folders import MARKER
from seko_runtime.format.unpacking import unpack_artifact
from seko_runtime.format.whole_files import whole_file, whole_folder
from seko_runtime.sessions.row_state import RowState
from seko_runtime.sessions.snapshot import Snapshot
from seko_runtime.video.clocks import RowClock
from seko_runtime.video.row_numbers import RowNumbers

MAX_CALLS = 2000  # of one run; more means that it does not end
# In a process of its own, which imports torch.
BUILD = """
import sys
from pathlib import Path
from tests.support.small_artifact import build_small_artifact
build_small_artifact(Path(sys.argv[1]))
"""
REMOVING = frozenset({"open", "unlink", "remove", "rmdir", "listdir", "scandir", "close", "flock"})

Content = dict[str, bytes] | bytes | None


@dataclass(frozen=True)
class Scenario:
    """Something that writes ``goal`` in a folder.

    Parameters
    ----------
    prepare : callable
        Makes what is there before, in an empty folder.
    work : callable
        What is killed.
    again : callable or None
        The next use; None: the same again.
    put_back : bool
        Whether the old one may lack its name until the next use of any kind, even one that is refused.
    """

    prepare: Callable[[Path], object]
    work: Callable[[Path], object]
    again: Callable[[Path], object] | None = None
    put_back: bool = False


@dataclass
class Results:
    """The results of the runs of a scenario."""

    calls: int = 0
    runs: int = 0
    violations: list[str] = field(default_factory=list)


def build(place: Path, content: str, *, replace: bool = True, exchange: bool = True) -> None:
    """Write an artifact's folder as a build does, with words for engines and weights."""
    if not exchange:
        setattr(renames, "renameat2", _unknown)  # noqa: B010 - of another type
    with whole_folder(place / "goal", replace=replace) as folder:
        (folder / "engines").mkdir()
        (folder / "engines/block.pt2").write_text(content)
        (folder / "weights").mkdir()
        (folder / "weights/00000.safetensors").write_bytes(content.encode() * 3)
        (folder / "manifest.json").write_text(content)


def leave_a_replacement_half_done(place: Path) -> None:
    """Leave what a process leaves that is killed between two renames, and one more that was killed before."""
    for number, (content, entry) in enumerate((("new one", "new"), ("old", "replaced"))):
        build(place, content)
        left = place / f".goal.seko-{number:010x}"
        left.mkdir()
        (left / MARKER).touch()
        (place / "goal").rename(left / entry)


def sign(place: Path, content: bytes) -> None:
    """Write a file into an artifact as a signature is."""
    with whole_file(place / "goal/manifest.sig", replace=True, beside=place / "goal") as file:
        file.write(content)


def save(place: Path, seed: int) -> None:
    """Save a snapshot of a stream of a few bytes."""
    clock = RowClock(first=0, slot_first=0, made=seed, first_frames=(0,))
    numbers = RowNumbers(seed=seed, conditioning_frames=0, rebuild_due=False, clock=clock)
    state = RowState(numbers, HostBytes({"kv": np.full(9, seed, np.uint8)}))
    Snapshot(state, ("0" * 64, "1" * 64)).save(place / "goal")


def compile_something(place: Path) -> None:
    """Do something in a workshop, and write what came of it."""
    tempfile.tempdir = str(place)
    with workshop("seko-crash-") as folder:
        (folder / "block.cpp").write_text("half")
        with whole_file(place / "goal", replace=True) as file:
            file.write((folder / "block.cpp").read_bytes())


def nothing(_place: Path) -> None:
    """Leave the folder empty."""


def scenarios(artifact: Path, archive: Path) -> dict[str, Scenario]:
    """Return all scenarios by name; ``archive`` is the packed artifact."""
    old = functools.partial(build, content="old")
    new = functools.partial(build, content="new one")
    by_two = functools.partial(new, exchange=False)
    pack = functools.partial(_pack, artifact=artifact, replace=True)
    return {
        "build": Scenario(nothing, functools.partial(new, replace=False), new),
        "build, replacing": Scenario(old, new),
        "build, replacing by two renames": Scenario(old, by_two, put_back=True),
        "build over leftovers": Scenario(leave_a_replacement_half_done, new, put_back=True),
        "pack": Scenario(nothing, functools.partial(pack, replace=False), pack),
        "pack, replacing": Scenario(lambda place: (place / "goal").write_text("old"), pack),
        "unpack": Scenario(nothing, functools.partial(_unpack, archive=archive)),
        "sign": Scenario(old, functools.partial(sign, content=b"signed")),
        "sign, replacing": Scenario(_signed, functools.partial(sign, content=b"signed")),
        "snapshot": Scenario(nothing, functools.partial(save, seed=2)),
        "snapshot, replacing": Scenario(functools.partial(save, seed=1), functools.partial(save, seed=2)),
        "compile": Scenario(nothing, compile_something),
    }


def crash(scenario: Scenario, place: Path, step: int = 1) -> Results:
    """Run a scenario with a fault at every call, and look at what is left.

    Parameters
    ----------
    scenario : Scenario
        What to run.
    place : Path
        A folder to work in; it is emptied before each run.
    step : int
        At every how many calls one fails; 1 for all. It is killed at all of them.
    """
    results = Results()
    with _not_waiting_for_the_disk():
        wanted = _Wanted(scenario, place)
        for kind in (KILL, *FAULTS):
            for at in range(1, MAX_CALLS, 1 if kind == KILL else step):
                _prepare(scenario, place)
                ending = run_failing(lambda: scenario.work(place), at, kind)
                results.runs += 1
                results.violations += [f"{kind} at call {at}: {wrong}" for wrong in wanted.wrongs(ending)]
                if ending.how == "done" and not ending.struck:
                    results.calls = max(results.calls, at - 1)
                    break
            else:
                results.violations.append(f"{kind}: no end after {MAX_CALLS} calls")
    return results


class _Wanted:
    """The contents that are allowed after a run: the old one, or the new one."""

    def __init__(self, scenario: Scenario, place: Path) -> None:
        self._scenario, self._place = scenario, place
        _prepare(scenario, place)
        self._settle()
        self._old, self._old_names = content_of(place / "goal"), os.listdir(place)
        _prepare(scenario, place)
        with contextlib.redirect_stderr(io.StringIO()), _as_it_was():
            scenario.work(place)
        self._new, self._new_names = content_of(place / "goal"), os.listdir(place)

    def wrongs(self, ending: Ending) -> list[str]:
        """Look at what a run left, then at what the next use makes of it."""
        wrongs = [f"{ending.how}: {ending.message}"] if ending.how == "broken" else []
        left = os.listdir(self._place)
        clean = ending.how != "killed" and ending.struck not in REMOVING and not self._scenario.put_back
        if clean and sorted(left) not in (sorted(self._old_names), sorted(self._new_names)):
            wrongs.append(f"{ending.struck} failed, and {left} is left")
        if any(name != "goal" and not re.search(r"-[0-9a-f]{10}$", name) for name in left):
            wrongs.append(f"{left} is left")
        if self._scenario.put_back:
            self._settle()
        now = content_of(self._place / "goal")
        if now not in (self._old, self._new) or (ending.how == "done" and now != self._new):
            wrongs.append(f"{ending.how}, and the goal is {_short(now)}")
        return wrongs + self._next_use()

    def _settle(self) -> None:
        """Let a use be refused, or end half-way."""
        if not self._scenario.put_back:
            return
        with (
            contextlib.suppress(UsageError, _HalfWayError),
            contextlib.redirect_stderr(io.StringIO()),
            whole_folder(self._place / "goal", replace=False),
        ):
            raise _HalfWayError

    def _next_use(self) -> list[str]:
        try:
            with contextlib.redirect_stderr(io.StringIO()), _as_it_was():
                (self._scenario.again or self._scenario.work)(self._place)
        except Exception as fault:
            return [f"the next use ends in {type(fault).__name__}: {fault}"]
        if content_of(self._place / "goal") != self._new:
            return ["the next use does not make the new one"]
        # An empty folder without its marker, of a process killed beside one of its two ends, may be anybody's.
        left = [name for name in os.listdir(self._place) if content_of(self._place / name) != {}]
        return [] if sorted(left) == sorted(self._new_names) else [f"the next use leaves {left}"]


class _HalfWayError(Exception):
    """Ends a use half-way."""


def content_of(path: Path) -> Content:
    """Return a file's bytes, those of a folder's files by name, or None if nothing is there."""
    if not path.is_dir():
        return path.read_bytes() if os.path.lexists(path) else None
    return {
        str(entry.relative_to(path)): entry.read_bytes() if entry.is_file() else b""
        for entry in path.rglob("*")
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the scenarios; 1 if one shows a violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", metavar="NAME", help="one scenario")
    parser.add_argument(
        "--place", type=Path, metavar="FOLDER", help="a file system to try; else the temporary one"
    )
    parser.add_argument(
        "--step", type=int, default=1, metavar="N", help="fail at every N-th call only; kill at all"
    )
    parser.add_argument(
        "--artifact",
        type=Path,
        metavar="FOLDER",
        help="what is packed and unpacked; else a small one is built",
    )
    options = parser.parse_args(arguments)
    outcomes: dict[str, Results] = {}
    with tempfile.TemporaryDirectory(dir=options.place) as folder:
        artifact, archive = options.artifact or Path(folder, "small"), Path(folder, "small.tar")
        if options.artifact is None:
            subprocess.run([sys.executable, "-c", BUILD, artifact], check=True)
        pack_artifact(artifact, archive)
        for name, scenario in scenarios(artifact, archive).items():
            if options.only in (None, name):
                outcomes[name] = crash(scenario, Path(folder, "place"), options.step)
                print(f"{name}: {outcomes[name].calls} calls, {outcomes[name].runs} runs", file=sys.stderr)
    violations = [f"{name}: {wrong}" for name, results in outcomes.items() for wrong in results.violations]
    report = {
        "calls": {name: results.calls for name, results in outcomes.items()},
        "points": sum(value.runs for value in outcomes.values()),
        "violations": len(violations),
        "told": violations[:20],
    }
    print(json.dumps(report))
    return 1 if violations or not outcomes else 0


def _prepare(scenario: Scenario, place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    with contextlib.redirect_stderr(io.StringIO()):
        scenario.prepare(place)


def _pack(place: Path, *, artifact: Path, replace: bool) -> None:
    pack_artifact(artifact, place / "goal", replace=replace)


def _unpack(place: Path, archive: Path) -> None:
    if (place / "goal").exists():  # whole, and `unpack` replaces nothing
        (place / "goal").rename(place.with_name("unpacked"))
        shutil.rmtree(place.with_name("unpacked"))
    unpack_artifact(archive, place / "goal")


def _signed(place: Path) -> None:
    build(place, "old")
    sign(place, b"signed before")


@contextlib.contextmanager
def _not_waiting_for_the_disk() -> Iterator[None]:
    """Skip `fsync`: what a process wrote stays there when it is killed."""
    before = os.fsync
    setattr(os, "fsync", lambda _descriptor: None)  # noqa: B010 - of another type
    try:
        yield
    finally:
        os.fsync = before


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Take back what a scenario put between: that a file system does not know `renameat2`, a temporary folder."""
    before = renames.renameat2, tempfile.tempdir
    try:
        yield
    finally:
        renames.renameat2, tempfile.tempdir = before


def _unknown(*_: object) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def _short(content: Content) -> str:
    sizes = {name: len(part) for name, part in content.items()} if isinstance(content, dict) else content
    return str(sizes)[:200]


if __name__ == "__main__":
    sys.exit(main())
