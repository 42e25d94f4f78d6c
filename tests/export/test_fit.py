"""`--fit`: which options a build adds for a GPU's memory, and what it says where none is enough."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seko_export import BuildOptions
from seko_export.config.video import VideoBuild
from seko_export.errors import UsageError
from seko_export.families.registry import graph_of
from seko_export.host.environment import Target
from seko_export.media.pieces import decode_parts
from seko_export.media.wan_vae.config import VAE_PRESETS, WanVaeConfig
from seko_export.roofline.gpus import GPUS, room_of
from seko_export.roofline.work import weight_sizes
from seko_export.video.plan.fit import SAVINGS, fit, memory_of
from seko_export.video.plan.memory import peak_bytes
from seko_export.video.plan.offload import host_weights, seat_bytes
from seko_export.video.plan.predict import PlanRequest, config_of, predict
from seko_export.workloads.registry import workload_named
from seko_runtime.executor.weight_streaming import aligned_bytes
from tests.support.tiers import first_is_fast

GB = 10**9


def planned(options: BuildOptions) -> VideoBuild:
    return config_of(PlanRequest(options, "rtx4090"))[0]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("24GB", 24 * GB), ("24 GiB", 24 * GB), ("1.5gb", 3 * GB // 2), ("512MB", 512 * 10**6)],
)
def test_memory_is_a_size(text: str, wanted: int) -> None:
    assert memory_of(text, None) == wanted


def test_a_small_gpu_has_less_room_than_its_memory() -> None:
    rooms = {size: room_of(size * GB, "cuda") / GB for size in (0, 8, 12, 24)}
    assert rooms == pytest.approx({0: 0, 8: 7.79, 12: 12, 24: 24}, abs=0.001)
    assert room_of(8 * GB, "cpu") == 8 * GB


def test_weights_from_the_host_take_two_blocks_for_the_call_with_most() -> None:
    config = planned(BuildOptions(preset="self-forcing-1.3b", offload_text=True, offload_layers=True))
    graph = graph_of(config)
    on_host = host_weights(graph.pieces)
    calls = [call for run in graph.programs.values() for call in run]
    taken = [on_host.keys() & {ref.removeprefix("weight:") for ref in call.inputs} for call in calls]
    most = max(aligned_bytes(on_host[name] for name in names) for names in taken)
    assert seat_bytes(graph.pieces) == 2 * most > 500e6


def test_memory_is_that_of_a_gpu() -> None:
    assert all(memory_of(name, gpu.arch) == gpu.memory_bytes for name, gpu in GPUS.items())


@pytest.mark.parametrize(
    ("text", "arch", "words"),
    [
        ("24", "sm_89", "expected memory, such as 24GB, or one of h200"),
        ("-1GB", "sm_89", "expected memory"),
        ("rtx4090", "sm_90", "that is sm_89, and this build is for sm_90; give its memory, --fit 24GB"),
        ("h200", None, "this build is for a CPU"),
    ],
)
def test_other_words_are_refused(text: str, arch: str | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        memory_of(text, arch)


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    """The bytes of the 1.3B model as it is, and with all that makes it smaller."""
    plain = BuildOptions(preset="self-forcing-1.3b")
    every = replace(plain, **{name: value for saving in SAVINGS for name, value in saving.fields.items()})
    every = replace(every, camera=None)  # it has none
    return {"plain": peak_bytes(planned(plain)), "least": peak_bytes(planned(every))}


def test_what_fits_as_it_is_stays_as_it_is(sizes: dict[str, int]) -> None:
    asked = BuildOptions(preset="self-forcing-1.3b", fit="x")
    fitted = fit(asked, sizes["plain"], planned)
    assert (fitted.options, fitted.peak_bytes) == (replace(asked, fit=None), sizes["plain"])


@pytest.mark.parametrize("gigabytes", first_is_fast([24, 12]))
def test_what_is_added_is_enough_and_needed(gigabytes: int) -> None:
    """Without any one of them the build is too large, but for those that make passes faster."""
    asked = BuildOptions(preset="self-forcing-1.3b", fit=f"{gigabytes}GB")
    fitted = fit(asked, gigabytes * GB, planned)
    assert peak_bytes(planned(fitted.options)) == fitted.peak_bytes <= gigabytes * GB
    added = [
        saving
        for saving in SAVINGS
        if all(getattr(fitted.options, name) == value for name, value in saving.fields.items())
    ]
    assert added
    for saving in added:
        assert any(f"adds {saving.option}: {saving.costs}" in note for note in fitted.notes)
        before = {name: getattr(asked, name) for name in saving.fields}
        if not saving.speeds:
            assert peak_bytes(planned(replace(fitted.options, **before))) > gigabytes * GB


def test_a_camera_is_computed_in_every_pass_before_layers_leave_the_gpu() -> None:
    asked = BuildOptions(preset="lingbot-v2-fast", offload_text=True, decode_frames=1, fp4_kv=True, fp8=True)
    once, each = (peak_bytes(planned(replace(asked, camera=how))) for how in ("chunk", "pass"))
    assert each < once
    assert fit(replace(asked, fit="x"), each, planned).options == replace(asked, camera="pass")
    stays = fit(replace(asked, fit="x", camera="chunk"), each, planned).options
    assert stays.camera == "chunk"
    assert stays.offload_layers or stays.offload_cache


@pytest.mark.slow
def test_the_users_own_options_stay() -> None:
    asked = BuildOptions(preset="self-forcing-1.3b", fit="16GB", kv="int8", decode_frames=3)
    found = fit(asked, 16 * GB, planned).options
    assert (found.kv, found.fp4_kv, found.decode_frames) == ("int8", False, 3)


def test_a_cache_that_shall_stay_on_the_gpu_stays_there() -> None:
    moved = fit(BuildOptions(preset="self-forcing-1.3b", fit="11GB"), 11 * GB, planned)
    assert moved.options.offload_cache
    stays = fit(BuildOptions(preset="self-forcing-1.3b", fit="11GB", offload_cache=False), 11 * GB, planned)
    assert stays.options.offload_cache is False


def test_too_little_is_refused_with_what_would_fit(sizes: dict[str, int]) -> None:
    asked = BuildOptions(preset="self-forcing-1.3b", fit="little")
    with pytest.raises(UsageError) as refused:
        fit(asked, sizes["least"] - 10**8, planned)
    words = str(refused.value)
    assert f"this build needs {sizes['least'] / 1e9:.1f} GB with --offload-text, --decode-frames 1" in words
    assert "would fit, with" in words


def test_far_too_little_says_so() -> None:
    with pytest.raises(UsageError, match="take a smaller model or picture"):
        fit(BuildOptions(preset="tiny", fit="1MB"), 10**6, planned)


def test_what_needs_its_vae_is_not_tried_without(invoke) -> None:
    """Its loop encodes video frames again: without a VAE there is no such build, and one with it may not fit."""
    done = invoke("plan", "--preset", "krea-14b", "--gpu", "rtx4090", "--sessions", "2", "--json")
    assert done.exit_code == 0
    assert not json.loads(done.stdout)["fits"]


def test_plan_says_what_build_would_add(invoke) -> None:
    report = predict(PlanRequest(BuildOptions(preset="self-forcing-1.3b", fit="24GB"), "rtx4090"))
    assert report["fits"]
    assert report["notes"][0].startswith("--fit 24GB: ")
    refused = invoke("plan", "--preset", "self-forcing-1.3b", "--gpu", "rtx4090", "--fit", "h200")
    assert refused.exit_code == 2
    assert "--fit h200: that is sm_90" in refused.stderr


def test_a_build_takes_the_options() -> None:
    """On a CPU, whose engines are counted alike; the sample has a text encoder and a VAE."""
    resolve = partial(workload_named("video").resolve_options, machine=Target("cpu", "x86_64"))
    whole = resolve(BuildOptions(preset="sample"))
    fitted = resolve(BuildOptions(preset="sample", fit=f"{peak_bytes(whole.config) / 1e6 - 0.3:.3f}MB"))
    assert fitted.config.target.offload_text
    assert any("--fit adds --offload-text" in note for note in fitted.notes)
    assert not any("--fit" in note for note in whole.notes)
    with pytest.raises(UsageError, match="--fit 1MB: this build needs"):
        resolve(BuildOptions(preset="sample", fit="1MB"))


def test_a_build_for_gpus_elsewhere_is_fitted_to_them() -> None:
    options = BuildOptions(preset="tiny", backend="tensorrt-rtx", target="sm_86,sm_89", fit="24GB")
    resolved = workload_named("video").resolve_options(options)
    assert resolved.config.target.archs == ("sm_86", "sm_89")


@pytest.mark.parametrize("name", ["wan-2.1", "lightvae"])
def test_the_exact_model_decodes_with_the_same_weights(name: str) -> None:
    """Which convolutions run in kernels with weights of their own depends on the frames of a call."""
    request = PlanRequest(BuildOptions(preset="self-forcing-1.3b", fp4_kv=True, decode_frames=1), "h200")
    config = config_of(request)[0].changed(vae=VAE_PRESETS[name])
    own, exact = (
        {weight for weight in weight_sizes(graph_of(build).pieces) if weight.startswith("vae.")}
        for build in (config, config.as_exact)
    )
    assert exact
    assert exact == own


@given(st.integers(1, 12), st.integers(0, 14))
def test_no_call_decodes_more_than_was_asked(chunk: int, most: int) -> None:
    config = planned(BuildOptions(preset="tiny", no_vae=True)).changed(vae=WanVaeConfig(base_dim=8))
    stream = replace(config.workload.stream, chunk_frames=chunk, ring_frames=chunk)
    parts = decode_parts(config.changed(decode_frames=most, stream=stream))
    assert chunk % parts == 0
    assert not most or chunk // parts <= most
