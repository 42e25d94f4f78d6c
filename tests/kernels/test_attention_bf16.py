"""attention_bf16: the reference against SDPA, refusals, what is launched, where it is taken, its admission."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from scripts.kernel_admission import attention as admission
from scripts.kernel_admission.attention import admit_bf16
from scripts.kernel_admission.attention_cases import Case, expected_bf16, make_case_bf16
from scripts.kernel_admission.judge import distance
from seko_kernels import tuned_bf16
from seko_kernels.attention_bf16 import attention_bf16
from seko_kernels.errors import KernelsError, TilesError
from seko_kernels.tuned_bf16 import is_faster, read_table, write_table
from tests.kernels.captured import run_and_replay
from tests.support.tolerances import ROUNDED_TO_BF16, STEP

ROWS = Case("rows of different fill", 37, 3, 150, (1, 77, 150))


def test_the_reference_is_sdpa_over_the_filled_places() -> None:
    q, k, v, valid = make_case_bf16(ROWS, 32, "cpu")
    ours = attention_bf16(q, k, v, valid)
    assert ours.dtype == q.dtype
    for row, filled in enumerate(valid.tolist()):
        asked, keys, values = (x[row].transpose(0, 1) for x in (q, k[:, :filled], v[:, :filled]))
        truth = F.scaled_dot_product_attention(asked, keys, values)
        assert distance(ours[row], truth.transpose(0, 1).flatten(1)) < STEP[torch.float32]
    assert not attention_bf16(q, k, v, valid * 0).any()  # nothing to attend to gives nothing, not NaN


@settings(max_examples=25)
@given(
    filled=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    queries=st.integers(1, 9),
    heads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_what_lies_behind_the_fill_does_not_matter(
    filled: list[int], queries: int, heads: int, seed: int
) -> None:
    case = Case("any", queries, heads, 40, tuple(filled))
    q, k, v, valid = make_case_bf16(case, 16, "cpu")
    behind = torch.arange(k.shape[1]) >= valid[:, None]
    noise = torch.randn(k.shape, generator=torch.Generator().manual_seed(seed))
    others = [torch.where(behind[..., None, None], noise, x) for x in (k, v)]
    assert torch.equal(attention_bf16(q, k, v, valid), attention_bf16(q, *others, valid))


def test_truth_and_reference_agree() -> None:
    arguments = make_case_bf16(ROWS, 32, "cpu")
    truth, rounded = expected_bf16(*arguments)
    assert distance(attention_bf16(*arguments), truth) < STEP[torch.float32]
    assert 0 < distance(rounded, truth) < 2 * ROUNDED_TO_BF16  # probabilities, and the result


@pytest.mark.parametrize(
    ("change", "fault", "message"),
    [
        (lambda a: {**a, "q": a["q"][0]}, KernelsError, "expected \\[batch, tokens, heads, head_dim\\]"),
        (lambda a: {**a, "k": a["k"][:, :, :2]}, KernelsError, "k has shape"),
        (lambda a: {**a, "v": a["v"][:, :-1]}, KernelsError, "v has shape"),
        (lambda a: {**a, "v": a["v"].half()}, KernelsError, "v is torch.float16"),
        (lambda a: {**a, "v": a["v"].transpose(2, 3).contiguous().transpose(2, 3)}, KernelsError, "strided"),
        (lambda a: {**a, "valid_tokens": a["valid_tokens"].int()}, KernelsError, "valid_tokens"),
        (lambda a: {**a, "valid_tokens": a["valid_tokens"][:1]}, KernelsError, "valid_tokens"),
        (lambda a: {name: x.to("meta") for name, x in a.items()}, KernelsError, "meta"),
    ],
)
def test_refusals(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], fault: type[Exception], message: str
) -> None:
    named = dict(zip(("q", "k", "v", "valid_tokens"), make_case_bf16(ROWS, 32, "cpu"), strict=True))
    with pytest.raises(fault, match=message):
        attention_bf16(**change(named))


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], multiprocessors: int = 132) -> None:
    properties = SimpleNamespace(multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)


def fake_case(head_dim: int = 128, queries: int = 4680) -> tuple[Tensor, ...]:
    """Of the 1.3B model at 480x832, without memory."""
    q = torch.empty(1, queries, 12, head_dim, dtype=torch.bfloat16, device="cuda")
    k, v = torch.empty(2, 1, 32760, 12, head_dim, dtype=torch.bfloat16, device="cuda")
    return q, k, v, torch.empty(1, dtype=torch.int64, device="cuda")


def test_what_it_does_not_take_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        on_gpu(monkeypatch, (9, 0))
        with pytest.raises(KernelsError, match="head_dim must be 128"):
            attention_bf16(*fake_case(64))
        on_gpu(monkeypatch, (8, 9))
        with pytest.raises(KernelsError, match="sm_89, the 16-bit attention is for sm_90"):
            attention_bf16(*fake_case())


# -- where it is taken -----------------------------------------------------------------------------------------


def row(**change: object) -> dict[str, Any]:
    known = {"arch": "sm_90", "head_dim": 128, "shape_class": "some", "error": 0.01, "bound": 0.02}
    return {**known, "ms": 1.0, "torch_ms": 1.2, **change}


def test_the_table_that_ships_can_be_read() -> None:
    read_table(tuned_bf16.TABLE)


def test_only_what_was_faster_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "table.json"
    write_table(file, [row(), row(shape_class="few")])
    write_table(file, [row(ms=0.9)])
    assert [line["ms"] for line in json.loads(file.read_text())] == [1.0, 0.9]
    assert read_table(file).keys() == {("sm_90", 128, "some"), ("sm_90", 128, "few")}
    monkeypatch.setattr(tuned_bf16, "faster_table", lambda: read_table(file))
    assert is_faster("sm_90", 128, "some")
    assert not is_faster("sm_90", 128, "many")
    assert not is_faster("sm_120", 128, "some")
    monkeypatch.setattr(tuned_bf16, "gluon_fault", lambda: ImportError("moved"))
    assert not is_faster("sm_90", 128, "some")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"error": 0.03}, "above its bound"),
        ({"error": float("nan")}, "above its bound"),
        ({"ms": 1.2}, "no less than torch's"),
        ({"shape_class": "huge"}, "no shape class"),
        ({"head_dim": "wide"}, "no table"),
    ],
)
def test_tables_that_cannot_be(change: dict[str, object], message: str, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text(json.dumps([row(**change)]))
    with pytest.raises(TilesError, match=message):
        read_table(file)
    file.write_text(json.dumps([{"arch": "sm_90"}]))
    with pytest.raises(TilesError, match="no table"):
        read_table(file)


# -- admission -------------------------------------------------------------------------------------------------


def test_admission_admits_what_is_right() -> None:
    passed = admit_bf16("cpu")
    assert passed.refusal == ""
    assert 0 <= passed.error <= passed.bound


def test_admission_refuses_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(wrong: Callable[..., Tensor]) -> str:
        monkeypatch.setattr(admission, "attention_bf16", wrong)
        return admit_bf16("cpu").refusal

    def last_key_lost(q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
        return attention_bf16(q, k, v, valid - 1)

    def tail_unmasked(q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
        """Zeros behind the fill, as TMA brings them, that count."""
        behind = (torch.arange(k.shape[1]) >= valid[:, None])[..., None, None]
        whole = (-(-valid // 128) * 128).clamp(max=k.shape[1])
        return attention_bf16(q, k.masked_fill(behind, 0), v.masked_fill(behind, 0), whole)

    def no_code(*_: Tensor) -> Tensor:
        raise RuntimeError("PassManager::run failed")

    assert "above" in refusal(lambda *a: attention_bf16(*a) * 1.05)
    assert "above" in refusal(last_key_lost)
    assert "above" in refusal(tail_unmasked)
    assert "two runs differ" in refusal(lambda *a: attention_bf16(*a) * (1 + torch.rand(()) * 1e-3))
    assert "PassManager" in refusal(no_code)


# -- on a GPU --------------------------------------------------------------------------------------------------


class AttentionModule(torch.nn.Module):
    """The attention as an engine's graph sees it."""

    def forward(self, *arguments: Tensor) -> Tensor:
        return attention_bf16(*arguments) + 0.0


def needs_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Gluon kernel is for sm_90 alone")


@pytest.mark.gpu
@pytest.mark.parametrize("full", [(12, 4680, 28080), (40, 4680, 28080), (12, 2160, 6480)])
def test_gpu_admits_it(full: tuple[int, int, int]) -> None:
    needs_hopper()
    assert admit_bf16(full=full).refusal == ""


@pytest.mark.gpu
def test_gpu_package_and_its_capture_read_the_fill_from_the_device(
    package_runner: Callable[..., Any],
) -> None:
    needs_hopper()
    arguments = make_case_bf16(Case("filling", 390, 12, 2352, (1000, 2340)), 128, "cuda")
    engine = package_runner(AttentionModule(), arguments)
    truth, rounded = expected_bf16(*arguments)
    after = torch.tensor([390, 1950])
    (direct,), (captured,) = run_and_replay(engine, arguments, lambda: arguments[3].copy_(after))
    assert distance(direct, truth) <= 2 * distance(rounded, truth)
    truth, rounded = expected_bf16(*arguments)
    assert distance(captured, truth) <= 2 * distance(rounded, truth)
