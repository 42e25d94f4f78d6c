"""attention_fp8: the reference against SDPA, refusals, what compiles for which GPU, tiles and their admission."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scripts.kernel_admission import attention as admission
from scripts.kernel_admission.attention import admit
from scripts.kernel_admission.attention_cases import Case, expected, make_case
from scripts.kernel_admission.judge import distance
from seko_kernels import hopper_attention, tuned
from seko_kernels.attention import OwnTokens, attention_fp8, key_tiles, v_columns
from seko_kernels.errors import KernelsError, TilesError
from seko_kernels.formats import KEY_TILE
from seko_kernels.fused_reference import e4m3_cast, int8_rows
from seko_kernels.triton.attention_fp8 import (
    COMBINE_WARPS,
    attention_combine_kernel,
    attention_fp8_kernel,
)
from seko_kernels.tuned import (
    SAFE,
    SAFE_HOPPER,
    SPECIALISED,
    AttentionTiles,
    read_table,
    tiles_for,
    write_table,
)
from tests.kernels.captured import run_and_replay
from tests.support.tiers import first_is_fast
from tests.support.tolerances import ROUNDED_TO_BF16, STEP

SIGNATURE = {
    "Q": "*bf16",
    "K": "*i8",
    "K_SCALE": "*fp32",
    "V_T": "*fp8e4nv",
    **dict.fromkeys(("K_OWN", "V_OWN"), "*bf16"),
    "V_SCALE": "*fp32",
    "VALID_TOKENS": "*i64",
    "OUT": "*bf16",
    "LSE": "*fp32",
    **dict.fromkeys(("query_tokens", "own_tokens", "cache_tokens", "v_columns", "v_own_stride"), "i32"),
    **dict.fromkeys(("first_query", "out_tokens"), "i32"),
}
OTHER = AttentionTiles(128, 64, own_n=64, stages=3, warps=8)
HOPPER_SHARED = 227 * 1024  # bytes of a multiprocessor
INT8_STEP = 2.0**-6  # what rounding queries to int8 may cost, relative
ROWS = Case("rows of different fill", 37, 3, 150, (1, 77, 150))


def compile_attention(
    cross_compile: Callable[..., Any], tiles: AttentionTiles, arch: int, splits: int = 1
) -> Any:
    """The kernel with these tiles for 12 heads of 128."""
    constants = {
        "HEADS": 12,
        "HEAD_DIM": 128,
        "SOFTMAX_SCALE": 128**-0.5 * math.log2(math.e),
        "KEY_TILE": KEY_TILE,
        "Q_STRIDE": 12 * 128,
        "K_OWN_STRIDE": 12 * 128,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "OWN_N": tiles.own_n,
        "STAGES": tiles.stages,
        "SPLITS": splits,
        "INTEGER": False,
    }
    aligned = ("v_columns", "v_own_stride")
    return cross_compile(attention_fp8_kernel, SIGNATURE, constants, arch, tiles.warps, aligned)


def attend(*arguments: Tensor) -> Tensor:
    """The op with the arguments of its reference."""
    return attention_fp8(*arguments[:6], OwnTokens(*arguments[6:]))


def test_the_reference_is_sdpa_on_the_real_numbers() -> None:
    q, k, k_scale, v_t, v_scale, valid, k_own, v_own = make_case(ROWS, 32, "cpu")
    codes, q_scale = int8_rows(q)
    coarse = codes * q_scale.unsqueeze(-1)
    assert distance(coarse, q) < INT8_STEP
    ours = attend(
        coarse, k, k_scale, v_t, v_scale, valid, k_own, v_own
    )  # rounding them once more changes nothing
    assert ours.dtype == q.dtype
    none = attend(q, k, k_scale, v_t, v_scale, valid * 0 + q.shape[1], k_own, v_own)
    for row, filled in enumerate(ROWS.valid_tokens):
        real_k = k[row, :filled] * k_scale[row].repeat_interleave(KEY_TILE, 1)[:, :filled].T.unsqueeze(-1)
        real_v = (v_t[row, :, :, :filled].float() * v_scale[:, None, None]).transpose(1, 2)
        own_v = v_own[row].unflatten(-1, (3, 32)).transpose(0, 1)
        keys = torch.cat((real_k, k_own[row])).transpose(0, 1)
        truth = F.scaled_dot_product_attention(
            coarse[row].transpose(0, 1), keys, torch.cat((real_v, own_v), 1)
        )
        assert distance(ours[row], truth.transpose(0, 1).flatten(1)) < STEP[torch.float32]
        alone = F.scaled_dot_product_attention(q[row].transpose(0, 1), keys[:, filled:], own_v)
        assert distance(none[row], alone.transpose(0, 1).flatten(1)) < STEP[torch.float32]


def test_the_two_formulations_of_the_truth_agree() -> None:
    arguments = make_case(ROWS, 32, "cpu")
    truth, rounded = expected(*arguments)
    assert distance(attend(*arguments), truth) < INT8_STEP
    assert ROUNDED_TO_BF16 < distance(rounded, truth) < 2.0**-4  # fp8 probabilities are what it says


@settings(max_examples=50)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40))
def test_int8_rows_are_off_by_half_a_step_at_most(row: list[float]) -> None:
    """But for numbers above 127 steps, which are off by one at most."""
    x = torch.tensor([row])
    codes, scale = int8_rows(x)
    apart = (codes * scale[:, None] - x).abs() / scale[:, None]
    assert bool((apart <= torch.where(codes.abs() == 127, 1.0, 0.5)).all())
    assert int(codes.abs().max()) in (range(64, 128) if float(x.abs().max()) >= 2.0**-100 else range(128))


def test_wrong_tensors_are_refused() -> None:
    q, k, k_scale, v_t, v_scale, valid, k_own, v_own = arguments = make_case(ROWS, 32, "cpu")

    def refused(error: type[Exception], match: str, at: int, wrong: Tensor) -> None:
        with pytest.raises(error, match=match):
            attend(*arguments[:at], wrong, *arguments[at + 1 :])

    refused(KernelsError, "power of two", 0, q[..., :24])
    refused(KernelsError, "q: strided", 0, q.transpose(1, 2).contiguous().transpose(1, 2))
    refused(KernelsError, "q is", 0, e4m3_cast(q))
    refused(KernelsError, "k has shape", 1, k[:, :, :2])
    refused(KernelsError, "k is", 1, k.float())
    refused(KernelsError, "k_scale has shape", 2, k_scale[..., :1])
    refused(KernelsError, "v_t has shape", 3, v_t[..., :150])
    refused(KernelsError, "v_scale has shape", 4, v_scale[:2])
    refused(KernelsError, "int64", 5, valid.int())
    refused(KernelsError, "own keys is", 6, k_own.bfloat16())
    refused(KernelsError, "36 own keys and 37 queries", 6, k_own[:, 1:])
    refused(KernelsError, "own keys have shape", 6, k_own[..., :16])
    refused(KernelsError, "own values have shape", 7, v_own[:, 1:])
    refused(KernelsError, "own values: strided", 7, v_own.mT.contiguous().mT)
    refused(KernelsError, "one device", 1, k.to("meta"))


def test_bytes_behind_the_valid_tokens_do_not_matter() -> None:
    arguments = make_case(ROWS, 32, "cpu")
    plain = attend(*arguments)
    assert not plain.isnan().any()
    for row, filled in enumerate(ROWS.valid_tokens):
        arguments[1][row, filled:].fill_(100)
        arguments[2][row, :, key_tiles(filled) :].fill_(7.0)
        arguments[3][row, ..., filled:].view(torch.uint8).fill_(0x41)
    assert torch.equal(attend(*arguments), plain)


@pytest.mark.parametrize(
    ("tiles", "splits"),
    first_is_fast([(SAFE_HOPPER, 8), (AttentionTiles(128, 128, 64, 3, 8), 1)]),
    ids=str,
)
def test_hopper_runs_8_bit_matrix_instructions_without_spills(
    tiles: AttentionTiles,
    splits: int,
    cross_compile: Callable[..., Any],
    sass_of: Callable[[Any], list[str]],
) -> None:
    compiled = compile_attention(cross_compile, tiles, 90, splits)
    opcodes = sass_of(compiled)
    assert {"IGMMA", "QGMMA", "HGMMA"} <= set(opcodes)  # keys in int8, values in fp8, own tokens in bfloat16
    assert "UTMALDG" in opcodes  # tiles come through tensor descriptors
    assert not {"LDL", "STL"} & set(opcodes), "the kernel spills to local memory"
    assert compiled.metadata.shared * tiles.resident <= HOPPER_SHARED


@pytest.mark.parametrize("arch", first_is_fast([100, 89, 120]))
def test_safe_tiles_compile_for_the_others_with_fp8(
    arch: int, cross_compile: Callable[..., Any], sass_of: Callable[[Any], list[str]]
) -> None:
    compiled = compile_attention(cross_compile, SAFE, arch)
    if arch != 100:  # its matrix instructions are named otherwise
        assert {"QMMA", "HMMA"} <= set(sass_of(compiled))
    assert compiled.metadata.shared <= 99 * 1024  # what sm_89 and sm_120 have


def test_sm_80_has_no_fp8(cross_compile: Callable[..., Any]) -> None:
    with pytest.raises(Exception, match="fp8e4nv not supported"):
        compile_attention(cross_compile, SAFE, 80)


def test_combine_compiles_everywhere(
    cross_compile: Callable[..., Any], sass_of: Callable[[Any], list[str]], compile_archs: tuple[int, ...]
) -> None:
    signature = {"PARTS": "*bf16", "LSE": "*fp32", "OUT": "*bf16", "part_tokens": "i32", "out_tokens": "i32"}
    constants = {"HEADS": 12, "HEAD_DIM": 128, "SPLITS": 2, "BLOCK_H": 16}
    for arch in compile_archs:
        compiled = cross_compile(attention_combine_kernel, signature, constants, arch, COMBINE_WARPS)
        assert not {"LDL", "STL"} & set(sass_of(compiled))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_m": 96}, "block_m must be a power of two"),
        ({"own_n": 8}, "own_n must be a power of two of at least 16"),
        ({"block_n": 256}, "block_n must be at most 128"),
        ({"stages": 0}, "at least 1"),
        ({"resident": 0}, "at least 1"),
        ({"specialised": True}, "tiles of \\(192"),
    ],
)
def test_tiles_that_cannot_be_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(TilesError, match=message):
        replace(SAFE, **change)


def test_a_gpu_without_measured_tiles_gets_safe_ones() -> None:
    assert tiles_for("sm_91", 128, "some", 28080) == SAFE
    assert tuned.safe_tiles("sm_90") == SAFE_HOPPER


def test_shape_classes_follow_how_far_a_gpu_is_filled() -> None:
    assert tuned.shape_class(1, 12, 2160) == "few"  # S3
    assert tuned.shape_class(1, 12, 4680) == "some"  # S1
    assert tuned.shape_class(1, 40, 4680) == "many"  # S4, S5


def test_the_table_that_ships_can_be_read() -> None:
    for (arch, head_dim, shape), tiles in read_table(tuned.TABLE).items():
        assert tiles_for(arch, head_dim, shape, 28080) == tiles


def test_a_past_that_specialised_warpgroups_cannot_read_gets_safe_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuned, "tuned_table", lambda: {("sm_90", 128, "some"): SPECIALISED})
    assert tiles_for("sm_90", 128, "some", 28080) == SPECIALISED
    assert tiles_for("sm_90", 128, "some", 28072) == SAFE_HOPPER
    assert tuned.measured_tiles("sm_90", 128, "some", 28072) is None
    monkeypatch.setattr(hopper_attention, "gluon_fault", lambda: ImportError("moved"))
    assert tiles_for("sm_90", 128, "some", 28080) == SAFE_HOPPER


def table_row(shape: str, tiles: AttentionTiles) -> dict[str, Any]:
    place = {"arch": "sm_90", "head_dim": 128, "shape_class": shape}
    return place | {"tiles": asdict(tiles), "error": 0.01, "bound": 0.02}


def test_a_table_round_trips_and_keeps_other_rows(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    write_table(file, [table_row("some", OTHER) | {"ms": 1.3}])
    write_table(file, [table_row("many", SAFE)])
    write_table(file, [table_row("some", SAFE_HOPPER)])
    assert read_table(file) == {("sm_90", 128, "some"): SAFE_HOPPER, ("sm_90", 128, "many"): SAFE}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"error": 0.03}, "above its bound"),
        ({"error": float("nan")}, "above its bound"),
        ({"shape_class": "huge"}, "no shape class"),
        ({"tiles": {"block_m": 128}}, "no table"),
        ({"tiles": asdict(SAFE) | {"block_n": 100}}, "power of two"),
    ],
)
def test_a_table_with_tiles_that_were_not_admitted_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    row = table_row("some", OTHER)
    file = tmp_path / "table.json"
    file.write_text(json.dumps([row | change]))
    with pytest.raises(TilesError, match=message):
        read_table(file)


def test_admission_admits_what_is_right() -> None:
    passed = admit(None, head_dim=32, device="cpu")
    assert passed.refusal == ""
    assert 0 < passed.error <= passed.bound


def test_admission_refuses_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faults that Triton's compiler has been seen to make: lost tiles, unmasked tails, NaN, races, no code."""

    def with_fault(fault: Callable[[Tensor], Tensor]) -> str:
        def wrong(*arguments: Any) -> Tensor:
            return fault(attention_fp8(*arguments[:7]))

        monkeypatch.setattr(admission, "attention_fp8", wrong)
        return admit(SAFE, head_dim=32, device="cpu").refusal

    assert "above" in with_fault(lambda out: out * 1.05)
    assert "above" in with_fault(
        lambda out: torch.where(torch.arange(out.shape[1])[:, None] == 3, torch.nan, out)
    )
    assert "two runs differ" in with_fault(lambda out: out * (1 + torch.rand(()) * 1e-2))

    def tail_unmasked(
        q: Tensor,
        k: Tensor,
        k_scale: Tensor,
        v_t: Tensor,
        v_scale: Tensor,
        valid: Tensor,
        own: OwnTokens,
        _: Any,
    ) -> Tensor:
        past = valid - q.shape[1]
        some = torch.where(past > 0, -(-past // 64) * 64, 0).clamp(max=k.shape[1])
        behind = torch.arange(v_t.shape[3]) >= past[:, None]
        k = k.masked_fill(behind[:, : k.shape[1], None, None], 0)
        v_t = torch.where(behind[:, None, None], 0.0, v_t.float()).to(v_t.dtype)
        return attention_fp8(q, k, k_scale, v_t, v_scale, some + q.shape[1], own)

    monkeypatch.setattr(admission, "attention_fp8", tail_unmasked)
    assert "above" in admit(SAFE, head_dim=32, device="cpu").refusal

    def own_key_lost(*arguments: Any) -> Tensor:
        own = arguments[6]
        mask = torch.arange(own.k.shape[1]) < own.k.shape[1] - 1
        lost = OwnTokens(own.k * mask[:, None, None], own.v * mask[:, None].expand(own.v.shape))
        return attention_fp8(*arguments[:6], lost)

    monkeypatch.setattr(admission, "attention_fp8", own_key_lost)
    assert "above" in admit(SAFE, head_dim=32, device="cpu").refusal

    def no_code(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(admission, "attention_fp8", no_code)
    assert "PassManager" in admit(SAFE, head_dim=32, device="cpu").refusal


class AttentionModule(torch.nn.Module):
    """The attention as an engine's graph sees it."""

    def __init__(self, tiles: AttentionTiles | None) -> None:
        super().__init__()
        self.tiles = tiles

    def forward(self, *arguments: Tensor) -> Tensor:
        return attention_fp8(*arguments[:6], OwnTokens(*arguments[6:]), self.tiles) + 0.0


@pytest.mark.gpu
def test_gpu_admits_the_tiles_that_the_op_picks() -> None:
    assert admit(None, full=(12, 4680, 32760)).refusal == ""
    assert admit(None, head_dim=64).refusal == ""


@pytest.mark.gpu
def test_gpu_admits_the_safe_tiles() -> None:
    major, minor = torch.cuda.get_device_capability()
    assert admit(tuned.safe_tiles(f"sm_{major}{minor}"), full=(12, 4680, 32760)).refusal == ""
    assert admit(SAFE).refusal == ""


@pytest.mark.gpu
def test_gpu_admits_specialised_warpgroups() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Gluon kernel is for sm_90 alone")
    assert admit(SPECIALISED, full=(12, 4680, 28080)).refusal == ""
    assert admit(SPECIALISED, full=(40, 4680, 28080)).refusal == ""


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [None, SPECIALISED], ids=["tuned", "specialised"])
def test_gpu_package_and_its_capture_read_the_fill_from_the_device(
    package_runner: Callable[..., Any], tiles: AttentionTiles | None
) -> None:
    if tiles is not None and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Gluon kernel is for sm_90 alone")
    case = Case("filling", 390, 12, 2352, (1000, 2340))
    arguments = make_case(case, 128, "cuda")
    engine = package_runner(AttentionModule(tiles), arguments)
    truth, rounded = expected(*arguments)
    after = torch.tensor([390, 1950])  # the first row has no past
    (direct,), (captured,) = run_and_replay(engine, arguments, lambda: arguments[5].copy_(after))
    assert distance(direct, truth) <= 2 * distance(rounded, truth)
    truth, rounded = expected(*arguments)
    assert distance(captured, truth) <= 2 * distance(rounded, truth)


def test_v_columns_are_whole_cache_lines() -> None:
    assert [v_columns(tokens) for tokens in (1, 128, 129, 32760)] == [128, 128, 256, 32768]
