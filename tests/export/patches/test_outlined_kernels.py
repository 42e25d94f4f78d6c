"""Gluon kernels behind their outlines, as torch's compiler meets them. No GPU."""

from __future__ import annotations

import inspect

import pytest
import triton
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.codegen import wrapper
from torch._inductor.runtime import triton_heuristics

from seko_export.errors import LoweringError
from seko_export.lowering.patches import outlined_kernels
from seko_export.lowering.patches.outlined_kernels import PATCH, gluon_behind_outlines
from seko_kernels.outlines import kernel_of
from tests.kernels.outlined import EIGHT_BITS


def test_while_it_is_entered_the_twin_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """And outside, an outline is what it is. tests/kernels/test_gluon_kernels.py compiles the twins."""
    monkeypatch.setattr(triton, "compile", lambda source: source)
    with gluon_behind_outlines():
        assert triton.compile(EIGHT_BITS.source()).fn is kernel_of(EIGHT_BITS.outline.__name__)
    assert triton.compile(EIGHT_BITS.source()).fn is EIGHT_BITS.outline


def test_torchs_compiler_compiles_outlines_here_and_says_if_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor.async_compile import AsyncCompile

    seen = []
    sources = set()

    def compile_kernel(_: AsyncCompile, name: str, source: str) -> str:
        pooled = "pool" if AsyncCompile.use_process_pool() else "here"
        if "never" not in source and source not in sources:
            triton.compile("a source")
            sources.add(source)
        seen.append((name, pooled))
        return pooled

    monkeypatch.setattr(AsyncCompile, "triton", compile_kernel)
    monkeypatch.setattr(AsyncCompile, "use_process_pool", classmethod(lambda _: True))
    monkeypatch.setattr(triton, "compile", lambda source: source)
    monkeypatch.setattr(outlined_kernels, "gluon_twin", lambda source: source)
    monkeypatch.setattr(outlined_kernels, "_COMPILED", set())
    with gluon_behind_outlines():
        AsyncCompile().triton("other", "def other(): ...")
        AsyncCompile().triton("ours", "def attention_hopper_outline(): ...")
        with pytest.raises(LoweringError, match="unknown way"):
            AsyncCompile().triton("ours", "def attention_hopper_outline(): never")
        AsyncCompile().triton("ours", "def attention_bf16_outline(): ...")
    with gluon_behind_outlines():
        AsyncCompile().triton("ours", "def attention_bf16_outline(): ...")  # a second build: torch kept it
        sources.add("def attention_bf16_outline(): before the first")
        with pytest.raises(LoweringError, match="unknown way"):
            AsyncCompile().triton("ours", "def attention_bf16_outline(): before the first")
        monkeypatch.setattr(outlined_kernels, "gluon_twin", lambda _: None)
        with pytest.raises(LoweringError, match="unknown way"):
            AsyncCompile().triton("ours", "def attention_hopper_outline(): another")
    assert [how for _, how in seen] == ["pool", *["here"] * 6]
    assert AsyncCompile.use_process_pool()


def test_this_torchs_compiler_knows_no_gluon() -> None:
    """As soon as its path of kernels of users names Gluon, it may compile one itself: try it without an outline."""
    sources = [
        inspect.getsource(module).lower() for module in (triton_kernel_wrap, wrapper, triton_heuristics)
    ]
    assert PATCH.is_needed() == (not any("gluon" in source for source in sources))
