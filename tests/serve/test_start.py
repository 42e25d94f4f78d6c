"""The command with real artifacts: what cannot be served is refused by a sentence; without a pool there is one row."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from seko_runtime.errors import ArtifactError, EnvironmentLacksError, LibraryMissingError
from seko_runtime.format.manifest import Buffer, ControlSpec, InputSpec
from seko_serve.client import Client
from seko_serve.live.workload import check_served
from tests.runtime import toy, toy_whole
from tests.support.shared import made_once

from .artifacts import make_single
from .processes import served
from .test_client import watched
from .test_server import http


class Started(NamedTuple):
    """A running command: where it is reached, what it wrote, and its process."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """The command at work, which the last test of this file ends."""
    single = made_once(tmp_path_factory, "serve-single", make_single) / "artifact"
    log = tmp_path_factory.mktemp("started") / "log"
    with served(single, "--snapshots", "none", log=log) as (url, process):
        while f"seko-serve: the page is at {url}\n" not in log.read_text():
            assert process.poll() is None
            time.sleep(0.05)
        yield Started(url, log, process)


def test_an_artifact_without_a_vae_is_refused() -> None:
    with pytest.raises(ArtifactError, match="no VAE and makes no video; rebuild it with --vae"):
        check_served(toy.toy_manifest())


def test_an_artifact_whose_control_is_not_installed_is_refused() -> None:
    """Each of its sessions would end with the first chunk, which lacks an input."""
    base = toy_whole.whole_manifest()
    wind = InputSpec("wind", (2,), "float32", "input.wind", "chunk")
    steered = toy.changed(
        base,
        buffers=(*base.buffers, Buffer(wind.buffer, (base.state_rows, 2), "float32", "host")),
        inputs=(wind,),
        controls=(ControlSpec("wind", "wind", {"wind": "wind"}),),
    )
    with pytest.raises(EnvironmentLacksError, match="wind"):
        check_served(steered)
    check_served(replace(steered, inputs=(replace(wind, default="zero"),)))


@pytest.mark.parametrize("library", ["tokenizers", "ftfy"])
def test_an_artifact_whose_texts_need_what_is_not_installed_is_refused(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(LibraryMissingError, match=f"pip install {library}"):
        check_served(toy_whole.whole_manifest())


def test_an_artifact_whose_engine_calls_carry_all_rows_is_refused() -> None:
    check_served(toy_whole.whole_manifest())
    with pytest.raises(ArtifactError, match=r"all 2 rows together.*rebuild it with --sessions 2"):
        check_served(toy_whole.whole_manifest(2))


def test_a_start_says_where_its_page_is(started: Started) -> None:
    assert started.log.read_text().splitlines()[-1] == f"seko-serve: the page is at {started.url}"


def test_an_artifact_without_a_pool_serves_one_viewer(started: Started) -> None:
    url = started.url
    with Client(url) as client:
        assert http(f"{url}ready")[1] == {"status": "ready", "free": 1, "capacity": 1}
        client.open(codecs=["rgb24"], prompt="a red disc")
        assert http(f"{url}v1/sessions", "POST", {"prompt": "a red disc"})[0] == 503
        assert len(watched(client, 2)) == client.ready["first_frames"] + client.ready["chunk_frames"]
        client.close()


def test_a_server_that_is_told_to_end_ends_by_itself(started: Started) -> None:
    """A process that the signal ends has no time to remove the engines that torch unpacked."""
    started.process.terminate()
    assert started.process.wait(60) == 0
