"""A workload outside the package: pooled, paused, saved, replayed; on a GPU captured. Builds: test_toy_build.py."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seko_export.artifact.manifest_json import manifest_json
from seko_runtime import open_artifact, register_workload
from seko_runtime.backends.memory import Memory
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.errors import ManifestError, PoolFullError, SnapshotError, UsageError
from seko_runtime.executor.programs_check import resolve_programs
from seko_runtime.format.manifest import Target
from seko_runtime.opening import workloads
from seko_runtime.sessions.loaded import Loaded
from seko_runtime.sessions.snapshot import Snapshot, read_snapshot
from tests.runtime import toy
from tests.runtime.order_watch import FakeMemory, World, made_world
from tests.support.rows import rows_of
from tests.toy_workload import model
from tests.toy_workload.workload import WORKLOAD, ToyPool, ToySession

WORDS = ((1, 2, 3), (4, 5, 6, 7, 8), (9,), (10, 0, 10, 0, 10, 0, 10))
ROOT = Path(__file__).parents[2]
NEAR = {"rtol": 1e-5, "atol": 1e-6}


def alone(words: Sequence[int]) -> list[list[float]]:
    """What the toy says, by loops over Python's floats."""
    w = {name: weight.double().tolist() for name, weight in model.weights().items()}

    def product(x: list[float], matrix: list[list[float]]) -> list[float]:
        return [
            math.fsum(a * row[column] for a, row in zip(x, matrix, strict=True))
            for column in range(len(matrix[0]))
        ]

    state, history, said = [0.0] * model.DIM, [], []
    for word in words:
        state = [math.tanh(a + b) for a, b in zip(product(state, w["inner"]), w["table"][word], strict=True)]
        history.append(state)
    while len(history) < model.POSITIONS:
        mean = [math.fsum(column) / len(history) for column in zip(*history, strict=True)]
        pairs = zip(product(state, w["inner"]), product(mean, w["outer"]), strict=True)
        state = [math.tanh(a + b) for a, b in pairs]
        history.append(state)
        said.append(product(state, w["voice"]))
        if state[0] > model.LIMIT:
            break
    return said


def open_pool(memory: Memory | None = None, digest: str = "d") -> ToyPool:
    """A pool over plain callables."""
    manifest = model.manifest()
    programs = resolve_programs(manifest, WORKLOAD.contract(manifest))
    own = CpuMemory() if memory is None else memory
    loaded = Loaded(manifest, programs, model.eager_engines(), model.weights(), lambda: own)
    return ToyPool(WORKLOAD.open_rows(loaded, {}), digest)


def said(session: ToySession, most: int = model.POSITIONS) -> list[np.ndarray]:
    """What a session says, at most so many samples."""
    return list(islice(session.speak(), most))


def test_some_words_end_by_their_flag_and_some_not() -> None:
    """Else nothing here would show that a flag is read, or that a row goes on without one."""
    ends = [len(alone(words)) + len(words) < model.POSITIONS for words in WORDS]
    assert {True, False} == set(ends)


@pytest.mark.parametrize("words", WORDS)
def test_a_session_says_what_the_net_says_by_loops(words: tuple[int, ...]) -> None:
    with open_pool() as pool:
        session, wanted = pool.open_session(words), alone(words)
        samples = said(session, len(wanted))
        np.testing.assert_allclose(samples, wanted, **NEAR)
        session.close()


def test_a_flag_is_read_one_step_late_and_the_surplus_step_is_dropped() -> None:
    words = next(words for words in WORDS if len(alone(words)) + len(words) < model.POSITIONS - 1)
    with open_pool() as pool:
        session = pool.open_session(words)
        row, samples = session._running_row(), said(session)
        assert len(samples) == len(alone(words))
        assert session.closed
        assert rows_of(pool).positions[row] == len(words) + len(samples) + 1


def test_too_many_words_and_positions_are_refused() -> None:
    with open_pool() as pool:
        with pytest.raises(UsageError, match="9 words, expected 1 to 8"):
            pool.open_session(range(9))
        assert pool.free == pool.capacity
        endless = next(words for words in WORDS if len(alone(words)) + len(words) == model.POSITIONS)
        with pool.open_session(endless) as session:
            said(session, model.POSITIONS - len(endless))
            with pytest.raises(UsageError, match="has filled its 24 positions"):
                pool.step([session])


@settings(max_examples=60)
@given(st.data())
def test_whoever_shares_a_call_and_whatever_moves_a_session_says_what_it_says_alone(
    data: st.DataObject,
) -> None:
    """Sessions join, step in any company, pause, resume, are saved and restored, and leave."""
    with open_pool() as pool, open_pool() as other:
        words_and_samples: dict[ToySession, tuple[tuple[int, ...], list[np.ndarray]]] = {}
        for _ in range(data.draw(st.integers(1, 25))):
            running = [session for session in words_and_samples if not session.closed and not session.paused]
            paused = [session for session in words_and_samples if session.paused]
            steps = [
                "join",
                *(["step", "pause", "leave"] if running else []),
                *(["resume"] if paused else []),
            ]
            step = data.draw(st.sampled_from(steps))
            if step == "join":
                words = data.draw(st.sampled_from(WORDS))
                if pool.free:
                    words_and_samples[pool.open_session(words)] = (words, [])
                else:
                    with pytest.raises(PoolFullError):
                        pool.open_session(words)
            elif step == "step":
                these = data.draw(st.lists(st.sampled_from(running), min_size=1, unique=True))
                whole = [s for s in these if rows_of(pool).positions[s._running_row()] < model.POSITIONS]
                for session, samples in zip(whole, pool.step(whole) if whole else [], strict=True):
                    if samples is not None:
                        words_and_samples[session][1].append(samples)
            elif step == "resume":
                session = data.draw(st.sampled_from(paused))
                if pool.free:
                    session.resume()
            else:
                session = data.draw(st.sampled_from(running))
                session.pause() if step == "pause" else session.close()
        for session, (words, spoken) in words_and_samples.items():
            twin = other.open_session(words)
            wanted = said(twin, len(spoken))
            twin.close()
            assert [sample.tobytes() for sample in spoken] == [sample.tobytes() for sample in wanted]
            session.close()


