"""A small model that has the programs and buffers of speech, by loops over rows: a row's bits do not depend on others.

A patch and its sound depend on every token and patch that the row holds in its places, on the seed, on the decoder's
state, and on nothing else. `alone` says the same without any of the runtime. No tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seko_export.artifact.manifest_json import manifest_json
from seko_runtime.backends.memory import Memory
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.executor.resolved import Programs
from seko_runtime.format.manifest import Buffer, Call, EngineSpec, KvPool, Pool, Target, TensorSpec, Weight
from seko_runtime.sessions.loaded import Loaded
from seko_runtime.speech import contract as c
from seko_runtime.speech.local_rows import open_speech_rows
from seko_runtime.speech.manifest import (
    KIND,
    Golden,
    GoldenBounds,
    Patch,
    Solver,
    SpeechLimits,
    SpeechManifest,
    SpeechWorkload,
    VoiceEncoder,
)
from seko_runtime.speech.pool import SpeechPool
from seko_runtime.speech.prompts import SpeechMarks, SpeechPrompt, assemble
from tests.runtime import toy
from tests.support.manifest_schema import check_manifest

BUCKETS, SESSIONS = (1, 2, 4), 4
READ_LENGTHS, PREFILL_TOKENS, PLACES = (8, 16, 32), (4, 8), 75
P, C, SOUND, STATE, VAE = 2, 1, 3, 2, 2  # latents, channels, samples of a patch; numbers of a state
VOCABULARY = 64
MARKS = SpeechMarks(60, 61, 62)
VOICE = VoiceEncoder(patches=2, patch_samples=4, sample_rate=16_000)
PATCH = Patch(latents=P, channels=C, samples=SOUND, sample_rate=48_000)
SHAPES: dict[str, tuple[tuple[int, ...], str, str, int]] = {
    "k": ((2, PLACES, 1), "float32", "cache", 1),
    c.BASE_STATE: ((SESSIONS + 1, STATE), "float32", "cache", 0),
    c.RESIDUAL_STATE: ((SESSIONS + 1, STATE), "float32", "cache", 0),
    c.LAST_PATCH: ((SESSIONS + 1, P, C), "float32", "cache", 0),
    c.VAE_STATES: ((SESSIONS + 1, VAE), "float32", "cache", 0),
    **{
        name: ((BUCKETS[-1],), "float32" if name in (c.TEMPERATURE, c.GUIDANCE) else "int64", "host", 0)
        for name in (
            c.ROWS, c.STARTS, c.FIRST, c.COUNT, c.SEEDS, c.PATCH_NUMBERS, c.TEMPERATURE, c.GUIDANCE,
        )
    },
    **dict.fromkeys((c.PREFILL_ROWS, c.PREFILL_STARTS, c.PREFILL_FIRST, c.PREFILL_COUNT), ((1,), "int64", "host", 0)),
    c.IDS: ((PREFILL_TOKENS[-1],), "int64", "session", 0),
    c.IS_AUDIO: ((PREFILL_TOKENS[-1],), "bool", "session", 0),
    c.PROMPT_PATCHES: ((PREFILL_TOKENS[-1], P, C), "float32", "session", 0),
    c.LEAD_IN_PATCH: ((1, P, C), "float32", "session", 0),
    c.LEAD_IN_SAMPLES: ((1, SOUND), "float32", "session", 0),
    c.PATCH: ((BUCKETS[-1], P, C), "float32", "state", 0),
    c.STOP: ((BUCKETS[-1],), "uint8", "state", 0),
    c.STOP_LOGITS: ((BUCKETS[-1], 2), "float32", "state", 0),
    c.SAMPLES: ((BUCKETS[-1], SOUND), "float32", "state", 0),
    c.VOICE: ((1, VOICE.samples), "float32", "session", 0),
    c.VOICE_STATES: ((1, 1), "float32", "session", 0),
    c.VOICE_LATENTS: ((1, VOICE.patches * P, C), "float32", "session", 0),
}  # fmt: skip
STATE_NAMES = (c.BASE_STATE, c.RESIDUAL_STATE, c.LAST_PATCH)
TABLE = (np.arange(VOCABULARY, dtype=np.float32) / 7)[:, None]
Tensors = list[Any]


# The model, of one row, in numpy's float32.


def held_state(cached: np.ndarray) -> np.ndarray:
    """The state [STATE] of a row whose cache holds these values [n]."""
    weighted = np.float32(0)
    for place, value in enumerate(cached):
        weighted = np.float32(np.sin(weighted * np.float32(1.7) + value * np.float32(1 + place % 5)))
    return np.array([weighted, weighted * weighted], np.float32)


def first_patch(state: np.ndarray, last: np.ndarray, seed: int, number: int, heat: float) -> np.ndarray:
    """A patch [P, C] before the solver."""
    noise = np.random.default_rng([seed, number]).standard_normal((P, C)).astype(np.float32)
    mixed: np.ndarray = np.float32(heat) * noise + np.float32(0.3) * last + state[0]
    return mixed


def solved(patch: np.ndarray, guidance: float) -> np.ndarray:
    """A patch one solver step on."""
    return np.tanh(patch * np.float32(guidance) * np.float32(0.7))


def decoded(patch: np.ndarray, vae: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Samples [SOUND] and the decoder's next state [VAE]."""
    level = np.float32(patch.sum() + vae[0])
    return np.sin(np.arange(1, SOUND + 1, dtype=np.float32) * level), np.array(
        [level * 0.5, vae[1] + 1], np.float32
    )


