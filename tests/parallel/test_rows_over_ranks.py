"""Rows over several ranks are made from the interface of rows: a new method needs no second place, and every method
gives over ranks what it gives in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from seko_export.config.pool import PoolConfig
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.errors import SekoRuntimeError, SessionClosedError
from seko_runtime.parallel.group import RankGroup
from seko_runtime.parallel.records import STAYS
from seko_runtime.sessions.over_ranks import OverRanks, methods_of
from seko_runtime.sessions.ranked_rows import OPEN, RankCommands, rows_over_ranks
from seko_runtime.sessions.rows import Rows
from seko_runtime.video.row_numbers import STATE_FORM
from seko_runtime.video.rows import Beginning, VideoRows
from tests.export.media_files import TEXT, VAE
from tests.parallel.rank_faults import PATIENCE_S
from tests.parallel.test_streams import config_of, pictures, tokenizer
from tests.parallel.thread_group import EagerRank, manifest_of, random_weights, rows_in_threads
from tests.parallel.toy_rows import FORM, HEADS, LocalToyRows, Note, ToyRows
from tests.parallel.toy_rows import manifest_of as toy_manifest
from tests.truth.eager_stream import random_text

assert tokenizer  # a fixture
RANKS = 2


@contextmanager
def in_threads() -> Iterator[ToyRows]:
    opens = [lambda _, rank=rank: LocalToyRows(rank, RANKS) for rank in range(RANKS)]
    with rows_in_threads(ToyRows, toy_manifest(RANKS), opens, FORM) as rows:
        yield rows


@contextmanager
def in_processes() -> Iterator[ToyRows]:
    group = RankGroup("tests.parallel.toy_rows", RANKS, {}, seconds=PATIENCE_S)
    try:
        yield rows_over_ranks(ToyRows, toy_manifest(RANKS), group, FORM, {})
    finally:
        group.close()


@pytest.fixture(params=[in_threads, in_processes], ids=["threads", "processes"])
def several(request: pytest.FixtureRequest) -> Iterator[ToyRows]:
    """Toy rows over two ranks."""
    with request.param() as rows:
        yield rows


def same(found: Any, expected: Any) -> bool:
    """Return whether two results are equal, with their types; what stays in its process is not compared."""
    if isinstance(expected, Callable):
        return callable(found) and same(found(), expected())
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and np.array_equal(found, expected)
    if hasattr(expected, "arrays") and not is_dataclass(expected):  # tensors that are still copied
        return same(dict(found.arrays()), dict(expected.arrays()))
    if type(found) is not type(expected):
        return False
    if is_dataclass(expected):
        names = [field.name for field in fields(expected) if field.metadata != STAYS]
        return all(same(getattr(found, name), getattr(expected, name)) for name in names)
    if isinstance(expected, Mapping):
        return found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def call(name: str, /, *arguments: Any, **named: Any) -> Call:
    """Return a call of a method, or the name of a property."""
    return name, arguments, named


def answer(rows: Any, name: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return the value of a property, or the result of a method or its error."""
    try:
        member = getattr(rows, name)
        return member(*arguments, **named) if callable(member) else member
    except SekoRuntimeError as error:
        return type(error).__name__, str(error)


PICTURE = np.arange(6, dtype=np.uint8).reshape(1, 2, 3)
TOY_CALLS: Sequence[Call] = [
    call("noted", 1, Note("new", (1, 2), PICTURE), times=2),
    call("noted", 0, Note("none"), times=-1),
    call("run", [1, 0], [5, 6]),
    call("run", [1], None),
    call("runs"),
    call("check", [0], [1, 2]),
    call("variants", [0, 1]),
    call("begin_owner", 0, "ada"),
    call("reserve", 1),
    call("read_later", 1),
    call("layout"),
    call("heads"),
    call("store", 1),
    call("forget", 1),
    call("read_later", 0),
    call("who"),
    call("free_bytes"),
    call("calls_done"),
    call("closed"),
    call("check_open"),
]


