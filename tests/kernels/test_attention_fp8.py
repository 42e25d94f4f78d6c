"""attention_fp8: the reference against SDPA, refusals, what compiles for which GPU, tiles and their admission."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from seko_kernels import admission, tuned
from seko_kernels.admission import Case, admit, distance, expected, make_case
from seko_kernels.attention import OwnTokens, attention_fp8, own_block, v_columns
from seko_kernels.errors import KvDeviceError, OpDtypeError, OpShapeError, TilesError
from seko_kernels.fused_reference import e4m3_cast
from seko_kernels.triton.attention_fp8 import (
    COMBINE_WARPS,
    attention_combine_kernel,
    attention_fp8_kernel,
)
from seko_kernels.tuned import SAFE, SAFE_HOPPER, AttentionTiles, read_table, tiles_for, write_table
from tests.tolerances import ROUNDED_TO_BF16, STEP

SIGNATURE = {
    **dict.fromkeys(("Q", "K"), "*bf16"),
    "V_T": "*fp8e4nv",
    **dict.fromkeys(("K_OWN", "V_OWN"), "*bf16"),
    **dict.fromkeys(("Q_SCALE", "K_SCALE", "V_SCALE"), "*fp32"),
    "VALID_TOKENS": "*i64",
    "OUT": "*bf16",
    "LSE": "*fp32",
    **dict.fromkeys(("query_tokens", "cache_tokens", "v_columns", "v_own_stride"), "i32"),
}
SPECIALISED = AttentionTiles(128, 128, stages=2, warps=4, warp_specialize=True, tail_n=64)
ROWS = Case("rows of different fill", 37, 3, 150, (1, 77, 150))


def compile_attention(
    cross_compile: Callable[..., Any], tiles: AttentionTiles, arch: int, *, own: bool = True
) -> Any:
    """The kernel with these tiles for 12 heads of 128, as engines launch it or with all in fp8."""
    constants = {
        "HEADS": 12,
        "HEAD_DIM": 128,
        "SOFTMAX_SCALE": 128**-0.5 * math.log2(math.e),
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "STAGES": tiles.stages,
        "WARP_SPECIALIZE": tiles.warp_specialize,
        "SPLITS": tiles.splits,
        "TAIL_N": tiles.tail_n,
        "WHOLE": tiles.whole,
        "PEEL": tiles.peel,
        "FMA_EXPS": tiles.fma_exps,
        "OWN_N": own_block(tiles.block_n) if own else 0,
        "INTEGER": False,
    }
    signature = SIGNATURE if own else SIGNATURE | dict.fromkeys(("Q", "K", "K_OWN", "V_OWN"), "*fp8e4nv")
    aligned = ("v_columns", "v_own_stride")
    return cross_compile(attention_fp8_kernel, signature, constants, arch, tiles.warps, aligned)


def test_the_reference_is_sdpa_on_the_real_numbers() -> None:
    arguments = make_case(ROWS, 32, "cpu")
    q, k, v_t, q_scale, k_scale, v_scale, valid = arguments
    ours = attention_fp8(*arguments).float()
    for row, filled in enumerate(valid.tolist()):
        real_q = (q[row].float() * q_scale[:, None]).transpose(0, 1)
        real_k = (k[row, :filled].float() * k_scale[:, None]).transpose(0, 1)
        real_v = (v_t[row, :, :, :filled].float() * v_scale[:, None, None]).transpose(1, 2)
        truth = F.scaled_dot_product_attention(real_q, real_k, real_v).transpose(0, 1).flatten(1)
        assert distance(ours[row], truth) < ROUNDED_TO_BF16


def test_the_two_formulations_of_the_truth_agree() -> None:
    arguments = make_case(ROWS, 32, "cpu")
    truth, rounded = expected(*arguments)
    assert distance(attention_fp8(*arguments), truth) < ROUNDED_TO_BF16
    assert ROUNDED_TO_BF16 < distance(rounded, truth) < 2.0**-4  # fp8 probabilities are what it says


def test_with_own_tokens_the_reference_is_sdpa_on_the_real_numbers() -> None:
    arguments = make_case(ROWS, 32, "cpu", own=True)
    q, k, v_t, _, _, v_scale, valid, k_own, v_own = arguments
    ours = attention_fp8(*arguments[:7], own=OwnTokens(k_own, v_own))
    assert ours.dtype == q.dtype
    none = attention_fp8(*arguments[:6], valid * 0 + q.shape[1], own=OwnTokens(k_own, v_own))
    for row, filled in enumerate(ROWS.valid_tokens):
        real_v = (v_t[row, :, :, :filled].float() * v_scale[:, None, None]).transpose(1, 2)
        own_k, own_v = (x[row].unflatten(-1, (3, 32)) if x.dim() == 3 else x[row] for x in (k_own, v_own))
        keys, values = torch.cat((k[row, :filled], own_k)), torch.cat((real_v, own_v.transpose(0, 1)), 1)
        asks, keys = q[row].transpose(0, 1), keys.transpose(0, 1)
        truth = F.scaled_dot_product_attention(asks, keys, values)
        assert distance(ours[row], truth.transpose(0, 1).flatten(1)) < STEP[torch.float32]
        alone = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q[row], own_k, own_v)))
        assert distance(none[row], alone.transpose(0, 1).flatten(1)) < STEP[torch.float32]


def test_with_own_tokens_the_two_formulations_of_the_truth_agree() -> None:
    arguments = make_case(ROWS, 32, "cpu", own=True)
    truth, rounded = expected(*arguments)
    assert distance(attention_fp8(*arguments[:7], own=OwnTokens(*arguments[7:])), truth) < STEP[torch.float32]
    assert ROUNDED_TO_BF16 < distance(rounded, truth) < 2.0**-4


def test_wrong_own_tokens_are_refused() -> None:
    *arguments, k_own, v_own = make_case(ROWS, 32, "cpu", own=True)
    with pytest.raises(OpDtypeError, match="own keys is"):
        attention_fp8(*arguments, own=OwnTokens(k_own.bfloat16(), v_own))
    with pytest.raises(OpShapeError, match="own keys has shape"):
        attention_fp8(*arguments, own=OwnTokens(k_own[:, 1:], v_own))
    with pytest.raises(OpShapeError, match="own values have shape"):
        attention_fp8(*arguments, own=OwnTokens(k_own, v_own[:, 1:]))
    with pytest.raises(OpShapeError, match="own values are strided"):
        attention_fp8(*arguments, own=OwnTokens(k_own, v_own.mT.contiguous().mT))
    with pytest.raises(OpDtypeError, match="q is"):
        attention_fp8(e4m3_cast(arguments[0]), *arguments[1:], own=OwnTokens(k_own, v_own))
    with pytest.raises(OpDtypeError, match="k is"):
        attention_fp8(arguments[0], e4m3_cast(arguments[1]), *arguments[2:], own=OwnTokens(k_own, v_own))
    with pytest.raises(OpShapeError, match="q_scale belongs"):
        attention_fp8(*arguments[:3], *[arguments[5]] * 3, arguments[6], own=OwnTokens(k_own, v_own))


def test_bytes_behind_the_valid_tokens_do_not_matter() -> None:
    arguments = make_case(ROWS, 32, "cpu")
    plain = attention_fp8(*arguments)
    assert not plain.isnan().any()
    for row, filled in enumerate(ROWS.valid_tokens):
        arguments[1][row, filled:].view(torch.uint8).fill_(0x41)
        arguments[2][row, ..., filled:].view(torch.uint8).fill_(0x41)
    assert torch.equal(attention_fp8(*arguments), plain)


def test_wrong_tensors_are_refused() -> None:
    q, k, v_t, *scales, valid = make_case(ROWS, 32, "cpu")
    with pytest.raises(OpShapeError, match="power of two"):
        attention_fp8(q[..., :24], k, v_t, *scales, valid)
    with pytest.raises(OpShapeError, match="k has shape"):
        attention_fp8(q, k[:, :, :2], v_t, *scales, valid)
    with pytest.raises(OpShapeError, match="v_t has shape"):
        attention_fp8(q, k, v_t[..., :150], *scales, valid)
    with pytest.raises(OpShapeError, match="q is strided"):
        attention_fp8(q.transpose(1, 2).contiguous().transpose(1, 2), k, v_t, *scales, valid)
    with pytest.raises(OpShapeError, match="k_scale has shape"):
        attention_fp8(q, k, v_t, scales[0], scales[1][:2], scales[2], valid)
    with pytest.raises(OpDtypeError, match="q is torch"):
        attention_fp8(q.bfloat16(), k, v_t, *scales, valid)
    with pytest.raises(OpDtypeError, match="int64"):
        attention_fp8(q, k, v_t, *scales, valid.int())
    with pytest.raises(KvDeviceError, match="one device"):
        attention_fp8(q.to("meta"), k, v_t, *scales, valid)


@pytest.mark.parametrize(
    ("tiles", "own"),
    [
        (AttentionTiles(64, 128, stages=3, warps=4), True),
        (AttentionTiles(128, 128, stages=3, warps=8, tail_n=64, fma_exps=1), True),
        (AttentionTiles(128, 128, stages=3, warps=8, splits=2), True),
        (SPECIALISED, True),
        (replace(SPECIALISED, fma_exps=2), True),
        (replace(SPECIALISED, tail_n=0, peel=True), False),
        (SAFE_HOPPER, True),
        (SAFE_HOPPER, False),
        (SPECIALISED, False),
        (replace(SPECIALISED, block_n=256, fma_exps=1), False),
    ],
    ids=str,
)
def test_hopper_runs_fp8_matrix_instructions_without_spills(
    tiles: AttentionTiles,
    own: bool,
    cross_compile: Callable[..., Any],
    sass_of: Callable[[Any], list[str]],
) -> None:
    opcodes = sass_of(compile_attention(cross_compile, tiles, 90, own=own))
    assert "QGMMA" in opcodes
    assert ("HGMMA" in opcodes) == own  # own tokens in bfloat16
    assert "UTMALDG" in opcodes  # tiles come through tensor descriptors
    assert ("USETMAXREG" in opcodes) == tiles.warp_specialize  # registers move between the specialised warps
    assert not {"LDL", "STL"} & set(opcodes), "the kernel spills to local memory"


def test_polynomials_take_their_share_of_the_exponentials(
    cross_compile: Callable[..., Any], sass_of: Callable[[Any], list[str]]
) -> None:
    plain = AttentionTiles(128, 128, 3, 8)
    used = [
        sass_of(compile_attention(cross_compile, replace(plain, fma_exps=share), 90, own=False)).count("MUFU")
        for share in (0, 1, 2)
    ]
    assert used[0] - used[1] == used[1] - used[2] == 128 * 128 // 4 // (8 * 32)  # of one tile, a thread


def test_the_polynomial_is_near_the_exponential() -> None:
    """The assembly's steps in torch: n by adding 1.5 * 2**23 and rounding down, then to the exponent."""
    x = torch.linspace(-126, 8, 1_000_003, dtype=torch.float32)
    n = x.double().floor()
    f = (x.double() - n).float()
    p = torch.full_like(f, 0.07711908966302872) * f + 0.22756439447402954
    p = (p * f + 0.6951461434364319) * f + 1.0
    ours = (p.view(torch.int32) + (n.to(torch.int32) << 23)).view(torch.float32)
    error = (ours.double() / torch.exp2(x.double()) - 1).abs().max()
    assert 1e-6 < float(error) < 1e-4
    words = ("0f3D9DF09D", "0f3E6906A4", "0f3F31F519", "0f3F800000", "0fC2FC0000", "0f4B400000")
    numbers = (0.07711908966302872, 0.22756439447402954, 0.6951461434364319, 1.0, -126.0, 12582912.0)
    source = Path(inspect.getfile(attention_fp8_kernel.fn)).read_text(encoding="utf-8")
    for word, number in zip(words, numbers, strict=True):
        bits = torch.tensor(number, dtype=torch.float32).view(torch.int32).item() & 0xFFFFFFFF
        assert f"0f{bits:08X}" == word
        assert word in source


