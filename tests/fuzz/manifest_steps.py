"""Changes of a manifest that keep it a manifest: they get past the reader, to what compares its tables."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from random import Random
from typing import Any

from .damage import NUMBERS, Document

Tree = dict[str, Any]
SIZES = tuple(number for number in NUMBERS if isinstance(number, int) and number > 0)
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "uint8", "int8", "int32", "int64", "bool")
ROLES = ("cache", "session", "host", "state", "lane")


def change_manifest(document: Document, random: Random) -> str:
    """Change a manifest once, with the right types; return what was done, for people."""
    for _ in range(20):
        change = random.choice(_STEPS)(document.tree, random)
        if change:
            return change
    return "nothing fitted"


def _number_of(tree: Tree, random: Random) -> str:
    """A number of the small tables that the host reckons with."""
    table = random.choice([table for table in (tree, *tree["workload"].values()) if isinstance(table, dict)])
    keys = [
        key for key, value in table.items() if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    if not keys:
        return ""
    key = random.choice(keys)
    before = table[key]
    table[key] = random.choice((before + 1, max(1, before - 1), before * 2, before * 3, *SIZES, 0))
    return f"{key} {before} becomes {table[key]}"


def _engine_files(tree: Tree, random: Random) -> str:
    first, second = random.sample(tree["engines"], 2)
    first["file"], second["file"] = second["file"], first["file"]
    return f"files of engines {first['name']} and {second['name']} are swapped"


def _called_engine(tree: Tree, random: Random) -> str:
    call = _call(tree, random)
    if call is None:
        return ""
    before, call["engine"] = call["engine"], random.choice(tree["engines"])["name"]
    return f"a call of {before} goes to {call['engine']}"


def _signature(tree: Tree, random: Random) -> str:
    """A signature of an engine, with what it is fed left as it is."""
    engine = random.choice(tree["engines"])
    side = engine[random.choice(("inputs", "outputs"))]
    if not side:
        return ""
    spec = random.choice(side)
    step = random.choice(("dtype", "shape", "rank", "drop", "swap", "mutates"))
    if step == "dtype":
        spec["dtype"] = random.choice(DTYPES)
    elif step == "shape" and spec["shape"]:
        spec["shape"][random.randrange(len(spec["shape"]))] = random.choice(SIZES)
    elif step == "rank":
        spec["shape"] = random.choice((spec["shape"][1:], [1, *spec["shape"]], []))
    elif step == "drop":
        side.remove(spec)
    elif step == "swap":
        random.shuffle(side)
    else:
        engine["mutates"] = random.choice(([], [spec["name"] for spec in engine["inputs"]]))
    return f"engine {engine['name']}: {step} of {spec['name']}"


def _shape(tree: Tree, random: Random) -> str:
    """A buffer's or weight's shape, and every signature that is equal to it."""
    table = tree[random.choice(("buffers", "buffers", "weights"))]
    if not table:
        return ""
    spec = random.choice(table)
    before = list(spec["shape"])
    if not before:
        return ""
    after = list(before)
    axis = random.randrange(len(after))
    after[axis] = random.choice((after[axis] + 1, after[axis] * 2, max(1, after[axis] - 1), *SIZES))
    cut = spec.get("row_axis") == 1
    for other in (*tree["buffers"], *tree["weights"], *_specs(tree)):
        if other["shape"] == before:
            other["shape"] = list(after)
        elif cut and axis and other["shape"] == before[1:]:
            other["shape"] = list(after[1:])
    return f"each {before} becomes {after}"


def _dtype(tree: Tree, random: Random) -> str:
    before, after = random.sample(DTYPES, 2)
    specs = [
        entry for entry in (*tree["buffers"], *tree["weights"], *_specs(tree)) if entry["dtype"] == before
    ]
    for spec in specs:
        spec["dtype"] = after
    return f"each {before} becomes {after}" if specs else ""


def _buffer(tree: Tree, random: Random) -> str:
    buffer = random.choice(tree["buffers"])
    step = random.choice(("role", "row_axis", "rank_axis", "device_layers", "rename", "twin"))
    if step == "role":
        buffer["role"] = random.choice(ROLES)
    elif step in ("row_axis", "rank_axis"):
        buffer[step] = random.choice((0, 1, 2, 3, 16))
    elif step == "device_layers":
        buffer["device_layers"] = random.choice((0, 1, 2, 3, 4, 5, 4096))
    elif step == "rename":
        buffer["name"] += "x"
    else:
        tree["buffers"].append({**copy.deepcopy(buffer), "name": buffer["name"] + ".twin"})
    return f"buffer {buffer['name']}: {step}"


def _calls(tree: Tree, random: Random) -> str:
    """The order and number of a program's calls."""
    name = random.choice(list(tree["programs"]))
    calls = tree["programs"][name]
    step = random.choice(("shuffle", "drop", "twice", "empty", "take", "many"))
    if step == "shuffle":
        random.shuffle(calls)
    elif step == "drop" and calls:
        calls.pop(random.randrange(len(calls)))
    elif step == "twice" and calls:
        calls.append(copy.deepcopy(random.choice(calls)))
    elif step == "empty":
        calls.clear()
    elif step == "take":
        tree["programs"][name] = copy.deepcopy(tree["programs"][random.choice(list(tree["programs"]))])
    else:
        calls *= random.choice((2, 30, 300))
    return f"program {name}: {step}"


