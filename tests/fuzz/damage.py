"""Strategies that damage JSON and bytes. They know no format of ours but the words of references."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]

NUMBERS = (
    0, -1, 1, 2, 3, 4, 5, 7, 8, 16, 18, 127, 255, 256, 4095, 4096, 4097, 65535, 1 << 16, (1 << 31) - 1, 1 << 31,
    1 << 32, 1 << 48, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 31), -(1 << 63), 10**30,
    0.5, -0.0, 1e-320, 1e308, -1e308, 3.0,
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    None, True, False, "", "x", "0", [], {}, [[]], [None], [0], {"a": 1}, {"": None}, 1.5, "\x00", "\u202e", "ä", "🙂",
)  # fmt: skip
LITERALS = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "-0", "0" * 20, "1" * 5000, "-" + "9" * 400, "1.", "01", "0x10",
    '"\\ud800"', '"\\u0000"', '"\x01"', "tru", "", ",", "}", "\u2028", "/**/1", "1e-9999", "0.1e1",
)  # fmt: skip
PATHS = (
    "../x", "/etc/passwd", "a/../b", "./a", "a//b", "a/", "manifest.json", "manifest.sig", "a\\b", "a\nb", "weights",
    "engines", "x" * 255, "x" * 256, "/".join("d" * 200 for _ in range(6)), "/".join(["d"] * 500), "ä", "\ud800",
    "numpy.py", "engines/../manifest.json", ".", "..", "CON", "a\x7f",
)  # fmt: skip
MARKS = ("[pass]", "[row]", "[bucket]", "[0]", "[1]", "[00]", "[-1]", "[999999999]", "[0][row]", " ", ".")
REFERENCE = re.compile(r"(weight|buffer|value):")
MAX_GROWN = 400_000  # letters that one change may add
_RAW = re.compile(r'"@raw(\d+)@"')


class Raw(str):
    """A piece of JSON text that `json.dumps` would not write."""


def encoded(tree: Any, *, repeated: str = "") -> bytes:
    """The JSON text of a tree, with raw pieces in it and one key twice; lone surrogates as they come."""
    raws: list[str] = []

    def marked(value: Any) -> Any:
        if isinstance(value, Raw):
            raws.append(value)
            return f"@raw{len(raws) - 1}@"
        if isinstance(value, dict):
            return {key: marked(below) for key, below in value.items()}
        return [marked(below) for below in value] if isinstance(value, list) else value

    text = _RAW.sub(lambda match: raws[int(match[1])], json.dumps(marked(tree)))
    if repeated:
        word = json.dumps(repeated) + ": "
        text = text.replace(word, f"{word}null, {word}", 1)
    return text.encode("utf-8", "surrogatepass")


@st.composite
def damaged_json(draw: Draw, content: bytes, most: int = 1) -> bytes:
    """JSON text after at most so many changes, of which one may write a key twice."""
    tree = json.loads(content)
    for _ in range(draw(st.integers(1, most))):
        change_json(draw, tree)
    key = draw(st.sampled_from(sorted(tree))) if isinstance(tree, dict) and tree else ""
    return encoded(tree, repeated=key if draw(st.integers(0, 15)) == 15 else "")


def change_json(draw: Draw, tree: Any) -> None:
    """Change one value, here or wherever its equal stands; exchange it, drop it, or put another one beside it."""
    spot = _drawn_spot(draw, tree)
    if spot is None:
        return
    place, key = spot
    old = place[key]
    alike = [
        (other, name)
        for other, name in _spots(tree)
        if type(other[name]) is type(old)
        and (name == key or (isinstance(name, int) and isinstance(key, int)))
    ]
    kind = draw(st.sampled_from(("here", "here", "everywhere", "everywhere", "swap", "drop", "add")))
    if kind == "drop":
        del place[key]
    elif kind == "add" and isinstance(place, dict):
        place[draw(st.sampled_from((f"{key}x", "__proto__", "", "é", *PATHS)))] = copy.deepcopy(old)
    elif kind == "add":
        place.insert(draw(st.integers(0, len(place))), copy.deepcopy(old))
    elif kind == "swap" and not isinstance(old, dict | list):
        other, name = draw(st.sampled_from(alike))
        place[key], other[name] = other[name], old
    else:
        new = draw(st.one_of(_values(old), st.sampled_from([other[name] for other, name in alike])))
        for other, name in alike if kind == "everywhere" else [(place, key)]:
            if other[name] == old:
                other[name] = copy.deepcopy(new)


def _values(old: Any) -> st.SearchStrategy[Any]:
    """What may stand in a value's place: mostly of its type."""
    others = st.one_of(st.sampled_from(OTHERS), st.sampled_from([*map(Raw, LITERALS), *_nested()]))
    if isinstance(old, bool) or old is None:
        return others
    if isinstance(old, int | float):
        near = st.sampled_from((old + 1, old - 1, old * 2, old * 3, old // 2, -old))
        return st.one_of(near, near, st.sampled_from(NUMBERS), st.sampled_from(NUMBERS), others)
    if isinstance(old, str):
        mine = [
            st.sampled_from(PATHS),
            st.just((old or "x") * min(5000, MAX_GROWN // max(1, len(old)))),
            st.text(),
        ]
        if REFERENCE.match(old):
            bare = re.sub(r"\[.*?\]", "", old)
            mine += [
                st.sampled_from([old + mark for mark in MARKS]),
                st.sampled_from([bare + mark for mark in MARKS]),
            ]
        return st.one_of(*mine, others)
    if isinstance(old, list) and old:
        size = max(1, min(300, MAX_GROWN // len(json.dumps(old, default=str))))
        return st.one_of(
            st.permutations(old), st.sampled_from(([], old[1:], [1, *old], old[:1], old * size)), others
        )
    if isinstance(old, dict) and old:
        first = next(iter(old.values()))
        size = min(5000, MAX_GROWN // max(1, len(json.dumps(first, default=str))))
        return st.one_of(st.just({**old, **{f"more{number}": first for number in range(size)}}), others)
    return others


def _nested() -> list[Raw]:
    pairs = (("[", "]"), ('{"a":', "}"))
    return [Raw(left * depth + "0" + right * depth) for left, right in pairs for depth in (10, 900, 100_000)]


def _spots(tree: Any) -> list[tuple[Any, Any]]:
    """Every value of the tree as its container and its key there."""
    keys: Any = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    return [spot for key in keys for spot in ((tree, key), *_spots(tree[key]))]


def _drawn_spot(draw: Draw, tree: Any) -> tuple[Any, Any] | None:
    """A spot by a walk from the top, so that a short table is damaged as often as a long one."""
    here = tree
    while isinstance(here, dict | list) and here:
        key = draw(st.sampled_from(list(here) if isinstance(here, dict) else range(len(here))))
        below = here[key]
        if not isinstance(below, dict | list) or not below or draw(st.integers(0, 4)) == 4:
            return here, key
        here = below
    return None


@st.composite
def damaged_bytes(draw: Draw, content: bytes, block: int = 1) -> bytes:
    """Bytes after one change; places and lengths are multiples of a block."""
    blocks = max(1, len(content) // block)
    at, other = (block * draw(st.integers(0, blocks - 1)) for _ in range(2))
    size = block * draw(st.sampled_from((0, 1, 2, 4, 8, 64, 512)))
    number = draw(st.sampled_from([n & ((1 << 64) - 1) for n in NUMBERS if isinstance(n, int)]))
    new: bytes = draw(
        st.one_of(
            st.sampled_from((b"", bytes(size), content[other : other + size])), st.binary(min_size=1, max_size=64),
            st.sampled_from((number.to_bytes(8, "little"), number.to_bytes(8, "big"))),
        )
    )  # fmt: skip
    end: int = draw(st.sampled_from((at + len(new), at + len(new), at, at + size, len(content))))
    return content[:at] + new + content[end:]


@st.composite
def damaged_header(draw: Draw, content: bytes) -> bytes:
    """A safetensors file whose JSON header was changed; its length is right again, mostly."""
    size = int.from_bytes(content[:8], "little")
    header: bytes = draw(damaged_json(content[8 : 8 + size]))
    header += b" " * (-len(header) % 8)
    said: int = draw(st.sampled_from((*[len(header)] * 16, 0, 1, 1 << 24, 1 << 40, (1 << 64) - 1)))
    return said.to_bytes(8, "little") + header + content[8 + size :]
