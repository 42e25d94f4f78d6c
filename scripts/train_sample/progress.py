"""What every training run shares: its state on disk, EMA, clock and learning rate, loss log.

State is safetensors and JSON, never pickle. A run has legs: each a learning rate that warms up and falls to a
twentieth. The first begins with the run; ``--more`` begins another behind a finished one, from its EMA. What takes the
step is in `optimizers.py`, travel between machines in `packing.py`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scripts.train_sample import ranks
from scripts.train_sample.curve import draw_curve
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
WARMUP_STEPS = 100  # of each leg
# Seconds that a step may count of the budget: compiling, capturing and saving are no training. The first steps of a
# process compile and capture each layout; to count them in full would take a tenth of a short run.
LONGEST_STEP, LONGEST_FIRST_STEP, FIRST_STEPS = 2.0, 0.2, 15


class LegError(ValueError):
    """What was asked for does not go with the leg that a run stands in."""


@dataclass(frozen=True)
class Budget:
    """How long a run lasts in all, and when this process must stop.

    Parameters
    ----------
    minutes : float
        Of training in all, over every process that resumes the run; the learning rate follows it. With ``more``, of
        the newest leg.
    deadline : float
        `time.time()` at which to save and stop; infinity for none.
    steps : int or None
        An end in steps, for rehearsals: then the clock does not count and results repeat.
    save_every : float
        Seconds between saves.
    more : bool
        True: begin a new leg behind a finished run, or go on with one that was stopped.
    """

    minutes: float = 1.0
    deadline: float = math.inf
    steps: int | None = None
    save_every: float = 60.0
    more: bool = False

    def share(self, step: int, seconds: float) -> float:
        """Return how much is done, 0..1, of what began at 0."""
        done = step / self.steps if self.steps is not None else seconds / (60 * self.minutes)
        return min(1.0, done)


class Run:
    """A training run in a folder: parameters, AdamW, EMA; resumes where the folder stands.

    Of several ranks each holds one, equal from the start; the clock and the files are rank 0's.

    Parameters
    ----------
    folder : Path
        Of the run: ``state/``, ``losses.jsonl``, ``curve.png``.
    module : nn.Module
        Whose parameters are trained, in float32; shared ones count once.
    learning_rate, ema_decay : float
        Peak rate; share that EMA keeps of itself a step.
    budget : Budget
        When to end.
    resume : bool
        True: go on from the folder's state if there is one. False: refuse a folder that has one.
    also : nn.Module or None
        A second network that is trained beside the first (the fake score), saved but without EMA or moments.
    optimizer : str
        One of `optimizers.OPTIMIZERS`. Moments of another one in the folder are left: they start anew.
    on_device : bool
        Whether learning rate and EMA's share are read on the device, so that a CUDA graph can hold `descend`.

    Raises
    ------
    FileExistsError
        If there is a state and ``resume`` is False.
    LegError
        If ``budget.more`` does not go with where the run stands.
    """

    def __init__(
        self,
        folder: Path,
        module: nn.Module,
        learning_rate: float,
        ema_decay: float,
        budget: Budget,
        *,
        resume: bool,
        also: nn.Module | None = None,
        optimizer: str = "adamw",
        on_device: bool = False,
    ) -> None:
        self.folder, self.module, self.also, self.budget = folder, module, also, budget
        self.learning_rate, self.ema_decay = learning_rate, ema_decay
        self.parameters = dict(module.named_parameters())
        self.ema = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.optimizers = make_optimizers(optimizer, self.parameters, learning_rate, on_device=on_device)
        device = next(iter(self.parameters.values())).device
        self._ema_share = (
            torch.zeros((), device=device) if on_device else None
        )  # that a step gives the weights
        self.step, self.seconds, self.finished = 0, 0.0, False
        self.facts: dict[str, Any] = {}
        state = newest_state(folder)
        if state is not None and not resume:
            raise FileExistsError(f"{folder} holds a run already; pass --resume to go on, or another folder")
        folder.mkdir(parents=True, exist_ok=True)
        if state is not None:
            self._load(state)
        self._enter_leg()
        ranks.equalise(self._tensors())
        self._mark = self._saved = time.monotonic()

    def steps(self) -> Iterator[int]:
        """Yield step numbers until the run is finished or its time is up; saves on the way and at the end."""
        self._mark = self._saved = time.monotonic()
        (late,) = ranks.agree(time.time() >= self.budget.deadline)
        self.facts["ranks"] = max(ranks.world(), self.facts.get("ranks", 1))
        self.leg["ranks"] = max(ranks.world(), self.leg["ranks"])
        first = self.step
        while not self.finished and not late:
            set_rate(self.optimizers, self.rate())
            if self._ema_share is not None:
                self._ema_share.fill_(1 - self._ema_keeps())
            yield self.step
            self.step += 1
            now = time.monotonic()
            longest = LONGEST_STEP if self.step - first > FIRST_STEPS else LONGEST_FIRST_STEP
            spent, self._mark = min(now - self._mark, longest), now
            self.seconds, late = ranks.agree(self.seconds + spent, time.time() >= self.budget.deadline)
            self.finished = self.share() >= 1
            if now - self._saved > self.budget.save_every:
                self.save()
        self.save()
        ranks.require_equal(self._tensors())

    @property
    def leg(self) -> dict[str, Any]:
        """The newest leg's facts: ``first_step``, ``first_seconds``, ``steps``, ``minutes``, ``ranks``, ``rate``."""
        newest: dict[str, Any] = self.facts["legs"][-1]
        return newest

    def share(self) -> float:
        """Return how much of the leg is done, 0..1."""
        return self.budget.share(self.step - self.leg["first_step"], self.seconds - self.leg["first_seconds"])

    def rate(self) -> float:
        """Return the learning rate now: warm-up, then a cosine down to a twentieth."""
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * self.share()))
        taken = self.step - int(self.leg["first_step"])
        return self.learning_rate * cosine * min(1.0, (taken + 1) / WARMUP_STEPS)

    def descend(self, loss: Tensor) -> None:
        """Take one step down the loss; EMA follows."""
        descend(loss, self.optimizers, self.parameters.values())
        ema: list[Tensor] = list(self.ema.values())
        weights: list[Tensor] = list(self.parameters.values())
        with torch.no_grad():
            if self._ema_share is None:
                torch._foreach_lerp_(ema, weights, 1 - self._ema_keeps())
                return
            # lerp takes no single tensor as its weight.
            missing = torch._foreach_sub(weights, ema)
            torch._foreach_mul_(missing, self._ema_share)
            torch._foreach_add_(ema, missing)

    def log(self, every: int = 20, turns: int = 1, **numbers: Tensor | float) -> None:
        """Append to the loss log, ``turns`` lines each ``every * turns`` steps: reading a loss waits for the device."""
        if self.step // turns % every or not ranks.is_first():
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
        """Write the whole state, atomically: a killed save leaves the one before. Rank 0 writes it for all."""
        if not ranks.is_first():
            return
        moments = {name: moments_of(self.optimizers, p) for name, p in self.parameters.items()}
        groups = {
            "weights": {name: p.detach() for name, p in self.parameters.items()},
            "ema": self.ema,
            **{
                group: {name: held[key] for name, held in moments.items() if key in held}
                for group, key in _MOMENTS.items()
            },
        }
        leg = self.leg
        leg["steps"] = self.step - leg["first_step"]
        leg["minutes"] = round((self.seconds - leg["first_seconds"]) / 60, 3)
        if self.also is not None:
            groups["fake"] = {name: p.detach() for name, p in self.also.named_parameters()}
        facts = {"step": self.step, "seconds": self.seconds, "finished": self.finished, "facts": self.facts}
        write_state(self.folder, groups, facts)
        draw_curve(self.folder / LOSSES)
        self._saved = time.monotonic()

    def _tensors(self) -> list[Tensor]:
        """Return all that is equal on every rank, float32; second networks' moments start anew and stay equal, too."""
        also = [] if self.also is None else list(self.also.parameters())
        moments = [moments_of(self.optimizers, p) for p in self.parameters.values()]
        held = [state[key] for state in moments for key in _MOMENTS.values() if key in state]
        return [*self.parameters.values(), *self.ema.values(), *also, *held]

    def _ema_keeps(self) -> float:
        return min(self.ema_decay, (self.step + 1) / (self.step + 10))

    def _enter_leg(self) -> None:
        """Begin a leg where there is none or a finished one goes on; refuse what would change a leg's length."""
        legs = self.facts.setdefault("legs", [])
        if not legs and self.step:  # a state from before there were legs
            told = {"steps": self.step, "minutes": round(self.seconds / 60, 3)}
            legs.append({"first_step": 0, "first_seconds": 0.0, "ranks": self.facts.get("ranks", 1), **told})
        if self.budget.more and not self.finished and len(legs) < 2:
            raise LegError(
                f"--more goes on behind a finished run, {self.folder} holds none; finish it with --minutes first"
            )
        if not self.budget.more and not self.finished and len(legs) > 1:
            raise LegError(f"{self.folder} was stopped in leg {len(legs)}; go on with --more, not --minutes")
        if legs and not (self.finished and self.budget.more):
            return
        begun = {"first_step": self.step, "first_seconds": self.seconds, "steps": 0, "minutes": 0.0}
        legs.append({**begun, "ranks": 1, "rate": self.learning_rate})
        self.finished = False

    def _load(self, state: Path) -> None:
        facts = json.loads((state / FACTS).read_text(encoding="utf-8"))
        self.step, self.seconds = facts["step"], facts["seconds"]
        self.finished, self.facts = facts["finished"], facts["facts"]
        fill(self.ema, load_file(state / "ema.safetensors"))
        weights, fake = state / "weights.safetensors", state / "fake.safetensors"
        anew = self.finished and self.budget.more  # a new leg begins from EMA, without moments
        fill(self.parameters, load_file(weights) if weights.exists() and not anew else self.ema)
        if self.also is not None and (not self.finished or fake.exists()):
            fill(dict(self.also.named_parameters()), load_file(fake))
        if anew:
            return
        # A state that travelled lacks some of these: they start anew. Steps are each parameter's own: one that had
        # no gradient yet (pictures use no time convolution) counts fewer.
        firsts, seconds, steps, momenta = (
            load_file(path) if (path := state / f"{name}.safetensors").exists() else {} for name in _MOMENTS
        )
        adamw = self.optimizers[0]
        trained = {p for group in adamw.param_groups for p in group["params"]}
        for name, p in self.parameters.items():
            if p not in trained and name in momenta:
                moments_of(self.optimizers, p)["momentum_buffer"].copy_(momenta[name])
            if p in trained and name in seconds:
                moments = [torch.zeros_like(p) for _ in range(2)]
                for moment, values in zip(moments, (firsts, seconds), strict=True):
                    moment.copy_(values.get(name, moment))
                step = steps.get(name, torch.tensor(float(self.step))).to(p.device if p.is_cuda else "cpu")
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
    """Return a rank's generator of one step: a resumed run draws what the unbroken one would have drawn."""
    return torch.Generator(device).manual_seed(seed * 1_000_003 + step + ranks.seed_offset())


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
