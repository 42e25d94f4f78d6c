"""Snapshots in S3, against moto's server; skipped where obstore or moto are not installed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from seko_serve.store.base import ExistsError, StoreError
from seko_serve.store.objects import ObjectStore
from seko_serve.store.saved import Record, Saved, SavedSessions, new_session

pytestmark = pytest.mark.slow

OPTIONS = {
    "aws_access_key_id": "testing",
    "aws_secret_access_key": "testing",
    "aws_region": "us-east-1",
    "client_options": {"allow_http": True},
    "retry_config": {"max_retries": 0},
}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    pytest.importorskip("obstore", reason="needs seko-serve[s3]")
    server_module = pytest.importorskip("moto.server", reason="needs moto[server]")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    from urllib.request import Request, urlopen

    urlopen(Request(f"http://{host}:{port}/bucket", method="PUT"), timeout=20).close()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def store(endpoint: str) -> ObjectStore:
    return ObjectStore(f"s3://bucket/{new_session()}", endpoint=endpoint, **OPTIONS)


def test_a_name_is_written_once_read_and_removed(store: ObjectStore) -> None:
    assert store.get("a") is None
    store.put("a", [b"con", memoryview(b"tent")])
    with pytest.raises(ExistsError):
        store.put("a", [b"other"])
    assert bytes(store.get("a") or b"") == b"content"
    store.delete("a")
    store.delete("a")
    assert store.get("a") is None


def test_of_writers_at_once_one_wins(store: ObjectStore) -> None:
    def write(number: int) -> bool:
        try:
            store.put("a", [str(number).encode()])
        except ExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        won = [*threads.map(write, range(8))]
    assert won.count(True) == 1
    assert bytes(store.get("a") or b"") == str(won.index(True)).encode()


def test_a_session_is_saved_and_read(store: ObjectStore) -> None:
    saved, session = SavedSessions(store, b"k" * 32), new_session()
    name = saved.put(session, Saved({"chunk": 1}, [b"m"], [b"r" * 100]))
    record = saved.commit(None, Record(session, "tenant", ("a",), name, 0.5))
    assert saved.find(session) == record
    found = saved.read(record)
    assert (found.state, [*map(bytes, found.messages)], bytes(found.row[0])) == (
        {"chunk": 1},
        [b"m"],
        b"r" * 100,
    )
    saved.forget(record)
    assert saved.find(session) is None


def test_a_store_that_does_not_answer_is_a_fault_that_names_no_secret() -> None:
    pytest.importorskip("obstore", reason="needs seko-serve[s3]")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        store = ObjectStore("s3://bucket/prefix", endpoint=endpoint, **OPTIONS)
        for call in (lambda: store.put("a", [b""]), lambda: store.get("a"), lambda: store.delete("a")):
            with pytest.raises(StoreError) as raised:
                call()
            assert "testing" not in str(raised.value)
