"""Saved sessions: at every moment one whole record, and nothing damaged or foreign is taken for a session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seko_serve.live.saving import Saving
from seko_serve.metrics import Metrics
from seko_serve.settings import Settings
from seko_serve.store.base import Content, ExistsError, StoreError, TakenError, VainError
from seko_serve.store.folder import FolderStore
from seko_serve.store.saved import Record, Saved, SavedSessions, new_session

KEY = b"k" * 32
SAVED = Saved({"chunk": 3}, [b"", b"message"], [b"row", b" of the runtime"])


class Memory:
    """A store that fails before a chosen change, as a disk does that is full, or a process that is killed."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.changes_left = 1_000

    def put(self, name: str, pieces: list[Content]) -> None:
        self._change()
        if name in self.files:
            raise ExistsError(name)
        self.files[name] = b"".join(pieces)

    def get(self, name: str) -> Content | None:
        return self.files.get(name)

    def delete(self, name: str) -> None:
        self._change()
        self.files.pop(name, None)

    def _change(self) -> None:
        if self.changes_left == 0:
            raise StoreError("planted")
        self.changes_left -= 1


def commit_snapshot(
    saved: SavedSessions,
    before: Record | None,
    session: str,
    content: Saved,
    tokens: tuple[str, ...] = ("a",),
    tenant: str = "tenant",
) -> Record:
    """Write a snapshot and the record that names it, as the server does."""
    name = saved.put(session, tenant, content, "artifact")
    try:
        epoch = 0 if before is None else before.epoch
        record = Record(session, tenant, tokens, name, 0.5, epoch=epoch, artifact="artifact")
        return saved.commit(before, record)
    except StoreError:
        saved.discard(name)
        raise


def read(saved: SavedSessions, session: str) -> tuple[Record, int, list[bytes], bytes]:
    record = saved.find(session)
    assert record is not None
    content = saved.read(record)
    return (
        record,
        content.state["chunk"],
        [bytes(message) for message in content.messages],
        b"".join(content.row),
    )


@pytest.mark.shows("saved")
def test_what_was_saved_is_read_again_and_forgotten(tmp_path: Path) -> None:
    saved, session = SavedSessions(FolderStore(tmp_path / "store"), KEY), new_session()
    assert saved.find(session) is None
    first = commit_snapshot(saved, None, session, SAVED)
    second = commit_snapshot(saved, first, session, Saved({"chunk": 4}, [], [b"row"]), ("a", "b"))
    third = saved.commit(second, replace(second, tokens=("c",)))
    record, chunk, messages, row = read(saved, session)
    assert (record, chunk, messages, row) == (third, 4, [], b"row")
    assert record.tokens == ("c",)
    assert len(list((tmp_path / "store").iterdir())) == 3  # two records and one snapshot
    saved.forget(record)
    assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.parametrize("earlier", [False, True])
def test_a_record_whose_writing_was_not_confirmed_names_no_removed_snapshot(earlier: bool) -> None:
    class Unconfirmed(Memory):
        def put(self, name: str, pieces: list[Content]) -> None:
            super().put(name, pieces)
            if self.silent and ".record" in name:
                raise StoreError("the answer is lost")

        silent = False

    store, session = Unconfirmed(), new_session()
    saved = SavedSessions(store)
    record = commit_snapshot(saved, None, session, SAVED) if earlier else None
    store.silent = True
    with pytest.raises(StoreError):
        commit_snapshot(saved, record, session, Saved({"chunk": 4}, [], [b"row"]))
    assert saved.find(session) == record
    if record is not None:
        assert read(saved, session)[1] == 3


@given(st.lists(st.integers(0, 6), max_size=6), st.integers(0, 6))
def test_a_fault_at_any_change_leaves_the_session_before_or_after(faults: list[int], last: int) -> None:
    store, session = Memory(), new_session()
    saved, record = SavedSessions(store), None
    written = -1
    for number, fault in enumerate([*faults, last]):
        store.changes_left = fault
        try:
            record = commit_snapshot(saved, record, session, Saved({"chunk": number}, [b"m"], [b"r"]))
            written = number
        except StoreError:
            pass
        record_found = SavedSessions(store).find(session)
        store.changes_left = 1_000
        if record_found is None:
            assert written == -1
            continue
        chunk = saved.read(record_found).state["chunk"]
        assert chunk in (written, number)
        record, written = record_found, chunk  # as a process that begins anew finds it


