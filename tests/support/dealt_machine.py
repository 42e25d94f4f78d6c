"""A pytest plugin for GPU boxes: to each process of a run its GPU and its cores, to one process what shares a build.

    SEKO_GPUS=2 python -m pytest -p tests.support.dealt_machine -n 8 -m gpu tests/export

A build takes as many processes as it may have cores, each with a CUDA context: several builds that all take a whole
machine run out of its cores and its GPU's memory. Failures are told when they happen: such a run may meet a time limit.

What shares a build is known where tests are collected, in the processes: they leave it in a file for the one that deals
them out. (xdist's own groups stand behind the tests' names, where not every pytest takes them.)
"""

from __future__ import annotations

import inspect
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.workermanage import WorkerController

_GROUPS = pytest.StashKey[Path]()
_SHARED = ("module", "session")  # scopes of what is made once a process


def share_of(number: int, processes: int, gpus: int, cores: Sequence[int]) -> tuple[int, set[int]]:
    """Return GPU and cores of one of so many processes; every core is somebody's, and everybody has one."""
    first, end = (len(cores) * each // processes for each in (number, number + 1))
    return number % gpus, set(cores[first:end] or cores[first : first + 1])


def group_of(file: str, fixtures: Mapping[str, tuple[str, object]]) -> str | None:
    """Return the name of the tests that one process runs: those of a file with equal parameters of shared fixtures.

    Where such fixtures have none, those with the same ones.

    Parameters
    ----------
    file : str
        The test's.
    fixtures : mapping of str to (str, object)
        Scope and parameter (None: it has none) of each fixture of this repository that the test asks for.
    """
    shared = {name: value for name, (scope, value) in sorted(fixtures.items()) if scope in _SHARED}
    chosen = [f"{name}={value}" for name, value in shared.items() if value is not None]
    return " ".join([file, *(chosen or shared)]) if shared else None


class GroupScheduling(LoadScopeScheduling):
    """A group's tests go to one process, the largest group first (xdist's order); a test without one is its own."""

    def __init__(self, config: pytest.Config, log: Producer, groups: Path) -> None:
        super().__init__(config, log)
        self._groups = groups

    def schedule(self) -> None:
        """Deal out what all processes have collected."""
        self._group_of = json.loads(self._groups.read_text())
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return str(self._group_of.get(nodeid, nodeid))


def pytest_configure(config: pytest.Config) -> None:
    """Take this process's share, before anything asks for a GPU; where the others are started, a place for groups."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        config.stash[_GROUPS] = Path(folder.name) / "groups.json"
        return
    config.stash[_GROUPS] = Path(worker["groups"])
    number, cores = int(worker["workerid"].removeprefix("gw")), sorted(os.sched_getaffinity(0))
    count = worker["workercount"]  # a process in place of one that crashed has a number behind them
    gpu, mine = share_of(number % count, count, int(os.environ.get("SEKO_GPUS", "1")), cores)
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    for threads in (
        "OMP_NUM_THREADS",
        "TORCHINDUCTOR_COMPILE_THREADS",
    ):  # else as many as the whole machine has cores
        os.environ.setdefault(threads, str(len(mine)))
    os.sched_setaffinity(0, mine)


def pytest_configure_node(node: WorkerController) -> None:
    """Tell a process where to leave the groups."""
    node.workerinput["groups"] = str(node.config.stash[_GROUPS])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    """Deal out groups, whatever ``--dist`` says."""
    return GroupScheduling(config, log, config.stash[_GROUPS])


@pytest.hookimpl(tryfirst=True)  # before xdist says that this process has collected
def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave the groups for the process that deals; each process finds the same ones."""
    if hasattr(session.config, "workerinput"):
        path = session.config.stash[_GROUPS]
        mine = path.with_suffix(f".{os.getpid()}")
        mine.write_text(json.dumps(dict(_groups(session.items))))
        mine.replace(path)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Show a failure at once, in the process that was started."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}", flush=True)


def _groups(items: Sequence[pytest.Item]) -> Iterator[tuple[str, str]]:
    for item in items:
        group = group_of(item.nodeid.split("::")[0], _fixtures(item))
        if group is not None:
            yield item.nodeid, group


def _fixtures(item: pytest.Item) -> dict[str, tuple[str, object]]:
    definitions = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    params = item.callspec.params if hasattr(item, "callspec") else {}
    ours = {
        name: defs[-1]
        for name, defs in definitions.items()
        if Path(inspect.getfile(defs[-1].func)).is_relative_to(item.config.rootpath)
    }
    return {name: (each.scope, params.get(name)) for name, each in ours.items()}
