"""The trained world sample by the runtime's own session: its video follows the camera, and a new prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scripts.train_sample.judge_world import pan_errors, psnr
from scripts.train_sample.text import PromptTexts
from scripts.train_sample.train_vae import FrozenVae
from scripts.train_sample.world import STEP, captions_of
from scripts.train_sample.world_pool import OWN_ROWS, Walks, draw_walks, picture_rows
from seko_export.checkpoints.sources import LoadOptions
from seko_export.families.model_files import load_checkpoint
from seko_export.families.wan_layout.picture_sizes import MASK_CHANNELS
from seko_export.media.viewer import VIEWER_FILE, read_viewer
from seko_export.media.wan_vae.modules import VaeEncode, VaeTensors
from seko_export.options.sample import SAMPLE_FOLDER, read_sample
from seko_runtime.media_files.pictures import load_image
from tests.lingbot.condition_table import condition_table
from tests.support.asked import resolved
from tests.support.stacked import eager_session
from tests.truth.eager_stream import weights_of

WORLD = Path(__file__).parents[2] / "artifacts" / "world-sample"
CHUNKS = 2
STEPS = 4 * 3 * CHUNKS  # video frames
AHEAD = "w"
SWITCH = "none"  # no key is held, and the prompt changes with the last chunk
FIRST_CHUNK = slice(1, 9)  # video frames


@pytest.fixture(scope="module")
def vae() -> FrozenVae:
    return FrozenVae(SAMPLE_FOLDER, "cpu")


@pytest.fixture(scope="module")
def walks() -> Walks:
    """One world, seen by a camera at rest; its look changes with the last chunk."""
    drawn = draw_walks(1, CHUNKS, 3, 77, "cpu", switched=1.0, keys=[f"none-{STEPS}"])
    return drawn.switching_at(CHUNKS - 1)


@pytest.fixture(scope="module")
def table(vae: FrozenVae, walks: Walks) -> Tensor:
    """The picture's condition [20, 30, h, w], as the product makes it."""
    config = read_sample().vae
    weights = VaeTensors(vae.vae.state_dict(), config)
    names = VaeEncode(config, first=True, frames=1).state_dict()
    return condition_table({name: weights[name] for name in names}, config, walks.video(3)[0, :, 0])


@pytest.fixture(scope="module")
def videos(vae, walks, table) -> dict[str, Tensor]:
    """The video [1, 3, T, 96, 96] of each key."""
    encoder = PromptTexts(SAMPLE_FOLDER, "cpu")
    before, after = (encoder(captions_of(looks)) for looks in (walks.before, walks.after))
    build = resolved(None, checkpoint=WORLD, no_vae=True, no_text=True)
    config, videos_of = build.config, {}
    weights = weights_of(
        config, load_checkpoint(build.checkpoint, config.model, LoadOptions(dtype=torch.float32))
    )
    for key in (AHEAD, SWITCH):
        latents = []
        with eager_session(config, weights, before, [5]) as session:
            session.set_inputs({"condition": table.numpy()})
            session.take("camera", {"keys": f"{key}-{STEPS}"})
            for chunk in range(CHUNKS):
                if key == SWITCH and chunk == CHUNKS - 1:
                    session.set_text(after.numpy(), recache=True)
                latents.append(torch.from_numpy(session.run_chunk().to_host().copy()))
        videos_of[key] = vae.decode(torch.cat(latents, -3).view(1, 16, -1, 12, 12))
    return videos_of


@pytest.mark.slow
def test_the_video_moves_as_the_held_key_says(videos):
    measured, asked = pan_errors(videos[AHEAD], [AHEAD], 8)
    assert (measured - asked).norm() <= 0.15 * STEP


@pytest.mark.slow
def test_a_camera_at_rest_shows_a_world_at_rest(videos):
    """So that no video passes above that does not follow its camera."""
    measured, asked = pan_errors(videos[SWITCH][:, :, FIRST_CHUNK], [AHEAD], 0)
    assert measured.norm() <= 0.05 * STEP
    assert (measured - asked).norm() >= 0.9 * STEP


@pytest.mark.slow
def test_a_new_prompt_changes_the_world(videos, walks):
    """By decibels to the world with the old and with the new look, in the first chunk and at the end."""
    old, new = (psnr(videos[SWITCH], walks.video(3, look))[0] for look in (walks.before, walks.after))
    assert old[FIRST_CHUNK].mean() > new[FIRST_CHUNK].mean() + 3
    assert new[-4:].mean() > old[-4:].mean() + 3


@pytest.mark.slow
def test_training_conditions_on_what_the_product_makes(vae, walks, table):
    rows = picture_rows(vae, walks.video(3)[:, :, 0], OWN_ROWS)[0]
    assert (rows - table[MASK_CHANNELS:, :OWN_ROWS]).abs().max() <= 1e-3


def test_the_quick_starts_files_belong_together():
    """The pictures are of the model's size, and the prompts are of words that it knows."""
    brought = [read_viewer(folder / VIEWER_FILE) for folder in (WORLD, SAMPLE_FOLDER)]
    (picture,) = [path for files in brought for path in files.pictures]
    assert load_image(picture).shape == (96, 96, 3)
    prompts = [table["prompt"] for table in json.loads((WORLD / "prompts.json").read_text(encoding="utf-8"))]
    prompts += [prompt for files in brought for prompt in files.viewer.prompts]
    encoder = PromptTexts(SAMPLE_FOLDER, "cpu")
    assert all(2 not in encoding.ids for encoding in encoder.tokenizer.encode_batch(prompts))
    assert sum(file.stat().st_size for file in (*WORLD.iterdir(), *SAMPLE_FOLDER.iterdir())) <= 50_000_000
