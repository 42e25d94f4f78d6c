"""Gluon kernels behind their outlines, as torch's compiler meets them. No GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from seko_export.errors import LoweringError
from seko_export.lowering import outlined_kernels
from seko_export.lowering.outlined_kernels import gluon_behind_outlines
from seko_kernels import hopper_attention as hopper
from seko_kernels.outlines import kernel_of

SIZES = {"HEADS": 2, "SOFTMAX_SCALE": 0.1, "OWN_N": hopper.OWN_KEYS, "STAGES": hopper.STAGES}
POINTERS = dict(zip(("Q", "K", "K_SCALE", "V_T"), ("*bf16", "*i8", "*fp32", "*fp8e4nv"), strict=True))
POINTERS |= {"K_OWN": "*bf16", "V_OWN": "*bf16", "V_SCALE": "*fp32", "VALID_TOKENS": "*i64"}
POINTERS |= {"OUT": "*bf16", "PART_OUT": "*bf16", "PART_LSE": "*fp32"}


def outline() -> ASTSource:
    """The outline, as torch's compiler asks for it."""
    names = hopper.attention_hopper_outline.arg_names
    signature = {name: POINTERS.get(name, "constexpr" if name in SIZES else "i32") for name in names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name in POINTERS}
    return ASTSource(hopper.attention_hopper_outline, signature, SIZES, aligned)


def test_while_it_is_entered_the_twin_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever name torch calls Triton's compiler; and outside, an outline is what it is."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": hopper.WARPS}
    with gluon_behind_outlines():
        made = triton.compile(outline(), target=target, options=options)
    assert made.src.fn is kernel_of(hopper.attention_hopper_outline.__name__)
    assert made.metadata.name == "attention_hopper_kernel"
    shown = triton.compile(outline(), target=target, options=options)
    assert shown.metadata.name == "attention_hopper_outline"


def test_torchs_compiler_compiles_outlines_here_and_says_if_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor.async_compile import AsyncCompile

    seen = []

    def compile_kernel(_: AsyncCompile, name: str, source: str) -> str:
        pooled = "pool" if AsyncCompile.use_process_pool() else "here"
        if "never" not in source:
            triton.compile("a source")
        seen.append((name, pooled))
        return pooled

    monkeypatch.setattr(AsyncCompile, "triton", compile_kernel)
    monkeypatch.setattr(AsyncCompile, "use_process_pool", classmethod(lambda _: True))
    monkeypatch.setattr(triton, "compile", lambda source: source)
    monkeypatch.setattr(outlined_kernels, "gluon_twin", lambda source: source)
    with gluon_behind_outlines():
        AsyncCompile().triton("other", "def other(): ...")
        AsyncCompile().triton("ours", "def attention_hopper_outline(): ...")
        with pytest.raises(LoweringError, match="unknown way"):
            AsyncCompile().triton("ours", "def attention_hopper_outline(): never")
        AsyncCompile().triton("ours", "def attention_bf16_outline(): ...")
        monkeypatch.setattr(outlined_kernels, "gluon_twin", lambda _: None)
        with pytest.raises(LoweringError, match="unknown way"):
            AsyncCompile().triton("ours", "def attention_hopper_outline(): ...")
    assert [how for _, how in seen] == ["pool", *["here"] * 4]
    assert AsyncCompile.use_process_pool()
