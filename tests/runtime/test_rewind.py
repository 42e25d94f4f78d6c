"""Sessions that step back: the same bytes again, latents and video frames, while the other row goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seko_runtime.errors import EngineRunError, UsageError

from . import toy_inputs, toy_whole
from .toy import CHANNELS, toy_text
from .toy_whole import open_whole


def test_video_is_the_same_again() -> None:
    """Also where the row beside it goes on; and a prompt may be another one."""
    with open_whole(2) as session:
        chunk = session.run_chunk()
        first = chunk.to_host(), chunk.video_rows()
        second = session.run_chunk()
        expected = second.to_host(), second.video_rows()
        session.rewind(1, row=1)
        again = session.run_chunk()
        assert np.array_equal(again.to_host()[1], expected[0][1])
        assert np.array_equal(again.video_rows()[1], expected[1][1])
        session.restart_row(0)
        session.rewind(0)
        begun = session.run_chunk()
        assert np.array_equal(begun.to_host(), first[0])
        assert all(
            np.array_equal(frames, other) for frames, other in zip(begun.video_rows(), first[1], strict=True)
        )


def test_what_cannot_be_made_again_is_refused() -> None:
    """Past the wrap the VAE's caches are gone; and a chunk that `stream` made ahead is in the way."""
    with open_whole() as session:
        for _ in range(6):
            session.run_chunk()
        with pytest.raises(UsageError, match="expected 6 to 6: before that not all of its chunks are kept"):
            session.rewind(5)
        session.rewind(6)
        for odd in (-1, 7, True, 1.0):
            with pytest.raises(UsageError, match="cannot step back to chunk"):
                session.rewind(odd)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunks", [3, 4])
def test_the_last_chunk_past_the_wrap_is_undone_while_all_are_kept(chunks: int) -> None:
    """The cache of 5 frames is full after 3 chunks; the VAE's caches are made of up to 4 chunks that are kept. After
    one step back there is no other: the chunk that was undone took slots of frames that the one before reads.
    """
    with open_whole() as session:
        for _ in range(chunks - 1):
            session.run_chunk()
        chunk = session.run_chunk()
        wanted = chunk.to_host(), chunk.video()
        for _ in range(2):
            session.rewind(chunks - 1)
            with pytest.raises(
                UsageError, match=f"made {chunks - 1} chunks.*expected {chunks - 1} to {chunks - 1}"
            ):
                session.rewind(chunks - 2)
            chunk = session.run_chunk()
            assert np.array_equal(chunk.to_host(), wanted[0])
            assert np.array_equal(chunk.video(), wanted[1])


def test_a_new_stream_may_step_back_as_any(tmp_path: Path) -> None:
    """What a row's last stream wrote is not counted; what was undone still is after a snapshot."""
    with toy_inputs.open_pool() as pool:
        inputs = {"camera": np.ones(CHANNELS, np.float32)}
        opening = {"seed": 1, "text": toy_text(), "inputs": {"place": np.zeros(CHANNELS, np.float32)}}
        with pool.open_session(**opening) as session:
            for _ in range(4):
                session.run_chunk(inputs)
            session.rewind(3)
            session.save(tmp_path / "stream")
            session.restart()
            first = session.run_chunk(inputs).to_host()
            session.rewind(0)
            assert np.array_equal(session.run_chunk(inputs).to_host(), first)
        with (
            pool.restore(tmp_path / "stream") as session,
            pytest.raises(UsageError, match=r"made 3 chunks.*expected 3 to 3"),
        ):
            session.rewind(2)


def test_inputs_that_are_held_are_those_of_then() -> None:
    """A session of a pool: what was given last counts again as what was given before."""
    inputs = {"camera": np.ones(CHANNELS, np.float32)}
    place = {"place": np.zeros(CHANNELS, np.float32)}
    latents = []
    with toy_inputs.open_pool() as pool:
        for interrupted in (False, True):
            with pool.open_session(seed=1, text=toy_text(), inputs=place) as session:
                session.run_chunk(inputs | {"zoom": np.float32(2)})
                if interrupted:
                    other = session.run_chunk(inputs | {"zoom": np.float32(5)}).to_host()
                    session.rewind(1)
                latents.append(session.run_chunk(inputs).to_host())
    assert np.array_equal(*latents)
    assert not np.array_equal(other, latents[0])


def test_a_chunk_that_failed_has_evicted_frames_too() -> None:
    """It took the slots of the frames that the chunk before it reads; past the kept chunks also those of latents."""
    real, failing = toy_whole.eager_engines()["store"], [False]

    def store(inputs: list[Any]) -> list[Any]:
        if failing[0]:
            raise RuntimeError("planted")
        return real(inputs)

    for chunks, earliest in ((1, 0), (2, 2), (3, 3), (4, 4)):
        with open_whole(engines={"store": store}) as session:
            wanted = [session.run_chunk().to_host() for _ in range(chunks)]
            failing[0] = True
            with pytest.raises(EngineRunError, match="planted"):
                session.run_chunk()
            failing[0] = False
            if earliest:
                with pytest.raises(UsageError, match=f"expected {earliest} to {chunks}"):
                    session.rewind(chunks - 1)
            session.rewind(earliest)
            again = [session.run_chunk().to_host() for _ in range(chunks - earliest + 1)]
            whole = [*wanted, again[-1]][earliest:]
            assert all(np.array_equal(*pair) for pair in zip(again, whole, strict=True))
