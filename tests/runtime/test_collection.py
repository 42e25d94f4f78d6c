"""No full garbage collection falls into the opening of an artifact, and the caller's choice is kept."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from seko_runtime import open_artifact
from seko_runtime.host.collection import without_collections
from seko_runtime.opening.checked_artifact import ReadArtifact
from seko_runtime.video.device import VideoDevice


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("before", [True, False])
def test_the_callers_choice_comes_back(before):
    (gc.enable if before else gc.disable)()
    with without_collections():
        assert not gc.isenabled()
        with without_collections():
            pass
        assert not gc.isenabled()
    assert gc.isenabled() == before


def test_an_error_switches_the_collector_on():
    gc.enable()

    @without_collections()
    def fail() -> None:
        raise ValueError("while it opens")

    with pytest.raises(ValueError, match="while it opens"):
        fail()
    assert gc.isenabled()


def test_the_last_thread_that_leaves_switches_the_collector_on():
    gc.enable()
    entered, leave = threading.Event(), threading.Event()

    @without_collections()
    def stay() -> None:
        entered.set()
        leave.wait(30)

    thread = threading.Thread(target=stay)
    thread.start()
    assert entered.wait(30)
    with without_collections():
        pass
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_an_artifact_and_its_session_open_without_a_collection(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
):
    gc.enable()
    enabled: dict[str, bool] = {}

    def watch(owner: type, method: str) -> None:
        original = getattr(owner, method)

        def watched(*arguments, **options):
            enabled[method] = gc.isenabled()
            return original(*arguments, **options)

        monkeypatch.setattr(owner, method, watched)

    watch(ReadArtifact, "examined")
    watch(VideoDevice, "prepare")
    with open_artifact(artifact) as opened:
        assert gc.isenabled()
        with opened.open_session():
            assert gc.isenabled()
    assert enabled == {"examined": False, "prepare": False}