@pytest.mark.parametrize("file", ["record", "snapshot"])
@given(st.data())
def test_no_changed_byte_goes_unseen(file: str, data: st.DataObject) -> None:
    store, session = Memory(), new_session()
    saved = SavedSessions(store)
    commit_snapshot(saved, None, session, SAVED)
    (name,) = [name for name in store.files if file in name]
    content = bytearray(store.files[name])
    # The runtime checks its own part: here only the end of it is bound to the rest.
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    store.files[name] = bytes(content)
    with pytest.raises(StoreError):
        read(saved, session)


@given(st.binary(max_size=300))
def test_what_is_no_snapshot_is_refused(content: bytes) -> None:
    store, session = Memory(), new_session()
    saved = SavedSessions(store)
    record = commit_snapshot(saved, None, session, SAVED)
    store.files[record.snapshot] = content
    with pytest.raises(StoreError):
        saved.read(record)
    store.files[f"{session}.record0"] = content
    with pytest.raises(StoreError):
        saved.find(session)


def test_only_the_key_that_wrote_it_reads_it_and_parts_cannot_be_exchanged() -> None:
    store = Memory()
    saved, sessions = SavedSessions(store, KEY), [new_session(), new_session()]
    records = [
        commit_snapshot(saved, None, session, Saved({"chunk": 0}, [], [session.encode() * 4]))
        for session in sessions
    ]
    for other in (SavedSessions(store), SavedSessions(store, b"o" * 32)):
        with pytest.raises(StoreError, match="another key"):
            other.find(sessions[0])
        with pytest.raises(StoreError, match="another key"):
            other.read(records[0])
    first, second = (store.files[record.snapshot] for record in records)
    store.files[records[0].snapshot] = first[:-64] + second[-64:]
    with pytest.raises(StoreError, match="damaged"):
        saved.read(records[0])
    store.files[f"{sessions[0]}.record0"] = store.files[f"{sessions[1]}.record0"]
    with pytest.raises(StoreError, match="another session's"):
        saved.find(sessions[0])


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("tenants", [("ada", "bob"), ("ada", "ada")])
def test_a_file_that_is_copied_over_another_one_is_refused(
    key: bytes | None, tenants: tuple[str, str]
) -> None:
    """Else a tenant who reopens his session would see the frames of the one whose files took their place."""
    for kind in ("snapshot", "record"):
        store = Memory()
        saved, sessions = SavedSessions(store, key), [new_session(), new_session()]
        for session, tenant in zip(sessions, tenants, strict=True):
            commit_snapshot(saved, None, session, SAVED, tenant=tenant)
        source, goal = (
            next(name for name in store.files if name.startswith(f"{session}.{kind}")) for session in sessions
        )
        store.files[goal] = store.files[source]
        with pytest.raises(StoreError, match="another session's"):
            read(saved, sessions[1])
        assert read(saved, sessions[0])[1] == 3


def test_an_older_snapshot_or_record_of_a_session_does_not_pass_for_a_newer_one() -> None:
    store, session = Memory(), new_session()
    saved = SavedSessions(store, KEY)
    first = commit_snapshot(saved, None, session, SAVED)
    before = dict(store.files)
    second = commit_snapshot(saved, first, session, Saved({"chunk": 4}, [], [b"row"]))
    now = dict(store.files)
    store.files = {**now, second.snapshot: before[first.snapshot]}
    with pytest.raises(StoreError, match="another session's"):
        read(saved, session)
    store.files = {**now, f"{session}.record1": before[f"{session}.record0"]}
    with pytest.raises(StoreError, match="is gone"):
        read(saved, session)


@pytest.mark.parametrize("field", ["tenant", "artifact"])
def test_a_snapshot_is_read_only_for_the_owner_and_artifact_of_its_record(field: str) -> None:
    saved, session = SavedSessions(Memory(), KEY), new_session()
    record = commit_snapshot(saved, None, session, SAVED)
    with pytest.raises(StoreError, match="another session's"):
        saved.read(replace(record, **{field: "another"}))
    assert saved.read(record).state == SAVED.state


