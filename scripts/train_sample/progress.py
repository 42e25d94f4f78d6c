"""What every training run shares: its state on disk, EMA, clock and learning rate, loss log and curve.

State is safetensors and JSON, never pickle. Run as a script it packs a run for the way between two machines, in
bfloat16: EMA alone of a finished one, else EMA, weights and second moments (6 bytes a parameter; first moments are
forgotten within ten steps anyway).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tarfile
import tempfile
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

STATE = "state"  # folder in a run's folder
FACTS = "state.json"
LOSSES = "losses.jsonl"
CURVE = "curve.png"
_MOMENTS = {
    "first_moments": "exp_avg",
    "second_moments": "exp_avg_sq",
    "steps": "step",
}  # file -> AdamW's name
BETAS = (0.9, 0.98)
WARMUP_STEPS = 100
LONGEST_STEP = 2.0  # seconds that a step may count of the budget: compiling and saving are no training


@dataclass(frozen=True)
class Budget:
    """How long a run lasts in all, and when this process must stop.

    Parameters
    ----------
    minutes : float
        Of training in all, over every process that resumes the run; the learning rate follows it.
    deadline : float
        `time.time()` at which to save and stop; infinity for none.
    steps : int or None
        An end in steps, for rehearsals: then the clock does not count and results repeat.
    save_every : float
        Seconds between saves.
    """

    minutes: float = 1.0
    deadline: float = math.inf
    steps: int | None = None
    save_every: float = 60.0

    def share(self, step: int, seconds: float) -> float:
        """Return how much of the run is done, 0..1."""
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
        budget: Budget,
        *,
        resume: bool,
        also: nn.Module | None = None,
    ) -> None:
        self.folder, self.module, self.also, self.budget = folder, module, also, budget
        self.learning_rate, self.ema_decay = learning_rate, ema_decay
        self.parameters = dict(module.named_parameters())
        self.ema = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.optimizer = adamw(self.parameters.values(), learning_rate)
        self.step, self.seconds, self.finished = 0, 0.0, False
        self.facts: dict[str, Any] = {}
        state = newest_state(folder)
        if state is not None and not resume:
            raise FileExistsError(f"{folder} holds a run already; pass --resume to go on, or another folder")
        folder.mkdir(parents=True, exist_ok=True)
        if state is not None:
            self._load(state)
        ranks.equalise(self._tensors())
        self._mark = self._saved = time.monotonic()

    def steps(self) -> Iterator[int]:
        """Yield step numbers until the run is finished or its time is up; saves on the way and at the end."""
        self._mark = self._saved = time.monotonic()
        (late,) = ranks.agree(time.time() >= self.budget.deadline)
        self.facts["ranks"] = max(ranks.world(), self.facts.get("ranks", 1))
        while not self.finished and not late:
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate()
            yield self.step
            self.step += 1
            now = time.monotonic()
            spent, self._mark = min(now - self._mark, LONGEST_STEP), now
            self.seconds, late = ranks.agree(self.seconds + spent, time.time() >= self.budget.deadline)
            self.finished = self.budget.share(self.step, self.seconds) >= 1
            if now - self._saved > self.budget.save_every:
                self.save()
        self.save()
        ranks.require_equal(self._tensors())

    def rate(self) -> float:
        """Return the learning rate now: warm-up, then a cosine down to a twentieth."""
        share = self.budget.share(self.step, self.seconds)
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share))
        return self.learning_rate * cosine * min(1.0, (self.step + 1) / WARMUP_STEPS)

    def descend(self, loss: Tensor) -> None:
        """Take one step down the loss; EMA follows."""
        descend(loss, self.optimizer, self.parameters.values())
        decay = min(self.ema_decay, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.ema.values()), list(self.parameters.values()), 1 - decay)

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
        moments = self.optimizer.state
        groups = {
            "weights": {name: p.detach() for name, p in self.parameters.items()},
            "ema": self.ema,
            **{
                group: {n: moments[p][key] for n, p in self.parameters.items() if p in moments}
                for group, key in _MOMENTS.items()
            },
        }
        if self.also is not None:
            groups["fake"] = {name: p.detach() for name, p in self.also.named_parameters()}
        facts = {"step": self.step, "seconds": self.seconds, "finished": self.finished, "facts": self.facts}
        write_state(self.folder, groups, facts)
        draw_curve(self.folder)
        self._saved = time.monotonic()

    def _tensors(self) -> list[Tensor]:
        """Return all that is equal on every rank, float32; second networks' moments start anew and stay equal, too."""
        also = [] if self.also is None else list(self.also.parameters())
        moments = [self.optimizer.state[p] for p in self.parameters.values() if p in self.optimizer.state]
        held = [state[name] for state in moments for name in _MOMENTS.values()]
        return [*self.parameters.values(), *self.ema.values(), *also, *held]

    def _load(self, state: Path) -> None:
        facts = json.loads((state / FACTS).read_text(encoding="utf-8"))
        self.step, self.seconds = facts["step"], facts["seconds"]
        self.finished, self.facts = facts["finished"], facts["facts"]
        fill(self.ema, load_file(state / "ema.safetensors"))
        weights = state / "weights.safetensors"
        fill(self.parameters, load_file(weights) if weights.exists() else self.ema)
        if self.also is not None and not self.finished:
            fill(dict(self.also.named_parameters()), load_file(state / "fake.safetensors"))
        # A state that travelled lacks some of these: they start anew. Steps are each parameter's own: one that had
        # no gradient yet (pictures use no time convolution) counts fewer.
        firsts, seconds, steps = (
            load_file(path) if (path := state / f"{name}.safetensors").exists() else {} for name in _MOMENTS
        )
        for name, p in self.parameters.items():
            if name in seconds:
                moments = [torch.zeros_like(p) for _ in range(2)]
                for moment, values in zip(moments, (firsts, seconds), strict=True):
                    moment.copy_(values.get(name, moment))
                step = steps.get(name, torch.tensor(float(self.step))).to(p.device if p.is_cuda else "cpu")
                self.optimizer.state[p] = {"exp_avg": moments[0], "exp_avg_sq": moments[1], "step": step}


