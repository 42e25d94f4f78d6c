"""Snapshots as files: whoever else can write to their folder, whatever they hold, with a key and without."""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from seko_runtime.backends.memory import HostBytes
from seko_runtime.errors import ArtifactError, EnvironmentLacksError, SnapshotError, UsageError
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.sessions.row_state import RowLayout, RowState
from seko_runtime.sessions.snapshot import Snapshot, read_snapshot
from seko_runtime.video.clocks import RowClock
from seko_runtime.video.row_numbers import STATE_FORM, RowNumbers
from tests.support.together import together

DIGEST = "d" * 64
DIGESTS = (DIGEST, "c" * 64)
KEY, ANOTHER_KEY = bytes(range(32)), bytes(range(1, 33))
LAYOUT = {
    "kept.0": TensorSpec("kept.0", (1, 7), "uint8"),
    "kv": TensorSpec("kv", (4, 3), "float32"),
}
NUMBERS = RowNumbers(seed=-5, conditioning_frames=1, rebuild_due=False, clock=RowClock(4, 2, 2, (2,)))


def tensors(fill: int = 0) -> dict[str, NDArray[np.uint8]]:
    return {
        name: np.arange(fill, fill + spec.nbytes, dtype=np.uint8).reshape(-1) for name, spec in LAYOUT.items()
    }


def state(fill: int = 0) -> RowState:
    return RowState(NUMBERS, HostBytes(tensors(fill)))


def facts(**changes: Any) -> dict[str, Any]:
    numbers = {
        "seed": -5,
        "conditioning_frames": 1,
        "rebuild_due": False,
        "clock": {
            "first": 4,
            "slot_first": 2,
            "made": 2,
            "first_frames": [2],
            "cut": {"jump": 0, "due": False, "pinned": 0, "ring": []},
        },
    }
    return {"version": 1, "artifact": DIGEST, "numbers": numbers, **changes}


def sealed(parts: Mapping[str, NDArray[np.uint8]]) -> dict[str, NDArray[np.uint8]]:
    """Tensors with the hash that a snapshot without a key has: over names, sizes and bytes in order of the names."""
    running = hashlib.sha256()
    for name, array in sorted(parts.items()):
        running.update(f"{name}\0{array.size}\0".encode() + array.tobytes())
    return {**parts, "seko.sha256": np.frombuffer(running.digest(), np.uint8)}


def file_bytes(
    parts: Mapping[str, NDArray[np.uint8]], change: Callable[[dict[str, Any]], None] = lambda _: None
) -> bytes:
    """A safetensors file of uint8 tensors in order of their names, whose table ``change`` may change."""
    table: dict[str, Any] = {}
    offset = 0
    for name, array in sorted(parts.items()):
        table[name] = {"dtype": "U8", "shape": [array.size], "data_offsets": [offset, offset + array.size]}
        offset += array.size
    change(table)
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    data = b"".join(array.tobytes() for _, array in sorted(parts.items()))
    return len(header).to_bytes(8, "little") + header + data


def unkeyed(change: Callable[[dict[str, Any]], None] = lambda _: None, **changes: Any) -> bytes:
    """A snapshot without a key as its first writer wrote it, by hand."""
    document = np.frombuffer(json.dumps(facts(**changes), sort_keys=True).encode(), np.uint8)
    return file_bytes(sealed({**tensors(), "seko.snapshot": document}), change)


def same(state: RowState, fill: int = 0) -> bool:
    wanted = tensors(fill)
    arrays = state.tensors.arrays()
    return (
        state.numbers == NUMBERS
        and set(arrays) == set(wanted)
        and all(np.array_equal(arrays[name], wanted[name]) for name in wanted)
    )


def test_what_is_written_without_a_key_is_what_the_format_says(tmp_path: Path) -> None:
    """Byte for byte; and an artifact of another digest with the same content reads it."""
    new = tmp_path / "new"
    Snapshot(state(), DIGESTS).save(new)
    assert new.read_bytes() == unkeyed(content=DIGESTS[1])
    new.write_bytes(unkeyed(artifact="a" * 64, content=DIGESTS[1]))
    assert same(read_snapshot(new, DIGESTS, RowLayout(LAYOUT), STATE_FORM))


def test_links_that_somebody_planted_lead_no_save_astray(tmp_path: Path) -> None:
    """Also at the name that hidden files once had, which anybody could foretell."""
    victim, goal = tmp_path / "victim", tmp_path / "goal"
    victim.write_bytes(b"precious")
    for name in (f".goal.writing-{os.getpid()}", f".goal.saving-{os.getpid()}"):
        (tmp_path / name).symlink_to(victim)
    Snapshot(state(), DIGESTS).save(goal)
    assert victim.read_bytes() == b"precious"
    assert not goal.is_symlink()
    assert same(read_snapshot(goal, DIGESTS, RowLayout(LAYOUT), STATE_FORM))