def test_an_owner_that_wakes_up_behind_another_one_saves_and_removes_nothing() -> None:
    store, session = Memory(), new_session()
    sleeper, other = SavedSessions(store), SavedSessions(store)
    first = commit_snapshot(sleeper, None, session, SAVED)
    record = other.find(session)
    assert record == first
    taken = other.take_over(first)
    assert (taken.snapshot, taken.epoch) == (first.snapshot, 1)
    with pytest.raises(TakenError):
        commit_snapshot(sleeper, first, session, Saved({"chunk": 9}, [], [b"zombie"]))
    with pytest.raises(TakenError):
        sleeper.commit(first, replace(first, tokens=("stolen",)))
    assert read(other, session)[:2] == (taken, 3)
    last = commit_snapshot(other, taken, session, Saved({"chunk": 4}, [], [b"row"]))
    assert read(SavedSessions(store), session)[:2] == (last, 4)
    other.forget(last)
    with pytest.raises(TakenError):
        commit_snapshot(sleeper, first, session, Saved({"chunk": 9}, [], [b"zombie"]))
    assert other.find(session) is None


@given(st.data())
def test_of_owners_whose_steps_mix_in_any_order_the_last_one_is_read(data: st.DataObject) -> None:
    """Each step of the store may be the one before which the other process does all of its work."""
    store, session = Memory(), new_session()
    sleeper, other = SavedSessions(store), SavedSessions(store)
    first = commit_snapshot(sleeper, None, session, SAVED)
    second = commit_snapshot(sleeper, first, session, Saved({"chunk": 4}, [], [b"four"]))
    pause, after = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 2))
    taken: list[Record] = []

    class Paused(Memory):
        """The sleeper's way to the store, which pauses before a step."""

        steps = 0

        def _wait(self) -> None:
            if self.steps == pause:
                current = other.find(session)
                assert current is not None
                record = other.take_over(current)
                for chunk in range(after):
                    name = other.put(
                        session, "tenant", Saved({"chunk": 10 + chunk}, [], [b"other"]), "artifact"
                    )
                    record = other.commit(record, replace(record, snapshot=name))
                taken.append(record)
            self.steps += 1

        def put(self, name: str, pieces: list[Content]) -> None:
            self._wait()
            store.put(name, pieces)

        def get(self, name: str) -> Content | None:
            self._wait()
            return store.get(name)

        def delete(self, name: str) -> None:
            self._wait()
            store.delete(name)

    slow = SavedSessions(Paused())
    try:
        commit_snapshot(slow, second, session, Saved({"chunk": 5}, [], [b"five"]))
    except TakenError:
        assert taken
    if not taken:
        return
    record, chunk, _, _ = read(SavedSessions(store), session)
    assert record == taken[0]
    assert chunk == 9 + after if after else chunk in (4, 5)


def test_a_session_that_ends_its_processes_is_continued_twice_and_no_more() -> None:
    store, session = Memory(), new_session()
    saved = SavedSessions(store)
    record = commit_snapshot(saved, None, session, SAVED)
    for epoch in (1, 2):
        record = saved.take_over(record)
        assert record.epoch == epoch
    with pytest.raises(VainError, match="2 processes ended"):
        saved.take_over(record)
    name = saved.put(session, "tenant", Saved({"chunk": 9}, [], [b"row"]), "artifact")
    record = saved.commit(record, replace(record, snapshot=name))
    assert saved.take_over(record).epoch == 3


def test_of_processes_that_take_over_at_once_one_succeeds() -> None:
    store, session = Memory(), new_session()
    saved = SavedSessions(store)
    record = commit_snapshot(saved, None, session, SAVED)
    store.put(f"{session}.owner-1", [b""])  # of a process that is between two steps

    class Late(Memory):
        """Sees the other's file only when it makes its own, as it looked before."""

        def get(self, name: str) -> Content | None:
            return None if name.endswith(".owner-1") else store.get(name)

        def put(self, name: str, pieces: list[Content]) -> None:
            store.put(name, pieces)

    with pytest.raises(TakenError):
        SavedSessions(Late()).take_over(record)


@pytest.mark.parametrize("session", ["", "..", "a/b", "A" * 16, "g" * 16, "0" * 15, "0" * 17])
def test_what_is_no_id_of_a_session_is_not_looked_up(session: str) -> None:
    class Untouched(Memory):
        def get(self, name: str) -> Content | None:
            raise AssertionError(name)

    assert SavedSessions(Untouched()).find(session) is None


def test_a_store_that_cannot_be_opened_is_refused_by_the_options_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for chosen in (str(tmp_path / "file"), "nothing://bucket"):
        with pytest.raises(StoreError, match=r"^--snapshots: .*; give another place, or none$"):
            Saving(Settings(Path("toy"), snapshots=chosen), Metrics())
