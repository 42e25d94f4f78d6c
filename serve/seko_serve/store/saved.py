"""Saved sessions. For each session the store has a snapshot, and a small record with the snapshot's name, the session's
owner and hashes of the session's resume tokens.

Records are written to two files in turn: the older record is removed before the new one is written, so that a complete
record exists at every moment. Each snapshot has a new name, and is removed once a record names the next snapshot.

A session's files are ``ID.record0``, ``ID.record1`` and ``ID.snapshot-NUMBER``. Each further process that continues the
session first makes the file ``ID.owner-EPOCH``, where EPOCH counts these processes, and writes its records to
``ID.record0-EPOCH`` and ``ID.record1-EPOCH``. As only one process can make a file of a given name, each epoch has one
owner. An owner removes a snapshot only while there is no file of the next epoch. The owner looks for the file of the
next epoch after it wrote its own record. The next owner makes its own owner file before it reads records. So no owner
reads a record whose snapshot is removed afterwards.

The authentication code of a file covers the file's name too, and that of a snapshot also the tenant and the artifact
of the record that names it. So a file that somebody copies over another one is refused, whether it is another
session's, another tenant's, or an older one of the same session. What a store cannot show is that all files of a
session were exchanged for those of an earlier moment.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from seko_runtime.controls.recording import as_json
from seko_serve.store.base import (
    SESSION,
    Content,
    DamagedError,
    ExistsError,
    Store,
    StoreError,
    TakenError,
    VainError,
)

CHECK_BYTES = 32
_LENGTH_BYTES = 8
MAX_HEAD_BYTES = 256 << 20  # with a picture and a voice
_SHORT = 256  # letters of an entry of a record
VAIN_OWNERS = 2  # processes that may end, one after another, without a snapshot of their own


@dataclass(frozen=True)
class Record:
    """The record of a saved session, with all facts that a server needs to reopen the session.

    Parameters
    ----------
    session : str
        Id of the session.
    tenant : str
        Name of the session's owner.
    tokens : tuple of str
        SHA-256 of each resume token that opens the session.
    snapshot : str
        Name of the snapshot's file.
    period_s : float
        Seconds in which the viewer plays one chunk.
    number : int
        Number of the record, which grows by one with each record of the session.
    epoch : int
        Number of earlier owners of the session: 0 for the process that opened the session, and one more after each
        takeover.
    artifact : str
        SHA-256 of the artifact that the session needs; empty for a server that is not part of a fleet.
    """

    session: str
    tenant: str
    tokens: tuple[str, ...]
    snapshot: str
    period_s: float
    number: int = 0
    epoch: int = 0
    artifact: str = ""


@dataclass(frozen=True)
class Saved:
    """The content of a snapshot's file.

    Parameters
    ----------
    state : mapping
        The server's part of the session's state: a JSON value that may hold arrays.
    messages : sequence of bytes-like
        Sent messages that the viewer may not have received, oldest first.
    row : sequence of bytes-like
        The runtime's snapshot of the session's row, in pieces. The runtime's snapshot contains a hash of its own.
    """

    state: Mapping[str, Any]
    messages: Sequence[Content]
    row: Sequence[Content]


def new_session() -> str:
    """Return a new id for a session."""
    return secrets.token_hex(8)


class SavedSessions:
    """The saved sessions of a store. Several threads may write different sessions at the same time, but only one
    thread may write one session.

    Parameters
    ----------
    store : Store
        The store that contains the files of the sessions.
    key : bytes, optional
        A secret key, for stores to which others can write: files hold an authentication code made with the key, and
        files without a valid code are refused.
    """

    def __init__(self, store: Store, key: bytes | None = None) -> None:
        self._store, self._key = store, key

    def find(self, session: str) -> Record | None:
        """Return the newest record of a session, or None; DamagedError if all records of the session's newest owner are
        damaged, StoreError if the store cannot be read."""
        if not SESSION.fullmatch(session):
            return None
        for epoch in range(self._epoch(session), -1, -1):
            record = self._newest(session, epoch)
            if record is not None:  # else its owner ended before it wrote one
                return record
        return None

    def take_over(self, record: Record) -> Record:
        """Make this process the owner of a saved session, and return the session's newest record, which is now the
        process's own. Earlier owners can no longer change the record or remove the record's snapshot.

        Parameters
        ----------
        record : Record
            A record that `find` returned.

        Raises
        ------
        TakenError
            If another process takes the session over at the same time, or the session is gone.
        VainError
            If `VAIN_OWNERS` processes in a row took the session over from the same snapshot and ended before they saved
            the session, so that the session may be the cause.
        StoreError
            If the store cannot be read or written.
        """
        session = record.session
        epoch = self._epoch(session) + 1
        owners = [self._newest(session, earlier) for earlier in range(max(0, epoch - 1 - VAIN_OWNERS), epoch)]
        snapshots = {None if owner is None else owner.snapshot for owner in owners}
        if len(owners) > VAIN_OWNERS and len(snapshots) == 1 and None not in snapshots:
            raise VainError(
                f"{VAIN_OWNERS} processes ended while they continued {session} from {record.snapshot}"
            )
        content = json.dumps({"session": session, "epoch": epoch}).encode()
        try:
            self._store.put(_owner(session, epoch), [content])  # only the name of this file means something
        except ExistsError:
            raise TakenError(f"another process takes {session} over") from None
        newest = self.find(session)
        if newest is None:
            raise TakenError(f"{session} has ended")
        return self.commit(newest, replace(newest, epoch=epoch))

    def owns(self, record: Record) -> bool:
        """Return whether this record's process still owns the session, because no later process has taken the session
        over. StoreError if the store cannot be read."""
        return not self._taken(record)

    def put(self, session: str, tenant: str, saved: Saved, artifact: str = "") -> str:
        """Write a snapshot, and return its name; StoreError if the snapshot cannot be written.

        Parameters
        ----------
        session, tenant, artifact : str
            What the record that will name the snapshot has in its fields of these names; `read` refuses the snapshot
            for any other record.
        saved : Saved
            The content.
        """
        name = f"{session}.snapshot-{secrets.token_hex(4)}"
        self._store.put(name, self._pieces((name, tenant, artifact), saved))
        return name

    def commit(self, before: Record | None, record: Record) -> Record:
        """Write a session's next record; the snapshot of the previous record is removed if the next record names
        another snapshot.

        Parameters
        ----------
        before : Record or None
            The previous record, which the last call of `commit`, or `find`, returned.
        record : Record
            The next record; `commit` sets its number.

        Raises
        ------
        TakenError
            If another process has taken the session over.
        StoreError
            If the record cannot be written; the previous record is then kept.
        """
        written = replace(record, number=0 if before is None else before.number + 1)
        content = json.dumps(asdict(written)).encode()
        name = _slot(written.session, written.epoch, written.number % 2)
        if self._taken(written):
            raise TakenError(f"another process has taken {written.session} over")
        self._store.delete(name)
        try:
            self._store.put(name, [self._check((name,), content), content])
        except StoreError:
            self.discard(name)  # it may be there, as when only the answer was lost
            raise
        if before is not None and before.snapshot != written.snapshot and not self._taken(written):
            self.discard(before.snapshot)
        return written

    def discard(self, name: str) -> None:
        """Remove a file, such as a snapshot that no record names; if that fails, it is removed with old files later."""
        with suppress(StoreError):
            self._store.delete(name)

    def read(self, record: Record) -> Saved:
        """Return the snapshot that a record names; DamagedError if the snapshot is missing, damaged or not that
        record's, StoreError if the store cannot be read. The runtime checks its own part of the snapshot.
        """
        content = self._store.get(record.snapshot)
        if content is None:
            raise DamagedError(f"{record.snapshot} is gone")
        view = memoryview(content)
        size = int.from_bytes(view[:_LENGTH_BYTES], "little")
        head, rest = (
            view[_LENGTH_BYTES : _LENGTH_BYTES + size],
            view[_LENGTH_BYTES + size + CHECK_BYTES :],
        )
        if size > MAX_HEAD_BYTES or len(head) != size or not rest:
            raise DamagedError(f"{record.snapshot} is no snapshot of a session")
        table = _json(bytes(head), record.snapshot)
        sizes = table.get("messages")
        state = table.get("state")
        if not isinstance(state, dict) or not isinstance(sizes, list):
            raise DamagedError(f"{record.snapshot} is no snapshot of a session")
        messages, at = [], 0
        for length in sizes:
            if type(length) is not int or not 0 <= length <= len(rest) - at:
                raise DamagedError(f"{record.snapshot} is shorter than it says")
            messages.append(rest[at : at + length])
            at += length
        row = rest[at:]
        check = view[_LENGTH_BYTES + size : _LENGTH_BYTES + size + CHECK_BYTES]
        names = record.snapshot, record.tenant, record.artifact
        if not hmac.compare_digest(bytes(check), self._check(names, head, *messages, row[-CHECK_BYTES:])):
            raise DamagedError(
                f"{record.snapshot} is damaged, another session's, or was written with another key"
            )
        return Saved(state, messages, [row])

    def forget(self, record: Record) -> None:
        """Remove a session's records and snapshot; missing files are ignored. The files of owners stay, so that an
        earlier owner that still runs cannot save the session again.
        """
        session = record.session
        for epoch in range(max(record.epoch, self._epoch(session)) + 1):
            for slot in range(2):
                self._store.delete(_slot(session, epoch, slot))
        self._store.delete(record.snapshot)

    def _epoch(self, session: str) -> int:
        """Return the number of processes that have taken over the session so far."""
        epoch = 0
        while self._store.get(_owner(session, epoch + 1)) is not None:
            epoch += 1
        return epoch

    def _taken(self, record: Record) -> bool:
        return self._store.get(_owner(record.session, record.epoch + 1)) is not None

    def _newest(self, session: str, epoch: int) -> Record | None:
        """Return the newest record of an owner; DamagedError if all of the owner's records are damaged."""
        newest, fault = None, None
        for slot in range(2):
            content = self._store.get(_slot(session, epoch, slot))
            try:
                record = None if content is None else self._record(bytes(content), session, epoch, slot)
            except DamagedError as error:
                fault = error
                continue
            if record is not None and (newest is None or record.number > newest.number):
                newest = record
        if newest is None and fault is not None:
            raise fault
        return newest

    def _record(self, content: bytes, session: str, epoch: int, slot: int) -> Record:
        check, content = content[:CHECK_BYTES], content[CHECK_BYTES:]
        if not hmac.compare_digest(check, self._check((_slot(session, epoch, slot),), content)):
            raise DamagedError(
                f"the record of {session} is damaged, another session's, or was written with another key"
            )
        table = _json(content, session)
        texts = [table.get(name) for name in ("session", "tenant", "snapshot")]
        texts.append(table.get("artifact", ""))
        tokens, number, period_s = (table.get(name) for name in ("tokens", "number", "period_s"))
        right = (
            all(isinstance(text, str) and len(text) < _SHORT for text in texts)
            and isinstance(tokens, list)
            and all(isinstance(token, str) for token in tokens)
            and type(number) is int
            and isinstance(period_s, float)
        )
        own = texts[0] == session and table.get("epoch") == epoch
        if not right or not own or not str(texts[2]).startswith(f"{session}.snapshot-"):
            raise DamagedError(f"the record of {session} is none of it")
        return Record(
            session,
            str(texts[1]),
            tuple(tokens or ()),
            str(texts[2]),
            float(period_s or 0),
            int(number or 0),
            epoch,
            str(texts[3]),
        )

    def _pieces(self, names: Sequence[str], saved: Saved) -> list[Content]:
        table = {"state": saved.state, "messages": [len(message) for message in saved.messages]}
        head = json.dumps(as_json(table), separators=(",", ":"), allow_nan=False).encode()
        if len(head) > MAX_HEAD_BYTES:
            raise StoreError(
                f"the server's part of a snapshot has {len(head)} bytes, at most {MAX_HEAD_BYTES}"
            )
        end = b"".join(bytes(piece[-CHECK_BYTES:]) for piece in saved.row[-CHECK_BYTES:])[-CHECK_BYTES:]
        check = self._check(names, head, *saved.messages, end)
        return [len(head).to_bytes(_LENGTH_BYTES, "little"), head, check, *saved.messages, *saved.row]

    def _check(self, names: Sequence[str], *pieces: Content) -> bytes:
        """Return the authentication code of a file's content with the key; without a key, a SHA-256.

        The code covers ``names``, which say whose file it is, and the length of each piece, so that no other names and
        pieces have the same code.
        """
        running = hashlib.sha256() if self._key is None else hmac.new(self._key, digestmod=hashlib.sha256)
        for piece in (json.dumps(names).encode(), *pieces):
            running.update(memoryview(piece).nbytes.to_bytes(_LENGTH_BYTES, "little"))
            running.update(piece)
        return running.digest()


def _owner(session: str, epoch: int) -> str:
    return f"{session}.owner-{epoch}"


def _slot(session: str, epoch: int, slot: int) -> str:
    return f"{session}.record{slot}-{epoch}" if epoch else f"{session}.record{slot}"


def _json(content: bytes, name: str) -> dict[str, Any]:
    try:
        table = json.loads(content)
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise DamagedError(f"{name} is no JSON object")
    return table
