"""Streams by the runtime's own session and pool over the eager model: rows, voices, portraits, fused layers."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seko_export.config.video import VideoBuild
from seko_export.errors import UsageError
from seko_export.families.layers.sampler import ADVANCE, Noise, in_bfloat16_steps
from seko_export.families.seko_talk import audio
from seko_export.families.seko_talk.family import FAMILY
from seko_export.families.seko_talk.presets import evenly
from seko_export.video.recording import golden_text
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.video.pool import Pool, Session
from tests.seko_talk.streams import (
    BUFFERS,
    begun,
    opened,
    random_checkpoint,
    random_reference,
    talk_config,
    weights_of,
)
from tests.support.rows import rows_of
from tests.support.stacked import eager_session
from tests.support.tolerances import FP8_MATMULS_PASS, FP8_PASS, STEP, relative_error
from tests.truth.eager_stream import random_text

# Two passes in float32 that feed on each other, over a few chunks: some ten times the bar of one pass.
STREAM_BAR = 5e-5
CHUNKS = 5  # past the wrap: the cache holds a reference and 5 latent frames, a chunk is 2
SEEDS = (3, 8)
TWO = {"speakers": 2}


def of_row(config: VideoBuild, row: int, chunk: int | None) -> dict[str, np.ndarray]:
    """What one of two streams is given: each has its own voices, masks and picture."""
    both = config.changed(stream=replace(config.workload.stream, batch=2))
    return {name: tensor[row].numpy() for name, tensor in FAMILY.golden_inputs(both, chunk).items()}


def portrait_of(config: VideoBuild, row: int) -> np.ndarray:
    return random_reference(config, 4 + row)[0].numpy()


def alone(config: VideoBuild, row: int) -> list[Tensor]:
    """The chunks of a session of its own."""
    weights, text = weights_of(config, random_checkpoint(config)), golden_text(config)
    with eager_session(
        config, weights, text, SEEDS[row : row + 1], reference=torch.from_numpy(portrait_of(config, row))
    ) as session:
        session.set_inputs(of_row(config, row, None))
        return [
            torch.from_numpy(session.run_chunk(of_row(config, row, number)).to_host())
            for number in range(CHUNKS)
        ]


@pytest.mark.shows("seko_talk")
@pytest.mark.parametrize("model", [TWO, {"image_dim": 0}], ids=str)
def test_rows_of_a_pool_have_portraits_and_voices_of_their_own(
    model: Mapping[str, Any], tmp_path: Path
) -> None:
    """They begin at different times; one is moved to a file and back, and the row of a third is cleared between."""
    config = talk_config(model=model)
    text = golden_text(config).numpy()
    wanted = [alone(config, row) for row in range(2)]
    assert relative_error(wanted[0][0], wanted[1][0]) > 100 * STREAM_BAR
    chunks: list[list[Tensor]] = [[], []]
    with opened(config) as pool:
        stranger = pool.open_session(
            seed=5, text=text, inputs=of_row(config, 1, None), reference=portrait_of(config, 1)
        )
        stranger.run_chunk(of_row(config, 1, 3))
        stranger.close()
        sessions = [
            pool.open_session(
                seed=SEEDS[row],
                text=text,
                inputs=of_row(config, row, None),
                reference=portrait_of(config, row),
            )
            for row in range(2)
        ]
        chunks[0].append(torch.from_numpy(sessions[0].run_chunk(of_row(config, 0, 0)).to_host()))
        for number in range(1, CHUNKS):
            inputs = [of_row(config, 0, number), of_row(config, 1, number - 1)]
            for row, chunk in enumerate(pool.run(sessions, inputs)):
                chunks[row].append(torch.from_numpy(chunk.to_host()))
            if number == 2:
                sessions[0].save(tmp_path / "stream")
                sessions[0].close()
                sessions[0] = pool.restore(tmp_path / "stream")
        sessions[0].restart()
        chunks[0].append(torch.from_numpy(sessions[0].run_chunk(of_row(config, 0, 0)).to_host()))
        for session in sessions:
            session.close()
    for actual, other in zip(chunks[0], [*wanted[0], wanted[0][0]], strict=True):
        assert relative_error(actual, other) <= STREAM_BAR
    for actual, other in zip(chunks[1], wanted[1], strict=False):
        assert relative_error(actual, other) <= STREAM_BAR


def test_rows_of_a_batch_at_different_chunks_are_those_of_streams_alone() -> None:
    config = talk_config(model=TWO, layout={"batch": 2})
    checkpoint, text = random_checkpoint(config), random_text(config.model, 2)
    portraits = random_reference(config)
    stream = begun(config, checkpoint, text, portraits)
    starts, f = (0, 2), config.workload.stream.chunk_frames
    singles = []
    for row in range(2):
        single = begun(talk_config(model=TWO), checkpoint, text[[row]], portraits[[row]])
        for name, value in FAMILY.golden_inputs(config, None).items():
            single.buffers[BUFFERS[name]].copy_(value[[row]])
        single.set_text(text[[row]])
        single.write_references(portraits[[row]])
        singles.append(single)

    def voices(at: Sequence[int]) -> Tensor:
        every = [FAMILY.golden_inputs(config, chunk)[audio.AUDIO][row] for row, chunk in enumerate(at)]
        return torch.stack(every)

    for chunk in range(max(starts)):  # row 1 is ahead; row 0 does its first chunk again and again
        for at in (0, chunk):
            stream.buffers[BUFFERS[audio.AUDIO]].copy_(voices([0, at]))
        stream.run_chunk([0, chunk * f], SEEDS)
        singles[1].buffers[BUFFERS[audio.AUDIO]].copy_(voices([0, chunk])[1:])
        singles[1].run_chunk([chunk * f], SEEDS[1:])
    for number in range(CHUNKS):
        at = [number + start for start in starts]
        stream.buffers[BUFFERS[audio.AUDIO]].copy_(voices(at))
        steps = stream.run_chunk([number * f for number in at], SEEDS)
        for row, single in enumerate(singles):
            single.buffers[BUFFERS[audio.AUDIO]].copy_(voices(at)[[row]])
            feed = [step.latents[[row]] for step in steps]
            for step, other in zip(
                single.run_chunk([at[row] * f], SEEDS[row : row + 1], feed), steps, strict=True
            ):
                assert relative_error(other.velocity[row], step.velocity[0]) <= STEP[torch.float32]


def test_caches_on_the_host_give_the_same_chunks() -> None:
    """One cache for each pass, copied to the device layer by layer, and the portrait in all of them."""
    config = talk_config("fp4", model={"layers": 4})
    streamed = config.changed(stream=replace(config.workload.stream, offload_cache=True))
    assert [streamed.device_layers(group) for group in streamed.layer_groups] == [2]
    for wanted, actual in zip(alone(config, 0), alone(streamed, 0), strict=True):
        assert torch.equal(actual, wanted)


def test_a_client_finds_no_byte_of_the_one_before_and_nothing_is_allocated_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sessions with four caches each: a row that was another's is, to the byte, one that was nobody's."""
    config = talk_config("fp4", schedule=replace(evenly(4), sampler="euler"))
    text, allocated = golden_text(config).numpy(), []

    def opened_on(pool: Pool, row: int) -> Session:
        beginning = {"inputs": of_row(config, row, None), "reference": portrait_of(config, row)}
        return pool.open_session(seed=SEEDS[row], text=text, **beginning)

    def bytes_of(pool: Pool, session: Session) -> dict[str, bytes]:
        return {
            name: np.asarray(tensor.contiguous().view(torch.uint8)).tobytes()
            for name, tensor in rows_of(pool).device().tensors(session._running_row()).items()
        }

    with opened(config) as fresh:
        session = opened_on(fresh, 1)
        wanted = bytes_of(fresh, session)
        caches = {name for name in wanted if name.startswith(("kv.k", "kv.v"))}
        assert len(caches) > 1
        chunks = [session.run_chunk(of_row(config, 1, number)).to_host() for number in range(CHUNKS)]
        session.close()
    with opened(config) as pool:
        sessions = [opened_on(pool, 0) for _ in range(2)]
        for number in range(CHUNKS):
            pool.run(sessions, [of_row(config, 0, number)] * 2)
        used = bytes_of(pool, sessions[0])
        assert all(used[name] != wanted[name] for name in caches)
        monkeypatch.setattr(CpuMemory, "allocate", lambda _, spec: allocated.append(spec))
        sessions[0].close()
        session = opened_on(pool, 1)
        assert bytes_of(pool, session) == wanted
        for number, chunk in enumerate(chunks):
            assert np.array_equal(session.run_chunk(of_row(config, 1, number)).to_host(), chunk)
        assert not allocated
        for other in (session, sessions[1]):
            other.close()


