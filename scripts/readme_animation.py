"""Draw the moving picture at the top of the README: the sample and the small world, as the quick start builds them.

    bash scripts/quickstart.sh && bash scripts/quickstart.sh --world
    python scripts/readme_animation.py docs/images/quickstart.webp

Left: the sample, whose prompt changes half way. Right: the small world, steered by keys. Below each stands what it was
told. Nothing is drawn into the pictures, and no frame is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from seko_runtime import open_artifact
from seko_runtime.media_files.pictures import load_image

SAMPLE, WORLD = Path("artifacts/quickstart"), Path("artifacts/quickstart-world")
PICTURE = Path("artifacts/world-sample/picture.png")
PROMPTS = ("a red disc bouncing on a dark background", "a blue ring on a dark background")
WORLD_PROMPT = "a purple disc and a cyan square on a dark background"
KEYS = ("w", "d", "l", "i", "j")  # each held for as many chunks
CHUNKS = 10
SCALE = 2
CAPTION_ROWS = 26
GAP = 8
MOST_BYTES = 1 << 20

Frames = NDArray[np.uint8]  # [T, H, W, 3]


def sample() -> Iterator[tuple[Frames, str]]:
    """Yield each chunk of the sample, and the prompt that it was made with."""
    with (
        open_artifact(SAMPLE) as opened,
        opened.open_session(prompt=PROMPTS[0]) as session,
    ):
        for prompt in PROMPTS:
            for frames in session.stream(prompt, chunks=CHUNKS // len(PROMPTS), recache=prompt != PROMPTS[0]):
                yield frames[0], prompt


def world() -> Iterator[tuple[Frames, str]]:
    """Yield each chunk of the small world, and the key that was held."""
    with (
        open_artifact(WORLD) as opened,
        opened.open_session(prompt=WORLD_PROMPT, image=load_image(PICTURE)) as session,
    ):
        for key in KEYS:
            session.controls["camera"].take({"held": [key]})
            for _ in range(CHUNKS // len(KEYS)):
                yield session.run_chunk().video()[0], f"key {key}"


def captioned(frames: Frames, caption: str) -> list[Image.Image]:
    """Return pictures of twice the size with a line of text below."""
    height, width = (SCALE * side for side in frames.shape[1:3])
    font = ImageFont.load_default(12)
    pictures = []
    for frame in frames:
        picture = Image.new("RGB", (width, height + CAPTION_ROWS), "white")
        picture.paste(Image.fromarray(frame).resize((width, height), Image.Resampling.LANCZOS))
        words, line = caption.split(), 0
        draw = ImageDraw.Draw(picture)
        while words:
            fitting = max(
                n
                for n in range(1, len(words) + 1)
                if draw.textlength(" ".join(words[:n]), font=font) <= width
            )
            draw.text((2, height + 13 * line), " ".join(words[:fitting]), "black", font=font)
            words, line = words[fitting:], line + 1
        pictures.append(picture)
    return pictures


def main() -> None:
    """Write the picture and print its size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    left = [picture for chunk in sample() for picture in captioned(*chunk)]
    right = [picture for chunk in world() for picture in captioned(*chunk)]
    frames = []
    for pair in zip(left, right, strict=True):
        width = sum(part.width for part in pair) + GAP
        frames.append(Image.new("RGB", (width, pair[0].height), "white"))
        frames[-1].paste(pair[0])
        frames[-1].paste(pair[1], (pair[0].width + GAP, 0))
    with open_artifact(SAMPLE) as opened:
        duration = 1000 / opened.manifest.workload.stream.fps
    for quality in (80, 70, 60, 50, 40, 30):
        frames[0].save(
            options.output, save_all=True, append_images=frames[1:], duration=round(duration), loop=0,
            quality=quality, method=6,
        )  # fmt: skip
        if options.output.stat().st_size <= MOST_BYTES:
            break
    print(f"{options.output}: {len(frames)} frames, {options.output.stat().st_size} bytes, quality {quality}")


if __name__ == "__main__":
    main()
