"""Snapshots in S3, against moto's server; skipped where obstore or moto are not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from seko_serve.live.saving import Saving
from seko_serve.metrics import Metrics
from seko_serve.settings import Settings
from seko_serve.store.base import StoreError
from seko_serve.store.objects import ObjectStore
from seko_serve.store.saved import Record, Saved, SavedSessions, new_session

from .test_store import NAME, check_files

pytestmark = pytest.mark.slow

OPTIONS = {
    "aws_access_key_id": "testing",
    "aws_secret_access_key": "testing",
    "aws_region": "us-east-1",
    "client_options": {"allow_http": True},
    "retry_config": {"max_retries": 0},
}


@contextmanager
def s3_server() -> Iterator[str]:
    """A server of S3 with the bucket ``bucket``; yields its endpoint."""
    pytest.importorskip("obstore", reason="needs seko-serve[s3]")
    server_module = pytest.importorskip("moto.server", reason="needs moto[server]")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        urlopen(Request(f"http://{host}:{port}/bucket", method="PUT"), timeout=20).close()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def store(endpoint: str) -> ObjectStore:
    return ObjectStore(f"s3://bucket/{new_session()}", endpoint=endpoint, **OPTIONS)


def test_an_object_is_written_once_read_and_removed_and_of_writers_at_once_one_wins(
    store: ObjectStore,
) -> None:
    check_files(store)


def test_a_session_is_saved_and_read(store: ObjectStore) -> None:
    saved, session = SavedSessions(store, b"k" * 32), new_session()
    name = saved.put(session, "tenant", Saved({"chunk": 1}, [b"m"], [b"r" * 100]))
    record = saved.commit(None, Record(session, "tenant", ("a",), name, 0.5))
    assert saved.find(session) == record
    content = saved.read(record)
    assert (content.state, [*map(bytes, content.messages)], bytes(content.row[0])) == (
        {"chunk": 1},
        [b"m"],
        b"r" * 100,
    )
    saved.forget(record)
    assert saved.find(session) is None


def test_a_wrong_bucket_is_refused_when_the_store_is_opened(endpoint: str) -> None:
    with pytest.raises(StoreError, match=r"s3://buckte/a: .* cannot be written: .*; check its bucket"):
        ObjectStore("s3://buckte/a", endpoint=endpoint, **OPTIONS)


def test_a_server_asks_its_store_when_it_starts(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ENDPOINT": endpoint, "REGION": "us-east-1", "ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    settings = Settings(Path("artifact"), snapshots="s3://buckte/a")
    with pytest.raises(
        StoreError, match=r"--snapshots: s3://buckte/a: .* give another place, or none"
    ) as raised:
        Saving(settings, Metrics())
    assert "testing" not in str(raised.value)
    assert Saving(replace(settings, snapshots="s3://bucket/a"), Metrics()).enabled


def test_opening_a_store_leaves_no_object(store: ObjectStore) -> None:
    assert [*store._library.list(store._store)] == []


def test_a_store_that_does_not_answer_is_a_fault_that_names_no_secret() -> None:
    with s3_server() as endpoint:
        store = ObjectStore("s3://bucket/prefix", endpoint=endpoint, **OPTIONS)
    opening = partial(ObjectStore, "s3://bucket/prefix", endpoint=endpoint, **OPTIONS)
    for call in (
        lambda: store.put(NAME, [b""]),
        lambda: store.get(NAME),
        lambda: store.delete(NAME),
        opening,
    ):
        with pytest.raises(StoreError) as raised:
            call()
        assert "testing" not in str(raised.value)
