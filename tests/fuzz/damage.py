"""Ways to damage JSON and bytes, drawn from a random generator. Knows no format of ours but the words of references."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

NUMBERS = (
    0, -1, 1, 2, 3, 4, 5, 7, 8, 16, 18, 127, 255, 256, 4095, 4096, 4097, 65535, 1 << 16, (1 << 31) - 1, 1 << 31,
    1 << 32, 1 << 48, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 31), -(1 << 63), 10**30,
    0.5, -0.0, 1e-320, 1e308, -1e308, 3.0,
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    None, True, False, "", "x", "0", [], {}, [[]], [None], [0], {"a": 1}, {"": None}, 0, -1, 1.5, "\x00", "\u202e",
    "ä", "🙂",
)  # fmt: skip
LITERALS = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1E400", "-0", "0" * 20, "1" * 5000, "-" + "9" * 400, "1.",
    "01", "0x10", '"\\ud800"', '"\\u0000"', '"\x01"', "tru", "", ",", "}", "\u2028", "/**/1", "1e-9999", "0.1e1",
)  # fmt: skip
PATHS = (
    "../x", "/etc/passwd", "a/../b", "./a", "a//b", "a/", "manifest.json", "manifest.sig", "a\\b", "a\nb", "weights",
    "engines", "x" * 255, "x" * 256, "/".join("d" * 200 for _ in range(6)), "/".join(["d"] * 500), "ä", "\ud800",
    "numpy.py", "engines/../manifest.json", ".", "..", "CON", "a\x7f",
)  # fmt: skip
MARKS = (
    "[pass]",
    "[row]",
    "[bucket]",
    "[0]",
    "[1]",
    "[00]",
    "[-1]",
    "[999999999]",
    "[0][row]",
    "[pass][0]",
    " ",
    ".",
)
HEADS = ("weight:", "buffer:", "value:", "engine:", "")
_RAW = re.compile(r'"@raw(\d+)@"')
MAX_GROWN = 400_000  # letters that one step may add


@dataclass(frozen=True)
class Raw:
    """A piece of JSON text that `json.dumps` would not write."""

    text: str


class Document:
    """A JSON tree under damage, and its text.

    Parameters
    ----------
    tree : object
        As `json.loads` gives it; it is copied.
    """

    def __init__(self, tree: Any) -> None:
        self.tree = copy.deepcopy(tree)
        self._after: list[Callable[[str], str]] = []

    def spots(self) -> list[tuple[Any, Any]]:
        """Every value of the tree as its container and its key there."""
        return list(_spots(self.tree))

    def after(self, change: Callable[[str], str]) -> None:
        """Keep a change of the text for the end."""
        self._after.append(change)

    def text(self, indent: int | None = None) -> str:
        """The JSON text, or what is left of it."""
        raws: list[str] = []

        def plain(value: Any) -> str:
            raws.append(value.text)
            return f"@raw{len(raws) - 1}@"

        text = json.dumps(self.tree, default=plain, indent=indent)
        text = _RAW.sub(lambda match: raws[int(match[1])], text)
        for change in self._after:
            text = change(text)
        return text

    def encoded(self) -> bytes:
        """The text as bytes; lone surrogates as they come."""
        return self.text().encode("utf-8", "surrogatepass")


def damage_json(document: Document, random: Random, least_depth: int = 1) -> str:
    """Damage a document once; return what was done, for people.

    Parameters
    ----------
    document : Document
        Changed in place.
    random : random.Random
        Where choices come from.
    least_depth : int
        How far from the top is looked for a spot at least, where there is one.
    """
    for _ in range(20):
        spot = _chosen(document.tree, random, least_depth)
        if spot is None:
            return "nothing to damage"
        damage = random.choice(_JSON_STEPS)(document, *spot, random)
        if damage:
            return damage
    return "nothing fitted"


def damage_bytes(content: bytes, random: Random, block: int = 1) -> tuple[bytes, str]:
    """Damage bytes once; return them and what was done.

    Parameters
    ----------
    content : bytes
        What to damage.
    random : random.Random
        Where choices come from.
    block : int
        What places and lengths are a multiple of.
    """
    data = bytearray(content)
    blocks = max(1, len(data) // block)
    at = random.randrange(blocks) * block
    length = min(random.choice((1, 1, 2, 4, 8, 64, 512)), blocks) * block
    kind = random.choice(
        ("flip", "cut", "insert", "drop", "repeat", "zero", "number", "noise", "swap", "grow")
    )
    if kind == "flip" and data:
        for _ in range(random.choice((1, 1, 3))):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "insert":
        data[at:at] = random.randbytes(length)
    elif kind == "drop":
        del data[at : at + length]
    elif kind == "repeat":
        data[at:at] = data[at : at + length]
    elif kind == "zero":
        data[at : at + length] = bytes(len(data[at : at + length]))
    elif kind == "number":
        number = int(random.choice([value for value in NUMBERS if isinstance(value, int)]))
        data[at : at + 8] = (number & ((1 << 64) - 1)).to_bytes(8, random.choice(("little", "big")))
    elif kind == "noise":
        data[at : at + length] = random.randbytes(len(data[at : at + length]))
    elif kind == "swap":
        other = random.randrange(blocks) * block
        data[at : at + length], data[other : other + length] = (
            data[other : other + length],
            data[at : at + length],
        )
    else:
        data += random.choice((b"\0", random.randbytes(1), bytes(512), bytes(content[:4096])))
    return bytes(data), f"{kind} at {at} of {len(content)}"


def _spots(tree: Any) -> Iterator[tuple[Any, Any]]:
    keys: Any = tree.keys() if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _spots(tree[key])


def _chosen(tree: Any, random: Random, least_depth: int) -> tuple[Any, Any] | None:
    """A spot by a walk from the top, so that a short table is damaged as often as a long one."""
    here, depth = tree, 1
    if not isinstance(here, dict | list) or not here:
        return None
    while True:
        key = random.choice(list(here)) if isinstance(here, dict) else random.randrange(len(here))
        below = here[key]
        open_ = isinstance(below, dict | list) and bool(below)
        if not open_ or (depth >= least_depth and random.random() < 0.2):
            return here, key
        here, depth = below, depth + 1


def _to_other(_: Document, place: Any, key: Any, random: Random) -> str:
    place[key] = copy.deepcopy(random.choice(OTHERS))
    return f"{key!r} becomes {place[key]!r}"


def _to_number(_: Document, place: Any, key: Any, random: Random) -> str:
    if isinstance(place[key], bool) or not isinstance(place[key], int | float):
        return ""
    before = place[key]
    near = (before + 1, before - 1, before * 2, before // 2, -before)
    place[key] = random.choice((*NUMBERS, *near, *near))
    return f"{key!r} {before} becomes {place[key]}"


def _to_literal(_: Document, place: Any, key: Any, random: Random) -> str:
    place[key] = Raw(random.choice(LITERALS))
    return f"{key!r} becomes {place[key].text[:30]}"


def _drop(_: Document, place: Any, key: Any, random: Random) -> str:  # noqa: ARG001 - one signature for all steps
    del place[key]
    return f"{key!r} is dropped"


def _extra(_: Document, place: Any, key: Any, random: Random) -> str:
    if isinstance(place, dict):
        name = random.choice((str(key) + "x", "__proto__", "", "é", "layers", "file", "[row]"))
        place[name] = copy.deepcopy(random.choice((place[key], *OTHERS)))
        return f"{name!r} is added beside {key!r}"
    place.insert(random.randrange(len(place) + 1), copy.deepcopy(place[key]))
    return f"item {key} comes twice"


def _swap(document: Document, place: Any, key: Any, random: Random) -> str:
    """Exchange two values that have one key's name: engines' files, shapes, references."""
    same = [
        (other, name)
        for other, name in document.spots()
        if type(other[name]) is type(place[key])
        and (name == key or (isinstance(name, int) and isinstance(key, int)))
        and other[name] != place[key]
        and not isinstance(place[key], dict | list | bool)
    ]
    if not same:
        return ""
    other, name = random.choice(same)
    place[key], other[name] = other[name], place[key]
    return f"{key!r}: {place[key]!r} and {other[name]!r} are swapped"


def _alias(document: Document, place: Any, key: Any, random: Random) -> str:
    """Take the value of another spot with that key: two names of one thing."""
    same = [parent[name] for parent, name in document.spots() if name == key and parent[name] != place[key]]
    if not same:
        return ""
    place[key] = copy.deepcopy(random.choice(same))
    return f"{key!r} becomes {str(place[key])[:60]}"


def _everywhere(document: Document, place: Any, key: Any, random: Random) -> str:
    """Change each equal number or text: sizes that still fit one another."""
    before = place[key]
    if isinstance(before, bool) or not isinstance(before, int | str):
        return ""
    after: Any = (
        random.choice((before + 1, before * 2, *NUMBERS)) if isinstance(before, int) else before + "_"
    )
    for other, name in document.spots():
        if type(other[name]) is type(before) and other[name] == before:
            other[name] = after
    return f"every {before!r} becomes {after!r}"


def _nest(_: Document, place: Any, key: Any, random: Random) -> str:
    depth = random.choice((10, 100, 900, 5000, 100_000))
    left, right = random.choice((("[", "]"), ('{"a":', "}")))
    place[key] = Raw(left * depth + "0" + right * depth)
    return f"{key!r} becomes {depth} times {left}"


def _grow(_: Document, place: Any, key: Any, random: Random) -> str:
    times = random.choice((16, 300, 1000, 5000))
    value = place[key]
    if isinstance(value, str):
        place[key] = (value or "x") * min(times * 10, MAX_GROWN // max(1, len(value)))
    elif isinstance(value, list) and value:
        place[key] = value * max(1, min(times, MAX_GROWN // max(1, len(json.dumps(value, default=str)))))
    elif isinstance(value, dict) and value:
        first = next(iter(value.values()))
        times = min(times, MAX_GROWN // max(1, len(json.dumps(first, default=str))))
        place[key] = {**value, **{f"more{number}": first for number in range(times)}}
    else:
        return ""
    return f"{key!r} grows"


def _twice(document: Document, place: Any, key: Any, random: Random) -> str:
    if not isinstance(key, str) or not isinstance(place, dict):
        return ""
    word, other = json.dumps(key) + ": ", json.dumps(random.choice(OTHERS))
    document.after(lambda text: text.replace(word, f"{word}{other}, {word}", 1))
    return f"{key!r} is named twice"


def _path(_: Document, place: Any, key: Any, random: Random) -> str:
    if key in ("file", "tokenizer"):
        place[key] = random.choice(PATHS)
        return f"{key!r} becomes {place[key][:40]!r}"
    if isinstance(place, dict) and isinstance(place[key], dict) and "sha256" in place[key]:
        name = random.choice(PATHS)
        place[name] = place[key] if random.random() < 0.5 else place.pop(key)
        return f"the file {key!r} becomes {name[:40]!r}"
    return ""


def _reference(_: Document, place: Any, key: Any, random: Random) -> str:
    value = place[key]
    if not isinstance(value, str) or not value.startswith(HEADS[:3]):
        return ""
    head, _, name = value.partition(":")
    kind = random.choice(("mark", "head", "plain", "name"))
    if kind == "mark":
        place[key] = value + random.choice(MARKS)
    elif kind == "head":
        place[key] = random.choice(HEADS) + name
    elif kind == "plain":
        place[key] = re.sub(r"\[.*?\]", "", value)
    else:
        place[key] = (
            f"{head}:{random.choice(('kv', 'latents', 'hidden', 'x', 'seeds', 'gain', '', 'x' * 300))}"
        )
    return f"{value!r} becomes {place[key][:60]!r}"


_STEPS: tuple[tuple[int, Callable[[Document, Any, Any, Random], str]], ...] = (
    (2, _to_other), (6, _to_number), (2, _to_literal), (2, _drop), (1, _extra), (4, _swap), (3, _alias),
    (5, _everywhere), (1, _nest), (1, _grow), (1, _twice), (2, _path), (4, _reference),
)  # fmt: skip
_JSON_STEPS = [step for weight, step in _STEPS for _ in range(weight)]
