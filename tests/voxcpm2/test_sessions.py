"""Sessions of the real model, tiny and uncompiled: what each says is what it says alone, and what the engines make."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from scripts.random_speech import write_random_voxcpm2
from seko_export.config.pool import PoolConfig
from seko_export.config.target import TargetConfig
from seko_export.families.registry import graph_of
from seko_export.families.speech.config import SpeechBuild, SpeechConfig
from seko_export.families.voxcpm2.family import FAMILY
from seko_export.families.voxcpm2.pieces import SpeechLayout
from seko_export.goldens.eager import eager_engine, eager_manifest, eager_memory
from seko_runtime.sessions.loaded import Loaded
from seko_runtime.speech.contract import resolve_speech
from seko_runtime.speech.local_rows import open_speech_rows
from seko_runtime.speech.manifest import SpeechManifest
from seko_runtime.speech.pool import SpeechPool
from seko_runtime.speech.prompts import Floats, assemble
from seko_runtime.speech.tokens import SpeechTokenizer
from tests.support.rows import rows_of
from tests.support.shared import made_once
from tests.support.tolerances import relative_error
from tests.voxcpm2.eager_speech import EagerSpeech
from tests.voxcpm2.models import PLAIN
from tests.voxcpm2.test_truth import FREE_BAR

POSITIONS, PREFILL, TEXTS = 64, (4, 16), ("hello", "你好 the sound of a voice", "世界")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a tiny model with random weights."""
    return made_once(
        tmp_path_factory,
        "voxcpm2-tiny-fp32",
        lambda path: write_random_voxcpm2(path, PLAIN, seed=11, dtype=torch.float32),
    )


@contextmanager
def opened(folder: Path, sessions: int, buckets: tuple[int, ...]) -> Iterator[SpeechPool]:
    """A pool over the engines' modules."""
    workload = SpeechConfig(
        PoolConfig(sessions, buckets), POSITIONS, (POSITIONS,), PREFILL, kv_scheme="fp32", voice_patches=2
    )
    config = SpeechBuild(PLAIN, workload, TargetConfig("cpu"))
    pieces, checkpoint = graph_of(config).pieces, FAMILY.load(folder, PLAIN)
    weights = dict(FAMILY.weights(pieces, checkpoint)) | dict(FAMILY.tables(config, checkpoint))
    manifest = cast(SpeechManifest, eager_manifest(config, weights))
    engines = {name: eager_engine(piece) for name, piece in pieces.items()}
    file = FAMILY.tokenizer(folder)
    tokens = SpeechTokenizer(file.read_bytes(), file.name, PLAIN.vocab_size)
    loaded = Loaded(
        manifest, resolve_speech(manifest), engines, weights, lambda: eager_memory(config), tokens
    )
    with SpeechPool(open_speech_rows(loaded)) as pool:
        yield pool


def sound(seed: int, samples: int) -> Floats:
    return (0.3 * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


def said(pool: SpeechPool, text: str, seed: int, patches: int = 5) -> list[Floats]:
    with pool.open_session(seed=seed) as session:
        return list(session.speak(text, patches=patches))


def same(sounds: Sequence[Floats], wanted: Sequence[Floats]) -> None:
    assert [patch.tobytes() for patch in sounds] == [patch.tobytes() for patch in wanted]


def test_a_session_says_what_the_engines_make_one_by_one(folder: Path) -> None:
    """With a voice that is encoded stretch by stretch, and a prompt that is filled in by parts."""
    checkpoint = FAMILY.load(folder, PLAIN)
    vae = {
        name.removeprefix("audiovae."): name for name in checkpoint.sources if name.startswith("audiovae.")
    }
    model = {name: checkpoint[name] for name in checkpoint.sources if name not in vae.values()}
    layout = SpeechLayout(rows=4, places=200, dtype=torch.float32, voice_patches=2)
    speech = EagerSpeech(PLAIN, layout, model, {name: checkpoint[full] for name, full in vae.items()})
    with opened(folder, 1, (1,)) as pool, pool.open_session(seed=7) as session:
        session.voice = session.encode_voice(sound(1, 5 * PLAIN.patch_size * PLAIN.vae.encoder_stride - 3))
        sounds = list(session.speak(TEXTS[1], patches=6))
        ids = rows_of(pool).token_ids(TEXTS[1])
        prompt = assemble(ids, PLAIN.patch_shape, reference=session.voice.reference)
    assert len(prompt.ids) > PREFILL[-1]
    parts = dict(zip(("ids", "is_audio", "patches"), prompt.arrays, strict=True))
    speech.prefill(0, parts, start=3, tokens=64, length=64, seed=7)
    for number, samples in enumerate(sounds):
        wanted = speech.step([0], 64)["samples"][0]
        assert relative_error(torch.from_numpy(samples), wanted) <= FREE_BAR, number


def test_company_changes_no_bit_in_one_bucket(folder: Path) -> None:
    """Rows decode while others are filled in; one finishes, and a new one takes its row."""
    with opened(folder, 3, (3,)) as pool:
        alone = [said(pool, text, seed) for seed, text in enumerate(TEXTS)]
        sessions = [pool.open_session(seed=seed) for seed in range(3)]
        spoken: dict[int, list[Floats]] = {}

        def speak(seed: int) -> None:
            spoken[seed] = list(sessions[seed].speak(TEXTS[seed], patches=5))
            sessions[seed].close()

        threads = [threading.Thread(target=speak, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for seed in range(3):
            same(spoken[seed], alone[seed])
        first, second = (pool.open_session(seed=seed) for seed in (0, 1))
        first.begin(TEXTS[0], patches=5)
        second.begin(TEXTS[1], patches=5)
        second_sounds = [sounds for _ in range(2) for sounds in pool.step([first, second])][1::2]
        row = first._row
        first.close()
        third = pool.open_session(seed=2)
        assert third._row == row
        third.begin(TEXTS[2], patches=5)
        new = []
        for _ in range(3):
            ours, theirs = pool.step([third, second])
            new.append(ours)
            second_sounds.append(theirs)
        new += list(third.sound())
        same([patch for patch in second_sounds if patch is not None], alone[1])
        same([patch for patch in new if patch is not None], alone[2])
        second.close()
        third.close()


def test_between_buckets_a_text_is_equal_up_to_rounding(folder: Path) -> None:
    with opened(folder, 3, (1, 3)) as pool:
        alone = [said(pool, text, seed) for seed, text in enumerate(TEXTS)]
        sessions = [pool.open_session(seed=seed) for seed in range(3)]
        for session, text in zip(sessions, TEXTS, strict=True):
            session.begin(text, patches=5)
        for number in range(4):  # none ends earlier
            for wanted, samples in zip(alone, pool.step(sessions), strict=True):
                assert samples is not None
                error = relative_error(torch.from_numpy(samples), torch.from_numpy(wanted[number]))
                assert error <= FREE_BAR
        for session in sessions:
            session.close()


def test_a_snapshot_of_the_model_goes_on(folder: Path, tmp_path: Path) -> None:
    with opened(folder, 2, (1,)) as pool, opened(folder, 2, (1,)) as other:
        alone = said(pool, TEXTS[1], 3)
        session = pool.open_session(seed=3)
        session.begin(TEXTS[1], patches=5)
        before = [pool.step([session])[0] for _ in range(2)]
        session.save(tmp_path / "saved")
        session.close()
        again = other.restore(tmp_path / "saved")
        same([*(patch for patch in before if patch is not None), *again.sound()], alone)
        again.close()
