"""The state that every training run has: files on disk, EMA, learning rate, loss log.

State is safetensors and JSON, never pickle. The learning rate warms up, then falls to a twentieth until the last step.
What takes the step is in `optimizers.py`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scripts.train_sample.optimizers import descend, make_optimizers, moments_of, set_rate

STATE = "state"  # folder in a run's folder
FACTS = "state.json"
LOSSES = "losses.jsonl"
# file -> the optimiser's name: three of AdamW's, one of Muon's
_MOMENTS = {
    "first_moments": "exp_avg",
    "second_moments": "exp_avg_sq",
    "steps": "step",
    "momenta": "momentum_buffer",
}
WARMUP_STEPS = 100
SAVE_EVERY = 60.0  # seconds


class Run:
    """A training run in a folder: parameters, optimisers, EMA; resumes where the folder stands.

    Parameters
    ----------
    folder : Path
        Of the run: ``state/``, ``losses.jsonl``.
    module : nn.Module
        Whose parameters are trained, in float32; shared ones count once.
    learning_rate, ema_decay : float
        Peak rate; share that EMA keeps of itself a step.
    steps : int
        Of the run in all, over every process that resumes it; the learning rate follows them.
    resume : bool
        True: go on from the folder's state if there is one. False: refuse a folder that has one.
    also : nn.Module or None
        A second network that is trained beside the first (the fake score), saved but without EMA or moments.
    optimizer : str
        One of `optimizers.OPTIMIZERS`. Moments of another one in the folder are left: they start anew.
    save_every : float
        Seconds between saves.

    Raises
    ------
    FileExistsError
        If there is a state and ``resume`` is False.
    """

    def __init__(
        self,
        folder: Path,
        module: nn.Module,
        learning_rate: float,
        ema_decay: float,
        steps: int,
        *,
        resume: bool,
        also: nn.Module | None = None,
        optimizer: str = "adamw",
        save_every: float = SAVE_EVERY,
    ) -> None:
        self.folder, self.module, self.also = folder, module, also
        self.learning_rate, self.ema_decay = learning_rate, ema_decay
        self.last_step, self.save_every = steps, save_every
        self.parameters = dict(module.named_parameters())
        self.ema = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.optimizers = make_optimizers(optimizer, self.parameters, learning_rate)
        self.step, self.seconds = 0, 0.0
        self.facts: dict[str, Any] = {}
        state = newest_state(folder)
        if state is not None and not resume:
            raise FileExistsError(f"{folder} holds a run already; pass --resume to go on, or another folder")
        folder.mkdir(parents=True, exist_ok=True)
        if state is not None:
            self._load(state)

    @property
    def finished(self) -> bool:
        """Whether all steps are taken."""
        return self.step >= self.last_step

    def steps(self) -> Iterator[int]:
        """Yield step numbers until the run is finished; saves on the way and at the end."""
        mark = saved = time.monotonic()
        while not self.finished:
            set_rate(self.optimizers, self.rate())
            yield self.step
            self.step += 1
            now = time.monotonic()
            self.seconds, mark = self.seconds + now - mark, now
            if now - saved > self.save_every:
                self.save()
                saved = time.monotonic()
        self.save()

    def share(self) -> float:
        """Return how much of the run is done, 0..1."""
        return min(1.0, self.step / self.last_step)

    def rate(self) -> float:
        """Return the learning rate now: warm-up, then a cosine down to a twentieth."""
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * self.share()))
        return self.learning_rate * cosine * min(1.0, (self.step + 1) / WARMUP_STEPS)

    def descend(self, loss: Tensor) -> None:
        """Take one step down the loss; EMA follows."""
        descend(loss, self.optimizers, self.parameters.values())
        decay = min(self.ema_decay, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.ema.values()), list(self.parameters.values()), 1 - decay)

    def log(self, every: int = 20, turns: int = 1, **numbers: Tensor | float) -> None:
        """Append to the loss log, ``turns`` lines each ``every * turns`` steps: reading a loss waits for the device."""
        if self.step // turns % every:
            return
        line = {"step": self.step, "seconds": round(self.seconds, 2), "rate": self.rate()}
        line |= {name: float(torch.as_tensor(value).detach()) for name, value in numbers.items()}
        if not all(math.isfinite(value) for value in line.values()):
            raise FloatingPointError(
                f"a loss is not finite: {line}; lower the learning rate, resume from {self.folder}"
            )
        with (self.folder / LOSSES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def save(self) -> None:
        """Write the whole state, atomically: a killed save leaves the one before."""
        moments = {name: moments_of(self.optimizers, p) for name, p in self.parameters.items()}
        groups = {
            "weights": {name: p.detach() for name, p in self.parameters.items()},
            "ema": self.ema,
            **{
                group: {name: moment[key] for name, moment in moments.items() if key in moment}
                for group, key in _MOMENTS.items()
            },
        }
        if self.also is not None:
            groups["fake"] = {name: p.detach() for name, p in self.also.named_parameters()}
        self.facts |= {"steps": self.step, "minutes": round(self.seconds / 60, 3)}
        write_state(self.folder, groups, {"step": self.step, "seconds": self.seconds, "facts": self.facts})

    def _load(self, state: Path) -> None:
        facts = json.loads((state / FACTS).read_text(encoding="utf-8"))
        self.step, self.seconds, self.facts = facts["step"], facts["seconds"], facts["facts"]
        fill(self.ema, load_file(state / "ema.safetensors"))
        fill(self.parameters, load_file(state / "weights.safetensors"))
        if self.also is not None:
            fill(dict(self.also.named_parameters()), load_file(state / "fake.safetensors"))
        # Steps are each parameter's own: one that had no gradient yet (pictures use no time convolution) counts fewer.
        firsts, seconds, steps, momenta = (load_file(state / f"{name}.safetensors") for name in _MOMENTS)
        adamw = self.optimizers[0]
        by_adamw = {p for group in adamw.param_groups for p in group["params"]}
        for name, p in self.parameters.items():
            if p not in by_adamw and name in momenta:
                moments_of(self.optimizers, p)["momentum_buffer"].copy_(momenta[name])
            if p in by_adamw and name in seconds:
                moments = [torch.zeros_like(p) for _ in range(2)]  # in the memory order of the parameter
                for moment, values in zip(moments, (firsts, seconds), strict=True):
                    moment.copy_(values[name])
                step = steps[name].to(p.device if p.is_cuda else "cpu")
                adamw.state[p] = {"exp_avg": moments[0], "exp_avg_sq": moments[1], "step": step}


def fill(into: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy tensors by name.

    Raises
    ------
    KeyError
        If the names differ.
    """
    if set(into) != set(values):
        odd = sorted(set(into) ^ set(values))
        raise KeyError(f"state and model differ in {len(odd)} names, first {odd[:4]}; was it another config?")
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(values[name])


