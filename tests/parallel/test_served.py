"""A server of an artifact of two ranks: the stream is that of the ranks' pool, and is saved when the server stops."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.random_checkpoint import write_random_checkpoint
from seko_export import build_steps
from seko_export.media.sources import MediaSources
from seko_runtime import open_artifact, read_manifest
from seko_runtime.video.artifact import video_artifact
from seko_serve.client import AsyncClient
from seko_serve.fleet.box import Box
from seko_serve.fleet.directory import MemoryDirectory
from seko_serve.run import device
from seko_serve.settings import Settings
from tests.export.media_files import TEXT, write_text_encoder, write_vae
from tests.parallel.conftest import one_gpu, ranks_of_programs
from tests.serve.test_fleet_gateway import to_the_end
from tests.serve.test_server import watch
from tests.support.shared import made_once

pytestmark = pytest.mark.slow
PROMPT, SEED, CHUNKS, LIMIT_S = "a b", 3, 3, 200.0


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks that read sentences, with exported programs as engines. Not to be changed."""

    def make(folder: Path) -> None:
        folder.mkdir()
        config = one_gpu()
        config = config.changed(ranks=2, text=TEXT, model=replace(config.model, text_dim=TEXT.dim))
        write_random_checkpoint(
            folder / "tiny.pt", config.model, format="self-forcing", seed=0, dtype=torch.float32
        )
        text = write_text_encoder(folder / "text")
        media = MediaSources(
            vae=write_vae(folder / "vae"), text_encoder=text, tokenizer=text / "tokenizer.json"
        )
        with ranks_of_programs():
            build_steps.build_artifact(
                config,
                folder / "tiny.pt",
                folder / "artifact",
                media=media,
                backend="compile",
                compiler_cache=False,
            )

    return made_once(tmp_path_factory, "served-ranks", make) / "artifact"


def test_a_server_of_two_ranks_makes_their_stream_and_saves_it(artifact: Path, tmp_path: Path) -> None:
    async def test() -> np.ndarray:
        directory = MemoryDirectory(time.monotonic)
        settings = Settings(artifact, "cpu", port=0, snapshots=str(tmp_path / "store"), opens_per_s=1e5)
        box = Box(settings, device(settings), lambda: directory, read_manifest(artifact)[1])
        serving = asyncio.create_task(box.serve())
        while not box.started:
            assert not serving.done(), serving
            await asyncio.sleep(0.05)
        async with AsyncClient(box.facts().inside) as client:
            await client.open(codecs=["rgb24"], prompt=PROMPT, seed=SEED)
            media = (await watch(client, CHUNKS))[0]
            box.stop()
            rest, code = await to_the_end(client)
            assert code == "stopping"
            await serving
            name = client.ready["session"]
        assert any(file.name.startswith(str(name)) for file in (tmp_path / "store").iterdir())
        assert [packet.serial for packet in media + rest] == list(range(len(media + rest)))
        return np.stack([np.frombuffer(packet.payload, np.uint8) for packet in media])

    with ranks_of_programs():
        pictures = asyncio.run(asyncio.wait_for(test(), LIMIT_S))
        with (
            open_artifact(artifact) as opened,
            video_artifact(opened).open_pool() as pool,
            pool.open_session(seed=SEED, prompt=PROMPT) as session,
        ):
            expected = np.concatenate([session.run_chunk().video()[0] for _ in range(CHUNKS)])
    assert np.array_equal(pictures, expected.reshape(len(expected), -1)[: len(pictures)])
    assert len(pictures) == len(expected)
