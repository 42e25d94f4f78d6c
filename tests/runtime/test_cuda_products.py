"""The thread that loads cuBLAS, with a CPU in place of the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from seko_runtime.backends import cuda_products
from seko_runtime.backends.cuda_products import ProductsLoading
from seko_runtime.errors import DeviceMemoryError

CPU = torch.device("cpu")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to the CUDA stream, in order."""
    done: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: done.append("waited for"))

    def borrowed(_: torch.device) -> SimpleNamespace:
        done.append("borrowed")
        return stream

    @contextmanager
    def queued(_: torch.device, used: object) -> Iterator[None]:
        assert used is stream
        yield

    monkeypatch.setattr(cuda_products, "_loaded", set())
    monkeypatch.setattr(cuda_products, "borrow_stream", borrowed)
    monkeypatch.setattr(cuda_products, "return_stream", lambda *_: done.append("returned"))
    monkeypatch.setattr(cuda_products, "queued_on", queued)
    return done


def test_products_are_computed_once_for_a_device_and_the_stream_goes_back(events: list[str]) -> None:
    for _ in range(2):
        loading = ProductsLoading(CPU)
        loading.wait()
        loading.wait()
    assert events == ["borrowed", "waited for", "returned"]


def test_a_product_that_fails_is_left_to_the_session(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")

    monkeypatch.setattr(torch, "addmm", fail)
    ProductsLoading(CPU).wait()
    assert events == ["borrowed", "returned"]


def test_a_stream_that_nobody_gave_is_not_returned(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise DeviceMemoryError("no stream")

    monkeypatch.setattr(cuda_products, "borrow_stream", fail)
    ProductsLoading(CPU).wait()
    assert events == []
