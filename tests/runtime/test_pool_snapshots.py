"""Snapshots and the pool: a neighbour is not held up by a restore, and a file that cannot be harms nobody."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seko_runtime.errors import PoolFullError, SnapshotError, UsageError
from seko_runtime.format.safetensors_map import map_safetensors
from seko_runtime.sessions import membership as membership_module

from .pool_stories import PROMPTS, Story, closing, take
from .test_snapshot import KEY, file_bytes, sealed
from .toy_pool import SESSIONS, open_pool


def saved(tmp_path: Path, **more: Any) -> tuple[Path, Story]:
    """A session's snapshot after three chunks, and what the session was."""
    story, path = Story(3, PROMPTS[0]), tmp_path / "session"
    with closing(open_pool(**more)) as pool, pool.open_session(seed=3, prompt=PROMPTS[0]) as session:
        for _ in range(3):
            story.asked.append(("run",))
            story.gave.append(take(session.run_chunk()))
        session.save(path)
    return path, story


def with_numbers(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the numbers of a snapshot without a key, and mend its hash."""
    tensors = map_safetensors(memoryview(path.read_bytes()), path.name)
    parts = {name: tensor.to_numpy().view(np.uint8) for name, tensor in tensors.items()}
    del parts["seko.sha256"]
    facts = json.loads(parts["seko.snapshot"].tobytes())
    change(facts["numbers"])
    parts["seko.snapshot"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    path.write_bytes(file_bytes(sealed(parts)))


def test_a_neighbour_runs_while_a_snapshot_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, story = saved(tmp_path)
    with closing(open_pool()) as pool:
        other, ran = pool.open_session(prompt=PROMPTS[1]), threading.Event()
        real = membership_module.read_snapshot

        def run() -> None:
            other.run_chunk()
            ran.set()

        def slow(*args: Any, **named: Any) -> Any:
            threading.Thread(target=run, daemon=True).start()
            assert ran.wait(30), "the neighbour waits for the file"
            return real(*args, **named)

        monkeypatch.setattr(membership_module, "read_snapshot", slow)
        again = pool.restore(path)
        story.asked.append(("run",))
        story.gave.append(take(again.run_chunk()))
    assert story.gave == story.alone()


def test_a_pool_that_becomes_full_while_a_snapshot_is_read_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = saved(tmp_path)
    real, reads = membership_module.read_snapshot, []
    with closing(open_pool()) as pool:
        taken = [pool.open_session(prompt=PROMPTS[0]) for _ in range(SESSIONS - 1)]

        def late(*args: Any, **named: Any) -> Any:
            reads.append(args)
            taken.append(pool.open_session(prompt=PROMPTS[0]))
            return real(*args, **named)

        monkeypatch.setattr(membership_module, "read_snapshot", late)
        for _ in range(2):
            with pytest.raises(PoolFullError):
                pool.restore(path)
        assert len(reads) == 1  # a pool that is full already reads nothing
        assert len(taken) == SESSIONS


NUMBERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "kept chunks": lambda numbers: numbers["clock"]["first_frames"].append(0),
    "no kept chunks": lambda numbers: numbers["clock"].update(first_frames=[]),
    "another chunk's frames": lambda numbers: numbers["clock"]["first_frames"].__setitem__(1, 1 << 61),
    "frames of no chunk": lambda numbers: numbers["clock"].update(first=1),
    "frames of many chunks": lambda numbers: numbers["clock"].update(first=1 << 62),
    "more in the cache than made": lambda numbers: numbers["clock"].update(slot_first=1 << 40),
    "less in the cache than kept": lambda numbers: numbers["clock"].update(slot_first=0),
    "more given than a chunk": lambda numbers: numbers.update(conditioning_frames=99),
}


@pytest.mark.parametrize("what", NUMBERS)
def test_numbers_that_no_stream_has_are_refused_and_take_no_row(tmp_path: Path, what: str) -> None:
    path, _ = saved(tmp_path)
    with_numbers(path, NUMBERS[what])
    with closing(open_pool()) as pool:
        with pytest.raises(SnapshotError) as caught:
            pool.restore(path)
        assert caught.value.exit_code == 4
        assert pool.free == SESSIONS


def test_numbers_that_are_left_alone_are_taken(tmp_path: Path) -> None:
    path, story = saved(tmp_path)
    with_numbers(path, lambda _: None)
    with closing(open_pool()) as pool:
        again = pool.restore(path)
        story.asked.append(("run",))
        story.gave.append(take(again.run_chunk()))
    assert story.gave == story.alone()


def test_a_pool_with_a_key_takes_its_own_snapshots_alone(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    path, story = saved(tmp_path, snapshot_key=KEY)
    plain, _ = saved(tmp_path / "plain")
    with closing(open_pool(snapshot_key=KEY)) as pool:
        with pytest.raises(SnapshotError, match="not written with this pool's snapshot_key"):
            pool.restore(plain)
        again = pool.restore(path)
        again.pause()
        again.save(path)  # a paused session's are keyed too
        again.close()
        again = pool.restore(path)
        story.asked.append(("run",))
        story.gave.append(take(again.run_chunk()))
    assert story.gave == story.alone()
    for key in (None, KEY[::-1]):
        with closing(open_pool(snapshot_key=key)) as pool, pytest.raises(SnapshotError, match="key"):
            pool.restore(path)


@pytest.mark.parametrize("key", [b"", bytes(31), "k" * 32, 7, bytearray(32)])
def test_what_is_no_key_is_refused_without_being_told(key: Any) -> None:
    with pytest.raises(UsageError, match="expected bytes, at least 32") as caught:
        open_pool(snapshot_key=key)
    assert "kkk" not in str(caught.value)


@pytest.mark.parametrize("key", [None, KEY])
def test_a_session_that_goes_on_does_not_change_its_snapshot(key: bytes | None) -> None:
    """The snapshot is read later than it is taken, as content and not as a file."""
    with closing(open_pool(snapshot_key=key)) as pool, closing(open_pool(snapshot_key=key)) as elsewhere:
        session = pool.open_session(seed=3, prompt=PROMPTS[0])
        session.run_chunk()
        snapshot = session.snapshot()
        undisturbed = [take(session.run_chunk()) for _ in range(4)]
        restored = elsewhere.restore(b"".join(snapshot.blocks()))
        assert [take(restored.run_chunk()) for _ in range(4)] == undisturbed
        with pytest.raises(SnapshotError):
            elsewhere.restore(b"no snapshot")
