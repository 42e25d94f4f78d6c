"""What one end of a channel sends is what the other receives, whatever the arrays' kinds and sizes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from seko_runtime.errors import RankLostError, UsageError
from seko_runtime.parallel.channel import channel_pair, inherited_channel
from seko_runtime.parallel.group import RankGroup

KINDS = arrays_of.boolean_dtypes() | arrays_of.integer_dtypes() | arrays_of.floating_dtypes()
SHAPES = arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
LATENTS = (1, 16, 3, 60, 104)  # more than a socket takes at once


def sent(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the other end receives, message by message."""
    channel, other = channel_pair()
    far = inherited_channel(other.detach())

    def send() -> None:
        with closing(channel):
            for message in messages:
                channel.send(message)

    with ThreadPoolExecutor(1) as sender:
        done = sender.submit(send)
        try:
            return [far.receive() for _ in messages]
        finally:
            done.result()
            far.close()


def assert_same(found: object, expected: object) -> None:
    """Check that a part of a message arrived as it was."""
    if isinstance(expected, dict):
        assert [*found] == [*expected]
        for name, value in expected.items():
            assert_same(found[name], value)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_same(*pair)
    elif isinstance(expected, np.ndarray):
        assert found.tobytes() == expected.tobytes()
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    else:
        assert found == expected
        assert type(found) is type(expected)


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | arrays_of.arrays(KINDS, SHAPES)
TREES = st.recursive(
    LEAVES,
    lambda parts: (
        st.lists(parts, max_size=3).flatmap(lambda found: st.sampled_from([found, tuple(found)]))
        | st.dictionaries(st.text(min_size=1, max_size=3), parts, max_size=3)
    ),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(st.text(min_size=1, max_size=3), TREES, max_size=3), max_size=3))
def test_messages_and_arrays_arrive_as_they_were(messages: list[dict[str, Any]]) -> None:
    for found, expected in zip(sent(*messages), messages, strict=True):
        assert_same(found, expected)


def test_a_large_array_and_a_strided_one_arrive_whole() -> None:
    large = np.random.default_rng(0).standard_normal(LATENTS).astype(np.float32)
    strided = large[..., ::3].swapaxes(1, 4)
    (received,) = sent({"large": large, "strided": strided, "seed": np.int64(3), "tensor": torch.arange(3)})
    assert np.array_equal(received["large"], large)
    assert np.array_equal(received["strided"], strided)
    assert received["seed"] == 3
    assert received["tensor"].tolist() == [0, 1, 2]
    received["large"][:] = 0  # the receiver's own


def test_an_end_that_goes_in_the_middle_of_an_array_is_told() -> None:
    channel, other = channel_pair()
    far = inherited_channel(other.detach())
    channel.connection.send_bytes(b'{"message": {"x": {"": 0}}, "arrays": [["<f4", [8]]]}')
    channel.close()
    with pytest.raises(EOFError):
        far.receive()
    far.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": np.array([object()])}, "x is a ndarray, expected an array of numbers"),
        ({"x": {"": 1}}, "x has the name '', expected words"),
        ({"x": {("a",): 1}}, r"x has the name \('a',\)"),
        ({"x": {5: 1}}, "x has the name 5"),
    ],
)
def test_what_is_no_number_or_name_is_refused(wrong: dict[str, Any], message: str) -> None:
    channel, other = channel_pair()
    with other, pytest.raises(UsageError, match=message):
        channel.send(wrong)
    channel.close()


class Lost(RankGroup):
    """A group whose ranks are gone."""

    def __init__(self) -> None:
        self._lock, self._over = threading.Condition(), RankLostError("gone")


def test_a_group_that_is_lost_keeps_nothing_of_who_asks_it() -> None:
    """Its one error is raised by every call."""
    group, frames = Lost(), []
    for _ in range(3):
        with pytest.raises(RankLostError, match="gone") as error:
            group.call("run_chunk", seconds=1)
        frames.append(len(error.traceback))
    assert frames[2] == frames[0]
