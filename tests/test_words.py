"""The glossary: words that mislead stay out of public names of the three packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels/seko_kernels", "runtime/seko_runtime", "seko_export")

# A word, or words in a row, of a name in snake_case or CamelCase; and what to say instead.
BANNED = {
    "turns": "rope_cos_sin, or a lock",
    "places": "batch_indices, kept_slots, positions",
    "given": "conditioning (frames of a start picture), inputs (of the caller)",
    "shaken": "perturbed",
    "segment": "chunk",
    "segments": "chunks",
    "kinds": "layer_groups",
    "layer_kind": "layer_group",
    "window_frames": "cache_frames",
    "window_tokens": "cache_tokens",
    "window_slots": "cache_frames",
    "stream_cache": "offload_cache",
    "streamed_cache": "offloaded_cache",
    "layer_stream": "cache_offload",
    "plan": "estimate; a plan is TensorRT's",
    "plans": "estimates; plans are TensorRT's",
}
# Of functions, classes and properties alone: as arguments the engines' inputs have this name.
BANNED_ALONE = {"frame": "latent_frame or video_frame", "frames": "latent_frames or video_frames"}

ENGINE_INPUT = "a `forward` takes it by the name of the engine's input, which manifests hold"
SNAPSHOT = "a snapshot's field"
COMMAND = "the command `seko-export plan`, and what belongs to it"
TENSORRT = "TensorRT's serialised engine"
ALLOWED = {
    "given_frames": ENGINE_INPUT,
    "given_latents": f"{ENGINE_INPUT}; and what `open_session` called conditioning_latents before",
    "places": ENGINE_INPUT,
}
ALLOWED_IN = {
    ("runtime/seko_runtime/video/snapshot.py", "given"): SNAPSHOT,
    ("seko_export/families/layers/block.py", "given"): ENGINE_INPUT,
    ("seko_export/families/layers/causal_dit.py", "given"): ENGINE_INPUT,
    ("seko_export/families/layers/fused_block.py", "given"): ENGINE_INPUT,
    ("seko_export/families/lingbot/camera.py", "given"): ENGINE_INPUT,
    ("seko_export/families/lingbot/condition.py", "given"): ENGINE_INPUT,
    ("seko_export/families/seko_talk/audio.py", "given"): ENGINE_INPUT,
    ("seko_export/families/seko_talk/picture.py", "given"): ENGINE_INPUT,
    ("runtime/seko_runtime/errors.py", "PlanVersionError"): TENSORRT,
    ("seko_export/errors.py", "PlanError"): TENSORRT,
    ("seko_export/errors.py", "PlanFormError"): TENSORRT,
    ("seko_export/__init__.py", "plan"): COMMAND,
    ("seko_export/cli/commands.py", "plan"): COMMAND,
    ("seko_export/cli/commands.py", "of_plan"): COMMAND,
    ("seko_export/options/declaration.py", "plan"): COMMAND,
}


def words_of(name: str) -> str:
    """Return a name's words in lower case, with ``_`` between them and at both ends."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return f"_{snake.strip('_')}_"


def public_names(tree: ast.AST, *, private: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield public functions, classes, arguments and fields below a node, and whether each is a definition."""
    for node in ast.iter_child_nodes(tree):
        inner = private
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = private or (node.name.startswith("_") and not node.name.startswith("__"))
            if not inner:
                yield node.name, True
        elif isinstance(node, ast.arg) and not private:
            yield node.arg, False
        elif isinstance(node, ast.AnnAssign) and isinstance(tree, ast.ClassDef) and not private:
            assert isinstance(node.target, ast.Name)
            yield node.target.id, False
        yield from public_names(node, private=inner)


def faults(path: str, tree: ast.AST) -> list[str]:
    """Return a sentence for each public name of a file that has a banned word."""
    said = []
    names = [(Path(path).stem, True), *public_names(tree)]
    for name, definition in dict.fromkeys(names):
        if name.startswith("_") or name in ALLOWED or (path, name) in ALLOWED_IN or "tensorrt" in path:
            continue
        words = words_of(name)
        found = {word: better for word, better in BANNED.items() if f"_{word}_" in words}
        if definition and name in BANNED_ALONE:
            found[name] = BANNED_ALONE[name]
        said += [f"{path}: {name} has {word!r}; say {better}" for word, better in found.items()]
    return said


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_have_no_banned_word(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = [
        fault
        for file in files
        for fault in faults(file.relative_to(ROOT).as_posix(), ast.parse(file.read_text()))
    ]
    assert not found, "\n".join(found)


def test_each_exception_is_still_needed() -> None:
    held = {
        (file.relative_to(ROOT).as_posix(), name)
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        for name, _ in public_names(ast.parse(file.read_text()))
    }
    assert held >= set(ALLOWED_IN)
    assert {name for _, name in held} >= set(ALLOWED)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("def read(rope_turns): ...", "turns"),
        ("class GivenFrames: ...", "given"),
        ("def frames(self): ...", "frames"),
        ("class A:\n    stream_cache: bool", "stream_cache"),
        ("class A:\n    def of(self, *, layer_kind): ...", "layer_kind"),
    ],
)
def test_a_banned_word_is_found(source: str, word: str) -> None:
    (fault,) = faults("seko_export/some.py", ast.parse(source))
    assert repr(word) in fault


@pytest.mark.parametrize(
    "source",
    ["def returns(frames): ...", "def _given(): ...", "def forward(self, given_frames): ...", "given = 1"],
)
def test_other_names_pass(source: str) -> None:
    assert not faults("seko_export/some.py", ast.parse(source))
