"""A pytest plugin for GPU boxes: to each process of a run its GPU and its cores, to one process what shares a build.

    SEKO_GPUS=2 python -m pytest -p tests.dealt_machine -n 8 --dist loadgroup -m gpu tests/export

A build takes as many processes as it may have cores, each with a CUDA context: several builds that all take a whole
machine run out of its cores and its GPU's memory. Failures are told when they happen: such a run may meet a time limit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import pytest

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


def pytest_configure(config: pytest.Config) -> None:
    """Take this process's share, before anything asks for a GPU."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        return
    number, cores = int(worker["workerid"].removeprefix("gw")), sorted(os.sched_getaffinity(0))
    gpu, mine = share_of(number, worker["workercount"], int(os.environ.get("SEKO_GPUS", "1")), cores)
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    os.sched_setaffinity(0, mine)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests, for ``--dist loadgroup``."""
    for item in items:
        group = group_of(item.nodeid.split("::")[0], _fixtures(item))
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Show a failure at once, in the process that was started."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}", flush=True)


def _fixtures(item: pytest.Item) -> dict[str, tuple[str, object]]:
    found = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    params = item.callspec.params if hasattr(item, "callspec") else {}
    ours = {name: defs[-1] for name, defs in found.items() if defs[-1].func.__module__.startswith("tests.")}
    return {name: (each.scope, params.get(name)) for name, each in ours.items()}