def newest_state(folder: Path) -> Path | None:
    """Return the folder's state, or the one before where a save was killed between its two renames."""
    for name in (STATE, f"{STATE}.before"):
        if (folder / name / FACTS).exists():
            return folder / name
    return None


def write_state(folder: Path, groups: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]) -> None:
    """Write one safetensors file a group and the facts, beside the old state, then exchange the two."""
    fresh, state, before = (folder / name for name in (f"{STATE}.fresh", STATE, f"{STATE}.before"))
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for name, tensors in groups.items():
        path = fresh / f"{name}.safetensors"
        save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    (fresh / FACTS).write_text(json.dumps(facts, indent=1, sort_keys=True), encoding="utf-8")
    if state.exists():
        shutil.rmtree(before, ignore_errors=True)
        state.rename(before)
    fresh.rename(state)
    shutil.rmtree(before, ignore_errors=True)


def read_ema(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a run's EMA as float32 and its facts.

    Raises
    ------
    FileNotFoundError
        If the folder holds no state.
    """
    state = newest_state(folder)
    if state is None:
        raise FileNotFoundError(f"{folder} holds no training state; run that stage first")
    facts = json.loads((state / FACTS).read_text(encoding="utf-8"))
    return {n: t.float() for n, t in load_file(state / "ema.safetensors").items()}, facts["facts"]


def step_generator(device: str, seed: int, step: int) -> torch.Generator:
    """Return the generator of one step: a resumed run draws what the unbroken one would have drawn."""
    return torch.Generator(device).manual_seed(seed * 1_000_003 + step)


def autocast(device: str) -> torch.autocast:
    """Return bfloat16 matmuls on a GPU, float32 on a CPU."""
    return torch.autocast(device.split(":")[0], dtype=torch.bfloat16, enabled=device.startswith("cuda"))


def compile_layers(layers: Iterable[nn.Module], wanted: bool, *, dynamic: bool = False) -> None:
    """Compile each layer in place, for static shapes or any: layers share their code, so depth costs no time."""
    if not wanted:
        return
    torch._dynamo.config.recompile_limit = 64  # one entry a layout, cache length and gradient mode
    for layer in layers:
        layer.compile(dynamic=dynamic)