@pytest.mark.parametrize("arch", [89, 100, 120])
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
    signature = {"PARTS": "*bf16", "LSE": "*fp32", "OUT": "*bf16", "query_tokens": "i32"}
    constants = {"HEADS": 12, "HEAD_DIM": 128, "SPLITS": 2, "BLOCK_H": 16}
    for arch in compile_archs:
        compiled = cross_compile(attention_combine_kernel, signature, constants, arch, COMBINE_WARPS)
        assert not {"LDL", "STL"} & set(sass_of(compiled))


def test_tiles_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(TilesError, match="4 warps"):
        AttentionTiles(128, 128, 2, 8, warp_specialize=True)
    with pytest.raises(TilesError, match="splits"):
        AttentionTiles(128, 128, 2, 4, splits=2, tail_n=64)
    with pytest.raises(TilesError, match="whole"):
        AttentionTiles(128, 128, 2, 4, whole=True, tail_n=64)
    with pytest.raises(TilesError, match="peel needs"):
        AttentionTiles(128, 128, 2, 4, peel=True, tail_n=64)
    with pytest.raises(TilesError, match="larger than block_n"):
        AttentionTiles(128, 64, 2, 4, tail_n=128)
    with pytest.raises(TilesError, match="block_m must be a power of two"):
        AttentionTiles(96, 64, 2, 4)
    with pytest.raises(TilesError, match="0, 1 or 2"):
        AttentionTiles(64, 64, 2, 4, fma_exps=3)
    with pytest.raises(TilesError, match="at least 1"):
        AttentionTiles(64, 64, 0, 4)


