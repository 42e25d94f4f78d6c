"""Twelve chunks past the wrap: the ONNX form, run by onnxruntime, against the eager pieces."""

from __future__ import annotations

import pytest

from tests.support.tolerances import relative_error

from . import forms
from .forms import ROWS

TOLERANCE = 1e-5  # of an exact cache, over a whole stream that feeds on itself: the bar
# Share of a chunk's FP4 bytes that may differ where both sides computed K and V themselves. Those differ by a few
# 1e-7 of themselves, and so a number may lie on the other side of a midpoint between codes; a chunk has about 10^4.
# What is written of *equal* K and V is equal byte for byte: test_functions.py.
FLIPPED = 1e-3


@pytest.mark.shows("onnx")
@pytest.mark.slow  # a block of its own; the exact pieces beside it are those of the FP4 stream
def test_an_exact_stream_past_the_wrap_with_rows_at_different_chunks() -> None:
    ours, truth = forms.onnx_stream("fp32", ROWS), forms.eager_stream("fp32", ROWS)
    for chunk, firsts in forms.positions(ours.config):
        for stream in (ours, truth):
            stream.run_chunk(firsts, seeds=[7 + row for row in range(ROWS)])
        error = relative_error(ours.buffers["latents"], truth.buffers["latents"])
        assert error <= TOLERANCE, (chunk, error)
        for name, cache in truth.caches().items():
            assert relative_error(ours.caches()[name], cache) <= TOLERANCE, (chunk, name)


def test_each_chunk_of_an_fp4_stream_past_the_wrap() -> None:
    ours, truth = forms.onnx_stream("fp4", ROWS), forms.eager_stream("fp4", ROWS)
    for chunk, firsts in forms.positions(ours.config):
        for stream in (ours, truth):
            stream.run_chunk(firsts, seeds=[7 + row for row in range(ROWS)])
        error = relative_error(ours.buffers["latents"], truth.buffers["latents"])
        assert error <= TOLERANCE, (chunk, error)
        for name, cache in truth.caches().items():
            flipped = int((ours.caches()[name] != cache).sum())
            assert flipped <= FLIPPED * cache.numel(), (chunk, name, flipped)
            ours.buffers[name].copy_(
                cache
            )  # each chunk stands for itself: a flipped code would be read by the next


def test_the_streams_differ_where_a_cache_is_not_put_back() -> None:
    ours, truth = forms.onnx_stream("fp4", ROWS), forms.eager_stream("fp4", ROWS)
    block = ours.engines["block"]
    ours.engines["block"] = lambda *tensors: block(*(tensor.clone() for tensor in tensors))
    for chunk in range(2):
        for stream in (ours, truth):
            stream.run_chunk([chunk * 2] * ROWS, seeds=[7] * ROWS)
    assert relative_error(ours.buffers["latents"], truth.buffers["latents"]) > 100 * TOLERANCE
