"""A reader of eighty lines, written from the ten points that docs/engine-format.md begins with and nothing of Seko's.

It opens, lists and replays an artifact. What the ten points leave out would show here.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}


class SmallReader:
    """Points 1 to 9 of the page, for one row of a CPU artifact of the backend `compile`."""

    def __init__(self, folder: Path) -> None:
        self.manifest = table = json.loads((folder / "manifest.json").read_text("utf-8"))
        assert table["format_version"] == 1  # 1
        assert table.get("ranks", 1) == 1
        self.video = table["workload"]
        assert self.video["kind"] == "video"
        for path, entry in table["files"].items():  # 2
            data = (folder / path).read_bytes()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["size"], entry["sha256"]), path
        shards = {file: tensors(folder / file) for file in {entry["file"] for entry in table["weights"]}}  # 3
        self.weights = {entry["name"]: shards[entry["file"]][entry["name"]] for entry in table["weights"]}
        self.buffers = {  # 4
            buffer["name"]: torch.zeros(buffer["shape"], dtype=getattr(torch, buffer["dtype"]))
            for buffer in table["buffers"]
        }
        self.engines = {  # 5
            engine["name"]: torch.export.load(folder / engine["file"]).module(check_guards=False)
            for engine in table["engines"]
        }

    def run(self, program: str, number: int = 0) -> None:
        values: dict[str, torch.Tensor] = {}
        for call in self.manifest["programs"][program]:  # 6
            results = self.engines[call["engine"]](
                *(self.tensor(ref, values, number) for ref in call["inputs"])
            )
            for ref, result in zip(call["outputs"], results, strict=True):
                if ref.startswith("value:"):
                    values[ref.removeprefix("value:")] = result
                else:
                    self.tensor(ref, values, number).copy_(result)

    def tensor(self, ref: str, values: dict[str, torch.Tensor], number: int) -> torch.Tensor:  # 7
        kind, name, indices = re.fullmatch(r"(\w+):([^\[]+)(.*)", ref).groups()  # type: ignore[union-attr]
        tensor = {"weight": self.weights, "buffer": self.buffers, "value": values}[kind][name]
        for index in re.findall(r"\[(\w+)\]", indices):
            tensor = tensor[number if index == "pass" else int(index)]
        return tensor

    def chunk(self, first: int, seed: int) -> torch.Tensor:
        stream, passes = self.video["stream"], self.video["schedule"]["denoise_passes"]
        sink, ring, count = stream["sink_frames"], stream["ring_frames"], stream["chunk_frames"]
        frames = range(first, first + count)
        slots = [frame if frame < sink else sink + (frame - sink) % ring for frame in frames]
        valid = stream["frame_tokens"] * min(first + count, sink + ring)
        for name, value in (
            ("seeds", [seed]),
            ("frames", [[*frames]]),
            ("write_slots", [slots]),
            ("valid_tokens", [valid]),
            ("conditioning_frames", [0]),
        ):
            if name in self.buffers:
                self.buffers[name].copy_(torch.tensor(value))  # 9
        for program, number in (
            ("begin", 0),
            *(("denoise", number) for number in range(passes)),
            ("context", passes),
        ):  # 8
            self.run(program, number)
        return self.buffers[self.video["output"]].clone()


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Point 3: the tensors of a safetensors file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    by_name = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            flat = torch.frombuffer(
                bytearray(data[start + begin : start + end]), dtype=DTYPES[entry["dtype"]]
            )
            by_name[name] = flat.reshape(entry["shape"])
    return by_name


@pytest.fixture(scope="module")
def reader(small_artifact: Path) -> SmallReader:
    return SmallReader(small_artifact)


def test_it_lists_engines_and_buffers(reader: SmallReader) -> None:
    assert {*reader.engines} == {"embed", "block", "head", "prompt", "prompt_kv", "noise", "advance"}
    roles: dict[str, list[str]] = {}
    for buffer in reader.manifest["buffers"]:
        roles.setdefault(buffer["role"], []).append(buffer["name"])
    assert {*roles["cache"]} == {"kv.k_codes", "kv.k_scales", "kv.v_codes", "kv.v_scales", "kv.slot_frames"}
    assert {*roles} == {"cache", "session", "host", "state"}


def test_it_makes_the_recorded_chunks(reader: SmallReader, small_artifact: Path) -> None:
    """Point 10. The last recorded chunk is one that has evicted frames."""
    golden: dict[str, Any] = reader.video["golden"]
    recorded = tensors(small_artifact / golden["file"])
    reader.buffers["text.embeddings"].copy_(recorded[golden["text"]])
    reader.run("prompt")
    stream = reader.video["stream"]
    assert (golden["chunks"][-1] + 1) * stream["chunk_frames"] > stream["sink_frames"] + stream["ring_frames"]
    for number in range(golden["chunks"][-1] + 1):
        latents = reader.chunk(number * stream["chunk_frames"], golden["seeds"][0]).double()
        if number in golden["chunks"]:
            truth = recorded[f"latents.{number}"].double()
            assert float((latents - truth).norm() / truth.norm()) <= golden["tolerance"]


def test_the_page_begins_with_ten_points_and_names_this_reader() -> None:
    page = (Path(__file__).parents[2] / "docs" / "engine-format.md").read_text(encoding="utf-8")
    begin = page.split("\n## ")[0]
    assert re.findall(r"^(\d+)\. ", begin, re.MULTILINE) == [str(number) for number in range(1, 11)]
    assert f"`{Path(__file__).relative_to(Path(__file__).parents[2])}`" in begin