def adamw(parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.AdamW:
    """Return the optimiser of every run; one fused kernel on a GPU."""
    parameters = list(parameters)
    return torch.optim.AdamW(
        parameters, lr=learning_rate, betas=BETAS, weight_decay=0.01, fused=parameters[0].is_cuda
    )


def descend(loss: Tensor, optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Take one step down a loss, the mean of its gradient over the ranks clipped to norm 1."""
    parameters = list(parameters)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    ranks.mean_gradients(parameters)
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


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


def pack(source: Path, goal: Path) -> dict[str, int]:
    """Pack a run in bfloat16 for a transfer, each group of tensors as one tar: unpacked together they resume.

    A finished run travels as its EMA alone. Logs and facts go with the EMA.

    Returns
    -------
    dict of str to int
        Bytes of each file.
    """
    state = newest_state(source)
    if state is None:
        raise FileNotFoundError(f"{source} holds no training state; run that stage first")
    facts = state / FACTS
    finished = json.loads(facts.read_text(encoding="utf-8"))["finished"]
    there = {path.stem for path in state.glob("*.safetensors")}
    # Beside a fake score the student's EMA is near enough to its weights: a call's files must stay below 64 MiB.
    unfinished = ["ema", "fake"] if "fake" in there else ["ema", "weights", "second_moments"]
    groups = ["ema"] if finished else unfinished
    goal.mkdir(parents=True, exist_ok=True)
    for old in goal.glob(f"{source.name}.*.tar"):
        old.unlink()
    sizes = {}
    for name in groups:
        path = goal / f"{source.name}.{name}.tar"
        with tempfile.TemporaryDirectory() as folder, tarfile.open(path, "w") as tar:
            tensors = {n: t.bfloat16() for n, t in load_file(state / f"{name}.safetensors").items()}
            save_file(tensors, Path(folder, name))
            tar.add(Path(folder, name), f"{STATE}/{name}.safetensors")
            if name == "ema":
                tar.add(facts, f"{STATE}/{FACTS}")
                for log in (LOSSES, CURVE):
                    if (source / log).exists():
                        tar.add(source / log, log)
        sizes[path.name] = path.stat().st_size
    return sizes


def unpack(source: Path, goal: Path) -> None:
    """Unpack what `pack` made of the run that ``goal`` is named after; does nothing if there is none."""
    for path in sorted(source.glob(f"{goal.name}.*.tar")):
        with tarfile.open(path) as tar:
            tar.extractall(goal, filter="data")


def draw_curve(folder: Path) -> None:
    """Draw the loss log as curve.png, every number but the clock in its own colour, smoothed."""
    path = folder / LOSSES
    if not path.exists():
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = sorted({name for line in lines for name in line} - {"step", "seconds", "rate"})
    figure, axes = plt.subplots(figsize=(7, 4))
    for name in names:
        points = [(line["step"], line[name]) for line in lines if name in line]
        smooth, kept = [], points[0][1]
        for _, value in points:
            kept += 0.1 * (value - kept)
            smooth.append(kept)
        axes.plot([step for step, _ in points], smooth, label=name, linewidth=1)
    axes.set(xlabel="step", title=folder.name, yscale="log")
    axes.legend(fontsize=8)
    figure.savefig(folder / CURVE, dpi=110, bbox_inches="tight")
    plt.close(figure)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add what every training script takes."""
    parser.add_argument("--folder", type=Path, required=True, help="of the run: state, losses, curve")
    parser.add_argument("--minutes", type=float, default=5.0, help="training in all, over every resume")
    parser.add_argument(
        "--deadline", type=float, default=math.inf, help="epoch seconds at which to save and stop"
    )
    parser.add_argument("--steps", type=int, help="an end in steps instead of minutes, for rehearsals")
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument(
        "--batch-scale", type=float, default=1.0, help="multiplies each batch; every rank has one of its own"
    )
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile, layer by layer; pays from a minute on"
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes: try the whole chain on a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def budget_of(options: argparse.Namespace) -> Budget:
    """Return the budget that `add_run_options` asked for."""
    return Budget(options.minutes, options.deadline, options.steps, options.save_every)


def scaled(batch: int, options: argparse.Namespace) -> int:
    """Return a batch times ``--batch-scale``, at least 1."""
    scale: float = options.batch_scale
    return max(1, round(batch * scale))


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


def main(arguments: list[str] | None = None) -> int:
    """Pack a run for a transfer, or unpack one."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("action", choices=("pack", "unpack"))
    parser.add_argument("run", type=Path, help="folder of the run; its name names the files")
    parser.add_argument("files", type=Path, help="folder of the packed files")
    options = parser.parse_args(arguments)
    if options.action == "pack":
        print(json.dumps({"packed": pack(options.run, options.files)}))
    else:
        unpack(options.files, options.run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
