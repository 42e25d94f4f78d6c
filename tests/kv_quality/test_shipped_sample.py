"""The weights that ship make what a sentence asks for: the eager session of the exporter, the exact detectors."""

from __future__ import annotations

from scripts.kv_quality.sample import decoded, open_sample
from scripts.kv_quality.streams import run_stream
from scripts.train_sample.captions import parse
from scripts.train_sample.evaluate import CLIP_LATENTS
from scripts.train_sample.judge import judge
from seko_export.options.sample import SAMPLE_FOLDER

# One shape each: that is what the sample does in more than nine of ten, so one of four may miss.
PROMPTS = [
    "a large red disc bouncing on a dark background",
    "a medium yellow square spinning on a blue gradient",
    "a large cyan ring pulsing on a grey background",
    "a medium white triangle orbiting on a purple gradient",
]


def test_the_shipped_sample_shows_what_is_asked_for():
    sample = open_sample(SAMPLE_FOLDER)
    chunks = CLIP_LATENTS // sample.stream.chunk_frames
    config = sample.build(len(PROMPTS), "cpu")
    latents = run_stream(sample, config, sample.embed(PROMPTS), list(range(len(PROMPTS))), chunks)
    video = decoded(sample.decoder(latents.shape[2], "cpu"), latents)
    verdicts = [judge(clip, parse(prompt)) for clip, prompt in zip(video, PROMPTS, strict=True)]
    assert sum(verdict.followed for verdict in verdicts) >= len(PROMPTS) - 1, [v.right for v in verdicts]
    assert all(verdict.right["background"] and verdict.right["colour"] for verdict in verdicts)