def test_a_gpu_without_measured_tiles_gets_safe_ones() -> None:
    assert tiles_for("sm_91", 128, "some") == SAFE
    assert tuned.safe_tiles("sm_90") == SAFE_HOPPER


def test_shape_classes_follow_how_far_a_gpu_is_filled() -> None:
    assert tuned.shape_class(1, 12, 2160) == "few"  # S3
    assert tuned.shape_class(1, 12, 4680) == "some"  # S1
    assert tuned.shape_class(1, 40, 4680) == "many"  # S4, S5


def test_the_table_that_ships_can_be_read() -> None:
    for (arch, head_dim, shape), tiles in read_table(tuned.TABLE).items():
        assert tiles_for(arch, head_dim, shape) == tiles


def test_a_table_round_trips_and_keeps_other_rows(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    write_table(file, [tuned.table_row("sm_90", 128, "some", SPECIALISED, 0.01, 0.02, ms=1.3)])
    write_table(file, [tuned.table_row("sm_90", 128, "many", SAFE, 0.01, 0.02)])
    write_table(file, [tuned.table_row("sm_90", 128, "some", SAFE_HOPPER, 0.01, 0.02)])
    assert read_table(file) == {("sm_90", 128, "some"): SAFE_HOPPER, ("sm_90", 128, "many"): SAFE}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"error": 0.03}, "above its bound"),
        ({"error": float("nan")}, "above its bound"),
        ({"shape_class": "huge"}, "no shape class"),
        ({"tiles": {"block_m": 128}}, "no table"),
        ({"tiles": {"block_m": 128, "block_n": 100, "stages": 2, "warps": 4}}, "power of two"),
    ],
)
def test_a_table_with_tiles_that_were_not_admitted_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    row = tuned.table_row("sm_90", 128, "some", SPECIALISED, 0.01, 0.02)
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
        def wrong(*arguments: Tensor, own: OwnTokens, **_: Any) -> Tensor:
            return fault(attention_fp8(*arguments, own=own))

        monkeypatch.setattr(admission, "attention_fp8", wrong)
        return admit(SAFE, head_dim=32, device="cpu").refusal

    assert "above" in with_fault(lambda out: out * 1.05)
    assert "above" in with_fault(
        lambda out: torch.where(torch.arange(out.shape[1])[:, None] == 3, torch.nan, out)
    )
    assert "two runs differ" in with_fault(lambda out: out * (1 + torch.rand(()) * 1e-2))

    def tail_unmasked(*arguments: Tensor, own: OwnTokens, **_: Any) -> Tensor:
        q, k, v_t, q_scale, k_scale, v_scale, valid = arguments
        past = valid - q.shape[1]
        some = torch.where(past > 0, -(-past // 64) * 64, 0).clamp(max=k.shape[1])
        zeroed = torch.arange(k.shape[1]) < past[:, None]
        k = torch.where(zeroed[:, :, None, None], k.float(), 0.0).to(k.dtype)
        behind = torch.arange(v_t.shape[3]) < past[:, None]
        v_t = torch.where(behind[:, None, None], v_t.float(), 0.0).to(v_t.dtype)
        return attention_fp8(q, k, v_t, q_scale, k_scale, v_scale, some + q.shape[1], own=own)

    monkeypatch.setattr(admission, "attention_fp8", tail_unmasked)
    assert "above" in admit(SAFE, head_dim=32, device="cpu").refusal

    def own_key_lost(*arguments: Tensor, own: OwnTokens, **_: Any) -> Tensor:
        kept = torch.arange(own.k.shape[1]) < own.k.shape[1] - 1
        return attention_fp8(
            *arguments, own=OwnTokens(own.k * kept[:, None, None], own.v * kept[:, None].expand(own.v.shape))
        )

    monkeypatch.setattr(admission, "attention_fp8", own_key_lost)
    assert "above" in admit(SAFE, head_dim=32, device="cpu").refusal

    def no_code(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(admission, "attention_fp8", no_code)
    assert "PassManager" in admit(SAFE, head_dim=32, device="cpu").refusal


class AttentionModule(torch.nn.Module):
    """The attention as an engine's graph sees it."""

    def forward(self, *arguments: Tensor) -> Tensor:
        return attention_fp8(*arguments[:7], own=OwnTokens(*arguments[7:])) + 0.0


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
@pytest.mark.parametrize("share", [1, 2])
def test_gpu_admits_polynomials(share: int) -> None:
    assert admit(AttentionTiles(128, 128, 3, 8, fma_exps=share), full=(12, 4680, 32760)).refusal == ""


@pytest.mark.gpu
def test_gpu_package_and_its_capture_read_the_fill_from_the_device(
    package_runner: Callable[..., Any],
) -> None:
    case = Case("filling", 390, 12, 2340, (1000, 2340))
    arguments = list(make_case(case, 128, "cuda", own=True))
    engine = package_runner(AttentionModule(), tuple(arguments))
    tensors = [x for x in arguments if x is not None]  # an engine has no inputs for what is not there
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        (direct,) = engine(list(tensors))
    torch.cuda.synchronize()
    truth, rounded = expected(*arguments)
    assert distance(direct, truth) <= 2 * distance(rounded, truth)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        (captured,) = engine(list(tensors))
    arguments[6].copy_(torch.tensor([390, 1950]))  # the first row has no past
    captured.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    truth, rounded = expected(*arguments)
    assert distance(captured, truth) <= 2 * distance(rounded, truth)


def test_v_columns_are_whole_cache_lines() -> None:
    assert [v_columns(tokens) for tokens in (1, 128, 129, 32760)] == [128, 128, 256, 32768]