@pytest.mark.parametrize(
    ("scheme", "change", "bar"),
    [
        ("fp32", {}, STEP[torch.float32]),
        ("fp4", {"attention": "fp8"}, FP8_PASS),
        ("fp4", {"attention": "fp8", "fp8": True}, FP8_MATMULS_PASS),
    ],
)
def test_fused_layers_are_the_plain_ones(
    scheme: str, change: Mapping[str, Any], bar: float, worst: Callable[[str, float], None]
) -> None:
    """Past the wrap, each pass fed the plain stream's latents; one portrait fills chunks of two."""
    plain = talk_config(scheme)
    checkpoint, text, portrait = (
        random_checkpoint(plain),
        random_text(plain.model, 1),
        random_reference(plain),
    )
    streams = [
        begun(config, checkpoint, text, portrait) for config in (plain, plain.changed(fused=True, **change))
    ]
    matrices = {f"blocks.1.tail.{name}.weight_fp8" for name in ("to_q", "to_out")}
    assert (matrices <= {*streams[1].weights}) == change.get("fp8", False)
    for chunk in range(CHUNKS):
        for stream in streams:
            stream.buffers[BUFFERS[audio.AUDIO]].copy_(FAMILY.golden_inputs(plain, chunk)[audio.AUDIO])
        wanted = streams[0].run_chunk([2 * chunk], [3])
        results = streams[1].run_chunk([2 * chunk], [3], feed=[step.latents for step in wanted])
        for step, other in zip(wanted, results, strict=True):
            error = relative_error(other.velocity, step.velocity)
            worst(f"seko-talk, fused layers, {scheme} {sorted(change)}", error)
            assert error <= bar


