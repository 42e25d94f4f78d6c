"""Summary of a judge's verdicts: how many streams still move at their end, and at which prompts the model fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts.train_sample.captions import Description
from scripts.train_sample.judge import ATTRIBUTES, Verdict, summary
from scripts.train_sample.shapes import MOTIONS

ALIVE_WITHIN = 0.10  # at its end a stream's detectors may lie this share of all prompts below its start
MISSING = "missing"


@dataclass(frozen=True)
class Judged:
    """One stream: what was asked for, and the verdicts on its start and on its end."""

    wanted: Description
    start: Verdict
    end: Verdict


def report_of(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return what `evaluate.py` prints of its streams.

    Returns
    -------
    dict
        ``start``, ``end``: shares of clips, as `judge.summary`. ``alive``: see `alive`. ``by_count``: of each number of
        shapes wanted, clips, followed shares, and how many clips fail at the start by attribute. ``by_motion``: see
        `by_motion`, at the start and at the end.
    """
    return {
        "start": summary([judgement.start for judgement in judged]),
        "end": summary([judgement.end for judgement in judged]),
        "alive": alive(judged),
        "by_count": by_count(judged),
        "by_motion": {
            "start": by_motion([(judgement.wanted, judgement.start) for judgement in judged]),
            "end": by_motion([(judgement.wanted, judgement.end) for judgement in judged]),
        },
    }


def alive(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return how many streams show at their end all that they showed at their start, and how far attributes fall.

    Returns
    -------
    dict
        ``streams`` of ``of``, those that show a shape at their start: what was never there cannot stay alive;
        ``largest_fall``: the share of prompts by which an attribute (``of_attribute``) is seen less often at the end;
        ``within_10_points``: that it is at most `ALIVE_WITHIN`.
    """
    begun = [
        judgement for judgement in judged if judgement.start.seen is not None and judgement.start.seen.figures
    ]
    streams = sum(
        all(judgement.end.right[name] for name in ATTRIBUTES if judgement.start.right[name])
        for judgement in begun
    )
    lost = {
        name: sum(judgement.start.right[name] for judgement in judged)
        - sum(judgement.end.right[name] for judgement in judged)
        for name in ATTRIBUTES
    }
    worst = max(lost, key=lambda name: lost[name])
    return {
        "streams": streams,
        "of": len(begun),
        "largest_fall": round(lost[worst] / len(judged), 4),
        "of_attribute": worst,
        "within_10_points": lost[worst] <= ALIVE_WITHIN * len(judged),
    }


def by_count(judged: Sequence[Judged]) -> dict[str, dict[str, Any]]:
    """Return clips, followed shares and failures at the start by attribute, of each number of shapes wanted."""
    shares = {}
    for count in sorted({len(judgement.wanted.figures) for judgement in judged}):
        part = [judgement for judgement in judged if len(judgement.wanted.figures) == count]
        failed = {name: sum(not judgement.start.right[name] for judgement in part) for name in ATTRIBUTES}
        shares[str(count)] = {
            "clips": len(part),
            "followed": round(sum(judgement.start.followed for judgement in part) / len(part), 4),
            "followed_end": round(sum(judgement.end.followed for judgement in part) / len(part), 4),
            "failed": {name: number for name, number in failed.items() if number},
        }
    return shares


def by_motion(rows: Sequence[tuple[Description, Verdict]]) -> dict[str, dict[str, Any]]:
    """Return of each motion how many figures were to move so, and the share that does; a figure is known by its colour.

    Returns
    -------
    dict
        By motion: ``figures``, ``right`` (there, and moving so), ``shape`` (there, with the shape wanted), ``seen_as``:
        what the others do, most frequent first, ``missing`` where their colour is not there.
    """
    shares = {}
    for motion in MOTIONS:
        pairs = []
        for wanted, verdict in rows:
            seen = {} if verdict.seen is None else {f.colour: f for f in verdict.seen.figures}
            pairs += [(f, seen.get(f.colour)) for f in wanted.figures if f.motion == motion]
        if not pairs:
            continue
        wrong = Counter(
            MISSING if got is None else got.motion for _, got in pairs if got is None or got.motion != motion
        )
        shaped = sum(got is not None and got.shape == figure.shape for figure, got in pairs)
        shares[motion] = {
            "figures": len(pairs),
            "right": round(1 - wrong.total() / len(pairs), 4),
            "shape": round(shaped / len(pairs), 4),
            "seen_as": dict(wrong.most_common()),
        }
    return shares
