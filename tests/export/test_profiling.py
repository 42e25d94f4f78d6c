"""`seko-export profile`: which bucket a name is in, sums that add up, engines by range and by launch, clean traces."""

from __future__ import annotations

import getpass
import json
import platform
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seko_export import profile_trace, profiling
from seko_export.profile_trace import (
    BETWEEN_ENGINES,
    BUCKETS,
    CHUNK_RANGE,
    Digest,
    bucket_of,
    digest_trace,
    scrubbed,
)

USAGE, ARTIFACT, ENVIRONMENT = 2, 4, 5
NAMES = {
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
        "nvfp4_write_kernel",
        "nvfp4_write_kernel_0",
        "triton_poi_fused__to_copy_index_copy_4",
        "triton_poi_fused_arange_ge_index_put_lift_fresh_0",
        "graph_0_cpp_fused___lshift_____rshift____to_copy_abs_amax_bitwise_and_clamp_index_copy_round_where_1",
        "aten::index_copy_",
    ],
    "kv_read": [
        "nvfp4_expand_kernel",
        "nvfp4_expand_kernel_0",
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


# -- traces made by hand ---------------------------------------------------------------------------------------


def event(
    name: str, category: str, begin: float, length: float, thread: int = 1, **args: Any
) -> dict[str, Any]:
    """One event as Kineto writes it, in microseconds."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 7,
        "tid": thread,
        "ts": begin,
        "dur": length,
        "args": args,
    }


def cpu_trace() -> dict[str, Any]:
    return {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
            event(CHUNK_RANGE, "user_annotation", 100, 50),
            event("seko::block", "user_annotation", 110, 20),
            event("aoti_torch_cpu_addmm_out", "cpu_op", 112, 10),
            event("aten::copy_", "cpu_op", 113, 2.5),
            event("seko::block", "user_annotation", 132, 8),
            event("strange", "cpu_op", 145, 1),
            event("aten::mm", "cpu_op", 200, 9),  # after the chunk
            event("PyTorch Profiler (0)", "Trace", 0, 900),
        ]
    }


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


def gpu_trace(*, captured: bool) -> dict[str, Any]:
    """Two kernels and a copy; launched as one graph, or each by a call inside an engine's range."""
    device = [
        event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 103, 1, 9, correlation=1),
        event("nvjet_tst_64x64_64x8_2x1_v_bz_TNT", "kernel", 110, 20, 9, correlation=2),
        event(
            "nvfp4_expand_kernel_0", "kernel", 125, 10, 10, correlation=2 if captured else 3
        ),  # another stream
        event("seko::block", "gpu_user_annotation", 110, 25, 9),  # a range's shadow on the device is no work
    ]
    copy = event("cudaMemcpyAsync", "cuda_runtime", 101, 1, correlation=1)
    if captured:
        host = [event("cudaGraphLaunch", "cuda_runtime", 104, 3, correlation=2)]
    else:
        host = [
            event("seko::embed", "user_annotation", 104, 2),
            event("cuLaunchKernelEx", "cuda_driver", 105, 1, correlation=2),
            event("seko::block", "user_annotation", 107, 2),
            event("cudaLaunchKernelExC_v11060", "cuda_runtime", 107.2, 1, correlation=3),
            event("cuLaunchKernelEx", "cuda_driver", 107.5, 0.5, correlation=3),  # of the call around it
        ]
    chunk = event(CHUNK_RANGE, "user_annotation", 100, 60)
    return {"traceEvents": [chunk, event("aten::copy_", "cpu_op", 100.5, 2), copy, *host, *device]}


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


# -- the command -----------------------------------------------------------------------------------------------


def test_profile(fp4, invoke, tmp_path):
    """One JSON object; every engine of a chunk, as often as the schedule calls it; a trace without this machine."""
    trace = tmp_path / "trace.json"
    result = invoke("profile", fp4.folder, "--chunks", 2, "--top", 3, "--trace", trace, "--json")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 1
    report = json.loads(result.stdout)
    assert report["digest"] == fp4.report["digest"]
    assert (report["device"], report["clock"]) == ("cpu", "cpu")
    assert sum(row["time_ns"] for row in report["buckets"].values()) == report["total_ns"]
    assert sum(row["time_ns"] for row in report["engines"].values()) == report["total_ns"]
    calls = {name: row["calls"] for name, row in report["engines"].items()}
    passes, layers = 5, 2
    assert (calls["block"], calls["noise"], calls["advance"]) == (passes * layers, 1, passes - 1)
    assert len(report["top"]) == 3
    assert report["other"] == []
    assert set(report["launches"].values()) == {0}
    assert report["chunk_s"] > 0
    assert any(
        profiling.NAMED_BUILD in note for note in report["notes"]
    )  # AOTInductor's kernels carry no names
    written = trace.read_text(encoding="utf-8")
    assert sum(one["name"] == CHUNK_RANGE for one in json.loads(written)["traceEvents"]) == 2
    for secret in (str(fp4.folder), str(tmp_path), str(Path.home()), platform.node(), "/tmp"):
        assert f'"{secret}' not in written
    assert f'"{getpass.getuser()}"' not in written