def test_a_link_in_the_goals_place_is_not_written_through(tmp_path: Path) -> None:
    victim, goal = tmp_path / "victim", tmp_path / "goal"
    victim.write_bytes(b"precious")
    goal.symlink_to(victim)
    with pytest.raises(UsageError, match="goal exists and is no regular file"):
        Snapshot(state(), DIGESTS).save(goal)
    assert victim.read_bytes() == b"precious"


def test_a_snapshot_is_its_owners_alone(tmp_path: Path) -> None:
    goal, before = tmp_path / "goal", os.umask(0)
    try:
        goal.write_bytes(b"")
        goal.chmod(0o666)
        Snapshot(state(), DIGESTS).save(goal)
    finally:
        os.umask(before)
    assert stat.S_IMODE(goal.stat().st_mode) == 0o600


def test_two_threads_save_to_one_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both write before either of them is done: each succeeds, one of the two is there whole, and nothing beside it."""
    met, real, waited = threading.Barrier(2), os.fsync, threading.local()

    def fsync(descriptor: int) -> None:
        if not getattr(waited, "once", False):
            waited.once = True
            met.wait(30)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    goal = tmp_path / "goal"
    together([partial(Snapshot(state(fill), DIGESTS).save, goal) for fill in (1, 2)])
    saved = read_snapshot(goal, DIGESTS, RowLayout(LAYOUT), STATE_FORM)
    assert same(saved, 1) or same(saved, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["goal"]


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    caught: list[BaseException] = []

    def read() -> None:
        try:
            read_snapshot(path, DIGESTS, RowLayout(LAYOUT), STATE_FORM)
        except BaseException as fault:
            caught.append(fault)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(30)
    waiting = thread.is_alive()
    if waiting:
        os.close(os.open(path, os.O_WRONLY))  # ends the wait
    assert not waiting
    assert [type(error) for error in caught] == [SnapshotError]
    assert "is no regular file" in str(caught[0])


@pytest.mark.parametrize("kind", ["missing", "folder", "link", "socket", "device"])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        (tmp_path / "real").write_bytes(unkeyed())
        path.symlink_to("real")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    elif kind == "device":
        path = Path("/dev/null")
    with pytest.raises(SnapshotError) as caught:
        read_snapshot(path, DIGESTS, RowLayout(LAYOUT), STATE_FORM)
    assert caught.value.exit_code == 4
    assert isinstance(caught.value, ArtifactError)


def test_a_file_larger_than_any_snapshot_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large"
    path.write_bytes(unkeyed())
    os.truncate(path, 1 << 40)

    def empty(*_: object) -> None:
        raise AssertionError("memory is taken for it")

    monkeypatch.setattr(np, "empty", empty)
    with pytest.raises(SnapshotError, match=rf"has {1 << 40} bytes, a snapshot of this .* has at most \d+"):
        read_snapshot(path, DIGESTS, RowLayout(LAYOUT), STATE_FORM)


def test_a_file_that_becomes_shorter_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "shrinking", np.empty
    path.write_bytes(unkeyed())

    def empty(*args: Any) -> NDArray[np.generic]:
        os.truncate(path, 100)
        array: NDArray[np.generic] = real(*args)
        return array

    monkeypatch.setattr(np, "empty", empty)
    with pytest.raises(SnapshotError, match=r"shorter while it was read: 100 bytes of \d+"):
        read_snapshot(path, DIGESTS, RowLayout(LAYOUT), STATE_FORM)


def test_what_the_machine_lacks_is_not_the_snapshots_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "it"
    path.write_bytes(unkeyed())

    def no_memory(*_: object) -> None:
        raise MemoryError

    def no_descriptor(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    for module, name, fault, wanted in (
        (np, "empty", no_memory, EnvironmentLacksError),
        (os, "open", no_descriptor, EnvironmentLacksError),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fault)
            with pytest.raises(wanted) as caught:
                read_snapshot(path, DIGESTS, RowLayout(LAYOUT), STATE_FORM)
        assert caught.value.exit_code == 5


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "float8": lambda table: table["kv"].update(dtype="F8_E4M3"),
    "bfloat16": lambda table: table["kv"].update(dtype="BF16", shape=[24]),
    "float32": lambda table: table["kv"].update(dtype="F32", shape=[12]),
    "two axes": lambda table: table["kv"].update(shape=[4, 12]),
    "no axes": lambda table: table["kv"].update(shape=[]),
    "hash as float8": lambda table: table["seko.sha256"].update(dtype="F8_E4M3"),
    "facts as int64": lambda table: table["seko.snapshot"].update(dtype="I64", shape=[1]),
    "a name more": lambda table: table.update(more={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
    "a name less": lambda table: table.pop("kv"),
    "a list": lambda table: table.update(kv=[]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_shapes_and_dtypes_that_no_snapshot_has_are_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "it"
    path.write_bytes(unkeyed(CHANGES[change]))
    with pytest.raises(SnapshotError):
        read_snapshot(path, DIGESTS, RowLayout(LAYOUT), STATE_FORM)


@pytest.mark.parametrize("content", [unkeyed()[:100], unkeyed(lambda table: table.pop("kv"))])
def test_a_damaged_snapshot_is_no_reason_to_rebuild_the_artifact(content: bytes) -> None:
    with pytest.raises(SnapshotError, match=r"take another copy$") as raised:
        read_snapshot(content, DIGESTS, RowLayout(LAYOUT), STATE_FORM)
    assert "rebuild" not in str(raised.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"version": "1"},
        {"artifact": "e" * 64},
        {"artifact": 1},
        {"numbers": None},
        {"numbers": {}},
        {"numbers": facts()["numbers"] | {"seed": 1 << 62}},
        {"numbers": facts()["numbers"] | {"seed": True}},
        {"numbers": facts()["numbers"] | {"conditioning_frames": -1}},
        {"numbers": facts()["numbers"] | {"rebuild_due": 1}},
        {"numbers": facts()["numbers"] | {"clock": [1]}},
        {"numbers": facts()["numbers"] | {"clock": {"first": 1 << 63}}},
    ],
)
def test_facts_that_no_snapshot_has_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "it"
    path.write_bytes(unkeyed(**changes))
    with pytest.raises(SnapshotError):
        read_snapshot(path, DIGESTS, RowLayout(LAYOUT), STATE_FORM)


def test_a_keyed_snapshot_ends_in_the_code_of_all_before_it(tmp_path: Path) -> None:
    path = tmp_path / "it"
    Snapshot(state(), DIGESTS, KEY).save(path)
    content = path.read_bytes()
    assert content[-32:] == hmac.new(KEY, content[:-32], hashlib.sha256).digest()
    assert same(read_snapshot(path, DIGESTS, RowLayout(LAYOUT), STATE_FORM, KEY))


def test_who_has_the_key_reads_nothing_else_and_who_has_none_reads_nothing_keyed(tmp_path: Path) -> None:
    keyed, plain = tmp_path / "keyed", tmp_path / "plain"
    Snapshot(state(), DIGESTS, KEY).save(keyed)
    Snapshot(state(), DIGESTS).save(plain)
    with pytest.raises(
        SnapshotError, match="keyed was written with a key; open the pool with that snapshot_key"
    ):
        read_snapshot(keyed, DIGESTS, RowLayout(LAYOUT), STATE_FORM)
    for path, key in ((keyed, ANOTHER_KEY), (plain, KEY)):
        with pytest.raises(SnapshotError, match="not written with this pool's snapshot_key, or was changed"):
            read_snapshot(path, DIGESTS, RowLayout(LAYOUT), STATE_FORM, key)


def test_a_hash_mended_by_hand_does_not_make_a_keyed_snapshot(tmp_path: Path) -> None:
    """Whoever can write the file writes any hash; the code takes the key."""
    path = tmp_path / "it"
    Snapshot(state(), DIGESTS, KEY).save(path)
    code = path.read_bytes()[-32:]
    document = np.frombuffer(json.dumps(facts(), sort_keys=True).encode(), np.uint8)
    forged = sealed({**tensors(9), "seko.snapshot": document})
    path.write_bytes(file_bytes({**forged, "zzz": np.frombuffer(code, np.uint8)}))
    with pytest.raises(SnapshotError, match="not written with this pool's snapshot_key"):
        read_snapshot(path, DIGESTS, RowLayout(LAYOUT), STATE_FORM, KEY)


@pytest.mark.parametrize("key", [None, KEY], ids=["hashed", "keyed"])
def test_no_bit_of_a_snapshot_can_be_changed(tmp_path: Path, key: bytes | None) -> None:
    """Every byte, flipped or missing with all behind it: a property's draws would seldom reach the tensors."""
    path = tmp_path / "changed"
    Snapshot(state(), DIGESTS, key).save(path)
    whole = path.read_bytes()
    flipped = (whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in range(len(whole)))
    for content in (*flipped, *(whole[:at] for at in range(len(whole))), whole + b"\0"):
        path.write_bytes(content)
        try:
            saved = read_snapshot(path, DIGESTS, RowLayout(LAYOUT), STATE_FORM, key)
        except SnapshotError:
            continue
        assert key is None  # without a key, a padding of the header is all that may change
        assert same(saved)