def stops(state: np.ndarray) -> bool:
    """Whether the patch that is made of a state is the last."""
    return bool(state[0] > 0.8)


def token(number: int, is_audio: bool, patch: np.ndarray) -> np.float32:
    """What a row holds of a token of its prompt."""
    return np.float32(patch.sum()) if is_audio else TABLE[number, 0]


def alone(
    prompt: SpeechPrompt, limit: int, *, seed: int = 0, guidance: float = 2.0, temperature: float = 1.0
) -> list[np.ndarray]:
    """The sound of a prompt, patch by patch."""
    said = all_alone(prompt, limit, seed=seed, guidance=guidance, temperature=temperature)
    return [sound for sound, _ in said[0]]


def all_alone(
    prompt: SpeechPrompt, limit: int, *, seed: int = 0, guidance: float = 2.0, temperature: float = 1.0
) -> tuple[list[tuple[np.ndarray, np.ndarray]], bool]:
    """The sound and the latents of a prompt, patch by patch, and whether the model ended it."""
    tokens = [token(*parts) for parts in zip(*prompt.arrays, strict=True)]
    last, vae, sounds = prompt.patches[-1], np.zeros(VAE, np.float32), []
    for patch in prompt.context:
        vae = decoded(patch, vae)[1]
    for number in range(limit):
        state = held_state(np.array(tokens))
        patch = first_patch(state, last, seed, number, temperature)
        for _ in range(2):
            patch = solved(patch, guidance)
        sound, vae = decoded(patch, vae)
        sounds.append((sound, patch))
        tokens.append(np.float32(patch.sum()))
        last = patch
        if stops(state) and number >= 3:
            return sounds, True
    return sounds, False


# The same as engines over all rows.


def prefill(tensors: Tensors) -> Tensors:
    table, ids, is_audio, patches, row, start, first, count, cache, *states = [t.numpy() for t in tensors]
    tokens = [token(*parts) for parts in zip(ids, is_audio, patches, strict=True)][: count[0]]
    begin, end = int(start[0] + first[0]), int(start[0] + first[0] + count[0])
    assert (table == TABLE).all()
    cache[:, begin:end, 0] = tokens
    _keep(row[0], cache[0, start[0] : end, 0], patches[count[0] - 1], states)
    return [torch.zeros(1)]


def begin(tensors: Tensors) -> Tensors:
    rows, seeds, numbers, temperature, base, last = [t.numpy() for t in tensors]
    parts = zip(rows, seeds, numbers, temperature, strict=True)
    patches = [first_patch(base[r], last[r], int(s), int(n), float(h)) for r, s, n, h in parts]
    flags = [stops(base[row]) for row in rows]
    logits = np.zeros((len(rows), 2), np.float32)
    return [
        torch.from_numpy(np.stack(patches)),
        torch.tensor(flags, dtype=torch.uint8),
        torch.from_numpy(logits),
    ]


