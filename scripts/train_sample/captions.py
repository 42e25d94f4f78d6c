"""Captions of scenes: a small grammar that writes and reads them, and which combinations are held out."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import torch

from scripts.train_sample.shapes import (
    BACKGROUNDS,
    COLOURS,
    MOST,
    MOTIONS,
    SHAPES,
    SIZES,
    Scenes,
    draw_scenes,
    held_out_combinations,
)

# Each motion as "a disc ...ing" and as "a disc that ...s".
_DOING = {
    "drift": "drifting",
    "bounce": "bouncing",
    "orbit": "orbiting",
    "spin": "spinning",
    "pulse": "pulsing",
}
_DOES = {"drift": "drifts", "bounce": "bounces", "orbit": "orbits", "spin": "spins", "pulse": "pulses"}
_MOTION_OF = {word: name for table in (_DOING, _DOES) for name, word in table.items()}
_FIGURE = re.compile(
    rf"(?:a )?(?:(?P<size>{'|'.join(SIZES)}) )?(?P<colour>{'|'.join(COLOURS)}) (?P<shape>{'|'.join(SHAPES)}) "
    rf"(?:that is |that |is )?(?P<motion>{'|'.join(_MOTION_OF)})"
)
_BEHIND = re.compile(rf"\b(?:on|over) a (?P<name>{'|'.join(sorted(BACKGROUNDS, key=len, reverse=True))})\b")


@dataclass(frozen=True)
class Figure:
    """One shape's attributes; ``size`` is None where a caption does not say."""

    colour: str
    shape: str
    motion: str
    size: str | None = None


@dataclass(frozen=True)
class Description:
    """The content of a caption: one to three figures, in any order, and the background."""

    figures: tuple[Figure, ...]
    background: str


def describe(scenes: Scenes) -> list[Description]:
    """Return what can be said of each scene, sizes included."""
    tables = [list(COLOURS), list(SHAPES), list(MOTIONS), list(SIZES)]
    columns = [scenes.colour, scenes.shape, scenes.motion, scenes.size]
    rows = [column.tolist() for column in columns]
    names, counts = list(BACKGROUNDS), scenes.count.tolist()
    return [
        Description(
            tuple(
                Figure(*(table[row[b][i]] for table, row in zip(tables, rows, strict=True)))
                for i in range(count)
            ),
            names[back],
        )
        for b, (count, back) in enumerate(zip(counts, scenes.background.tolist(), strict=True))
    ]


def caption(description: Description, rng: random.Random) -> str:
    """Write one of the many captions of a scene.

    Parameters
    ----------
    description : Description
        What to say; sizes are named half of the time.
    rng : random.Random
        Chooses the phrasing and the order of the figures.

    Returns
    -------
    str
        Lower case, words, commas.
    """
    figures = list(description.figures)
    rng.shuffle(figures)
    form, sized, article = rng.randrange(4), rng.random() < 0.5, "a " if rng.random() < 0.8 else ""
    words = []
    for figure in figures:
        size = f"{figure.size} " if sized and figure.size else ""
        motion = (
            _DOING[figure.motion],
            f"that {_DOES[figure.motion]}",
            f"is {_DOING[figure.motion]}",
            f"that is {_DOING[figure.motion]}",
        )[form]
        words.append(f"{article}{size}{figure.colour} {figure.shape} {motion}")
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    place = f"{rng.choice(('on', 'over'))} a {description.background}"
    if not description.background.endswith("gradient") or rng.random() < 0.3:
        place += " background"
    return f"{listed} {place}" if rng.random() < 0.75 else f"{place}, {listed}"


def parse(text: str) -> Description:
    """Read a caption of the grammar.

    Parameters
    ----------
    text : str
        As `caption` writes it; case and further words do not matter.

    Returns
    -------
    Description
        Sizes are None where the caption names none.

    Raises
    ------
    ValueError
        If it names no background, no figure, or more than three.
    """
    text = " ".join(text.lower().split())
    place = _BEHIND.search(text)
    phrases = tuple(
        Figure(match["colour"], match["shape"], _MOTION_OF[match["motion"]], match["size"])
        for match in _FIGURE.finditer(text)
    )
    if place is None or not 1 <= len(phrases) <= MOST:
        raise ValueError(
            f"caption {text!r} names {len(phrases)} shapes {'on no' if place is None else 'on a'} background; expected "
            f"one to {MOST}, each a colour, a shape and a motion, on one of {', '.join(BACKGROUNDS)}"
        )
    return Description(phrases, place["name"])


def held_out(description: Description) -> bool:
    """Tell whether training never draws this combination."""
    triples = [
        (list(COLOURS).index(f.colour) * len(SHAPES) + SHAPES.index(f.shape)) * len(MOTIONS)
        + MOTIONS.index(f.motion)
        + 1
        for f in description.figures
    ]
    triples += [0] * (MOST - len(triples))
    background = list(BACKGROUNDS).index(description.background)
    return bool(held_out_combinations(torch.tensor([triples]), torch.tensor([background])))


def held_out_prompts(count: int, seed: int, phrasing: int) -> list[str]:
    """Return captions of scenes that training never draws, by the seeds of the scenes and of how they are said."""
    rng = random.Random(phrasing)
    return [caption(d, rng) for d in describe(draw_scenes(count, seed, held_out=True))]


def vocabulary() -> list[str]:
    """Return every word of the grammar, commas included, in a fixed order."""
    words = {word for name in BACKGROUNDS for word in name.split()}
    words |= {
        "a",
        "on",
        "over",
        "and",
        "that",
        "is",
        "background",
        ",",
        *COLOURS,
        *SHAPES,
        *SIZES,
        *_MOTION_OF,
    }
    return sorted(words)