def _index(tree: Tree, random: Random) -> str:
    """Another index behind a reference."""
    call = _call(tree, random)
    side = random.choice(("inputs", "outputs"))
    indexed = [] if call is None else [at for at, ref in enumerate(call[side]) if "[" in ref]
    if call is None or not indexed:
        return ""
    at = random.choice(indexed)
    before, index = call[side][at], random.choice(("0", "1", "2", "4095", "pass", "row", "bucket"))
    call[side][at] = re.sub(r"\[\w+\]", f"[{index}]", before, count=1)
    return f"{side}[{at}] of {call['engine']}: {before} becomes {call[side][at]}"


def _references(tree: Tree, random: Random) -> str:
    """Another reference of the same program in one's place: of the right shape, if chance wills."""
    call = _call(tree, random)
    other = _call(tree, random)
    if call is None or other is None:
        return ""
    side = random.choice(("inputs", "outputs"))
    references = [*other["inputs"], *other["outputs"]]
    if not call[side] or not references:
        return ""
    at = random.randrange(len(call[side]))
    before, call[side][at] = call[side][at], random.choice(references)
    return f"{side}[{at}] of {call['engine']}: {before} becomes {call[side][at]}"


def _passes(tree: Tree, random: Random) -> str:
    """Another number of passes, with as many times."""
    passes = random.choice((1, 2, 3, 5, 100, 1024))
    number = random.choice((0.0, 1.0, 1e308, -1.0, 1e-320))
    tree["workload"]["schedule"].update(
        denoise_passes=passes, timesteps=[number] * passes, sigmas=[number] * passes
    )
    return f"{passes} passes at {number}"


def _rings(tree: Tree, random: Random) -> str:
    """A kind of layers with a ring of its own, and its two buffers."""
    stream = tree["workload"]["stream"]
    size = random.choice((stream["chunk_frames"], stream["ring_frames"], 1, 1 << 20))
    stream["rings"] = {"short": size}
    for name in ("write_slots", "valid_tokens"):
        buffer = next((entry for entry in tree["buffers"] if entry["name"] == name), None)
        if buffer is not None and random.random() < 0.8:
            tree["buffers"].append({**copy.deepcopy(buffer), "name": f"{name}.short"})
    return f"a ring of {size} beside"


def _buckets(tree: Tree, random: Random) -> str:
    if not tree.get("pool"):
        return ""
    tree["pool"]["buckets"] = random.choice(([1], [1, 2], [2, 4], [1, 2, 4, 8], [1, 2, 3], [4], [1 << 31]))
    return f"buckets {tree['pool']['buckets']}"


def _table(tree: Tree, random: Random) -> str:
    key = random.choice(("text", "video", "golden", "pool"))
    table = tree if key == "pool" else tree["workload"]
    if table.get(key) is None:
        return ""
    table[key] = None
    return f"{key} is gone"


def _format(tree: Tree, random: Random) -> str:
    tree["format_version"] = random.choice((0, 1, 2, 10))
    return f"format {tree['format_version']}"


def _golden(tree: Tree, random: Random) -> str:
    golden = tree["workload"].get("golden")
    if not golden:
        return ""
    key, value = random.choice(
        (("chunks", [0]), ("chunks", [7]), ("chunks", [0, 99_999]), ("seeds", [0] * 6), ("seeds", [(1 << 62) - 1]),
         ("cache_step", 1), ("cache_step", 1 << 40), ("video_step", 1), ("video_step", 1 << 40), ("text", "nothing"),
         ("prompt", None), ("prompt", "red " * 50), ("reference", "text"), ("tolerance", -1), ("bounds", []))
    )  # fmt: skip
    golden[key] = value
    return f"golden.{key} becomes {value}"


def _call(tree: Tree, random: Random) -> Any:
    calls = tree["programs"][random.choice(list(tree["programs"]))]
    return random.choice(calls) if calls else None


def _specs(tree: Tree) -> list[Any]:
    return [spec for engine in tree["engines"] for side in ("inputs", "outputs") for spec in engine[side]]


_WEIGHTED: tuple[tuple[int, Callable[[Tree, Random], str]], ...] = (
    (5, _number_of), (2, _engine_files), (2, _called_engine), (3, _signature), (5, _shape), (1, _dtype), (3, _buffer),
    (3, _calls), (3, _index), (4, _references), (1, _passes), (1, _rings), (1, _buckets), (1, _table), (1, _format),
    (2, _golden),
)  # fmt: skip
_STEPS = [step for weight, step in _WEIGHTED for _ in range(weight)]
