"""How much memory this machine still gives: caches of files make way, a container's limit counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from seko_runtime.backends import host

MEMINFO = (
    "MemTotal:       1000 kB\nMemFree:        100 kB\nMemAvailable:   600 kB\nHugePages_Total:       0\n\n"
)


@pytest.mark.parametrize(
    ("limit", "used", "stat", "free"),
    [
        (None, None, None, 600 * 1024),
        ("max\n", "5000\n", None, 600 * 1024),
        ("100000\n", "60000\n", None, 40000),
        ("100000\n", "60000\n", "anon 50000\ninactive_file 7000\nactive_file 3000\n", 47000),
        ("100000\n", "120000\n", "inactive_file 5000\n", 0),
        ("900000000\n", "0\n", None, 600 * 1024),
    ],
)
def test_what_can_be_taken_is_the_machines_or_the_containers(
    limit: str | None,
    used: str | None,
    stat: str | None,
    free: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    for name, text in (("memory.max", limit), ("memory.current", used), ("memory.stat", stat)):
        if text is not None:
            (tmp_path / name).write_text(text)
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    assert host.free_host_bytes() == free


def test_without_a_kernel_that_tells_pages_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "none")
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    pages = {"SC_AVPHYS_PAGES": 7, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert host.free_host_bytes() == 7 * 4096