def test_a_build_with_a_context_pass_or_without_a_portrait_is_refused() -> None:
    for odd, words in (
        ({"pass_caches": False}, "give --pass-caches, not --context-pass"),
        ({"reference_frames": 0}, "give --reference-frames 1, not 0"),
    ):
        with pytest.raises(UsageError, match=words):
            FAMILY.graph(talk_config(layout=odd))


@pytest.mark.parametrize("name", ["euler", "euler-bf16"])
def test_a_step_of_eulers_method(name: str) -> None:
    """As the scheduler writes it: x + (sigma' - sigma) * v, in steps of bfloat16; conditioning frames stay."""
    config = talk_config()
    s, generator = config.workload.stream, torch.Generator().manual_seed(0)
    shape = (1, 16, s.chunk_frames, s.latent_height, s.latent_width)
    x, v = (torch.randn(shape, generator=generator) for _ in range(2))
    advance = ADVANCE[name](config.model, s)
    actual = advance(x, v, torch.tensor([0.9375]), torch.tensor([0.625]), torch.tensor([1]))
    wanted = x + (0.625 - 0.9375) * v
    if name == "euler-bf16":
        wanted = wanted.to(torch.bfloat16).to(torch.float32)
    wanted[:, :, :1] = x[:, :, :1]
    assert relative_error(actual, wanted) <= 1e-7
    frames, none = torch.tensor([[0, 1]]), torch.zeros(1, dtype=torch.int64)
    noise = Noise(config.model, s, rounded=advance.rounded)(none, frames, none, x, none)
    assert torch.equal(noise, noise.bfloat16().float()) == advance.rounded


@given(st.floats(width=32, min_value=-(2.0**127), max_value=2.0**127))
def test_steps_of_bfloat16_are_those_of_a_cast(number: float) -> None:
    x = torch.tensor([number], dtype=torch.float32)
    assert torch.equal(in_bfloat16_steps(x).view(torch.int32), x.bfloat16().float().view(torch.int32))


def test_a_compiled_step_keeps_its_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler leaves out a cast to bfloat16 that is cast back."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    config = talk_config()
    shape = (
        1,
        16,
        config.workload.stream.chunk_frames,
        config.workload.stream.latent_height,
        config.workload.stream.latent_width,
    )
    generator = torch.Generator().manual_seed(0)
    x, v = (torch.randn(shape, generator=generator) for _ in range(2))
    sigma, none = torch.tensor([0.9375]), torch.zeros(1, dtype=torch.int64)
    advance = ADVANCE["euler-bf16"](config.model, config.workload.stream)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the compiler's own, of its parts
        from torch._inductor import config as compiler

        with compiler.patch(compile_threads=1):
            compiled = torch.compile(advance, fullgraph=True)(x, v, sigma, sigma / 2, none)
    assert torch.equal(compiled, compiled.bfloat16().float())
    # Where one of the two fuses multiplication and addition, a number may be rounded the other way.
    torch.testing.assert_close(compiled, advance(x, v, sigma, sigma / 2, none), rtol=2**-7, atol=0)
