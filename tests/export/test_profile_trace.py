"""A trace to figures: which bucket a name is in, sums that add up, engines by range and by launch, clean traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seko_export.tools.profile_trace import (
    BETWEEN_ENGINES,
    BUCKETS,
    CHUNK_RANGE,
    bucket_of,
    digest_trace,
    scrubbed,
)
from tests.export.traces import cpu_trace, event, gpu_trace

NAMES = {
    "exchange": [
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "gloo:all_to_all",
        "c10d::alltoall_base_",
        "_c10d_functional::all_gather_into_tensor",
    ],
    "attention": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>, false, false>",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)",
        "triton_tem_fused_flex_attention_2",
        "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::scaled_dot_product_attention",
    ],
    "matmul": [
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
        "nvjet_tst_64x64_64x8_2x1_v_bz_splitK_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off"
        "_kernel__5x_cublas",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16>",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4, false>",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>",
        "ampere_sgemm_128x64_tn",
        "triton_tem_fused_addmm_gelu_3",
        "aten::addmm",
        "aten::mm",
        "aoti_torch_cpu_addmm_out",
        "aoti_torch_cpu_bmm_out",
        "aoti_torch_cpu_mkldnn__linear_pointwise",
    ],
    "norm_elementwise": [
        "triton_poi_fused_add_mul_0",
        "triton_red_fused__to_copy_native_layer_norm_3",
        "triton_per_fused_mean_pow_rsqrt_1",
        "triton_poi_fused_addmm_gelu_7",  # the bias and what follows; the product is a kernel of its own
        "triton_poi_fused_convolution_silu_2",
        "triton_poi_fused__scaled_dot_product_cudnn_attention_add_mul_5",  # what attention takes, made ready
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3>>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>",
        "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>",
        "graph_0_cpp_fused_add_mul_native_layer_norm_unbind_unsqueeze_view_4",
        "graph_0_cpp_fused__scaled_dot_product_flash_attention_for_cpu_add_mean_mul_pow_rsqrt_transpose_view_5",
        "graph_0_cpp_fused_gelu_view_7",
        # the noise: bits, but an exclusive or among them
        "graph_3_cpp_fused___lshift_____rshift____to_copy_bitwise_and_bitwise_or_bitwise_xor_clone_cos_log_sin_0",
        "aten::native_layer_norm",
        "aten::mul",
    ],
    "kv_write": [
        "kv_write_kernel",
        "kv_write_kernel_0",
        "triton_poi_fused__to_copy_index_copy_4",
        "triton_poi_fused_arange_ge_index_put_lift_fresh_0",
        "graph_0_cpp_fused___lshift_____rshift____to_copy_abs_amax_bitwise_and_clamp_index_copy_round_where_1",
        "aten::index_copy_",
    ],
    "kv_read": [
        "nvfp4_expand_kernel",
        "nvfp4_expand_kernel_0",
        "kv_expand_kernel_0",
        "graph_0_cpp_fused___rshift___bitwise_and_stack_2",
        "graph_0_cpp_fused___lshift____scaled_dot_product_flash_attention_for_cpu__to_copy_add_arange_bitwise_and_"
        "bitwise_or_eq_gt_lt_mul_neg_scalar_tensor_transpose_unsqueeze_view_where_zeros_3",
    ],
    "convolution": [
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1_g1"
        "_execute_segment_k_off_kernel__5x_cudnn",
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_ndhwc",
        "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true>",
        "void implicit_convolveNd_sgemm<float, 3, 128, 6, 8, 3, 3, 5, 0, false, false>",
        "void at::native::(anonymous namespace)::conv_depthwise3d_cuda_kernel<float, float>",
        "void at::native::vol2col_kernel<float>",
        "triton_tem_fused_convolution_1",
        "aten::mkldnn_convolution",
        "aoti_torch_cpu_convolution",
    ],
    "copies": [
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel"
        "_cuda(at::TensorIteratorBase&)::{lambda()#3}>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<at::native::OpaqueType<2u>, 2>",
        "triton_poi_fused__to_copy_0",
        "graph_1_cpp_fused_clone_permute_view_1",
        "aten::copy_",
        "aoti_torch_cpu_cat",
    ],
    "engine": ["seko::block", "## Call CompiledFxGraph fgfg2khregz44tc56ukdiuorpgm ##"],
    "host": [
        CHUNK_RANGE,
        "aten::as_strided",
        "aten::empty_strided",
        "aten::resolve_conj",
        "Torch-Compiled Region: 4/0",
        "TorchDynamo Cache Lookup",
        "AOTDispatcher Runtime Wrapper Prologue",
    ],
    "other": ["", "my_kernel", "convert_weights", "void anything<int>(int*)", "block"],
}


@pytest.mark.parametrize(("bucket", "name"), [(bucket, name) for bucket in NAMES for name in NAMES[bucket]])
def test_names_that_torch_gives(bucket: str, name: str) -> None:
    assert bucket_of(name) == bucket


def test_the_kernels_of_this_project_are_known() -> None:
    """A new Triton kernel must be given a bucket."""
    folder = Path(__file__).parents[2] / "kernels/seko_kernels/triton"
    kernels = [
        line.split("(")[0].removeprefix("def ")
        for file in folder.glob("*.py")
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.startswith("def ") and "_kernel(" in line
    ]
    assert kernels
    assert [name for name in kernels if bucket_of(name) == "other"] == []


def test_a_cpus_chunk() -> None:
    """Each name's own time; engines with all inside them; idle is where neither engine nor op ran."""
    digest = digest_trace(cpu_trace())
    report = digest.report(top=2)
    assert not digest.on_device
    assert digest.names == {
        CHUNK_RANGE: (1, 21_000),
        "seko::block": (2, 18_000),
        "aoti_torch_cpu_addmm_out": (1, 7_500),
        "aten::copy_": (1, 2_500),
        "strange": (1, 1_000),
    }
    assert digest.engines == {"block": (2, 28_000), BETWEEN_ENGINES: (0, 22_000)}
    assert (report["span_ns"], report["total_ns"]) == (50_000, 50_000)
    assert (report["idle_ns"], report["largest_gap_ns"]) == (21_000, 10_000)
    assert [row["name"] for row in report["top"]] == [CHUNK_RANGE, "seko::block"]
    assert report["other"] == ["strange"]
    assert report["buckets"]["other"] == {"calls": 1, "time_ns": 1_000, "share": 0.02}
    assert set(report["buckets"]) == set(BUCKETS)