def solve(tensors: Tensors) -> Tensors:
    patches, guidance = [t.numpy() for t in tensors]
    return [torch.from_numpy(np.stack([solved(p, float(g)) for p, g in zip(patches, guidance, strict=True)]))]


def advance(tensors: Tensors) -> Tensors:
    patches, rows, starts, first, cache, *states = [t.numpy() for t in tensors]
    for patch, row, start, position in zip(patches, rows, starts, first, strict=True):
        end = int(start + position)
        cache[:, end, 0] = patch.sum()
        _keep(row, cache[0, start : end + 1, 0], patch, states)
    return [torch.zeros(1)]


def decode(tensors: Tensors) -> Tensors:
    patches, rows, vae = [t.numpy() for t in tensors]
    samples = []
    for patch, row in zip(patches, rows, strict=True):
        sound, vae[row] = decoded(patch, vae[row])
        samples.append(sound)
    return [torch.from_numpy(np.stack(samples))]


def voice(tensors: Tensors) -> Tensors:
    samples, state = [t.numpy() for t in tensors]
    latents = np.cumsum(samples[0].reshape(-1, VOICE.patch_samples // P).sum(1)) + state[0, 0]
    state[0, 0] = latents[-1]
    return [torch.from_numpy(latents.astype(np.float32).reshape(1, -1, C))]


def _keep(row: int, cached: np.ndarray, patch: np.ndarray, states: Sequence[np.ndarray]) -> None:
    base, residual, last = states
    base[row], residual[row], last[row] = held_state(cached), cached.sum(), patch


@dataclass(frozen=True)
class Engine:
    """An engine of the toy: what it runs, the buffers it takes, and what it gives."""

    run: Callable[[Tensors], Tensors]
    taken: tuple[str, ...]
    results: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    bucket: int = 0


def engines(buckets: tuple[int, ...] = BUCKETS) -> dict[str, Engine]:
    """The engines by name, which is also that of the program with a call of it alone."""
    prompt = ("table", c.IDS, c.IS_AUDIO, c.PROMPT_PATCHES)
    of_one_row = (c.PREFILL_ROWS, c.PREFILL_STARTS, c.PREFILL_FIRST, c.PREFILL_COUNT)
    cached = ("k", *STATE_NAMES)
    by_name = {
        c.LEAD_IN: Engine(
            decode, (c.LEAD_IN_PATCH, c.PREFILL_ROWS, c.VAE_STATES), (c.LEAD_IN_SAMPLES,), (c.VAE_STATES,)
        ),
        c.VOICE_PROGRAM: Engine(voice, (c.VOICE, c.VOICE_STATES), (c.VOICE_LATENTS,), (c.VOICE_STATES,)),
    }
    for tokens in PREFILL_TOKENS:
        for length in READ_LENGTHS:
            name = c.prefill_program(tokens, length)
            by_name[name] = Engine(prefill, (*prompt, *of_one_row, *cached), (), cached, tokens)
    for rows in buckets:
        for length in READ_LENGTHS:
            first, solver, later, last = c.step_programs(rows, length)
            drawn = (c.ROWS, c.SEEDS, c.PATCH_NUMBERS, c.TEMPERATURE, c.BASE_STATE, c.LAST_PATCH)
            by_name[first] = Engine(begin, drawn, (c.PATCH, c.STOP, c.STOP_LOGITS), (), rows)
            by_name[solver] = Engine(solve, (c.PATCH, c.GUIDANCE), (c.PATCH,), (), rows)
            placed = (c.PATCH, c.ROWS, c.STARTS, c.FIRST, *cached)
            by_name[later] = Engine(advance, placed, (), cached, rows)
            by_name[last] = Engine(
                decode, (c.PATCH, c.ROWS, c.VAE_STATES), (c.SAMPLES,), (c.VAE_STATES,), rows
            )
    return by_name


def manifest(buckets: tuple[int, ...] = BUCKETS, **changes: Any) -> SpeechManifest:
    """The toy's manifest; ``changes`` replace whole fields."""
    whole = {"k", *STATE_NAMES, c.VAE_STATES}
    specs, programs = [], {}
    shapes = SHAPES | {
        name: ((buckets[-1], *shape[1:]), dtype, role, axis)
        for name, (shape, dtype, role, axis) in SHAPES.items()
        if shape[0] == BUCKETS[-1] and role in ("host", "state")
    }
    alone_of = {c.PREFILL_ROWS, c.PREFILL_STARTS, c.PREFILL_FIRST, c.PREFILL_COUNT}

    def argument(name: str, bucket: int) -> tuple[TensorSpec, str]:
        if name == "table":
            return TensorSpec(name, TABLE.shape, "float32"), f"weight:{name}"
        shape, dtype, _, _ = shapes[name]
        if bucket and name not in whole | alone_of:
            return TensorSpec(name, (bucket, *shape[1:]), dtype), f"buffer:{name}[bucket]"
        return TensorSpec(name, shape, dtype), f"buffer:{name}"

    for name, engine in engines(buckets).items():
        taken = [argument(spec, engine.bucket) for spec in engine.taken]
        results = [argument(spec, engine.bucket) for spec in engine.results]
        results = results or [(TensorSpec("done", (1,), "float32"), "value:done")]
        file = f"engines/{name}.pt2"
        specs.append(
            EngineSpec(name, file, tuple(s for s, _ in taken), tuple(s for s, _ in results), engine.writes)
        )
        programs[name] = (Call(name, tuple(r for _, r in taken), tuple(r for _, r in results)),)
    pool_bytes = 4 * 2 * PLACES
    fields: dict[str, Any] = {
        "name": "toy-speech",
        "backend": "aoti",
        "target": Target("cpu", "x86_64", torch.__version__.split("+")[0]),
        "workload": SpeechWorkload(
            kind=KIND,
            positions=READ_LENGTHS[-1],
            places=PLACES,
            read_lengths=READ_LENGTHS,
            step_lengths=READ_LENGTHS,
            prefill_tokens=PREFILL_TOKENS,
            vocabulary=VOCABULARY,
            patch=PATCH,
            voice=VOICE,
            solver=Solver(steps=3, moving_steps=2, guidance=2.0),
            kv=KvPool("exact", pool_bytes, pool_bytes // 2, 32.0),
            marks=MARKS,
            limits=SpeechLimits(further_patches=6, patches_a_token=1, most_patches=20),
        ),
        "state_rows": SESSIONS + 1,
        "pool": Pool(buckets),
        "buffers": tuple(
            Buffer(name, shape, dtype, role, row_axis=axis)
            for name, (shape, dtype, role, axis) in shapes.items()
        ),
        "weights": (Weight("table", TABLE.shape, "float32"),),
        "engines": tuple(specs),
        "programs": programs,
    }
    return SpeechManifest(**{**fields, **changes})


@dataclass
class Tokens:
    """A tokenizer: a letter's token is its place in the alphabet; all other characters have one token."""

    asked: list[str] = field(default_factory=list)

    def ids(self, text: str) -> np.ndarray:
        self.asked.append(text)
        return np.array([ord(letter) - ord("a") if "a" <= letter <= "z" else 26 for letter in text], np.int64)


def resolved(of: SpeechManifest) -> Programs:
    """The programs, as they are checked when an artifact is opened."""
    return c.resolve_speech(of)


def open_pool(
    memory: Memory | None = None,
    *,
    buckets: tuple[int, ...] = BUCKETS,
    wrap: Callable[[str, Callable[[Tensors], Tensors]], Callable[[Tensors], Tensors]] = lambda _, run: run,
    **more: Any,
) -> SpeechPool:
    """A pool of the toy; ``wrap`` takes an engine's name and the engine."""
    of = manifest(buckets)
    own = CpuMemory() if memory is None else memory
    runs = {name: wrap(name, engine.run) for name, engine in engines(buckets).items()}
    loaded = Loaded(of, resolved(of), runs, {"table": torch.from_numpy(TABLE)}, lambda: own, Tokens())
    return SpeechPool(open_speech_rows(loaded), **{"digest": "d", **more})


# The toy as a folder.

TOKENIZER, WEIGHTS, GOLDEN_FILE = "text/tokenizer.json", "weights/0.safetensors", "golden/golden.safetensors"
GOLDEN = Golden(GOLDEN_FILE, seeds=(3, 5), steps=6, bounds=GoldenBounds(1e-6, 1e-6, 1e-6, 1e-6, 1e-6))


def tokenizer_json() -> bytes:
    """A tokenizer of letters, as `Tokens`."""
    letters = {chr(ord("a") + number): number for number in range(26)} | {"?": 26}
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    table = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": letters, "unk_token": "?"},
    }
    return json.dumps(table).encode()


def golden_tensors() -> dict[str, np.ndarray]:
    """What the model makes of a prompt, for the seeds of `GOLDEN`."""
    prompt = assemble(
        Tokens().ids("hallo"), (P, C), continued=np.full((2, P, C), 0.2, np.float32), marks=MARKS
    )
    names = (c.BASE_STATE, c.RESIDUAL_STATE, c.LAST_PATCH, "patches", "samples")
    recorded: dict[str, list[list[np.ndarray]]] = {name: [] for name in names}
    for seed in GOLDEN.seeds:
        tokens = [token(*parts) for parts in zip(*prompt.arrays, strict=True)]
        last, vae = prompt.patches[-1], np.zeros(VAE, np.float32)
        for patch in prompt.context:
            vae = decoded(patch, vae)[1]
        of_row: dict[str, list[np.ndarray]] = {name: [] for name in names}
        for number in range(GOLDEN.steps + 1):
            state = held_state(np.array(tokens))
            residual = np.full(STATE, np.array(tokens, np.float32).sum())
            for name, array in zip(names[:3], (state, residual, last), strict=True):
                of_row[name].append(array)
            if number == GOLDEN.steps:
                break
            patch = solved(solved(first_patch(state, last, seed, number, 1.0), 2.0), 2.0)
            sound, vae = decoded(patch, vae)
            of_row["patches"].append(patch)
            of_row["samples"].append(sound)
            tokens.append(np.float32(patch.sum()))
            last = patch
        for name, arrays in of_row.items():
            recorded[name].append(arrays)
    tensors = {
        name: np.stack([np.stack(row) for row in rows], 1).astype(np.float32)
        for name, rows in recorded.items()
    }
    sound = np.arange(3 * VOICE.samples, dtype=np.float32) / 16
    latents = np.cumsum(sound.reshape(-1, VOICE.patch_samples // P).sum(1)).astype(np.float32)
    return tensors | {
        "prompt.ids": prompt.ids,
        "prompt.is_audio": prompt.is_audio.astype(np.uint8),
        "prompt.patches": prompt.patches,
        "stop_logits": np.zeros((GOLDEN.steps, len(GOLDEN.seeds), 2), np.float32),
        "voice.samples": sound.reshape(3, -1),
        "voice.latents": latents.reshape(3, -1, C),
    }


class ToyBackend:
    """`seko_runtime.backends.base.Backend` over the toy's engines; engine files are not looked at."""

    def memory(self) -> Memory:
        return CpuMemory()

    def load_engines(self, of: SpeechManifest, files: Mapping[str, memoryview]) -> Mapping[str, Any]:
        assert {engine.file for engine in of.engines} <= set(files)
        return {name: engine.run for name, engine in engines(of.buckets).items()}

    def stats(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        pass


def write_artifact(folder: Path, **changes: np.ndarray) -> Path:
    """Write the toy as an artifact; ``changes`` replace recorded tensors, whose first dot is an underscore."""
    of = manifest()
    for engine in of.engines:
        path = folder / engine.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"a stand-in for " + engine.name.encode())
    toy.write_safetensors(folder / WEIGHTS, {"table": TABLE})
    recorded = golden_tensors() | {name.replace("_", ".", 1): array for name, array in changes.items()}
    toy.write_safetensors(folder / GOLDEN_FILE, recorded)
    (folder / TOKENIZER).parent.mkdir()
    (folder / TOKENIZER).write_bytes(tokenizer_json())
    of = replace(
        of,
        workload=replace(of.workload, tokenizer=TOKENIZER, golden=GOLDEN),
        weights=(Weight("table", TABLE.shape, "float32", WEIGHTS),),
        files=toy.file_entries(folder),
    )
    (folder / "manifest.json").write_bytes(manifest_json(of))
    return check_manifest(folder)
