"""What one end of a channel sends is what the other receives, whatever the arrays' kinds and sizes."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from numpy.typing import NDArray

from seko_runtime.errors import UsageError
from seko_runtime.parallel.channel import channel_pair, inherited_channel

KINDS = arrays_of.boolean_dtypes() | arrays_of.integer_dtypes() | arrays_of.floating_dtypes()
SHAPES = arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
LATENTS = (1, 16, 3, 60, 104)  # more than a socket takes at once


def sent(*parts: dict[str, NDArray]) -> list[tuple[dict, dict[str, NDArray]]]:
    """Return what the other end receives, message by message."""
    channel, other = channel_pair()
    far = inherited_channel(other.detach())
    sender = threading.Thread(
        target=lambda: [channel.send({"number": n}, one) for n, one in enumerate(parts)]
    )
    sender.start()
    try:
        return [far.receive() for _ in parts]
    finally:
        sender.join()
        channel.close()
        far.close()


@given(
    st.lists(st.dictionaries(st.text(max_size=3), arrays_of.arrays(KINDS, SHAPES), max_size=3), max_size=3)
)
def test_messages_and_arrays_arrive_as_they_were(parts: list[dict[str, NDArray]]) -> None:
    for number, (message, arrays) in enumerate(sent(*parts)):
        assert message == {"number": number}
        assert [*arrays] == [*parts[number]]
        for name, array in parts[number].items():
            assert arrays[name].tobytes() == array.tobytes()
            assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)


def test_a_large_array_and_a_strided_one_arrive_whole() -> None:
    large = np.random.default_rng(0).standard_normal(LATENTS).astype(np.float32)
    ((_, arrays),) = sent({"large": large, "strided": large[..., ::3].swapaxes(1, 4)})
    assert np.array_equal(arrays["large"], large)
    assert np.array_equal(arrays["strided"], large[..., ::3].swapaxes(1, 4))
    arrays["large"][:] = 0  # the receiver's own


def test_an_end_that_goes_in_the_middle_of_an_array_is_told() -> None:
    channel, other = channel_pair()
    far = inherited_channel(other.detach())
    channel.connection.send_bytes(b'{"message": {}, "arrays": [["x", "<f4", [8]]]}')
    channel.close()
    with pytest.raises(EOFError):
        far.receive()
    far.close()


def test_what_is_no_number_is_refused() -> None:
    channel, other = channel_pair()
    with other, pytest.raises(UsageError, match="expected numbers"):
        channel.send({}, {"x": np.array([object()])})
    channel.close()