def test_a_captured_chunk() -> None:
    digest = digest_trace(gpu_trace(captured=True))
    assert digest.on_device
    assert digest.launches == {"graphs": 1, "kernels": 0, "copies": 1, "sets": 0}
    assert digest.engines == {}
    assert digest.total_ns == 31_000
    report = digest.report(top=9)
    assert {name: row["time_ns"] for name, row in report["buckets"].items() if row["calls"]} == {
        "copies": 1_000,
        "matmul": 20_000,
        "kv_read": 10_000,
    }
    assert report["idle_ns"] == 60_000 - 1_000 - 25_000  # what runs side by side counts once
    assert report["largest_gap_ns"] == 25_000


def test_engines_own_what_they_launched() -> None:
    digest = digest_trace(gpu_trace(captured=False))
    assert digest.launches == {"graphs": 0, "kernels": 2, "copies": 1, "sets": 0}
    assert digest.engines == {"embed": (1, 20_000), "block": (1, 10_000), BETWEEN_ENGINES: (0, 1_000)}


def test_the_median_chunk_is_shown_and_no_other() -> None:
    """Work of the device belongs to the chunk before whose successor it began."""
    events = []
    for begin, length in ((0, 30), (100, 90), (200, 40)):
        events.append(event(CHUNK_RANGE, "user_annotation", begin, length))
        events.append(event(f"kernel_{length}", "kernel", begin + 5, 10, 9))
    digest = digest_trace({"traceEvents": events})
    assert digest.span_ns == 40_000
    assert set(digest.names) == {"kernel_40"}


def test_a_trace_without_a_chunk() -> None:
    with pytest.raises(ValueError, match="holds no range"):
        digest_trace({"traceEvents": [event("aten::mm", "cpu_op", 0, 1)]})


names = st.sampled_from([name for bucket in NAMES.values() for name in bucket if name != CHUNK_RANGE])


@st.composite
def nested(draw: st.DrawFn, begin: int = 0, end: int = 4_000, depth: int = 3) -> list[dict[str, Any]]:
    """Spans of one thread, inside each other or one after the other."""
    cuts = sorted(draw(st.lists(st.integers(begin, end), max_size=6, unique=True)))
    events = []
    for first, last in zip(cuts[::2], cuts[1::2], strict=False):
        events.append(event(draw(names), "cpu_op", first / 1000, (last - first) / 1000))
        if depth:
            events += draw(nested(first, last, depth - 1))
    return events


@given(nested())
def test_buckets_add_up_to_the_chunk(events: list[dict[str, Any]]) -> None:
    """Nothing is dropped and nothing counted twice, to the nanosecond."""
    digest = digest_trace({"traceEvents": [event(CHUNK_RANGE, "user_annotation", 0, 4), *events]})
    report = digest.report(top=1_000)
    assert report["total_ns"] == report["span_ns"] == 4_000
    for rows in (report["buckets"].values(), report["engines"].values(), report["top"]):
        assert sum(row["time_ns"] for row in rows) == report["total_ns"]
    assert sum(row["calls"] for row in report["buckets"].values()) == len(events) + 1
    assert 0 <= report["largest_gap_ns"] <= report["idle_ns"] <= report["span_ns"]


def test_a_trace_tells_nothing_of_the_machine() -> None:
    trace = {
        "host_name": "render-07",
        "traceName": "/home/ada/out.json",
        "traceEvents": [
            event(
                "triton_poi_fused_ada_0",
                "kernel",
                0,
                1,
                kernel_file="/tmp/torch_ada/x.py",
                bandwidth="3 GB/s",
            ),
            event(
                "Torch-Compiled Region: 0/0",
                "cpu_op",
                0,
                1,
                where="file:///home/ada/m.py:7",
                by="ada, canada",
            ),
            {"ph": "M", "name": "process_name", "args": {"name": "ada"}},
            {"ph": "M", "name": "path", "args": {"at:/srv": "cwd=/srv ~/clips"}},
        ],
    }
    first, second, third, fourth = scrubbed(trace, ["ada", "render-07"])["traceEvents"]
    assert (first["name"], first["args"]) == (
        "triton_poi_fused_ada_0",
        {"kernel_file": "", "bandwidth": "3 GB/s"},
    )
    assert (second["name"], second["args"]) == (
        "Torch-Compiled Region: 0/0",
        {"where": ":7", "by": ", canada"},
    )
    assert third["args"] == {"name": ""}
    assert fourth["args"] == {"at:": "cwd= "}
    assert digest_names(scrubbed(gpu_trace(captured=True))) == digest_names(gpu_trace(captured=True))


def digest_names(trace: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return dict(digest_trace(trace).names)