def test_a_snapshot_goes_on_in_another_pool_and_foreign_ones_are_refused(tmp_path: Path) -> None:
    words = next(words for words in WORDS if len(alone(words)) > 3)
    with open_pool() as pool, open_pool(digest="e") as foreign:
        session = pool.open_session(words)
        samples = said(session, 2)
        session.save(tmp_path / "saved")
        session.close()
        with open_pool() as later:
            again = later.restore(tmp_path / "saved")
            samples += said(again, 1)
            again.close()
        np.testing.assert_allclose(samples, alone(words)[:3], **NEAR)
        with pytest.raises(SnapshotError, match="is of artifact 'd'"):
            foreign.restore(tmp_path / "saved")
        with pytest.raises(SnapshotError, match="a row at position 99, expected 1 to 24"):
            _restore_at(pool, tmp_path / "saved", 99)


def _restore_at(pool: ToyPool, path: Path, position: int) -> None:
    """Restore a snapshot whose row is said to be elsewhere."""
    rows = rows_of(pool)
    state = read_snapshot(path, pool._digests, rows.layout(), rows.form)
    moved = replace(state, numbers=replace(state.numbers, position=position))
    Snapshot(moved, pool._digests).save(path)
    pool.restore(path)


def test_captured_calls_and_copies_beside_them_race_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    world: World = made_world(monkeypatch)
    memory = FakeMemory(world)
    with open_pool(memory) as pool:
        first, second = pool.open_session(WORDS[0]), pool.open_session(WORDS[1])
        launches = rows_of(pool).launches
        assert launches == 2  # a prefill each
        pool.step([first])
        first.pause()
        pool.step([second])
        third = pool.open_session(WORDS[2])
        pool.step([second, third])
        first.resume()
        samples = pool.step([first, second, third])
        assert rows_of(pool).launches == launches + 5
        np.testing.assert_allclose(samples[0], alone(WORDS[0])[1], **NEAR)
        for session in (first, second, third):
            session.close()


def test_a_contract_refuses_what_the_host_does_not_fill() -> None:
    manifest = model.manifest()
    fewer = tuple(buffer for buffer in manifest.buffers if buffer.name != "length")
    with pytest.raises(ManifestError, match="the host fills"):
        resolve_programs(replace(manifest, buffers=fewer), WORKLOAD.contract(manifest))
    without = {name: calls for name, calls in manifest.programs.items() if name != "prefill.8"}
    with pytest.raises(ManifestError, match=r"prefill\.8"):
        resolve_programs(replace(manifest, programs=without), WORKLOAD.contract(manifest))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy, registered in this process."""
    monkeypatch.setattr(workloads, "_registered", {})
    register_workload(WORKLOAD)


def build(folder: Path, target: Target) -> Path:
    """Compile the engines for this machine's GPU, and write an artifact with golden samples of the eager modules."""
    manifest = model.manifest()
    (folder / "engines").mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while it compiles
        for engine in manifest.engines:
            inputs = tuple(
                torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device="cuda")
                for spec in engine.inputs
            )
            torch._inductor.aoti_compile_and_package(
                torch.export.export(model.MODULES[engine.name](), inputs),
                package_path=str(folder / engine.file),
            )
    toy.write_safetensors(
        folder / model.WEIGHTS_FILE, {name: weight.numpy() for name, weight in model.weights().items()}
    )
    with open_pool() as pool, pool.open_session(WORDS[1]) as session:
        samples = np.stack(said(session, 3))
    toy.write_safetensors(folder / model.GOLDEN_FILE, {"samples": samples})
    golden = model.Golden(model.GOLDEN_FILE, WORDS[1], 3, 1e-5)
    manifest = replace(
        manifest,
        workload=replace(manifest.workload, golden=golden),
        target=target,
        files=toy.file_entries(folder),
    )
    (folder / "manifest.json").write_bytes(manifest_json(manifest))
    return folder


@pytest.mark.gpu
@pytest.mark.usefixtures("registered")
def test_on_a_gpu_each_step_is_one_launch_of_a_captured_graph(tmp_path: Path) -> None:
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    target = Target("cuda", arch, torch.__version__.split("+")[0], torch.version.cuda)
    with open_artifact(build(tmp_path / "toy", target)) as artifact:
        assert [error.within for error in artifact.verify()] == [True]
        with artifact.open_pool() as pool:
            sessions = [pool.open_session(words) for words in WORDS[:3]]
            assert len(rows_of(pool).device().replays) == len(model.LENGTHS) + len(model.BUCKETS)
            before, steps = rows_of(pool).launches, [pool.step(sessions) for _ in range(2)]
            assert rows_of(pool).launches == before + 2
            for number, words in enumerate(WORDS[:3]):
                for place, wanted in enumerate(alone(words)[:2]):
                    np.testing.assert_allclose(steps[place][number], wanted, rtol=1e-4, atol=1e-5)
            for session in sessions:
                session.close()