def test_a_new_method_of_a_row_needs_no_second_place(several: ToyRows) -> None:
    """Its declaration and its body: arguments, defaults, dataclasses, results that come later, errors, properties."""
    alone = LocalToyRows()
    for name, arguments, named in TOY_CALLS:
        found, expected = (answer(rows, name, arguments, named) for rows in (several, alone))
        if name == "read_later":  # rank 0's part, which the interface does not join
            found, expected = found(), expected()[:, : HEADS // RANKS]
        assert same(found, expected), name
    called = {name for name, *_ in TOY_CALLS}
    assert called >= methods_of(ToyRows).keys() - {"manifest", "load", "close"}


def test_state_of_all_ranks_is_joined_and_shared_out(several: ToyRows) -> None:
    alone, other = LocalToyRows(), LocalToyRows()
    other.noted(1, Note("stored"))
    state = other.store(1)
    for rows in (several, alone):
        rows.noted(0, Note("before"))
        rows.load(0, state)
        rows.run([0], None)
    assert same(several.store(0), alone.store(0))
    assert several.who() == (0, ["stored@1"])


def test_properties_keep_their_values_and_methods_do_not(several: ToyRows) -> None:
    several.run([0], None)
    several.close()
    assert several.runs == 1
    assert several.closed
    for call in (several.check_open, several.heads, partial(several.noted, 0, Note("late"))):
        with pytest.raises(SessionClosedError):
            call()


def test_only_the_interface_can_be_reached(several: Any) -> None:
    with pytest.raises(AttributeError):
        several.secret()
    with pytest.raises(TypeError, match="unexpected keyword argument 'word'"):
        several.noted(0, Note("x"), word="y")
    commands = RankCommands(0, ToyRows, lambda _: LocalToyRows())
    commands(OPEN, {"options": {}})
    for name in ("secret", "_cache", "__class__"):
        with pytest.raises(KeyError):
            commands(name, {})


def test_ranks_other_than_0_send_only_what_is_joined() -> None:
    commands = RankCommands(1, ToyRows, lambda _: LocalToyRows(1, RANKS))
    commands(OPEN, {"options": {}})
    assert commands("noted", {"row": 0, "note": Note("x"), "times": 2}) is None
    assert commands("heads", {}) == HEADS // RANKS
    state: Any = commands("store", {"row": 0})
    assert (state.numbers, {*state.tensors.arrays()}, state.arrays) == (None, {"cache"}, {})


class WithAttribute(Rows[int, int], Protocol):
    """Not for ranks."""

    streams: int


class WithMany(Rows[int, int], Protocol):
    """Not for ranks."""

    def many(self, *rows: int) -> None:
        """Take rows without names."""


class WithValue(Rows[int, int], Protocol):
    """Not for ranks."""

    limit = 3


class WithCommand(Rows[int, int], Protocol):
    """Not for ranks."""

    def end(self) -> None:
        """Do what a command to the ranks does."""


class WithFixed(Rows[int, int], Protocol):
    """Not for ranks."""

    @OverRanks(fixed=True)
    def of(self, row: int) -> int:
        """Return something of a row."""


@pytest.mark.parametrize(
    ("interface", "message"),
    [
        (WithAttribute, "WithAttribute.streams is an attribute, expected a method or a property"),
        (WithMany, "WithMany.many has the parameter rows, expected parameters that have a name"),
        (WithValue, "WithValue.limit is a int, expected a method or a property"),
        (WithCommand, "WithCommand.end has the name of the command that ends the ranks"),
        (WithFixed, "WithFixed.of has parameters, so its result cannot be `fixed`"),
    ],
)
def test_an_interface_that_ranks_cannot_have_is_refused(interface: type, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        rows_over_ranks(interface, toy_manifest(RANKS), None, FORM, {})  # type: ignore[arg-type]


def video_calls(alone: VideoRows) -> Iterator[Call]:
    """Yield calls of all members of `VideoRows` but `close` and `manifest`."""
    text = random_text(config_of(TEXT).model, 1).numpy()
    yield call("begin_owner", 0, "ada")
    yield call("reserve", 0)
    yield call("reserve", 1)
    beginning = Beginning(3, "a red disc", image=pictures(), reference=pictures(1)[0])
    yield call("begin", 0, beginning)
    yield call("begin", 1, Beginning(3, "a red disc", text))
    yield call("check", [0], [None])
    yield call("check", [0], [{"camera": 1}])
    yield call("variants", [0])
    yield call("run", [0])
    yield call("calls_done")
    yield call("read_latents", 0, 0, 0)
    yield call("read_latents", 0, 1, 0)
    yield call("video_finished", 0, 0, 0)
    yield call("video_frames", 0, 0, 0)
    yield call("video_frames", 0, 9, 0)
    yield call("set_prompt", 0, "a blue square", recache=True)
    yield call("set_prompt", 0, "a" * 70_000)
    yield call("check_prompt", None, "a square spinning")
    yield call("check_prompt", 0, "a" * 70_000)
    yield call("run", [0], [None])
    yield call("set_text", 0, text)
    yield call("set_text", 0, text[:, :1])
    yield call("set_inputs", 0, {"camera": text})
    yield call("next_frame", 0)
    yield call("rewind", 0, 1)
    yield call("run", [0])
    yield call("cut", 0, 8)
    yield call("cut", 0, -1)
    yield call("run", [0])
    yield call("rewind", 0, 0)
    yield call("layout")
    yield call("store", 0)
    yield call("load", 1, alone.store(0))
    yield call("run", [1])
    yield call("restart", 0, seed=9, image=pictures())
    yield call("run", [0])
    yield call("cache_sample", 2)
    yield call("forget", 1)
    yield call("store", 1)
    for name in ("free_bytes", "stats", "overlaps_decoding", "closed", "check_open"):
        yield call(name)


def test_every_member_of_the_rows_of_video_gives_over_ranks_what_it_gives_here(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks are two whole copies, so that results are equal byte for byte; how parts are joined others test."""
    monkeypatch.setattr(CpuMemory, "free_bytes", lambda _: 1 << 40)
    config = config_of(TEXT, VAE, reference_frames=1).changed(pool=PoolConfig(2, (1, 2)))
    weights, called = random_weights(config), set()
    ranks = [EagerRank(config, weights, tokenizer).open_rows for _ in range(RANKS)]
    manifest = replace(manifest_of(config, weights), ranks=RANKS)
    with torch.no_grad(), rows_in_threads(VideoRows, manifest, ranks, STATE_FORM) as several:
        alone = EagerRank(config, weights, tokenizer).open_rows({})
        for name, arguments, named in video_calls(alone):
            found, expected = (answer(rows, name, arguments, named) for rows in (several, alone))
            assert same(found, expected), (name, found, expected)
            called.add(name)
        alone.close()
        several.close()
        assert several.stats.chunks == alone.stats.chunks  # a property keeps its value
    assert called | {"close", "manifest"} == methods_of(VideoRows).keys()