def test_profile_as_text(fp4, invoke):
    result = invoke("profile", fp4.folder, "--chunks", 1)
    assert result.exit_code == 0, result.output
    for word in (
        fp4.report["digest"][:16],
        "seko::block",
        "with the profiler on",
        "engine",
        "host",
        BETWEEN_ENGINES,
    ):
        assert word in result.stdout
    assert max(map(len, result.stdout.splitlines()[:-1])) <= profiling.WIDTH  # the last line is a note


def test_no_launch_is_dropped_from_the_text(capsys):
    """What a GPU's report shows: launches, and a name longer than the line, cut."""
    digest = digest_trace(gpu_trace(captured=False))
    digest = replace(digest, names=dict(digest.names) | {"k" * 300: (1, 5)})
    extra = {"artifact": "x", "digest": "d" * 64, "device": "cuda", "chunk_s": 0.5, "chunk_profiled_s": 1.0}
    profiling.show(digest.report(top=9) | extra | {"notes": ["[bold] is no markup"]})
    text = capsys.readouterr().out
    assert "2 kernels, 1 copies" in text
    assert "500.000 ms; 1000.000 ms with the profiler on" in text
    assert "[bold] is no markup" in text
    assert "k" * profiling.NAME_WIDTH not in text


@pytest.mark.parametrize("place", ["absent/trace.json", ".", "file/trace.json"])
def test_a_trace_that_cannot_be_written(fp4, invoke, tmp_path, monkeypatch, place):
    """Told before the artifact is opened."""
    monkeypatch.setattr(profiling, "open_artifact", None)
    (tmp_path / "file").write_text("x")
    result = invoke("profile", fp4.folder, "--trace", tmp_path / place)
    assert result.exit_code == ENVIRONMENT
    assert "cannot be written" in result.stderr
    assert "choose another --trace" in result.stderr
    assert result.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_trace_must_not_spoil_the_artifact(fp4, invoke):
    result = invoke("profile", fp4.folder, "--trace", fp4.folder / "trace.json")
    assert result.exit_code == USAGE
    assert "inside the artifact" in result.stderr
    assert not (fp4.folder / "trace.json").exists()


def test_a_failed_run_leaves_no_trace(tmp_path, invoke):
    result = invoke("profile", tmp_path / "absent", "--trace", tmp_path / "trace.json")
    assert result.exit_code == ARTIFACT
    assert "absent" in result.stderr
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "trace.json").write_text("an older one")
    assert invoke("profile", tmp_path / "absent", "--trace", tmp_path / "trace.json").exit_code == ARTIFACT
    assert (tmp_path / "trace.json").read_text() == "an older one"


def test_a_damaged_artifact(artifact, invoke):
    engine = artifact / "engines/block.pt2"
    engine.write_bytes(engine.read_bytes()[:-1])
    result = invoke("profile", artifact)
    assert result.exit_code == ARTIFACT
    assert "engines/block.pt2" in result.stderr
    assert invoke("profile", artifact, "--chunks", 0).exit_code == USAGE


def test_a_gpu_that_the_profiler_does_not_see() -> None:
    """Copies alone are no chunk either: then the profiler did not see into the graph."""
    copies = gpu_trace(captured=True)
    copies["traceEvents"] = [one for one in copies["traceEvents"] if one["cat"] != "kernel"]
    for trace in (cpu_trace(), copies):
        with pytest.raises(profiling.MachineError, match="saw no kernel of the GPU"):
            profiling._seen(trace, on_device=True)
    assert isinstance(profiling._seen(cpu_trace(), on_device=False), Digest)
    assert profiling._seen(gpu_trace(captured=True), on_device=True).on_device


def test_a_session_without_capture() -> None:
    """Its memory says that it cannot capture; the backend's other sessions keep theirs."""

    class Backend:
        load_engines = stats = close = None

        def memory(self) -> Any:
            return SimpleNamespace(captures=True)

    backend: Any = Backend()
    assert profiling._Uncaptured(backend).memory().captures is False
    assert backend.memory().captures is True


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_profile_on_a_gpu(invoke, tmp_path):
    """One launch a chunk, in which the profiler sees each kernel; engines by a second run, which launches each."""
    built = invoke("build", "--fp4-kv", "-o", tmp_path / "artifact", "--json")
    assert built.exit_code == 0, built.output
    result = invoke("profile", tmp_path / "artifact", "--chunks", 2, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["clock"] == "device"
    assert (report["launches"]["graphs"], report["launches"]["kernels"]) == (1, 0)
    for bucket in ("attention", "matmul", "kv_write", "kv_read", "norm_elementwise"):
        assert report["buckets"][bucket]["calls"] > 0, report["top"]
    assert sum(row["time_ns"] for row in report["buckets"].values()) == report["total_ns"]
    assert report["engines"]["block"]["time_ns"] > 0
    assert report["idle_ns"] < report["span_ns"]


def test_ranges_cost_nothing_while_they_are_not_shown() -> None:
    """Unprofiled chunks are timed without them."""
    seen: list[str] = []
    ranges = profiling._Ranges()

    def engine(inputs: list[Any]) -> list[Any]:
        seen.extend(inputs)
        return inputs

    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        labelled = ranges.around("block", engine)
        labelled(["plain"])
        with ranges.shown():
            labelled(["shown"])
        labelled(["plain again"])
    assert seen == ["plain", "shown", "plain again"]
    assert [one.name for one in profiler.events()].count(profile_trace.ENGINE_RANGE + "block") == 1
